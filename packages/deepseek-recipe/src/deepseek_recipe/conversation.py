"""The form in which all three protocols end: messages, tools, settings. Values only, all frozen.

A message's content is a tuple of pieces that stand one after another as they are: text, and images
at the place where the prompt gets a placeholder. What joins the parts of a message is already in
the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Content",
    "Conversation",
    "GenerationSettings",
    "ImageSource",
    "JsonValue",
    "Message",
    "OutputConstraint",
    "ParsingOptions",
    "ResponseFormat",
    "Role",
    "Tool",
    "ToolCall",
    "text_of",
]

Role: TypeAlias = Literal["system", "user", "assistant", "tool", "latest_reminder"]
# A parsed JSON value: None, bool, int, float, str, list or dict with str keys.
JsonValue: TypeAlias = object


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where the pixels of one image come from.

    Attributes:
        kind: `data_url` (the picture itself) or `url` (http or https, not fetched here).
        url: as sent.
        detail: `low`, `high`, `original` or `auto`.
        path: place in the request, for messages about it.
    """

    kind: Literal["data_url", "url"]
    url: str
    detail: str
    path: str


Content: TypeAlias = tuple[str | ImageSource, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is the text as sent, which may not be JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the assistant may call.

    Attributes:
        name: as the model sees it (namespaces already joined to it).
        description: None renders as an empty text.
        parameters: JSON Schema of the arguments, already normalised when `strict`.
        strict: as sent; never rendered.
        deferred: known to the output side, not rendered in the head of the prompt.
        definitions: of `strict` parameters: `$defs` and `definitions` that their references lead
            to, normalised too. They are enforced, but not rendered.
        exact: of `strict` parameters: the schema to enforce, with the keywords that are not
            rendered.
    """

    name: str
    description: str | None
    parameters: JsonValue
    strict: bool | None = None
    deferred: bool = False
    definitions: Mapping[str, JsonValue] | None = None
    exact: JsonValue = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        reasoning: the assistant's reasoning; None where it was not sent.
        tool_calls: the assistant's calls, in order.
        tool_call_id: of a `tool` message: the call it answers.
        prefix: of the last, assistant message: the reply continues this text.
        tools: of a `system` message: tools that become available at this point.
    """

    role: Role
    content: Content = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False
    tools: tuple[Tool, ...] = ()


def text_of(content: Content) -> str:
    """Return the text of a content, images left out."""
    return "".join(piece for piece in content if isinstance(piece, str))


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form asked of the answer; `schema` is as sent (never normalised)."""

    kind: Literal["text", "json_object", "json_schema", "regex"] = "text"
    schema: JsonValue = None
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered.

    Attributes:
        reasoning_effort: `low`, `high`, `xhigh` or `max`; None exactly when `thinking` is off.
        tools: after `tool_choice` was applied: empty for `none`, one for a named tool.
    """

    messages: tuple[Message, ...]
    thinking: bool
    reasoning_effort: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    response_format: ResponseFormat = ResponseFormat()


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What decoding must enforce.

    Attributes:
        kind: `tool_call` and `tool_call_required` are about calls, the others about the answer.
        schema: of the tool kinds, compact JSON of the tools; of `json`, that of the schema, "" for
            any JSON; of `regex`, the pattern; of `choice`, compact JSON of the list of texts; of
            `ebnf`, the grammar; of `structural_tag`, compact JSON of the object.
        parallel: of the tool kinds: False allows at most one call.
        definitions: of the tool kinds: compact JSON of an object, from the name of a strict tool to
            the members (`$defs`, `definitions`) that its parameters need beside those in `schema`;
            "" where no tool needs any.
        exact: where something is `strict`, compact JSON of what to enforce instead of `schema`,
            which shows the checkpoint's subset of it: of `json` the schema, of the tool kinds an
            object from the name of a strict tool to its parameters; else "".
    """

    kind: Literal[
        "tool_call", "tool_call_required", "json", "regex", "choice", "ebnf", "structural_tag"
    ]
    schema: str
    parallel: bool = True
    definitions: str = ""
    exact: str = ""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How tokens are to be chosen, after the rules of the checkpoint.

    Attributes:
        max_tokens: as requested; None leaves the default to `resolve_max_tokens`.
        temperature, top_p: float32 values.
        logprobs: whether log-probabilities are wanted; `top_logprobs` alternatives each.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    logprobs: bool = False
    top_logprobs: int | None = None
    seed: int | None = None
    output_constraint: OutputConstraint | None = None


@dataclass(frozen=True, slots=True)
class ParsingOptions:
    """How the reply is to be read.

    Attributes:
        parse_tool_calls: tool markup is meaningful.
        starts_in_tool_calls: the prompt already opened the tool block.
        parse_json_output: text around the JSON value is replaced by blanks.
        thinking_initial_stage: None (thinking off), `reasoning_start`, `reasoning_continuation`
            (the prompt ends inside reasoning) or `content_continuation` (inside the content).
        stop_sequences: texts that end the content.
    """

    parse_tool_calls: bool = False
    starts_in_tool_calls: bool = False
    parse_json_output: bool = False
    thinking_initial_stage: (
        Literal["reasoning_start", "reasoning_continuation", "content_continuation"] | None
    ) = None
    stop_sequences: tuple[str, ...] = ()
