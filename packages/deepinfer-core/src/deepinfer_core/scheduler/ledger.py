"""What is in flight: launched steps whose results the host has not settled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["InflightLedger"]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """What one step reserved: [3, num_slots], as the ledger's columns."""

    reserved: np.ndarray
    total: int


class InflightLedger:
    """Reservations by step and slot; the only writer of the columns of what is in flight.

    A slot belongs to one life of a sequence while any step that contains it is unsettled.
    """

    def __init__(self, inflight: np.ndarray) -> None:
        """Start with nothing in flight.

        Args:
            inflight: [3, num_slots] int64: tokens in flight, unsettled steps, and those of them
                that yield tokens, by slot. Kept up to date here.
        """
        self.total_inflight_tokens = 0
        self._inflight = inflight
        self._steps: dict[int, _Entry] = {}

    def reserve(
        self, step_seq: int, slots: np.ndarray, tokens: np.ndarray, samples: np.ndarray
    ) -> None:
        """Book a step: the tokens it computes and whether it samples, for each slot, [R]."""
        assert step_seq not in self._steps, f"step {step_seq} is booked twice"
        # Over all slots: adding whole columns is cheaper than adding at places, twice a step.
        reserved = np.zeros_like(self._inflight)
        reserved[0, slots], reserved[1, slots], reserved[2, slots] = tokens, 1, samples
        entry = _Entry(reserved, int(tokens.sum()))
        self._steps[step_seq] = entry
        self._inflight += reserved
        self.total_inflight_tokens += entry.total

    def settle(self, step_seq: int) -> None:
        """Remove a step's reservations."""
        entry = self._steps.pop(step_seq)
        self._inflight -= entry.reserved
        self.total_inflight_tokens -= entry.total

    def audit(self) -> None:
        """Check the sums by slot and the total against the entries.

        Raises:
            AssertionError: they differ.
        """
        found = np.zeros_like(self._inflight)
        for entry in self._steps.values():
            found += entry.reserved
        if not np.array_equal(found, self._inflight):
            raise AssertionError(f"in flight by slot: {self._inflight}, entries: {found}")
        if int(found[0].sum()) != self.total_inflight_tokens:
            raise AssertionError(
                f"{self.total_inflight_tokens} tokens in flight, entries: {found[0].sum()}"
            )
