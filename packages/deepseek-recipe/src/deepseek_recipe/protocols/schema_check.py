"""Whether a JSON value is a JSON Schema, in time linear in its size, without fetching anything.

Nearly every schema that is sent is plain: only common keywords, all well formed. That is seen in
one pass (about 1 us for a keyword). Whatever is not seen to be plain goes to the jsonschema
library, which has the last word and the reason, but takes some 100 us for a keyword; so it gets a
bounded amount of work for one request.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.json_text import dump_compact, load
from deepseek_recipe.protocols.schema_plain import MAX_REFERENCE_CHARS, broken_regex, is_plain

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator
    from referencing.jsonschema import SchemaRegistry

__all__ = ["SchemaChecker", "json_shown"]

# Work on schemas that are not plain, over one request, in values: less than a second.
_MAX_WORK = 2000
# The library compares every pair where items must be unique; so many pairs cost like one value.
# Measured with 800 objects in `type`: 4 us for a pair, and about 300 us for a value elsewhere.
_PAIRS_PER_VALUE = 75
_MAX_CACHED_CHARS = 16_384
_MAX_SHOWN_CHARS = 200


class SchemaChecker:
    """Checks the schemas of one request."""

    def __init__(self) -> None:
        """Start with the whole budget for schemas that are not plain."""
        self._left = _MAX_WORK

    def check(self, schema: JsonValue, lead: str) -> None:
        """Refuse what is no JSON Schema: draft 2020-12, or the draft that `$schema` names.

        Args:
            lead: start of the error message, for example `Invalid json schema: `.

        Raises:
            ConversionError: it breaks a rule of the draft, a reference leads nowhere or out of it,
                or it is beyond what is checked for one request.
        """
        if is_plain(schema):
            return
        self._left -= _work(schema, self._left)
        if self._left <= 0:
            raise ConversionError(
                f"{lead}about {_MAX_WORK} values are the limit for schemas with errors, rare "
                "keywords or an old `$schema`. Send smaller or simpler schemas."
            )
        text = dump_compact(schema)
        fault = (_fault if len(text) <= _MAX_CACHED_CHARS else _fault.__wrapped__)(text)
        if fault is not None:
            raise ConversionError(lead + fault)


def json_shown(value: JsonValue) -> str:
    """Return a value for a message: compact JSON, cut when it is long."""
    text = dump_compact(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]} ..."


def _work(root: JsonValue, limit: int) -> int:
    """Return how much work a schema is for the library, in values; may stop at `limit`."""
    stack, work = [root], 0
    while stack and work < limit:
        value = stack.pop()
        work += 1
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list):
            stack += value
            work += sum(isinstance(each, (dict, list)) for each in value) ** 2 // (
                2 * _PAIRS_PER_VALUE
            )
    return work


@lru_cache(maxsize=256)
def _fault(text: str) -> str | None:
    """Return what is wrong with the schema of which `text` is the JSON, None for nothing."""
    schema: Any = load(text)
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    try:
        validator = _metaschema_validator(draft if isinstance(draft, str) else None)
        if validator is None:
            return (
                f"Unknown meta-schema: '{str(draft)[:_MAX_SHOWN_CHARS]}'. Leave `$schema` out for "
                "draft 2020-12"
            )
        error = next(validator.iter_errors(schema), None)
        if error is not None:
            return _text_of(error)
        # a part under another draft would go on unchecked
        return _inner_draft_fault(schema) or _reference_fault(schema)
    except RecursionError:
        return "schemas are nested too deeply"


def _drafts() -> SchemaRegistry:
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    return cast("SchemaRegistry", REGISTRY)


@lru_cache(maxsize=8)
def _metaschema_validator(draft: str | None) -> Validator | None:
    import jsonschema

    latest = jsonschema.Draft202012Validator
    cls: type[Validator] = latest
    if draft is not None:
        cls = jsonschema.validators.validator_for({"$schema": draft}, default=latest)
        if cls is jsonschema.Draft3Validator or (
            cls is latest and draft.rstrip("#") != latest.META_SCHEMA["$id"]
        ):
            return None
    formats = jsonschema.FormatChecker(formats=())
    formats.checks("regex")(lambda value: not isinstance(value, str) or not broken_regex(value))
    # with a registry of its own it never fetches
    return cls(cls.META_SCHEMA, format_checker=formats, registry=_drafts())


def _text_of(error: ValidationError) -> str:
    subject = json_shown(error.instance)
    limit: Any = error.validator_value
    match error.validator:
        case "type" if isinstance(limit, str):
            return f'{subject} is not of type "{limit}"'
        case "type":
            names = ", ".join(f'"{name}"' for name in sorted(limit))
            return f"{subject} is not of types {names}"
        case "minimum":
            return f"{subject} is less than the minimum of {limit}"
        case "exclusiveMinimum":
            return f"{subject} is less than or equal to the minimum of {limit}"
        case "minItems":
            return f"{subject} has less than {limit} item{'' if limit == 1 else 's'}"
        case "uniqueItems":
            return f"{subject} has non-unique elements"
        case "format":
            return f'{subject} is not a "{limit}"'
        case "pattern":
            return f"{subject} does not match {json_shown(limit)}"
        case "enum":
            return f"{subject} is not one of {json_shown(limit)}"
        case "anyOf":
            return f"{subject} is not valid under any of the schemas listed in the 'anyOf' keyword"
        case keyword:
            return f"{subject} is not valid under the keyword '{keyword}' of the meta-schema"


def _inner_draft_fault(schema: JsonValue) -> str | None:
    stack = list(schema.values()) if isinstance(schema, dict) else []
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$schema"), str):
                return "`$schema` stands inside the schema. Leave it to the top"
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return None


def _reference_fault(schema: JsonValue) -> str | None:
    from referencing import Resource
    from referencing.exceptions import PointerToNowhere, Unresolvable
    from referencing.jsonschema import DRAFT202012

    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    uri = resource.id() or ""
    try:
        resolver = _drafts().with_resource(uri, resource).crawl().resolver(base_uri=uri)
        stack = [(resource, resolver)]
        while stack:
            resource, resolver = stack.pop()
            contents = resource.contents
            reference = contents.get("$ref") if isinstance(contents, dict) else None
            if isinstance(reference, str):
                if len(reference) > MAX_REFERENCE_CHARS:
                    count = len(reference)
                    return f"a `$ref` of {count} characters; {MAX_REFERENCE_CHARS} are allowed"
                resolver.lookup(reference)
            stack += [(each, resolver.in_subresource(each)) for each in resource.subresources()]
    except PointerToNowhere as error:
        return f"Pointer '{error.ref[:_MAX_SHOWN_CHARS]}' does not exist"
    except Unresolvable as error:
        name = error.ref[:_MAX_SHOWN_CHARS]
        return (
            f"Resource '{name}' is not present in a registry and retrieving it failed: "
            f"Retrieval is disabled, cannot fetch {name}"
        )
    except ValueError as error:  # of the standard library, for an address such as `http://[`
        return f"an `$id` or `$ref` is no address: {error}"
    return None
