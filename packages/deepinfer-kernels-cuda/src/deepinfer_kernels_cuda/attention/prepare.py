"""Window keys from their latent in one launch: norm, partial rotation, rounding and ring write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.attention.window import is_newest
from deepinfer_kernels_cuda.checks import check_rows, check_tensor, check_together, check_value
from deepinfer_kernels_cuda.kernel_math import as_bf16, round_bf16
from deepinfer_kernels_cuda.norm.rms_norm import mean_square
from deepinfer_kernels_cuda.norm.rotate import cos_sin
from deepinfer_kernels_cuda.quant.entries import (
    WINDOW,
    decode_e4m3,
    encode_groups,
    entry_width,
    scale_of_byte,
)
from deepinfer_kernels_cuda.values import Rows, WindowStore

__all__ = ["prepare_keys"]


def prepare_keys(
    latent: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    window: WindowStore | None = None,
    rows: Rows | None = None,
) -> Tensor:
    """Return `round_window(rotate(rms_norm(latent, weight, eps), positions, inv_freq))`.

    With a window and rows it writes the ring as `write_window` does. Older entries of the ring are
    then gone: attention of the same rows may follow only where no sequence has more rows in this
    step than `ring_len - window_len + 1`, as in decode and verification.

    Args:
        latent: [B, d] bfloat16, contiguous, d a multiple of 32.
        weight: [d] bfloat16. eps: of the norm.
        positions: [B] int64. inv_freq: [n] float32, 2n <= d: the last 2n channels are rotated.
        window: `data` [slots + 1, ring_len, entry_width("window", d)] uint8, written.
        rows: of the latent.
    Returns:
        [B, d] bfloat16. Bits of a row do not depend on other rows.
    Raises:
        KernelInputError: a shape, dtype or stride is not as above.
    Source: reference.attention.prepare_keys; model-v41.md 4 and 10.
    """
    check_tensor("latent", latent, shape=(None, None), dtype=torch.bfloat16)
    (num_rows, channels), device = latent.shape, latent.device
    width = entry_width("window", channels)
    check_tensor("weight", weight, shape=(channels,), dtype=torch.bfloat16, device=device)
    check_tensor("positions", positions, shape=(num_rows,), dtype=torch.int64, device=device)
    check_tensor("inv_freq", inv_freq, shape=(None,), dtype=torch.float32, device=device)
    pairs = inv_freq.shape[0]
    needs = f"at most {channels // 2}, one for each pair of channels"
    check_value("inv_freq.shape[0]", pairs, 2 * pairs <= channels, needs)
    check_together(window=window, rows=rows)
    out = torch.empty_like(latent)
    ring, ring_len, lengths = latent, 1, (positions,) * 4
    if window is not None and rows is not None:
        ring = window.data
        shape = (None, None, width)
        check_tensor("window.data", ring, shape=shape, dtype=torch.uint8, device=device)
        ring_len = ring.shape[1]
        check_value("window.data.shape[1]", ring_len, ring_len > 0, "a ring of at least one entry")
        fields = ("sequence", "slots", "row_start", "first_position")
        check_rows(rows, num_rows, device, fields)
        lengths = (rows.sequence, rows.slots, rows.row_start, rows.first_position)
    if num_rows == 0:
        return out
    groups = triton.next_power_of_2(channels // 32)
    tile = max(1, 32 // groups)
    _prepare_kernel[(triton.cdiv(num_rows, tile),)](
        latent, weight, eps, positions, inv_freq, out, ring, *lengths, num_rows,
        ring_len, D=channels, PAIRS=pairs, G=groups, ROWS=tile, WRITE=window is not None,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _prepare_kernel(
    latent_ptr, weight_ptr, eps, position_ptr, frequency_ptr, out_ptr, ring_ptr, sequence_ptr,
    slot_ptr, row_start_ptr, first_ptr, num_rows, ring_len,
    D: tl.constexpr, PAIRS: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    # [ROWS * G, 32]: the groups of a row one behind the other, as in rms_norm
    group = tl.arange(0, ROWS * G)
    row = tl.program_id(0).to(tl.int64) * ROWS + group // G
    channel = (group % G)[:, None] * 32 + tl.arange(0, 32)[None, :]
    valid = row < num_rows
    inside = valid[:, None] & (channel < D)
    at = row[:, None] * D + channel
    x = tl.load(latent_ptr + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square(x * x, D, ROWS) + eps))
    weight = tl.load(weight_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)
    normed = round_bf16(x * inverse * weight)

    position = tl.load(position_ptr + row, mask=valid, other=0)
    pair = (group % G)[:, None] * 16 + tl.arange(0, 16)[None, :] - (D // 2 - PAIRS)
    turns = (pair >= 0) & (pair < PAIRS)
    frequency = tl.load(frequency_ptr + pair, mask=turns, other=0.0)
    cos, sin = cos_sin(position.to(tl.float32)[:, None] * frequency)
    real, imag = tl.split(tl.reshape(normed, [ROWS * G, 16, 2]))
    turned_real = tl.where(turns, round_bf16(tl.fma(real, cos, -(imag * sin))), real)
    turned_imag = tl.where(turns, round_bf16(tl.fma(real, sin, imag * cos)), imag)
    key = tl.reshape(tl.join(turned_real, turned_imag), [ROWS * G, 1, 32])

    codes, scale_byte = encode_groups(key, WINDOW)
    value = decode_e4m3(codes, scale_of_byte(scale_byte, WINDOW)[:, :, None])
    tl.store(out_ptr + at, as_bf16(tl.reshape(value, [ROWS * G, 32])), mask=inside)
    if WRITE:
        sequence = tl.load(sequence_ptr + row, mask=valid, other=-1)
        written = is_newest(
            row_start_ptr, first_ptr, sequence, position, sequence >= 0, ring_len
        )  # fmt: skip
        slot = tl.load(slot_ptr + row, mask=written, other=0)
        entry = ring_ptr + (slot * ring_len + position % ring_len) * (D + D // 32)
        stored = written[:, None] & (channel < D)
        tl.store(entry[:, None] + channel, tl.reshape(codes, [ROWS * G, 32]), mask=stored)
        scale_at = entry + D + group % G
        tl.store(scale_at, tl.reshape(scale_byte, [ROWS * G]), mask=written & (group % G < D // 32))
