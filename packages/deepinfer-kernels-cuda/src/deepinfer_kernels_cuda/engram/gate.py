"""Gated addition of what Engram read to every residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, sigmoid
from deepinfer_kernels_cuda.norm.rms_norm import MAX_SIZE, channel_of, mean_square, norm_shape

__all__ = ["engram_gate"]


PROGRAMS_A_STREAM = 264  # 2 for each multiprocessor of an H200, for each of 4 streams


@triton.jit(do_not_specialize=["num_rows"])
def _gate(
    stream_ptr,
    kv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    image_ptr,
    out_ptr,
    num_rows,
    eps,
    root_size,
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    COUNT: tl.constexpr,
    IMAGES: tl.constexpr,
):
    # Programs of one row's streams are neighbours: its value is read from memory by one of them
    # and from the cache by the others. The value is read with the rest, not when it is needed (30 %
    # faster); weights stay in the nearest cache from row to row.
    stream = tl.program_id(0) % STREAMS
    first = tl.program_id(0) // STREAMS * ROWS
    stride = tl.num_programs(0) // STREAMS * ROWS
    index, channel = channel_of(ROWS, PIECE)
    for start in tl.range(first, num_rows, stride):
        row = index.to(tl.int64) + start
        valid = row < num_rows
        stream_row = ((row * STREAMS + stream) * SIZE)[:, None]
        key_row = ((row * (STREAMS + 1) + stream) * SIZE)[:, None]
        value_row = ((row * (STREAMS + 1) + STREAMS) * SIZE)[:, None]
        streams, values = (), ()
        x_squares = tl.zeros(channel.shape, tl.float32)
        key_squares = tl.zeros(channel.shape, tl.float32)
        terms = tl.zeros(channel.shape, tl.float32)
        for piece in tl.static_range(COUNT):
            at = channel + piece * PIECE
            inside = valid[:, None] & (at < SIZE)
            part = tl.load(stream_ptr + stream_row + at, mask=inside, other=0.0)
            streams = streams + (part,)  # type: ignore[assignment]  # noqa: RUF005
            x = part.to(tl.float32)
            key = tl.load(kv_ptr + key_row + at, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(kv_ptr + value_row + at, mask=inside, other=0.0)
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
            weight = tl.load(query_weight_ptr + stream * SIZE + at, mask=at < SIZE, other=0.0)
            second = tl.load(key_weight_ptr + stream * SIZE + at, mask=at < SIZE, other=0.0)
            x_squares += x * x
            key_squares += key * key
            terms += x * key * (weight.to(tl.float32) * second.to(tl.float32))
        # Both norms are factors of the sum. Terms too small for it would not reach the least score.
        x_size = tl.sqrt_rn(mean_square(x_squares, SIZE, ROWS) + eps)
        key_size = tl.sqrt_rn(mean_square(key_squares, SIZE, ROWS) + eps)
        score = tl.div_rn(tl.div_rn(mean_square(terms, SIZE, ROWS) * root_size, x_size), key_size)
        size = tl.abs(score)
        root = tl.sqrt_rn(tl.where(size < 1e-6, 1e-6, size))  # a NaN stays one
        gate = sigmoid(tl.where(score < 0.0, -root, root))
        if IMAGES:
            image = tl.load(image_ptr + row, mask=valid, other=0)
            gate = tl.where((image != 0)[:, None], 0.0, gate)
        for piece in tl.static_range(COUNT):
            at = channel + piece * PIECE
            inside = valid[:, None] & (at < SIZE)
            result = streams[piece].to(tl.float32) + gate * values[piece].to(tl.float32)
            tl.store(out_ptr + stream_row + at, as_bf16(result), mask=inside)


def engram_gate(
    streams: Tensor,
    kv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    is_image: Tensor | None,
) -> Tensor:
    """Add the gated value to each stream: `streams[s] + gate[s] * value`.

    The score of a stream is the product of its norm, its key's and the two weights, summed, over
    sqrt(D); its gate is sigmoid(sign * sqrt(max(|score|, 1e-6))), and 0 at image positions. All of
    it in float32, rounded once.

    The sum is made before the norms divide it: where it or one of its terms passes 3e38 the gate
    may be NaN. So it is where `eps` is 0 and a stream or a key is zero.

    Args:
        streams: [B, S, D] bfloat16, contiguous, D up to 8192.
        kv: [B, (S + 1) * D] bfloat16, contiguous: a key for each stream, then the value.
        query_weight: [S, D] bfloat16 or float32. key_weight: the same.
        eps: added to the means of squares.
        is_image: [B] bool, or None for none.
    Returns:
        [B, S, D] bfloat16, a new tensor. Deterministic; a row depends on itself alone. S and D are
        compile-time sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.engram.engram_gate.
    """
    check_tensor("streams", streams, shape=(None, None, None), dtype=torch.bfloat16)
    (rows, count, size), device = streams.shape, streams.device
    needs = f"1 to {MAX_SIZE} channels; its twin takes more"
    check_value("streams.shape[2]", size, 0 < size <= MAX_SIZE, needs)
    shape = (rows, (count + 1) * size)
    check_tensor("kv", kv, shape=shape, dtype=torch.bfloat16, device=device)
    floats = (torch.bfloat16, torch.float32)
    shape = (count, size)
    check_tensor("query_weight", query_weight, shape=shape, dtype=floats, device=device)
    check_tensor("key_weight", key_weight, shape=shape, dtype=floats, device=device)
    if is_image is not None:
        check_tensor("is_image", is_image, shape=(rows,), dtype=torch.bool, device=device)
    out = torch.empty_like(streams)
    if rows and count:
        rows_a_program, piece, pieces = norm_shape(size)
        programs = min(triton.cdiv(rows, rows_a_program), PROGRAMS_A_STREAM)
        _gate[(programs * count,)](
            streams,
            kv,
            query_weight,
            key_weight,
            streams if is_image is None else is_image.view(torch.uint8),
            out,
            rows,
            eps,
            size**0.5,
            SIZE=size,
            STREAMS=count,
            ROWS=rows_a_program,
            PIECE=piece,
            COUNT=pieces,
            IMAGES=is_image is not None,
            num_warps=4,
        )
    return out
