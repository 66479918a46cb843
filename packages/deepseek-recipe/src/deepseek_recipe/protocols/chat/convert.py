"""Requests of Chat Completions to a conversation, settings, and how to read the reply.

Checks run in this order: fields that are not supported, model, tools, messages, missing reasoning,
structured outputs, the word json, tool choice, prefix, stop, stream_options, schema of the answer,
n, penalties, temperature, top_p, top_logprobs, max_tokens, seed.
"""

from __future__ import annotations

from typing import Literal

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
from deepseek_recipe.protocols.chat.models import (
    ChatRequest,
    JsonObjectForm,
    JsonSchemaForm,
    NamedChoice,
    RegexForm,
)
from deepseek_recipe.protocols.chat.turns import read_messages
from deepseek_recipe.protocols.checkpoint import checkpoint_profile
from deepseek_recipe.protocols.converted import ConvertedRequest
from deepseek_recipe.protocols.fields import Refusals, check_fields
from deepseek_recipe.protocols.limits import (
    check_max_tokens,
    check_penalty,
    check_seed,
    check_stop,
    check_temperature,
    check_top_logprobs,
    check_top_p,
)
from deepseek_recipe.protocols.structured_outputs import structured_constraint
from deepseek_recipe.protocols.thinking import resolve_thinking
from deepseek_recipe.protocols.tools import (
    Declaration,
    NamedTool,
    check_beside_tools,
    checked_answer_schema,
    choose_tools,
    declared_tools,
    output_constraint,
)
from deepseek_recipe.settings import sampling_settings

__all__ = ["convert_chat"]


def convert_chat(request: ChatRequest, options: ConversionOptions) -> ConvertedRequest:
    """Return what a request of Chat Completions asks for.

    Raises:
        ConversionError: it asks for something that is not allowed or not supported.
    """
    refusals = Refusals(options.unsupported)
    check_fields(request, refusals)
    profile = checkpoint_profile(request.model, options)
    thinking, effort = resolve_thinking(
        request.thinking.type if request.thinking else None,
        request.reasoning_effort,
        options.default_thinking_mode,
    )
    declared = _declared(request)
    messages = read_messages(request.messages, profile)
    if thinking and options.missing_reasoning == "reject":
        _check_reasoning(messages)
    response_format = _response_format(request)
    structured = structured_constraint(
        request.structured_outputs, response_format, "response_format"
    )
    if response_format.kind == "json_object":
        _check_json_word(messages)
    tools, tool_choice = choose_tools(declared, _choice(request), thinking=thinking)
    check_beside_tools(tools, response_format, "response_format", structured, refusals)
    conversation = Conversation(
        messages=messages,
        thinking=thinking,
        reasoning_effort=effort,
        tools=tools,
        tool_choice=tool_choice,
        response_format=response_format,
    )
    if messages and messages[-1].prefix:
        _check_prefix(declared, response_format, structured)
    stops = _checked_stops(request)
    if request.stream_options is not None and not request.stream:
        raise ConversionError("stream_options should be set along with stream = true")
    constraint = output_constraint(
        tools,
        tool_choice,
        response_format,
        _answer_schema(request),
        structured=structured,
        parallel=request.parallel_tool_calls is not False,
        strict=_is_strict(request),
    )
    return ConvertedRequest(
        protocol="chat",
        request=request,
        profile=profile,
        conversation=conversation,
        settings=_settings(request, conversation, profile, options, constraint),
        parsing=ParsingOptions(
            parse_tool_calls=bool(tools),
            starts_in_tool_calls=tool_choice == "required",
            parse_json_output=response_format.kind == "json_object",
            thinking_initial_stage=_stage(conversation),
            stop_sequences=stops,
        ),
        stream=bool(request.stream),
        left_out=refusals.left_out,
    )


def _declared(request: ChatRequest) -> tuple[Tool, ...]:
    return declared_tools(
        [
            Declaration(
                name=tool.function.name,
                description=tool.function.description,
                parameters=tool.function.parameters,
                strict=tool.function.strict,
                path=f"tools[{index}].function.name",
            )
            for index, tool in enumerate(request.tools or ())
        ]
    )


def _choice(request: ChatRequest) -> Literal["auto", "none", "required"] | NamedTool:
    choice = request.tool_choice
    if isinstance(choice, NamedChoice):
        return NamedTool(choice.function.name)
    return choice or "auto"


def _check_reasoning(messages: tuple[Message, ...]) -> None:
    # Older turns are done with; the reasoning behind calls of this one must still be known.
    for message in reversed(messages):
        if message.role == "user":
            return
        if message.tool_calls and message.reasoning is None:
            raise ConversionError(
                "The `reasoning_content` in the thinking mode must be passed back to the API."
            )


def _response_format(request: ChatRequest) -> ResponseFormat:
    match request.response_format:
        case JsonObjectForm():
            return ResponseFormat("json_object")
        case JsonSchemaForm(json_schema=answer):
            return ResponseFormat("json_schema", schema=answer.json_schema)
        case RegexForm(regex=regex):
            return ResponseFormat("regex", regex=regex)
        case _:
            return ResponseFormat()


def _answer_schema(request: ChatRequest) -> JsonValue:
    if not isinstance(request.response_format, JsonSchemaForm):
        return None
    answer = request.response_format.json_schema
    return checked_answer_schema(answer.json_schema, answer.strict)


def _is_strict(request: ChatRequest) -> bool:
    form = request.response_format
    return isinstance(form, JsonSchemaForm) and bool(form.json_schema.strict)


def _check_json_word(messages: tuple[Message, ...]) -> None:
    if not any("json" in text_of(message.content).lower() for message in messages):
        raise ConversionError(
            "Prompt must contain the word 'json' in some form to use 'response_format' of type "
            "'json_object'."
        )


def _check_prefix(
    declared: tuple[Tool, ...],
    response_format: ResponseFormat,
    structured: OutputConstraint | None,
) -> None:
    if response_format.kind == "json_object":
        raise ConversionError("response_format json_object should not be used with prefix")
    form = None if response_format.kind == "text" else f"response_format {response_format.kind}"
    if structured is not None:
        form = "structured_outputs"
    if form is not None:
        raise ConversionError(
            f"{form} should not be used with prefix: it is about the whole answer, of which the "
            "reply is the end only. Leave out one of the two."
        )
    if declared:
        raise ConversionError("Function call should not be used with prefix")


def _stage(
    conversation: Conversation,
) -> Literal["reasoning_start", "reasoning_continuation", "content_continuation"] | None:
    if not conversation.thinking:
        return None
    last = conversation.messages[-1] if conversation.messages else None
    if last is None or not last.prefix:
        return "reasoning_start"
    if last.content:
        return "content_continuation"
    return "reasoning_continuation" if last.reasoning else "reasoning_start"


def _checked_stops(request: ChatRequest) -> tuple[str, ...]:
    if isinstance(request.stop, str):
        check_stop([request.stop], bare=True)
        return (request.stop,)
    check_stop(request.stop or ())
    return tuple(request.stop or ())


def _settings(
    request: ChatRequest,
    conversation: Conversation,
    profile: Profile,
    options: ConversionOptions,
    constraint: OutputConstraint | None,
) -> GenerationSettings:
    if request.n not in (None, 1):
        raise ConversionError("Invalid n value (currently only n = 1 is supported)")
    check_penalty("presence_penalty", request.presence_penalty)
    check_penalty("frequency_penalty", request.frequency_penalty)
    check_temperature(request.temperature)
    check_top_p(request.top_p)
    if request.top_logprobs is not None and not request.logprobs:
        raise ConversionError(
            "Invalid top_logprobs and logprobs value, logprobs must be set to true if "
            "top_logprobs is used."
        )
    check_top_logprobs(request.top_logprobs)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    check_max_tokens(max_tokens, options.bound_of(thinking=conversation.thinking))
    check_seed(request.seed)
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
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs,
        seed=request.seed,
        output_constraint=constraint,
    )
