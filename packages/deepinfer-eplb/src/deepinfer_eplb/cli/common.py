"""What the verbs share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from deepinfer_eplb.errors import FileError

__all__ = [
    "BAD_INPUT",
    "CANNOT_WRITE",
    "LOADS_HELP",
    "MAP_HELP",
    "CommandError",
    "Verbs",
    "add_plot",
    "list_of",
    "output",
    "writing",
]

CANNOT_WRITE = 1
BAD_INPUT = 2

LOADS_HELP = (
    "NPZ with `loads` [layers, experts] and, if wanted, `history` [pieces, layers, experts], or "
    "JSON with the same fields"
)
MAP_HELP = "a map: .json or .npz, as `plan -o` writes it"

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_T = TypeVar("_T")


class CommandError(Exception):
    """Something that ends the command."""

    def __init__(self, message: str, status: int) -> None:
        """Keep the message and the exit status."""
        super().__init__(message)
        self.status = status


@contextmanager
def writing() -> Iterator[None]:
    """Take a file error for what it is here: the output cannot be written."""
    try:
        yield
    except FileError as error:
        raise CommandError(str(error), CANNOT_WRITE) from error


def output(text: str) -> None:
    """Print a text now."""
    sys.stdout.write(text)
    sys.stdout.flush()


def list_of(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Return a type of argparse: values with commas between them."""

    def parse(text: str) -> tuple[_T, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    # argparse names the type in its message.
    parse.__name__ = f"comma-separated {kind.__name__}"
    return parse


def add_plot(verb: argparse.ArgumentParser, what: str) -> None:
    """Add the option --plot."""
    verb.add_argument("--plot", type=Path, metavar="FILE", help=f"draw {what}: .png, .svg or .pdf")
