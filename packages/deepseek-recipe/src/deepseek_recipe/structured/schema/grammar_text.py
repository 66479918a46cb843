"""Rules and terminals of one grammar, in the mask engine's dialect of Lark."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.json_text import dump_compact

__all__ = ["COLON", "MARKS", "SEPARATOR", "Rules"]

# As writers of JSON lay it out: all in one line, or a line for each item with what indents it. A
# model that is free to write any blanks may never come back from them.
_BLANK = r"(?: |\n[ \t]{0,64})"
MARKS = {
    "COLON": rf"/:{_BLANK}?/",
    "SEPARATOR": rf"/,{_BLANK}?/",
    "OPEN_OBJECT": rf"/\{{{_BLANK}?/",
    "CLOSE_OBJECT": rf"/{_BLANK}?\}}/",
    "OPEN_ARRAY": rf"/\[{_BLANK}?/",
    "CLOSE_ARRAY": rf"/{_BLANK}?\]/",
}
COLON, SEPARATOR = "COLON", "SEPARATOR"
_MAX_RULES = 20_000
_MAX_CHARS = 2_000_000
_MAX_CHECKS = 200
_SCALAR_STARTS = b'"-0123456789'  # of strings and numbers in JSON
_RULE = re.compile(r"(r\d+)(?:\{(\d+),\d*\})?")


class Rules:
    """A grammar that grows."""

    def __init__(self) -> None:
        """Start with nothing but the marks of JSON."""
        self._alternatives: dict[str, list[tuple[str, ...]]] = {}
        self._terminals: dict[str, str] = {}
        self._chars = 0
        self._checks: dict[str, bool] = {}

    def new(self) -> str:
        """Return the name of a further rule."""
        if len(self._alternatives) >= _MAX_RULES:
            raise ConstraintError(
                "",
                f"the schema needs more than {_MAX_RULES} rules of a grammar. Make it smaller.",
            )
        name = f"r{len(self._alternatives)}"
        self._alternatives[name] = []
        return name

    def add(self, rule: str, *symbols: str) -> None:
        """Give a rule one more alternative."""
        self._chars += sum(map(len, symbols))
        if self._chars > _MAX_CHARS:
            raise ConstraintError(
                "", f"the schema has over {_MAX_CHARS} characters as a grammar. Make it smaller."
            )
        self._alternatives[rule].append(symbols)

    def terminal(self, text: str) -> str:
        """Return the name of a terminal."""
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def writable(self, terminal: str, path: str, first: bytes = _SCALAR_STARTS) -> bool:
        """Return whether a terminal or symbol has any text that begins with one of some bytes.

        Raises:
            ConstraintError: the engine refuses it, or cannot tell within its limits.
        """
        if terminal not in self._checks:
            if len(self._checks) >= _MAX_CHECKS:
                raise ConstraintError(
                    path, f"more than {_MAX_CHECKS} combinations of limits. Use fewer."
                )
            inner = f"start: {terminal}" if terminal[0] == "%" else f"start: T\nT: {terminal}"
            matcher = LLMatcher(_byte_vocabulary(), inner, log_level=0)
            fault = matcher.get_error().partition("\n")[0]
            if fault and "Unsatisfiable" not in fault:
                reason = fault.rpartition("failed to compile JSON schema: ")[2]
                raise ConstraintError(
                    path, f"its limits are beyond the mask engine ({reason}). Use simpler ones."
                )
            self._checks[terminal] = not fault and any(
                matcher.validate_tokens([each]) == 1 for each in first
            )
        return self._checks[terminal]

    @staticmethod
    def json(schema: dict[str, Any]) -> str:
        """Return the symbol of what the engine itself understands: a scalar, or any value."""
        # All with the same blanks: the engine fails where two kinds of them may follow.
        options = {"x-guidance": {"whitespace_pattern": _BLANK}}
        return f"%json {dump_compact({**options, **schema})}"

    def text(self, start: str) -> str | None:
        """Return the grammar, without what can never end; None if that is all of it."""
        ends = self.ending()
        if start not in ends:
            return None
        lines, reached, stack = [f"start: {start}"], {start}, [start]
        while stack:
            name = stack.pop()
            kept = []
            for symbols in self._alternatives[name]:
                live = [each for each in symbols if not _dropped(each, ends)]
                if any(_needs(each) not in ends for each in live if _needs(each)):
                    continue
                kept.append(" ".join(live) or '""')
                for each in live:
                    if (found := _RULE.fullmatch(each)) and found[1] not in reached:
                        reached.add(found[1])
                        stack.append(found[1])
            lines.append(f"{name}: " + " | ".join(dict.fromkeys(kept)))
        lines += [f"{name}: {text}" for name, text in MARKS.items()]
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    def ending(self) -> set[str]:
        """Return the rules that derive a finite text: the least set closed under the rules."""
        waiting: dict[str, list[tuple[str, list[str]]]] = {}
        ends: set[str] = set()
        ready: list[str] = []
        for name, alternatives in self._alternatives.items():
            for symbols in alternatives:
                needs = list(dict.fromkeys(need for each in symbols if (need := _needs(each))))
                if not needs:
                    ready.append(name)
                for need in needs:
                    waiting.setdefault(need, []).append((name, needs))
        while ready:
            name = ready.pop()
            if name in ends:
                continue
            ends.add(name)
            ready += [
                waiter
                for waiter, needs in waiting.get(name, ())
                if waiter not in ends and all(need in ends for need in needs)
            ]
        return ends


@lru_cache(maxsize=1)
def _byte_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def _needs(symbol: str) -> str | None:
    found = _RULE.fullmatch(symbol)
    return found[1] if found and found[2] != "0" else None


def _dropped(symbol: str, ends: set[str]) -> bool:
    found = _RULE.fullmatch(symbol)
    return found is not None and found[2] == "0" and found[1] not in ends
