"""What differs between checkpoints: spellings of special tokens and fixed texts of prompts.

A checkpoint's profile is chosen by name or `model_type`, never guessed from a tokenizer or a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from deepseek_recipe.errors import OptionError, shown

__all__ = ["PROFILES", "V4", "V41", "Profile", "SpecialTokens", "profile_named"]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Spellings of the tokens that have meaning by id. Ids are looked up in the tokenizer at hand.

    Attributes:
        dsml: the mark inside `<...>` of tool markup; brackets and words around it are plain text.
        system, image: None where the checkpoint has none.
        grounding: what the model writes around names and places in an image. In an assistant's
            text of a request these spellings stand for the tokens again.
    """

    bos: str = "<｜begin▁of▁sentence｜>"
    eos: str = "<｜end▁of▁sentence｜>"
    user: str = "<｜User｜>"
    assistant: str = "<｜Assistant｜>"
    think: str = "<think>"
    think_end: str = "</think>"
    latest_reminder: str = "<｜latest_reminder｜>"
    dsml: str = "｜DSML｜"
    system: str | None = None
    image: str | None = None
    grounding: tuple[str, ...] = (
        "<｜ref｜>",
        "<｜/ref｜>",
        "<｜box｜>",
        "<｜/box｜>",
        "<｜point｜>",
        "<｜/point｜>",
        "<｜polygon｜>",
        "<｜/polygon｜>",
    )

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings that a tokenizer must have: a vocabulary may do without grounding."""
        names = (getattr(self, name) for name in self.__slots__ if name != "grounding")
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True)
class Profile:
    """One checkpoint's prompt format.

    Attributes:
        name: `v4` or `v41`.
        tokens: spellings of special tokens.
        vision: images are placeholders; without it they become a plain text.
        systems_in_place: a system message stays where it is, and the first one hosts effort, tools
            and response format; else all of them are collected in front.
        empty_user_texts: an empty user message keeps its place when neighbours are merged, and a
            user message merges with tool results that follow it.
        late_tools: tools can be added in the middle of a conversation.
        namespace_separator: joins a namespace and a tool's name.
        namespace_described: a tool's description begins with its namespace's.
        effort_text: reasoning effort -> text in front, used in thinking mode only.
        block_word, invoke_word, parameter_word: what follows the `dsml` mark in tool markup.
        gap_in_empty_call: a call without parameters has one empty line inside.
        json_object_text, json_schema_head: response-format sections.
        float_style: `python` (repr) or `shortest` (fixed notation for exponents -5 to 15).
    """

    name: Literal["v4", "v41"]
    tokens: SpecialTokens
    vision: bool
    systems_in_place: bool
    empty_user_texts: bool
    late_tools: bool
    namespace_separator: str
    namespace_described: bool
    effort_text: Mapping[str, str]
    block_word: str
    invoke_word: str
    parameter_word: str
    gap_in_empty_call: bool
    json_object_text: str
    float_style: Literal["shortest", "python"]
    json_schema_head: str = field(
        default=(
            "\n\n"
            "## Response Format:\n\n"
            "You MUST strictly adhere to the following schema to reply:\n"
        )
    )


# Marks of the template, in braces, are special tokens where they stand in a prompt.
TOOLS_HEAD = (
    "\n\n"
    "## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can "
    'invoke tools by writing a "<{dsml}{block}>" block like the following:\n\n'
    "<{dsml}{block}>\n"
    '<{dsml}{invoke} name="$TOOL_NAME">\n'
    '<{dsml}{parameter} name="$PARAMETER_NAME" '
    'string="true|false">$PARAMETER_VALUE</{dsml}{parameter}>\n'
    "...\n"
    "</{dsml}{invoke}>\n"
    '<{dsml}{invoke} name="$TOOL_NAME2">\n'
    "...\n"
    "</{dsml}{invoke}>\n"
    "</{dsml}{block}>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all '
    "other types (numbers, booleans, arrays, objects), pass the value in JSON format "
    'and set `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by {think}), you MUST output your complete "
    "reasoning inside {think}...{think_end} BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after {think_end} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)
TOOLS_TAIL = (
    "\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to "
    "invoke tool calls.\n"
)
LATE_TOOLS_HEAD = "\n\n### Updated Tool Schemas\n\n"
TOOL_RESULT = ("<tool_result>", "</tool_result>")
JOINER = "\n\n"
UNSUPPORTED_IMAGE = "[Unsupported Image]"

_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the "
    "problem to resolve the root cause, rigorously stress-testing your logic against "
    "all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every "
    "intermediate step, considered alternative, and rejected hypothesis to ensure "
    "absolutely no assumption is left unchecked.\n\n"
)
_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to "
    "chance: exhaustively decompose the problem into its most fundamental components, "
    "trace every causal chain to its root, and resolve the underlying cause rather "
    "than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from "
    "multiple angles and are certain that no assumption remains unchecked and no error "
    "remains undiscovered.\n\n"
)


def _effort_line(level: int) -> str:
    return (
        f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the "
        "reasoning)\n\n"
    )


V4 = Profile(
    name="v4",
    tokens=SpecialTokens(),
    vision=False,
    systems_in_place=False,
    empty_user_texts=False,
    late_tools=False,
    namespace_separator="__",
    namespace_described=False,
    effort_text=MappingProxyType(
        {"low": "", "high": _ABSOLUTE_MAXIMUM, "xhigh": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM}
    ),
    block_word="tool_calls",
    invoke_word="invoke",
    parameter_word="parameter",
    gap_in_empty_call=False,
    json_object_text=(
        "\n\n"
        "You are a helpful assistant designed to output JSON.\n"
        "## Response Format:\n\n"
        "Reply with JSON object ONLY."
    ),
    float_style="shortest",
)
V41 = Profile(
    name="v41",
    tokens=SpecialTokens(system="<｜System｜>", image="<｜image｜>"),
    vision=True,
    systems_in_place=True,
    empty_user_texts=True,
    late_tools=True,
    namespace_separator="::",
    namespace_described=True,
    effort_text=MappingProxyType(
        {
            "low": _effort_line(50),
            "high": _effort_line(75),
            "xhigh": _effort_line(75),
            "max": _effort_line(100),
        }
    ),
    block_word=" calls",
    invoke_word=" invoke",
    parameter_word=" parameter",
    gap_in_empty_call=True,
    json_object_text=(
        "\n\n"
        "## Response Format:\n\n"
        "You MUST strictly adhere to the following schema to reply:\n"
        '{"type": "json_object"}'
    ),
    float_style="python",
)
PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in (V4, V41)})


def profile_named(name: str) -> Profile:
    """Return the profile `v4` or `v41`.

    Raises:
        OptionError: there is no profile of that name.
    """
    if name not in PROFILES:
        allowed = " or ".join(map(repr, PROFILES))
        raise OptionError(f"The profile is {shown(name)}; allowed: {allowed}.")
    return PROFILES[name]
