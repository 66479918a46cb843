"""The verb `plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_eplb.cli.common import (
    BAD_INPUT,
    LOADS_HELP,
    MAP_HELP,
    TRACE_HELP,
    CommandError,
    Verbs,
    add_plot,
    check_file,
    in_words_of_options,
    list_of,
    output,
    writing,
)

if TYPE_CHECKING:
    from deepinfer_eplb.files import Loads, StoredMap
    from deepinfer_eplb.plan import Plan, Planner

__all__ = ["add"]

_PIECES = 10  # of a window
_WINDOWS = 3
_MOVES = 40


def add(verbs: Verbs) -> None:
    """Add the verb."""
    text = "Plan where experts live, and print what each layer gains"
    verb = verbs.add_parser(
        "plan",
        help=text,
        description=f"{text}. Without --prev, `in order` is the ratio without balancing: experts "
        "in order, no replicas.",
    )
    verb.set_defaults(run=_run)
    _add_input(verb)
    _add_sizes(verb)
    _add_planning(verb)
    verb.add_argument(
        "--expert-bytes",
        type=int,
        help="of one expert of one layer; adds what moves in bytes; needs --prev",
    )
    verb.add_argument("-o", "--out", type=Path, metavar="MAP", help="write the map: .json or .npz")
    add_plot(verb, "loads of ranks before and after")


def _add_input(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("loads", type=Path, nargs="?", metavar="LOADS", help=LOADS_HELP)
    verb.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"plan on the end of a recorded trace in place of LOADS; {TRACE_HELP}",
    )
    verb.add_argument(
        "--windows",
        type=int,
        help=f"of --trace that are planned on, in a row (default: {_WINDOWS})",
    )
    verb.add_argument(
        "--pieces-per-window",
        type=int,
        help=f"of `history`, or of --trace (default: {_PIECES})",
    )
    verb.add_argument("--prev", type=Path, metavar="MAP", help=f"the live map; {MAP_HELP}")


def _add_sizes(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--ranks", type=int, required=True, help="of the expert-parallel group")
    verb.add_argument(
        "--slots-per-rank", type=int, required=True, help="experts a rank holds, spare ones too"
    )
    verb.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    verb.add_argument(
        "--groups", type=int, help="of experts that the router picks as one (default: none)"
    )
    verb.add_argument(
        "--exclude",
        type=_ranks,
        metavar="RANK,..",
        help="ranks that hold nothing: failed ones, or ones being drained; `none`: use all "
        "(default: those that --prev excludes, else none)",
    )


def _add_planning(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--policy",
        choices=("auto", "global", "hierarchical"),
        default="auto",
        help="`hierarchical` keeps a group of experts on one node (default: auto, which does so "
        "where --groups is given and can be divided)",
    )
    verb.add_argument(
        "--mode",
        choices=("auto", "full", "incremental"),
        default="auto",
        help="`incremental` improves the live map by a few moves (default: auto, which does so "
        "where --prev is given)",
    )
    verb.add_argument(
        "--move-budget",
        type=int,
        help="copies between ranks in one layer of an incremental plan; experts that were lost "
        "with excluded ranks, and what fills ranks that came back, are copied whatever it is; "
        f"needs --prev (default: {_MOVES})",
    )
    verb.add_argument(
        "--replan-slack",
        type=float,
        help="plan a layer in full where its incremental plan is worse by more than this; needs "
        "--prev (default: never)",
    )
    verb.add_argument(
        "--split",
        choices=("even", "quota"),
        default="even",
        help="how replicas of an expert share its tokens (default: even)",
    )


def _ranks(text: str) -> tuple[int, ...]:
    return () if text == "none" else list_of(int)(text)


# argparse names the type in its message.
_ranks.__name__ = "comma-separated ranks or `none`"


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    from deepinfer_eplb.files import load_map, save_map

    _check(options)
    given = _loads(options)
    previous = None if options.prev is None else load_map(options.prev)
    planner = _planner(options, previous)
    plan = planner.plan(
        given.loads,
        ranks=options.ranks,
        nodes=options.nodes,
        slots_per_rank=options.slots_per_rank,
        prev=None if previous is None else previous.physical_to_logical,
        history=given.history,
        groups=options.groups,
    )
    with writing():  # before the output, whose reader may be gone
        if options.out is not None:
            save_map(options.out, plan)
        if options.plot is not None:
            _plot(options.plot, plan, given)
    said = _said(options, plan, given)
    output(f"{said}\n\n{plan.report(given.loads, options.expert_bytes)}\n")


def _check(options: argparse.Namespace) -> None:
    """Refuse what cannot be done, and options without effect, before anything is read."""
    from deepinfer_eplb.arrays import check_name
    from deepinfer_eplb.drawing import check_plot

    if (options.loads is None) == (options.trace is None):
        raise CommandError("Give either LOADS or --trace.", BAD_INPUT)
    if options.out is not None:
        check_file("--out", options.out)
        check_name(options.out)
    if options.plot is not None:
        check_plot(options.plot)
    if options.expert_bytes is not None and options.expert_bytes < 1:
        message = f"--expert-bytes is {options.expert_bytes}; allowed: whole numbers from 1."
        raise CommandError(message, BAD_INPUT)
    without_prev, in_full = options.prev is None, options.mode == "full"
    idle = (
        ("windows", options.trace is None, "without --trace"),
        ("groups", options.policy == "global", "with --policy global"),
        ("move_budget", without_prev, "without --prev"),
        ("move_budget", in_full, "with --mode full"),
        ("replan_slack", without_prev, "without --prev"),
        ("replan_slack", in_full, "with --mode full"),
        ("expert_bytes", without_prev, "without --prev"),
    )
    for name, is_idle, why in idle:
        if is_idle and getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise CommandError(f"{flag} has no effect {why}; leave it out.", BAD_INPUT)


def _loads(options: argparse.Namespace) -> Loads:
    from deepinfer_eplb.files import load_loads, load_trace

    if options.trace is not None:
        windows = _WINDOWS if options.windows is None else options.windows
        return load_trace(options.trace).last(_pieces(options), windows)
    given = load_loads(options.loads)
    if given.history is None and options.pieces_per_window is not None:
        message = f"--pieces-per-window has no effect: `{options.loads}` has no `history`."
        raise CommandError(f"{message} Leave it out.", BAD_INPUT)
    return given


def _pieces(options: argparse.Namespace) -> int:
    given: int | None = options.pieces_per_window
    return _PIECES if given is None else given


def _planner(options: argparse.Namespace, previous: StoredMap | None) -> Planner:
    from deepinfer_eplb.plan import Planner

    excluded = options.exclude
    if previous is not None:
        then = previous.layout
        if (then.num_ranks, then.slots_per_rank) != (options.ranks, options.slots_per_rank):
            raise CommandError(
                f"--prev is a map of {then.num_ranks} ranks x {then.slots_per_rank} slots, but "
                f"--ranks is {options.ranks} and --slots-per-rank {options.slots_per_rank}; give "
                "the same, or plan without --prev.",
                BAD_INPUT,
            )
        excluded = then.excluded if excluded is None else excluded
    return Planner(
        policy=options.policy,
        mode=options.mode,
        move_budget=_MOVES if options.move_budget is None else options.move_budget,
        replan_slack=options.replan_slack,
        split=options.split,
        excluded_ranks=() if excluded is None else excluded,
        pieces_per_window=_pieces(options),
    )


def _said(options: argparse.Namespace, plan: Plan, given: Loads) -> str:
    """Return how it was planned, in a line or a few."""
    from deepinfer_eplb.errors import PlanInputError
    from deepinfer_eplb.policies import hierarchical

    base = "the window alone"
    if given.history is not None:
        base = f"{len(given.history)} pieces of history"
    lines = [f"Planned in full, on {base}."]
    if plan.mode == "incremental":
        budget = _MOVES if options.move_budget is None else options.move_budget
        lines = [f"Improved the live map by at most {budget} moves a layer, on {base}."]
        if options.replan_slack is not None:
            slack = f"{options.replan_slack:g}"
            lines.append(f"Layers that a full plan makes better by over {slack} were planned so.")
    if plan.layout.excluded:
        ranks = ", ".join(map(str, plan.layout.excluded))
        origin = ", as in --prev; `--exclude none` uses them" if options.exclude is None else ""
        lines.append(f"Excluded ranks: {ranks}{origin}.")
    if options.groups is not None and options.policy == "auto":
        try:
            hierarchical.check(plan.num_experts, options.groups, plan.layout)
        except PlanInputError as error:
            lines.append(f"Planned globally, for {in_words_of_options(str(error))}")
    return "\n".join(lines)


def _plot(path: Path, plan: Plan, given: Loads) -> None:
    import numpy as np

    from deepinfer_eplb.drawing import plot_rank_loads
    from deepinfer_eplb.report import active_loads, before_of, in_order

    live, name = before_of(plan), "before"
    if live is None:
        name = "in order"
        live = np.tile(in_order(plan.num_experts, plan.layout), (len(given.loads), 1))
    before = active_loads(live, given.loads, plan.layout, None)
    after = active_loads(plan.physical_to_logical, given.loads, plan.layout, plan.split)
    plot_rank_loads(path, after, before, (name, "after"))
