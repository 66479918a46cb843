"""Sampling of a step: settings of its rows as tensors, occurrence counts, log-probabilities.

Counts of tokens live on the device, keyed by slot, and are written on the forward queue alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.types import Admission, SamplingParams, TokenLogprob

__all__ = ["RowSettings", "Sampler", "host_logprobs"]


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


class Sampler:
    """Chooses tokens for the sequences of a step.

    Args:
        num_slots: slots of the state, the scratch slot not counted.
        vocab_size: V.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        """Start with no sequence admitted."""
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._admitted: dict[int, Admission] = {}
        self._prompt_seen: Tensor | None = None  # allocated when the first request uses penalties
        self._output_counts: Tensor | None = None

    def admit(self, slot: int, admission: Admission) -> None:
        """Take over the settings of a sequence that enters a slot."""
        self._admitted[slot] = admission
        if not admission.params.uses_penalties:
            return
        seen, counts = self._counts()
        seen[slot] = False
        counts[slot] = 0
        tokens = torch.tensor(admission.token_ids, dtype=torch.int64, device=self._device)
        prompt, output = tokens[: admission.prompt_len], tokens[admission.prompt_len :]
        seen[slot, prompt] = True
        counts[slot] += torch.bincount(output, minlength=self._vocab_size).to(counts.dtype)

    def sample(
        self, backend: KernelBackend, logits: Tensor, slots: Sequence[int], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (token ids [N] int64, status [N] int32) and count the tokens.

        Args:
            logits: [N, V] float32. slots: of each row.
            positions: [N] int64, index of the token produced.
        """
        params = [self._admitted[slot].params for slot in slots]
        sampled = backend.sample(logits, self._settings(params, slots, positions))
        for row, (slot, each) in enumerate(zip(slots, params, strict=True)):
            if each.uses_penalties:
                self._counts()[1][slot, sampled.token_ids[row]] += 1
        return sampled.token_ids, sampled.status

    def _settings(
        self, params: Sequence[SamplingParams], slots: Sequence[int], positions: Tensor
    ) -> RowSettings:
        def column(name: str, dtype: torch.dtype, neutral: float) -> Tensor | None:
            values = [getattr(each, name) for each in params]
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=self._device)

        seeds = [self._admitted[slot].seed for slot in slots]
        penalised = any(each.uses_penalties for each in params)
        seen, counts = self._counts() if penalised else (None, None)
        index = torch.tensor(list(slots), device=self._device)
        return RowSettings(
            seeds=torch.tensor(
                [[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds],
                dtype=torch.int64,
                device=self._device,
            ),
            positions=positions,
            temperature=torch.tensor(
                [each.temperature for each in params], dtype=torch.float32, device=self._device
            ),
            top_k=column("top_k", torch.int64, 0),
            top_p=column("top_p", torch.float32, 1.0),
            min_p=column("min_p", torch.float32, 0.0),
            penalties=self._penalties(params) if penalised else None,
            prompt_seen=None if seen is None else seen[index],
            output_counts=None if counts is None else counts[index],
            bias=self._bias(params),
        )

    def _penalties(self, params: Sequence[SamplingParams]) -> Tensor:
        values = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _bias(self, params: Sequence[SamplingParams]) -> Tensor | None:
        if not any(each.logit_bias for each in params):
            return None
        bias = torch.zeros(len(params), self._vocab_size, device=self._device)
        for row, each in enumerate(params):
            if each.logit_bias:
                bias[row, list(each.logit_bias)] = torch.tensor(
                    list(each.logit_bias.values()), dtype=torch.float32, device=self._device
                )
        return bias

    def _counts(self) -> tuple[Tensor, Tensor]:
        if self._prompt_seen is None or self._output_counts is None:
            shape = (self._num_slots + 1, self._vocab_size)
            self._prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._prompt_seen, self._output_counts


def host_logprobs(
    backend: KernelBackend, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Return log-probabilities of raw logits [N, V] for tokens [N].

    Row i comes with `num_top[i]` alternatives.
    """
    if not num_top:
        return []
    chosen, best_ids, best = backend.logprobs(logits, token_ids, max(num_top))
    rows = zip(
        token_ids.tolist(), chosen.tolist(), best_ids.tolist(), best.tolist(), num_top, strict=True
    )
    return [
        TokenLogprob(token, value, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, value, ids, values, count in rows
    ]
