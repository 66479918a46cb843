"""`ConvertedRequest`: what all three protocols' conversions return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from deepseek_recipe.conversation import Conversation, GenerationSettings, ParsingOptions
from deepseek_recipe.encoding.profile import Profile
from deepseek_recipe.protocols.fields import Body
from deepseek_recipe.settings import resolve_max_tokens, to_float32

__all__ = ["ConvertedRequest"]

_NO_NAMES: Mapping[str, tuple[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ConvertedRequest:
    """A request, understood.

    Attributes:
        request: the typed body, for what a response repeats of it.
        profile: of the checkpoint that the model's name stands for.
        namespaces: a tool's full name -> (namespace, name), Responses only.
        custom_tools: names of tools whose input is one text, Responses only.
        left_out: places of fields and items that are not honoured and were ignored.
    """

    protocol: Literal["chat", "responses", "messages"]
    request: Body
    profile: Profile
    conversation: Conversation
    settings: GenerationSettings
    parsing: ParsingOptions
    stream: bool
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=lambda: _NO_NAMES)
    custom_tools: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    @property
    def overridden(self) -> tuple[str, ...]:
        """Fields of the request that the checkpoint's own settings or bounds replaced."""
        found = []
        for name in ("temperature", "top_p"):
            asked = getattr(self.request, name, None)
            if asked is not None and to_float32(asked) != getattr(self.settings, name):
                found.append(name)
        if self.protocol == "messages":  # the others refuse what is out of bounds
            asked = getattr(self.request, "max_tokens", None)
            if asked is not None and asked != self.settings.max_tokens:
                found.append("max_tokens")
        return tuple(found)

    def resolve_max_tokens(self, prompt_tokens: int, context_limit: int) -> int:
        """Return how many tokens the reply may have.

        Raises:
            ConversionError: prompt and requested length exceed the context.
        """
        return resolve_max_tokens(
            self.settings.max_tokens,
            prompt_tokens=prompt_tokens,
            context_limit=context_limit,
            thinking=self.conversation.thinking,
            reasoning_effort=self.conversation.reasoning_effort,
        )
