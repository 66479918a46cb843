"""The fixed parts of one profile's prompts, and the markup of tools and of calls to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from deepseek_recipe.conversation import JsonValue, Tool, ToolCall
from deepseek_recipe.encoding.profile import TOOLS_HEAD, Profile, SpecialTokens
from deepseek_recipe.json_text import FloatStyle, dump_prompt, load

__all__ = ["Marks", "Piece", "Special", "append_calls", "marks_of", "tool_lines"]


@dataclass(frozen=True, slots=True)
class Special:
    """A token that is meant by its id, not by its text.

    Attributes:
        optional: where a vocabulary lacks it, its spelling is plain text.
    """

    spelling: str
    optional: bool = False


Piece: TypeAlias = str | Special


@dataclass(frozen=True, slots=True)
class Marks:
    """The special tokens and fixed texts that a profile's template emits.

    Attributes:
        tools_head: text before the list of tools, with the tokens it mentions.
        block_open, block_close, invoke_open, invoke_close, parameter_open, parameter_close: tool
            markup, each with what is fixed around its mark.
        empty_call: what stands inside a call without parameters.
        grounding: the tokens that an assistant's text can hold, by spelling.
        grounding_pattern: finds their spellings; has one group, for `split`.
    """

    bos: Special
    eos: Special
    user: Special
    assistant: Special
    think: Special
    think_end: Special
    reminder: Special
    system: Special | None
    image: Special | None
    tools_head: tuple[Piece, ...]
    block_open: tuple[Piece, ...]
    block_close: tuple[Piece, ...]
    invoke_open: tuple[Piece, ...]
    invoke_close: tuple[Piece, ...]
    parameter_open: tuple[Piece, ...]
    parameter_close: tuple[Piece, ...]
    empty_call: str
    grounding: Mapping[str, Special]
    grounding_pattern: re.Pattern[str]

    def append_assistant_text(self, pieces: list[Piece], text: str) -> None:
        """Append what an assistant said, with its grounding tokens as tokens."""
        for part in self.grounding_pattern.split(text):
            pieces.append(self.grounding.get(part, part))


def marks_of(profile: Profile) -> Marks:
    """Return the fixed parts of a profile's prompts; they are made once per profile."""
    words = (profile.block_word, profile.invoke_word, profile.parameter_word)
    return _marks(profile.tokens, words, profile.gap_in_empty_call)


@lru_cache(maxsize=16)
def _marks(tokens: SpecialTokens, words: tuple[str, ...], gap: bool) -> Marks:
    block, invoke, parameter = words
    dsml = Special(tokens.dsml)
    return Marks(
        bos=Special(tokens.bos),
        eos=Special(tokens.eos),
        user=Special(tokens.user),
        assistant=Special(tokens.assistant),
        think=Special(tokens.think),
        think_end=Special(tokens.think_end),
        reminder=Special(tokens.latest_reminder),
        system=None if tokens.system is None else Special(tokens.system),
        image=None if tokens.image is None else Special(tokens.image),
        tools_head=_tools_head(tokens, block, invoke, parameter),
        block_open=("\n\n<", dsml, f"{block}>\n"),
        block_close=("</", dsml, f"{block}>"),
        invoke_open=("<", dsml, f'{invoke} name="'),
        invoke_close=("</", dsml, f"{invoke}>\n"),
        parameter_open=("<", dsml, f'{parameter} name="'),
        parameter_close=("</", dsml, f"{parameter}>\n"),
        empty_call="\n" if gap else "",
        grounding=MappingProxyType(
            {each: Special(each, optional=True) for each in tokens.grounding}
        ),
        # with no spelling at all, a pattern that matches nowhere
        grounding_pattern=re.compile(f"({'|'.join(map(re.escape, tokens.grounding)) or '(?!)'})"),
    )


def _tools_head(
    tokens: SpecialTokens, block: str, invoke: str, parameter: str
) -> tuple[Piece, ...]:
    special = {
        "{dsml}": Special(tokens.dsml),
        "{think}": Special(tokens.think),
        "{think_end}": Special(tokens.think_end),
    }
    words = {"{block}": block, "{invoke}": invoke, "{parameter}": parameter}
    parts = re.split(r"(\{[a-z_]+\})", TOOLS_HEAD)
    return tuple(special.get(part, words.get(part, part)) for part in parts)


def tool_lines(tools: tuple[Tool, ...], float_style: FloatStyle) -> str:
    """Return the declarations of tools, one JSON object a line."""
    return "\n".join(
        dump_prompt(
            {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters,
            },
            float_style,
        )
        for tool in tools
    )


def append_calls(
    pieces: list[Piece], calls: tuple[ToolCall, ...], marks: Marks, float_style: FloatStyle
) -> None:
    """Append the markup of an assistant's calls.

    Names and values stand there as they are: they are plain pieces, so that no text of theirs can
    become a mark.
    """
    pieces += marks.block_open
    for call in calls:
        pieces += marks.invoke_open
        pieces.append(f'{call.name}">\n')
        arguments = _arguments(call.arguments)
        for name, value in arguments.items():
            pieces += marks.parameter_open
            if isinstance(value, str):
                pieces.append(f'{name}" string="true">{value}')
            else:
                pieces.append(f'{name}" string="false">{dump_prompt(value, float_style)}')
            pieces += marks.parameter_close
        if not arguments:
            pieces.append(marks.empty_call)
        pieces += marks.invoke_close
    pieces += marks.block_close


def _arguments(text: str) -> dict[str, JsonValue]:
    try:
        value = load(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
