"""What the step path reads of every sequence on the device: columns with one lane for each slot.

A steady decode step is decided and settled on whole columns, so that its cost hardly depends on the
number of sequences. A lane belongs to its sequence from `enter` until the slot is free again, which
is not before the last step that contains the sequence is settled.

    L = settled             positions whose content the host knows to be final
    U = settled + inflight  one past the highest position that a launched step may have written
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepinfer_core.plans import PLACEHOLDER

__all__ = ["CONSTRAINED", "MAX_STOPS", "STRICT", "Columns", "Lanes"]

MAX_STOPS = 8  # stop ids kept in a lane; a sequence with more is looked at apart
STRICT, CONSTRAINED = 1, 2  # bits of `traits`


class Columns(NamedTuple):
    """Numbers of sequences, an int64 array each; in `Lanes` over all slots.

    Args:
        uid, generation: whose lane it is.
        traits: bits, `STRICT` and `CONSTRAINED`.
        tail_start: rows below skip the late layers.
        limit: most tokens of prompt and output together.
        max_drafts: most drafts the request wants verified.
        inflight: I, tokens of unsettled steps (replayed rows not counted); see the ledger.
        unsettled: launched steps that contain it and are not settled; see the ledger.
        samples: those of them that yield tokens; see the ledger.
        last_step: number of the last launched step that contains it.
        settled: L.
        left: tokens that may still be committed: the limit less prompt and output.
        last_token: the last committed token, once a step has yielded one.
        known_drafts: how many drafts behind it are known.
        published: blocks at the front that were offered to the prefix index.
        num_records: survivals recorded of its drafts: of the last settled step, and of the one
            before.
    """

    uid: np.ndarray
    generation: np.ndarray
    traits: np.ndarray
    tail_start: np.ndarray
    limit: np.ndarray
    max_drafts: np.ndarray
    inflight: np.ndarray
    unsettled: np.ndarray
    samples: np.ndarray
    last_step: np.ndarray
    settled: np.ndarray
    left: np.ndarray
    last_token: np.ndarray
    known_drafts: np.ndarray
    published: np.ndarray
    num_records: np.ndarray


_PLACES = {name: place for place, name in enumerate(Columns._fields)}
_INFLIGHT = slice(_PLACES["inflight"], _PLACES["samples"] + 1)


class Lanes:
    """The lanes of a rank.

    Attributes:
        all: the columns over all slots, views of one matrix; `at` gathers some slots' at once.
        inflight: [3, num_slots] `inflight`, `unsettled` and `samples`: written by the ledger alone.
        drafts: [num_slots, max_drafts] int64, what was drafted behind the last token.
        survival: [2, num_slots, max_drafts] float32, chances that drafts pass together with those
            before them: as the last settled step that drafted told, and the one before it.
        stops: [num_slots, MAX_STOPS] int64, stop ids; none stands behind the first `num_stops`.
        live: [num_slots] bool, results still count (prefill, running, preempting).
        prefilling: [num_slots] bool, some of its tokens are not computed.
        running: [num_slots] bool, decodes; False as soon as it must not be scheduled any more.
        plain: [num_slots] bool, prefilling or running, and settled with all others: it has neither
            a grammar nor more stop ids than fit.
    """

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        """Make empty lanes."""
        self._table = np.zeros((len(Columns._fields), num_slots), dtype=np.int64)
        self.all = Columns(*self._table)
        self.all.uid[:] = self.all.generation[:] = PLACEHOLDER
        self.inflight = self._table[_INFLIGHT]
        self.drafts = np.full((num_slots, max_drafts), PLACEHOLDER, dtype=np.int64)
        self.survival = np.zeros((2, num_slots, max_drafts), dtype=np.float32)
        self.num_stops = 0
        self.stops = np.full((num_slots, MAX_STOPS), PLACEHOLDER, dtype=np.int64)
        self.live = np.zeros(num_slots, dtype=np.bool_)
        self.prefilling = np.zeros(num_slots, dtype=np.bool_)
        self.running = np.zeros(num_slots, dtype=np.bool_)
        self.plain = np.zeros(num_slots, dtype=np.bool_)
        self._apart = np.zeros(num_slots, dtype=np.bool_)

    def enter(
        self,
        slot: int,
        *,
        uid: int,
        generation: int,
        num_tokens: int,
        limit: int,
        max_drafts: int,
        tail_start: int,
        stop_ids: frozenset[int],
        constrained: bool,
        strict: bool,
    ) -> None:
        """Start the lane of a sequence that nothing was computed of."""
        lane = self._table[:, slot]
        assert not self.inflight[:, slot].any(), f"slot {slot} is still in a step: {lane}"
        many = len(stop_ids) > MAX_STOPS
        values = {
            "uid": uid,
            "generation": generation,
            "traits": STRICT * strict + CONSTRAINED * constrained,
            "tail_start": tail_start,
            "limit": limit,
            "max_drafts": max_drafts,
            "left": limit - num_tokens,
            "last_token": PLACEHOLDER,
        }
        lane[:] = [values.get(name, 0) for name in Columns._fields]
        self.drafts[slot] = self.stops[slot] = PLACEHOLDER
        if not many:
            self.stops[slot, : len(stop_ids)] = sorted(stop_ids)
            self.num_stops = max(self.num_stops, len(stop_ids))
        self._apart[slot] = many or constrained
        self.place(slot, live=False, prefilling=False, running=False)

    def place(self, slot: int, *, live: bool, prefilling: bool, running: bool) -> None:
        """Note the state of the sequence in a slot."""
        self.live[slot], self.prefilling[slot], self.running[slot] = live, prefilling, running
        self.plain[slot] = (prefilling or running) and not self._apart[slot]

    def record(self, slots: np.ndarray, survival: np.ndarray) -> None:
        """Note the survival [n, g] float32 of what a settled step has drafted."""
        self.survival[1, slots] = self.survival[0, slots]
        self.survival[0, slots] = survival
        self.all.num_records[slots] = np.minimum(self.all.num_records[slots] + 1, 2)

    def earlier_survival(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return survival [n, g] float32 as a step before the last one told it, and [n] if known.

        What the last launched step has drafted is about to be verified: who chooses how many of
        these to verify must not have looked at them.
        """
        age = (self.all.unsettled[slots] == 0).astype(np.int64)
        return self.survival[age, slots], self.all.num_records[slots] > age

    def at(self, slots: np.ndarray) -> Columns:
        """Return copies of the columns at some slots, [n] each."""
        return Columns(*self._table.take(slots, axis=1))

    def decodable(self, previous_step: int, max_model_len: int) -> np.ndarray:
        """Return the slots of sequences that can decode now if blocks were plenty, ascending.

        Args:
            previous_step: number of the last launched step if it is unsettled, else 0: its carry
                can supply what the host does not know yet.
            max_model_len: most tokens of prompt and output together.
        """
        lane = self.all
        can = (lane.unsettled == 0) | (lane.last_step == previous_step)
        can &= self.running
        can &= lane.left > lane.samples  # else it ends for certain when its steps are settled
        can &= lane.settled + lane.inflight < max_model_len
        slots: np.ndarray = can.nonzero()[0]
        return slots
