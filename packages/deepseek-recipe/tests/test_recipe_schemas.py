"""Whether a value is a JSON Schema: agreement with the library, messages, bounded work."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.errors import ConversionError
from deepseek_recipe.protocols.schema_check import SchemaChecker
from deepseek_recipe.protocols.schema_plain import broken_regex, is_plain

LATEST = jsonschema.Draft202012Validator
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def fault(schema: object) -> str | None:
    try:
        SchemaChecker().check(schema, "")
    except ConversionError as error:
        return error.message
    return None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("s", '"s" is not of types "boolean", "object"'),
        ([], '[] is not of types "boolean", "object"'),
        ({"type": "fü\n"}, "\"fü\\n\" is not valid under any of the schemas listed in the 'anyOf'"),
        ({"type": []}, "[] is not valid under any of the schemas listed in the 'anyOf' keyword"),
        ({"properties": []}, '[] is not of type "object"'),
        ({"required": ["a", "a"]}, '["a","a"] has non-unique elements'),
        ({"minProperties": -1}, "-1 is less than the minimum of 0"),
        ({"multipleOf": 0}, "0 is less than or equal to the minimum of 0"),
        ({"anyOf": []}, "[] has less than 1 item"),
        ({"pattern": "("}, '"(" is not a "regex"'),
        ({"patternProperties": {"(": {}}}, '"(" is not a "regex"'),
        ({"items": [{}]}, '[{}] is not of types "boolean", "object"'),
        ({"$anchor": "a b"}, '"a b" does not match'),
        ({"exclusiveMinimum": True}, 'true is not of type "number"'),
        ({"$schema": "foo"}, "Unknown meta-schema: 'foo'."),
        ({"$schema": 5}, '5 is not of type "string"'),
        ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"),
        ({"$ref": "http://x/y"}, "Resource 'http://x/y' is not present in a registry"),
        ({"$id": "http://[", "$ref": "x"}, "an `$id` or `$ref` is no address"),
    ],
)
def test_fault_is_told(schema: object, reason: str) -> None:
    found = fault(schema)
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"enum": []},
        {"minLength": 1.0},
        {"format": "nope", "x-note": 5},
        {"pattern": "(?<=a)\\p{L}[\\w-.](?<n>x)"},
        {"$schema": DRAFT_4, "exclusiveMinimum": True, "minimum": 1},
        {"$schema": DRAFT_7, "items": [{}], "$id": "http://x/y"},
        {"$defs": {"a/b": {}}, "$ref": "#/$defs/a~1b"},
        {"anyOf": [{}], "$ref": "#/anyOf/0"},
        {"$anchor": "here", "items": {"$ref": "#here"}},
        {"$id": "http://x/", "$defs": {"a": {"$id": "a"}}, "$ref": "a"},
        {"$ref": "#"},
        {"dependencies": {"a": ["b"]}},
    ],
)
def test_valid_schema_passes(schema: object) -> None:
    assert fault(schema) is None


# ---- the quick look -----------------------------------------------------------------------------

keywords = st.sampled_from(
    [
        *("type", "required", "enum", "pattern", "multipleOf", "minimum", "minLength", "items"),
        *("uniqueItems", "title", "properties", "additionalProperties", "anyOf", "$ref", "$defs"),
        *("$schema", "$id", "if", "patternProperties", "dependentRequired", "x-note", "const"),
        *("examples", "$comment", "deprecated", "prefixItems", "unevaluatedItems", "$anchor"),
        *("dependentSchemas", "contains", "propertyNames", "format", "default", "readOnly"),
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(-2, 2)
    | st.sampled_from(["object", "string", "a", "#", "#/$defs/a", "#a", "(", DRAFT_7, DRAFT_4])
)
schema_like = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(keywords, inner, max_size=4)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keywords, schema_like, max_size=4))
def test_plain_schema_is_valid(schema: dict[str, Any]) -> None:
    if is_plain(schema):
        cls = jsonschema.validators.validator_for(schema, default=LATEST)
        cls.check_schema(schema)


@given(schema_like)
def test_any_value_is_a_schema_or_is_not(schema: object) -> None:
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    found = fault(schema)
    if found is None and draft is None:
        LATEST.check_schema(schema)


@pytest.mark.parametrize("pattern", ["(", ")", "[", "a\\", "*", "(?", "a|*", "(+)", "[\\]"])
def test_pattern_broken_in_every_dialect_is_seen(pattern: str) -> None:
    assert broken_regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["", "a++", "[(]", "\\(", "[\\]]", "(?:a)(?=b)(?<n>c)", "[](]", "[^]", "a{2}", "^{.*}$"],
)
def test_pattern_of_some_dialect_passes(pattern: str) -> None:
    assert not broken_regex(pattern)


# ---- bounded work -------------------------------------------------------------------------------


def test_large_plain_schema_passes() -> None:
    properties = {f"p{index}": {"type": "string"} for index in range(50_000)}
    assert fault({"type": "object", "properties": properties}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$anchor": "a", "properties": {f"p{index}": {} for index in range(3000)}},
        {"type": [{"a": index} for index in range(1000)]},
        {"$schema": DRAFT_4, "enum": [[index] for index in range(900)]},
    ],
)
def test_costly_schema_is_refused(schema: object) -> None:
    assert "about 2000 values are the limit" in str(fault(schema))


def test_work_is_bounded_over_all_schemas_of_a_request() -> None:
    checker = SchemaChecker()
    with pytest.raises(ConversionError, match="about 2000 values"):
        for index in range(1000):
            checker.check({"$anchor": f"a{index}", "enum": [1, 2, 3]}, "")


def test_deep_schema_is_refused_not_a_crash() -> None:
    schema: dict[str, Any] = {"minLength": -1}
    for _ in range(190):
        schema = {"items": schema}
    assert fault(schema) == "schemas are nested too deeply"


def test_long_value_is_cut_in_a_message() -> None:
    assert len(str(fault({"type": "x" * 100_000}))) < 400


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"$schema": "http://json-schema.org/draft-03/schema#", "items": 3}, "Unknown meta-schema"),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "definitions": 1}, "Unknown meta"),
        (
            {
                "properties": {
                    "p": {"$schema": "http://json-schema.org/draft-04/schema#", "id": 1.5}
                }
            },
            "inside the schema",
        ),
        ({"properties": {"p": {"$schema": "https://x", "minLength": 1.5}}}, "of type"),
        ({"not": {"$schema": "https://x"}}, "inside the schema"),
        ({"$ref": "#/" + "%" * 10**6}, "characters; 4096 are allowed"),
    ],
)
def test_what_the_library_cannot_take_is_an_error_of_the_schema(
    schema: dict[str, object], word: str
) -> None:
    with pytest.raises(ConversionError, match=word):
        SchemaChecker().check(schema, "Bad: ")


def test_references_into_lists_are_plain() -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}}}
    for index in range(300):
        schema["properties"][f"p{index}"] = {"$ref": "#/properties/a/anyOf/0"}  # type: ignore[index]
    assert is_plain(schema)
    SchemaChecker().check(schema, "Bad: ")
    schema["properties"]["b"] = {"$ref": "#/properties/a/anyOf/1"}  # type: ignore[index]
    assert not is_plain(schema)
