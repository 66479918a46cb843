"""The DSpark draft stages as the worker's drafter.

Keys are kept of committed positions alone; a block of drafts leaves nothing behind. A sequence's
keys may begin anywhere, such as behind a prefix that was found in the cache: drafts see what lies
from there on, and windows that end there are cut.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepinfer_core.engine.drafting import DraftInputs, Entering, Proposed
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.dspark import Drafter
from deepinfer_core.model.state import ModelState

__all__ = ["DsparkDrafter"]

_NOWHERE = -1


class DsparkDrafter:
    """Proposes the first drafts of a block; satisfies `engine.drafting.Drafter`.

    Args:
        model: the draft stages.
        state: holds their rings.
        num_drafts: drafts of a sequence, at most those of a block.
    """

    def __init__(self, model: Drafter, state: ModelState, num_drafts: int):
        """Have no keys yet."""
        self._model, self._state, self._num_drafts = model, state, num_drafts
        places = state.sizes.scratch_slot + 1
        device = state.history.device
        # by slot: the positions whose keys are kept, first .. end - 1
        self._first = torch.zeros(places, dtype=torch.int64, device=device)
        self._end = torch.full((places,), _NOWHERE, dtype=torch.int64, device=device)

    @property
    def num_drafts(self) -> int:
        """See `Drafter.num_drafts`."""
        return self._num_drafts

    def admit(self, entering: Entering) -> None:
        """See `Drafter.admit`."""
        self._end.index_fill_(0, entering.slots, _NOWHERE)

    def propose(self, backend: KernelBackend, inputs: DraftInputs) -> Proposed:
        """See `Drafter.propose`."""
        self._feed(backend, inputs)
        count = len(inputs.slots)
        if not inputs.samples:
            return Proposed(inputs.slots.new_zeros(count, self._num_drafts))
        last = inputs.token_ids.gather(1, (inputs.num_tokens - 1).clamp(min=0).unsqueeze(1))
        drafted = self._model.draft(
            backend,
            last.squeeze(1),
            inputs.end,
            inputs.slots,
            self._state,
            inputs.pick,
            num_drafts=self._num_drafts,
            window_floor=self._first[inputs.slots],
        )
        return Proposed(drafted.token_ids, drafted.confidence)

    def _feed(self, backend: KernelBackend, inputs: DraftInputs) -> None:
        """Write keys of the positions that have become final."""
        assert inputs.features is not None, "the model was run without features for its drafter"
        rows, end = inputs.hidden_rows, inputs.end
        owner = rows.sequence
        final = (owner >= 0) & (rows.positions < end[owner.clamp(min=0)])
        # what is refused, or of a sequence that failed, is padding here and writes nothing
        sound = inputs.slots[owner.clamp(min=0)] != self._state.sizes.scratch_slot
        kept = replace(rows, sequence=torch.where(final & sound, owner, -1))
        self._model.feed(backend, inputs.features, kept, self._state)
        num_rows = rows.row_start[1:] - rows.row_start[:-1]
        some = num_rows > 0
        slots = torch.where(some, inputs.slots, self._state.sizes.scratch_slot)
        goes_on = self._end[slots] == rows.first_position
        self._first[slots] = torch.where(goes_on, self._first[slots], rows.first_position)
        self._end[slots] = torch.minimum(end, rows.first_position + num_rows)
