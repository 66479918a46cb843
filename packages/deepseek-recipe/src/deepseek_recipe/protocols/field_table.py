"""What becomes of every field of a protocol's requests, as Markdown, made from the models.

`python -m deepseek_recipe.protocols.field_table` prints the tables of the README.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from deepseek_recipe.protocols.chat.models import ChatRequest
from deepseek_recipe.protocols.fields import Body, Use, use_of
from deepseek_recipe.protocols.messages.models import MessagesRequest
from deepseek_recipe.protocols.responses.models import ResponsesRequest

__all__ = ["FieldGroup", "field_groups", "field_tables"]

_MODELS: dict[str, type[Body]] = {
    "Chat Completions": ChatRequest,
    "Responses": ResponsesRequest,
    "Messages": MessagesRequest,
}
_KINDS = ("honoured", "hint", "refused")


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """One object of a request: where it first stands, and its fields with what becomes of each."""

    path: str
    fields: tuple[tuple[str, Use], ...]


def field_groups(model: type[Body]) -> list[FieldGroup]:
    """Return the objects of a request, each once, outer ones first."""
    paths: dict[type[Body], str] = {}
    _visit(model, "", paths)
    return [
        FieldGroup(
            path or "the request",
            tuple((info.alias or name, use_of(body, name)) for name, info in _fields(body)),
        )
        for body, path in paths.items()
    ]


def field_tables() -> str:
    """Return the tables of all three protocols."""
    lines: list[str] = []
    for title, model in _MODELS.items():
        lines += [f"**{title}**", "", "| object | honoured | hint | refused |", "|---|---|---|---|"]
        for group in field_groups(model):
            cells = (_cell(group, kind) for kind in _KINDS)
            lines.append(f"| {group.path} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(group: FieldGroup, kind: str) -> str:
    return ", ".join(_named(name, use) for name, use in group.fields if use.kind == kind)


def _named(name: str, use: Use) -> str:
    passes = " or ".join(f"`{json.dumps(value)}`" for value in use.harmless)
    return f"`{name}`" + (f" ({passes} passes)" if passes else "")


def _visit(model: type[Body], path: str, paths: dict[type[Body], str]) -> None:
    if model in paths:
        return
    paths[model] = path
    for name, info in _fields(model):
        nested = list(_bodies(info.annotation, ""))
        for suffix, body in nested:
            label = f" ({_label(body)})" if len(nested) > 1 else ""
            outer = f"{path.split('`')[1]}." if path else ""
            _visit(body, f"`{outer}{info.alias or name}{suffix}`{label}", paths)


def _fields(model: type[Body]) -> Iterator[tuple[str, Any]]:
    yield from model.model_fields.items()


def _bodies(annotation: Any, suffix: str) -> Iterator[tuple[str, type[Body]]]:
    """Yield the models inside an annotation, each with `[]` for every list around it."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield suffix, annotation
        return
    if get_origin(annotation) is Literal:
        return
    if get_origin(annotation) is list:
        suffix += "[]"
    for inner in get_args(annotation):
        yield from _bodies(inner, suffix)


def _label(body: type[Body]) -> str:
    """Return what tells a model of a union apart: the values of its `type` or `role`."""
    for name in ("type", "role"):
        if name in body.model_fields:
            values = _literals(body.model_fields[name].annotation)
            if values:
                return "/".join(values)
    return "other"


def _literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for inner in get_args(annotation) for value in _literals(inner)]


if __name__ == "__main__":
    print(field_tables())
