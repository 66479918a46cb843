"""Sampling settings by checkpoint, and how many tokens a reply may have."""

from __future__ import annotations

import struct

from deepseek_recipe.errors import ConversionError

__all__ = ["default_max_tokens", "resolve_max_tokens", "sampling_settings", "to_float32"]


def to_float32(value: float) -> float:
    """Return the nearest float32 value, as a float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def sampling_settings(
    profile: str, *, thinking: bool, has_tools: bool, temperature: float | None, top_p: float | None
) -> tuple[float, float]:
    """Return (temperature, top_p) as the checkpoint wants them; requested values may be overridden.

    Args:
        profile: `v4` or `v41`.
        has_tools: tools are left after `tool_choice`.
        temperature, top_p: as requested, in range; None where not.
    """
    if profile == "v4":
        if thinking:
            return 1.0, to_float32(0.95) if has_tools else 1.0
        top = 1.0 if top_p is None else top_p
    elif thinking:
        return 1.0, to_float32(1.0 if top_p is None else max(top_p, 0.95))
    else:
        top = 1.0
    return to_float32(1.0 if temperature is None else temperature), to_float32(top)


def default_max_tokens(*, thinking: bool, reasoning_effort: str | None) -> int:
    """Return the length of a reply for which the request names none, in tokens."""
    if not thinking:
        return 8192
    return 131_072 if reasoning_effort == "max" else 65_536


def resolve_max_tokens(
    requested: int | None,
    *,
    prompt_tokens: int,
    context_limit: int,
    thinking: bool,
    reasoning_effort: str | None,
) -> int:
    """Return how many tokens the reply may have.

    A requested length must fit beside the prompt; the default is lowered to what is left, to no
    less than 1.

    Raises:
        ConversionError: prompt and requested length, or the prompt alone, exceed the context.
    """
    completion = requested or 0
    if prompt_tokens + completion > context_limit:
        raise ConversionError(
            f"This model's maximum context length is {context_limit} tokens. However, you "
            f"requested {prompt_tokens + completion} tokens ({prompt_tokens} in the messages, "
            f"{completion} in the completion). Please reduce the length of the messages or "
            "completion."
        )
    if requested is not None:
        return requested
    default = default_max_tokens(thinking=thinking, reasoning_effort=reasoning_effort)
    return max(1, min(default, context_limit - prompt_tokens))
