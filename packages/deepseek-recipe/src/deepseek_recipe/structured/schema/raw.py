"""Strings of a schema as they stand in tool markup: raw, up to the mark that closes the value.

Nothing is escaped there. A value ends with `</` in front of the mark, so that is the end of each
terminal here: `</` inside a value is text, since no mark follows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.structured.lowered import quoted
from deepseek_recipe.structured.schema.formats import FORMAT_PATTERNS
from deepseek_recipe.structured.schema.shapes import String

__all__ = ["ANY_TEXT", "raw_terminal"]

_END = r"<\/"
_CHAR = r"[\s\S]"
ANY_TEXT = f"/{_CHAR}*{_END}/"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9\\-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\x2f=?\^_`{|}~\-]+"
# Of formats that are no patterns already, the regexes that a value matches all of.
_FORMATS = {
    "email": (rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}", "[^@]{1,64}@[^@]{1,255}"),
    "hostname": (_HOST, f"{_CHAR}{{1,253}}"),
}


def raw_terminal(shape: String, path: str) -> str:
    """Return the terminal of a string's raw text and the `</` behind it.

    Raises:
        ConstraintError: a format that has no raw form here.
    """
    if shape.values is not None:
        return f"/{_one_of(shape.values)}{_END}/"
    top = "" if shape.max_len is None else shape.max_len
    length = "*" if not shape.min_len and top == "" else f"{{{shape.min_len},{top}}}"
    terms = [f"/{_CHAR}{length}{_END}/"]
    terms += [f"/(?:{each.plain}){_END}/" for each in shape.patterns]
    terms += [f"~/(?:{each.plain}){_END}/" for each in shape.denied]
    for name in shape.formats:
        if name not in _FORMATS:
            raise ConstraintError(
                path,
                f"`format` {shown(name)} of a parameter that is a text cannot be enforced; "
                f"allowed: {', '.join((*FORMAT_PATTERNS, *_FORMATS))}. Leave it out, or use "
                "`pattern`.",
            )
        terms += [f"/(?:{each}){_END}/" for each in _FORMATS[name]]
    if shape.excluded:
        terms.append(f"~/{_one_of(sorted(shape.excluded))}{_END}/")
    return " & ".join(terms)


def _one_of(texts: Iterable[str]) -> str:
    return f"(?:{'|'.join(quoted(text) or '()' for text in texts)})"
