"""The command `deepinfer-specdec`: verification policies on simulated traffic, and calibration."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec import __version__
from deepinfer_specdec.errors import SpecdecError

if TYPE_CHECKING:
    from deepinfer_specdec.calibrate import Fit

__all__ = ["main"]

CANNOT_WRITE = 1
BAD_INPUT = 2

# Below, an ECE of about 1 % is within what chance does.
_ENOUGH_BLOCKS = 20_000
_LARGEST = 1e30  # of a logit: beyond, sums overflow
_EPILOG = """examples:
  deepinfer-specdec simulate
  deepinfer-specdec simulate --rows 16,60 --policies fixed-5,delayed,group-k --ranks 8
  deepinfer-specdec simulate --out figures.jsonl --plot speed.png
  deepinfer-specdec calibrate blocks.jsonl
"""
_POLICIES = (
    "off, fixed-N (N drafts), threshold-X (as many as had a survival of X two steps ago), "
    "group-threshold-X (the same, filled to the fullest rank), algorithm-1 (published, stops "
    "early), algorithm-1-smooth (the same on a cost curve without stairs), delayed (budget from "
    "records two steps old, one rank), own-k (the same in a group, each rank alone), group-k "
    "(agreed)"
)
_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0; 2 for bad input or a plot that cannot be drawn here; 1 when the output
        cannot be written.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.verb is None:
            _write(_parser().format_help())
            return 0
        run: Callable[[argparse.Namespace, Sequence[str] | None], None] = options.run
        run(options, arguments)
        return 0
    except BrokenPipeError:  # the reader has enough
        # What is still buffered vanishes, or Python would complain of it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT_WRITE
    except _CommandError as error:
        print(f"deepinfer-specdec: {error}", file=sys.stderr)
        return error.status


class _CommandError(Exception):
    """Something that ends the command."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepinfer-specdec",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", metavar="simulate | calibrate")
    _add_simulate(verbs)
    _add_calibrate(verbs)
    return parser


def _add_simulate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Compare verification policies on simulated traffic, without a model"
    verb = verbs.add_parser("simulate", help=text, description=f"{text}.")
    verb.set_defaults(run=_simulate)
    verb.add_argument(
        "--rows",
        type=_list_of(int),
        metavar="N,N,..",
        help="requests of a rank (default: 1,4,16,32,60,120,240)",
    )
    verb.add_argument(
        "--policies", type=_list_of(str), metavar="NAME,..", help=f"default: all of: {_POLICIES}"
    )
    verb.add_argument("--ranks", type=int, default=64, help="of a group (default: 64)")
    verb.add_argument("--steps", type=int, default=200, help="of each run (default: 200)")
    verb.add_argument("--seed", type=int, default=0, help="of the traffic (default: 0)")
    verb.add_argument("--num-drafts", type=int, default=5, help="of a block (default: 5)")
    verb.add_argument(
        "--accepted-length",
        type=float,
        help="mean tokens of a step when all drafts are verified, with the one after them "
        "(default: 3.29 of 5 drafts, and in proportion of others)",
    )
    verb.add_argument(
        "--noise",
        type=float,
        default=0.7,
        help="what the confidences do not see of a draft, in units of the luck of one token "
        "(default: 0.7)",
    )
    verb.add_argument(
        "--drift-correlation",
        type=float,
        default=0.95,
        help="from one step of a request to its next (default: 0.95)",
    )
    verb.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="measured times of steps in place of the published operating point: JSON with rows, "
        "seconds, requests, num_drafts, draft_seconds; only their number of requests is simulated",
    )
    verb.add_argument("--out", type=Path, metavar="FILE", help="append the JSON line to this file")
    verb.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw speed over load: .png, .svg or .pdf"
    )


def _add_calibrate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Fit temperatures that make confidences honest"
    verb = verbs.add_parser(
        "calibrate",
        help=text,
        description=f"{text}. Each line of the file is a block that was verified in full: "
        '{"logits": [g numbers, the confidences before the sigmoid], "accepted": 0..g}.',
    )
    verb.set_defaults(run=_calibrate)
    verb.add_argument("file", type=Path, metavar="FILE", help="JSON lines")
    verb.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the calibration here; other classes of traffic that the file has are kept. "
        "Needs --traffic, --checkpoint and --data-set",
    )
    verb.add_argument("--traffic", choices=("greedy", "sampled"), help="what the requests were")
    verb.add_argument(
        "--acceptance",
        choices=("target_noise", "rejection"),
        default="target_noise",
        help="the rule while measuring (default: target_noise)",
    )
    verb.add_argument("--checkpoint", metavar="HASH", help="of the weights that were measured")
    verb.add_argument("--data-set", metavar="NAME", help="what the texts were")


def _list_of(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    def parse(text: str) -> tuple[_T, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    # argparse names the type in its message.
    parse.__name__ = f"comma-separated {kind.__name__}"
    return parse


def _simulate(options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
    from deepinfer_specdec.simulate import (
        DEFAULT_LOADS,
        DEFAULT_POLICIES,
        MeasuredPoint,
        OperatingPoint,
        Sweep,
        Traffic,
        check_plot,
        describe,
        json_line,
        plot,
        sweep,
        table,
    )

    drafts = options.num_drafts
    try:
        point: OperatingPoint | MeasuredPoint = OperatingPoint(num_drafts=drafts)
        loads = options.rows or DEFAULT_LOADS
        if options.measured is not None:
            point = MeasuredPoint.load(options.measured)
            loads = options.rows or (point.requests,)
        accepted_length = options.accepted_length
        if accepted_length is None:
            accepted_length = 1 + 2.29 * drafts / 5
        named = (f"fixed-{drafts}" if name == "fixed-5" else name for name in DEFAULT_POLICIES)
        policies = options.policies or tuple(
            dict.fromkeys(name for name in named if name != "fixed-3" or drafts >= 3)
        )
        asked = Sweep(
            loads=loads,
            policies=policies,
            ranks=options.ranks,
            steps=options.steps,
            seed=options.seed,
            traffic=Traffic(
                num_drafts=drafts,
                accepted_len=accepted_length,
                noise=options.noise,
                drift_correlation=options.drift_correlation,
            ),
            point=point,
        )
        if options.plot is not None:
            check_plot(options.plot)
        if options.out is not None:
            _append(options.out, "")  # before a long run
        _write(describe(asked) + "\n\n")
        lines = sweep(asked)
        _write(table(lines, asked.ranks) + "\n")
        if options.out is not None:
            given = sys.argv[1:] if arguments is None else arguments
            command = shlex.join(["deepinfer-specdec", *given])
            _append(options.out, json_line(asked, lines, {"command": command}) + "\n")
        if options.plot is not None:
            plot(options.plot, lines, asked.ranks)
    except SpecdecError as error:
        raise _CommandError(str(error), BAD_INPUT) from error


def _calibrate(options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
    from deepinfer_specdec.calibrate import auc, fit, predicted_survival

    needed = {"--traffic": options.traffic, "--checkpoint": options.checkpoint}
    needed["--data-set"] = options.data_set
    lacking = [flag for flag, value in needed.items() if value is None]
    given = [flag for flag, value in needed.items() if value is not None]
    if options.save is not None and lacking:
        raise _CommandError(f"--save needs {' and '.join(lacking)} too.", BAD_INPUT)
    if options.save is None and given:
        raise _CommandError(f"{given[0]} says nothing without --save; give both.", BAD_INPUT)
    logits, accepted = _blocks(options.file)
    try:
        found = fit(logits, accepted)
        after = predicted_survival(logits, np.array(found.temperatures))
        lines = ["draft  temperature  ECE before  ECE after    AUC"]
        for k, temperature in enumerate(found.temperatures):
            before, honest = found.ece_before[k], found.ece_after[k]
            area = auc(after[:, k], accepted > k)
            lines.append(
                f"{k + 1:5}  {temperature:11.3f}  {before:10.2%}  {honest:9.2%}  {area:5.3f}"
            )
        _write("\n".join(lines) + "\n")
        if len(logits) < _ENOUGH_BLOCKS:
            _write(f"Only {len(logits)} blocks: errors this small need {_ENOUGH_BLOCKS} or more.\n")
        if options.save is not None:
            _save(options, found, len(logits))
    except SpecdecError as error:
        raise _CommandError(str(error), BAD_INPUT) from error
    except OSError as error:
        message = f"`{options.save}` cannot be written: {error.strerror}. Choose another file."
        raise _CommandError(message, CANNOT_WRITE) from error


def _blocks(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Read blocks: logits [n, g] and accepted drafts [n]."""
    logits: list[list[float]] = []
    accepted: list[int] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    values, count = _block(f"`{path}`, line {number}", line)
                    if logits and len(values) != len(logits[0]):
                        raise _CommandError(
                            f"`{path}`, line {number}: there are {len(values)} logits, but the "
                            f"blocks before have {len(logits[0])}. Calibrate one size at a time.",
                            BAD_INPUT,
                        )
                    logits.append(values)
                    accepted.append(count)
    except (OSError, UnicodeDecodeError) as error:
        raise _CommandError(f"`{path}` cannot be read: {error}.", BAD_INPUT) from error
    if not logits:
        raise _CommandError(f"`{path}` has no blocks. Give one a line.", BAD_INPUT)
    return np.array(logits), np.array(accepted)


def _block(place: str, line: str) -> tuple[list[float], int]:
    try:
        block = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _CommandError(f"{place}: it is not JSON: {error}.", BAD_INPUT) from error
    if not isinstance(block, dict) or set(block) != {"logits", "accepted"}:
        message = f"{place}: it must be one object with `logits` and `accepted` and nothing else."
        raise _CommandError(message, BAD_INPUT)
    values, count = block["logits"], block["accepted"]
    fits = isinstance(values, list) and values and all(type(v) in (int, float) for v in values)
    if not fits or not all(abs(v) < _LARGEST for v in values):  # not NaN either
        message = f"{place}: `logits` is {values!r}; it must be a list of finite numbers."
        raise _CommandError(message, BAD_INPUT)
    if type(count) is not int or not 0 <= count <= len(values):
        message = f"{place}: `accepted` is {count!r}; allowed: 0 .. {len(values)}."
        raise _CommandError(message, BAD_INPUT)
    return values, count


def _save(options: argparse.Namespace, found: Fit, num_blocks: int) -> None:
    """Write the calibration, with what the file has of other classes of traffic."""
    from deepinfer_specdec.calibrate import DrafterCalibration, TrafficCalibration

    size = len(found.temperatures)
    measured = TrafficCalibration(
        traffic=options.traffic,
        acceptance=options.acceptance,
        temperatures=found.temperatures,
        data_set=options.data_set,
        num_blocks=num_blocks,
        ece_before=found.ece_before,
        ece_after=found.ece_after,
    )
    kept: tuple[TrafficCalibration, ...] = ()
    if options.save.exists():
        there = DrafterCalibration.load(
            options.save, block_size=size, checkpoint=options.checkpoint
        )
        same = (measured.traffic, measured.acceptance)
        kept = tuple(each for each in there.classes if (each.traffic, each.acceptance) != same)
    DrafterCalibration(size, options.checkpoint, (*kept, measured)).save(options.save)


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        message = f"`{path}` cannot be written: {error.strerror}. Choose another file."
        raise _CommandError(message, CANNOT_WRITE) from error


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
