"""Regular expressions of schemas, as the text of JSON strings.

A pattern speaks of characters, the mask engine reads the JSON text: a line feed is `\\n` there. The
walk below copies a pattern and widens every atom that may match such a character. As each
character has one spelling (`CHAR`), sets of strings and sets of texts agree, also under `~`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import regex  # type: ignore[import-untyped]

__all__ = ["CHAR", "Pattern", "PatternError", "quote_literal", "read_pattern"]

CHAR = r'(?:[^"\\\x00-\x1f]|\\(?:["\\bfnrt]|u00(?:0[0-7bef]|1[0-9a-f])))'
_SHORT = {'"': r"\"", "\\": "\\\\", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPECIAL = (*map(chr, range(32)), '"', "\\")
_SPACES = "\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\x0b", "0": "\0"}
_PROPERTY = regex.compile(
    r"([pP])\{(Letter|C[cfno]?|L[lmotu]?|M[cen]?|N[dlo]?|P[cdefios]?|S[ckmo]?|Z[lps]?)\}"
)
_MAX_CHARS = 2000
_MAX_DEPTH = 40
_MAX_REPEATS = 1000
_MAX_WORK = 20_000
"""Atoms after repetitions are written out."""


class PatternError(ValueError):
    """A pattern that is not understood exactly; the text says which part."""


@dataclass(frozen=True)
class Pattern:
    """`plain` matches whole strings, `quoted` the whole JSON text of one, without the marks."""

    plain: str
    quoted: str

    def matches(self, text: str) -> bool:
        """Whether a string is one of the pattern's.

        Raises:
            PatternError: the answer took too long.
        """
        try:
            return regex.fullmatch(self.plain, text, flags=regex.V1, timeout=0.2) is not None
        except TimeoutError as error:
            raise PatternError("takes too long on a name") from error


def quote_literal(text: str) -> str:
    """Return the regex of a string's JSON text, without the marks."""
    return "".join(_escape(each) for char in text for each in _spelling(char))


@lru_cache(maxsize=512)
def read_pattern(source: str) -> Pattern:
    """Return what a pattern of the draft (unanchored, ECMA 262) means.

    Raises:
        PatternError: it is no pattern, or has a part that is not supported.
    """
    if len(source) > _MAX_CHARS:
        raise PatternError(
            f"it has {len(source)} characters; allowed: {_MAX_CHARS}. Make it shorter."
        )
    walker = _Walker(source)
    pattern = walker.alternatives(0)
    if walker.at < len(source):
        raise walker.fail("`)` closes no group", r"Write `\)` for the character")
    if walker.work > _MAX_WORK:
        raise PatternError(
            f"with its repetitions written out it has {walker.work} characters; allowed: "
            f"{_MAX_WORK}. Use smaller counts."
        )
    return pattern


def _spelling(char: str) -> str:
    return _SHORT.get(char) or (f"\\u{ord(char):04x}" if char < " " else char)


def _escape(char: str) -> str:
    # `/` would end the regex in the grammar
    if char == "/" or char < " " or char in "\u2028\u2029\x85\x7f":
        return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
    return "\\" + char if char in "\\.+*?()|[]{}^$#&-~" else char


@lru_cache(maxsize=512)
def _atom(plain: str) -> Pattern:
    """Return a class, written `[...]`, with the spellings of its special characters."""
    found = [char for char in _SPECIAL if regex.fullmatch(plain, char, flags=regex.V1)]
    if not found:
        return Pattern(plain, plain)
    spelled = "|".join(quote_literal(char) for char in found)
    return Pattern(plain, rf'(?:[{plain}&&[^"\\\x00-\x1f]]|{spelled})')


class _Walker:
    """Recursive descent over one pattern."""

    def __init__(self, source: str) -> None:
        self.source, self.at, self.work = source, 0, 0

    def fail(self, what: str, remedy: str) -> PatternError:
        """Return the error about this place."""
        return PatternError(f"{what} at character {self.at}. {remedy}.")

    def _take(self, text: str) -> bool:
        if self.source.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def alternatives(self, depth: int) -> Pattern:
        if depth > _MAX_DEPTH:
            raise self.fail(f"groups nested over {_MAX_DEPTH} deep", "Use fewer")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        plain, quoted = ("|".join(getattr(p, k) for p in parts) for k in ("plain", "quoted"))
        return Pattern(f"(?:{plain})", f"(?:{quoted})")

    def _sequence(self, depth: int) -> Pattern:
        plain, quoted = [], []
        start = depth == 0 and self._take("^")
        if depth == 0 and not start:
            plain.append(r"[\s\S]*")
            quoted.append(f"{CHAR}*")
        end = False
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            if self._take("$"):
                end = depth == 0 and self.source[self.at : self.at + 1] in ("", "|")
                if not end:
                    self.at -= 1
                    raise self.fail(
                        "`$` elsewhere than at the end of an alternative",
                        r"Write `\$` for the character",
                    )
                break
            before = self.work
            item = self._one(depth)
            low, high, mark = self._quantifier()
            self.work = before + (self.work - before) * max(high or low, 1)
            plain.append(item.plain + mark)
            quoted.append(item.quoted + mark)
        if depth == 0 and not end:
            plain.append(r"[\s\S]*")
            quoted.append(f"{CHAR}*")
        return Pattern("".join(plain), "".join(quoted))

    def _one(self, depth: int) -> Pattern:
        self.work += 1
        if self._take("("):
            if self._take("?") and not self._take(":"):
                self.at -= 1
                raise self.fail(
                    "look-around, a named group or a flag is not supported", "Use `(?:`, or cut it"
                )
            inner = self.alternatives(depth + 1)
            if not self._take(")"):
                raise self.fail("missing `)`", r"Close the group, or write `\(` for the character")
            return inner
        if self._take("["):
            return _atom(self._class())
        if self._take("."):
            return _atom("[^\\n\\r\u2028\u2029]")
        char = self.source[self.at]
        if char == "^":
            raise self.fail(
                "`^` elsewhere than at the start of an alternative",
                r"Write `\^` for the character",
            )
        if char in "*+?{}]":
            raise self.fail(
                f"`{char}` has nothing to repeat or close", f"Write `\\{char}` for the character"
            )
        self.at += 1
        if char == "\\":
            return _atom(f"[{self._escaped(False)}]")
        return Pattern(f"[{_escape(char)}]", quote_literal(char))

    def _quantifier(self) -> tuple[int, int | None, str]:
        low: int = 1
        high: int | None = 1
        mark = self.source[self.at : self.at + 1]
        if mark and mark in "*+?":
            self.at += 1
            low, high = (1 if mark == "+" else 0), (1 if mark == "?" else None)
        elif found := regex.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}").match(self.source, self.at):
            low = int(found[1])
            high = low if found[2] is None else int(found[3]) if found[3] else None
            if max(low, high or 0) > _MAX_REPEATS or (high is not None and high < low):
                raise self.fail(
                    f"the repetition `{found[0]}` is out of order or above {_MAX_REPEATS}",
                    "Use smaller counts, the lower first",
                )
            self.at = found.end()
            mark = found[0]
        else:
            return 1, 1, ""
        if self._take("+") or self._take("*"):
            raise self.fail("a possessive or repeated quantifier", "Cut it, or use a group")
        self._take("?")  # lazy: the same language
        return low, high, mark

    def _class(self) -> str:
        negated = "^" if self._take("^") else ""
        items: list[str] = []
        while not self._take("]"):
            first = self._member()
            if self.source[self.at : self.at + 1] == "-" and self.source[
                self.at + 1 : self.at + 2
            ] not in ("]", ""):
                self.at += 1
                last = self._member()
                if first[0] == "[" or last[0] == "[":
                    raise self.fail("a set as the end of a range", r"Write `\-` for the character")
                items.append(f"{first}-{last}")
            else:
                items.append(first)
        if not items:
            raise self.fail("an empty class", r"Name its characters, `\]` for a bracket")
        text = f"[{negated}{''.join(items)}]"
        try:
            regex.compile(text, flags=regex.V1)
        except regex.error as error:
            raise self.fail("a range out of order", "Write the lower end first") from error
        return text

    def _member(self) -> str:
        if self.at >= len(self.source):
            raise self.fail("missing `]`", r"Close the class, or write `\[` for the character")
        char = self.source[self.at]
        self.at += 1
        return self._escaped(True) if char == "\\" else _escape(char)

    def _escaped(self, in_class: bool) -> str:
        char = self.source[self.at : self.at + 1]
        self.at += 1
        if char and char in "dws":
            return f"[{_SETS[char]}]"
        if char and char in "DWS":
            return f"[^{_SETS[char.lower()]}]"
        if char and char in _CONTROLS:
            return _escape(_CONTROLS[char])
        if char == "b" and in_class:
            return _escape("\b")
        for form in (r"u\{([0-9a-fA-F]{1,6})\}", r"u([0-9a-fA-F]{4})", r"x([0-9a-fA-F]{2})"):
            if found := regex.compile(form).match(self.source, self.at - 1):
                self.at = found.end()
                code = int(found[1], 16)
                if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                    raise self.fail(
                        "a code that is no character", "Use one up to 10FFFF, no surrogate"
                    )
                return _escape(chr(code))
        if found := _PROPERTY.match(self.source, self.at - 1):
            self.at = found.end()
            return f"[\\{found[1]}{{{'L' if found[2] == 'Letter' else found[2]}}}]"
        if not char or char.isalnum():
            raise self.fail(f"`\\{char}` is not supported", "Write the characters out")
        return _escape(char)
