"""`structured_outputs`: what the whole answer must be, as other servers have the field.

It is the same in all protocols, and the prompt does not mention it: what the model is to write is
said in a message.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from deepseek_recipe.conversation import JsonValue, OutputConstraint, ResponseFormat
from deepseek_recipe.errors import ConversionError, shown
from deepseek_recipe.json_text import dump_compact, load
from deepseek_recipe.protocols.fields import Body
from deepseek_recipe.protocols.schema_check import SchemaChecker

__all__ = ["StructuredOutputs", "constraint_of", "structured_constraint"]

_TEXT = ResponseFormat()


class StructuredOutputs(Body):
    """What the whole answer must be; exactly one member is given."""

    json_schema: object = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    structural_tag: object = None


def structured_constraint(
    asked: StructuredOutputs | None, response_format: ResponseFormat = _TEXT, path: str = ""
) -> OutputConstraint | None:
    """Return the constraint that a request's `structured_outputs` states, None where it is absent.

    Args:
        response_format: what the protocol's own field asks for, which stands at `path`.

    Raises:
        ConversionError: both ask for something, `structured_outputs` has no member or several, or
            its member is not what it must be.
    """
    if asked is None:
        return None
    if response_format.kind != "text":
        raise ConversionError(
            f"`structured_outputs` and `{path}` of type '{response_format.kind}' both say what the "
            "answer must be. Leave out one of the two."
        )
    return constraint_of(asked)


def constraint_of(asked: StructuredOutputs, name: str = "structured_outputs") -> OutputConstraint:
    """Return the constraint that an object states, which is called `name` in messages.

    Raises:
        ConversionError: it has no member or several, or its member is not what it must be.
    """
    _check_one(asked, name)
    if asked.json_object is not None:
        return OutputConstraint("json", "")
    if asked.regex is not None:
        return OutputConstraint("regex", asked.regex)
    if asked.choice is not None:
        return OutputConstraint("choice", dump_compact(asked.choice))
    if asked.grammar is not None:
        return OutputConstraint("ebnf", asked.grammar)
    if asked.structural_tag is not None:
        return OutputConstraint("structural_tag", _tag(asked.structural_tag, name))
    return OutputConstraint("json", _schema(asked.json_schema, name))


def _check_one(asked: StructuredOutputs, name: str) -> None:
    if asked.json_object is False:
        raise ConversionError(
            f"`{name}.json_object` is false; allowed: true. Leave it out if the answer need not be "
            "JSON."
        )
    names = {field: f"`{info.alias or field}`" for field, info in type(asked).model_fields.items()}
    given = [written for field, written in names.items() if getattr(asked, field) is not None]
    if len(given) != 1:
        raise ConversionError(
            f"`{name}` has {' and '.join(given) or 'no member'}; allowed: exactly one of "
            f"{', '.join(names.values())}. Send one."
        )


def _schema(value: JsonValue, name: str) -> str:
    schema = _parsed(value, f"{name}.json", "a JSON Schema")
    SchemaChecker().check(schema, f"Invalid '{name}.json': ")
    return dump_compact(schema)


def _tag(value: JsonValue, name: str) -> str:
    tag = _parsed(value, f"{name}.structural_tag", "an object")
    if not isinstance(tag, dict):
        raise ConversionError(
            f"Invalid '{name}.structural_tag': {shown(tag)} is no object. Send an object, or the "
            "JSON text of one."
        )
    return dump_compact(tag)


def _parsed(value: JsonValue, path: str, what: str) -> JsonValue:
    if not isinstance(value, str):
        return value
    try:
        return load(value)
    except ValueError as error:
        raise ConversionError(
            f"Invalid '{path}': the text {shown(value)} is not JSON: {error}. Send {what}, or the "
            "JSON text of one."
        ) from error
