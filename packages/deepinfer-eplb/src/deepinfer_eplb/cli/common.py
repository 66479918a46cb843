"""What the verbs share."""

from __future__ import annotations

import argparse
import re
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
    "TRACE_HELP",
    "CommandError",
    "Verbs",
    "add_plot",
    "cannot_write",
    "check_file",
    "in_words_of_options",
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

TRACE_HELP = "NPZ or JSON with `hits` [pieces, layers, experts] and, if known, `steps_per_piece`"

# What the library calls it -> the option; the rest are the same but for hyphens.
_OPTIONS = {
    "excluded_ranks": "--exclude",
    "first_graded": "--first",
    "num_experts": "--experts",
    "num_layers": "--layers",
    "num_nodes": "--nodes",
    "num_ranks": "--ranks",
    "num_windows": "--windows",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("dispatch", "expert_bytes", "groups", "intervals", "mode", "move_budget"),
            *("pieces_per_window", "policy", "prev", "regimes", "replan_slack", "seeds"),
            *("single_steps", "slots_per_rank", "split", "strategies"),
        )
    },
}

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
    """Print a text now.

    Raises:
        CommandError: it cannot be written.
        BrokenPipeError: nobody reads it any more.
    """
    if sys.stdout is None:
        raise CommandError("There is no standard output to write to.", CANNOT_WRITE)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise cannot_write(error) from error


def cannot_write(error: OSError) -> Exception:
    """Return what an error of the standard output is: itself, where nobody reads any more."""
    if isinstance(error, BrokenPipeError):
        return error
    message = f"The output cannot be written: {error.strerror or error}. Send it elsewhere."
    return CommandError(message, CANNOT_WRITE)


def in_words_of_options(message: str) -> str:
    """Return a message of the library with the options' names in place of its own."""
    return re.sub(r"`(\w+)`", lambda name: _OPTIONS.get(name[1], name[0]), message)


def check_file(flag: str, path: Path | None) -> None:
    """Refuse `-` as a file to write.

    Raises:
        CommandError: it is.
    """
    if path is not None and str(path) == "-":
        message = f"{flag} is '-', but tables go to the standard output; give the name of a file."
        raise CommandError(message, BAD_INPUT)


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
