"""The model's weights as named values, read from a checkpoint or made by a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend, Matrix
from deepinfer_core.model.checkpoint import Checkpoint, StoredMatrix
from deepinfer_core.model.config import LayerRole, ModelConfig

__all__ = [
    "AttentionWeights",
    "BlockWeights",
    "CompressorWeights",
    "DrafterWeights",
    "EngramWeights",
    "Experts",
    "IndexerWeights",
    "MixWeights",
    "ModelWeights",
    "MoeWeights",
    "load_drafter",
    "load_weights",
]


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer that this rank holds, stacked.

    Satisfies `interfaces.ExpertWeights`.
    """

    w1: Matrix
    w3: Matrix
    w2: Matrix


@dataclass(frozen=True)
class MixWeights:
    """Hyper-connection coefficients: fn [S*(2+S), S*D], scale [3], base [S*(2+S)], float32."""

    fn: Tensor
    scale: Tensor
    base: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one layer; sink [H] float32."""

    wq_a: Matrix
    q_norm: Tensor
    wq_b: Matrix
    wkv: Matrix
    kv_norm: Tensor
    wo_a: Matrix
    wo_b: Matrix
    sink: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """Compressor and index keys of a KV source; `wgate` is None for ratio 1."""

    wkv: Matrix
    wgate: Matrix | None
    norm: Tensor
    index_wk: Matrix
    index_norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """Queries and head weights of an index source."""

    wq_b: Matrix
    weights_proj: Matrix


@dataclass(frozen=True)
class MoeWeights:
    """Router, routed experts of this rank and the shared expert.

    `slots` [E] int32 maps a logical expert to its physical slot here, -1 when it is on another
    rank; None means that every expert is here, in order.
    """

    gate: Matrix
    bias: Tensor
    bias_image: Tensor
    experts: Experts
    shared_w1: Matrix
    shared_w3: Matrix
    shared_w2: Matrix
    slots: Tensor | None = None


@dataclass(frozen=True)
class EngramWeights:
    """Table and projections of an Engram layer; q_weight, k_weight [S, D]."""

    table: Matrix
    wkv: Matrix
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True)
class BlockWeights:
    """One layer, or one draft stage."""

    attn_norm: Tensor
    ffn_norm: Tensor
    attn_mix: MixWeights
    ffn_mix: MixWeights
    attention: AttentionWeights
    moe: MoeWeights
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None
    engram: EngramWeights | None = None


@dataclass(frozen=True)
class DrafterWeights:
    """DSpark stages and heads."""

    main_proj: Matrix
    main_norm: Tensor
    stages: tuple[BlockWeights, ...]
    norm: Tensor
    markov_embed: Matrix
    markov_head: Matrix
    confidence: Matrix


@dataclass(frozen=True)
class ModelWeights:
    """Everything the text path needs; `drafter` is None when not asked for."""

    embed: Matrix
    head: Matrix
    norm: Tensor
    layers: tuple[BlockWeights, ...]
    drafter: DrafterWeights | None = None


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    backend: KernelBackend,
    *,
    drafter: bool = False,
    expert_ids: Callable[[int], Sequence[int]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelWeights:
    """Read what one rank needs, tensor by tensor, in the stored formats.

    Args:
        drafter: read the draft stages too.
        expert_ids: layer -> logical experts of this rank in slot order; all of them when None.
            Backbone layers only: every rank holds all experts of the (small) draft stages.
        progress: called with the name of each part that is done.
    Raises:
        CheckpointError: a file changed or cannot be read.
    """
    reader = _Reader(checkpoint, config, backend, expert_ids)
    done = progress or (lambda part: None)
    embed = reader.plain("embed.weight")
    layers = []
    for role in config.layers:
        layers.append(reader.layer(role))
        done(f"layers.{role.layer_id}")
    stages = load_drafter(checkpoint, config, backend) if drafter else None
    return ModelWeights(
        embed=embed,
        head=reader.plain("head.weight"),
        norm=reader.vector("norm.weight"),
        layers=tuple(layers),
        drafter=stages,
    )


def load_drafter(
    checkpoint: Checkpoint, config: ModelConfig, backend: KernelBackend
) -> DrafterWeights | None:
    """Read the draft stages and their heads; None for a model without any."""
    if not config.num_nextn_predict_layers:
        return None
    return _Reader(checkpoint, config, backend, None).drafter()


class _Reader:
    """Reads parts of a checkpoint by their prefix."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        backend: KernelBackend,
        expert_ids: Callable[[int], Sequence[int]] | None,
    ):
        self.checkpoint, self.config, self.backend, self.expert_ids = (
            checkpoint,
            config,
            backend,
            expert_ids,
        )
        self.device = backend.runtime.device

    def vector(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name).to(self.device)

    def plain(self, name: str) -> Matrix:
        return self.backend.prepare(StoredMatrix(self.checkpoint.tensor(name)))

    def matrix(self, name: str) -> Matrix:
        return self.backend.prepare(self.checkpoint.matrix(name))

    def mix(self, prefix: str) -> MixWeights:
        return MixWeights(*(self.vector(f"{prefix}_{part}") for part in ("fn", "scale", "base")))

    def block(
        self, prefix: str, experts: Sequence[int], num_experts: int, role: LayerRole | None = None
    ) -> BlockWeights:
        kv_source = role if role is not None and role.is_kv_source else None
        return BlockWeights(
            attn_norm=self.vector(f"{prefix}.attn_norm.weight"),
            ffn_norm=self.vector(f"{prefix}.ffn_norm.weight"),
            attn_mix=self.mix(f"{prefix}.hc_attn"),
            ffn_mix=self.mix(f"{prefix}.hc_ffn"),
            attention=self.attention(f"{prefix}.attn"),
            moe=self.moe(f"{prefix}.ffn", experts, num_experts),
            compressor=None if kv_source is None else self.compressor(f"{prefix}.attn", kv_source),
            indexer=self.indexer(f"{prefix}.attn.indexer")
            if role is not None and role.is_index_source
            else None,
            engram=self.engram(f"{prefix}.engram")
            if role is not None and role.engram_index is not None
            else None,
        )

    def layer(self, role: LayerRole) -> BlockWeights:
        count = self.config.n_routed_experts
        experts = range(count) if self.expert_ids is None else self.expert_ids(role.layer_id)
        return self.block(f"layers.{role.layer_id}", experts, count, role)

    def attention(self, prefix: str) -> AttentionWeights:
        return AttentionWeights(
            wq_a=self.matrix(f"{prefix}.wq_a"),
            q_norm=self.vector(f"{prefix}.q_norm.weight"),
            wq_b=self.matrix(f"{prefix}.wq_b"),
            wkv=self.matrix(f"{prefix}.wkv"),
            kv_norm=self.vector(f"{prefix}.kv_norm.weight"),
            wo_a=self.matrix(f"{prefix}.wo_a"),
            wo_b=self.matrix(f"{prefix}.wo_b"),
            sink=self.vector(f"{prefix}.attn_sink"),
        )

    def compressor(self, prefix: str, role: LayerRole) -> CompressorWeights:
        return CompressorWeights(
            wkv=self.plain(f"{prefix}.compressor.wkv.weight"),
            wgate=self.plain(f"{prefix}.compressor.wgate.weight") if role.ratio > 1 else None,
            norm=self.vector(f"{prefix}.compressor.norm.weight"),
            index_wk=self.plain(f"{prefix}.indexer.wk.weight"),
            index_norm=self.vector(f"{prefix}.indexer.k_norm.weight"),
        )

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            self.matrix(f"{prefix}.wq_b"), self.plain(f"{prefix}.weights_proj.weight")
        )

    def moe(self, prefix: str, experts: Sequence[int], num_experts: int) -> MoeWeights:
        stacked = self.checkpoint.experts(f"{prefix}.experts", experts)
        parts = {name: self.backend.prepare(stored) for name, stored in stacked.items()}
        return MoeWeights(
            gate=self.plain(f"{prefix}.gate.weight"),
            bias=self.vector(f"{prefix}.gate.bias"),
            bias_image=self.vector(f"{prefix}.gate.bias_vl"),
            experts=Experts(parts["w1"], parts["w3"], parts["w2"]),
            shared_w1=self.matrix(f"{prefix}.shared_experts.w1"),
            shared_w3=self.matrix(f"{prefix}.shared_experts.w3"),
            shared_w2=self.matrix(f"{prefix}.shared_experts.w2"),
            slots=self._slots(experts, num_experts),
        )

    def _slots(self, experts: Sequence[int], num_experts: int) -> Tensor | None:
        if list(experts) == list(range(num_experts)):
            return None
        slots = torch.full((num_experts,), -1, dtype=torch.int32)
        slots[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
        return slots.to(self.device)

    def engram(self, prefix: str) -> EngramWeights:
        # the table stays in its file unless the backend moves it: of its rows a step touches a few
        table = self.checkpoint.matrix(f"{prefix}.embed", mapped=True)
        return EngramWeights(
            table=self.backend.prepare(table),
            wkv=self.matrix(f"{prefix}.wkv"),
            q_weight=self.vector(f"{prefix}.q_weight"),
            k_weight=self.vector(f"{prefix}.k_weight"),
        )

    def drafter(self) -> DrafterWeights:
        count, experts = self.config.num_nextn_predict_layers, self.config.dspark_n_routed_experts
        last = f"mtp.{count - 1}"
        return DrafterWeights(
            main_proj=self.matrix("mtp.0.main_proj"),
            main_norm=self.vector("mtp.0.main_norm.weight"),
            stages=tuple(
                self.block(f"mtp.{stage}", range(experts), experts) for stage in range(count)
            ),
            norm=self.vector(f"{last}.norm.weight"),
            markov_embed=self.plain(f"{last}.markov_head.embed.weight"),
            markov_head=self.plain(f"{last}.markov_head.head.weight"),
            confidence=self.plain(f"{last}.confidence_head.proj.weight"),
        )
