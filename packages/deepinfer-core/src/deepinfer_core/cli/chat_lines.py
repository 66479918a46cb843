"""JSON lines of `generate --chat`: conversations in, replies out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deepinfer_core.cli.jsonl import constraint_notes
from deepinfer_core.errors import RequestError
from deepinfer_core.types import ChatOutput

__all__ = ["Conversation", "chat_line", "read_conversations"]


@dataclass(frozen=True)
class Conversation:
    """A request body of Chat Completions, or what is wrong with its line of the input."""

    body: Mapping[str, object] = field(default_factory=dict)
    line: int | None = None
    error: RequestError | None = None


def read_conversations(
    lines: Iterable[bytes], defaults: Mapping[str, object]
) -> list[Conversation]:
    """Return the conversations of JSON lines; blank lines are left out.

    Args:
        lines: such as `{"messages": [{"role": "user", "content": "Hello"}], "seed": 3}`.
        defaults: fields of lines that do not say otherwise.
    """
    conversations = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            body = {**defaults, **_read_object(line)}
            conversations.append(Conversation(body, number))
        except RequestError as error:
            conversations.append(Conversation(line=number, error=error))
    return conversations


def _read_object(line: bytes) -> Mapping[str, object]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this is not JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict) or "messages" not in body:
        raise RequestError(
            'this is no conversation; write {"messages": [{"role": "user", "content": "..."}]}.',
            param="messages",
        )
    return body


def chat_line(output: ChatOutput, conversation: Conversation) -> dict[str, object]:
    """Return the line of a conversation that was answered, or index and error of one refused."""
    line: dict[str, object] = {"index": output.index}
    if output.response is not None:
        choices = output.response["choices"]
        assert isinstance(choices, list)
        line |= {
            "message": output.message,
            "finish_reason": output.finish_reason,
            "logprobs": choices[0]["logprobs"],
            "usage": output.response["usage"],
        }
        notes = {"malformed": output.malformed, "overridden": output.overridden}
        line |= {name: list(texts) for name, texts in notes.items() if texts}
        line |= constraint_notes(output.output)
    error, raw = conversation.error, output.output
    message = raw.error if error is None else str(error)
    if message is not None:
        if conversation.line is not None:
            message = f"Line {conversation.line}: {message}"
        param = raw.error_param if error is None else error.param
        code = raw.error_code if error is None else error.code
        line["error"] = {"message": message, "param": param, "code": code}
    return line
