"""The verb `simulate`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_eplb.cli.common import (
    BAD_INPUT,
    CANNOT_WRITE,
    CommandError,
    Verbs,
    add_plot,
    list_of,
    output,
)

if TYPE_CHECKING:
    from deepinfer_eplb.files import Trace
    from deepinfer_eplb.simulate import Schedule, Sweep

__all__ = ["add"]

_PIECES = 10  # of a window


@dataclass(frozen=True)
class _Phase:
    """What is usual in a phase; hits are those of one rank, a step and a layer."""

    ranks: int
    spare_slots: int
    window: int
    interval: int
    hits: int


_PHASES = {
    "decode": _Phase(64, spare_slots=1, window=1000, interval=10000, hits=60 * 6),
    "prefill": _Phase(4, spare_slots=4, window=100, interval=1000, hits=8192 * 6),
}
_OF_TRAFFIC = ("layers", "experts", "hits", "regimes", "seeds", "intervals")
_STRATEGIES = (
    "window-full, window-incremental (planned on the last window), scenario-full, "
    "scenario-incremental (on the pieces of the last windows; the latter is what `plan` does), "
    "static (the first plan for ever)"
)


def add(verbs: Verbs) -> None:
    """Add the verb."""
    text = "Compare strategies of planning, each plan graded on the interval after it"
    verb = verbs.add_parser("simulate", help=text, description=f"{text}.")
    verb.set_defaults(run=_run)
    _add_traffic(verb)
    verb.add_argument(
        "--phase",
        choices=tuple(_PHASES),
        default="decode",
        help="sets the defaults of ranks, slots, steps and hits (default: decode)",
    )
    verb.add_argument("--ranks", type=int, help=_default("of the group", "ranks"))
    verb.add_argument(
        "--nodes", type=int, help="machines (default: of 8 ranks each if that is possible, else 1)"
    )
    verb.add_argument(
        "--groups", type=int, help="of experts, each kept on one node (default: none)"
    )
    verb.add_argument(
        "--slots-per-rank",
        type=int,
        help="experts a rank holds (default: what the experts need and 1 more; prefill: 4 more)",
    )
    verb.add_argument(
        "--window", type=int, help=_default("steps that a plan is made from", "window")
    )
    verb.add_argument(
        "--interval", type=int, help=_default("steps from one plan to the next", "interval")
    )
    verb.add_argument(
        "--windows", type=int, default=3, help="windows that scenarios reach back (default: 3)"
    )
    verb.add_argument(
        "--first",
        type=int,
        help="the first interval that is graded (default: 4, where all windows are there and live "
        "maps were improved once; the last one where there are fewer)",
    )
    verb.add_argument(
        "--strategies",
        type=list_of(str),
        metavar="NAME,..",
        help=f"the others are compared with the first (default: all of: {_STRATEGIES})",
    )
    verb.add_argument(
        "--dispatch",
        choices=("even", "quota", "step"),
        default="even",
        help="how replicas share: evenly, by the plan's split, or the best way for each piece "
        "(default: even)",
    )
    verb.add_argument(
        "--move-budget",
        type=int,
        default=40,
        help="copies in one layer of an incremental plan (default: 40)",
    )
    verb.add_argument(
        "--single-steps",
        type=int,
        default=0,
        metavar="N",
        help="draw N steps of each interval and rate them, too (default: 0)",
    )
    verb.add_argument("--out", type=Path, metavar="FILE", help="append the JSON line to this file")
    add_plot(verb, "the ratio over time")


def _add_traffic(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded hits in place of made-up ones: NPZ or JSON with `hits` [pieces, layers, "
        f"experts] and, if known, `steps_per_piece`; else {_PIECES} pieces are a window",
    )
    verb.add_argument(
        "--regimes",
        type=list_of(str),
        metavar="NAME,..",
        help="of the made-up traffic (default: stationary,drift,shift,hot,bursty)",
    )
    verb.add_argument(
        "--seeds", type=list_of(int), metavar="N,..", help="of the traffic (default: 0)"
    )
    verb.add_argument("--intervals", type=int, help="length of the traffic (default: 14)")
    verb.add_argument("--layers", type=int, help="of the traffic (default: 6)")
    verb.add_argument("--experts", type=int, help="of the traffic (default: 384)")
    verb.add_argument(
        "--hits", type=int, help=_default("expert choices of a rank's step in one layer", "hits")
    )


def _default(text: str, name: str) -> str:
    usual = [getattr(_PHASES[phase], name) for phase in ("decode", "prefill")]
    return f"{text} (default: {usual[0]}; prefill: {usual[1]})"


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    from deepinfer_eplb.drawing import check_plot
    from deepinfer_eplb.errors import FileError
    from deepinfer_eplb.files import load_trace
    from deepinfer_eplb.simulate import (
        describe,
        json_line,
        plot,
        summarise,
        sweep,
        table,
        time_line,
    )

    given = [name for name in _OF_TRAFFIC if getattr(options, name) is not None]
    if options.trace is not None and given:
        message = f"--{given[0]} is of made-up traffic and says nothing with --trace; leave it out."
        raise CommandError(message, BAD_INPUT)
    if options.plot is not None:
        check_plot(options.plot)
    trace = None if options.trace is None else load_trace(options.trace)
    asked = _asked(options, trace)
    if options.out is not None:
        _append(options.out, "")  # before a long run
    runs = sweep(asked, trace=None if trace is None else trace.hits)
    lines = summarise(runs)
    output(f"{describe(asked)}\n\n{time_line(runs)}\n\n{table(lines)}\n")
    if options.out is not None:
        command = shlex.join(["deepinfer-eplb", *arguments])
        _append(options.out, json_line(asked, lines, {"command": command}) + "\n")
    if options.plot is not None:
        try:
            plot(options.plot, runs)
        except FileError as error:
            raise CommandError(str(error), CANNOT_WRITE) from error


def _asked(options: argparse.Namespace, trace: Trace | None) -> Sweep:
    from deepinfer_eplb.maps import Layout
    from deepinfer_eplb.simulate import REGIMES, STRATEGIES, Sweep, Traffic

    usual = _PHASES[options.phase]
    ranks = usual.ranks if options.ranks is None else options.ranks
    nodes = (1 if ranks % 8 else ranks // 8) if options.nodes is None else options.nodes
    hits = usual.hits if options.hits is None else options.hits
    layers, experts = options.layers, options.experts
    if trace is not None:
        _, layers, experts = trace.hits.shape
    layers, experts = (6 if layers is None else layers), (384 if experts is None else experts)
    slots = options.slots_per_rank
    if slots is None:
        slots = -(-experts // max(ranks, 1)) + usual.spare_slots
    schedule, intervals = _schedule(options, trace)
    return Sweep(
        layout=Layout(ranks, nodes, slots),
        schedule=schedule,
        traffic=Traffic(num_layers=layers, num_experts=experts, hits_per_step=ranks * hits),
        regimes=options.regimes or REGIMES,
        seeds=options.seeds or (0,),
        intervals=intervals,
        strategies=options.strategies or tuple(STRATEGIES),
        dispatch=options.dispatch,
        move_budget=options.move_budget,
        groups=options.groups,
    )


def _schedule(options: argparse.Namespace, trace: Trace | None) -> tuple[Schedule, int]:
    """Return when is planned and graded, and how many intervals there are."""
    from deepinfer_eplb.simulate import Schedule

    usual = _PHASES[options.phase]
    window = usual.window if options.window is None else options.window
    interval = usual.interval if options.interval is None else options.interval
    if trace is not None and trace.steps_per_piece is not None:
        steps_per_piece = trace.steps_per_piece
    else:
        _check_whole("--window", window, _PIECES)
        steps_per_piece = window // _PIECES
    _check_whole("--window", window, steps_per_piece)
    _check_whole("--interval", interval, steps_per_piece)
    intervals = 14 if options.intervals is None else options.intervals
    if trace is not None:
        intervals = len(trace.hits) * steps_per_piece // interval
    first = options.first
    if first is None:
        first = max(1, min(4, intervals - 1))
    schedule = Schedule(
        steps_per_piece=steps_per_piece,
        pieces_per_window=window // steps_per_piece,
        pieces_per_interval=interval // steps_per_piece,
        num_windows=options.windows,
        first_graded=first,
        single_steps=options.single_steps,
    )
    return schedule, intervals


def _check_whole(flag: str, steps: int, part: int) -> None:
    if steps < part or steps % part:
        raise CommandError(
            f"{flag} is {steps} steps; allowed: multiples of {part}, so that it is made of whole "
            f"pieces. Give {max(1, round(steps / part)) * part}.",
            BAD_INPUT,
        )


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        message = f"`{path}` cannot be written: {error.strerror}. Choose another file."
        raise CommandError(message, CANNOT_WRITE) from error
