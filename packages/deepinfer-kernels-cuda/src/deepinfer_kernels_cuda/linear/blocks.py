"""Products with fp8 weights, widened to bfloat16 on their way into the matrix unit.

A weight's value is a power of two times 4 significant bits, and so is an activation rounded to fp8:
both are exact in bfloat16, and their product in float32. So a bfloat16 product has the factors of
a block-scaled fp8 one, without a scaling of sums every 32 columns, and with the wider accumulator
of the bfloat16 unit.

Weights are the first operand: their rows are the tile's rows, the rows of the step its columns. A
tile is then 16 to 128 rows of the step wide, and no row's bits depend on the width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import INTERPRET, as_bf16, dot, ue8m0_value
from deepinfer_kernels_cuda.linear.chunks import Cut, as_stored, workspace
from deepinfer_kernels_cuda.linear.overlap import OVERLAP, begin
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix

__all__ = ["BlockTile", "block_product", "block_tile", "expand_blocks", "on_hopper", "widen_blocks"]

WORD = tl.constexpr(128)
BLOCK_ROWS = tl.constexpr(16)


@triton.jit
def widen_words(words, exponent):
    """Return low and high E4M3 bytes of 16-bit words times 2^(exponent - 127), bfloat16.

    exponent: at most 134.
    """
    if INTERPRET:
        scale = ue8m0_value(exponent)
        low = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return as_bf16(low * scale), as_bf16(high * scale)
    else:
        # Sign, exponent and mantissa moved to their bfloat16 places are the value times 2^-120,
        # subnormal where E4M3 is. The factor makes up for it. Multiplications by 16 and 240 move
        # bits on the pipe that is not busy with logic: 240 = 256 - 16 takes a sign from bit 11,
        # where the first one put it, to bit 15.
        factor = ((exponent + 120) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            and.b32 a, $2, 0x00ff00ff;
            and.b32 b, $2, 0x00800080;
            mul.lo.u32 a, a, 16;
            mad.lo.u32 a, b, 240, a;
            shr.u32 c, $2, 4;
            and.b32 c, c, 0x07f007f0;
            lop3.b32 c, $2, 0x80008000, c, 0xea;
            mul.rn.bf16x2 $0, a, $3;
            mul.rn.bf16x2 $1, c, $3;
            }""",
            "=r,=r,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def widen_blocks(stored, scales, BLOCKS: tl.constexpr):
    """Return stored blocks (uint16 [BLOCKS, 4, 256]) as bfloat16 [16 * BLOCKS, 128].

    scales: [BLOCKS] int32, the scale bytes of the four groups of 32 columns.
    """
    shift = tl.arange(0, 4) * 8
    exponent = (scales[:, None] >> shift[None, :]) & 0xFF
    low, high = widen_words(stored, exponent[:, :, None])
    # [block, pair, row, thread, half of columns, half of rows, column, tile], see `quant.matrix`.
    places = tl.join(low, high).reshape(BLOCKS, 4, 8, 4, 2, 2, 2, 2)
    return places.permute(0, 5, 2, 1, 7, 4, 3, 6).reshape(BLOCKS * BLOCK_ROWS, WORD)


@triton.jit
def _settle():
    """Wait until Hopper's matrix unit is done with its operands.

    Those it reads from registers are written anew at the top of the next turn; the compiler's own
    wait leaves all but the first of this turn's instructions pending.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; // $0",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _block_product(
    payload_ptr,
    scale_ptr,
    x_ptr,
    out_ptr,
    rows,
    row_stride,
    outputs,
    group_outputs,
    columns,
    words,
    chunk,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SETTLE: tl.constexpr,
):
    BLOCKS: tl.constexpr = BM // BLOCK_ROWS
    begin(not WHOLE)
    row_tiles = tl.cdiv(rows, BN)
    place = tl.program_id(0)
    row_tile = place % row_tiles
    place = place // row_tiles
    first_chunk = 0
    if not WHOLE:
        first_chunk = place % CHUNKS
        place = place // CHUNKS
    tiles = tl.cdiv(group_outputs, BM)
    group = place // tiles
    local = (place % tiles) * BM + tl.arange(0, BM)
    m = group * group_outputs + local
    n = row_tile * BN + tl.arange(0, BN)
    k = tl.arange(0, WORD)
    m_inside = local < group_outputs
    n_inside = n < rows
    local_block = (place % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    block = group * (group_outputs // BLOCK_ROWS) + local_block
    block_inside = local_block * BLOCK_ROWS < group_outputs
    pair = tl.arange(0, 4)
    half = tl.arange(0, 256)
    w_tile = payload_ptr + (
        block.to(tl.int64)[:, None, None] * 1024 + pair[None, :, None] * 256 + half[None, None, :]
    )
    w_stride = tl.cast(tl.cdiv(outputs, BLOCK_ROWS), tl.int64) * 1024
    s_tile = scale_ptr + block // 2
    s_stride = tl.cdiv(outputs, 32)
    x_tile = x_ptr + group * columns + (n.to(tl.int64) * row_stride)[None, :] + k[:, None]

    total = tl.zeros([BM, BN], tl.float32)
    for index in range(first_chunk, CHUNKS if WHOLE else first_chunk + 1):
        acc = tl.zeros([BM, BN], tl.float32)
        start = index * chunk
        for word in tl.range(start, tl.minimum(start + chunk, words), num_stages=STAGES):
            if EVEN:
                x = tl.load(x_tile + word * WORD, mask=n_inside[None, :], other=0.0)
                w = tl.load(w_tile + word * w_stride)
                scales = tl.load(s_tile + word * s_stride)
            else:
                x_inside = n_inside[None, :] & (k + word * WORD < columns)[:, None]
                x = tl.load(x_tile + word * WORD, mask=x_inside, other=0.0)
                w = tl.load(w_tile + word * w_stride, mask=block_inside[:, None, None], other=0)
                scales = tl.load(s_tile + word * s_stride, mask=block_inside, other=0)
            acc = dot(widen_blocks(w, scales, BLOCKS), x, acc)
            if SETTLE:
                _settle()
        if CHUNKS > 1 and WHOLE:
            total += acc
        else:
            total = acc
    offset = n.to(tl.int64)[None, :] * outputs + m[:, None]
    inside = n_inside[None, :] & m_inside[:, None]
    if WHOLE:
        tl.store(out_ptr + offset, as_stored(total, out_ptr), mask=inside)
    else:
        chunk_stride = tl.cast(rows, tl.int64) * outputs
        tl.store(out_ptr + first_chunk * chunk_stride + offset, total, mask=inside)


@triton.jit
def _expand_blocks(payload_ptr, scale_ptr, out_ptr, outputs, columns, BM: tl.constexpr):
    begin()
    BLOCKS: tl.constexpr = BM // BLOCK_ROWS
    word = tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    blocks = tl.cdiv(outputs, BLOCK_ROWS)
    inside = block < blocks
    half = tl.arange(0, 256)
    pair = tl.arange(0, 4)
    w_place = payload_ptr + (
        (word.to(tl.int64) * blocks + block)[:, None, None] * 1024
        + pair[None, :, None] * 256
        + half[None, None, :]
    )
    w = tl.load(w_place, mask=inside[:, None, None], other=0)
    scales = tl.load(scale_ptr + word * tl.cdiv(outputs, 32) + block // 2, mask=inside, other=0)
    value = widen_blocks(w, scales, BLOCKS)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    column = word * WORD + tl.arange(0, WORD)
    place = m.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptr + place, value, mask=(m < outputs)[:, None] & (column < columns)[None, :])


@dataclass(frozen=True)
class BlockTile:
    """Shape of a program: outputs and rows of its tile, pipeline stages, warps."""

    outputs: int
    rows: int
    stages: int
    warps: int


def block_tile(rows: int, cut: Cut) -> BlockTile:
    """Return the shape of a program for a number of rows and a weight's cut.

    Measured on an H200. 8 rows: 25600x6144 42 us with 128 outputs a tile and 47 with 64, 5120x8192
    17.2 and 15.2; 60 rows: 59 and 75, 26 and 23. At 1024 rows a tile of 256 is 9 % faster than one
    of 128, but under Triton 3.7 three stages of it do not fit into shared memory.
    """
    outputs = 128 if cut.chunks == 1 else 64
    if rows <= 16:
        return BlockTile(outputs, 16, 4, 4)
    if rows <= 32:
        return BlockTile(outputs, 32, 4, 4)
    if rows <= 64:
        return BlockTile(outputs, 64, 3, 4)
    return BlockTile(128, 128, 3, 8)


def on_hopper(device: torch.device) -> bool:
    """Return whether a device has Hopper's matrix unit, which some forms of kernels are for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _scale_words(weight: PreparedMatrix) -> Tensor:
    assert weight.scale is not None, "weights in blocks have a scale"
    return weight.scale.view(torch.int32)


def block_product(
    x: Tensor,
    weight: PreparedMatrix,
    groups: int = 1,
    *,
    whole: bool | None = None,
    tile: BlockTile | None = None,
) -> Tensor:
    """Return `x @ weight^T` with float32 sums, rounded once: [B, out] bfloat16.

    Args:
        x: [B, groups * in] bfloat16, contiguous, in its final precision.
        weight: fp8 in blocks, [out, in]; group g of its rows sees group g of the columns of x.
            A group's rows are a multiple of 16, unless there is one.
        whole: whether a program sums all chunks of its tile; tile: its shape. None leaves it to
            the number of rows. The bits are the same.
    """
    rows = x.shape[0]
    outputs, columns = weight.shape
    out = torch.empty((rows, outputs), dtype=torch.bfloat16, device=x.device)
    if out.numel() == 0:
        return out
    cut = Cut.of(outputs, columns)
    tile = tile or block_tile(rows, cut)
    row_tiles = triton.cdiv(rows, tile.rows)
    group_outputs = outputs // groups
    tiles = groups * triton.cdiv(group_outputs, tile.outputs)
    whole = cut.whole(row_tiles * tiles) if whole is None else whole
    target = out if whole else workspace(cut.chunks, out)
    programs = 1 if whole else cut.chunks
    _block_product[(row_tiles * tiles * programs,)](
        weight.payload.view(torch.uint16),
        _scale_words(weight),
        x,
        target,
        rows,
        x.shape[1],
        outputs,
        group_outputs,
        columns,
        weight.payload.shape[0],
        cut.words,
        CHUNKS=cut.chunks,
        WHOLE=whole,
        EVEN=group_outputs % tile.outputs == 0 and columns % 128 == 0,
        BM=tile.outputs,
        BN=tile.rows,
        STAGES=tile.stages,
        SETTLE=on_hopper(x.device),
        num_warps=tile.warps,
        **OVERLAP,
    )
    if not whole:
        cut.add_up(target, out)
    return out


def expand_blocks(weight: PreparedMatrix) -> Tensor:
    """Return a weight in blocks as bfloat16 [out, in]; exact."""
    outputs, columns = weight.shape
    out = torch.empty((outputs, columns), dtype=torch.bfloat16, device=weight.payload.device)
    if out.numel():
        _expand_blocks[(triton.cdiv(outputs, 64), weight.payload.shape[0])](
            weight.payload.view(torch.uint16),
            _scale_words(weight),
            out,
            outputs,
            columns,
            BM=64,
            num_warps=4,
            **OVERLAP,
        )
    return out
