"""What each keyword allows, as shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deepseek_recipe.conversation import JsonValue
from deepseek_recipe.errors import ConstraintError, shown
from deepseek_recipe.structured.schema.document import Site
from deepseek_recipe.structured.schema.formats import FORMAT_PATTERNS
from deepseek_recipe.structured.schema.keywords import ENFORCED_FORMATS
from deepseek_recipe.structured.schema.shapes import (
    ANYTHING,
    UNIVERSE,
    Array,
    ArrayFamily,
    Boolean,
    Contains,
    Node,
    Null,
    Number,
    Object,
    ObjectFamily,
    Shape,
    String,
)

if TYPE_CHECKING:
    from deepseek_recipe.structured.schema.expander import Expander

__all__ = [
    "TYPES", "absent", "asserted", "bound", "present", "shapes_of_values", "unless",
    "value_schema",
]  # fmt: skip

TYPES: dict[str, Shape] = dict(
    zip(("null", "boolean", "number", "string", "array", "object"), UNIVERSE, strict=True)
) | {"integer": Number("integer")}
_MAX_EXACT = 2**53
_MAX_ITEMS = 100_000
_MAX_LENGTH = 1_000_000
_IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def unless(kind: type, *shapes: Shape) -> tuple[Shape, ...]:
    """Return every type but one, and the given shapes."""
    return tuple(each for each in UNIVERSE if not isinstance(each, kind)) + shapes


def asserted(expander: Expander, site: Site, keyword: str) -> Sequence[Shape] | None:
    """Return what a keyword of a schema allows; None for anything, or if another one tells.

    Raises:
        ConstraintError: it cannot be enforced.
    """
    document = expander.document
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    value = schema[keyword]
    match keyword:
        case "type":
            names = [value] if isinstance(value, str) else value
            return [TYPES[name] for name in names]
        case "const" | "enum":
            return shapes_of_values(expander, site, [value] if keyword == "const" else value)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return unless(Number, bound(site, keyword))
        case "multipleOf":
            return unless(Number, Number(multiples=(value,)))
        case "minLength" | "maxLength":
            size = _size(site, keyword, _MAX_LENGTH)
            short = keyword == "maxLength"
            return unless(String, String(max_len=size) if short else String(min_len=size))
        case "pattern":
            return unless(String, String(patterns=(expander.pattern(site, keyword, value),)))
        case "format":
            if value in FORMAT_PATTERNS:
                return unless(String, String(patterns=(FORMAT_PATTERNS[value],)))
            if value in ENFORCED_FORMATS:
                return unless(String, String(formats=(value,)))
            expander.warn(f"{site.pointer}/format: {shown(value)} is an annotation")
        case "prefixItems" | "items" | "unevaluatedItems":
            return _items(expander, site, keyword)
        case "minItems" | "maxItems":
            size = _size(site, keyword, _MAX_ITEMS)
            return unless(
                Array, Array(min_items=size) if keyword == "minItems" else Array(max_items=size)
            )
        case "uniqueItems":
            return unless(Array, Array(unique=True)) if value else None
        case "contains":
            low, high = schema.get("minContains", 1), schema.get("maxContains")
            node = expander.node(document.below(site, "contains"))
            return unless(Array, Array(contains=(Contains(node, int(low), _whole(high)),)))
        case "properties" | "patternProperties" | "additionalProperties" | "unevaluatedProperties":
            return _properties(expander, site, keyword)
        case "required":
            return unless(Object, Object(required=tuple(value)))
        case "minProperties":
            return unless(Object, Object(min_len=_size(site, keyword, _MAX_ITEMS)))
        case "maxProperties":
            return unless(Object, Object(max_len=_size(site, keyword, _MAX_ITEMS)))
        case "propertyNames":
            return unless(Object, Object(names=(expander.node(document.below(site, keyword)),)))
        case "dependentRequired":
            return expander.meet_all(
                unless(Object, absent(expander, site, key), present(key, *names))
                for key, names in value.items()
            )
        case "dependentSchemas":
            return expander.meet_all(
                [
                    *unless(Object, absent(expander, site, key)),
                    *expander.meet(
                        [present(key)], expander.shapes(document.below(site, keyword, key))
                    ),
                ]
                for key in value
            )
        case _:
            return _applicator(expander, site, keyword)
    return None


def _applicator(expander: Expander, site: Site, keyword: str) -> Sequence[Shape] | None:
    document = expander.document
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    match keyword:
        case "$ref" | "$dynamicRef":
            return expander.shapes(document.target(site, keyword))
        case "allOf" | "anyOf":
            parts = [
                expander.shapes(document.below(site, keyword, at))
                for at in range(len(schema[keyword]))
            ]
            if keyword == "allOf":
                return expander.meet_all(parts)
            return [shape for part in parts for shape in part]
        case "oneOf":
            numbers = [document.below(site, keyword, at) for at in range(len(schema[keyword]))]
            return [shape for each in numbers for shape in _only(expander, each, numbers)]
        case "not":
            return expander.shapes(document.below(site, keyword), False)
        case "if":
            if not {"then", "else"} & schema.keys():
                return None
            condition = document.below(site, "if")
            found: list[Shape] = []
            for branch, holds in (("then", True), ("else", False)):
                shapes = expander.shapes(condition, holds)
                if branch in schema:
                    shapes = expander.meet(shapes, expander.shapes(document.below(site, branch)))
                found += shapes
            return found
    return None


def _only(expander: Expander, number: int, numbers: list[int]) -> Sequence[Shape]:
    shapes: Sequence[Shape] = expander.shapes(number)
    for other in numbers:
        if other != number and expander.living(expander.meet(shapes, expander.shapes(other))):
            shapes = expander.meet(shapes, expander.shapes(other, False))
    if numbers.count(number) > 1:
        return ()
    return shapes


def shapes_of_values(expander: Expander, site: Site, values: Iterable[JsonValue]) -> list[Shape]:
    """Return the shapes of some values, those of one scalar type in one."""
    found: list[Shape] = []
    truths, numbers, texts = set(), dict[float, None](), dict[str, None]()
    for value in values:
        if value is None:
            found.append(Null())
        elif isinstance(value, bool):
            truths.add(value)
        elif isinstance(value, (int, float)):
            numbers[int(value) if value == int(value) else value] = None
        elif isinstance(value, str):
            texts[value] = None
        else:
            found += expander.shapes(expander.document.made(site, value_schema(value)))
    found += [Boolean(frozenset(truths))] if truths else []
    found += [Number(values=tuple(numbers))] if numbers else []
    found += [String(values=tuple(texts))] if texts else []
    return found


def value_schema(value: JsonValue) -> dict[str, JsonValue]:
    """Return a schema of one array or object, by keywords that can be denied."""
    if isinstance(value, list):
        items = {"prefixItems": [{"const": each} for each in value]} if value else {}
        return {"type": "array", "minItems": len(value), "maxItems": len(value), **items}
    assert isinstance(value, dict)
    return {
        "type": "object",
        "properties": {key: {"const": each} for key, each in value.items()},
        "required": list(value),
        "maxProperties": len(value),
    }


def bound(site: Site, keyword: str, denied: bool = False) -> Number:
    """Return the numbers on one side of a limit, or on the other."""
    value: float = site.schema[keyword]  # type: ignore[index]
    if abs(value) > _MAX_EXACT:
        raise ConstraintError(
            f"{site.pointer}/{keyword}",
            f"the limit is {shown(value)}; allowed: up to 2**53, where numbers are exact. Use a "
            "smaller one, or leave it out.",
        )
    is_open = keyword.startswith("exclusive") != denied
    if keyword.lower().endswith("minimum") != denied:
        return Number(low=value, low_open=is_open)
    return Number(high=value, high_open=is_open)


def absent(expander: Expander, site: Site, *names: str) -> Object:
    """Return the objects without some names."""
    nothing: Node = frozenset({(expander.document.made(site, False), True)})
    return Object(families=(ObjectFamily(named=tuple((name, nothing) for name in names)),))


def present(*names: str) -> Object:
    """Return the objects with some names."""
    return Object(required=tuple(dict.fromkeys(names)))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _size(site: Site, keyword: str, limit: int) -> int:
    value = int(site.schema[keyword])  # type: ignore[index]
    if value > limit:
        raise ConstraintError(
            f"{site.pointer}/{keyword}",
            f"the size is {shown(value)}; allowed: up to {limit}. Use a smaller one, or leave it "
            "out.",
        )
    return value


def _alone(site: Site, keyword: str) -> None:
    beside = [name for name in _IN_PLACE if name in site.schema]  # type: ignore[operator]
    if beside or (keyword == "unevaluatedItems" and "contains" in site.schema):  # type: ignore[operator]
        raise ConstraintError(
            f"{site.pointer}/{keyword}",
            f"beside `{(beside or ['contains'])[0]}` it cannot be enforced. List all in one schema "
            f"and use `{'items' if keyword == 'unevaluatedItems' else 'additionalProperties'}`.",
        )


def _items(expander: Expander, site: Site, keyword: str) -> Sequence[Shape] | None:
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    document = expander.document
    rest = "items"
    if "unevaluatedItems" in schema and "items" not in schema:
        rest = "unevaluatedItems"
        if expander.node(document.below(site, rest)) != ANYTHING:
            _alone(site, rest)
    present_keys = [key for key in ("prefixItems", "items", rest) if key in schema]
    if keyword != present_keys[0]:
        return None
    prefix = [
        expander.node(document.below(site, "prefixItems", at))
        for at in range(len(schema.get("prefixItems", ())))
    ]
    node = expander.node(document.below(site, rest)) if rest in schema else ANYTHING
    return unless(Array, Array(families=(ArrayFamily(tuple(prefix), node),)))


def _properties(expander: Expander, site: Site, keyword: str) -> Sequence[Shape] | None:
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    document = expander.document
    rest = "additionalProperties"
    if "unevaluatedProperties" in schema and rest not in schema:
        rest = "unevaluatedProperties"
        if expander.node(document.below(site, rest)) != ANYTHING:
            _alone(site, rest)
    keys = [key for key in ("properties", "patternProperties", rest) if key in schema]
    if keyword not in keys[:1]:
        return None
    named = tuple(
        (name, expander.node(document.below(site, "properties", name)))
        for name in schema.get("properties", ())
    )
    patterns = tuple(
        (
            expander.pattern(site, "patternProperties", text),
            expander.node(document.below(site, "patternProperties", text)),
        )
        for text in schema.get("patternProperties", ())
    )
    node = expander.node(document.below(site, rest)) if rest in schema else ANYTHING
    return unless(Object, Object(families=(ObjectFamily(named, patterns, node),)))
