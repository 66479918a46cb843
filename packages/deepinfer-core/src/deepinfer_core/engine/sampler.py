"""Sampling of a step: settings of its rows as tensors, occurrence counts, log-probabilities.

Counts of tokens live on the device, keyed by slot, and are written on the forward queue alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.types import Admission, SamplingParams, StepPlan

__all__ = ["RowSettings", "Sampler", "StagedSampling"]


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


@dataclass(frozen=True)
class StagedSampling:
    """What the sampler needs of a plan, on the device.

    Attributes:
        settings: of the sampled rows; positions and counts are filled in when they are known.
        slots: [N] int64, slot of each sampled row.
        penalised: rows whose tokens are counted.
        admitted: (slot, prompt ids, output ids) of penalised sequences that enter a slot.
    """

    settings: RowSettings
    slots: Tensor
    penalised: Sequence[int]
    admitted: Sequence[tuple[int, Tensor, Tensor]]


class Sampler:
    """Chooses tokens for the sequences of a step."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device):
        """Know no sequence yet.

        Args:
            num_slots: slots of the state, the scratch slot not counted.
            vocab_size: V.
            device: where counts live.
        """
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._admitted: dict[int, Admission] = {}
        self._prompt_seen: Tensor | None = None  # allocated when the first request uses penalties
        self._output_counts: Tensor | None = None

    def stage(self, plan: StepPlan) -> StagedSampling:
        """Send the settings of a plan's sampled rows; take over those of sequences that enter."""
        admitted = []
        for meta in plan.sequences:
            if meta.admission is None:
                continue
            self._admitted[meta.slot] = meta.admission
            if meta.admission.params.uses_penalties:
                tokens = torch.tensor(meta.admission.token_ids, device=self._device)
                prompt_len = meta.admission.prompt_len
                admitted.append((meta.slot, tokens[:prompt_len], tokens[prompt_len:]))
        slots = [meta.slot for meta in plan.sequences if meta.samples]
        params = [self._admitted[slot].params for slot in slots]
        index = torch.tensor(slots, dtype=torch.int64, device=self._device)
        return StagedSampling(
            settings=self._settings(params, slots, index),
            slots=index,
            penalised=[row for row, each in enumerate(params) if each.uses_penalties],
            admitted=admitted,
        )

    def admit(self, staged: StagedSampling) -> None:
        """Start the counts of penalised sequences that enter (forward queue)."""
        for slot, prompt, output in staged.admitted:
            seen, counts = self._counts()
            seen[slot] = False
            seen[slot, prompt] = True
            counts[slot] = torch.bincount(output, minlength=self._vocab_size).to(counts.dtype)

    def sample(
        self, backend: KernelBackend, logits: Tensor, staged: StagedSampling, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (token ids [N] int64, status [N] int32) and count the tokens (forward queue).

        Args:
            backend: ops.
            logits: [N, V] float32.
            staged: settings of the rows.
            positions: [N] int64, index in its sequence of the token being produced.
        """
        settings = replace(staged.settings, positions=positions)
        if staged.penalised:
            seen, counts = self._counts()
            settings = replace(
                settings, prompt_seen=seen[staged.slots], output_counts=counts[staged.slots]
            )
        sampled = backend.sample(logits, settings)
        if staged.penalised:
            rows = list(staged.penalised)
            self._counts()[1][staged.slots[rows], sampled.token_ids[rows]] += 1
        return sampled.token_ids, sampled.status

    def _settings(
        self, params: Sequence[SamplingParams], slots: Sequence[int], index: Tensor
    ) -> RowSettings:
        def column(name: str, dtype: torch.dtype, neutral: float) -> Tensor | None:
            values = [getattr(each, name) for each in params]
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=self._device)

        seeds = [self._admitted[slot].seed for slot in slots]
        words = [(seed & 0xFFFFFFFF, seed >> 32) for seed in seeds]
        temperature = [each.temperature for each in params]
        return RowSettings(
            seeds=torch.tensor(words, dtype=torch.int64, device=self._device).reshape(-1, 2),
            positions=index,
            temperature=torch.tensor(temperature, dtype=torch.float32, device=self._device),
            top_k=column("top_k", torch.int64, 0),
            top_p=column("top_p", torch.float32, 1.0),
            min_p=column("min_p", torch.float32, 0.0),
            penalties=self._penalties(params),
            bias=self._bias(params),
        )

    def _penalties(self, params: Sequence[SamplingParams]) -> Tensor | None:
        if not any(each.uses_penalties for each in params):
            return None
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
