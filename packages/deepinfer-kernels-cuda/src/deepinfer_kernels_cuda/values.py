"""What ops take besides tensors; anything with these attributes will do, as core's values have.

Letters: B rows of a step laid end to end, R sequences of it, D hidden size, H heads, d head size,
E experts, k experts a token, V vocabulary, K entries kept by an index source. Integers are int64
unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = [
    "BlockStore",
    "Carry",
    "CompressorState",
    "ExpertWeights",
    "Matrix",
    "Rows",
    "SampleInputs",
    "WindowStore",
]


class Matrix(Protocol):
    """A weight [out, in], or a stack of them, as stored or in a layout of this package."""

    @property
    def payload(self) -> Tensor:
        """`plain` bfloat16 or float32, fp8 E4M3, or two E2M1 codes a byte, the low one first."""

    @property
    def scale(self) -> Tensor | None:
        """Bytes e that mean 2^(e - 127): of 32 x 32 tiles, or of 32 channels of a row."""

    @property
    def format(self) -> str:
        """`plain`, `fp8_tile`, `fp8_row` or `fp4_row`; layouts of this package may add others."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) as products see it."""


@dataclass(frozen=True)
class ExpertWeights:
    """Experts of one rank, stacked along their slot: gate `w1`, up `w3`, down `w2`."""

    w1: Matrix
    w3: Matrix
    w2: Matrix


@dataclass(frozen=True)
class Rows:
    """Which sequence each row of a step belongs to, and what it may see.

    Attributes:
        positions: [B], absolute; 0 in padding.
        sequence: [B], place of the row's sequence in the step; -1 is padding.
        slots: [B], slot of that sequence; padding names the scratch slot.
        row_start: [R + 1]; keys of sequence s are rows row_start[s] to row_start[s + 1] - 1.
        first_position: [R], of each sequence's first key. sequence_slots: [R].
        window_first, window_last: [B], first (it may be negative) and last position in sight.
        window_floor: [B], below it nothing is in sight.
        window_len: the most positions a window has, known to the host.
        writes: [B] bool; False where blocks and compressor state stay as they are.
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


@dataclass(frozen=True)
class WindowStore:
    """Rings [slots + 1, length, width]: position p of a slot lies at `data[slot, p % length]`."""

    data: Tensor


@dataclass(frozen=True)
class BlockStore:
    """Entries of one source layer; entry j covers `ratio` tokens from j * ratio on.

    Attributes:
        data: [blocks + 1, entries a block, width], the last block is scratch.
        table: [slots + 1, most blocks] int32, block ids of each slot in order.
    """

    data: Tensor
    table: Tensor
    ratio: int


@dataclass(frozen=True)
class CompressorState:
    """Value and gate of positions not pooled yet: [slots + 1, depth, 2, d] float32, ring by p."""

    data: Tensor


@dataclass(frozen=True)
class SampleInputs:
    """How N rows are sampled; None where no row uses a filter.

    Attributes:
        seeds: [N, 2], low and high 32 bits. positions: [N], index of the token being produced.
        temperature: [N] float32, 0 and below is greedy. top_k: [N], 0 and below keeps all.
        top_p, min_p: [N] float32, shares of 1; 1 and above of `top_p` keeps all, of `min_p` the
            best alone. None of these is NaN.
        penalties: [N, 3] float32: repetition, frequency, presence. They need `prompt_seen`
            [N, V] bool and `output_counts` [N, V] int32.
        bias: [N, V] float32. mask: [N, ceil(V / 32)] int32, bit v % 32 of word v // 32 allows v.
        stream: 0 target, 1 draft, 2 accept, 3 residual. cycle: [N], None is 0 everywhere.
    """

    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalties: Tensor | None = None
    prompt_seen: Tensor | None = None
    output_counts: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    stream: int = 0
    cycle: Tensor | None = None


@dataclass(frozen=True)
class Carry:
    """What a step leaves for the next: tokens [R, n], start [R], tag [R], -1 where nothing is."""

    tokens: Tensor
    start: Tensor
    tag: Tensor
