"""Files of loads, of traces and of maps: NPZ or JSON, as the name ends.

    loads   `loads` [L, E]; optionally `history` [H, L, E], pieces, oldest first
    trace   `hits` [T, L, E]; optionally `steps_per_piece`
    map     `version` 1, `num_ranks`, `num_nodes`, `slots_per_rank`, `excluded_ranks`,
            `num_experts`, `physical_to_logical` [L, P]; optionally `split` [L, P], and
            `ratio_before`, `ratio_after`, `moves`: what the plan was thought to gain

Fields of other names are refused, as is a map that is not whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_eplb.arrays import Field, Numbers, fault, read, write
from deepinfer_eplb.balance import check_split
from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.maps import (
    Floats,
    Ints,
    Layout,
    Lookups,
    check_loads,
    check_map,
)
from deepinfer_eplb.plan import Plan

__all__ = ["Loads", "StoredMap", "Trace", "load_loads", "load_map", "load_trace", "save_map"]

VERSION = 1

_LOADS = {"loads": Field(2), "history": Field(3, may_lack=True)}
_TRACE = {"hits": Field(3), "steps_per_piece": Field(0, may_lack=True)}
_MAP = {
    **dict.fromkeys(("version", "num_ranks", "num_nodes", "slots_per_rank"), Field(0)),
    "excluded_ranks": Field(1),
    "num_experts": Field(0),
    "physical_to_logical": Field(2),
    "split": Field(2, may_lack=True),
    **dict.fromkeys(("ratio_before", "ratio_after", "moves"), Field(0, may_lack=True)),
}


@dataclass(frozen=True, eq=False)
class Loads:
    """Loads of a file.

    Attributes:
        loads: [L, E] float64.
        history: [H, L, E] float64, pieces, oldest first, or None.
    """

    loads: Floats
    history: Floats | None


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded trace.

    Attributes:
        hits: [T, L, E] float64, hits of each piece.
        steps_per_piece: steps of each, or None where the file does not say.
    """

    hits: Floats
    steps_per_piece: int | None

    def last(self, pieces_per_window: int, num_windows: int) -> Loads:
        """Return the end of the trace as loads: its last window, and up to so many in a row.

        Args:
            pieces_per_window: pieces that make the loads.
            num_windows: whole windows that `history` reaches back, the last one included; those
                that there are if fewer.
        Raises:
            PlanInputError: a number is below 1, or the trace is shorter than a window.
        """
        for name, value in (
            ("pieces_per_window", pieces_per_window),
            ("num_windows", num_windows),
        ):
            if value < 1:
                raise PlanInputError(f"`{name}` is {value!r}; allowed: whole numbers from 1.")
        windows = min(num_windows, len(self.hits) // pieces_per_window)
        if not windows:
            raise PlanInputError(
                f"The trace has {len(self.hits)} pieces, fewer than a window; give "
                f"`pieces_per_window` {len(self.hits)} or less, or a longer trace."
            )
        history = self.hits[-windows * pieces_per_window :]
        return Loads(history[-pieces_per_window:].sum(0), history)


@dataclass(frozen=True, eq=False)
class StoredMap(Lookups):
    """A map of a file, whole; dispatch takes it as it takes a `Plan`.

    Attributes:
        physical_to_logical: [L, P] int32, -1 on excluded ranks.
        num_experts: E.
        layout: ranks, nodes, slots, excluded ranks.
        split: [L, P] float64, the share of its expert that each slot takes, or None: even.
        ratio_before, ratio_after: slowest/mean of the window when it was planned, or None.
        moves: copies between ranks that the plan asked for, or None.
    """

    physical_to_logical: Ints
    num_experts: int
    layout: Layout
    split: Floats | None = None
    ratio_before: float | None = None
    ratio_after: float | None = None
    moves: int | None = None


def load_loads(path: str | Path) -> Loads:
    """Read a file of loads.

    Raises:
        FileError: it cannot be read, or does not hold loads.
    """
    where = Path(path)
    fields = read(where, _LOADS)
    try:
        loads = check_loads(fields["loads"])
        history = fields.get("history")
        pieces = None if history is None else check_loads(history, "history", 3)
    except PlanInputError as error:
        raise fault(where, str(error)) from error
    if pieces is not None and pieces.shape[1:] != loads.shape:
        raise fault(
            where,
            f"`history` has shape {list(pieces.shape)}, but `loads` {list(loads.shape)}; layers "
            "and experts must be the same.",
        )
    return Loads(loads, pieces)


def load_trace(path: str | Path) -> Trace:
    """Read a trace.

    Raises:
        FileError: it cannot be read, or does not hold a trace.
    """
    where = Path(path)
    fields = read(where, _TRACE)
    try:
        hits = check_loads(fields["hits"], "hits", 3)
    except PlanInputError as error:
        raise fault(where, str(error)) from error
    steps = None
    if "steps_per_piece" in fields:
        steps = _whole(where, fields, "steps_per_piece", 1)
    return Trace(hits, steps)


def load_map(path: str | Path) -> StoredMap:
    """Read a map and check that it is whole.

    Raises:
        FileError: it cannot be read, or does not hold a map of this version in which every expert
            has its place.
    """
    where = Path(path)
    fields = read(where, _MAP)
    version = _whole(where, fields, "version", 0)
    if version != VERSION:
        raise fault(where, f"`version` is {version}; allowed: {VERSION}. Plan anew.")
    excluded = fields["excluded_ranks"]
    if excluded.size and excluded.dtype.kind not in "iu":
        raise fault(where, f"`excluded_ranks` is {excluded.tolist()}; needed: whole numbers.")
    num_experts, ranks, nodes, slots_per_rank = (
        _whole(where, fields, name, 1)
        for name in ("num_experts", "num_ranks", "num_nodes", "slots_per_rank")
    )
    # Before anything is as large as these numbers say.
    num_physical = fields["physical_to_logical"].shape[1]
    if ranks * slots_per_rank != num_physical:
        raise fault(
            where,
            f"`num_ranks` {ranks} x `slots_per_rank` {slots_per_rank} are {ranks * slots_per_rank} "
            f"slots, but rows of `physical_to_logical` have {num_physical}; needed: the same.",
        )
    try:
        layout = Layout(ranks, nodes, slots_per_rank, tuple(int(rank) for rank in excluded))
        layout.check_experts(num_experts)
        slots = check_map(fields["physical_to_logical"], num_experts, layout)
    except PlanInputError as error:
        raise fault(where, str(error)) from error
    split = fields.get("split")
    return StoredMap(
        physical_to_logical=slots,
        num_experts=num_experts,
        layout=layout,
        split=None if split is None else _split(where, split, slots, num_experts),
        ratio_before=_ratio(where, fields, "ratio_before"),
        ratio_after=_ratio(where, fields, "ratio_after"),
        moves=_whole(where, fields, "moves", 0) if "moves" in fields else None,
    )


def save_map(path: str | Path, plan: Plan | StoredMap) -> None:
    """Write a map; a file of that name is replaced at once, or stays as it is.

    Args:
        path: ends in .json or .npz.
        plan: what to write.
    Raises:
        FileError: the name ends otherwise, or the file cannot be written.
    """
    layout, before = plan.layout, plan.ratio_before
    fields: dict[str, object] = {
        "version": VERSION,
        "num_ranks": layout.num_ranks,
        "num_nodes": layout.num_nodes,
        "slots_per_rank": layout.slots_per_rank,
        "excluded_ranks": np.array(layout.excluded, np.int64),
        "num_experts": plan.num_experts,
        "physical_to_logical": plan.physical_to_logical,
        "split": plan.split,
        "ratio_before": None if before is None or math.isnan(before) else before,
        "ratio_after": plan.ratio_after,
        "moves": plan.moves,
    }
    write(Path(path), fields)


def _whole(path: Path, fields: Mapping[str, Numbers], name: str, least: int) -> int:
    value = fields[name]
    if value.dtype.kind not in "iu" or value < least:
        raise fault(path, f"`{name}` is {value.item()!r}; allowed: whole numbers from {least}.")
    return int(value)


def _ratio(path: Path, fields: Mapping[str, Numbers], name: str) -> float | None:
    if name not in fields:
        return None
    value = float(fields[name])
    if not 1 - 1e-9 <= value < math.inf:
        raise fault(path, f"`{name}` is {value!r}; allowed: finite numbers from 1.")
    return value


def _split(path: Path, split: Numbers, slots: Ints, num_experts: int) -> Floats:
    """Return a split [L, P] whose shares sum to 1 for each expert."""
    try:
        return check_split(split, slots, num_experts)
    except PlanInputError as error:
        raise fault(path, str(error)) from error
