"""The subset of JSON Schema for `strict` tools and answers: every property given, none added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConversionError, shown
from deepseek_recipe.protocols.schema_plain import (
    MAX_REFERENCE_CHARS,
    leads_to_schema,
    pointer_names,
)

__all__ = ["DEFINITIONS", "STRICT_ANSWER", "STRICT_TOOL", "StrictUse", "closed", "normalise"]


@dataclass(frozen=True, slots=True)
class StrictUse:
    """What a strict schema is for.

    Attributes:
        lead, noun: words of error messages.
        may_be_empty: whether the object at the top may have no properties.
    """

    lead: str
    noun: str
    may_be_empty: bool


STRICT_TOOL = StrictUse(
    "Invalid tool parameters schema : ", "function parameters schema", may_be_empty=True
)
STRICT_ANSWER = StrictUse("Invalid json schema: ", "json schema", may_be_empty=False)

DEFINITIONS = ("$defs", "definitions")  # members that hold what references lead to

_MAX_DEPTH = 100  # schemas inside one another; far more than any model was shown
_TYPES = ("object", "string", "number", "integer", "boolean", "array", "null")
_UNION_TYPES = ("string", "number", "integer", "boolean", "null")
_FORMATS = ("email", "hostname", "ipv4", "ipv6", "uuid")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Type -> keywords that say something about its values. All others are dropped, which loosens what
# is enforced but never forbids a right value; the three of `_REFUSED` would loosen too much.
_KEYWORDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "object": frozenset({"properties", "enum"}),
        "string": frozenset({"pattern", "format", "enum"}),
        "number": frozenset({"default", "enum", *_BOUNDS}),
        "integer": frozenset({"default", "enum", *_BOUNDS}),
        "boolean": frozenset({"enum"}),
        "array": frozenset({"items", "enum"}),
        "null": frozenset({"enum"}),
    }
)
_ANY_TYPE = frozenset({"anyOf", "$ref", "description"})
# The order in which keywords are written, after `type`. An object's own stand in front of these.
_ORDER = ("items", "anyOf", "$ref", "description", "pattern", "format", "default", *_BOUNDS, "enum")
_REFUSED = ("oneOf", "allOf", "not")


def normalise(schema: JsonValue, use: StrictUse) -> dict[str, JsonValue]:
    """Return the schema in the strict subset: closed objects whose properties are all required.

    Definitions that references lead to follow at the end, in the subset too; others are dropped.

    Raises:
        ConversionError: it is no object schema, says what the subset cannot express, or has a
            reference that leads nowhere in the result.
    """
    normaliser = _Normaliser(use.lead, use.may_be_empty)
    result = normaliser.schema(schema, use.lead, depth=0)
    if result.get("type") != "object":
        raise ConversionError(f"The top level of the {use.noun} must be an object.")
    assert isinstance(schema, dict), "what has a type is an object"
    result |= normaliser.definitions(schema)
    for reference in normaliser.references:
        if not leads_to_schema(result, reference):
            raise ConversionError(
                f"{use.lead}`$ref` {shown(reference)} leads to nothing that a strict schema keeps. "
                "Let it lead to the whole schema (`#`), to a definition at its top "
                "(`#/$defs/NAME`) or to a property."
            )
    return result


def closed(schema: JsonValue) -> JsonValue:
    """Return a schema that `normalise` accepts as it is enforced: all keywords, objects closed.

    The checkpoint is shown the subset; a keyword outside it (`maxLength`, `const`) counts anyway.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for keyword in ("properties", *DEFINITIONS):
        if isinstance(inner := schema.get(keyword), dict):
            result[keyword] = {name: closed(each) for name, each in inner.items()}
    if "items" in schema:
        result["items"] = closed(schema["items"])
    if isinstance(choices := schema.get("anyOf"), list):
        result["anyOf"] = [closed(each) for each in choices]
    named = schema.get("type")
    if named == "object" or (isinstance(named, list) and "object" in named):
        properties = result.setdefault("properties", {})
        result |= {"additionalProperties": False, "required": list(properties or ())}
    return {name: each for name, each in result.items() if each is not None}


@dataclass(frozen=True, slots=True)
class _Normaliser:
    lead: str
    may_be_empty: bool
    references: list[str] = field(default_factory=list)  # all that were read, in order

    def definitions(self, root: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return the members that hold what the references read so far, and theirs, lead to."""
        kept: dict[str, dict[str, JsonValue]] = {}
        for reference in self.references:  # which grows as definitions are read
            if len(reference) > MAX_REFERENCE_CHARS:
                continue
            names = pointer_names(reference)
            if len(names) < 2 or names[0] not in DEFINITIONS:
                continue
            keyword, name = names[:2]
            given = root.get(keyword)
            if isinstance(given, dict) and name in given and name not in kept.get(keyword, ()):
                lead = f"{self.lead}definition {shown(name)}: "
                kept.setdefault(keyword, {})[name] = self.schema(given[name], lead, depth=1)
        return {keyword: kept[keyword] for keyword in DEFINITIONS if keyword in kept}

    def schema(self, value: JsonValue, lead: str, *, depth: int) -> dict[str, JsonValue]:
        if depth > _MAX_DEPTH:
            raise ConversionError(f"{self.lead}more than {_MAX_DEPTH} schemas inside one another")
        if not isinstance(value, dict) or not {"type", "anyOf", "$ref"} & value.keys():
            missing = "one of `type`, `anyOf`, `$ref` field is required"
            raise ConversionError(lead + (missing if lead == self.lead else "missing field `type`"))
        for keyword in _REFUSED:
            if keyword in value:
                raise ConversionError(
                    f"{lead}`{keyword}` is not supported in a strict schema. Use `anyOf`."
                )
        types = self._types(value, lead)
        kept = _ANY_TYPE.union(*(_KEYWORDS[name] for name in types))
        result: dict[str, JsonValue] = {"type": value["type"]} if "type" in value else {}
        if "object" in types:
            self._object(value, result, lead, depth)
        if "array" in types and "items" not in value:
            raise ConversionError(f"{lead}missing field `items`")
        for keyword in _ORDER:
            if keyword in kept and keyword in value:
                read = self._keyword(keyword, value[keyword], types, lead, depth)
                if read is not None:
                    result[keyword] = read
        return result

    def _types(self, value: Mapping[str, JsonValue], lead: str) -> tuple[str, ...]:
        if "type" not in value:
            return ()
        named = value["type"]
        if isinstance(named, list):
            for name in named:
                _one_of(name, _UNION_TYPES, f"{lead}field `type`: ")
            return tuple(map(str, named))
        return (_one_of(named, _TYPES, lead, "variant identifier"),)

    def _object(
        self,
        value: Mapping[str, JsonValue],
        result: dict[str, JsonValue],
        lead: str,
        depth: int,
    ) -> None:
        properties = value.get("properties")
        if properties is None:
            properties = {}
        if not isinstance(properties, dict):
            raise _wrong(properties, "a map", lead)
        required, extra = value.get("required"), value.get("additionalProperties")
        if required is not None:
            _strings(required, lead)
        if extra is not None and not isinstance(extra, bool):
            raise _wrong(extra, "a boolean", lead)
        inner = {
            name: self.schema(each, lead, depth=depth + 1) for name, each in properties.items()
        }
        if not inner and not (depth == 0 and self.may_be_empty):
            raise ConversionError("An object with no properties is not allowed.")
        if extra:
            raise ConversionError("additionalProperties should not be true")
        if isinstance(required, list):
            _check_required(required, inner)
        result |= {"properties": inner, "additionalProperties": False, "required": list(inner)}

    def _keyword(
        self, keyword: str, value: JsonValue, types: tuple[str, ...], lead: str, depth: int
    ) -> JsonValue:
        if keyword == "items":
            return self.schema(value, lead, depth=depth + 1)
        if keyword == "anyOf":
            inside = f"{self.lead}field `anyOf`: "
            if not isinstance(value, list):
                raise _wrong(value, "a sequence", inside)
            return [self.schema(each, inside, depth=depth + 1) for each in value]
        if keyword == "$ref":
            if not isinstance(value, str):
                raise _wrong(value, "a string", f"{self.lead}field `$ref`: ")
            self.references.append(value)
        if value is None:
            return None
        if keyword == "format":
            return _one_of(value, _FORMATS, lead, "string or map")
        if keyword in ("description", "pattern") and not isinstance(value, str):
            raise _wrong(value, "a string", lead)
        if keyword == "enum":
            return _strings(value, lead) if types == ("string",) else _sequence(value, lead)
        if keyword == "default" or keyword in _BOUNDS:
            _check_number(value, types, lead)
        return value


def _check_required(required: list[JsonValue], properties: Mapping[str, JsonValue]) -> None:
    seen: set[JsonValue] = set()
    for name in required:
        if name not in properties:
            raise ConversionError(f"Required property '{name}' not found in object")
        if name in seen:
            raise ConversionError(f"Duplicate required property '{name}'")
        seen.add(name)
    if len(seen) != len(properties):
        raise ConversionError("Required properties must match all properties in the object")


def _check_number(value: JsonValue, types: tuple[str, ...], lead: str) -> None:
    whole = "integer" in types and "number" not in types
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise _wrong(value, "i64" if whole else "a JSON number", lead)


def _sequence(value: JsonValue, lead: str) -> list[JsonValue]:
    if not isinstance(value, list):
        raise _wrong(value, "a sequence", lead)
    return value


def _strings(value: JsonValue, lead: str) -> list[JsonValue]:
    names = _sequence(value, lead)
    for name in names:
        if not isinstance(name, str):
            raise _wrong(name, "a string", lead)
    return names


def _one_of(
    value: JsonValue, allowed: tuple[str, ...], lead: str, expected: str = "string or map"
) -> str:
    if not isinstance(value, str):
        raise _wrong(value, expected, lead)
    if value not in allowed:
        names = ", ".join(f"`{name}`" for name in allowed)
        raise ConversionError(f"{lead}unknown variant `{value[:80]}`, expected one of {names}")
    return value


def _wrong(value: JsonValue, expected: str, lead: str) -> ConversionError:
    """Return the error for a value of a wrong type; `expected` is what belongs there."""
    match value:
        case None:
            found = "null"
        case bool():
            found = f"boolean `{str(value).lower()}`"
        case int():
            found = f"integer `{shown(value)}`"
        case float():
            found = f"floating point `{value!r}`"
        case str():
            found = f'string "{value[:80]}"'
        case list():
            found = "sequence"
        case _:
            found = "map"
    return ConversionError(f"{lead}invalid type: {found}, expected {expected}")
