"""Rotary embedding of the last channels, interleaved pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16

__all__ = ["cos_sin", "rotate"]


@triton.jit
def cos_sin(angle):
    """Return cosine and sine of float32 angles below 2^30 radians, within 1e-7.

    The nearest multiple of pi / 2 is taken off in float64, where one product is exact enough: the
    hardware's own functions lose 0.06 at a million radians. What is left goes through the first
    terms of the two series.
    """
    wide = angle.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)  # 2 / pi
    rest = (wide - turns * 1.5707963267948966).to(tl.float32)
    quadrant = turns.to(tl.int32) & 3
    z = rest * rest
    sin = rest + rest * z * (
        -0.16666666666666666
        + z * (0.008333333333333333 + z * (-0.0001984126984126984 + z * 2.7557319223985893e-06))
    )
    cos = 1.0 + z * (
        -0.5
        + z
        * (
            0.041666666666666664
            + z * (-0.001388888888888889 + z * (2.48015873015873e-05 + z * -2.755731922398589e-07))
        )
    )
    odd = (quadrant & 1) != 0
    swapped_cos, swapped_sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -swapped_cos, swapped_cos)
    sin = tl.where(quadrant >= 2, -swapped_sin, swapped_sin)
    return cos, sin


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _rotate(
    x_ptr,
    position_ptr,
    frequency_ptr,
    out_ptr,
    num_rows,
    heads,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    start = row[:, None] * SIZE
    STILL: tl.constexpr = SIZE - 2 * PAIRS
    if STILL > 0:
        channel = tl.arange(0, BLOCK)[None, :]
        kept = inside & (channel < STILL)
        tl.store(out_ptr + start + channel, tl.load(x_ptr + start + channel, mask=kept), mask=kept)

    pair = tl.arange(0, BLOCK_PAIRS)
    position = tl.load(position_ptr + row // heads, mask=row < num_rows, other=0)
    frequency = tl.load(frequency_ptr + pair, mask=pair < PAIRS, other=0.0)
    cos, sin = cos_sin(position.to(tl.float32)[:, None] * frequency[None, :])
    if INVERSE:
        sin = -sin
    tail = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
    offset = start + STILL + tail
    turned = inside & (tail < 2 * PAIRS)
    x = tl.load(x_ptr + offset, mask=turned, other=0.0).to(tl.float32)
    real, imag = tl.split(tl.reshape(x, (ROWS, BLOCK_PAIRS, 2)))
    both = tl.join(real * cos - imag * sin, real * sin + imag * cos)
    tl.store(out_ptr + offset, as_bf16(tl.reshape(both, (ROWS, 2 * BLOCK_PAIRS))), mask=turned)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, *, inverse: bool = False) -> Tensor:
    """Turn the last 2n channels, as interleaved pairs, by `positions * inv_freq`.

    The angle is a float32 product. Its cosine and sine are within 1e-7 up to a position of 2^30.

    Args:
        x: [B, ..., d] bfloat16, contiguous, d up to 8192; its other dimensions share a position.
        positions: [B] int64.
        inv_freq: [n] float32, 2n <= d.
        inverse: turn by the opposite angle.
    Returns:
        A new tensor of the shape of x, channels before the last 2n copied. Deterministic; a row
        depends on itself alone. d and n are compile-time sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.norm.rotate.
    """
    check_tensor("x", x, dtype=torch.bfloat16)
    check_value("x.dim()", x.dim(), x.dim() >= 2, "2 dimensions or more")
    device, size = x.device, x.shape[-1]
    check_tensor("positions", positions, shape=(x.shape[0],), dtype=torch.int64, device=device)
    check_tensor("inv_freq", inv_freq, shape=(None,), dtype=torch.float32, device=device)
    pairs = inv_freq.shape[0]
    fits = 0 < 2 * pairs <= size <= 8192
    check_value("x.shape[-1]", size, fits, f"at least 2 * {pairs} and at most 8192 channels")
    out = torch.empty_like(x)
    num_rows = x.numel() // size
    if num_rows:
        # 16 KB of rows a program.
        rows = max(1, 8192 // triton.next_power_of_2(size))
        _rotate[(triton.cdiv(num_rows, rows),)](
            x,
            positions,
            inv_freq,
            out,
            num_rows,
            num_rows // x.shape[0],
            SIZE=size,
            PAIRS=pairs,
            INVERSE=inverse,
            ROWS=rows,
            BLOCK=triton.next_power_of_2(max(size - 2 * pairs, 1)),
            BLOCK_PAIRS=triton.next_power_of_2(pairs),
            num_warps=4,
        )
    return out
