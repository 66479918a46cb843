"""Grammar text to rules: the `::=` spelling (W3C, GBNF) and the `name:` spelling (Lark).

Blanks and line breaks only separate. In the `::=` spelling a comment is `# ...` or `/* ... */`,
a literal has single or double quotes, `[...]` is a character class and `.` is any character. In the
`name:` spelling a comment is `// ...` or `# ...`, `[...]` is optional, `/.../` is a pattern, and
what shapes a syntax tree (`?rule`, `!rule`, `-> alias`) changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.structured.charset import ANY, CharSet
from deepseek_recipe.structured.regex import parse_regex
from deepseek_recipe.structured.regex_chars import Cursor, read_class, read_escape, read_plain
from deepseek_recipe.structured.tree import Chars, Node, Ref, choice, repeat, sequence

__all__ = ["MAX_COUNT", "Rule", "parse_rules"]

_MAX_CHARS = 65_536  # read in about 0.5 s
_MAX_RULES = 1_000
_MAX_DEPTH = 100
MAX_COUNT = 10_000
_OWN_RULE = "Give an inner group a rule of its own."

_BODY = r"""
start: rule+
rule: HEAD choice
choice: branch ("|" branch)*
atom_group: GROUP choice ")"
GROUP: "("
MARK: "*" | "+" | "?"
COUNT: /\{[ \t]*[0-9]+[ \t]*(,[ \t]*[0-9]*[ \t]*)?\}/
NAME: /[A-Za-z_][A-Za-z0-9_-]*/
BLANKS: /\s+/
%ignore BLANKS
%ignore COMMENT
"""

_ARROW = r"""
branch: term*
?term: atom | atom MARK -> marked | atom COUNT -> counted
?atom: NAME -> name | STRING -> string | CLASS -> bracket | "." -> any | HEX -> hex | atom_group
HEAD.3: /[A-Za-z_][A-Za-z0-9_-]*\s*::=/
STRING: /"(\\[\s\S]|[^"\\\n])*"|'(\\[\s\S]|[^'\\\n])*'/
CLASS: /\[(\\[\s\S]|[^\]\\\n])*\]/
HEX.2: /#x[0-9A-Fa-f]+/
COMMENT: /#[^\n]*|\/\*[\s\S]*?\*\//
"""

_COLON = r"""
branch: term* [ALIAS]
?term: atom | atom MARK -> marked | atom COUNT -> counted | atom TIMES -> counted
?atom: NAME -> name | STRING -> string | STRING ".." STRING -> span | PATTERN -> pattern
     | DIRECTIVE -> directive | OPEN choice "]" -> optional | atom_group
HEAD.3: /[?!]{0,2}[A-Za-z_][A-Za-z0-9_-]*\s*:(?!:)/
ALIAS: /->\s*[A-Za-z_][A-Za-z0-9_]*/
STRING: /"(\\[\s\S]|[^"\\\n])*"i?/
PATTERN: /\/(?![\/*])(\\[^\n]|[^\/\\\n])+\/[a-z]*/
TIMES: /~\s*[0-9]+(\s*\.\.\s*[0-9]+)?/
DIRECTIVE: /%[a-z]+/
OPEN: "["
COMMENT: /(#|\/\/)[^\n]*/
"""


@dataclass(frozen=True)
class Rule:
    """One rule; `place` is its name's, as `line:column`."""

    name: str
    place: str
    node: Node


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of a grammar, in the order of the text.

    Raises:
        ConstraintError: the text is too large, or is no grammar; names line and column.
    """
    if len(text) > _MAX_CHARS:
        raise ConstraintError(
            "1:1",
            f"the grammar has {len(text)} characters; allowed: {_MAX_CHARS}. Make it smaller.",
        )
    try:
        rules: tuple[Rule, ...] = _parser(_is_arrow(text)).parse(text)  # type: ignore[assignment]
    except UnexpectedInput as error:
        raise _syntax_error(text, error) from error
    if len(rules) > _MAX_RULES:
        raise ConstraintError(
            rules[_MAX_RULES].place,
            f"there are {len(rules)} rules; allowed: {_MAX_RULES}. Join some.",
        )
    return rules


def _is_arrow(text: str) -> bool:
    """Tell the spelling by what follows the first name of a line."""
    head = re.search(r"^[ \t]*[?!]{0,2}[A-Za-z_][A-Za-z0-9_-]*\s*(:(?::=)?)", text, re.MULTILINE)
    return head[1] == "::=" if head else "::=" in text


@cache
def _parser(arrow: bool) -> Lark:
    return Lark(
        _BODY + (_ARROW if arrow else _COLON),
        parser="lalr",
        lexer="basic",
        transformer=_Builder(),
        maybe_placeholders=False,
    )


def _syntax_error(text: str, error: UnexpectedInput) -> ConstraintError:
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        lines = text.split("\n")
        return ConstraintError(
            f"{len(lines)}:{len(lines[-1]) + 1}",
            "the grammar ends in the middle, or has no rule. Close what is open, or write a rule.",
        )
    if isinstance(error, UnexpectedCharacters):
        start = error.pos_in_stream or 0
        if missing := _not_closed(text[start : start + 2], _is_arrow(text)):
            return ConstraintError(f"{error.line}:{error.column}", missing)
        found = text[start : start + 20].split("\n")[0]
    else:
        found = str(error.token) if isinstance(error, UnexpectedToken) else ""
    return ConstraintError(
        f"{error.line}:{error.column}",
        f"{shown(found)} is not expected here. Write rules `name ::= ...`, or all as `name: ...`.",
    )


def _not_closed(mark: str, arrow: bool) -> str | None:
    """Return what is wrong where a literal starts that is no token: its end is missing."""
    match mark[0], arrow:
        case "'", False:
            return "single quotes are no literal beside `name: ...`. Use double quotes."
        case ('"' | "'") as quote, _:
            return f"the literal is not closed. Put the missing `{quote}` on the same line."
        case "[", True:
            return "the class is not closed. Put the missing `]` on the same line."
        case "/", False:
            return "the pattern is not closed. Put the missing `/` on the same line."
        case "/", True if mark == "/*":
            return "the comment is not closed. Put the missing `*/` behind it."
    return None


def _refuse(token: Token, message: str) -> NoReturn:
    raise ConstraintError(f"{token.line}:{token.column}", message)


@v_args(inline=True)
class _Builder(Transformer[Token, tuple[Rule, ...]]):
    """Builds the tree while the text is read; each method is named like what it builds."""

    def start(self, *rules: Rule) -> tuple[Rule, ...]:
        return rules

    def rule(self, head: Token, node: Node) -> Rule:
        name = head.rstrip(":=").strip().lstrip("?!")
        if node.depth > _MAX_DEPTH:
            _refuse(head, f"the rule nests over {_MAX_DEPTH} deep. {_OWN_RULE}")
        return Rule(name, f"{head.line}:{head.column}", node)

    def choice(self, *branches: Node) -> Node:
        return choice(branches)

    def branch(self, *terms: Node | Token) -> Node:
        return sequence(term for term in terms if not isinstance(term, Token))

    def atom_group(self, opened: Token, node: Node) -> Node:
        if node.depth > _MAX_DEPTH:
            _refuse(opened, f"the group nests over {_MAX_DEPTH} deep. {_OWN_RULE}")
        return node

    def optional(self, opened: Token, node: Node) -> Node:
        return repeat(self.atom_group(opened, node), 0, 1)

    def marked(self, node: Node, mark: Token) -> Node:
        return repeat(node, int(mark == "+"), 1 if mark == "?" else None)

    def counted(self, node: Node, count: Token) -> Node:
        numbers = re.findall(r"[0-9]+", count)
        if any(len(number) > 9 or int(number) > MAX_COUNT for number in numbers):
            _refuse(
                count,
                f"the count {shown(str(count))} is too large; allowed: {MAX_COUNT}. Use less.",
            )
        least = int(numbers[0])
        most = int(numbers[-1]) if len(numbers) == 2 or "," not in count else None
        if most is not None and least > most:
            _refuse(
                count, f"the bounds of `{count}` are in the wrong order. Write the lower first."
            )
        return repeat(node, least, most)

    def name(self, name: Token) -> Node:
        return Ref(str(name), f"{name.line}:{name.column}")

    def any(self) -> Node:
        return Chars(ANY)

    def hex(self, code: Token) -> Node:
        _refuse(code, f'`{code}` is a comment elsewhere. Write the character as `"\\x.."`.')

    def bracket(self, token: Token) -> Node:
        if found := re.search(r"#x[0-9A-Fa-f]", token):
            _refuse(token, f"`{found[0]}` means different things elsewhere. Write `\\x..`.")
        cursor = _cursor(token)
        cursor.at = 1
        node = read_class(cursor, 0)
        if cursor.at < len(token):
            cursor.refuse(cursor.at, "the class ends before this. Escape a `]` that belongs to it.")
        return node

    def string(self, token: Token) -> Node:
        folded = token.endswith("i")
        parts = [self.folded(token, chars) if folded else chars for chars in _characters(token)]
        return sequence(Chars(chars) for chars in parts)

    def folded(self, token: Token, chars: CharSet) -> CharSet:
        char = chr(chars.ranges[0][0])
        if not char.isascii():
            _refuse(token, "a literal without case must be ASCII. Spell out both cases.")
        return CharSet.char(char.lower()).union(CharSet.char(char.upper()))

    def span(self, first: Token, last: Token) -> Node:
        ends = [*_characters(first), *_characters(last)]
        if len(ends) != 2 or first.endswith("i") or last.endswith("i"):
            _refuse(
                first,
                "a range needs one character at each end, in quotes without `i`. Cut the others.",
            )
        low, high = (chars.ranges[0][0] for chars in ends)
        if low > high:
            _refuse(first, "the range is in the wrong order. Write the lower end first.")
        return Chars(CharSet.of([(low, high)]))

    def pattern(self, token: Token) -> Node:
        pattern, _, flags = token[1:].rpartition("/")
        if flags:
            _refuse(
                token, f"the flags `{flags}` of a pattern are not supported. Spell out both cases."
            )
        return parse_regex(pattern, token.line or 1, (token.column or 1) + 1)

    def directive(self, token: Token) -> Node:
        _refuse(token, f"`{token}` is not supported. Write the rules out.")


def _cursor(token: Token) -> Cursor:
    return Cursor(str(token), token.line or 1, token.column or 1)


def _characters(token: Token) -> list[CharSet]:
    """Return the characters of a literal in its quotes, each as a set of one."""
    cursor = _cursor(token)
    end = token.rindex(token[0])
    cursor.at, characters = 1, []
    while cursor.at < end:
        place = cursor.at
        cursor.at += 1
        if token[place] != "\\":
            characters.append(read_plain(cursor, token[place], place))
            continue
        chars = read_escape(cursor, place, in_class=False)
        if len(chars.ranges) > 1 or chars.ranges[0][0] != chars.ranges[0][1]:
            cursor.refuse(
                place,
                f"`{token[place : cursor.at]}` is a class, not a character. Use it in `[...]`.",
            )
        characters.append(chars)
    return characters
