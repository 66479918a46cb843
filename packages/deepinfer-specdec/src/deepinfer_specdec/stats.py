"""What to log of an engine that verifies drafts: per step taken in, per interval reported.

A request that ends inside its accepted run (a stop, a cap) says nothing about the drafts behind its
end. Those count nowhere, and the request is left out of what compares predictions with outcomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_specdec.calibrate import NUM_BINS
from deepinfer_specdec.errors import VerifyInputError

__all__ = ["TIMES", "VerifyReport", "VerifyStats"]

# Parts of a cycle whose time can be told.
TIMES = ("draft", "verify", "sample", "plan")


@dataclass(frozen=True)
class VerifyReport:
    """An interval. Means are over steps or requests of steps; NaN where nothing was counted.

    Attributes:
        num_steps: steps with at least one request.
        requests, rows, padding_rows: means of a step: requests, rows computed, rows of no request.
        asked, used: means of a step: drafts asked for before rounding and clipping, and verified.
        own: mean of the drafts that this rank alone would have asked for, over steps where that was
            told; compare with `own_used`, the mean verified in the same steps.
        own_used: see `own`.
        full_share: share of steps at which every available draft was verified.
        available: drafts available of a request, mean.
        verified, verified_histogram: drafts verified of a request, mean; requests with 0 .. g.
        accepted, accepted_histogram: drafts accepted of a request, mean; requests with 0 .. g.
        committed: tokens made of a request in a step, mean, the token after the drafts included.
        acceptance: [g], share of verified drafts that were accepted, by position.
        predicted_committed, measured_committed: means of a request, by survivals and in truth, over
            the same requests; where they part, confidences are no longer calibrated.
        ece: [g], expected calibration error of "the first k pass", from steps at full length alone,
            where no record is censored.
        num_full_records: [g], records behind `ece`.
        predicted_seconds, measured_seconds: means of the steps where both are known.
        seconds_error: mean of |measured - predicted| / predicted over them.
        part_seconds: mean of each part of a cycle whose time was told.
        record_age: mean age, in steps, of the records that budgets were made of.
        without_record: requests of steps that had no record.
    """

    num_steps: int
    requests: float
    rows: float
    padding_rows: float
    asked: float
    used: float
    own: float
    own_used: float
    full_share: float
    available: float
    verified: float
    verified_histogram: tuple[int, ...]
    accepted: float
    accepted_histogram: tuple[int, ...]
    committed: float
    acceptance: tuple[float, ...]
    predicted_committed: float
    measured_committed: float
    ece: tuple[float, ...]
    num_full_records: tuple[int, ...]
    predicted_seconds: float
    measured_seconds: float
    seconds_error: float
    part_seconds: Mapping[str, float]
    record_age: float
    without_record: int


class VerifyStats:
    """Sums over the steps of an interval."""

    def __init__(self, num_drafts: int) -> None:
        """Start an interval; `num_drafts` is g."""
        self._num_drafts = num_drafts
        self.clear()

    def clear(self) -> None:
        """Start a new interval."""
        size = self._num_drafts
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._verified = np.zeros(size + 1, dtype=np.int64)
        self._accepted = np.zeros(size + 1, dtype=np.int64)
        self._verified_at = np.zeros(size, dtype=np.int64)
        self._accepted_at = np.zeros(size, dtype=np.int64)
        self._bin_gaps = np.zeros((size, NUM_BINS))
        self._num_records = np.zeros(size, dtype=np.int64)

    def observe_step(
        self,
        *,
        available: NDArray[np.integer],
        lengths: NDArray[np.integer],
        accepted: NDArray[np.integer],
        survival: NDArray[np.float32],
        rows: int,
        asked: int,
        committed: NDArray[np.integer] | None = None,
        known: NDArray[np.bool_] | None = None,
        record_age: NDArray[np.integer] | None = None,
        own: int | None = None,
        predicted_seconds: float | None = None,
        measured_seconds: float | None = None,
        part_seconds: Mapping[str, float] | None = None,
    ) -> None:
        """Take in a settled step. A step without requests counts nowhere.

        Args:
            available: [R], drafts that might have been verified.
            lengths: [R], drafts that were.
            accepted: [R], drafts that stood.
            survival: [R, g] float32 of the drafts of this very step.
            rows: of the step, padding included.
            asked: drafts that the policy asked for, before rounding and clipping.
            committed: [R], tokens kept after stops and caps; `accepted + 1` if None.
            known: [R] bool, whether the budget had a record of the request; all of them if None.
            record_age: [R], steps between a record and its use; told of known ones alone.
            own: drafts that this rank would have asked for without its group.
            predicted_seconds, measured_seconds: of the cycle.
            part_seconds: of parts of it, under names of `TIMES`.
        Raises:
            VerifyInputError: shapes do not fit, or a part has another name.
        """
        columns: dict[str, NDArray[Any]] = {
            "lengths": lengths,
            "accepted": accepted,
            "survival": survival[:, 0],
        }
        columns |= {
            name: each
            for name, each in (
                ("committed", committed),
                ("known", known),
                ("record_age", record_age),
            )
            if each is not None
        }
        self._check(available, columns, survival, part_seconds or {})
        count = len(available)
        if not count:
            return
        made = accepted + 1 if committed is None else committed
        whole = made == accepted + 1
        kept = np.where(whole, lengths, np.minimum(lengths, made))
        stood = np.minimum(accepted, made)

        used = int(lengths.sum())
        is_full = bool((lengths == available).all())
        self._add("requests", count)
        self._add("rows", rows)
        self._add("padding_rows", rows - count - used)
        self._add("asked", asked)
        self._add("used", used)
        self._add("full", is_full)
        if own is not None:
            self._add("own", own)
            self._add("own_used", used)
        if predicted_seconds is not None and measured_seconds is not None:
            self._add("predicted_seconds", predicted_seconds)
            self._add("measured_seconds", measured_seconds)
            error = abs(measured_seconds - predicted_seconds) / predicted_seconds
            self._add("seconds_error", error)
        for name, seconds in (part_seconds or {}).items():
            self._add(name, seconds)
        for name, column in (("available", available), ("verified", kept), ("accepted", stood)):
            self._add(name, int(column.sum()), count)
        self._add("committed", int(made.sum()), count)
        is_known = np.ones(count, dtype=np.bool_) if known is None else known
        self._add("without_record", count - int(is_known.sum()))
        if record_age is not None:
            self._add("record_age", int(record_age[is_known].sum()), int(is_known.sum()))

        size = self._num_drafts
        self._verified += np.bincount(kept, minlength=size + 1)
        self._accepted += np.bincount(stood, minlength=size + 1)
        places = np.arange(size)
        verified = places < kept[:, None]
        passed = places < stood[:, None]
        self._verified_at += verified.sum(axis=0)
        self._accepted_at += passed.sum(axis=0)
        comparable = verified & whole[:, None]
        num_whole = int(whole.sum())
        predicted = num_whole + float(survival[comparable].sum(dtype=np.float64))
        self._add("predicted_committed", predicted, num_whole)
        self._add("measured_committed", int(made[whole].sum()), num_whole)
        if is_full:
            self._add_records(survival, passed, comparable)

    def snapshot(self) -> VerifyReport:
        """Return the interval so far."""
        return VerifyReport(
            num_steps=self._counts.get("rows", 0),
            requests=self._mean("requests"),
            rows=self._mean("rows"),
            padding_rows=self._mean("padding_rows"),
            asked=self._mean("asked"),
            used=self._mean("used"),
            own=self._mean("own"),
            own_used=self._mean("own_used"),
            full_share=self._mean("full"),
            available=self._mean("available"),
            verified=self._mean("verified"),
            verified_histogram=tuple(self._verified.tolist()),
            accepted=self._mean("accepted"),
            accepted_histogram=tuple(self._accepted.tolist()),
            committed=self._mean("committed"),
            acceptance=_shares(self._accepted_at, self._verified_at),
            predicted_committed=self._mean("predicted_committed"),
            measured_committed=self._mean("measured_committed"),
            ece=_shares(np.abs(self._bin_gaps).sum(axis=1), self._num_records),
            num_full_records=tuple(self._num_records.tolist()),
            predicted_seconds=self._mean("predicted_seconds"),
            measured_seconds=self._mean("measured_seconds"),
            seconds_error=self._mean("seconds_error"),
            part_seconds={name: self._mean(name) for name in TIMES if name in self._sums},
            record_age=self._mean("record_age"),
            without_record=int(self._sums.get("without_record", 0)),
        )

    def _add(self, name: str, value: float, count: int = 1) -> None:
        self._sums[name] = self._sums.get(name, 0) + value
        self._counts[name] = self._counts.get(name, 0) + count

    def _mean(self, name: str) -> float:
        count = self._counts.get(name, 0)
        return self._sums[name] / count if count else float("nan")

    def _add_records(
        self,
        survival: NDArray[np.float32],
        passed: NDArray[np.bool_],
        verified: NDArray[np.bool_],
    ) -> None:
        """Add the differences of predicted and happened to the bins of each position."""
        size = self._num_drafts
        bins = np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        flat = (bins + NUM_BINS * np.arange(size))[verified]
        gaps = survival.astype(np.float64) - passed
        added = np.bincount(flat, weights=gaps[verified], minlength=size * NUM_BINS)
        self._bin_gaps += added.reshape(size, NUM_BINS)
        self._num_records += verified.sum(axis=0)

    def _check(
        self,
        available: NDArray[np.integer],
        columns: Mapping[str, NDArray[Any]],
        survival: NDArray[np.float32],
        part_seconds: Mapping[str, float],
    ) -> None:
        for name, column in columns.items():
            if column.shape != available.shape or available.ndim != 1:
                raise VerifyInputError(
                    f"`{name}` is of {column.shape!r} requests and `available` of "
                    f"{available.shape!r}; all columns must be [requests]."
                )
        if survival.shape[1] != self._num_drafts:
            raise VerifyInputError(
                f"`survival` is of {survival.shape[1]} drafts; it must be of {self._num_drafts}, "
                f"what the statistics were made for."
            )
        unknown = sorted(set(part_seconds) - set(TIMES))
        if unknown:
            raise VerifyInputError(
                f"`part_seconds` has {unknown!r}; allowed: {', '.join(map(repr, TIMES))}."
            )


def _shares(part: NDArray[np.generic], whole: NDArray[np.integer]) -> tuple[float, ...]:
    with np.errstate(invalid="ignore"):
        share = np.asarray(part, dtype=np.float64) / whole
    return tuple(share.tolist())
