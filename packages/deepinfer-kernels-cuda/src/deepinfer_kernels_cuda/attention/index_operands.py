"""Operands of index scores: queries and weights made finite, keys unpacked, terms, ordered keys."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import (
    INTERPRET,
    as_bf16,
    e2m1_value,
    round_bf16,
    ue8m0_value,
)

__all__ = ["load_queries", "load_weights", "ordered_keys", "unpack_keys", "weighted_terms"]

# Eight bfloat16 pairs of two words of a key times their scale. A code's bits go to the sign and to
# the lowest exponent and mantissa bits: 2^-126 of its value, a subnormal for 0.5 as in E2M1. Pair
# n of a word holds codes n and n + 4, the same place of its halves: one product copies both codes
# to both places, a mask keeps what is meant.
_PAIR = """
    and.b32 a, {word}, {mask};
    mul.lo.u32 a, a, {places};
    and.b32 a, a, 0x81C081C0;
    mul.rn.bf16x2 ${out}, a, $10;
"""
_LOW = {"mask": "0x000F000F", "places": "0x1040"}  # codes at bit 0 of halves
_HIGH = {"mask": "0x00F000F0", "places": "0x0104"}  # at bit 4
UNPACK = tl.constexpr(
    "{ .reg .b32 a, b, c; shr.u32 b, $8, 8; shr.u32 c, $9, 8;"
    + "".join(
        _PAIR.format(word=word, out=out + n, **place)
        for word, out in (("$8", 0), ("b", 2), ("$9", 4), ("c", 6))
        for n, place in enumerate((_LOW, _HIGH))
    )
    + "}"
)
# Two dot products: round, rectify, times their heads' weights (a pair in one word), round.
TERM = tl.constexpr("{ .reg .b32 t; cvt.rn.relu.bf16x2.f32 t, $2, $1; mul.rn.bf16x2 $0, t, $3; }")


@triton.jit
def _word_and_channel(k, n):
    """Return which word column k of part n comes from, and which channel it is."""
    if INTERPRET:
        word, code = k, n + k * 0
    else:
        word, code = (k // 2) * 2 + n // 4, n % 4 + 4 * (k % 2)
    return word, word * 8 + code


@triton.jit
def _finite(x, limit):
    """Return float32 x with NaN as 0 and the rest within +-limit."""
    wide = x.to(tl.float32)
    return tl.where(wide == wide, tl.minimum(tl.maximum(wide, -limit), limit), 0.0)


@triton.jit
def load_weights(w_ptr, row, mask, h, HEADS: tl.constexpr):
    """Return the bits of bfloat16 weights of heads h, int32 [rows, heads]."""
    w = tl.load(
        w_ptr + row.to(tl.int64)[:, None] * HEADS + h[None, :],
        mask=mask[:, None] & (h < HEADS)[None, :],
        other=0.0,
    )
    return (_finite(w, 65536.0).to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def load_queries(
    q_ptr, row, mask, n: tl.constexpr,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, HEAD_PAD: tl.constexpr, WORDS: tl.constexpr,
    WORD_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return channels [WORD_PAD, ROWS * HEAD_PAD] of queries that meet part n of unpacked words.

    They carry 2^32, since unpacked keys carry 2^-32.
    """
    if n < 0:  # all parts: the channel order of eight of them joined
        flat = tl.arange(0, WORD_PAD * 8)
        k = flat // 8
        word, channel = _word_and_channel(k, (flat >> 2 & 1) | (flat & 2) | (flat << 2 & 4))
    else:
        k = tl.arange(0, WORD_PAD)
        word, channel = _word_and_channel(k, n)
    h = tl.arange(0, HEAD_PAD)
    at = row.to(tl.int64)[None, :, None] * (HEADS * CHANNELS) + h[None, None, :] * CHANNELS
    x = tl.load(
        q_ptr + at + channel[:, None, None],
        mask=mask[None, :, None] & (h < HEADS)[None, None, :] & (word < WORDS)[:, None, None],
        other=0.0,
    )
    # A bfloat16 times a power of two is one: truncation is no harm.
    wide = (_finite(x, 1.152921504606847e18) * 4294967296.0).to(tl.bfloat16)
    return tl.reshape(wide, [x.shape[0], ROWS * HEAD_PAD])


@triton.jit
def unpack_keys(words, scale_byte, KEYS: tl.constexpr, WORD_PAD: tl.constexpr):
    """Return 8 bfloat16 parts [KEYS, WORD_PAD] of words of codes, times their scales and 2^-32."""
    if INTERPRET:
        scale = ue8m0_value(tl.minimum(scale_byte, 160)) * 2.3283064365386963e-10
        scale = tl.broadcast_to(scale[:, :, None], [KEYS, WORD_PAD // 4, 4])
        scale = tl.reshape(scale, [KEYS, WORD_PAD])
        return (
            (e2m1_value(words & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 4) & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 8) & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 12) & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 16) & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 20) & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 24) & 15) * scale).to(tl.bfloat16),
            (e2m1_value((words >> 28) & 15) * scale).to(tl.bfloat16),
        )
    else:
        # A pair of bfloat16 2^126 * 2^(e - 127) * 2^-32: right for scales of 2^-94 to 2^33.
        power = (tl.minimum(scale_byte.to(tl.int32), 160) + 94) * 0x00800080
        power = tl.broadcast_to(power[:, :, None], [KEYS, WORD_PAD // 4, 4])
        power = tl.reshape(power, [KEYS, WORD_PAD])
        return tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [words, power],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip


@triton.jit
def weighted_terms(dots, weight):
    """Return bfloat16(weight * relu(bfloat16(dots))); weight holds bits of a pair of columns."""
    if INTERPRET:
        even = (tl.arange(0, dots.shape[1]) % 2 == 0)[None, :]
        own = tl.where(even, weight << 16, (weight >> 16) << 16).to(tl.float32, bitcast=True)
        return as_bf16(tl.maximum(round_bf16(dots), 0.0) * own)
    else:
        return tl.inline_asm_elementwise(
            TERM, "=r,r,r,r,r", [dots, weight], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def ordered_keys(score):
    """Return int32 keys 0x80 .. 0xFF7F of finite float32 scores, rounded to bfloat16."""
    bits = round_bf16(score + 0.0).to(tl.int32, bitcast=True) >> 16  # minus zero becomes zero
    return (bits ^ ((bits >> 31) | 0x8000)) & 0xFFFF
