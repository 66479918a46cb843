"""The response object of the Responses protocol, as far as the request determines it."""

from __future__ import annotations

from deepseek_recipe.decoding.stream import Usage
from deepseek_recipe.protocols.responses.models import (
    JsonSchemaFormat,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
)
from deepseek_recipe.protocols.responses.tool_models import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ToolSearchTool,
)

__all__ = ["response_object", "usage_object"]


def response_object(
    request: ResponsesRequest, *, response_id: str, model: str, created: int, echo: bool
) -> dict[str, object]:
    """Return the response of a reply that has just begun.

    Args:
        response_id: id of the response.
        model: the model's name for the client.
        created: seconds since 1970.
        echo: repeat `instructions`, `max_output_tokens`, `temperature`, `top_p`, `top_logprobs` and
            `user` of the request. Its reasoning, text, tools and how they may be called are always
            repeated.
    """
    source = request if echo else ResponsesRequest(model=request.model)  # all defaults
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "content_filters": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": source.instructions,
        "max_output_tokens": source.max_output_tokens,
        "max_tool_calls": None,
        "model": model,
        "moderation": None,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": _reasoning(request.reasoning or ReasoningConfig()),
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if source.temperature is None else source.temperature,
        "text": _text(request.text or TextConfig()),
        "tool_choice": _tool_choice(request),
        # a tool of another kind was left out
        "tools": [_tool(tool) for tool in request.tools or () if not isinstance(tool, dict)],
        "top_logprobs": source.top_logprobs or 0,
        "top_p": 1.0 if source.top_p is None else source.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": source.user,
        "metadata": {},
    }


def usage_object(usage: Usage) -> dict[str, object]:
    """Return the token counts; without a tokenizer the reasoning's count as 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _reasoning(reasoning: ReasoningConfig) -> dict[str, object]:
    return {"effort": reasoning.effort, "summary": reasoning.summary}


def _text(text: TextConfig) -> dict[str, object]:
    shape = text.format
    value: dict[str, object] = {"type": shape.type}
    if isinstance(shape, JsonSchemaFormat):
        value |= {
            "name": shape.name,
            "schema": shape.json_schema,
            "description": shape.description,
            "strict": shape.strict,
        }
    return {"format": value, "verbosity": text.verbosity}


def _tool_choice(request: ResponsesRequest) -> object:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)


def _tool(tool: FunctionTool | CustomTool | NamespaceTool | ToolSearchTool) -> dict[str, object]:
    value: dict[str, object] = {"type": tool.type}
    if isinstance(tool, ToolSearchTool):
        return value | {
            "execution": tool.execution,
            "description": tool.description,
            "parameters": tool.parameters,
        }
    value["name"] = tool.name
    if isinstance(tool, FunctionTool):
        return value | {
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
    if isinstance(tool, NamespaceTool):
        return value | {
            "description": tool.description,
            "tools": [_tool(member) for member in tool.tools],
        }
    given = {"description": tool.description, "format": tool.format}
    return value | {key: each for key, each in given.items() if each is not None}
