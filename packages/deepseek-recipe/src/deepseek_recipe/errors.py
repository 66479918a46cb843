"""Errors of this package.

RecipeError
    RequestError             a request that is refused; carries what an HTTP answer needs
        BodyError            it is not JSON, or a field has a wrong type      stage `parse`
        ConversionError      it is well formed, but cannot be honoured        stage `convert`
    TokenizerError           a tokenizer file that does not fit, or a token it lacks
    ReplyError               a reply decoder used against its order: chunks after the end, ...
    OptionError              an option of this package with a value that is not allowed
    ConstraintError          a schema, regex or grammar that cannot be enforced as it stands
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BodyError",
    "ConstraintError",
    "ConversionError",
    "OptionError",
    "RecipeError",
    "ReplyError",
    "RequestError",
    "TokenizerError",
    "error_body",
    "shown",
]


_MAX_MESSAGE_CHARS = 2000


class RecipeError(Exception):
    """Anything this package raises on purpose."""


class RequestError(RecipeError):
    """A request that is refused.

    Attributes:
        stage: `parse` (the body) or `convert` (its meaning).
        status_code: HTTP status.
        type, param, code: fields of the error object of the Chat and Responses protocols.
    """

    stage: ClassVar[str]
    status_code: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str] = "invalid_request_error"
    param: None = None

    def __init__(self, message: str) -> None:
        """Take the text for the client; the middle of a very long one, which quotes it, is cut."""
        if len(message) > _MAX_MESSAGE_CHARS:
            half = _MAX_MESSAGE_CHARS // 2
            message = f"{message[:half]} ... {message[-half:]}"
        super().__init__(message)

    @property
    def message(self) -> str:
        """The text for the client."""
        return str(self.args[0])


class BodyError(RequestError):
    """The body is not JSON, or a field is missing or has a wrong type."""

    stage = "parse"


class ConversionError(RequestError):
    """The request is well formed, but what it asks for is not allowed or not supported."""

    stage = "convert"


class TokenizerError(RecipeError):
    """A tokenizer file that cannot be read or does not fit the checkpoint's profile."""


class ReplyError(RecipeError):
    """A reply decoder was used against its order, for example fed after it has finished."""


class OptionError(RecipeError):
    """An option has a value that is not allowed."""


class ConstraintError(RecipeError):
    """A schema, regex or grammar that cannot be enforced as it stands.

    Attributes:
        path: where: a JSON pointer into the schema (`` is all of it), or `line:column`.
        message: what is wrong there, and what to do.
    """

    def __init__(self, path: str, message: str) -> None:
        """Keep the place and the text."""
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


def error_body(error: RequestError, protocol: str) -> dict[str, object]:
    """Return the JSON body of the HTTP answer, in the protocol's own envelope.

    Args:
        error: what was refused.
        protocol: `chat`, `responses` or `messages`.
    """
    if protocol == "messages":
        return {"type": "error", "error": {"type": error.type, "message": error.message}}
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def shown(value: object, limit: int = 80) -> str:
    """Return a value for a message: its repr, cut in the middle when it is long."""
    try:
        text = repr(value[: 2 * limit]) if isinstance(value, str) else repr(value)
    except ValueError:  # Python writes no integer of over 4300 digits
        text = f"<{type(value).__name__} too long to write>"
    return text if len(text) <= limit else f"{text[: limit - 20]} ... {text[-15:]}"
