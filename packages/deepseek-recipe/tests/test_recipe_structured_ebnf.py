"""Grammars: what is accepted means the texts its rules derive, all else is refused by place."""

from __future__ import annotations

import random
import threading

import pytest

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured import ebnf_terminals
from deepseek_recipe.structured.ebnf import lower_ebnf
from deepseek_recipe.structured.ebnf_syntax import parse_rules
from deepseek_recipe.structured.tree import Chars, Choice, Node, Ref, Repeat, Sequence

llguidance = pytest.importorskip("llguidance", reason="the mask engine is not installed")


def _accepts(tokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), (grammar, matcher.get_error())
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


_ARITHMETIC = {
    "w3c": """
        root ::= expr  /* a sum */
        expr ::= term (('+' | "-") term)*
        term ::= num | "(" expr ")"
        num ::= [0-9]{1,3}
    """,
    "gbnf": "root ::= expr # a sum\nexpr ::= term ([-+] term)*\n"
    'term ::= num |\n  "\\x28" expr ")"\nnum ::= [0-9] [0-9]? [0-9]?',
    "lark": """
        // a sum
        start: expr
        ?expr: term (("+" | "-") term)*   -> sum
        !term: NUM | "(" expr ")"
        NUM: "0".."9"~1..3
    """,
    "lark patterns": 'start: e\ne: t (/[+-]/ t)*  # a sum\nt: /\\d{1,3}/ | "(" e ")"',
    "left recursion": 'root ::= e\ne ::= e [+-] t | t\nt ::= [0-9]{1,3} | "(" e ")"',
    "hidden left recursion": "root ::= e\n"
    'e ::= s? e [+-] t | t\ns ::= ""\nt ::= [0-9]{1,3} | "(" e ")"',
}


@pytest.mark.parametrize("name", _ARITHMETIC)
def test_every_spelling_means_the_same(name: str) -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = lower_ebnf(_ARITHMETIC[name]).grammar
    for text in ("1", "12+345", "(1-2)", "((1)+(2-3))-4", "1+1+1+1"):
        assert _accepts(tokenizer, grammar, text), text
    for text in ("", "1+", "(1", "1234", "1)", "()", "1 + 1", "++"):
        assert not _accepts(tokenizer, grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        ('root ::= "a"? [^\\n"\\]-]* .', ["ab", "\n", "aa中😀"], ["", 'a"a', "]]", "--"]),
        (
            "root ::= 'it''s' | '\\'' \"\\\"\" | \"\\u4e2d\\n\\\\\"",
            ["its", "'\"", "中\n\\"],
            ["it's"],
        ),
        ('root ::= x\nx ::= "(" x ")" |', ["", "(())"], ["(", "())"]),
        ('root ::= x{2}\nx ::= "<" x{0,2} ">" | "a"{3,}', ["<>aaa", "<<>aaaa><>"], ["aaa", "aa<>"]),
        ('root ::= ("a"*)* b\nb ::= b "b" | ""', ["", "aab", "abbb"], ["aba"]),
        (
            'root ::= k [0-9]+ [0-9] | "(" root ")"\nk ::= "ke" | "key" "s"?',
            ["ke12", "(keys12)"],
            ["ke1"],
        ),
        ('root: "Ab1"i | x\nx: "[" root "]"', ["aB1", "[[AB1]]"], ["[ab1"]),
        ('start: ["x"] _y\n_y: /a\\/[b"]/ | "(" _y ")"', ["xa/b", '(a/")'], ["xx", "a/b)"]),
        ("root ::= [\\[\\]] [a\\-c] [-a] [+\\--] | root root", ["[--+", "]a-+"], ["[b-+"]),
        ('root ::= ""', [""], ["a"]),
        ('root: "a" // "::="\n | "::="', ["a", "::="], ["b"]),
    ],
)
def test_grammar_derives_texts(grammar: str, inside: list[str], outside: list[str]) -> None:
    tokenizer, lowered = llguidance.LLTokenizer("byte"), lower_ebnf(grammar).grammar
    assert [text for text in inside if not _accepts(tokenizer, lowered, text)] == []
    assert [text for text in outside if _accepts(tokenizer, lowered, text)] == []


@pytest.mark.parametrize(
    ("grammar", "path", "word"),
    [
        ("", "1:1", "no rule"),
        ("   ", "1:4", "no rule"),
        ('expr ::= "a"', "1:1", "no start rule"),
        ('root ::= "a"\n  x ::= y', "2:9", "no rule `y`"),
        ('root ::= "a"\nroot ::= "b"', "2:1", "there already, at 1:1"),
        ('root ::= x\nx ::= "a" x', "1:1", "never ends"),
        ('root ::= "b" | x\nx ::= "a" x', "2:1", "never ends"),
        ('root ::= x | "a"\nx ::= y?\ny ::= root', "1:1", "without anything more"),
        ('root ::= ("a"? root)+', "1:1", "never ends"),
        ('root ::= "a" | root "b"? root?', "1:1", "without anything more"),
        ("root ::= (", "1:11", "in the middle"),
        ('root ::= "a', "1:10", 'missing `"`'),
        ('root ::= x "a\nx ::= "b"', "1:12", 'missing `"`'),
        ('root ::= "a\\"\n', "1:10", 'missing `"`'),
        ("root ::= x\nx ::= 'b \"", "2:7", "missing `'`"),
        ('root: x "a\nx: "b"', "1:9", 'missing `"`'),
        ("root: 'a'", "1:7", "Use double quotes"),
        ("root ::= [ab\n", "1:10", "missing `]`"),
        ("root: /ab\n", "1:7", "missing `/`"),
        ('root ::= "a" /* b', "1:14", "missing `*/`"),
        ('root ::= "a"\n  } b', "2:3", "not expected"),
        ('root ::= "a"\nb: "c"', "2:2", "not expected"),
        ('root ::= "a"\nb = "c"', "2:3", "not expected"),
        ("root ::= #x41", "1:10", "comment"),
        ("root ::= [#x41-#x5A]", "1:10", "different things"),
        ("root ::= [z-a]", "1:11", "wrong order"),
        ("root ::= []", "1:10", "empty class"),
        ('root ::= "\\d"', "1:11", "is a class"),
        ('root ::= "\\ud800"', "1:11", "no character"),
        ('root ::= "\\q"', "1:11", "not supported"),
        ('root ::= "a"{3,2}', "1:13", "wrong order"),
        ('root ::= "a"{1,100000}', "1:13", "too large"),
        ('root ::= x\nx ::= "b" | ("a"{0,200} x){0,200} "c"', "1:1", "written out"),
        ("root: /a/i", "1:7", "flags"),
        ("root:\n  /ab(?=c)/", "2:6", "look-ahead"),
        ('root: "a"\n%ignore " "', "2:1", "`%ignore` is not supported"),
        ('root: "é"i', "1:7", "ASCII"),
        ('root: "ab".."c"', "1:7", "one character"),
        ('root: "c".."a"', "1:7", "wrong order"),
        ("root: <tool>", "1:7", "not expected"),
        ("root ::= " + '("a"' * 3000 + ")" * 3000, "1:11606", "nests over"),
        ("root ::= " + "(" * 60_000, "1:60010", "in the middle"),
        ('a ::= "b"\n' * 6000, "1001:1", "rules"),
        ("x" * 1_000_000, "1:1", "1000000 characters"),
    ],
)
def test_refused_grammar_names_its_place(grammar: str, path: str, word: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        lower_ebnf(grammar)
    assert (caught.value.path, word in caught.value.message) == (path, True), caught.value


def test_mutated_grammars_are_refused_or_taken_by_the_engine() -> None:
    source, tokenizer, num_accepted = random.Random("mutate"), llguidance.LLTokenizer("byte"), 0
    for _ in range(600):
        characters = list(source.choice(list(_ARITHMETIC.values())))
        for _ in range(source.randint(1, 3)):
            at = source.randint(0, len(characters) - 1)
            new = source.choice([*"()[]{}|*+?^\"'\\-,:=/#~.\n%<1re", "", ""])
            characters[at : at + source.randint(0, 2)] = [new]
        grammar = "".join(characters)
        try:
            lowered = lower_ebnf(grammar).grammar
        except ConstraintError as error:
            line, _, column = error.path.partition(":")
            assert 1 <= int(line) <= grammar.count("\n") + 1 and int(column) >= 1, error
            continue
        num_accepted += 1
        matcher = llguidance.LLMatcher(tokenizer, lowered, log_level=0)
        assert not matcher.get_error(), (grammar, lowered)
    assert num_accepted > 40


def test_unused_rule_is_a_warning() -> None:
    lowered = lower_ebnf('root ::= "a"\nb ::= c\nc ::= "d"')
    assert lowered.warnings == ("2:1: rule `b` is never used.", "3:1: rule `c` is never used.")


def test_rules_that_double_each_time_are_not_written_out() -> None:
    lines = [f"x{number} ::= x{number + 1} x{number + 1}" for number in range(60)]
    lowered = lower_ebnf("\n".join(["root ::= x0 | root [a]", *lines, 'x60 ::= "a"']))
    assert len(lowered.grammar) < 2000


def _reference(text: str, grammar: str) -> bool:
    """Derive by brute force: the ends that a tree reaches from a place, to a fixed point."""
    rules = {rule.name: rule.node for rule in parse_rules(grammar)}
    known: dict[tuple[str, int], frozenset[int]] = {}

    def ends(node: Node, at: int) -> frozenset[int]:
        match node:
            case Chars(chars):
                fits = at < len(text) and chars.contains(text[at])
                return frozenset([at + 1] if fits else [])
            case Ref(name):
                return known.setdefault((name, at), frozenset())
            case Choice(parts):
                return frozenset().union(*(ends(part, at) for part in parts))
            case Sequence(parts):
                places = frozenset([at])
                for part in parts:
                    places = frozenset().union(*(ends(part, place) for place in places))
                return places
            case Repeat(part, least, most):
                places, found = frozenset([at]), frozenset([at] if least == 0 else [])
                for count in range(1, (least + len(text) + 1 if most is None else most) + 1):
                    places = frozenset().union(*(ends(part, place) for place in places))
                    found |= places if count >= least else frozenset()
                return found

    ends(Ref("root", ""), 0)
    changed = True
    while changed:
        num_known, changed = len(known), False
        for name, at in list(known):
            found = ends(rules[name], at)
            changed |= found != known[name, at]
            known[name, at] = found
        changed |= len(known) > num_known
    return len(text) in known["root", 0]


def _derived(source: random.Random, rules: dict[str, Node], node: Node, depth: int) -> str | None:
    """Return a random text of a tree, or None if it is too deep."""
    match node:
        case Chars(chars):
            return source.choice([char for char in "abc()," if chars.contains(char)] or [None])
        case Ref(name):
            return _derived(source, rules, rules[name], depth - 1) if depth else None
        case Choice(parts):
            return _derived(source, rules, source.choice(parts), depth)
        case Sequence(parts):
            texts = [_derived(source, rules, part, depth) for part in parts]
        case Repeat(part, least, most):
            count = source.randint(least, least + 2 if most is None else most)
            texts = [_derived(source, rules, part, depth) for _ in range(count)]
    return None if None in texts else "".join(texts)


_WORDS = ['"a"', '"b"', '"ab"', '"abc"', "[ab]", "[bc]+", '"c"', "[^a]", '""']
_TERMINALS = [
    "[ab]+",
    '("a" | "ab")',
    '"("',
    '")"',
    '","',
    '[c]* "a"',
    '("a" "b"?)+',
    '"abc"',
    '","',
]


def _random_grammar(source: random.Random) -> str:
    names = ["root", "x", "y", "z"][: source.randint(2, 4)]
    atoms = [*source.choice([_WORDS, _TERMINALS]), *names, *names[1:]]

    def branches(depth: int) -> str:
        return " | ".join(
            " ".join(item(depth) for _ in range(source.randint(1, 3)))
            for _ in range(source.randint(1, 3))
        )

    def item(depth: int) -> str:
        nested = depth and source.random() < 0.25
        inner = f"({branches(depth - 1)})" if nested else source.choice(atoms)
        return inner + source.choice(["", "", "", "", "", "*", "+", "?", "{2}", "{0,2}"])

    return "\n".join(f"{name} ::= {branches(1)}" for name in names)


def _random_text(source: random.Random, grammar: str) -> str:
    """Return a text that the grammar derives, one that is nearly that, or any."""
    rules = {rule.name: rule.node for rule in parse_rules(grammar)}
    text = _derived(source, rules, rules["root"], 6) if source.random() < 0.7 else None
    if text is None or len(text) > 10:
        return "".join(source.choice("aabbc(),") for _ in range(source.randint(0, 6)))
    if source.random() < 0.5:
        at = source.randint(0, len(text))
        text = text[:at] + source.choice(["", "a", "b", "c", ")"]) + text[at + 1 :]
    return text


@pytest.mark.parametrize("joining", [True, False])
def test_random_grammars_agree_with_brute_force(
    joining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joining:
        monkeypatch.setattr(ebnf_terminals, "_MAX_ALL", -1)
    source, tokenizer = random.Random(f"ebnf {joining}"), llguidance.LLTokenizer("byte")
    num_checked = num_accepted = 0
    while num_checked < 100:
        grammar = _random_grammar(source)
        try:
            lowered = lower_ebnf(grammar).grammar
        except ConstraintError:
            continue
        num_checked += 1
        for _ in range(10):
            text = _random_text(source, grammar)
            expected = _reference(text, grammar)
            num_accepted += expected
            assert _accepts(tokenizer, lowered, text) == expected, (grammar, text)
    assert 300 < num_accepted < 800


def test_parts_that_greed_cannot_hurt_become_one_terminal() -> None:
    grammar = lower_ebnf(
        """
        root ::= value
        value ::= number | string | "[" ws (value ("," ws value)*)? "]" ws | "{" pair? "}"
        pair ::= string ":" value
        number ::= "-"? [0-9]+ ("." [0-9]+)? ws
        string ::= "'" [^']* "'" ws
        ws ::= [ \t]*
        """
    ).grammar
    assert "/\\x{27}[\\x{0}-\\x{26}\\x{28}-" in grammar
    assert "/\\x{2d}?[0-9]+(\\x{2e}[0-9]+)?[\\x{9}\\x{20}]*/" in grammar


@pytest.mark.parametrize(
    "item",
    [
        "[0-9]+ [0-9]",  # the longest match takes the last digit too
        '"a" [a-z]* | "ab"',
        '[a-z]+ | "let"',
    ],
)
def test_what_greed_would_change_is_still_exact(item: str) -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = lower_ebnf(f'root ::= x x | "(" root ")"\nx ::= {item}').grammar
    for text in ("1212", "(aab)", "((abab))", "abaz", "letlet", "123", "xy"):
        expected = _reference(text, f'root ::= x x | "(" root ")"\nx ::= {item}')
        assert _accepts(tokenizer, grammar, text) == expected, text


def _chain(num_rules: int, body: str) -> str:
    lines = [f"r{at} ::= {body.replace('NEXT', f'r{at + 1}')}" for at in range(num_rules)]
    return "\n".join(["root ::= r0", *lines, f'r{num_rules} ::= "a" | "(" root ")"'])


_CHAINS = {"plain": "NEXT", "right": '"b" NEXT? | "c"', "left": 'NEXT "b" | "c"'}
_CHAINS["groups"] = '("b" | ' * 20 + "NEXT" + ")" * 20


@pytest.mark.parametrize("name", _CHAINS)
def test_deepest_chain_fits_a_small_stack(name: str) -> None:
    longest = max(
        num_rules
        for num_rules in (18, 20, 22, 23, 160, 240, 490)
        if _fits(num_rules, _CHAINS[name])
    )
    errors: list[str] = []

    def build() -> None:
        grammar = lower_ebnf(_chain(longest, _CHAINS[name])).grammar
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
        errors.append(matcher.get_error())

    before = threading.stack_size(2 << 20)
    thread = threading.Thread(target=build)
    thread.start()
    threading.stack_size(before)
    thread.join()
    assert errors == [""]


def _fits(num_rules: int, body: str) -> bool:
    try:
        lower_ebnf(_chain(num_rules, body))
    except ConstraintError as error:
        assert "nested" in error.message or "characters" in error.message
        return False
    return True


def test_longer_chain_is_refused() -> None:
    assert not any(_fits(600, body) for body in _CHAINS.values())
