"""`RowBatch`: the flattened rows of a step as tensors (`dspark.md` 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

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
        num_rows: Sequence[int],
        start: Sequence[int] | Tensor,
        slots: Sequence[int],
        *,
        window: int,
        window_floor: Sequence[int] | None = None,
        write_floor: Sequence[int] | None = None,
        is_image: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> RowBatch:
        """Lay out `num_rows[s]` rows from position `start[s]` on for each sequence s.

        Args:
            slots: slot of each sequence.
            window: positions a row sees, its own included.
            window_floor: per sequence, first position windows may see; 0 by default.
            write_floor: per sequence, rows below it write no block and no carry; 0 by default.
            is_image: [B] bool or None.
        """
        count = len(num_rows)
        rows = torch.tensor(num_rows, dtype=torch.int64, device=device)
        row_start = torch.zeros(count + 1, dtype=torch.int64, device=device)
        row_start[1:] = rows.cumsum(0)
        first = torch.as_tensor(start, dtype=torch.int64, device=device)
        places = torch.tensor(slots, dtype=torch.int64, device=device)
        sequence = torch.repeat_interleave(torch.arange(count, device=device), rows)
        positions = (
            torch.arange(len(sequence), device=device) - row_start[sequence] + first[sequence]
        )
        zeros = [0] * count
        floors = torch.tensor(
            [window_floor or zeros, write_floor or zeros], dtype=torch.int64, device=device
        )[:, sequence]
        return cls(
            positions=positions,
            sequence=sequence,
            slots=places[sequence],
            row_start=row_start,
            first_position=first,
            sequence_slots=places,
            window_first=positions - (window - 1),
            window_last=positions,
            window_floor=floors[0],
            window_len=window,
            writes=positions >= floors[1],
            is_image=is_image,
        )

    def padded(self, total: int, scratch_slot: int) -> RowBatch:
        """Return the same rows with padding behind them, `total` in all.

        A captured graph has one size.
        """
        missing = total - len(self.positions)

        def fill(values: Tensor, value: int) -> Tensor:
            return torch.cat((values, values.new_full((missing,), value)))

        return replace(
            self,
            positions=fill(self.positions, 0),
            sequence=fill(self.sequence, -1),
            slots=fill(self.slots, scratch_slot),
            window_first=fill(self.window_first, 0),
            window_last=fill(self.window_last, 0),
            window_floor=fill(self.window_floor, 0),
            writes=fill(self.writes, False),
            is_image=None if self.is_image is None else fill(self.is_image, False),
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
        kept = torch.bincount(part.sequence, minlength=count)
        row_start = torch.zeros_like(self.row_start)
        row_start[1:] = kept.cumsum(0)
        total = self.row_start[1:] - self.row_start[:-1]
        return replace(part, row_start=row_start, first_position=self.first_position + total - kept)

    def with_floor(self, floor: Tensor) -> RowBatch:
        """Return the same rows with windows cut below `floor` [B] as well."""
        return replace(self, window_floor=torch.maximum(self.window_floor, floor))
