"""The end of a fake step: targets, accepted drafts, the next drafts, log-probabilities, the carry.

A draft is accepted iff it equals the target's token at its position; so the output does not depend
on the drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from deepinfer_core.plans import (
    PHASES,
    Admission,
    Logprobs,
    Masks,
    Phase,
    RowStatus,
    StepPlan,
    StepResult,
)
from deepinfer_core.testing.fake_trim import Confidence, best_lengths, survival_of
from deepinfer_core.testing.reference import (
    allowed_token,
    logprob_of,
    mix_rows,
    next_token_rows,
)
from deepinfer_core.types import PromptLogprob

__all__ = ["Carry", "Drafter", "FakeSampler", "Sampled"]

Drafter = Callable[[int, int], bool] | float
_VERIFY = PHASES.index(Phase.VERIFY)
_DRAFT_SALT = np.full(1, 0xD1F7, dtype=np.uint64)
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """What the rows of a step leave for the next one.

    Attributes:
        tag: [R] int64, stamp of the slot's owner; -1 where nothing was sampled.
        length: [R] int64, position of the next token.
        token_ids: [R, 1 + drafts] int64, the next token and the drafts behind it.
    """

    tag: np.ndarray
    length: np.ndarray
    token_ids: np.ndarray

    @classmethod
    def empty(cls, num_drafts: int) -> Carry:
        """Return the carry before the first step."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, np.zeros((0, 1 + num_drafts), dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What sampling needs of a forward.

    Attributes:
        start, status: [R] int64, after correction.
        token_ids: [T] int64, tokens fed.
        hashes: [T] uint64, prefix hash after each of them; 0 in rows that failed.
        tag: [R] int64, stamps for the carry.
        planned: [R] int64, drafts that the plan has of each sequence; fewer may have run.
    """

    start: np.ndarray
    status: np.ndarray
    token_ids: np.ndarray
    hashes: np.ndarray
    tag: np.ndarray
    planned: np.ndarray


class FakeSampler:
    """Sampling state of the slots."""

    def __init__(
        self,
        num_slots: int,
        num_drafts: int,
        vocab_size: int,
        accepts: Drafter,
        confidence: Confidence | None = None,
    ) -> None:
        """Make it with no sequence in any slot; arguments as of `FakeModel`."""
        self.vocab_size, self.num_drafts, self.accepts = vocab_size, num_drafts, accepts
        self._confidence = confidence
        self._survival = np.ones((num_slots, num_drafts), dtype=np.float32)  # of the next drafts
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._num_top = np.full(num_slots, -1, dtype=np.int64)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the device state."""
        return self._seed, self._num_top, self._survival

    def admit(self, slot: int, admission: Admission) -> None:
        """Take the settings of a sequence that enters a slot."""
        self._seed[slot] = admission.seed & _MASK
        asked = admission.params.logprobs
        self._num_top[slot] = -1 if asked is None else asked

    def lengths(self, plan: StepPlan) -> np.ndarray:
        """Return how many drafts of each sequence a step verifies: [R] int64."""
        rows = plan.rows
        if not plan.trims:
            return rows.num_drafts
        total = plan.output.num_rows - len(rows)
        return best_lengths(self._survival[rows.slot], rows.num_drafts, total)

    def sample(
        self, plan: StepPlan, done: Sampled, masks: Mapping[int, Masks]
    ) -> tuple[StepResult, Carry]:
        """Return the result of a step and its carry; `plan` is the step as it ran."""
        rows, status = plan.rows, done.status.copy()
        firsts = np.cumsum(rows.num_rows) - rows.num_rows
        verify = rows.phase == _VERIFY
        sampled = np.where(verify, firsts, firsts + rows.num_rows - 1)  # first sampled row
        offsets = np.minimum(np.arange(1 + self.num_drafts), rows.num_drafts[:, None])
        places = sampled[:, None] + offsets
        hashes, seeds = done.hashes[places], self._seed[rows.slot]
        targets = next_token_rows(hashes, seeds[:, None], self.vocab_size)
        for row, mask in masks.items():
            self._mask(targets[row], mask.rows, int(done.planned[row]), int(rows.num_drafts[row]))
        fed = done.token_ids[places[:, 1:]]
        right = fed == targets[:, :-1]
        right &= np.arange(self.num_drafts) < rows.num_drafts[:, None]
        accepted = np.cumprod(right, axis=1).sum(axis=1)
        at_last = np.arange(len(rows)), accepted
        status[(targets[at_last] < 0) & (status == RowStatus.OK) & rows.samples] = (
            RowStatus.NON_FINITE
        )
        failed = status != RowStatus.OK
        accepted[failed], targets[failed] = 0, 0
        length = np.where(verify, done.start + 1 + accepted, done.start + rows.num_rows)
        tokens = targets[at_last]
        drafts = self._draft(mix_rows(hashes[at_last], tokens), seeds, rows.uid, length + 1)
        certain = np.zeros(drafts.shape, dtype=np.bool_)
        for row, mask in masks.items():
            ahead = mask.forced[accepted[row] + 1 :][: self.num_drafts]
            drafts[row, : len(ahead)], certain[row, : len(ahead)] = ahead, True
        drafts[failed] = 0
        survival = self._survive(rows.slot, rows.uid, length + 1, rows.samples & ~failed, certain)
        tag = np.where(rows.samples & (status != RowStatus.BAD_SOURCE), done.tag, -1)
        carry = Carry(tag, length, np.concatenate((tokens[:, None], drafts), axis=1))
        result = StepResult(
            step_seq=plan.output.step_seq,
            token_ids=targets,
            num_tokens=np.where(rows.samples, accepted + 1, 0),
            status=status,
            start=done.start,
            num_verified=rows.num_drafts.copy(),
            drafts=drafts if self.num_drafts else None,
            survival=survival if self.num_drafts and rows.samples.any() else None,
            logprobs=self._logprobs(plan, hashes, targets),
            prompt_logprobs=self._prompt_logprobs(plan, done, firsts),
        )
        return result, carry

    def _mask(self, targets: np.ndarray, mask: np.ndarray, planned: int, num_drafts: int) -> None:
        """Replace a row's targets by allowed ones, -1 where nothing is allowed.

        Masks come for all drafts that the plan has of a sequence.
        """
        words = -(-self.vocab_size // 32)
        assert mask.shape == (1 + planned, words) and mask.dtype == np.int32, (
            f"a mask is {mask.dtype} {mask.shape}; it must be int32 {(1 + planned, words)}"
        )
        mask = mask[: 1 + num_drafts]
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=1, bitorder="little")
        for place, allowed in enumerate(bits[:, : self.vocab_size].astype(bool)):
            token_id = allowed_token(int(targets[place]), allowed)
            targets[place] = -1 if token_id is None else token_id

    def _draft(
        self, states: np.ndarray, seeds: np.ndarray, uid: np.ndarray, first: np.ndarray
    ) -> np.ndarray:
        """Return drafts [R, drafts] for positions `first + i`."""
        shape = (len(uid), self.num_drafts)
        drafts, places = np.zeros(shape, dtype=np.int64), np.arange(self.num_drafts)
        wrong = ~self._right(np.broadcast_to(uid[:, None], shape), first[:, None] + places)
        for place in range(self.num_drafts):
            token_ids = next_token_rows(states, seeds, self.vocab_size)
            token_ids = (token_ids + wrong[:, place]) % self.vocab_size
            drafts[:, place] = token_ids
            states = mix_rows(states, token_ids)
        return drafts

    def _survive(
        self,
        slot: np.ndarray,
        uid: np.ndarray,
        first: np.ndarray,
        drafted: np.ndarray,
        certain: np.ndarray,
    ) -> np.ndarray | None:
        """Keep what is thought of drafts for positions `first + i`, and return it: [R, drafts].

        Args:
            slot, uid, first: [R] int64. drafted: [R] bool, others keep what they had.
            certain: [R, drafts] bool, those that a grammar forces.
        """
        if self._confidence is None:
            return None
        positions = first[:, None] + np.arange(self.num_drafts)
        survival = survival_of(self._confidence(uid[:, None], positions))
        survival[certain] = 1.0
        self._survival[slot[drafted]] = survival[drafted]
        return survival

    def _right(self, uid: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return whether each draft is right, [R, drafts] bool."""
        if callable(self.accepts):
            pairs = zip(uid.ravel().tolist(), position.ravel().tolist(), strict=True)
            found = np.array([self.accepts(u, p) for u, p in pairs], dtype=bool)
            return found.reshape(position.shape)
        drawn = mix_rows(mix_rows(_DRAFT_SALT, uid), position)
        share: np.ndarray = (drawn >> np.uint64(11)) * 2.0**-53 < self.accepts
        return share

    def _logprobs(self, plan: StepPlan, hashes: np.ndarray, targets: np.ndarray) -> Logprobs | None:
        num_top = self._num_top[plan.rows.slot]
        asked = np.flatnonzero(plan.rows.samples & (num_top >= 0))
        if not len(asked):
            return None
        most, width = int(num_top[asked].max()), 1 + self.num_drafts
        chosen = np.zeros((len(asked), width), dtype=np.float32)
        best_ids = np.zeros((len(asked), width, most), dtype=np.int64)
        best = np.zeros((len(asked), width, most), dtype=np.float32)
        for item, row in enumerate(asked.tolist()):
            for place in range(width):
                state, token_id = int(hashes[row, place]), int(targets[row, place])
                value = logprob_of(state, token_id, most, self.vocab_size)
                chosen[item, place] = value.logprob
                for rank, (other, logprob) in enumerate(value.top):
                    best_ids[item, place, rank], best[item, place, rank] = other, logprob
        return Logprobs(asked, num_top[asked], chosen, best_ids, best)

    def _prompt_logprobs(
        self, plan: StepPlan, done: Sampled, firsts: np.ndarray
    ) -> dict[int, tuple[PromptLogprob, ...]]:
        found = {}
        for row, extras in plan.extras.items():
            if extras.prompt_logprobs is None or done.status[row] != RowStatus.OK:
                continue
            first, start = int(firsts[row]), int(done.start[row])
            found[row] = tuple(
                PromptLogprob(
                    start + place + 1,
                    logprob_of(
                        int(done.hashes[first + place]),
                        target,
                        extras.prompt_logprobs,
                        self.vocab_size,
                    ),
                )
                for place, target in enumerate(extras.prompt_targets)
            )
        return found
