"""Requests of the Messages protocol to a conversation, settings, and how to read the reply.

Checks run in this order: fields that are not supported, model, tools, tool choice, messages in
order, missing reasoning, structured outputs, stop texts, temperature, top_p, max_tokens.
"""

from __future__ import annotations

from deepseek_recipe.conversation import (
    Conversation,
    GenerationSettings,
    Message,
    OutputConstraint,
    ParsingOptions,
    ResponseFormat,
)
from deepseek_recipe.encoding.profile import JOINER, Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.checkpoint import checkpoint_profile
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.fields import Refusals, check_fields
from deepseek_recipe.protocols.limits import (
    check_max_tokens,
    check_stop,
    check_temperature,
    check_top_p,
)
from deepseek_recipe.protocols.messages.models import MessagesRequest
from deepseek_recipe.protocols.messages.tools import offered_tools, read_tools
from deepseek_recipe.protocols.messages.turns import Turns
from deepseek_recipe.protocols.structured_outputs import structured_constraint
from deepseek_recipe.protocols.thinking import resolve_thinking
from deepseek_recipe.protocols.tools import check_beside_tools, output_constraint
from deepseek_recipe.settings import sampling_settings

__all__ = ["convert_messages"]


def convert_messages(request: MessagesRequest, options: ConversionOptions) -> ConvertedRequest:
    """Return what a request of the Messages protocol asks for.

    Raises:
        ConversionError: it asks for something that is not allowed or not supported.
    """
    refusals = Refusals(options.unsupported)
    check_fields(request, refusals)
    profile = checkpoint_profile(request.model, options)
    kind = request.thinking.type if request.thinking else None
    wanted = request.output_config.effort if request.output_config else None
    thinking, effort = resolve_thinking(kind, wanted, options.default_thinking_mode)
    declared = read_tools(request, profile, options.messages_web_search, refusals)
    tools, tool_choice = offered_tools(declared, request.tool_choice, thinking=thinking)
    turns = Turns(
        profile=profile,
        tools={tool.name: tool for tool in declared},
        offered={tool.name for tool in tools},
        web_search=options.messages_web_search,
        refusals=refusals,
        messages=_system(request),
    )
    turns.read(request.messages)
    if thinking and options.missing_reasoning == "reject":
        _check_reasoning(turns.messages)
    structured = structured_constraint(request.structured_outputs)
    check_beside_tools(tools, ResponseFormat(), "", structured, refusals)
    conversation = Conversation(
        messages=tuple(turns.messages),
        thinking=thinking,
        reasoning_effort=effort,
        tools=tools,
        tool_choice=tool_choice,
    )
    one_call = request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
    constraint = output_constraint(
        tools, tool_choice, ResponseFormat(), None, structured=structured, parallel=not one_call
    )
    return ConvertedRequest(
        protocol="messages",
        request=request,
        profile=profile,
        conversation=conversation,
        settings=_settings(request, conversation, profile, options, constraint),
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=tool_choice == "required",
            thinking_initial_stage="reasoning_start" if thinking else None,
            stop_sequences=tuple(request.stop_sequences or ()),
        ),
        stream=bool(request.stream),
        left_out=refusals.left_out,
    )


def _system(request: MessagesRequest) -> list[Message]:
    if request.system is None:
        return []
    if isinstance(request.system, str):
        return [Message("system", (request.system,))]
    return [Message("system", (JOINER.join(block.text for block in request.system),))]


def _check_reasoning(messages: list[Message]) -> None:
    # Older turns are done with; the reasoning behind calls of this one must still be known.
    for message in reversed(messages):
        if message.role == "user":
            return
        if message.tool_calls and message.reasoning is None:
            raise ConversionError(
                "The `content[].thinking` in the thinking mode must be passed back to the API."
            )


def _settings(
    request: MessagesRequest,
    conversation: Conversation,
    profile: Profile,
    options: ConversionOptions,
    constraint: OutputConstraint | None,
) -> GenerationSettings:
    check_stop(request.stop_sequences or ())
    check_temperature(request.temperature)
    check_top_p(request.top_p)
    bound = options.bound_of(thinking=conversation.thinking)
    # This protocol takes a length above the bound for the bound.
    max_tokens = None if request.max_tokens is None else min(request.max_tokens, bound)
    check_max_tokens(max_tokens, bound)
    temperature, top_p = sampling_settings(
        profile.name,
        thinking=conversation.thinking,
        has_tools=bool(conversation.tools),
        temperature=request.temperature,
        top_p=request.top_p,
    )
    return GenerationSettings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        output_constraint=constraint,
    )
