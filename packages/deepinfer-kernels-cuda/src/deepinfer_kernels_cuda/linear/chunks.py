"""How products cut the input columns of a weight, and how the pieces are added up.

A small weight has too few output tiles to fill a GPU, so several programs share a tile, each with a
chunk of the columns. The cut depends on the weight's shape alone, a chunk is summed in the matrix
unit in column order, and chunks are added in order: every form of a product gives a row the same
bits, however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import as_bf16
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin

__all__ = ["Cut", "as_stored", "workspace"]

WORD = 128  # columns, the unit of a cut
# Programs wanted for a weight, in tiles of 64 outputs, and columns below which a chunk is not worth
# one: half of that while there are fewer than FEW programs. On an H200 (132 multiprocessors), 8
# rows: 5120x8192 takes 21, 15 us in 2, 4 chunks; 1280x5120 6.8, 8.1 us in 8, 14.
PROGRAMS = 256
SMALLEST_CHUNK = 512
FEW = 64
# Tiles from which programs sum all chunks of their tile.
WHOLE_TILES = 128


@triton.jit
def as_stored(value, ptr):
    """Return float32 values rounded to what `ptr` points to, bfloat16 or float32."""
    if ptr.dtype.element_ty == tl.bfloat16:
        return as_bf16(value)
    else:
        return value


@triton.jit(do_not_specialize=["size"])
def _add_up(chunks_ptr, out_ptr, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(chunks_ptr + place, mask=inside, other=0.0)
    for chunk in tl.static_range(1, CHUNKS):
        chunk_ptr = chunks_ptr + chunk * tl.cast(size, tl.int64)
        total += tl.load(chunk_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, as_stored(total, out_ptr), mask=inside)


@dataclass(frozen=True)
class Cut:
    """How the columns of a weight are cut.

    Attributes:
        words: 128 columns each, of a chunk; the last one may be shorter.
        chunks: how many there are.
    """

    words: int
    chunks: int

    @classmethod
    def of(cls, outputs: int, columns: int) -> Cut:
        """Return the cut of a weight [outputs, columns]."""
        words = max(1, -(-columns // WORD))
        tiles = -(-outputs // 64)
        chunks = 1
        while tiles * chunks < PROGRAMS:
            smallest = SMALLEST_CHUNK if tiles * chunks >= FEW else SMALLEST_CHUNK // 2
            if words * WORD < 2 * chunks * smallest:
                break
            chunks *= 2
        length = -(-words // chunks)
        return cls(length, -(-words // length))

    def whole(self, tiles: int) -> bool:
        """Return whether programs sum all chunks of their tile, one after the other."""
        return self.chunks == 1 or tiles >= WHOLE_TILES

    def add_up(self, chunks: Tensor, out: Tensor) -> None:
        """Write the sum of float32 [chunks, B, out], in order, to bfloat16 or float32 [B, out]."""
        size = out.numel()
        if size:
            _add_up[(triton.cdiv(size, 512),)](
                chunks, out, size, CHUNKS=self.chunks, BLOCK=512, num_warps=4, **OVERLAP
            )


def workspace(chunks: int, out: Tensor) -> Tensor:
    """Return float32 [chunks, B, out] for the sums of chunks."""
    return torch.empty((chunks, *out.shape), dtype=torch.float32, device=out.device)
