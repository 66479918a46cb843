"""Whether a request is answered in thinking mode, and with which effort. Same in all protocols."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

__all__ = ["EFFORTS", "Effort", "ThinkingKind", "resolve_thinking"]

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]
ThinkingKind: TypeAlias = Literal["adaptive", "enabled", "disabled"]

# Accepted name -> the effort that prompts know.
EFFORTS: Mapping[str, str | None] = MappingProxyType(
    {
        "none": None,
        "minimal": "low",
        "low": "low",
        "medium": "high",
        "high": "high",
        "xhigh": "xhigh",
        "ultra": "max",
        "max": "max",
    }
)


def resolve_thinking(
    kind: str | None, effort: str | None, default: bool
) -> tuple[bool, str | None]:
    """Return (thinking, effort for the prompt); the effort is None exactly when thinking is off.

    Args:
        kind: `thinking.type` as sent; it decides alone.
        effort: name as sent, a key of `EFFORTS`; decides when `kind` is None.
        default: thinking when neither was sent.
    """
    if kind is not None:
        thinking = kind != "disabled"
    elif effort is not None:
        thinking = effort != "none"
    else:
        thinking = default
    if not thinking:
        return False, None
    return True, (EFFORTS[effort] if effort is not None else None) or "high"
