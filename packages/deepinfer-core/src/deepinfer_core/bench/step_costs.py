"""What decode steps take, by their rows: measured in an engine whose planner asks for set sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from torch import Tensor

from deepinfer_core.bench.speculation_run import DecodeMeter, Traffic, opened
from deepinfer_core.config import EngineConfig
from deepinfer_core.interfaces import VerifyPlanner
from deepinfer_core.types import SamplingParams

__all__ = ["StepCosts", "measure_costs", "sizes_of"]

REPEATS = 20  # timed steps of each size, at least
_WARM_UP = 3  # steps of each size before these
_MOST_SIZES = 13  # of a load


@dataclass(frozen=True)
class StepCosts:
    """Measured steps.

    Attributes:
        seconds: load -> rows of a step -> seconds of each timed one.
        fingerprint: of the engine that ran them.
    """

    seconds: Mapping[int, Mapping[int, Sequence[float]]]
    fingerprint: Mapping[str, str | int]


def sizes_of(load: int, num_drafts: int) -> tuple[int, ...]:
    """Return the numbers of drafts to measure steps of `load` sequences with: 0 .. all of them."""
    most = load * num_drafts
    count = min(most + 1, _MOST_SIZES)
    return tuple(sorted({round(most * place / (count - 1)) for place in range(count)}))


def measure_costs(
    config: EngineConfig,
    verifier_class: type[Any],
    loads: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
) -> StepCosts:
    """Time decode steps of every size at every load.

    Sizes take turns, so that what slows the machine for a while slows a few steps of each.

    Args:
        config: of the engine; its policy may be any but `off`.
        verifier_class: what the engine speculates with.
        loads: sequences of a step.
        prompts: what to decode behind, again and again.
        params: of all requests.
    """
    sweep = _Sweep()
    seconds = {}
    with opened(config, sweep.around(verifier_class)) as traffic:
        for load in loads:
            sizes = sizes_of(load, traffic.engine.limits.max_drafts)
            sweep.turn(sizes)
            seconds[load] = _measure(traffic, load, sizes, prompts, params)
    return StepCosts(seconds, sweep.fingerprint)


def _measure(
    traffic: Traffic,
    load: int,
    sizes: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
) -> dict[int, list[float]]:
    meter = DecodeMeter(load)
    times, wanted = meter.step_seconds, _WARM_UP + REPEATS

    def enough() -> bool:
        return all(len(times.get(load + size, ())) >= wanted for size in sizes)

    traffic.run(((prompt, params) for prompt in cycle(prompts)), load, watcher=meter, enough=enough)
    return {load + size: times[load + size][_WARM_UP:] for size in sizes}


@dataclass(frozen=True)
class _Budget:
    total: int
    rows: int


class _Sweep:
    """A planner that asks for set numbers of drafts in turn, in the place of another one."""

    def __init__(self) -> None:
        self.fingerprint: Mapping[str, str | int] = {}
        self._replaced: VerifyPlanner | None = None
        self.turn((0,))

    def turn(self, sizes: Sequence[int]) -> None:
        """Ask for these numbers of drafts from now on."""
        self._sizes = cycle(sizes)

    def around(self, verifier_class: type[Any]) -> type[Any]:
        """Return the class of verifiers that plan by this sweep."""
        sweep = self

        class Swept(verifier_class):  # type: ignore[misc]  # known at run time alone
            def __init__(self, *, fingerprint: Mapping[str, str | int], **keywords: object):
                super().__init__(fingerprint=fingerprint, **keywords)
                sweep.fingerprint, sweep._replaced = fingerprint, super().planner

            @property
            def planner(self) -> _Sweep:
                return sweep

        return Swept

    def budget(self, survival: np.ndarray, known: np.ndarray, available: np.ndarray) -> _Budget:
        """Return the next number of drafts, as far as there are so many."""
        total = min(next(self._sizes), int(available.sum()))
        return _Budget(total, len(available) + total)

    def lengths(self, survival: Tensor, available: Tensor, total: int) -> Tensor:
        """Return what the replaced planner chooses."""
        assert self._replaced is not None, "the engine has made its verifier"
        return self._replaced.lengths(survival, available, total)

    def observe(self, rows: int, seconds: float) -> None:
        """Do nothing: sizes are set."""
