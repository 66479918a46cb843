"""Run a model folder without an engine: chunks of chosen size, taps, replay, drafts.

For tests and benchmarks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_core.bench.whole_texts import open_model
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.runtime import CpuRuntime
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41, Forwarded, Tail
from deepinfer_core.model.state import POOLS, ModelState, StateSizes

__all__ = ["ModelRun", "Recorder", "load_run"]


class Recorder:
    """A tap that keeps what it sees.

    `recorder["hidden", 3]` is layer 3's streams of all rows so far.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._seen: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def __call__(self, name: str, layer_id: int, value: Tensor) -> None:
        """Take a tensor."""
        self._seen[name, layer_id].append(value.detach().clone())

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """Return everything seen under a name and layer, rows joined."""
        return torch.cat(self._seen[key])


@dataclass
class ModelRun:
    """A loaded model and fresh state for `num_slots` sequences.

    The blocks of a sequence lie scattered on purpose.
    """

    config: ModelConfig
    backend: KernelBackend
    model: DeepseekV41
    state: ModelState
    tap: Recorder = field(default_factory=Recorder)

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        return self.backend.runtime.device

    def forward(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        start: int = 0,
        slot: int = 0,
        window_floor: int = 0,
        write_floor: int = 0,
        tail_start: int | None = None,
        **kwargs: Tensor,
    ) -> Forwarded:
        """Run one sequence's rows from `start` on; rows below `tail_start` skip the late layers."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        image = kwargs.pop("is_image", None)
        rows = RowBatch.build(
            self.backend,
            [len(ids)],
            [start],
            [slot],
            window=self.config.sliding_window,
            window_floor=[window_floor],
            write_floor=[write_floor],
            is_image=image,
        )
        tail = None
        if tail_start is not None:
            keep = (rows.positions >= tail_start).nonzero().squeeze(-1)
            tail = Tail(keep, torch.full_like(keep, tail_start))
        with torch.no_grad():
            return self.model.forward(
                self.backend, ids, rows, self.state, tail=tail, tap=self.tap, **kwargs
            )

    def prefill(
        self,
        token_ids: Sequence[int] | Tensor,
        chunk: int | None = None,
        *,
        start: int = 0,
        slot: int = 0,
    ) -> Forwarded:
        """Run a prompt in chunks; hidden and features of all rows, with the drafter's rings fed."""
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        parts = []
        for offset in range(0, len(ids), chunk or len(ids)):
            part = ids[offset : offset + (chunk or len(ids))]
            parts.append(self.forward(part, start=start + offset, slot=slot))
            self._feed(parts[-1])
        features = [part.features for part in parts if part.features is not None]
        return Forwarded(
            torch.cat([part.hidden for part in parts]),
            torch.cat(features) if features else None,
            parts[-1].rows,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] of collapsed streams."""
        with torch.no_grad():
            return self.model.logits(self.backend, hidden)

    def greedy(self, first: int, start: int, count: int, *, slot: int = 0) -> list[int]:
        """Return `count` tokens, the first one given, each the argmax after the ones before it."""
        tokens = [first]
        for position in range(start, start + count - 1):
            done = self.forward([tokens[-1]], start=position, slot=slot)
            self._feed(done)
            tokens.append(int(self.logits(done.hidden).argmax()))
        return tokens

    def _feed(self, done: Forwarded) -> None:
        if self.model.drafter is not None and done.features is not None:
            with torch.no_grad():
                self.model.drafter.feed(self.backend, done.features, done.rows, self.state)


def load_run(
    folder: str | Path,
    numerics: str,
    *,
    strict: bool = True,
    num_slots: int = 1,
    block_size: int = 4,
    max_len: int = 512,
    max_drafts: int = 5,
    device: str = "cpu",
    backend: KernelBackend | None = None,
) -> ModelRun:
    """Load a model folder, drafter included, with state for some sequences.

    The reference ops run it in this mode on a device of PyTorch, or another backend does.
    """
    backend = backend or CpuBackend(numerics, strict, CpuRuntime(device))
    model = open_model(folder, backend, drafter=True)
    config = model.config
    per_slot = -(-(max_len + max_drafts) // block_size)
    sizes = StateSizes(
        num_slots, dict.fromkeys(POOLS, num_slots * per_slot), block_size, max_len, max_drafts
    )
    state = ModelState.allocate(config, backend, sizes, drafter=True)
    for table in state.tables.values():
        order = torch.randperm(num_slots * per_slot, generator=torch.Generator().manual_seed(7))
        table[:num_slots] = order.view(num_slots, per_slot).to(table)
    return ModelRun(config, backend, model, state)
