"""Coefficients of a hyper-connection: statistic, product with `fn`, Sinkhorn.

    streams [B, S*D] --- products of 64 rows with chunks of 256 channels --->
        partial sums [parts, B, columns] --- coefficients ---> pre, post, comb

After the S*(2+S) columns of the products comes that of the squares. Chunks are added in order to
groups of `GROUP`, groups in order to parts of `PART`, parts to the total. A program takes one
chunk, one group or one part, by the number of rows; the additions are the same, and so are the
bits.

`fn` is float32, streams are bfloat16. `fn` is the exact sum of three bfloat16 parts, whose products
with the streams are exact in float32: so tensor cores give a float32 product. Few rows split it on
the way, for many it is written split first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, dot, sigmoid

__all__ = ["mhc_mix"]

BLOCK_ROWS = 64  # the smallest tile of the widest tensor core instruction
TILE = 64  # channels of one product
CHUNK = 4  # tiles
# Products of 4 streams of 5120, measured on an H200: 8192 rows 114 us by groups of 5 chunks and 110
# by parts of 20, 105 with squares kept apart by channel up to a chunk's end; 4096 rows are faster
# by groups. Blocks of 128 rows and 2 or 4 stages are no better. The early launch of dependent
# kernels gains 0.3 us for few rows and doubles the time for 1024: their programs crowd onto the
# multiprocessors that are free first.
GROUP = 5  # chunks
PART = 4  # groups
FEW_ROWS = 256  # up to here a program takes one chunk
MANY_ROWS = 6144  # from here on it takes a part; between them a group
# Of a program of coefficients. For 8192 rows they take 9 us with two rows, 14 with one; for few
# 0.5 to 1 us less with one.
ROWS_OF_FEW, ROWS_OF_MANY = 1, 2


@triton.jit
def _three_parts(weight):
    """Return three bfloat16 tensors whose sum is the float32 one, the smallest first."""
    high = as_bf16(weight)
    rest = weight - high.to(tl.float32)
    middle = as_bf16(rest)
    return as_bf16(rest - middle.to(tl.float32)), middle, high


@triton.jit
def _split(fn_ptr, split_ptr, OUT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Write the three parts of `fn` [OUT, K], as [3, rows of the grid, K]."""
    out = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (offset < K) & (out < OUT)
    parts = _three_parts(tl.load(fn_ptr + out * K + offset, mask=real, other=0.0))
    for i in tl.static_range(3):
        place = (i * tl.num_programs(0) + out) * K + offset
        tl.store(split_ptr + place, parts[i], mask=offset < K)


@triton.jit(do_not_specialize=["num_rows"])
def _products(
    stream_ptr,
    fn_ptr,
    partial_ptr,
    num_rows,
    K: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write one partial sum of a block of rows: products and, in column OUT, squares.

    SPLIT: `fn_ptr` is what `_split` wrote, else `fn` itself.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    valid = (row < num_rows)[:, None]
    acc = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)  # of a chunk, a group and a part
    group = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    whole = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
    group_squares = tl.zeros((BLOCK_ROWS,), tl.float32)
    whole_squares = tl.zeros((BLOCK_ROWS,), tl.float32)
    for step in tl.range(0, CHUNKS * CHUNK, num_stages=STAGES, loop_unroll_factor=UNROLL):
        channel = (part * CHUNKS * CHUNK + step) * TILE + tl.arange(0, TILE)
        inside = channel < K
        place = row[:, None] * K + channel[None, :]
        x = tl.load(stream_ptr + place, mask=valid & inside[None, :], other=0.0)
        acc = tl.where(step % CHUNK == 0, 0.0, acc)
        if SPLIT:
            for i in tl.static_range(3):
                place = (i * COLUMNS + column)[:, None] * K + channel[None, :]
                weight = tl.load(fn_ptr + place, mask=inside[None, :], other=0.0)
                acc = dot(x, tl.trans(weight), acc)
        else:
            place = column[:, None] * K + channel[None, :]
            real = (column < OUT)[:, None] & inside[None, :]
            parts = _three_parts(tl.load(fn_ptr + place, mask=real, other=0.0))
            for i in tl.static_range(3):
                acc = dot(x, tl.trans(parts[i]), acc)
        wide = x.to(tl.float32)
        squares += wide * wide
        if step % CHUNK == CHUNK - 1:
            group += acc
            group_squares += tl.sum(squares, axis=1)
            squares = tl.zeros((BLOCK_ROWS, TILE), tl.float32)
        if CHUNKS > GROUP:  # noqa: SIM102 - known when compiled
            if step % (GROUP * CHUNK) == GROUP * CHUNK - 1:
                whole += group
                whole_squares += group_squares
                group = tl.zeros((BLOCK_ROWS, COLUMNS), tl.float32)
                group_squares = tl.zeros((BLOCK_ROWS,), tl.float32)
    if CHUNKS > GROUP:
        group, group_squares = whole, whole_squares
    group = tl.where(column[None, :] == OUT, group_squares[:, None], group)
    offset = (part * num_rows + row)[:, None] * COLUMNS + column[None, :]
    tl.store(partial_ptr + offset, group, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "iterations"])
def _coefficients(
    partial_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    num_rows,
    norm_eps,
    eps,
    iterations,
    K: tl.constexpr,
    STREAMS: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS_A_GROUP: tl.constexpr,
    GROUPS_A_PART: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = (row < num_rows)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    part = tl.arange(0, WHOLE)[None, :, None] * (CHUNKS_A_GROUP * GROUPS_A_PART)
    sums = tl.zeros((ROWS, WHOLE, COLUMNS), tl.float32)
    for _ in tl.static_range(GROUPS_A_PART):
        group = tl.zeros((ROWS, WHOLE, COLUMNS), tl.float32)
        for _ in tl.static_range(CHUNKS_A_GROUP):
            used = valid[:, None, :] & (part < PARTS)
            offset = (part * num_rows + row[:, None, None]) * COLUMNS + column[None, :, :]
            group += tl.load(partial_ptr + offset, mask=used, other=0.0)
            part += 1
        sums += group
    total = tl.sum(sums, axis=1)
    squares = tl.sum(tl.where(column == OUT, total, 0.0), axis=1)
    mean = tl.div_rn(squares, 1.0 * K)
    mixed = total * tl.div_rn(1.0, tl.sqrt_rn(mean + norm_eps))[:, None]

    # pre and post: [ROWS, BLOCK]
    s = tl.arange(0, BLOCK)
    real = s < STREAMS
    two = valid & real[None, :]
    place = tl.broadcast_to(s[None, :], (ROWS, BLOCK))
    base = tl.load(base_ptr + s, mask=real, other=0.0)[None, :]
    pre = sigmoid(tl.gather(mixed, place, 1) * tl.load(scale_ptr) + base) + eps
    base = tl.load(base_ptr + STREAMS + s, mask=real, other=0.0)[None, :]
    post = sigmoid(tl.gather(mixed, place + STREAMS, 1) * tl.load(scale_ptr + 1) + base)
    tl.store(pre_ptr + row[:, None] * STREAMS + s[None, :], pre, mask=two)
    tl.store(post_ptr + row[:, None] * STREAMS + s[None, :], 2.0 * post, mask=two)

    # comb: [ROWS, source, destination], an element a thread
    pair = s[:, None] * STREAMS + s[None, :]
    both = real[:, None] & real[None, :]
    place = tl.reshape(tl.where(both, 2 * STREAMS + pair, 0), (1, BLOCK * BLOCK))
    place = tl.broadcast_to(place, (ROWS, BLOCK * BLOCK))
    comb = tl.reshape(tl.gather(mixed, place, 1), (ROWS, BLOCK, BLOCK))
    base = tl.load(base_ptr + 2 * STREAMS + pair, mask=both, other=0.0)[None, :, :]
    comb = comb * tl.load(scale_ptr + 2) + base
    both = both[None, :, :]
    top = tl.max(tl.where(both, comb, float("-inf")), axis=2)
    top = tl.where(real[None, :], top, 0.0)
    comb = tl.where(both, tl.exp(comb - top[:, :, None]), 0.0)
    total = tl.where(real[None, :], tl.sum(comb, axis=2), 1.0)
    comb = tl.where(both, comb * (1.0 / total)[:, :, None] + eps, 0.0)
    comb = comb * (1.0 / (tl.sum(comb, axis=1) + eps))[:, None, :]
    for _ in range(iterations - 1):
        comb = comb * (1.0 / (tl.sum(comb, axis=2) + eps))[:, :, None]
        comb = comb * (1.0 / (tl.sum(comb, axis=1) + eps))[:, None, :]
    offset = (row * STREAMS * STREAMS)[:, None, None] + pair[None, :, :]
    tl.store(comb_ptr + offset, comb, mask=valid[:, :, None] & both)


def mhc_mix(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the coefficients of a hyper-connection.

    The streams of a row, normed together without weight, times `fn`, split into three parts, each
    times its scale plus its base: pre = sigmoid + eps; post = 2 * sigmoid; comb = softmax over the
    destination + eps, then Sinkhorn, columns first and last, `eps` in every denominator.

    Args:
        streams: [B, S, D] bfloat16, contiguous, S up to 8.
        fn: [S*(2+S), S*D] float32. scale: [3] float32. base: [S*(2+S)] float32.
        norm_eps: added to the mean of squares. eps: added to sums. iterations: column passes, 1 or
            more.
    Returns:
        pre [B, S], post [B, S], comb [B, source, destination], float32. Deterministic; a row
        depends on itself alone, to the bit. S and D are compile-time sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.mhc.mhc_mix.
    """
    check_tensor("streams", streams, shape=(None, None, None), dtype=torch.bfloat16)
    rows, count, size = streams.shape
    _check(streams, fn, scale, base, iterations)
    out, k = count * (2 + count), count * size
    columns = triton.next_power_of_2(out + 1)
    many = rows > FEW_ROWS
    chunks = 1
    if many:
        chunks = GROUP * PART if rows >= MANY_ROWS else GROUP
    parts = -(-k // (TILE * CHUNK * chunks))
    partial = torch.empty((parts, rows, columns), dtype=torch.float32, device=streams.device)
    if many:
        split = torch.empty((3, columns, k), dtype=torch.bfloat16, device=streams.device)
        _split[(columns, triton.cdiv(k, 1024))](fn, split, OUT=out, K=k, BLOCK=1024, num_warps=4)
        fn = split
    if rows:
        _products[(triton.cdiv(rows, BLOCK_ROWS), parts)](
            streams,
            fn,
            partial,
            rows,
            K=k,
            OUT=out,
            COLUMNS=columns,
            SPLIT=many,
            CHUNKS=chunks,
            CHUNK=CHUNK,
            GROUP=GROUP,
            TILE=TILE,
            BLOCK_ROWS=BLOCK_ROWS,
            STAGES=3 if many else 1,
            UNROLL=1 if many else CHUNK,
            num_warps=4,
            maxnreg=128 if many else None,  # four programs a multiprocessor
        )
    return _run_coefficients(
        partial, scale, base, k, chunks, norm_eps=norm_eps, eps=eps, iterations=iterations
    )


def _check(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int) -> None:
    """Raise `KernelInputError` unless the arguments of a mix fit its streams [B, S, D]."""
    _, count, size = streams.shape
    out, device = count * (2 + count), streams.device
    check_value("streams.shape[1]", count, 1 < count <= 8, "2 to 8 streams")
    check_value("streams.shape[2]", size, size > 0, "1 channel or more")
    check_tensor("fn", fn, shape=(out, count * size), dtype=torch.float32, device=device)
    check_tensor("scale", scale, shape=(3,), dtype=torch.float32, device=device)
    check_tensor("base", base, shape=(out,), dtype=torch.float32, device=device)
    check_value("iterations", iterations, iterations >= 1, "1 or more")


def _run_coefficients(
    partial: Tensor,
    scale: Tensor,
    base: Tensor,
    k: int,
    chunks: int,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre, post and comb of partial sums [parts, B, columns] of `chunks` chunks each."""
    parts, rows, columns = partial.shape
    out = base.shape[0]
    count = round((out + 1) ** 0.5) - 1  # out = count * (2 + count)
    pre, post = (torch.empty((rows, count), device=partial.device) for _ in range(2))
    comb = torch.empty((rows, count, count), device=partial.device)
    if rows:
        a_group = GROUP if chunks == 1 else 1
        a_part = PART if chunks <= GROUP else 1
        at_once = ROWS_OF_FEW if chunks == 1 else ROWS_OF_MANY
        _coefficients[(triton.cdiv(rows, at_once),)](
            partial,
            scale,
            base,
            pre,
            post,
            comb,
            rows,
            norm_eps,
            eps,
            iterations,
            K=k,
            STREAMS=count,
            OUT=out,
            COLUMNS=columns,
            PARTS=parts,
            CHUNKS_A_GROUP=a_group,
            GROUPS_A_PART=a_part,
            ROWS=at_once,
            WHOLE=triton.next_power_of_2(-(-parts // (a_group * a_part))),
            BLOCK=triton.next_power_of_2(count),
            num_warps=1,
        )
    return pre, post, comb
