"""What a step leaves on the device for the next one, and how the next one takes it up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.engine.stage import StagedStep
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.state import StateSizes

__all__ = ["Carries", "CarryState", "Corrected"]

# A tag is uid * this + generation, in the wrapping arithmetic of int64.
GENERATIONS = 1 << 16


@dataclass(frozen=True)
class CarryState:
    """What a step leaves for the next; satisfies `interfaces.Carry`. Addresses never change.

    Attributes:
        number: [1] int64: number of the launch that wrote it.
    """

    tokens: Tensor
    start: Tensor
    tag: Tensor
    number: Tensor

    @classmethod
    def allocate(cls, num_sequences: int, wide: int, device: torch.device) -> CarryState:
        """Return one that holds nothing."""

        def full(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int64, device=device)

        return cls(full(num_sequences, wide), full(num_sequences), full(num_sequences), full(1))


@dataclass(frozen=True)
class Corrected:
    """First tokens of sequences after correction.

    Attributes:
        fed: [R, 1 + drafts] int64: first token of each sequence, and its drafts.
        start, tag, slots: [R] int64; the scratch slot where `bad`.
        bad: [R] bool: the source was not the sequence's, or an id is illegal.
    """

    fed: Tensor
    start: Tensor
    tag: Tensor
    slots: Tensor
    bad: Tensor


class Carries:
    """The carries of the last two steps, by the parity of their launch: one is read, one written.

    Args:
        sizes: of the state; it has a place for every slot.
        vocab_size: V; other ids are illegal.
        device: where it is.
    """

    def __init__(self, sizes: StateSizes, vocab_size: int, device: torch.device):
        """Start with nothing left."""
        self._vocab_size, self._wide = vocab_size, 1 + sizes.max_drafts
        self._scratch_slot = sizes.scratch_slot
        self._carries = tuple(
            CarryState.allocate(sizes.num_slots, self._wide, device) for _ in range(2)
        )

    def correct(self, backend: KernelBackend, step: StagedStep, number: int) -> Corrected:
        """Take tokens and starts from the carry where the plan says so, and check them."""
        num_rows, source = step.column("num_rows"), step.column("source")
        ends = num_rows.cumsum(0)
        number_in_row = torch.arange(self._wide, device=ends.device)
        index = (ends - num_rows).unsqueeze(1) + number_in_row
        tokens = step.tokens[index.clamp(max=max(len(step.tokens) - 1, 0))]
        tokens = tokens.masked_fill(number_in_row >= num_rows.unsqueeze(1), 0)
        tag = step.column("uid") * GENERATIONS + step.column("generation") % GENERATIONS
        before = self._carries[(number - 1) % 2]
        # A step that was dropped leaves an older one's carry behind, of no use to anybody.
        current = torch.where(before.number == number - 1, before.tag, -1)
        carry = CarryState(before.tokens, before.start, current, before.number)
        fed, start, status = backend.correct_inputs(
            tokens, step.column("start"), tag, source, carry
        )
        illegal = (step.tokens < 0) | (step.tokens >= self._vocab_size)
        so_far = torch.cat((ends.new_zeros(1), illegal.cumsum(0)))
        bad = (status != 0) | ((source < 0) & (so_far[ends] > so_far[ends - num_rows]))
        slots = step.column("slot").masked_fill(bad, self._scratch_slot)
        return Corrected(fed.masked_fill(bad.unsqueeze(1), 0), start, tag, slots, bad)

    def leave(self, number: int, tokens: Tensor, start: Tensor, tag: Tensor) -> None:
        """Write the carry of a step.

        Args:
            number: of its launch.
            tokens: [R, 1 + g] int64, the token to feed next and what was drafted behind it.
            start: [R] int64, committed length.
            tag: [R] int64, -1 where a sequence leaves nothing.
        """
        carry, (count, width) = self._carries[number % 2], tokens.shape
        carry.tokens[:count, :width] = tokens
        carry.tokens[:count, width:] = 0
        carry.start[:count] = start
        carry.tag.fill_(-1)
        carry.tag[:count] = tag
        carry.number.fill_(number)
