"""`ConversionOptions`: what a server decides about requests, apart from the requests themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

from deepseek_recipe.errors import OptionError, shown

__all__ = ["MAX_TOKENS_BOUND", "MODELS", "ConversionOptions"]

MAX_TOKENS_BOUND = 393_216
MODELS: Mapping[str, str] = MappingProxyType(
    {"DeepSeek-V4-Pro": "v4", "DeepSeek-V4.1-Flash": "v41"}
)


@dataclass(frozen=True)
class ConversionOptions:
    """What a server decides about requests.

    Args:
        models: accepted model name -> profile name (`v4` or `v41`), in the order of messages.
        default_thinking_mode: thinking when a request says nothing about it.
        missing_reasoning: what to do when an assistant message with tool calls after the last user
            message came back without its reasoning: `fill` an empty one, or `reject`.
        responses_web_search, messages_web_search: `drop` or `reject` the server's web search tools
            and their items.
        max_tokens_bound, thinking_max_tokens_bound: the largest `max_tokens` a request may ask for,
            with thinking off and on.
        unsupported: `reject` a request with a field or item that is not honoured, naming it, or
            `ignore` it and list it in `ConvertedRequest.left_out`.

    Raises:
        OptionError: a value is not among those allowed.
    """

    models: Mapping[str, str] = field(default_factory=lambda: MODELS)
    default_thinking_mode: bool = True
    missing_reasoning: Literal["fill", "reject"] = "fill"
    responses_web_search: Literal["drop", "reject"] = "drop"
    messages_web_search: Literal["drop", "reject"] = "reject"
    max_tokens_bound: int = MAX_TOKENS_BOUND
    thinking_max_tokens_bound: int = MAX_TOKENS_BOUND
    unsupported: Literal["reject", "ignore"] = "reject"

    def __post_init__(self) -> None:
        """Check every value, so that a bad one fails where it was written."""
        for name, hint in get_type_hints(ConversionOptions).items():
            allowed: tuple[Any, ...] = get_args(hint)
            value = getattr(self, name)
            if allowed and isinstance(allowed[0], str) and value not in allowed:
                raise OptionError(
                    f"`{name}` is {shown(value)}; allowed: {' or '.join(map(repr, allowed))}."
                )
        if not isinstance(self.default_thinking_mode, bool):
            raise OptionError(
                f"`default_thinking_mode` is {shown(self.default_thinking_mode)}; "
                "allowed: True or False."
            )
        for name in ("max_tokens_bound", "thinking_max_tokens_bound"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"`{name}` is {shown(value)}; allowed: an integer from 1.")
        if not isinstance(self.models, Mapping):
            raise OptionError(
                f"`models` is {shown(self.models)}; allowed: a mapping of model names to profiles."
            )
        if not self.models:
            raise OptionError("`models` is empty; name at least one model and its profile.")
        for name, profile in self.models.items():
            if not isinstance(name, str) or profile not in ("v4", "v41"):
                raise OptionError(
                    f"`models` maps {shown(name)} to {shown(profile)}; allowed: a model's name to "
                    "'v4' or 'v41'."
                )

    def bound_of(self, *, thinking: bool) -> int:
        """Return the largest `max_tokens` a request may ask for."""
        return self.thinking_max_tokens_bound if thinking else self.max_tokens_bound
