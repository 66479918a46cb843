"""Replay of a trace: plans made at the end of each interval, graded on the next one.

    pieces     |....................|....................|....................|
    intervals  |         0          |         1          |         2          |
    windows                  |######|             |######|             |######|
                                    ^ plan, from the     ^ plan, from this window and
                                      window before        `num_windows` - 1 before it
                                    |--- graded here ----|--- graded here ----|

Three kinds of figures, none of which may be compared with another: all are slowest rank over mean
of a layer, 1 is perfect, and they grow as the time that is looked at gets shorter.

    interval   of the sum over an interval: what a counter that is read once in it would show
    piece      of each piece, mean over the pieces: the headline, nearest to the time paid
    step       of single steps, drawn from pieces as independent tokens would give them
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.balance import BOUND_SWEEPS, lower_bound, water_fill
from deepinfer_eplb.dispatch import MODES
from deepinfer_eplb.errors import PlanInputError, SettingError
from deepinfer_eplb.maps import Floats, Layout, Longs, check_loads, imbalance, num_arrivals
from deepinfer_eplb.maps import rank_loads as loads_of_ranks
from deepinfer_eplb.plan import Plan
from deepinfer_eplb.simulate.strategies import Moment, Strategy

__all__ = ["DECODE", "PREFILL", "Interval", "Schedule", "ratios", "replay", "unbeatable"]


@dataclass(frozen=True)
class Schedule:
    """When is counted, planned and graded.

    Attributes:
        steps_per_piece: steps whose hits are counted together.
        pieces_per_window: pieces that one plan is made on, the last ones of an interval.
        pieces_per_interval: pieces from one plan to the next.
        num_windows: windows that scenarios reach back, one from each interval.
        first_graded: intervals before it are not graded, so that every strategy has its windows and
            a live map by then.
        single_steps: steps to draw and grade in each interval; 0 for none.
        seed: of these steps.
    Raises:
        SettingError: a number is out of range, or a window is longer than an interval.
    """

    steps_per_piece: int = 100
    pieces_per_window: int = 10
    pieces_per_interval: int = 100
    num_windows: int = 3
    first_graded: int = 4
    single_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in vars(self).items():
            least = 0 if name in ("single_steps", "seed") else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingError(f"`{name}` is {value!r}; allowed: whole numbers from {least}.")
        if self.pieces_per_window > self.pieces_per_interval:
            raise SettingError(
                f"`pieces_per_window` is {self.pieces_per_window}, but an interval has "
                f"{self.pieces_per_interval} pieces; give a window of at most as many."
            )


DECODE = Schedule()  # a window of 1000 steps in every 10000
PREFILL = Schedule(steps_per_piece=10)  # 100 in every 1000


@dataclass(frozen=True, eq=False)
class Interval:
    """How a plan did in the interval after the one it was made in.

    Attributes:
        index: of the interval that it is graded on.
        planned: [L], slowest/mean of the window that it was made on.
        interval: [L], of the interval's sum.
        piece: [L], of each of its pieces, mean over them.
        step: [L], of single steps, mean over those drawn; None where none were.
        best_split: [L], as `piece`, were each piece divided among the map's replicas in the best
            way: what dispatch could still gain. None where a rank holds an expert twice.
        moves: [L] int64, experts that ranks hold and did not hold before; 0 in the first plan.
        seconds: that planning took.
    """

    index: int
    planned: Floats
    interval: Floats
    piece: Floats
    step: Floats | None
    best_split: Floats | None
    moves: Longs
    seconds: float


def replay(
    hits: ArrayLike,
    layout: Layout,
    strategy: Strategy,
    schedule: Schedule = DECODE,
    dispatch: str = "even",
) -> tuple[Interval, ...]:
    """Return how a strategy does on a trace, one value for each graded interval.

    Args:
        hits: [T, L, E], hits of each piece. Pieces of an interval that the trace does not finish
            are left out.
        layout: ranks and slots.
        strategy: makes the plans; see `make_strategy`.
        schedule: when.
        dispatch: how replicas share in grading: `even`; `quota`, the plan's split; `step`, the best
            of a few sweeps for each piece's own hits, which a real step only gets with its own.
            Where no expert has replicas nothing is shared, and all three are the same.
    Raises:
        PlanInputError: hits are not as above, too few, or do not fit the layout.
        SettingError: the dispatch is unknown, or is `quota` and plans have no split.
    """
    if dispatch not in MODES:
        raise SettingError(f"`dispatch` is {dispatch!r}; allowed: {', '.join(map(repr, MODES))}.")
    pieces = _by_interval(hits, schedule)
    window = schedule.pieces_per_window
    live: Plan | None = None
    graded = []
    for index in range(1, len(pieces)):
        first = max(0, index - schedule.num_windows)
        history = np.concatenate([each[-window:] for each in pieces[first:index]])
        loads: Floats = history[-window:].sum(0)
        began = time.perf_counter()
        made = strategy(Moment(loads, history, window, live, layout))
        seconds = time.perf_counter() - began
        moves = np.zeros(len(made.physical_to_logical), np.int64)
        if live is not None:
            before = live.physical_to_logical
            moves = num_arrivals(made.physical_to_logical, before, layout.num_ranks)
        live = made
        if index >= schedule.first_graded:
            rating = _grade(made, loads, pieces[index], schedule, dispatch, index)
            graded.append(replace(rating, moves=moves, seconds=seconds))
    return tuple(graded)


def unbeatable(hits: ArrayLike, layout: Layout, schedule: Schedule = DECODE) -> tuple[Floats, ...]:
    """Return slowest/mean of each piece, mean over pieces, that no map goes below with any split.

    Not even one made for that piece alone. A value [L] for each interval that `replay` grades.

    Args, Raises: as `replay`.
    """
    bounds = []
    for pieces in _by_interval(hits, schedule)[schedule.first_graded :]:
        num_experts = pieces.shape[2]
        found = lower_bound(pieces.reshape(-1, num_experts), layout)
        bounds.append(found.reshape(pieces.shape[:2]).mean(0))
    return tuple(bounds)


def ratios(plan: Plan, loads: Floats, dispatch: str) -> Floats:
    """Return slowest rank over mean, [..., L], of loads [..., L, E] under a plan.

    Args:
        plan: the plan.
        loads: [L, E] or [H, L, E].
        dispatch: see `replay`.
    Raises:
        SettingError: the dispatch is `quota` and the plan has replicas and no split.
    """
    split: NDArray[np.float64] | None = None
    if not _has_replicas(plan):
        dispatch = "even"
    if dispatch == "quota":
        if plan.split is None:
            raise SettingError(
                "`dispatch` is 'quota', but the plan has no split; plan with `split='quota'`."
            )
        split = plan.split
    elif dispatch == "step":
        split = water_fill(plan.physical_to_logical, loads, plan.layout)
    held = loads_of_ranks(plan.physical_to_logical, loads, plan.layout.num_ranks, split)
    return imbalance(held, len(plan.layout.active))


def _by_interval(hits: ArrayLike, schedule: Schedule) -> Floats:
    """Return hits of whole intervals, [N, pieces, L, E]."""
    pieces = check_loads(hits, "hits", 3)
    length = schedule.pieces_per_interval
    count = len(pieces) // length
    if count <= schedule.first_graded:
        raise PlanInputError(
            f"`hits` has {len(pieces)} pieces, which are {count} intervals of {length}; interval "
            f"{schedule.first_graded} is the first graded, so {schedule.first_graded + 1} are "
            "needed. Give a longer trace, shorter intervals, or a lower `first_graded`."
        )
    return pieces[: count * length].reshape(count, length, *pieces.shape[1:])


def _grade(
    plan: Plan, loads: Floats, pieces: Floats, schedule: Schedule, dispatch: str, index: int
) -> Interval:
    """Rate a plan on an interval's pieces [T, L, E]."""
    piece = ratios(plan, pieces, dispatch).mean(0)
    best_split = None
    if not _has_replicas(plan):
        best_split = piece
    elif not _has_twice(plan):
        split = water_fill(plan.physical_to_logical, pieces, plan.layout, sweeps=BOUND_SWEEPS)
        held = loads_of_ranks(plan.physical_to_logical, pieces, plan.layout.num_ranks, split)
        best_split = imbalance(held, len(plan.layout.active)).mean(0)
    step = None
    if schedule.single_steps:
        step = ratios(plan, _draw_steps(pieces, schedule, index), dispatch).mean(0)
    return Interval(
        index=index,
        planned=ratios(plan, loads, dispatch),
        interval=ratios(plan, pieces.sum(0), dispatch),
        piece=piece,
        step=step,
        best_split=best_split,
        moves=np.zeros(len(loads), np.int64),
        seconds=0.0,
    )


def _has_replicas(plan: Plan) -> bool:
    return int(plan.num_replicas.max()) > 1


def _has_twice(plan: Plan) -> bool:
    """Return whether one of several ranks holds an expert twice, as plans of others may have it."""
    if len(plan.layout.active) == 1:
        return False
    by_rank = np.sort(plan.physical_to_logical.reshape(-1, plan.layout.slots_per_rank), 1)
    return bool(((by_rank[:, 1:] == by_rank[:, :-1]) & (by_rank[:, 1:] >= 0)).any())


def _draw_steps(pieces: Floats, schedule: Schedule, index: int) -> Floats:
    """Draw hits of single steps from pieces spread over an interval, [steps, L, E]."""
    random = np.random.default_rng([schedule.seed, index])
    chosen = np.linspace(0, len(pieces) - 1, schedule.single_steps).round().astype(int)
    steps = np.zeros((len(chosen), *pieces.shape[1:]))
    for step, piece in zip(steps, pieces[chosen], strict=True):
        for layer, counts in enumerate(piece):
            total = counts.sum()
            if total > 0:
                tokens = max(1, round(total / schedule.steps_per_piece))
                step[layer] = random.multinomial(tokens, counts / total)
    return steps
