"""Requests of the Responses protocol to a conversation, settings, and how to read the reply.

Checks run in this order: fields that are not supported, model, tools, input there at all, tools
that searches found, items in order, missing reasoning, tool choice, form of the answer, structured
outputs, temperature, top_p, top_logprobs, max_output_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from deepseek_recipe.conversation import (
    Conversation,
    GenerationSettings,
    JsonValue,
    Message,
    OutputConstraint,
    ParsingOptions,
    ResponseFormat,
    Tool,
    text_of,
)
from deepseek_recipe.encoding.profile import Profile
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.checkpoint import checkpoint_profile
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.fields import Refusals, check_fields
from deepseek_recipe.protocols.limits import (
    check_max_tokens,
    check_temperature,
    check_top_logprobs,
    check_top_p,
)
from deepseek_recipe.protocols.responses.input_items import (
    InputItem,
    InputMessage,
    ToolSearchOutput,
)
from deepseek_recipe.protocols.responses.models import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesRequest,
    WebSearchChoice,
)
from deepseek_recipe.protocols.responses.toolbox import NO_SERVER_TOOLS, Toolbox
from deepseek_recipe.protocols.responses.turns import Turns
from deepseek_recipe.protocols.structured_outputs import structured_constraint
from deepseek_recipe.protocols.thinking import resolve_thinking
from deepseek_recipe.protocols.tools import (
    NamedTool,
    ToolChoice,
    check_beside_tools,
    checked_answer_schema,
    choose_tools,
    declared_tools,
    output_constraint,
)
from deepseek_recipe.settings import sampling_settings

__all__ = ["convert_responses"]


def convert_responses(request: ResponsesRequest, options: ConversionOptions) -> ConvertedRequest:
    """Return what a request of the Responses protocol asks for.

    Raises:
        ConversionError: it asks for something that is not allowed or not supported.
    """
    refusals = Refusals(options.unsupported)
    check_fields(request, refusals)
    profile = checkpoint_profile(request.model, options)
    wanted = request.reasoning.effort if request.reasoning else None
    thinking, effort = resolve_thinking(None, wanted, options.default_thinking_mode)
    toolbox = Toolbox(profile, refusals, options.responses_web_search)
    toolbox.declare(request.tools or ())
    items = _items(request)
    tools, found = _read_tools(toolbox, items, profile)
    turns = Turns(
        profile=profile,
        toolbox=toolbox,
        found=found,
        web_search=options.responses_web_search,
        refusals=refusals,
        messages=[Message("system", (request.instructions,))] if request.instructions else [],
    )
    turns.read(items)
    if thinking and options.missing_reasoning == "reject":
        _check_reasoning(turns.messages)
    tools, tool_choice = choose_tools(tools, _choice(request, options, refusals), thinking=thinking)
    answer, schema = _answer(request, turns.messages)
    structured = structured_constraint(request.structured_outputs, answer, "text.format")
    check_beside_tools(tools, answer, "text.format", structured, refusals)
    conversation = Conversation(
        messages=_with_tools_left(turns.messages, tools),
        thinking=thinking,
        reasoning_effort=effort,
        tools=tools,
        tool_choice=tool_choice,
        response_format=answer,
    )
    constraint = output_constraint(
        tools,
        tool_choice,
        answer,
        schema,
        structured=structured,
        parallel=request.parallel_tool_calls is not False,
        strict=_is_strict(request),
    )
    return ConvertedRequest(
        protocol="responses",
        request=request,
        profile=profile,
        conversation=conversation,
        settings=_settings(request, conversation, profile, options, constraint),
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=tool_choice == "required",
            parse_json_output=answer.kind == "json_object",
            thinking_initial_stage="reasoning_start" if thinking else None,
        ),
        stream=bool(request.stream),
        namespaces=MappingProxyType(toolbox.namespaces),
        custom_tools=frozenset(toolbox.custom_tools),
        left_out=refusals.left_out,
    )


def _items(request: ResponsesRequest) -> Sequence[InputItem]:
    if request.input is None:
        if not request.instructions:
            raise ConversionError("Either input or instructions must be provided")
        return ()
    if isinstance(request.input, str):
        return (InputMessage(role="user", content=request.input),)
    if not request.input:
        raise ConversionError("Input items array must not be empty")
    return request.input


def _read_tools(
    toolbox: Toolbox, items: Sequence[InputItem], profile: Profile
) -> tuple[tuple[Tool, ...], dict[int, tuple[Tool, ...]]]:
    # All tools, and those that are new with the search output at an index.
    ends: dict[int, tuple[int, int]] = {}
    if profile.late_tools:
        for index, item in enumerate(items):
            if isinstance(item, ToolSearchOutput):
                start = len(toolbox.declarations)
                toolbox.find(item.tools, f"input[{index}].tools")
                ends[index] = (start, len(toolbox.declarations))
    tools = declared_tools(toolbox.declarations)
    return tools, {index: tools[start:end] for index, (start, end) in ends.items()}


def _check_reasoning(messages: Sequence[Message]) -> None:
    # Older turns are done with; the reasoning behind calls of this one must still be known.
    for message in reversed(messages):
        if message.role == "user":
            return
        if message.tool_calls and not message.reasoning:
            raise ConversionError(
                "The `reasoning_text` in the thinking mode must be passed back to the API."
            )


def _choice(
    request: ResponsesRequest, options: ConversionOptions, refusals: Refusals
) -> ToolChoice | NamedTool:
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if not isinstance(choice, WebSearchChoice):
        return NamedTool(choice.name)
    if options.responses_web_search == "reject":
        raise ConversionError(NO_SERVER_TOOLS)
    refusals.leave_out("tool_choice")
    return "auto"


def _is_strict(request: ResponsesRequest) -> bool:
    form = request.text.format if request.text else None
    return isinstance(form, JsonSchemaFormat) and bool(form.strict)


def _answer(
    request: ResponsesRequest, messages: Sequence[Message]
) -> tuple[ResponseFormat, JsonValue]:
    # The form of the answer, and the schema to enforce.
    form = request.text.format if request.text else None
    if isinstance(form, JsonSchemaFormat):
        schema = checked_answer_schema(form.json_schema, form.strict)
        return ResponseFormat("json_schema", schema=form.json_schema), schema
    if not isinstance(form, JsonObjectFormat):
        return ResponseFormat(), None
    if not any("json" in text_of(message.content).lower() for message in messages):
        raise ConversionError(
            "Response input messages must contain the word 'json' in some form to use "
            "'text.format' of type 'json_object'."
        )
    return ResponseFormat("json_object"), None


def _with_tools_left(messages: Sequence[Message], tools: tuple[Tool, ...]) -> tuple[Message, ...]:
    # A choice takes tools away, also those that came during the conversation.
    names = {tool.name for tool in tools}
    kept = []
    for message in messages:
        if message.tools:
            left = tuple(tool for tool in message.tools if tool.name in names)
            if not left:
                continue
            message = replace(message, tools=left)
        kept.append(message)
    return tuple(kept)


def _settings(
    request: ResponsesRequest,
    conversation: Conversation,
    profile: Profile,
    options: ConversionOptions,
    constraint: OutputConstraint | None,
) -> GenerationSettings:
    check_temperature(request.temperature)
    check_top_p(request.top_p)
    check_top_logprobs(request.top_logprobs)
    bound = options.bound_of(thinking=conversation.thinking)
    check_max_tokens(request.max_output_tokens, bound)
    temperature, top_p = sampling_settings(
        profile.name,
        thinking=conversation.thinking,
        has_tools=bool(conversation.tools),
        temperature=request.temperature,
        top_p=request.top_p,
    )
    return GenerationSettings(
        max_tokens=request.max_output_tokens,
        temperature=temperature,
        top_p=top_p,
        logprobs=request.top_logprobs is not None,
        top_logprobs=request.top_logprobs,
        output_constraint=constraint,
    )
