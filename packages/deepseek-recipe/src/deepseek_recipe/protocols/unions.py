"""Unions of request models, told apart by their shape, so that errors are about the one meant.

A tag in angle brackets is the name of a branch; body errors leave it out of the place they name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from pydantic import Discriminator

__all__ = ["OTHER", "by_type", "string_or"]

OTHER = "<other>"


def by_type(
    names: Collection[str],
    expected: str,
    *,
    shared: Mapping[str, str] = MappingProxyType({}),
    absent: str | None = None,
    other: bool = False,
) -> Discriminator:
    """Tell objects apart by their `type`: the tag of type `T` is `<T>`.

    Args:
        names: the known types.
        expected: for the error about a value of another shape.
        shared: more types -> the known type whose branch they share.
        absent: type of objects without one; None makes it an error.
        other: whether objects of unknown types are accepted; their tag is `OTHER`.
    """
    tags = {name: f"<{name}>" for name in names}
    tags |= {name: tags[known] for name, known in shared.items()}
    unknown = OTHER if other else None

    def tag(value: object) -> str | None:
        if not isinstance(value, dict):
            return None
        kind = value.get("type", absent)
        if kind is None:
            kind = absent
        return tags.get(kind, unknown) if isinstance(kind, str) else None

    return _discriminator(tag, expected)


def string_or(shape: type, expected: str) -> Discriminator:
    """Tell a string, whose tag is `<str>`, from a list or an object, whose tag is `<shape>`."""
    tags = {str: "<str>", shape: "<shape>"}

    def tag(value: object) -> str | None:
        return tags.get(type(value))

    return _discriminator(tag, expected)


def _discriminator(tag: Callable[[object], str | None], expected: str) -> Discriminator:
    return Discriminator(
        tag,
        custom_error_type="shape",
        custom_error_message=f"Input should be {expected}",
    )
