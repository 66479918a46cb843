"""What becomes of each request field, stated beside it; the check that nothing is lost silently.

A field without a mark is honoured. `hint` marks one that the protocol lets a server disregard;
`refused` marks one whose effect we do not have. Names that no model declares are refused too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict

from deepseek_recipe.errors import ConversionError

__all__ = ["Body", "Refusals", "Use", "check_fields", "hint", "refused", "use_of"]


@dataclass(frozen=True, slots=True)
class Use:
    """What becomes of a field.

    Attributes:
        why: one sentence for messages and for the table of fields.
        harmless: values that ask for nothing, so a refused field may have them.
    """

    kind: Literal["honoured", "hint", "refused"]
    why: str = ""
    harmless: tuple[object, ...] = ()


_HONOURED = Use("honoured")


def hint(why: str) -> Use:
    """Mark a field that has no effect here, as the protocol allows."""
    return Use("hint", why)


def refused(why: str, *harmless: object) -> Use:
    """Mark a field that is refused unless its value is null or one of `harmless`."""
    return Use("refused", why, harmless)


class Body(BaseModel):
    """Base of every object in a request: exact types, unknown names kept for `check_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, defer_build=True)


@cache
def use_of(model: type[Body], name: str) -> Use:
    """Return what becomes of a declared field."""
    marks = [mark for mark in model.model_fields[name].metadata if isinstance(mark, Use)]
    return marks[0] if marks else _HONOURED


class Refusals:
    """Either raises at the first thing that is not honoured, or lists them all."""

    def __init__(self, policy: Literal["reject", "ignore"]) -> None:
        """Take the value of `ConversionOptions.unsupported`."""
        self._reject = policy == "reject"
        self._left_out: list[str] = []

    def refuse(self, path: str, message: str) -> None:
        """Refuse what stands at `path`, or note that it is left out.

        Args:
            path: place in the request, for example `messages[0].name`.
            message: what the client is told, naming the value and what to do.

        Raises:
            ConversionError: the policy is `reject`.
        """
        if self._reject:
            raise ConversionError(message)
        self._left_out.append(path)

    def leave_out(self, path: str) -> None:
        """Note what an option of the server leaves out, whatever the policy."""
        self._left_out.append(path)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Places of what was left out, in the order found."""
        return tuple(self._left_out)


def check_fields(body: Body, refusals: Refusals, path: str = "") -> None:
    """Refuse every field of a request that is unknown or marked `refused`, at any depth.

    Raises:
        ConversionError: one is found and the policy is `reject`; the message names it.
    """
    model = type(body)
    refused_names = _refused_names(model)
    for name, value in body.__dict__.items():  # in the order of the model, so that runs agree
        if value is None:
            continue  # most fields of most requests
        if name in refused_names:
            use = use_of(model, name)
            if not any(_same(value, each) for each in use.harmless):
                _refuse(refusals, f"{path}{name}", use)
        elif isinstance(value, Body):
            check_fields(value, refusals, f"{path}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Body):
                    check_fields(item, refusals, f"{path}{name}[{index}].")
    for name, value in (body.__pydantic_extra__ or {}).items():
        if value is not None:
            refusals.refuse(
                f"{path}{name}", f"Unknown field `{path}{name}`. Leave it out of the request."
            )


def _refuse(refusals: Refusals, path: str, use: Use) -> None:
    allowed = " or ".join(_json(value) for value in use.harmless)
    advice = f"Leave it out, or send {allowed}." if use.harmless else "Leave it out."
    refusals.refuse(path, f"The field `{path}` is not supported: {use.why} {advice}")


@cache
def _refused_names(model: type[Body]) -> frozenset[str]:
    return frozenset(name for name in model.model_fields if use_of(model, name).kind == "refused")


def _same(value: object, other: object) -> bool:
    # `True == 1` in Python, not in JSON
    return type(value) is type(other) and value == other


def _json(value: object) -> str:
    return f"`{json.dumps(value)}`"
