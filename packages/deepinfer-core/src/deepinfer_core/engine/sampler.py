"""Sampling of a step: settings by slot, occurrence counts, acceptance of drafts.

Settings and counts live on the device, keyed by slot, and are written on the forward queue alone;
the host keeps in mind which filters a slot uses, so that a step asks for no more than it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.engine.mirror import Parts
from deepinfer_core.plans import Admission
from deepinfer_core.types import SamplingParams

__all__ = [
    "Admitted",
    "RowSettings",
    "SampledRows",
    "Sampler",
    "SamplingNeeds",
    "num_accepted",
]

_NUM_INTEGERS = 3  # of a slot's settings: seed low, seed high, top_k; then come real numbers
_NUM_SETTINGS = _NUM_INTEGERS + 6  # temperature, top_p, min_p, penalties


@dataclass(frozen=True)
class RowSettings:
    """Settings of sampled rows; satisfies `interfaces.SampleInputs`, which tells the fields."""

    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalties: Tensor | None = None
    prompt_seen: Tensor | None = None
    output_counts: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    stream: int = 0
    cycle: Tensor | None = None

    def of_stream(self, stream: int, cycle: Tensor) -> RowSettings:
        """Return the same with noise of another stream."""
        return replace(self, stream=stream, cycle=cycle)


class SamplingNeeds(IntFlag):
    """Which filters some row of a step uses."""

    TOP_K = 1
    TOP_P = 2
    MIN_P = 4
    PENALTIES = 8
    BIAS = 16

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingNeeds:
        """Return what one request uses."""
        used = cls(0)
        for flag, wanted in (
            (cls.TOP_K, params.top_k != 0),
            (cls.TOP_P, params.top_p != 1.0),
            (cls.MIN_P, params.min_p != 0.0),
            (cls.PENALTIES, params.uses_penalties),
            (cls.BIAS, bool(params.logit_bias)),
        ):
            used |= flag if wanted else 0
        return used


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that enters a slot with this step."""

    slot: int
    admission: Admission


@dataclass(frozen=True)
class SampledRows:
    """Rows to sample, end to end: of a sequence that decodes all of them, of a prompt its last one.

    Attributes:
        owner: [N] int64, the sequence. offset: [N] int64, the row's number among its sampled ones.
        positions: [N] int64, index in its sequence of the token being produced.
        slots: [R] int64. fed: [R, 1 + drafts] int64: first token of each sequence, and its drafts.
    """

    owner: Tensor
    offset: Tensor
    positions: Tensor
    slots: Tensor
    fed: Tensor


class Sampler:
    """Chooses tokens for the sequences of a step."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        """Know no sequence yet.

        Args:
            num_slots: slots that a sequence can have.
            vocab_size: V.
            device: where settings and counts live.
        """
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._used = np.zeros(num_slots, dtype=np.int64)
        self._num_top = np.full(num_slots, -1, dtype=np.int64)
        self._integers = torch.zeros(num_slots, _NUM_INTEGERS, dtype=torch.int64, device=device)
        self._reals = torch.zeros(num_slots, _NUM_SETTINGS - _NUM_INTEGERS, device=device)
        # [slots, V] each, allocated when the first request needs them
        self._prompt_seen: Tensor | None = None
        self._output_counts: Tensor | None = None
        self._bias: Tensor | None = None

    # Host side

    def needs(self, slots: np.ndarray) -> SamplingNeeds:
        """Return which filters some of these slots use."""
        return SamplingNeeds(int(np.bitwise_or.reduce(self._used[slots], initial=0)))

    def num_top(self, slots: np.ndarray) -> np.ndarray:
        """Return how many alternatives slots want with log-probabilities, -1 for none at all."""
        wanted: np.ndarray = self._num_top[slots]
        return wanted

    def admit_on_host(self, admitted: Sequence[Admitted], extra: Parts) -> None:
        """Take note of sequences that enter, and add what the device must know of them.

        Args:
            admitted: the sequences.
            extra: gets `settings` [m, 1 + settings], the slot first, real numbers as the bits of a
                float64; `prompts` and `outputs` [2, n], slot and token id, and `penalised` [n]
                slots; `bias` [3, n], slot, token id and bits of the value.
        """
        settings = np.empty((len(admitted), 1 + _NUM_SETTINGS), dtype=np.int64)
        prompts: list[np.ndarray] = []
        outputs: list[np.ndarray] = []
        penalised, bias = [], []
        for row, each in zip(settings, admitted, strict=True):
            slot, params, seed = each.slot, each.admission.params, each.admission.seed
            self._used[slot] = SamplingNeeds.of(params)
            self._num_top[slot] = -1 if params.logprobs is None else params.logprobs
            row[: 1 + _NUM_INTEGERS] = slot, seed & 0xFFFFFFFF, seed >> 32, params.top_k
            row[1 + _NUM_INTEGERS :] = _bits(
                params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            if params.uses_penalties:
                penalised.append(slot)
                ids = np.array(each.admission.token_ids, dtype=np.int64)
                pairs = np.stack((np.full_like(ids, slot), ids))
                prompts.append(pairs[:, : each.admission.prompt_len])
                outputs.append(pairs[:, each.admission.prompt_len :])
            bias += [(slot, token, _bits(value)[0]) for token, value in params.logit_bias.items()]
        extra["settings"] = settings
        if penalised:
            extra["penalised"] = np.array(penalised, dtype=np.int64)
            extra["prompts"] = np.concatenate(prompts, axis=1)
            extra["outputs"] = np.concatenate(outputs, axis=1)
        if bias:
            extra["bias"] = np.array(bias, dtype=np.int64).T

    # Forward queue

    def admit(
        self,
        settings: Tensor,
        *,
        penalised: Tensor | None,
        prompts: Tensor | None,
        outputs: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        """Take over the settings of sequences that enter, as `admit_on_host` has written them."""
        slots = settings[:, 0]
        self._integers[slots] = settings[:, 1 : 1 + _NUM_INTEGERS]
        self._reals[slots] = _numbers(settings[:, 1 + _NUM_INTEGERS :])
        if penalised is not None and prompts is not None and outputs is not None:
            seen, counts = self._counts()
            # a number assigned through an index would be copied to the device, and waited for
            seen.index_fill_(0, penalised, False)
            seen.index_put_((prompts[0], prompts[1]), torch.ones_like(prompts[0], dtype=torch.bool))
            counts.index_fill_(0, penalised, 0)
            ones = torch.ones_like(outputs[0], dtype=counts.dtype)
            counts.index_put_((outputs[0], outputs[1]), ones, accumulate=True)
        if self._bias is not None:
            self._bias.index_fill_(0, slots, 0.0)
        if bias is not None:
            if self._bias is None:
                self._bias = torch.zeros(self._num_slots, self._vocab_size, device=self._device)
            self._bias[bias[0], bias[1]] = _numbers(bias[2])

    def settings(
        self, rows: SampledRows, needs: SamplingNeeds, mask: Tensor | None = None
    ) -> RowSettings:
        """Return how rows are sampled: by their requests, and by the tokens before them.

        Args:
            rows: N rows and whose they are.
            needs: filters that some row uses.
            mask: [N, ceil(V / 32)] int32 allowed tokens, or None.
        """
        slots = rows.slots[rows.owner]
        integers, reals = self._integers[slots], self._reals[slots]
        penalties = seen = counts = bias = None
        if SamplingNeeds.PENALTIES in needs:
            all_seen, all_counts = self._counts()
            penalties, seen = reals[:, 3:].contiguous(), all_seen[slots]
            counts = _with_drafts(all_counts[slots], rows)
        if SamplingNeeds.BIAS in needs and self._bias is not None:
            bias = self._bias[slots]
        return RowSettings(
            seeds=integers[:, :2],
            positions=rows.positions,
            temperature=reals[:, 0],
            top_k=integers[:, 2] if SamplingNeeds.TOP_K in needs else None,
            top_p=reals[:, 1] if SamplingNeeds.TOP_P in needs else None,
            min_p=reals[:, 2] if SamplingNeeds.MIN_P in needs else None,
            penalties=penalties,
            prompt_seen=seen,
            output_counts=counts,
            bias=bias,
            mask=mask,
        )

    def is_sampled(self, slots: Tensor) -> Tensor:
        """Return [n] bool: whether the request in a slot has a temperature above 0."""
        return self._reals[slots, 0] > 0

    def seeds(self, slots: Tensor) -> Tensor:
        """Return [n, 2] int64: low and high word of the requests' seeds."""
        return self._integers[slots, :2]

    def count(self, slots: Tensor, token_ids: Tensor, num_tokens: Tensor) -> None:
        """Add tokens that were yielded to the counts.

        Args:
            slots: [R] int64.
            token_ids: [R, 1 + drafts] int64, legal ids.
            num_tokens: [R] int64, how many of them count.
        """
        counts = self._counts()[1]
        number = torch.arange(token_ids.shape[1], device=token_ids.device)
        valid = (number < num_tokens.unsqueeze(-1)).to(counts.dtype)
        counts.index_put_((slots.unsqueeze(-1), token_ids), valid, accumulate=True)

    def _counts(self) -> tuple[Tensor, Tensor]:
        if self._prompt_seen is None or self._output_counts is None:
            shape = (self._num_slots, self._vocab_size)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._prompt_seen, self._output_counts


def num_accepted(targets: Tensor, faults: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """Return how many drafts of each sequence equal what the target chose at their places.

    Args:
        targets: [R, 1 + g] int64, the target's own tokens. faults: [R, 1 + g] bool, where it has
            none; a draft there is refused.
        drafts: [R, g] int64. num_drafts: [R] int64, how many of them were verified.
    Returns:
        [R] int64.
    """
    number = torch.arange(drafts.shape[1], device=drafts.device)
    equal = (drafts == targets[:, :-1]) & ~faults[:, :-1] & (number < num_drafts.unsqueeze(-1))
    return equal.long().cumprod(1).sum(1)


def _with_drafts(counts: Tensor, rows: SampledRows) -> Tensor:
    """Add to the counts [N, V] of each row the drafts before it."""
    number = torch.arange(rows.fed.shape[1], device=counts.device)
    before = (number >= 1) & (number <= rows.offset.unsqueeze(-1))
    return counts.scatter_add(1, rows.fed[rows.owner], before.to(counts.dtype))


def _bits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64).view(np.int64)


def _numbers(bits: Tensor) -> Tensor:
    """Return the float32 values of float64 bits."""
    return bits.contiguous().view(torch.float64).float()
