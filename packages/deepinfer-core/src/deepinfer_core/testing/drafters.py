"""Drafters without a model: one that knows the right answer, one that looks into the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from deepinfer_core.engine.drafting import DraftInputs, Entering, Proposed
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.state import StateSizes

__all__ = ["NgramDrafter", "ScriptedDrafter", "right_with"]

_MIX = 0x9E3779B97F4A7C15


def right_with(probability: float, seed: int = 0) -> Callable[[int, int], bool]:
    """Return a choice by (uid, position) that is True so often, and the same at every call."""

    def right(uid: int, position: int) -> bool:
        state = seed
        for value in (uid, position):
            state = (state ^ (value + _MIX)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
            state ^= state >> 31
        return state < probability * 2**64

    return right


class ScriptedDrafter:
    """Knows how each sequence goes on, and is right or wrong as it is told.

    It reads the device and works on the host; for tests alone.

    Args:
        num_drafts: drafts of a sequence.
        vocab_size: V.
        texts: uid -> token ids of the whole sequence, prompt included. Behind its end, and for
            other sequences, drafts are 0.
        right: whether the draft for the token at a position of a request is right; a wrong one is
            another legal id. `right_with` makes one; adversarial is False everywhere.
        confidence: what it says of the draft for a position of a request: the chance, before the
            sigmoid, that it passes if those before it do. None where it says nothing.
    """

    def __init__(
        self,
        num_drafts: int,
        vocab_size: int,
        texts: Mapping[int, Sequence[int]],
        right: Callable[[int, int], bool] = lambda uid, position: True,
        confidence: Callable[[int, int], float] | None = None,
    ):
        """Take the script."""
        self._num_drafts, self._vocab_size = num_drafts, vocab_size
        self._texts, self._right, self._confidence = texts, right, confidence

    @property
    def num_drafts(self) -> int:
        """See `Drafter.num_drafts`."""
        return self._num_drafts

    def admit(self, entering: Entering) -> None:
        """The script says all there is to know."""

    def propose(self, backend: KernelBackend, inputs: DraftInputs) -> Proposed:
        """See `Drafter.propose`."""
        places = [
            (uid, end + 1 + number)
            for uid, end in zip(inputs.uids.tolist(), inputs.end.tolist(), strict=True)
            for number in range(self._num_drafts)
        ]
        shape, device = (len(inputs.uids), self._num_drafts), inputs.uids.device
        ids = torch.tensor([self._draft(*place) for place in places], device=device)
        said = None
        if self._confidence is not None:
            values = [self._confidence(*place) for place in places]
            said = torch.tensor(values, dtype=torch.float32, device=device).view(shape)
        return Proposed(ids.long().view(shape), said)

    def _draft(self, uid: int, position: int) -> int:
        text = self._texts.get(uid, ())
        if position >= len(text):
            return 0
        shift = 0 if self._right(uid, position) else 1
        return (text[position] + shift) % self._vocab_size


class NgramDrafter:
    """Proposes what followed the last time that the last n tokens stood together (prompt lookup).

    Tokens of all positions that were fed are kept on the device by slot; a sequence whose prompt
    was found in the prefix index is known as far as `Entering.history` tells.

    Args:
        num_drafts: drafts of a sequence.
        sizes: of the state.
        device: where tokens are kept.
        length: n.
    """

    def __init__(self, num_drafts: int, sizes: StateSizes, device: torch.device, length: int = 2):
        """Know no tokens yet."""
        self._num_drafts, self._length = num_drafts, length
        # the drafts of a step may reach past the longest sequence, and a last token follows them
        shape = (sizes.scratch_slot + 1, sizes.max_len + sizes.max_drafts + 2)
        self._tokens = torch.full(shape, -1, dtype=torch.int64, device=device)

    @property
    def num_drafts(self) -> int:
        """See `Drafter.num_drafts`."""
        return self._num_drafts

    def admit(self, entering: Entering) -> None:
        """See `Drafter.admit`."""
        self._tokens.index_fill_(0, entering.slots, -1)
        slots, positions, token_ids = entering.history
        self._tokens[slots, positions] = token_ids

    def propose(self, backend: KernelBackend, inputs: DraftInputs) -> Proposed:
        """See `Drafter.propose`."""
        tokens, slots, end = self._tokens, inputs.slots, inputs.end
        tokens[inputs.rows.slots, inputs.rows.positions] = inputs.fed
        last = inputs.token_ids.gather(1, (inputs.num_tokens - 1).clamp(min=0).unsqueeze(1))
        tokens[slots, end] = last.squeeze(1)
        known = tokens[slots]
        places = torch.arange(known.shape[1], device=known.device)
        # match[r, p]: the n tokens that end at p are the last n, which end at `end`, and p < end
        match = places < end.unsqueeze(1)
        for back in range(self._length):
            wanted = known.gather(1, (end - back).clamp(min=0).unsqueeze(1))
            match &= (known.roll(back, 1) == wanted) & (wanted >= 0) & (places >= back)
        found = torch.where(match, places, -1).amax(1)
        number = torch.arange(1, self._num_drafts + 1, device=known.device)
        # an overlapping repeat goes on as it went on so far
        period = (end - found).clamp(min=1).unsqueeze(1)
        source = found.unsqueeze(1) + 1 + (number - 1) % period
        drafts = known.gather(1, source.clamp(min=0, max=known.shape[1] - 1))
        return Proposed(torch.where((found >= 0).unsqueeze(1), drafts, 0))
