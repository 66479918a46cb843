"""The command `deepinfer-eplb`: plans where experts live, and says what that gains."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from deepinfer_eplb import __version__
from deepinfer_eplb.cli import maps, plan, simulate
from deepinfer_eplb.cli.common import (
    BAD_INPUT,
    CANNOT_WRITE,
    CommandError,
    cannot_write,
    in_words_of_options,
    output,
)
from deepinfer_eplb.errors import EplbError, FileError

__all__ = ["main"]

_EPILOG = """examples:
  deepinfer-eplb plan loads.npz --ranks 64 --nodes 8 --slots-per-rank 7 -o map.json
  deepinfer-eplb plan newer.npz --ranks 64 --nodes 8 --slots-per-rank 7 --prev map.json -o next.json
  deepinfer-eplb score map.json newer.npz
  deepinfer-eplb report next.json newer.npz --prev map.json --plot ranks.png
  deepinfer-eplb simulate --regimes drift,bursty --plot ratio.png
  deepinfer-eplb simulate --trace trace.npz --ranks 64 --slots-per-rank 7
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0; 2 for bad input or a plot that cannot be drawn here; 1 when the output
        cannot be written.
    """
    try:
        options = _options(arguments)
        if options.verb is None:
            output(_parser().format_help())
            return 0
        run: Callable[[argparse.Namespace, Sequence[str]], None] = options.run
        run(options, sys.argv[1:] if arguments is None else arguments)
        return 0
    except BrokenPipeError:  # the reader has enough
        _forget_output()
        return CANNOT_WRITE
    except CommandError as error:
        if error.status == CANNOT_WRITE:
            _forget_output()
        print(f"deepinfer-eplb: {error}", file=sys.stderr)
        return error.status
    except FileError as error:  # names fields of a file, not options
        print(f"deepinfer-eplb: {error}", file=sys.stderr)
        return BAD_INPUT
    except EplbError as error:
        print(f"deepinfer-eplb: {in_words_of_options(str(error))}", file=sys.stderr)
        return BAD_INPUT


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    try:
        return _parser().parse_args(arguments)
    except SystemExit:
        output("")  # help or the version may still be in the buffer
        raise
    except OSError as error:  # of argparse's own writing, in Pythons that let it through
        raise cannot_write(error) from error


def _forget_output() -> None:
    """Let what is still buffered vanish, or Python would complain of it at the end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer-eplb",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="plan | score | simulate | report")
    plan.add(verbs)
    maps.add_score(verbs)
    simulate.add(verbs)
    maps.add_report(verbs)
    return parser
