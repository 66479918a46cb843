"""The verbs `score` and `report`: what a map does, and what it holds."""

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
    output,
    writing,
)

__all__ = ["add_report", "add_score"]


def add_score(verbs: Verbs) -> None:
    """Add the verb."""
    text = "Rate a map under loads: slowest rank over mean, and how near that is to the best"
    verb = verbs.add_parser(
        "score",
        help=text,
        description=f"{text}. `in order`: experts in order, no replicas: the ratio without "
        "balancing; `best split`: what this map could reach, did replicas share in the "
        "best way; `no map below`: what no map could go below. Loads of a window give figures of "
        "the window: those of single steps are worse. `of pieces`: mean over pieces of `history`.",
    )
    verb.set_defaults(run=_score)
    verb.add_argument("map", type=Path, metavar="MAP", help=MAP_HELP)
    verb.add_argument("loads", type=Path, metavar="LOADS", help=LOADS_HELP)


def add_report(verbs: Verbs) -> None:
    """Add the verb."""
    text = "Say what a map holds: replicas, ranks, and under loads how they do"
    verb = verbs.add_parser("report", help=text, description=f"{text}.")
    verb.set_defaults(run=_report)
    verb.add_argument("map", type=Path, metavar="MAP", help=MAP_HELP)
    verb.add_argument("loads", type=Path, nargs="?", metavar="LOADS", help=LOADS_HELP)
    verb.add_argument(
        "--prev", type=Path, metavar="MAP", help="count the moves from this map, and plot it too"
    )
    add_plot(verb, "loads of ranks; needs LOADS")


def _score(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    from deepinfer_eplb.files import load_loads, load_map
    from deepinfer_eplb.report import score_report

    stored, given = load_map(options.map), load_loads(options.loads)
    output(score_report(stored, given.loads, given.history) + "\n")


def _report(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    from deepinfer_eplb.drawing import check_plot, plot_rank_loads
    from deepinfer_eplb.files import load_loads, load_map
    from deepinfer_eplb.report import active_loads, map_report

    if options.plot is not None:
        check_plot(options.plot)
        if options.loads is None:
            raise CommandError("--plot needs LOADS: without them ranks have none.", BAD_INPUT)
    stored = load_map(options.map)
    previous = None if options.prev is None else load_map(options.prev)
    loads = None if options.loads is None else load_loads(options.loads).loads
    output(map_report(stored, loads, previous) + "\n")
    if options.plot is not None and loads is not None:
        ranks = [
            active_loads(each.physical_to_logical, loads, each.layout, each.split)
            for each in (stored, previous)
            if each is not None
        ]
        with writing():
            before = ranks[1] if len(ranks) > 1 else None
            plot_rank_loads(options.plot, ranks[0], before, ("--prev", "MAP"))
