"""Device state of sequences.

Block KV, window rings, compressor carry, token history, drafter rings.

Every ring is addressed by position, so that refused drafts are undone by arithmetic: what they
wrote is overwritten when their positions are computed again. Rings have room for the drafts of one
step besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.config import ModelConfig

__all__ = ["POOLS", "Blocks", "Carried", "ModelState", "Ring", "StateSizes"]

POOLS = ("compressed", "index")


@dataclass(frozen=True)
class Ring:
    """Satisfies `interfaces.WindowStore`."""

    data: Tensor


@dataclass(frozen=True)
class Blocks:
    """Satisfies `interfaces.BlockStore`."""

    data: Tensor
    table: Tensor
    ratio: int


@dataclass(frozen=True)
class Carried:
    """Satisfies `interfaces.CompressorState`."""

    data: Tensor


@dataclass(frozen=True)
class StateSizes:
    """How much state to hold.

    Args:
        num_slots: sequences that can be on the device at once.
        num_blocks: blocks of each pool.
        block_size: tokens of a block.
        max_len: longest sequence, in tokens.
        max_drafts: drafts a step may verify beside a sequence's own row.
        num_stored: slots besides that keep copies of a sequence's state, taken at publish points.
    """

    num_slots: int
    num_blocks: Mapping[str, int]
    block_size: int
    max_len: int
    max_drafts: int
    num_stored: int = 0

    @property
    def scratch_slot(self) -> int:
        """The last slot, for rows of padding; those of sequences and stored states come before."""
        return self.num_slots + self.num_stored

    @property
    def table_len(self) -> int:
        """Blocks of the longest sequence; drafts may reach past its end."""
        return -(-(self.max_len + self.max_drafts) // self.block_size)


def block_width(config: ModelConfig, pool: str) -> int:
    """Return channels of an entry in this pool."""
    return config.head_dim if pool == "compressed" else config.index_head_dim


def source_ratios(config: ModelConfig) -> dict[int, int]:
    """Return the compression ratio of each layer that writes block KV."""
    return {layer_id: config.layers[layer_id].ratio for layer_id in config.kv_source_layer_ids}


@dataclass(frozen=True)
class ModelState:
    """All tensors that live between steps.

    The last slot and the last block are scratch, for rows of padding.

    Attributes:
        blocks: pool -> source layer -> its entries; `tables` are shared by all layers of a pool.
        windows: ring of each layer, in layer order.
        carried: source layer -> inputs of its unfinished groups (ratio 2 only).
        history: [slots, depth] int64 folded ids, -1 at image positions.
        draft_windows: ring of each draft stage.
    """

    sizes: StateSizes
    tables: Mapping[str, Tensor]
    blocks: Mapping[str, Mapping[int, Blocks]]
    windows: tuple[Ring, ...]
    carried: Mapping[int, Carried]
    history: Tensor
    draft_windows: tuple[Ring, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        backend: KernelBackend,
        sizes: StateSizes,
        *,
        drafter: bool = False,
    ) -> ModelState:
        """Allocate zeroed state on the backend's device."""
        device = backend.runtime.device
        slots = sizes.scratch_slot + 1
        tables = {
            pool: torch.full(
                (slots, sizes.table_len), sizes.num_blocks[pool], dtype=torch.int32, device=device
            )
            for pool in POOLS
        }
        blocks = {
            pool: {
                layer_id: Blocks(_entries(config, backend, sizes, pool, ratio), tables[pool], ratio)
                for layer_id, ratio in source_ratios(config).items()
            }
            for pool in POOLS
        }
        width, dtype = backend.entry_format("window", config.head_dim)
        ring_len = config.sliding_window + sizes.max_drafts

        def rings(count: int) -> tuple[Ring, ...]:
            return tuple(
                Ring(torch.zeros(slots, ring_len, width, dtype=dtype, device=device))
                for _ in range(count)
            )

        depth = carry_depth(sizes)
        return cls(
            sizes=sizes,
            tables=tables,
            blocks=blocks,
            windows=rings(config.num_hidden_layers),
            carried={
                layer_id: Carried(torch.zeros(slots, depth, 2, config.head_dim, device=device))
                for layer_id, ratio in source_ratios(config).items()
                if ratio == 2
            },
            history=torch.full(
                (slots, history_depth(config, sizes)), -1, dtype=torch.int64, device=device
            ),
            draft_windows=rings(config.num_nextn_predict_layers if drafter else 0),
        )

    def set_history(self, slot: int, start: int, folded: Tensor) -> None:
        """Write the folded ids [n] just before position `start`, oldest first."""
        positions = torch.arange(start - len(folded), start, device=self.history.device)
        self.history[slot, positions % self.history.shape[1]] = folded

    def scrub(self, blocks: Mapping[str, Sequence[int]], slots: Sequence[int]) -> None:
        """Zero the content of blocks and slots."""
        for pool, block_ids in blocks.items():
            for source in self.blocks[pool].values():
                source.data[list(block_ids)] = 0
        for data in self._rings():
            data[list(slots)] = 0

    def copy_slots(self, pairs: Tensor) -> None:
        """Copy all state of slots but their block tables: windows, unfinished groups, history.

        Args:
            pairs: [n, 2] int64, (from, to). All are read before any is written.
        """
        sources, targets = pairs.unbind(1)
        for data in (*self._rings(), self.history):
            data[targets] = data[sources]

    def _rings(self) -> tuple[Tensor, ...]:
        rings: tuple[Ring | Carried, ...] = (
            *self.windows,
            *self.carried.values(),
            *self.draft_windows,
        )
        return tuple(ring.data for ring in rings)


def carry_depth(sizes: StateSizes) -> int:
    """Return positions whose compressor inputs are kept: a pair and the drafts of a step."""
    return 2 + sizes.max_drafts


def history_depth(config: ModelConfig, sizes: StateSizes) -> int:
    """Return positions whose folded ids are kept.

    The look-back of the longest n-gram and the drafts of a step.
    """
    return max(config.engram_max_ngram_size - 1, 1) + 1 + sizes.max_drafts


def _entries(
    config: ModelConfig, backend: KernelBackend, sizes: StateSizes, pool: str, ratio: int
) -> Tensor:
    width, dtype = backend.entry_format(pool, block_width(config, pool))
    shape = (sizes.num_blocks[pool] + 1, sizes.block_size // ratio, width)
    return torch.zeros(shape, dtype=dtype, device=backend.runtime.device)
