"""A sweep: strategies on the traffic of several regimes and seeds, or on a recorded trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.errors import SettingError
from deepinfer_eplb.maps import Floats, Layout, check_loads
from deepinfer_eplb.plan import warm_up
from deepinfer_eplb.simulate.replay import DECODE, Interval, Schedule, replay, unbeatable
from deepinfer_eplb.simulate.strategies import STRATEGIES, Strategy, make_strategy
from deepinfer_eplb.simulate.traffic import REGIMES, Traffic, generate

__all__ = ["TRACE", "Line", "Run", "Sweep", "summarise", "sweep"]

TRACE = "trace"  # stands for the regime where hits were recorded


@dataclass(frozen=True)
class Sweep:
    """What to simulate.

    Attributes:
        layout: ranks and slots.
        schedule: when is counted, planned and graded.
        traffic: its settings.
        regimes, seeds: each with each.
        intervals: length of the traffic. These four are not looked at for a recorded trace.
        strategies: names of `STRATEGIES`; the first is what the others are compared with.
        dispatch: `even`, `quota` or `step`, see `replay`.
        move_budget: of incremental plans, copies in one layer.
        groups: of experts, see `make_strategy`.
    Raises:
        SettingError: a value is not allowed.
    """

    layout: Layout = field(default_factory=lambda: Layout(64, 8, 7))
    schedule: Schedule = DECODE
    traffic: Traffic = field(default_factory=Traffic)
    regimes: tuple[str, ...] = REGIMES
    seeds: tuple[int, ...] = (0,)
    intervals: int = 14
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    dispatch: str = "even"
    move_budget: int = 40
    groups: int | None = None

    def __post_init__(self) -> None:
        """Check the names and numbers that nothing else checks before a long run."""
        for name in self.regimes:
            if name not in REGIMES:
                allowed = ", ".join(map(repr, REGIMES))
                raise SettingError(f"Regime {name!r} is unknown; allowed: {allowed}.")
        for what in ("regimes", "seeds", "strategies"):
            values: tuple[object, ...] = getattr(self, what)
            if not values or len(set(values)) < len(values):
                raise SettingError(f"`{what}` is {values!r}; allowed: one or more, none twice.")
        for seed in self.seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
                raise SettingError(f"A seed is {seed!r}; allowed: whole numbers from 0.")

    def check(self, trace: ArrayLike | None = None) -> None:
        """Check that the traffic, or a recorded trace in its place, fits; `sweep` does, too.

        Args:
            trace: [T, L, E] hits, or None.
        Raises:
            PlanInputError: its experts do not fit into the layout, or it is no trace.
            SettingError: the traffic has no layers or experts, or ends before anything is graded.
        """
        if trace is not None:
            self.layout.check_experts(check_loads(trace, "trace", 3).shape[2])
            return
        if self.intervals <= self.schedule.first_graded:
            raise SettingError(
                f"There are {self.intervals} `intervals`, but interval "
                f"{self.schedule.first_graded} is the first graded (`first_graded`); give "
                f"{self.schedule.first_graded + 1} or more."
            )
        self.layout.check_experts(self.traffic.num_experts)

    def made(self) -> dict[str, Strategy]:
        """Return the strategies by name."""
        split = "quota" if self.dispatch == "quota" else "even"
        return {
            name: make_strategy(name, split=split, move_budget=self.move_budget, groups=self.groups)
            for name in self.strategies
        }


@dataclass(frozen=True, eq=False)
class Run:
    """One strategy on one trace.

    Attributes:
        regime: one of `REGIMES`, or `TRACE`.
        seed: of the traffic.
        strategy: its name.
        intervals: how it did, in order.
        unbeatable: of each interval, [L], see the function of this name.
    """

    regime: str
    seed: int
    strategy: str
    intervals: tuple[Interval, ...]
    unbeatable: tuple[Floats, ...]


def sweep(
    asked: Sweep,
    strategies: Mapping[str, Strategy] | None = None,
    trace: ArrayLike | None = None,
    watch: Callable[[str, int], None] = lambda regime, seed: None,
) -> tuple[Run, ...]:
    """Run a sweep: each strategy on the same traffic.

    Args:
        asked: what to simulate.
        strategies: others in place of those that `asked` names.
        trace: [T, L, E] recorded hits in place of made-up traffic.
        watch: called with regime and seed before each.
    Raises:
        PlanInputError, SettingError: see `Sweep.check` and `replay`.
    """
    asked.check(trace)
    named = asked.made() if strategies is None else strategies
    warm_up()  # or the first plan's seconds would be those of the compiler
    cases = [(TRACE, 0)] if trace is not None else _pairs(asked.regimes, asked.seeds)
    runs = []
    for regime, seed in cases:
        watch(regime, seed)
        # Pieces of the traffic are those of the schedule, whatever the settings say.
        traffic = replace(
            asked.traffic,
            steps_per_piece=asked.schedule.steps_per_piece,
            pieces_per_interval=asked.schedule.pieces_per_interval,
        )
        hits = generate(regime, asked.intervals, seed, traffic) if trace is None else trace
        bounds = unbeatable(hits, asked.layout, asked.schedule)
        for name, strategy in named.items():
            found = replay(hits, asked.layout, strategy, asked.schedule, asked.dispatch)
            runs.append(Run(regime, seed, name, found, bounds))
    return tuple(runs)


def _pairs(regimes: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    return [(regime, seed) for regime in regimes for seed in seeds]


@dataclass(frozen=True)
class Line:
    """Runs of one strategy in one regime, or in all of them, in figures.

    Attributes:
        regime: its name, or `all`: the mean over regimes.
        strategy: its name.
        planned, interval, piece, step, best_split: as those of `Interval`, mean over layers,
            intervals and seeds.
        unbeatable: the same of the bound.
        worst: `piece` of the worst layer, mean over intervals and seeds.
        moves: in one layer of one plan, mean.
        most_moves: in one layer of one plan, the most.
        plan_ms: milliseconds to plan one layer, mean.
    """

    regime: str
    strategy: str
    planned: float
    interval: float
    piece: float
    step: float | None
    best_split: float | None
    unbeatable: float
    worst: float
    moves: float
    most_moves: int
    plan_ms: float


def summarise(runs: Sequence[Run]) -> tuple[Line, ...]:
    """Return a line for each regime and strategy, and where there are several regimes their mean.

    Args:
        runs: of a sweep.
    """
    regimes, names = (
        list(dict.fromkeys(getattr(run, what) for run in runs)) for what in ("regime", "strategy")
    )
    lines = [
        _line(regime, [run for run in runs if (run.regime, run.strategy) == (regime, name)])
        for regime in regimes
        for name in names
    ]
    if len(regimes) > 1:
        # All regimes have the same number of runs, so this is the mean over regimes, too.
        lines += [_line("all", [run for run in runs if run.strategy == name]) for name in names]
    return tuple(lines)


def _line(regime: str, runs: Sequence[Run]) -> Line:
    intervals = [interval for run in runs for interval in run.intervals]
    moves = np.array([interval.moves for interval in intervals])
    pieces = np.array([interval.piece for interval in intervals])
    return Line(
        regime=regime,
        strategy=runs[0].strategy,
        planned=float(np.mean([interval.planned for interval in intervals])),
        interval=float(np.mean([interval.interval for interval in intervals])),
        piece=float(pieces.mean()),
        step=_average([interval.step for interval in intervals]),
        best_split=_average([interval.best_split for interval in intervals]),
        unbeatable=float(np.mean([run.unbeatable for run in runs])),
        worst=float(pieces.max(1).mean()),
        moves=float(moves.mean()),
        most_moves=int(moves.max()),
        plan_ms=1e3 * float(np.mean([each.seconds / len(each.piece) for each in intervals])),
    )


def _average(values: Sequence[NDArray[np.float64] | None]) -> float | None:
    """Return the mean, or None where one is unknown."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None
