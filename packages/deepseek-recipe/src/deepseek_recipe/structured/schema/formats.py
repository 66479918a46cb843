"""Formats that are regular, as patterns: they meet other limits of a text like any pattern."""

from __future__ import annotations

from types import MappingProxyType

from deepseek_recipe.structured.schema.pattern import Pattern

__all__ = ["FORMAT_PATTERNS"]

_YEAR = "[0-9]{4}"
# A century is a leap year where the number of centuries is a multiple of 4.
_LEAP_YEAR = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
)  # fmt: skip
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTES = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# Seconds up to 59: whether a day has one more is no matter of syntax.
_TIME = rf"{_MINUTES}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+\-]{_MINUTES})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9A-Fa-f]"
_H16 = f"{_HEX}{{1,4}}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    (
        f"(?:{_H16}:){{6}}{_LS32}",
        f"::(?:{_H16}:){{5}}{_LS32}",
        *(f"(?:(?:{_H16}:){{0,{n}}}{_H16})?::(?:{_H16}:){{{4 - n}}}{_LS32}" for n in range(5)),
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    )
)

FORMAT_PATTERNS: MappingProxyType[str, Pattern] = MappingProxyType(
    {
        name: Pattern(text, text)
        for name, text in {
            "date": _DATE,
            "date-time": f"{_DATE}[Tt]{_TIME}",
            "ipv4": _IPV4,
            "ipv6": f"(?:{_IPV6})",
            "time": _TIME,
            "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
        }.items()
    }
)
"""By name; RFC 3339 for dates and times. JSON escapes none of their characters."""
