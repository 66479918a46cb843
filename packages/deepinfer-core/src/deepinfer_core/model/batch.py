"""`RowBatch`: the flattened rows of a step as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend

__all__ = ["RowBatch"]


@dataclass(frozen=True)
class RowBatch:
    """Rows of several sequences laid end to end.

    Satisfies `interfaces.Rows`, which tells the fields.
    """

    positions: Tensor
    sequence: Tensor
    slots: Tensor
    row_start: Tensor
    first_position: Tensor
    sequence_slots: Tensor
    window_first: Tensor
    window_last: Tensor
    window_floor: Tensor
    window_len: int
    writes: Tensor
    is_image: Tensor | None = None

    @classmethod
    def build(
        cls,
        backend: KernelBackend,
        num_rows: Sequence[int] | Tensor,
        start: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        *,
        window: int,
        window_floor: Sequence[int] | Tensor | None = None,
        write_floor: Sequence[int] | Tensor | None = None,
        is_image: Tensor | None = None,
        total: int | None = None,
        scratch_slot: int = 0,
    ) -> RowBatch:
        """Lay out `num_rows[s]` rows from position `start[s]` on for each sequence s.

        Args:
            backend: whose device the rows are on.
            num_rows: rows of each sequence.
            start: position of each sequence's first row.
            slots: slot of each sequence.
            window: positions a row sees, its own included.
            window_floor: per sequence, first position windows may see; 0 by default.
            write_floor: per sequence, rows below it write no block and no carry; 0 by default.
            is_image: [B] bool or None.
            total: B with padding behind the rows (a captured graph has one size); none by default.
            scratch_slot: slot of padding.
        """
        device = backend.runtime.device

        def column(values: Sequence[int] | Tensor | None) -> Tensor:
            if values is None:
                return torch.zeros(len(num_rows), dtype=torch.int64, device=device)
            return torch.as_tensor(values, dtype=torch.int64, device=device)

        rows, first, places = column(num_rows), column(start), column(slots)
        size = int(rows.sum()) if total is None else total
        sequence, positions = backend.expand_rows(rows, first, size)

        def spread(values: Tensor, padding: int) -> Tensor:
            # padding is sequence -1, which finds what stands last
            return torch.cat((values, values.new_full((1,), padding)))[sequence]

        return cls(
            positions=positions,
            sequence=sequence,
            slots=spread(places, scratch_slot),
            row_start=torch.cat((rows.new_zeros(1), rows.cumsum(0))),
            first_position=first,
            sequence_slots=places,
            window_first=positions - (window - 1),
            window_last=positions,
            window_floor=spread(column(window_floor), 0),
            window_len=window,
            writes=(sequence >= 0) & (positions >= spread(column(write_floor), 0)),
            is_image=is_image,
        )

    def queries(self, keep: Tensor) -> RowBatch:
        """Return rows `keep` (ascending indices) as queries to the keys of all rows."""
        return replace(
            self,
            positions=self.positions[keep],
            sequence=self.sequence[keep],
            slots=self.slots[keep],
            window_first=self.window_first[keep],
            window_last=self.window_last[keep],
            window_floor=self.window_floor[keep],
            writes=self.writes[keep],
            is_image=None if self.is_image is None else self.is_image[keep],
        )

    def select(self, keep: Tensor) -> RowBatch:
        """Return rows `keep` alone: what was dropped is visible to nobody through windows.

        `keep` holds, for each sequence, its last rows or none; later layers of decoder-side replay
        run on them.
        """
        part = self.queries(keep)
        count = self.sequence_slots.shape[0]
        counted = self.row_start.new_zeros(count + 1)  # padding comes first
        kept = counted.index_add(0, part.sequence + 1, torch.ones_like(part.sequence))[1:]
        row_start = torch.zeros_like(self.row_start)
        row_start[1:] = kept.cumsum(0)
        total = self.row_start[1:] - self.row_start[:-1]
        return replace(part, row_start=row_start, first_position=self.first_position + total - kept)

    def with_floor(self, floor: Tensor) -> RowBatch:
        """Return the same rows with windows cut below `floor` [B] as well."""
        return replace(self, window_floor=torch.maximum(self.window_floor, floor))
