"""The tensors a checkpoint must hold: names, stored shapes and formats, all from the config.

Names are the release's, without a common prefix. Shapes are as stored: a packed FP4 matrix
[out, in] takes [out, in / 2] bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from deepinfer_core.model.config import LayerRole, ModelConfig, VisionConfig

__all__ = ["SCALE_GROUP", "TensorKind", "TensorSpec", "tensor_specs"]

# Side of an FP8 tile, and channels per scale in FP4 rows and Engram rows.
SCALE_GROUP = 32

_VISION_PREFIXES = ("vision.", "aligner.", "image_")


class TensorKind(Enum):
    """How a tensor is stored; values are the words of `interfaces.Matrix.format`."""

    PLAIN = "plain"  # norms, embeddings, matrices that are not quantised
    FLOAT32 = "float32"  # stream mixing, sinks, router biases
    FP8_TILE = "fp8_tile"  # one scale per 32 x 32 tile
    FP8_ROW = "fp8_row"  # Engram table; one scale per row and 32 channels
    FP4_ROW = "fp4_row"  # two E2M1 per byte, low nibble first; one scale per row and 32 channels
    SCALE = "scale"  # exponent bytes: 2 ** (byte - 127)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtype names allowed in the file, the release's own first."""
        return _DTYPES[self]


_DTYPES = {
    TensorKind.PLAIN: ("BF16", "F32"),
    TensorKind.FLOAT32: ("F32",),
    TensorKind.FP8_TILE: ("F8_E4M3",),
    TensorKind.FP8_ROW: ("F8_E4M3",),
    TensorKind.FP4_ROW: ("I8",),
    TensorKind.SCALE: ("F8_E8M0",),
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: its name in the files.
        shape: its stored shape.
        kind: its format.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind

    @property
    def is_vision(self) -> bool:
        """Whether only the image path needs it."""
        return self.name.startswith(_VISION_PREFIXES)

    @property
    def scale_name(self) -> str | None:
        """The name of the scales beside it, or None for a tensor without scales."""
        if self.kind in (TensorKind.FP8_TILE, TensorKind.FP8_ROW, TensorKind.FP4_ROW):
            return self.name.removesuffix("weight") + "scale"
        return None

    def without_scale(self) -> TensorSpec:
        """Return the same matrix stored plainly: what it must be if no scale lies beside it."""
        *rows, width = self.shape
        if self.kind is TensorKind.FP4_ROW:
            width *= 2
        return TensorSpec(self.name, (*rows, width), TensorKind.PLAIN)


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return every tensor of a checkpoint with this configuration, by name.

    Source: the released DeepSeek-V4.1 format.
    """
    return {spec.name: spec for spec in _all_specs(config)}


def _all_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    hidden = config.hidden_size
    yield _plain("embed.weight", config.vocab_size, hidden)
    yield _plain("head.weight", config.vocab_size, hidden)
    yield _plain("norm.weight", hidden)
    for role in config.layers:
        prefix = f"layers.{role.layer_id}"
        yield from _block(config, prefix, config.n_routed_experts)
        yield from _global_attention(config, f"{prefix}.attn", role)
        if role.engram_index is not None:
            rows = config.engram_num_embeddings[role.engram_index]
            yield from _engram(config, f"{prefix}.engram", rows)
    yield from _drafter(config)
    if config.vision is not None:
        yield from _vision(config.vision, hidden)


def _plain(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, TensorKind.PLAIN)


def _float32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, TensorKind.FLOAT32)


def _groups(width: int) -> int:
    return -(-width // SCALE_GROUP)


def _matrix(config: ModelConfig, name: str, rows: int, width: int) -> Iterator[TensorSpec]:
    """A dense matrix: FP8 tiles where the checkpoint is quantised."""
    if not config.quantized:
        yield _plain(f"{name}.weight", rows, width)
        return
    yield TensorSpec(f"{name}.weight", (rows, width), TensorKind.FP8_TILE)
    yield TensorSpec(f"{name}.scale", (_groups(rows), _groups(width)), TensorKind.SCALE)


def _expert_matrix(config: ModelConfig, name: str, rows: int, width: int) -> Iterator[TensorSpec]:
    """A matrix of a routed expert: packed FP4 where the checkpoint is quantised."""
    if not config.quantized:
        yield _plain(f"{name}.weight", rows, width)
        return
    yield TensorSpec(f"{name}.weight", (rows, width // 2), TensorKind.FP4_ROW)
    yield TensorSpec(f"{name}.scale", (rows, _groups(width)), TensorKind.SCALE)


def _block(config: ModelConfig, prefix: str, num_experts: int) -> Iterator[TensorSpec]:
    """What a layer and a draft stage have in common."""
    hidden, streams = config.hidden_size, config.hc_mult
    yield _plain(f"{prefix}.attn_norm.weight", hidden)
    yield _plain(f"{prefix}.ffn_norm.weight", hidden)
    # read, write and stream-to-stream coefficients
    num_coefficients = streams + streams + streams * streams
    for half in ("attn", "ffn"):
        yield _float32(f"{prefix}.hc_{half}_fn", num_coefficients, streams * hidden)
        yield _float32(f"{prefix}.hc_{half}_base", num_coefficients)
        yield _float32(f"{prefix}.hc_{half}_scale", 3)
    yield from _attention(config, f"{prefix}.attn")
    ffn, inner = f"{prefix}.ffn", config.moe_intermediate_size
    yield _plain(f"{ffn}.gate.weight", num_experts, hidden)
    yield _float32(f"{ffn}.gate.bias", num_experts)
    yield _float32(f"{ffn}.gate.bias_vl", num_experts)
    for expert in range(num_experts):
        yield from _expert_matrix(config, f"{ffn}.experts.{expert}.w1", inner, hidden)
        yield from _expert_matrix(config, f"{ffn}.experts.{expert}.w3", inner, hidden)
        yield from _expert_matrix(config, f"{ffn}.experts.{expert}.w2", hidden, inner)
    yield from _matrix(config, f"{ffn}.shared_experts.w1", inner, hidden)
    yield from _matrix(config, f"{ffn}.shared_experts.w3", inner, hidden)
    yield from _matrix(config, f"{ffn}.shared_experts.w2", hidden, inner)


def _attention(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, head_dim = config.hidden_size, config.head_dim
    width = config.num_attention_heads * head_dim
    grouped = config.o_groups * config.o_lora_rank
    yield _float32(f"{prefix}.attn_sink", config.num_attention_heads)
    yield from _matrix(config, f"{prefix}.wq_a", config.q_lora_rank, hidden)
    yield _plain(f"{prefix}.q_norm.weight", config.q_lora_rank)
    yield from _matrix(config, f"{prefix}.wq_b", width, config.q_lora_rank)
    yield from _matrix(config, f"{prefix}.wkv", head_dim, hidden)
    yield _plain(f"{prefix}.kv_norm.weight", head_dim)
    yield from _matrix(config, f"{prefix}.wo_a", grouped, width // config.o_groups)
    yield from _matrix(config, f"{prefix}.wo_b", hidden, grouped)


def _global_attention(config: ModelConfig, prefix: str, role: LayerRole) -> Iterator[TensorSpec]:
    """Compressor and indexer of the layers that own one."""
    hidden, head_dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    if role.is_kv_source:
        yield _plain(f"{prefix}.compressor.wkv.weight", head_dim, hidden)
        yield _plain(f"{prefix}.compressor.norm.weight", head_dim)
        # one token per entry needs no weights between tokens
        if role.ratio > 1:
            yield _plain(f"{prefix}.compressor.wgate.weight", head_dim, hidden)
        yield _plain(f"{prefix}.indexer.wk.weight", index_dim, head_dim)
        yield _plain(f"{prefix}.indexer.k_norm.weight", index_dim)
    if role.is_index_source:
        width = config.index_n_heads * index_dim
        yield from _matrix(config, f"{prefix}.indexer.wq_b", width, config.q_lora_rank)
        yield _plain(f"{prefix}.indexer.weights_proj.weight", config.index_n_heads, hidden)


def _engram(config: ModelConfig, prefix: str, rows: int) -> Iterator[TensorSpec]:
    hidden, streams, width = config.hidden_size, config.hc_mult, config.engram_head_dim
    table = TensorKind.FP8_ROW if config.quantized else TensorKind.PLAIN
    yield TensorSpec(f"{prefix}.embed.weight", (rows, width), table)
    if config.quantized:
        yield TensorSpec(f"{prefix}.embed.scale", (rows, _groups(width)), TensorKind.SCALE)
    # a key per stream and one value, from all columns of a token
    num_rows, columns = (streams + 1) * hidden, config.num_engram_columns
    yield from _matrix(config, f"{prefix}.wkv", num_rows, columns * width)
    yield _plain(f"{prefix}.q_weight", streams, hidden)
    yield _plain(f"{prefix}.k_weight", streams, hidden)


def _drafter(config: ModelConfig) -> Iterator[TensorSpec]:
    num_stages, hidden = config.num_nextn_predict_layers, config.hidden_size
    if num_stages == 0:
        return
    for stage in range(num_stages):
        yield from _block(config, f"mtp.{stage}", config.dspark_n_routed_experts)
    feature = len(config.dspark_target_layer_ids) * hidden
    yield from _matrix(config, "mtp.0.main_proj", hidden, feature)
    yield _plain("mtp.0.main_norm.weight", hidden)
    last, rank = f"mtp.{num_stages - 1}", config.dspark_markov_rank
    yield _plain(f"{last}.norm.weight", hidden)
    yield _plain(f"{last}.markov_head.embed.weight", config.vocab_size, rank)
    yield _plain(f"{last}.markov_head.head.weight", config.vocab_size, rank)
    yield _plain(f"{last}.confidence_head.proj.weight", 1, hidden + rank)


def _vision(vision: VisionConfig, hidden: int) -> Iterator[TensorSpec]:
    """The tower, the aligner and the learned delimiters; never quantised."""
    width, inner = vision.hidden_size, vision.intermediate_size
    for delimiter in ("start", "end", "newline"):
        yield _plain(f"image_{delimiter}", hidden)
    yield _plain("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield _plain("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield _plain(f"{prefix}.norm1.weight", width)
        yield _plain(f"{prefix}.norm2.weight", width)
        yield _plain(f"{prefix}.attn.wqkv.weight", 3 * width, width)
        yield _plain(f"{prefix}.attn.wqkv.bias", 3 * width)
        yield _plain(f"{prefix}.attn.wo.weight", width, width)
        yield _plain(f"{prefix}.attn.wo.bias", width)
        yield _plain(f"{prefix}.mlp.w1.weight", 2 * inner, width)
        yield _plain(f"{prefix}.mlp.w2.weight", width, inner)
    yield _plain("vision.norm.weight", width)
    yield _plain("aligner.w1.weight", hidden, width * vision.downsample_ratio**2)
    yield _plain("aligner.w1.bias", hidden)
    yield _plain("aligner.w2.weight", hidden, hidden)
    yield _plain("aligner.w2.bias", hidden)
