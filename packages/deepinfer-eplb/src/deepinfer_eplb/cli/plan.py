"""The verb `plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepinfer_eplb.cli.common import (
    BAD_INPUT,
    LOADS_HELP,
    MAP_HELP,
    CommandError,
    Verbs,
    add_plot,
    list_of,
    output,
    writing,
)

__all__ = ["add"]


def add(verbs: Verbs) -> None:
    """Add the verb."""
    text = "Plan where experts live, and print what each layer gains"
    verb = verbs.add_parser("plan", help=text, description=f"{text}.")
    verb.set_defaults(run=_run)
    verb.add_argument("loads", type=Path, metavar="LOADS", help=LOADS_HELP)
    verb.add_argument("--ranks", type=int, required=True, help="of the expert-parallel group")
    verb.add_argument(
        "--slots-per-rank", type=int, required=True, help="experts a rank holds, spare ones too"
    )
    verb.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    verb.add_argument(
        "--groups", type=int, help="of experts that the router picks as one (default: none)"
    )
    verb.add_argument("--prev", type=Path, metavar="MAP", help=f"the live map; {MAP_HELP}")
    verb.add_argument(
        "--exclude",
        type=list_of(int),
        default=(),
        metavar="RANK,..",
        help="ranks that hold nothing: failed ones, or ones being drained (default: none)",
    )
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
        default=40,
        help="copies between ranks in one layer of an incremental plan (default: 40)",
    )
    verb.add_argument(
        "--replan-slack",
        type=float,
        help="plan a layer in full where its incremental plan is worse by more than this "
        "(default: never)",
    )
    verb.add_argument(
        "--split",
        choices=("even", "quota"),
        default="even",
        help="how replicas of an expert share its tokens (default: even)",
    )
    verb.add_argument(
        "--pieces-per-window", type=int, default=10, help="of `history` (default: 10)"
    )
    verb.add_argument(
        "--expert-bytes", type=int, help="of one expert of one layer; adds what moves in bytes"
    )
    verb.add_argument("-o", "--out", type=Path, metavar="MAP", help="write the map: .json or .npz")
    add_plot(verb, "loads of ranks before and after")


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    from deepinfer_eplb.arrays import check_name
    from deepinfer_eplb.drawing import check_plot, plot_rank_loads
    from deepinfer_eplb.files import load_loads, load_map, save_map
    from deepinfer_eplb.plan import Planner
    from deepinfer_eplb.report import active_loads, before_of

    if options.out is not None:
        check_name(options.out)
    if options.plot is not None:
        check_plot(options.plot)
    if options.expert_bytes is not None and options.expert_bytes < 1:
        message = f"--expert-bytes is {options.expert_bytes}; allowed: whole numbers from 1."
        raise CommandError(message, BAD_INPUT)
    planner = Planner(
        policy=options.policy,
        mode=options.mode,
        move_budget=options.move_budget,
        replan_slack=options.replan_slack,
        split=options.split,
        excluded_ranks=options.exclude,
        pieces_per_window=options.pieces_per_window,
    )
    given = load_loads(options.loads)
    previous = None if options.prev is None else load_map(options.prev)
    plan = planner.plan(
        given.loads,
        ranks=options.ranks,
        nodes=options.nodes,
        slots_per_rank=options.slots_per_rank,
        prev=None if previous is None else previous.physical_to_logical,
        history=given.history,
        groups=options.groups,
    )
    output(plan.report(given.loads, options.expert_bytes) + "\n")
    with writing():
        if options.out is not None:
            save_map(options.out, plan)
        if options.plot is not None:
            live = before_of(plan)
            before = None if live is None else active_loads(live, given.loads, plan.layout, None)
            slots, split = plan.physical_to_logical, plan.split
            plot_rank_loads(
                options.plot, active_loads(slots, given.loads, plan.layout, split), before
            )
