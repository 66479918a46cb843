"""What fits: bytes of weights, block caches and slots, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.state import (
    POOLS,
    StateSizes,
    block_width,
    carry_depth,
    history_depth,
    source_ratios,
)
from deepinfer_core.model.tensors import TensorKind, tensor_specs

__all__ = ["MemoryPlan", "plan_memory"]

GIB = 2**30
# Share of the free memory that caches may take when nothing says how much;
# the rest is for activations.
CACHE_SHARE = 0.8
_ITEM_BYTES = {TensorKind.PLAIN: 2, TensorKind.FLOAT32: 4}  # all others are bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank and what they allow.

    Attributes:
        sizes: slots, blocks and longest sequence.
        weights: bytes kept in memory. mapped: bytes of Engram tables, which stay in their files.
        entry_bytes: pool -> bytes a token costs, all sources together.
        block_bytes: pool -> bytes of a block.
        slot_bytes: part -> bytes a sequence costs whatever its length.
        free: bytes that were free when the plan was made.
        shortage: why nothing can run, or None.
    """

    sizes: StateSizes
    weights: int
    mapped: int
    entry_bytes: Mapping[str, float]
    block_bytes: Mapping[str, int]
    slot_bytes: Mapping[str, int]
    free: int
    shortage: str | None = None

    def check(self) -> None:
        """Raise `ConfigError` when the caches do not fit, or hold nothing."""
        if self.shortage is not None:
            raise ConfigError(self.shortage)

    @property
    def bytes_per_token(self) -> float:
        """Block KV of one token in both pools."""
        return sum(self.entry_bytes.values())

    @property
    def cache_bytes(self) -> int:
        """Block caches, the scratch block included."""
        return sum((self.sizes.num_blocks[pool] + 1) * self.block_bytes[pool] for pool in POOLS)

    @property
    def state_bytes(self) -> int:
        """All slots: of sequences, of stored window states, and the scratch slot."""
        return (self.sizes.scratch_slot + 1) * sum(self.slot_bytes.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the smaller pool holds."""
        return min(self.sizes.num_blocks.values()) * self.sizes.block_size

    def table(self) -> list[tuple[str, str, str]]:
        """Return lines of (what, how much, why) for a terminal."""
        sizes = self.sizes
        lines = [
            (
                "weights",
                size_text(self.weights),
                f"as stored, text model with{'' if sizes.max_drafts else 'out'} drafter, "
                "without vision",
            ),
            ("Engram tables", size_text(self.mapped), "stay in their files, read by row"),
        ]
        for pool in POOLS:
            count, per_token = sizes.num_blocks[pool], self.entry_bytes[pool]
            note = f"{count} + 1 blocks of {sizes.block_size} tokens, {per_token:g} B per token"
            lines.append((f"blocks: {pool}", size_text((count + 1) * self.block_bytes[pool]), note))
        stored = f" + {sizes.num_stored} stored" if sizes.num_stored else ""
        for part, size in self.slot_bytes.items():
            note = f"{sizes.num_slots}{stored} + 1 slots of {size_text(size)}"
            lines.append((f"slots: {part}", size_text((sizes.scratch_slot + 1) * size), note))
        total = self.weights + self.cache_bytes + self.state_bytes
        return [
            *lines,
            ("total", size_text(total), "of these, 1 block and 1 slot are scratch"),
            ("block KV per token", f"{self.bytes_per_token:g} B", "both pools, all sources"),
            ("longest context", f"{min(sizes.max_len, self.num_tokens)} tokens", "one sequence"),
            ("largest batch", f"{sizes.num_slots} sequences", f"{self.num_tokens} tokens in all"),
            self._verdict(),
        ]

    def _verdict(self) -> tuple[str, str, str]:
        if self.shortage is not None:
            return "fits", "no", self.shortage
        return "fits", "yes", f"{size_text(self.free)} are free on this device"


def size_text(count: float) -> str:
    """Return bytes in a unit that reads well."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    backend: KernelBackend,
    *,
    num_drafts: int = 0,
    weights_loaded: bool = False,
) -> MemoryPlan:
    """Return the plan for a model under these options, before anything is allocated.

    Args:
        num_drafts: drafts of a sequence in a step; 0 leaves the drafter out.
        weights_loaded: the free memory of the device already lacks the weights.
    Raises:
        ConfigError: `block_size` or `max_model_len` does not suit the model or the backend.
    """
    max_len = _max_len(model, config)
    if config.block_size % backend.block_multiple:
        raise ConfigError(
            f"`block_size` is {config.block_size}, but kernel backend {backend.name!r} needs "
            f"a multiple of {backend.block_multiple}."
        )
    entry_bytes, block_bytes = _block_bytes(model, config, backend)
    empty = StateSizes(
        num_slots=config.max_sequences,
        num_blocks=dict.fromkeys(POOLS, 0),
        block_size=config.block_size,
        max_len=max_len,
        max_drafts=num_drafts,
        num_stored=config.stored_windows,
    )
    slot_bytes = _slot_bytes(model, backend, empty)
    if num_drafts and config.acceptance == "rejection":
        slot_bytes["chances of drafts"] = num_drafts * model.vocab_size * 4
    weights, mapped = _weight_bytes(model, drafter=num_drafts > 0)
    free = backend.runtime.memory().free
    held = 0 if weights_loaded else weights
    slots = (empty.scratch_slot + 1) * sum(slot_bytes.values())
    budget = _Budget(free, held, slots)
    num_blocks, shortage = _num_blocks(config, empty, sum(block_bytes.values()), budget)
    return MemoryPlan(
        sizes=replace(empty, num_blocks=dict.fromkeys(POOLS, num_blocks)),
        weights=weights,
        mapped=mapped,
        entry_bytes=entry_bytes,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        free=free,
        shortage=shortage,
    )


def _max_len(model: ModelConfig, config: EngineConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"`max_model_len` is {config.max_model_len} tokens, but the model's context is "
            f"{limit} tokens. Set it to {limit} or less."
        )
    if config.max_model_len is not None and config.max_model_len < 2:
        raise ConfigError(
            "`max_model_len` is 1; a prompt token and an output token need at least 2."
        )
    return limit if config.max_model_len is None else config.max_model_len


def _block_bytes(
    model: ModelConfig, config: EngineConfig, backend: KernelBackend
) -> tuple[dict[str, float], dict[str, int]]:
    per_token, per_block = {}, {}
    for pool in POOLS:
        width, dtype = backend.entry_format(pool, block_width(model, pool))
        entry = width * dtype.itemsize
        per_token[pool] = sum(entry / ratio for ratio in source_ratios(model).values())
        per_block[pool] = sum(
            entry * (config.block_size // ratio) for ratio in source_ratios(model).values()
        )
    return per_token, per_block


def _slot_bytes(model: ModelConfig, backend: KernelBackend, sizes: StateSizes) -> dict[str, int]:
    width, dtype = backend.entry_format("window", model.head_dim)
    ring = (model.sliding_window + sizes.max_drafts) * width * dtype.itemsize
    pairs = sum(ratio == 2 for ratio in source_ratios(model).values())
    stages = model.num_nextn_predict_layers if sizes.max_drafts else 0
    return {
        "window rings": (model.num_hidden_layers + stages) * ring,
        "compressor carry": pairs * carry_depth(sizes) * 2 * model.head_dim * 4,
        "Engram history": history_depth(model, sizes) * 8,
        "block tables": len(POOLS) * sizes.table_len * 4,
    }


def _weight_bytes(model: ModelConfig, *, drafter: bool) -> tuple[int, int]:
    """Return bytes (kept, mapped) of the text model, as the release stores it."""
    kept = mapped = 0
    for name, spec in tensor_specs(model).items():
        if spec.is_vision or (name.startswith("mtp.") and not drafter):
            continue
        size = prod(spec.shape) * _ITEM_BYTES.get(spec.kind, 1)
        if ".engram.embed." in name:
            mapped += size
        else:
            kept += size
    return kept, mapped


@dataclass(frozen=True)
class _Budget:
    """Bytes: what is free, and what weights and slots still take of it."""

    free: int
    weights: int
    slots: int

    @property
    def left(self) -> int:
        return max(self.free - self.weights - self.slots, 0)

    def __str__(self) -> str:
        weights = f"{size_text(self.weights)} of weights and " if self.weights else ""
        taken = f"{weights}{size_text(self.slots)} of slots"
        return f"{taken} leave {size_text(self.left)} of {size_text(self.free)} for caches"


def _num_blocks(
    config: EngineConfig, sizes: StateSizes, block: int, budget: _Budget
) -> tuple[int, str | None]:
    """Return the blocks of a pool and, when they cannot be had or run nothing, why."""
    wanted = config.max_sequences * sizes.table_len + 1
    slots = f"`max_sequences`, which is {config.max_sequences}"
    if config.stored_windows:
        slots += f", or `stored_windows`, which is {config.stored_windows}"
    advice = f"Use a device with more memory, or lower {slots}."
    if config.num_blocks is not None:
        count = config.num_blocks
        source, advice = f"`num_blocks` is {count}", f"{'Raise' if count < 2 else 'Lower'} it."
    elif config.cache_memory_gib is not None:
        count = int(min(wanted, config.cache_memory_gib * GIB // block))
        source, advice = f"`cache_memory_gib` is {config.cache_memory_gib:g}", "Change it."
    else:
        count = min(wanted, int(budget.left * CACHE_SHARE) // block)
        source = str(budget)
    if count < 2:
        return count, (
            f"{source}, but a block of {sizes.block_size} tokens takes {size_text(block)} and 2 "
            f"are the least. {advice}"
        )
    if (count + 1) * block > budget.left:
        return (
            count,
            f"{source}: {size_text((count + 1) * block)} of blocks. But {budget}. {advice}",
        )
    return count, None
