"""The verb `simulate`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_eplb.cli.common import (
    BAD_INPUT,
    CANNOT_WRITE,
    TRACE_HELP,
    CommandError,
    Verbs,
    add_plot,
    check_file,
    list_of,
    output,
    writing,
)

if TYPE_CHECKING:
    from deepinfer_eplb.files import Trace
    from deepinfer_eplb.maps import Floats
    from deepinfer_eplb.simulate import Line, Run, Schedule, Sweep

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
_LAYERS, _EXPERTS, _INTERVALS = 2, 384, 10  # of made-up traffic
_LEAST_GRADED = 2  # of a trace; one interval is chance
_STRATEGIES = (
    "none (experts in order, no replicas), window-full, window-incremental (planned on the last "
    "window), scenario-full, scenario-incremental (on the pieces of the last windows; the latter "
    "is what `plan` does), static (the first plan for ever)"
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
    verb.add_argument(
        "--ranks", type=int, help=_default("of the group", "ranks") + "; needed with --trace"
    )
    verb.add_argument(
        "--nodes", type=int, help="machines (default: of 8 ranks each if that is possible, else 1)"
    )
    verb.add_argument(
        "--groups", type=int, help="of experts, each kept on one node (default: none)"
    )
    verb.add_argument(
        "--slots-per-rank",
        type=int,
        help="experts a rank holds (default: what the experts need and 1 more; prefill: 4 more); "
        "needed with --trace",
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
        "maps were improved once; an earlier one where there are fewer than 6)",
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
    verb.add_argument(
        "--timeline", action="store_true", help="print ratio and moves of each interval, too"
    )
    verb.add_argument("--out", type=Path, metavar="FILE", help="append the JSON line to this file")
    add_plot(verb, "the ratio over time")


def _add_traffic(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"recorded hits in place of made-up ones: {TRACE_HELP}; else {_PIECES} pieces are a "
        "window",
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
    verb.add_argument(
        "--intervals", type=int, help=f"length of the traffic (default: {_INTERVALS})"
    )
    verb.add_argument("--layers", type=int, help=f"of the traffic (default: {_LAYERS})")
    verb.add_argument("--experts", type=int, help=f"of the traffic (default: {_EXPERTS})")
    verb.add_argument(
        "--hits", type=int, help=_default("expert choices of a rank's step in one layer", "hits")
    )


def _default(text: str, name: str) -> str:
    usual = [getattr(_PHASES[phase], name) for phase in ("decode", "prefill")]
    return f"{text} (default: {usual[0]}; prefill: {usual[1]})"


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    from deepinfer_eplb.drawing import check_plot
    from deepinfer_eplb.files import load_trace
    from deepinfer_eplb.simulate import json_line, plot, summarise, sweep

    check_file("--out", options.out)
    if options.plot is not None:
        check_plot(options.plot)
    if options.trace is not None:
        _check_with_trace(options)
    trace = None if options.trace is None else load_trace(options.trace)
    asked = _asked(options, trace)
    hits = None if trace is None else trace.hits
    asked.check(hits)
    if options.out is not None:
        _append(options.out, "")  # before a long run
    runs = sweep(asked, trace=hits, watch=_watch)
    lines = summarise(runs)
    if options.out is not None:  # before the output, whose reader may be gone
        command = shlex.join(["deepinfer-eplb", *arguments])
        _append(options.out, json_line(asked, lines, {"command": command}) + "\n")
    if options.plot is not None:
        with writing():
            plot(options.plot, runs)
    output(_text(options, asked, runs, lines, hits))


def _check_with_trace(options: argparse.Namespace) -> None:
    for name in _OF_TRAFFIC:
        if getattr(options, name) is not None:
            message = f"--{name} is of made-up traffic and says nothing with --trace; leave it out."
            raise CommandError(message, BAD_INPUT)
    if options.ranks is None or options.slots_per_rank is None:
        message = "--trace needs --ranks and --slots-per-rank: it does not tell where experts live."
        raise CommandError(message, BAD_INPUT)


def _watch(regime: str, seed: int) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"simulating {regime}, seed {seed}", file=sys.stderr, flush=True)


def _text(
    options: argparse.Namespace,
    asked: Sweep,
    runs: Sequence[Run],
    lines: Sequence[Line],
    hits: Floats | None,
) -> str:
    from deepinfer_eplb.simulate import conclusion, describe, table, time_line

    blocks = [describe(asked, None if hits is None else len(hits))]
    if options.timeline:
        blocks.append(time_line(runs))
    blocks += [table(lines), conclusion(lines)]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _asked(options: argparse.Namespace, trace: Trace | None) -> Sweep:
    from deepinfer_eplb.maps import Layout
    from deepinfer_eplb.simulate import REGIMES, STRATEGIES, Sweep, Traffic

    usual = _PHASES[options.phase]
    ranks = usual.ranks if options.ranks is None else options.ranks
    nodes = (1 if ranks % 8 else ranks // 8) if options.nodes is None else options.nodes
    hits = usual.hits if options.hits is None else options.hits
    layers = _LAYERS if options.layers is None else options.layers
    experts = _EXPERTS if options.experts is None else options.experts
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
    if window > interval:
        message = f"--window is {window} steps, more than --interval, {interval}; allowed: as many."
        raise CommandError(message, BAD_INPUT)
    pieces = interval // steps_per_piece
    intervals = _INTERVALS if options.intervals is None else options.intervals
    if trace is not None:
        intervals = _intervals_of(len(trace.hits), pieces, interval, options.first)
    first = options.first
    if first is None:
        first = max(1, min(4, intervals - _LEAST_GRADED))
    schedule = Schedule(
        steps_per_piece=steps_per_piece,
        pieces_per_window=window // steps_per_piece,
        pieces_per_interval=pieces,
        num_windows=options.windows,
        first_graded=first,
        single_steps=options.single_steps,
    )
    return schedule, intervals


def _intervals_of(num_pieces: int, length: int, steps: int, first: int | None) -> int:
    """Return how many intervals a trace has, if enough of them can be graded."""
    intervals = num_pieces // length
    needed = ((1 if first is None else first) + _LEAST_GRADED) * length
    if num_pieces < needed:
        start = "" if first is None else f" and --first {first}"
        raise CommandError(
            f"--trace has {num_pieces} pieces; {needed} are needed to grade {_LEAST_GRADED} "
            f"intervals with --interval {steps} ({length} pieces){start}. Give a longer trace, or "
            f"a shorter --interval{'' if first is None else ' or a lower --first'}.",
            BAD_INPUT,
        )
    return intervals


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
