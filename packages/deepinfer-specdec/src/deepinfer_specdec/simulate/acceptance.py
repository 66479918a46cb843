"""Synthetic traffic: how many drafts of each block the target would accept, and what the head says.

A draft is accepted, given that all before it were, when `level + w + v + h + e > 0`, all normal:

    w   seen by the confidence head and shared by the drafts of a block: a part of the request,
        a part that drifts from step to step, a part of the block, a part of the rank's traffic
    v   seen by the head, of one draft
    h   `noise`: of one draft and hidden from the head
    e   variance 1: the luck of one token

    confidence = P(accepted | w, v) = Phi((level + w + v) / sqrt(1 + noise ** 2))

What the head does not see is independent from draft to draft, so this is the exact conditional
chance: confidences are calibrated by construction. What noise costs is that they say less. `level`
is solved so that the mean accepted length, with the token after the drafts, is `accepted_len`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch

from deepinfer_specdec.errors import SettingError
from deepinfer_specdec.survival import survival

__all__ = ["RECORD_AGE", "Trace", "Traffic", "draw"]

# Records that a budget may use are this many steps old.
RECORD_AGE = 2
_SPREADS = ("rank_spread", "request_spread", "drift_spread", "block_spread", "draft_spread")


@dataclass(frozen=True)
class Traffic:
    """What the requests of a simulation are like.

    Attributes:
        num_drafts: of a block, g.
        accepted_len: mean accepted drafts and the token after them, when all g are verified.
        request_spread: standard deviation of what a request keeps for life; like the other
            spreads in units of the luck of one token.
        drift_spread: of what drifts within a request, correlated by `drift_correlation` from one
            step to the next.
        block_spread: of what the drafts of one block share and the next block forgets.
        draft_spread: of what one draft has for itself.
        rank_spread: of what the requests of one rank share, correlated by `rank_correlation` from
            one step to the next; ranks are independent.
        noise: of what one draft has and the head does not see.
        request_steps: mean steps of a request; a new one takes its row at once and has no record.
    """

    num_drafts: int = 5
    accepted_len: float = 3.29
    request_spread: float = 0.6
    drift_spread: float = 0.6
    block_spread: float = 0.6
    draft_spread: float = 0.6
    rank_spread: float = 0.2
    noise: float = 0.7
    drift_correlation: float = 0.95
    rank_correlation: float = 0.98
    request_steps: float = 100.0

    def __post_init__(self) -> None:
        """Refuse values that describe no traffic.

        Raises:
            SettingError: a value is outside its range.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if not math.isfinite(value):
                raise _refused(each.name, value, "a finite number")
        if self.num_drafts < 1:
            raise _refused("num_drafts", self.num_drafts, "at least 1")
        if not 1 < self.accepted_len < self.num_drafts + 1:
            allowed = f"between 1 and {self.num_drafts + 1}, both excluded"
            raise _refused("accepted_len", self.accepted_len, allowed)
        for name in (*_SPREADS, "noise"):
            if not 0 <= getattr(self, name) <= 10:
                raise _refused(name, getattr(self, name), "0 .. 10")
        for name in ("drift_correlation", "rank_correlation"):
            if not 0 <= getattr(self, name) <= 1:
                raise _refused(name, getattr(self, name), "0 .. 1")
        if self.request_steps < 1:
            raise _refused("request_steps", self.request_steps, "at least 1 step")

    @cached_property
    def level(self) -> float:
        """The mean of what decides, so that the mean accepted length is `accepted_len`."""
        low, high = -60.0, 60.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self._length(middle) < self.accepted_len else (low, middle)
            )
        return (low + high) / 2

    def _length(self, level: float) -> float:
        """Mean accepted length at full length: an integral over what a block shares."""
        shared = math.sqrt(
            sum(getattr(self, name) ** 2 for name in _SPREADS if name != "draft_spread")
        )
        nodes, weights = np.polynomial.hermite_e.hermegauss(80)
        scale = math.sqrt(1 + self.noise**2 + self.draft_spread**2)
        chance = _phi((level + shared * nodes) / scale)
        lengths = sum(chance**k for k in range(self.num_drafts + 1))
        return float(weights @ lengths / weights.sum())


@dataclass(frozen=True)
class Trace:
    """Drawn traffic: N rows on all ranks, T steps, g drafts.

    A trace does not depend on what is verified, so that all policies see the same one.

    Attributes:
        survival: [T, N, g] float32, products of the confidences, multiplied left to right.
        passed: [T, N] int64, drafts that the target accepts when all g are verified, 0..g.
        age: [T, N] int64, steps that the request of the row has run before this one.
        first_row: [ranks + 1] int64, where each rank's rows begin.
    """

    survival: np.ndarray
    passed: np.ndarray
    age: np.ndarray
    first_row: np.ndarray

    @property
    def num_ranks(self) -> int:
        """How many ranks the rows belong to."""
        return len(self.first_row) - 1

    def rank(self, index: int) -> Trace:
        """Return the rows of one rank as a trace of one rank; its arrays are views."""
        rows = slice(int(self.first_row[index]), int(self.first_row[index + 1]))
        first = np.array([0, rows.stop - rows.start])
        return Trace(self.survival[:, rows], self.passed[:, rows], self.age[:, rows], first)

    def records(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what a budget of this step may know.

        Returns:
            survival [N, g] float32 of two steps before, and [N] bool: whether it is of the same
            request. Where it is not, the survival is NaN, which no policy may let through.
        """
        known = self.age[step] >= RECORD_AGE
        if step < RECORD_AGE:
            return np.full_like(self.survival[step], np.nan), np.zeros_like(known)
        old = self.survival[step - RECORD_AGE]
        return np.where(known[:, None], old, np.float32(np.nan)), known

    def autocorrelation(self, lag: int) -> float:
        """Return how a request's sum of survivals correlates with that of `lag` steps before."""
        sums = self.survival.sum(2, dtype=np.float64)
        same = self.age[lag:] >= lag
        return float(np.corrcoef(sums[lag:][same], sums[: len(sums) - lag][same])[0, 1])


def draw(traffic: Traffic, rows: Sequence[int], steps: int, seed: int) -> Trace:
    """Draw a trace.

    Args:
        traffic: what the requests are like.
        rows: requests of each rank, each at least 0.
        steps: T, at least 1.
        seed: of numpy's generator PCG64; the same arguments give the same trace.

    Raises:
        SettingError: there is no step or no row.
    """
    if steps < 1:
        raise _refused("steps", steps, "at least 1")
    if not len(rows) or min(rows) < 0 or not sum(rows):
        raise _refused("rows", list(rows), "counts of requests, one a rank, not all 0")
    random = np.random.default_rng(seed)
    first_row = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    count, drafts = int(first_row[-1]), traffic.num_drafts
    rank_of = np.repeat(np.arange(len(rows)), rows)
    request, drift, rank = (random.normal(size=size) for size in (count, count, len(rows)))
    age = random.geometric(1 / traffic.request_steps, count) - 1
    confidence = np.empty((steps, count, drafts), np.float32)
    ages = np.empty((steps, count), np.int64)
    for step in range(steps):
        new = random.random(count) < 1 / traffic.request_steps
        age = np.where(new, 0, age + 1)
        request = np.where(new, random.normal(size=count), request)
        # A new request starts its drift afresh.
        drift = _walk(random, drift, np.where(new, 0.0, traffic.drift_correlation))
        rank = _walk(random, rank, np.array(traffic.rank_correlation))
        shared = (
            traffic.request_spread * request
            + traffic.drift_spread * drift
            + traffic.block_spread * random.normal(size=count)
            + traffic.rank_spread * rank[rank_of]
        )
        own = traffic.draft_spread * random.normal(size=(count, drafts))
        seen = traffic.level + shared[:, None] + own
        confidence[step] = _phi(seen / math.sqrt(1 + traffic.noise**2))
        ages[step] = age
    passes = random.random(confidence.shape, dtype=np.float32) < confidence
    passed = np.logical_and.accumulate(passes, axis=2).sum(2)
    products = survival(confidence.reshape(-1, drafts)).reshape(confidence.shape)
    return Trace(products, passed, ages, first_row)


def _walk(random: np.random.Generator, state: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    """One step of a stationary normal process of variance 1."""
    fresh = random.normal(size=state.shape)
    result: np.ndarray = correlation * state + np.sqrt(1 - correlation**2) * fresh
    return result


def _phi(x: np.ndarray) -> np.ndarray:
    """The normal distribution function; numpy has none."""
    result: np.ndarray = torch.special.ndtr(torch.from_numpy(x)).numpy()
    return result


def _refused(name: str, value: object, allowed: str) -> SettingError:
    return SettingError(f"`{name}` is {value!r}; allowed: {allowed}. Choose another value.")
