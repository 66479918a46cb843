"""Declarations of tools, the choice among them, strict schemas, and what is enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepseek_recipe.conversation import OutputConstraint, ResponseFormat, Tool
from deepseek_recipe.errors import ConversionError
from deepseek_recipe.options import ConversionOptions
from deepseek_recipe.protocols.dispatch import convert, parse
from deepseek_recipe.protocols.strict import STRICT_ANSWER, STRICT_TOOL, normalise
from deepseek_recipe.protocols.tools import (
    Declaration,
    NamedTool,
    checked_answer_schema,
    choose_tools,
    declared_tools,
    output_constraint,
)

STRING = {"type": "string"}
A, B = Tool("a", None, {}), Tool("b", "d", {"type": "object"}, strict=False)


def declare(*declarations: Declaration, **options: Any) -> tuple[Tool, ...]:
    return declared_tools(declarations, **options)


def declaration(name: str = "a", parameters: object = None, **more: Any) -> Declaration:
    fields = {"description": None, "strict": None, "path": "tools[0].name", **more}
    return Declaration(name=name, parameters=parameters, **fields)


def refusal(action: object, *arguments: Any, **named: Any) -> str:
    assert callable(action)
    with pytest.raises(ConversionError) as caught:
        action(*arguments, **named)
    return caught.value.message


# ---- declarations -------------------------------------------------------------------------------


def test_declaration_becomes_a_tool() -> None:
    each = declaration("a-B_9", {"type": "object"}, description="d", strict=False, deferred=True)
    assert declare(each) == (Tool("a-B_9", "d", {"type": "object"}, strict=False, deferred=True),)


def test_missing_parameters_are_empty_or_refused() -> None:
    assert declare(declaration())[0].parameters == {}
    assert refusal(declare, declaration(), missing_parameters="error") == (
        'Invalid schema for function \'a\': null is not of types "boolean", "object"'
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "Invalid 'tools[0].name': empty string."),
        ("a b", "Invalid 'tools[0].name': string does not match pattern."),
        ("é", "Invalid 'tools[0].name': string does not match pattern."),
        ("a\n", "Invalid 'tools[0].name': string does not match pattern."),
        ("a" * 129, "Invalid 'tools[0].name': string too long."),
    ],
)
def test_bad_name_is_refused_by_its_place(name: str, reason: str) -> None:
    assert refusal(declare, declaration(name), max_name_len=128).startswith(reason)


def test_names_have_no_limit_without_one() -> None:
    assert declare(declaration("a" * 10_000))


def test_names_are_checked_before_uniqueness_and_that_before_schemas() -> None:
    bad = declaration("b", "s")
    assert "empty string" in refusal(
        declare, bad, declaration("a"), declaration("a"), declaration("")
    )
    assert refusal(declare, bad, declaration(), declaration()) == "Tool names must be unique."


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({}, "null"),
        (True, "null"),
        ({"type": "string"}, '"string"'),
        ({"type": ["object", "null"]}, '["object","null"]'),
    ],
)
def test_parameters_are_an_object(parameters: object, kind: str) -> None:
    assert refusal(declare, declaration("a", parameters)) == (
        "Invalid schema for function 'a': schema must be a JSON Schema of 'type: \"object\"', got "
        f"'type: {kind}'."
    )


# ---- choice -------------------------------------------------------------------------------------


def test_choice_without_tools_is_auto_or_none() -> None:
    for choice in ("auto", "required", NamedTool("a")):
        assert choose_tools((), choice, thinking=True) == ((), "auto")
    assert choose_tools((), "none", thinking=True) == ((), "none")


def test_choice_keeps_the_tools_that_may_be_called() -> None:
    assert choose_tools((A, B), "auto", thinking=True) == ((A, B), "auto")
    assert choose_tools((A, B), "none", thinking=True) == ((), "none")
    assert choose_tools((A, B), "required", thinking=False) == ((A, B), "required")
    assert choose_tools((A, B), NamedTool("b"), thinking=False) == ((B,), "required")


def test_no_call_is_forced_in_thinking_mode() -> None:
    for choice in ("required", NamedTool("a")):
        reason = refusal(choose_tools, (A,), choice, thinking=True)
        assert reason == "Thinking mode does not support this tool_choice"


def test_unknown_name_is_reported_before_thinking() -> None:
    reason = refusal(choose_tools, (A,), NamedTool("z"), thinking=True)
    assert reason == (
        "Invalid value for 'tool_call': no function named 'z' was specified in the 'tools' "
        "parameter."
    )


# ---- what is enforced ---------------------------------------------------------------------------


def test_tools_come_before_the_form_of_the_answer() -> None:
    form = ResponseFormat("json_object")
    assert output_constraint((A,), "auto", form, None) == OutputConstraint(
        "tool_call",
        '[{"type":"function","function":'
        '{"name":"a","description":null,"parameters":{},"strict":null}}]',
    )
    deferred = Tool("é", "d", {"x": 1e-7}, strict=True, deferred=True)
    assert output_constraint((deferred,), "required", form, None) == OutputConstraint(
        "tool_call_required",
        '[{"type":"function","function":{"name":"é","description":"d",'
        '"parameters":{"x":1e-7},"strict":true},"defer_loading":true}]',
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (ResponseFormat(), None),
        (ResponseFormat("json_object"), OutputConstraint("json", "")),
        (ResponseFormat("json_schema", schema=1), OutputConstraint("json", '{"a":[1,2]}')),
        (ResponseFormat("regex", regex="a+"), OutputConstraint("regex", "a+")),
    ],
)
def test_form_of_the_answer_is_enforced(form: ResponseFormat, expected: object) -> None:
    assert output_constraint((), "auto", form, {"a": [1, 2]}) == expected


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_at_most_is_part_of_the_constraint(choice: Any) -> None:
    for parallel in (True, False):
        constraint = output_constraint((A,), choice, ResponseFormat(), None, parallel=parallel)
        assert constraint is not None
        assert (constraint.parallel, constraint.definitions) == (parallel, "")
    assert output_constraint((), "auto", ResponseFormat(), None, parallel=False) is None


def test_structured_outputs_count_where_there_are_no_tools() -> None:
    wanted = OutputConstraint("choice", '["a"]')
    assert output_constraint((), "auto", ResponseFormat(), None, structured=wanted) is wanted
    beside = output_constraint((A,), "auto", ResponseFormat(), None, structured=wanted)
    assert beside is not None and beside.kind == "tool_call"


def test_answer_schema_is_checked_and_made_strict() -> None:
    assert checked_answer_schema(True, None) is True
    schema = {"type": "object", "properties": {"a": STRING}}
    assert checked_answer_schema(schema, False) is schema
    assert checked_answer_schema(schema, True) == normalise(schema, STRICT_ANSWER)
    assert refusal(checked_answer_schema, 5, None).startswith("Invalid json schema: 5 is not of")
    assert refusal(checked_answer_schema, {"type": "array", "items": STRING}, True) == (
        "The top level of the json schema must be an object."
    )


# ---- strict schemas -----------------------------------------------------------------------------


def strict(inner: object) -> Any:
    """Return what becomes of a property's schema, as JSON so that the order counts."""
    result: Any = normalise({"type": "object", "properties": {"a": inner}}, STRICT_TOOL)
    return json.dumps(result["properties"]["a"])


def test_strict_object_is_closed_and_needs_all_properties() -> None:
    schema = {
        "$defs": {},
        "description": "d",
        "title": "t",
        "properties": {"b": STRING, "a": {"type": "integer"}},
        "type": "object",
    }
    assert json.dumps(normalise(schema, STRICT_TOOL)) == (
        '{"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, '
        '"additionalProperties": false, "required": ["b", "a"], "description": "d"}'
    )


@pytest.mark.parametrize("schema", [None, {"type": "object"}, {"type": "object", "required": []}])
def test_strict_object_without_properties_is_empty_at_the_top(schema: object) -> None:
    assert declare(declaration("a", schema, strict=True))[0].parameters == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "required": [],
    }


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (
            {"enum": ["x"], "format": "uuid", "pattern": "p", "description": "d", **STRING},
            '{"type": "string", "description": "d", "pattern": "p", "format": "uuid", '
            '"enum": ["x"]}',
        ),
        (
            {"type": "integer", "minimum": 0, "default": 1, "multipleOf": 2, "enum": [2, 4]},
            '{"type": "integer", "default": 1, "minimum": 0, "multipleOf": 2, "enum": [2, 4]}',
        ),
        (
            {"type": "number", "exclusiveMaximum": 0.5},
            '{"type": "number", "exclusiveMaximum": 0.5}',
        ),
        ({"type": "boolean", "default": True, "const": True}, '{"type": "boolean"}'),
        ({**STRING, "minLength": 1, "title": 5, "default": "x"}, '{"type": "string"}'),
        (
            {"type": "array", "minItems": 1, "items": {**STRING, "maxLength": 2}},
            '{"type": "array", "items": {"type": "string"}}',
        ),
        (
            {"type": ["string", "null"], "enum": ["x", None]},
            '{"type": ["string", "null"], "enum": ["x", null]}',
        ),
        (
            {"anyOf": [STRING, {"type": "null"}], "description": "d"},
            '{"anyOf": [{"type": "string"}, {"type": "null"}], "description": "d"}',
        ),
        ({"$ref": "#", "title": "t"}, '{"$ref": "#"}'),
        ({**STRING, "description": None, "enum": None}, '{"type": "string"}'),
    ],
)
def test_strict_schema_keeps_what_the_subset_has(schema: object, kept: str) -> None:
    assert strict(schema) == kept


INVALID = "Invalid tool parameters schema : "
UNTYPED = INVALID + "one of `type`, `anyOf`, `$ref` field is required"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        *((each, UNTYPED) for each in ({}, True, 5, None, {"enum": [1]}, {"oneOf": [STRING]})),
        ({"type": "array"}, INVALID + "missing field `items`"),
        ({"type": "array", "items": {}}, UNTYPED),
        ({"type": "foo"}, INVALID + "unknown variant `foo`, expected one of `object`, `string`"),
        ({"type": None}, INVALID + "invalid type: null, expected variant identifier"),
        ({"type": ["object", "null"]}, INVALID + "field `type`: unknown variant `object`"),
        ({"type": ["array"]}, INVALID + "field `type`: unknown variant `array`"),
        ({**STRING, "format": "date"}, INVALID + "unknown variant `date`, expected one of `email`"),
        ({**STRING, "enum": ["a", 1]}, INVALID + "invalid type: integer `1`, expected a string"),
        ({**STRING, "pattern": 5}, INVALID + "invalid type: integer `5`, expected a string"),
        ({"type": "integer", "default": 3.5}, INVALID + "invalid type: floating point `3.5`"),
        ({"type": "number", "minimum": True}, INVALID + "invalid type: boolean `true`, expected a"),
        ({**STRING, "oneOf": []}, INVALID + "`oneOf` is not supported"),
        ({**STRING, "allOf": []}, INVALID + "`allOf` is not supported"),
        ({**STRING, "not": {}}, INVALID + "`not` is not supported"),
        ({"anyOf": [{}]}, INVALID + "field `anyOf`: missing field `type`"),
        ({"anyOf": 5}, INVALID + "field `anyOf`: invalid type: integer `5`, expected a sequence"),
        ({"$ref": 5}, INVALID + "field `$ref`: invalid type: integer `5`, expected a string"),
        ({"type": "object"}, "An object with no properties is not allowed."),
    ],
)
def test_what_the_strict_subset_cannot_say_is_refused(schema: object, reason: str) -> None:
    assert refusal(strict, schema).startswith(reason)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"additionalProperties": True}, "additionalProperties should not be true"),
        ({"additionalProperties": {}}, INVALID + "invalid type: map, expected a boolean"),
        ({"required": []}, "Required properties must match all properties in the object"),
        ({"required": ["x"]}, "Required property 'x' not found in object"),
        ({"required": ["a", "a"]}, "Duplicate required property 'a'"),
        ({"required": "a"}, INVALID + 'invalid type: string "a", expected a sequence'),
        ({"properties": []}, INVALID + "invalid type: sequence, expected a map"),
    ],
)
def test_strict_object_with_other_rules_is_refused(more: dict[str, Any], reason: str) -> None:
    schema = {"type": "object", "properties": {"a": STRING}, **more}
    assert refusal(normalise, schema, STRICT_TOOL) == reason


# ---- definitions of strict schemas --------------------------------------------------------------

CLOSED = {"type": "object", "properties": {"z": STRING}}
CLOSED_STRICT = {**CLOSED, "additionalProperties": False, "required": ["z"]}


def with_definitions(inner: object, **members: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": inner}, **members}


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        (
            with_definitions({"$ref": "#/$defs/R"}, **{"$defs": {"R": CLOSED}}),
            {"$defs": {"R": CLOSED_STRICT}},
        ),
        (
            with_definitions(
                {"$ref": "#/definitions/R"}, definitions={"R": {**STRING, "title": 1}}
            ),
            {"definitions": {"R": STRING}},
        ),
        (  # what nothing refers to is neither kept nor read
            with_definitions({"$ref": "#/$defs/R"}, **{"$defs": {"R": STRING, "S": {"not": 5}}}),
            {"$defs": {"R": STRING}},
        ),
        (with_definitions(STRING, **{"$defs": {"R": STRING}, "definitions": 5}), {}),
        (  # one leads to the other
            with_definitions(
                {"anyOf": [{"$ref": "#/definitions/S"}, {"type": "null"}]},
                **{"$defs": {"R": STRING}, "definitions": {"S": {"$ref": "#/$defs/R"}}},
            ),
            {"$defs": {"R": STRING}, "definitions": {"S": {"$ref": "#/$defs/R"}}},
        ),
        (  # into itself
            with_definitions(
                {"$ref": "#/$defs/N"},
                **{"$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}}}},
            ),
            {"$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}}}},
        ),
        (  # into the inside of a definition, by a name that is escaped
            with_definitions(
                {"$ref": "#/$defs/a~1b%25/properties/z"}, **{"$defs": {"a/b%": CLOSED}}
            ),
            {"$defs": {"a/b%": CLOSED_STRICT}},
        ),
    ],
)
def test_strict_schema_keeps_the_definitions_in_use(schema: Any, kept: dict[str, Any]) -> None:
    result = normalise(schema, STRICT_ANSWER)
    assert {name: result[name] for name in ("$defs", "definitions") if name in result} == kept
    assert list(result)[:4] == ["type", "properties", "additionalProperties", "required"]
    assert json.dumps(normalise(result, STRICT_ANSWER)) == json.dumps(result)


def test_properties_named_as_keywords_refer_to_nothing() -> None:
    schema = {"type": "object", "properties": {"$ref": STRING, "$defs": STRING}}
    assert normalise(schema, STRICT_TOOL)["required"] == ["$ref", "$defs"]
    reference = {"type": "array", "items": STRING, "enum": [{"$ref": "#/none"}]}
    assert strict(reference) == json.dumps(reference)


@pytest.mark.parametrize(
    "reference",
    [
        *("#/$defs/none", "#/none", "#/$defs", "#name", "", "R", "https://x/y", "#/properties/b"),
        "#/properties/a/$defs/S",
        "#/" + "%" * 100_000,
    ],
)
def test_strict_reference_to_nothing_is_refused(reference: str) -> None:
    inner = {"anyOf": [{"$ref": reference}], "$defs": {"S": STRING}}
    reason = refusal(
        normalise, with_definitions(inner, **{"$defs": {"R": STRING}, "$id": "x"}), STRICT_TOOL
    )
    assert reason.startswith("Invalid tool parameters schema : `$ref` ")
    assert "leads to nothing that a strict schema keeps" in reason


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ({"oneOf": []}, "Invalid json schema: definition 'R': missing field `type`"),
        (True, "Invalid json schema: definition 'R': missing field `type`"),
        ({**STRING, "not": {}}, "Invalid json schema: definition 'R': `not` is not supported"),
        ({"type": "object"}, "An object with no properties is not allowed."),
        ({**CLOSED, "required": []}, "Required properties must match all properties"),
    ],
)
def test_definition_that_cannot_be_strict_is_refused(definition: object, reason: str) -> None:
    schema = with_definitions({"$ref": "#/$defs/R"}, **{"$defs": {"R": definition}})
    assert refusal(normalise, schema, STRICT_ANSWER).startswith(reason)


def test_definitions_of_a_strict_tool_are_enforced_but_not_shown() -> None:
    schema = with_definitions({"$ref": "#/$defs/R"}, **{"$defs": {"R": CLOSED}})
    (tool,) = declare(declaration("a", schema, strict=True, deferred=True))
    assert list(tool.parameters) == ["type", "properties", "additionalProperties", "required"]
    assert tool.definitions == {"$defs": {"R": CLOSED_STRICT}} and tool.deferred
    constraint = output_constraint((tool, B), "auto", ResponseFormat(), None)
    assert constraint is not None and '"$defs"' not in constraint.schema
    assert json.loads(constraint.definitions) == {"a": {"$defs": {"R": CLOSED_STRICT}}}
    (loose,) = declare(declaration("a", schema))
    assert loose.parameters is schema and loose.definitions is None


def test_strict_answer_needs_a_schema_with_properties() -> None:
    reason = refusal(checked_answer_schema, None, True)
    assert reason == "Invalid json schema: one of `type`, `anyOf`, `$ref` field is required"
    reason = refusal(checked_answer_schema, {"type": "object"}, True)
    assert reason == "An object with no properties is not allowed."


@pytest.mark.parametrize("schema", [STRING, {"anyOf": [STRING]}, {"$ref": "#"}])
def test_strict_parameters_are_an_object(schema: object) -> None:
    assert refusal(normalise, schema, STRICT_TOOL) == (
        "The top level of the function parameters schema must be an object."
    )


def test_deep_strict_schema_is_refused_not_a_crash() -> None:
    schema: dict[str, Any] = STRING
    for _ in range(190):
        schema = {"type": "array", "items": schema}
    assert "inside one another" in refusal(strict, schema)


leaves = st.sampled_from([STRING, {"type": "integer", "minimum": 1}, {"type": ["null", "number"]}])
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.builds(lambda each: {"type": "array", "items": each}, inner)
        | st.builds(lambda each: {"anyOf": each}, st.lists(inner, max_size=3))
        | st.builds(
            lambda each: {"type": "object", "properties": each},
            st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
        )
    ),
)


@given(schemas)
def test_making_strict_twice_is_making_it_once(schema: object) -> None:
    once = normalise({"type": "object", "properties": {"a": schema}}, STRICT_TOOL)
    assert json.dumps(normalise(once, STRICT_TOOL)) == json.dumps(once)


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_a_form_of_the_answer_is_refused_beside_tools(kind: str) -> None:
    form: dict[str, Any] = {"type": "regex", "regex": "a"}
    if kind == "json_schema":
        form = {"type": kind, "json_schema": {"schema": {"type": "object"}}}
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "x"}],
        "thinking": {"type": "disabled"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": form,
    }
    with pytest.raises(ConversionError, match="`response_format` asks for a"):
        convert(parse("chat", body))
    ignoring = ConversionOptions(unsupported="ignore")
    assert convert(parse("chat", body), ignoring).left_out == ("response_format",)
    converted = convert(parse("chat", {**body, "tool_choice": "none"}))
    assert converted.settings.output_constraint is not None
