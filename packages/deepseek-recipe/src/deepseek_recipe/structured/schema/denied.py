"""What each keyword forbids, as shapes: the complement of what `asserted` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepseek_recipe.errors import ConstraintError
from deepseek_recipe.structured.schema.asserted import (
    TYPES,
    absent,
    bound,
    present,
    shapes_of_values,
)
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
    Null,
    Number,
    Object,
    ObjectFamily,
    Shape,
    String,
)

if TYPE_CHECKING:
    from deepseek_recipe.structured.schema.expander import Expander

__all__ = ["denied"]

_ASKED = (
    "a `not`, `oneOf`, `if` or `maxContains` around it asks for it. Say what is allowed instead, "
    "or use `anyOf`."
)


def denied(expander: Expander, site: Site, keyword: str) -> Sequence[Shape]:
    """Return what a keyword of a schema does not allow; nothing if another one tells.

    Raises:
        ConstraintError: the complement cannot be enforced.
    """
    document = expander.document
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    value = schema[keyword]
    match keyword:
        case "type":
            names = [value] if isinstance(value, str) else value
            shapes = [shape for name, shape in TYPES.items() if name not in (*names, "integer")]
            if "integer" in names and "number" not in names:
                shapes = [each for each in shapes if not isinstance(each, Number)]
                shapes.append(Number("fraction"))
            return shapes
        case "const" | "enum":
            return _other_values(expander, site, [value] if keyword == "const" else value)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return [bound(site, keyword, denied=True)]
        case "minLength":
            return [String(max_len=int(value) - 1)] if value else []
        case "maxLength":
            return [String(min_len=int(value) + 1)]
        case "pattern":
            return [String(denied=(expander.pattern(site, keyword, value),))]
        case "format" if value in FORMAT_PATTERNS:
            return [String(denied=(FORMAT_PATTERNS[value],))]
        case "format" if value not in ENFORCED_FORMATS:
            return []
        case "prefixItems" | "items":
            return _other_items(expander, site, keyword)
        case "minItems":
            return [Array(max_items=int(value) - 1)] if value else []
        case "maxItems":
            return [Array(min_items=int(value) + 1)]
        case "uniqueItems" if not value:
            return []
        case "contains":
            node = expander.node(document.below(site, keyword))
            low, high = int(schema.get("minContains", 1)), schema.get("maxContains")
            few = [Array(contains=(Contains(node, 0, low - 1),))] if low else []
            many = [] if high is None else [Array(contains=(Contains(node, int(high) + 1, None),))]
            return few + many
        case "properties":
            return [
                shape
                for name in value
                for node in [expander.node(document.below(site, keyword, name), False)]
                for shape in [
                    Object(families=(ObjectFamily(named=((name, node),)),), required=(name,))
                ]
            ]
        case "required":
            return [absent(expander, site, name) for name in value]
        case "minProperties":
            return [Object(max_len=int(value) - 1)] if value else []
        case "maxProperties":
            # with fewer of the required ones, `required` has denied it already
            return [Object(required=tuple(schema.get("required", ())), min_len=int(value) + 1)]
        case "dependentRequired":
            return [
                shape
                for key, names in value.items()
                for name in names
                for shape in expander.meet([present(key)], [absent(expander, site, name)])
            ]
        case "dependentSchemas":
            return [
                shape
                for key in value
                for shape in expander.meet(
                    [present(key)], expander.shapes(document.below(site, keyword, key), False)
                )
            ]
        case "then" | "else" | "minContains" | "maxContains":
            return []
        case "additionalProperties" | "patternProperties" | "propertyNames":
            below = (
                [(keyword, key) for key in value] if keyword.startswith("pattern") else [(keyword,)]
            )
            if all(expander.node(document.below(site, *keys)) == ANYTHING for keys in below):
                return []
        case _:
            found = _applicator(expander, site, keyword)
            if found is not None:
                return found
    raise ConstraintError(
        f"{site.pointer}/{keyword}",
        f"its opposite cannot be enforced, but {_ASKED}",
    )


def _applicator(expander: Expander, site: Site, keyword: str) -> Sequence[Shape] | None:
    document = expander.document
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    match keyword:
        case "$ref" | "$dynamicRef":
            return expander.shapes(document.target(site, keyword), False)
        case "not":
            return expander.shapes(document.below(site, "not"))
        case "allOf" | "anyOf" | "oneOf":
            numbers = [document.below(site, keyword, at) for at in range(len(schema[keyword]))]
            parts = [expander.shapes(each, False) for each in numbers]
            if keyword == "allOf":
                return [shape for part in parts for shape in part]
            found = list(expander.meet_all(parts))
            if keyword == "oneOf":
                for at, one in enumerate(numbers):
                    for two in numbers[at + 1 :]:
                        found += expander.meet(expander.shapes(one), expander.shapes(two))
            return found
        case "if":
            found = []
            for branch, holds in (("then", True), ("else", False)):
                if branch in schema:
                    found += expander.meet(
                        expander.shapes(document.below(site, "if"), holds),
                        expander.shapes(document.below(site, branch), False),
                    )
            return found
    return None


def _other_values(expander: Expander, site: Site, values: Sequence[Any]) -> Sequence[Shape]:
    found: Sequence[Shape] = UNIVERSE
    for shape in shapes_of_values(
        expander, site, [v for v in values if not isinstance(v, (list, dict))]
    ):
        others: list[Shape] = [each for each in UNIVERSE if type(each) is not type(shape)]
        match shape:
            case Boolean():
                rest = frozenset({True, False}) - shape.values
                others += [Boolean(rest)] if rest else []
            case String():
                others.append(String(excluded=frozenset(shape.values or ())))
            case Number():
                cuts = sorted(shape.values or ())
                lows, highs = [None, *cuts], [*cuts, None]
                others += [
                    Number(low=low, low_open=True, high=high, high_open=True)
                    for low, high in zip(lows, highs, strict=True)
                ]
            case Null():
                pass
        found = expander.meet(found, others)
    for value in values:
        if isinstance(value, (list, dict)):
            shapes = expander.denied_value(site, value)
            found = expander.meet(found, shapes)
    return found


def _other_items(expander: Expander, site: Site, keyword: str) -> Sequence[Shape]:
    document = expander.document
    schema: dict[str, Any] = site.schema  # type: ignore[assignment]
    if keyword == "prefixItems":
        return [
            Array(families=(ArrayFamily((ANYTHING,) * at + (node,)),), min_items=at + 1)
            for at in range(len(schema[keyword]))
            for node in [expander.node(document.below(site, keyword, at), False)]
        ]
    node = expander.node(document.below(site, keyword))
    start = len(schema.get("prefixItems", ()))
    if node == ANYTHING:
        return []
    if not expander.shapes(document.below(site, keyword)):
        return [Array(min_items=start + 1)]
    if not start:
        return [Array(contains=(Contains(expander.opposite(node), 1, None),))]
    raise ConstraintError(
        f"{site.pointer}/items",
        f"its opposite behind {start} `prefixItems` cannot be enforced, but {_ASKED}",
    )
