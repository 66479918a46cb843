"""The request of the Messages protocol: its fields, and what becomes of each.

Fields that the client library sends as HTTP headers (`betas`, `user_profile_id`, `workspace_id`)
are none of the body's.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from deepseek_recipe.protocols.fields import Body, hint, refused
from deepseek_recipe.protocols.messages.blocks import CacheControl, Content, SystemText
from deepseek_recipe.protocols.structured_outputs import StructuredOutputs
from deepseek_recipe.protocols.thinking import Effort, ThinkingKind

__all__ = [
    "ClientTool",
    "InputMessage",
    "MessagesRequest",
    "NamedChoice",
    "ServerTool",
    "ToolChoice",
]

_NO_FORMAT = "The schema of an answer is sent as `structured_outputs.json`."
_NO_FALLBACK = "The request is answered by the model it names, or not at all."


class InputMessage(Body):
    """One message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: Annotated[
        object, refused("A message stays in the conversation for good.", "never")
    ] = None
    output_config: Annotated[
        object, refused("Effort and format hold for the whole request.", {})
    ] = None


class ClientTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: object = None
    defer_loading: bool | None = None
    strict: Annotated[
        object, refused("That arguments fit the schema is not guaranteed in this protocol.", False)
    ] = None
    allowed_callers: Annotated[
        object, refused("Only the model itself calls tools.", ["direct"])
    ] = None
    input_examples: Annotated[
        object, refused("The model sees no examples; put them into `description`.", [])
    ] = None
    eager_input_streaming: Annotated[object, hint("Arguments are always streamed at once.")] = None
    cache_control: CacheControl = None


class ServerTool(Body):
    """A tool that the server would run; dropped or refused as a whole."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        str,
        hint("Web search is dropped or refused, as the server's option says; others are refused."),
    ]


def _tool_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "server" if isinstance(kind, str) and kind != "custom" else "client"


_Tool: TypeAlias = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[ServerTool, Tag("server")],
    Discriminator(_tool_kind),
]


class PlainChoice(Body):
    """Whether tools may, must or must not be called."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Body):
    """The one tool that must be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


ToolChoice: TypeAlias = Annotated[PlainChoice | NamedChoice, Field(discriminator="type")]


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: ThinkingKind
    budget_tokens: Annotated[
        object, hint("The model decides how long it reasons, guided by the effort.")
    ] = None
    display: Annotated[object, hint("Reasoning is always shown in full.")] = None
    block_binding: Annotated[object, hint("Where reasoning comes from is not checked.")] = None


class OutputConfig(Body):
    """How much effort the reply is worth."""

    effort: Effort | None = None
    format: Annotated[object, refused(_NO_FORMAT)] = None
    task_budget: Annotated[object, refused("No budget is kept over several requests.")] = None


class MessagesRequest(Body):
    """A request of the Messages protocol."""

    model: str
    messages: list[InputMessage]
    system: SystemText | None = None
    max_tokens: int | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: list[_Tool] | None = None
    tool_choice: ToolChoice | None = None
    structured_outputs: StructuredOutputs | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    top_k: Annotated[
        object, refused("The checkpoint is sampled with `temperature` and `top_p` only.")
    ] = None
    output_format: Annotated[object, refused(_NO_FORMAT)] = None
    context_management: Annotated[
        object,
        refused(
            "Nothing is cleared from the conversation.",
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
    ] = None
    compaction: Annotated[object, refused("The conversation is never summarised.")] = None
    thread: Annotated[object, refused("No conversation is kept between requests.")] = None
    container: Annotated[object, refused("There are no containers.")] = None
    mcp_servers: Annotated[object, refused("The server calls no MCP servers.", [])] = None
    fallbacks: Annotated[object, refused(_NO_FALLBACK, [])] = None
    fallback_credit_token: Annotated[object, refused(_NO_FALLBACK)] = None
    inference_geo: Annotated[
        object, refused("Where the model runs is not the request's choice.")
    ] = None
    speed: Annotated[object, refused("There is one speed.", "standard")] = None
    billing_policy: Annotated[
        object, refused("Nothing is billed.", {"type": "billing_policy", "bill_to": "self"})
    ] = None
    service_tier: Annotated[object, hint("There is one tier.")] = None
    metadata: Annotated[object, hint("Who asks makes no difference to the answer.")] = None
    diagnostics: Annotated[object, hint("Cache misses are not explained.")] = None
    cache_control: CacheControl = None
    anthropic_version: Annotated[object, hint("There is one version of the protocol.")] = None
    anthropic_beta: Annotated[object, hint("What a beta adds is known by the fields it adds.")] = (
        None
    )
