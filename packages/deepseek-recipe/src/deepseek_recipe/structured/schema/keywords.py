"""What is done with each keyword of draft 2020-12: the one table, for checks and for readers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, TypeAlias

from deepseek_recipe.structured.schema.formats import FORMAT_PATTERNS

__all__ = ["ENFORCED_FORMATS", "KEYWORDS", "Treatment", "keyword_table"]

Treatment: TypeAlias = Literal["enforced", "annotation", "structure"]

ENFORCED_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
)  # fmt: skip

_ALONE = tuple(name for name in ENFORCED_FORMATS if name not in FORMAT_PATTERNS)
_CLOSED = "where other names are possible, at most one more than the named ones can be demanded"

KEYWORDS: MappingProxyType[str, tuple[Treatment, str]] = MappingProxyType(
    {
        "type": ("enforced", "an integer is written without exponent; it may end in `.0`"),
        "const": ("enforced", "members in the order given; integers also with `.0`"),
        "enum": ("enforced", "as `const`"),
        "minimum": (
            "enforced",
            "of the number as written, up to 2**53; no exponents are written under a bound",
        ),
        "maximum": ("enforced", "as `minimum`"),
        "exclusiveMinimum": ("enforced", "as `minimum`"),
        "exclusiveMaximum": ("enforced", "as `minimum`"),
        "multipleOf": ("enforced", "up to 20000 units of its last digit; refused under `not`"),
        "minLength": ("enforced", "in code points"),
        "maxLength": ("enforced", "in code points"),
        "pattern": ("enforced", "regular; anchors at the ends only, no look-around or references"),
        "format": (
            "enforced",
            f"{', '.join(FORMAT_PATTERNS)} (without leap seconds); {', '.join(_ALONE)} where "
            "nothing else limits the text; others are annotations",
        ),
        "items": ("enforced", ""),
        "prefixItems": ("enforced", ""),
        "minItems": ("enforced", ""),
        "maxItems": ("enforced", ""),
        "contains": ("enforced", "with `maxContains`, its `not` must be enforceable"),
        "minContains": ("enforced", ""),
        "maxContains": ("enforced", ""),
        "uniqueItems": (
            "enforced",
            "items of up to 64 values (scalars, integers between limits), 8 beside `prefixItems` "
            "or `contains`, or at most one item; else refused",
        ),
        "properties": ("enforced", "members come in the order of the schema, others behind them"),
        "required": ("enforced", ""),
        "patternProperties": ("enforced", "up to 4 patterns for one object"),
        "additionalProperties": ("enforced", ""),
        "propertyNames": ("enforced", "no formats but the first five; refused under `not`"),
        "minProperties": ("enforced", _CLOSED),
        "maxProperties": ("enforced", ""),
        "dependentRequired": ("enforced", ""),
        "dependentSchemas": ("enforced", ""),
        "unevaluatedItems": ("enforced", "alone as `items`; refused beside applicators"),
        "unevaluatedProperties": (
            "enforced", "alone as `additionalProperties`; refused beside applicators",
        ),
        "allOf": ("enforced", ""),
        "anyOf": ("enforced", ""),
        "oneOf": ("enforced", "where the others exclude one another or can be denied"),
        "not": ("enforced", "of what can be denied"),
        "if": ("enforced", "where its `not` can be enforced"),
        "then": ("enforced", ""),
        "else": ("enforced", ""),
        "$ref": ("enforced", "within the schema"),
        "$dynamicRef": ("enforced", "with one target"),
        "$defs": ("structure", "what references lead to"),
        "definitions": ("structure", "the older name of `$defs`"),
        "$id": ("structure", "an address that references start from"),
        "$anchor": ("structure", "a name for references"),
        "$dynamicAnchor": ("structure", "a name for references"),
        "$schema": ("structure", "draft 2020-12 or left out"),
        "$comment": ("annotation", ""),
        "$vocabulary": ("annotation", ""),
        "title": ("annotation", ""),
        "description": ("annotation", ""),
        "default": ("annotation", ""),
        "deprecated": ("annotation", ""),
        "examples": ("annotation", ""),
        "readOnly": ("annotation", ""),
        "writeOnly": ("annotation", ""),
        "example": ("annotation", "of OpenAPI"),
        "discriminator": ("annotation", "of OpenAPI"),
        "contentEncoding": ("annotation", ""),
        "contentMediaType": ("annotation", ""),
        "contentSchema": ("annotation", ""),
    }
)  # fmt: skip


def keyword_table() -> str:
    """Return the table of keywords in Markdown; an unknown keyword is refused."""
    lines = ["| keyword | is | remarks |", "|---|---|---|"]
    lines += [f"| `{name}` | {kind} | {remark} |" for name, (kind, remark) in KEYWORDS.items()]
    return "\n".join(lines)
