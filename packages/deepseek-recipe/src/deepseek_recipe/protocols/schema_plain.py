"""Schemas that are surely valid JSON Schemas, seen in one pass, about 1 us for a keyword."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from urllib.parse import unquote

from deepseek_recipe.conversation import JsonValue

__all__ = ["MAX_REFERENCE_CHARS", "broken_regex", "is_plain", "leads_to_schema", "pointer_names"]

MAX_REFERENCE_CHARS = 4096  # reading a longer one takes seconds, and none is in use

# Drafts that agree on all keywords below, or know less of them.
_PLAIN_DRAFTS = frozenset(
    {
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    }
)
_MAX_PATTERN_CHARS = 10_000
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def is_plain(root: JsonValue) -> bool:
    """Return whether a schema is surely valid; False says nothing."""
    stack = [root]
    while stack:
        schema = stack.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            return False
        for keyword, value in schema.items():
            test = _PLAIN.get(keyword)
            if test is not None:
                if not test(value):
                    return False
            elif keyword in _SCHEMA:
                stack.append(value)
            elif keyword in _SCHEMAS:
                if not isinstance(value, list) or not value:
                    return False
                stack += value
            elif keyword in _SCHEMA_MAP:
                if not isinstance(value, dict):
                    return False
                stack += value.values()
            elif keyword == "patternProperties":
                if not isinstance(value, dict) or any(map(broken_regex, value)):
                    return False
                stack += value.values()
            elif keyword == "$ref":
                if not leads_to_schema(root, value):
                    return False
            elif keyword in _RARE and not (schema is root and _is_plain_name(keyword, value)):
                return False
    return True


def _is_plain_name(keyword: str, value: JsonValue) -> bool:
    # of the whole schema; an `$id` without `#` changes nothing about references from `#` on
    if keyword == "$id":
        return isinstance(value, str) and "#" not in value
    return keyword == "$schema" and isinstance(value, str) and value in _PLAIN_DRAFTS


def pointer_names(reference: str) -> list[str]:
    """Return the names on the way from the root to where a reference such as `#/a/b` leads."""
    parts = unquote(reference[1:]).split("/")[1:]
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def leads_to_schema(root: JsonValue, reference: JsonValue) -> bool:
    """Return whether a reference leads from the root of a schema without inner `$id` into it."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    if len(reference) > MAX_REFERENCE_CHARS:
        return False
    place = root
    for name in pointer_names(reference):
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name[:9]) < len(place):
            place = place[int(name[:9])]
        else:
            return False
    return reference == "#" or (reference[1] == "/" and isinstance(place, (dict, bool)))


def _is_string(value: JsonValue) -> bool:
    return isinstance(value, str)


def _is_bool(value: JsonValue) -> bool:
    return isinstance(value, bool)


def _is_list(value: JsonValue) -> bool:
    return isinstance(value, list)


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: JsonValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_step(value: JsonValue) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _is_pattern(value: JsonValue) -> bool:
    return isinstance(value, str) and not broken_regex(value)


def _is_type(value: JsonValue) -> bool:
    if isinstance(value, list):
        return _is_names(value) and bool(value) and _TYPES.issuperset(value)
    return isinstance(value, str) and value in _TYPES


def _is_names_map(value: JsonValue) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _is_names(value: JsonValue) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value)


_PLAIN: Mapping[str, Callable[[JsonValue], bool]] = MappingProxyType(
    {
        "type": _is_type,
        "required": _is_names,
        "dependentRequired": _is_names_map,
        "enum": _is_list,
        "examples": _is_list,
        "pattern": _is_pattern,
        "multipleOf": _is_step,
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
        **dict.fromkeys(
            (
                *("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"),
                *("minProperties", "maxProperties"),
            ),
            _is_count,
        ),
        **dict.fromkeys(("uniqueItems", "readOnly", "writeOnly", "deprecated"), _is_bool),
        **dict.fromkeys(
            ("title", "description", "format", "$comment", "contentEncoding", "contentMediaType"),
            _is_string,
        ),
    }
)
_SCHEMA = frozenset(
    {
        *("items", "additionalProperties", "not", "if", "then", "else", "contains"),
        *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema"),
    }
)
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMA_MAP = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
# Keywords of any draft with rules of their own. All names that are in no set are annotations.
_RARE = frozenset(
    {
        *("$id", "id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "divisibleBy"),
        *("$recursiveAnchor", "$vocabulary", "additionalItems", "dependencies", "extends"),
        *("disallow", "$schema"),
    }
)


def broken_regex(pattern: str) -> bool:
    """Return whether a pattern is broken in every dialect: brackets, a quantifier of nothing, ...

    What a dialect may know and another not (lookbehind, `\\p{L}`, named groups) passes, and so
    does a pattern too long for a quick look: who compiles it has the last word.
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        return False
    depth, in_class, index, can_repeat = 0, False, 0, False
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            if index + 1 == len(pattern):
                return True
            index += 1
            can_repeat = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            if pattern.startswith(("[]", "[^]"), index):
                return False  # a class in ECMA-262, the beginning of one elsewhere
            in_class = can_repeat = True
        elif char in "*+?":
            if not can_repeat:
                return True
        elif char == "(":
            depth += 1
            index += pattern.startswith("(?", index)
            can_repeat = False
        elif char == ")":
            depth -= 1
            if depth < 0:
                return True
            can_repeat = True
        else:
            can_repeat = char != "|"
        index += 1
    return depth != 0 or in_class
