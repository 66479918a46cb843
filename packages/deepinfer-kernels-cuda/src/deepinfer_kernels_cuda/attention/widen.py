"""Packed entries to bfloat16 tiles, as attention multiplies them.

A word stands for 8 channels: 4 bytes of a compressed entry, 8 bytes of a window entry, 16 bytes of
a bfloat16 vector. A tile of words [n, w] is widened to columns [n, 8 * w] in the order

    column k * w + j   channel k of word j

so that the two values of a 32-bit register, widened at once, stand side by side. Rows are loaded in
another order, which `row_of` tells: a warp's stores of columns then hit all banks of shared memory.

A code is moved to the place of bfloat16's exponent and mantissa, which makes it 2^120 (E4M3) or
2^126 (E2M1) times too small, subnormal codes included; products with a power of two and the scale
put that right, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import INTERPRET, as_bf16
from deepinfer_kernels_cuda.quant.entries import (
    COMPRESSED,
    WINDOW,
    decode_e2m1,
    decode_e4m3,
    scale_of_byte,
)

__all__ = [
    "PICK_SHIFT",
    "columns_of_pairs",
    "load_word",
    "pair_word",
    "pairs_of_columns",
    "row_of",
    "widen_picks",
    "widen_window",
]

# Widened compressed entries are 2^8 too small: a scale up to 448 times 2^126 would overflow.
PICK_SHIFT = tl.constexpr(8)
_EXP_118 = tl.constexpr(2.0**118)


def _e2m1_assembly() -> str:
    """Two words and their scale twice to 8 pairs of bfloat16."""
    lines = ["{", ".reg .b32 u, a, b;"]
    for byte in range(4):
        lines += [
            f"prmt.b32 u, $8, $9, 0x{4 + byte}{4 + byte}{byte}{byte};",  # the byte twice, of each
            "shl.b32 a, u, 6;",
            "and.b32 a, a, 0x01C001C0;",
            "shl.b32 b, u, 4;",
            "lop3.b32 a, b, 0x80008000, a, 0xEA;",  # (b & sign) | a
            f"mul.rn.bf16x2 ${2 * byte}, a, $10;",
            "shl.b32 a, u, 2;",
            "and.b32 a, a, 0x01C001C0;",
            "lop3.b32 a, u, 0x80008000, a, 0xEA;",
            f"mul.rn.bf16x2 ${2 * byte + 1}, a, $10;",
        ]
    return "\n".join([*lines, "}"])


def _e4m3_assembly() -> str:
    """Four bytes of two words and their scale twice to 4 pairs of bfloat16."""
    lines = ["{", ".reg .b32 t, a, up;", "mov.b32 up, 0x7B807B80;"]
    for byte in range(4):
        lines += [
            f"prmt.b32 t, $4, $5, 0x{4 + byte}{4 + byte}{byte}{byte};",
            "shr.u32 a, t, 4;",
            "and.b32 a, a, 0x07F007F0;",
            "lop3.b32 a, t, 0x80008000, a, 0xEA;",
            "mul.rn.bf16x2 a, a, up;",
            f"mul.rn.bf16x2 ${byte}, a, $6;",
        ]
    return "\n".join([*lines, "}"])


_E2M1_PAIRS = tl.constexpr(_e2m1_assembly())
_E4M3_PAIRS = tl.constexpr(_e4m3_assembly())
_E2M1_USES = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=r,r,r,r")
_E4M3_USES = tl.constexpr("=&r,=&r,=&r,=r,r,r,r")


@triton.jit
def load_word(base, index, mask, ALIGNED: tl.constexpr):
    """Return words (int32) `index` behind byte pointers; unaligned ones are put together."""
    if ALIGNED:
        word = tl.load(base.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
    else:
        byte = base + 4 * index
        word = tl.load(byte, mask=mask, other=0).to(tl.int32)
        word |= tl.load(byte + 1, mask=mask, other=0).to(tl.int32) << 8
        word |= tl.load(byte + 2, mask=mask, other=0).to(tl.int32) << 16
        word |= tl.load(byte + 3, mask=mask, other=0).to(tl.int32) << 24
    return word


@triton.jit
def _columns(t0, t1, t2, t3, t4, t5, t6, t7):
    """Return [n, 8 * w] of the tiles [n, w] of channels 0 .. 7 of words."""
    even = tl.join(tl.join(t0, t4), tl.join(t2, t6))
    odd = tl.join(tl.join(t1, t5), tl.join(t3, t7))
    both = tl.permute(tl.join(even, odd), [0, 2, 3, 4, 1])
    return tl.reshape(both, [t0.shape[0], 8 * t0.shape[1]])


@triton.jit
def columns_of_pairs(pair):
    """Return columns, bfloat16 [n, 8 * w], of pairs of bfloat16 (int32) [n, 4 * w]."""
    words = tl.reshape(pair, [pair.shape[0], pair.shape[1] // 4, 2, 2])
    even, odd = tl.split(words)
    k0, k2 = tl.split(even)
    k1, k3 = tl.split(odd)
    return _columns(
        _low(k0), _low(k0 >> 16), _low(k1), _low(k1 >> 16),
        _low(k2), _low(k2 >> 16), _low(k3), _low(k3 >> 16),
    )  # fmt: skip


@triton.jit
def _low(word):
    return word.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def pair_word(even, odd):
    """Return pairs (int32) of float32 values rounded to bfloat16."""
    low = as_bf16(even).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (as_bf16(odd).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pairs_of_columns(x):
    """Return pairs of bfloat16 (int32) [n, 4 * w] of columns, bfloat16 [n, 8 * w]."""
    N: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1] // 8
    words = tl.permute(tl.reshape(x, [N, 4, 2, W]), [0, 3, 1, 2])
    even, odd = tl.split(words)
    low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = odd.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return tl.reshape(low | high, [N, 4 * W])


@triton.jit
def _nibbles(word, scale, BYTE: tl.constexpr):
    even, odd = decode_e2m1(((word >> (8 * BYTE)) & 0xFF).to(tl.uint8), scale)
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def _bytes(word, scale, BYTE: tl.constexpr):
    return decode_e4m3(((word >> (8 * BYTE)) & 0xFF).to(tl.uint8), scale).to(tl.bfloat16)


@triton.jit
def widen_picks(word, scale_byte):
    """Return columns, bfloat16 [n, 8 * w], of compressed payload, divided by 2^`PICK_SHIFT`.

    Rows of the arguments are as `row_of` tells, those of the result in order.

    word: int32 [n, w]. scale_byte: E4M3 bytes (uint8) [n, w / 2].
    """
    N: tl.constexpr = word.shape[0]
    W: tl.constexpr = word.shape[1]
    scale = scale_of_byte(scale_byte, COMPRESSED)[:, :, None]
    words = tl.reshape(word, [N, W // 2, 2])
    if INTERPRET:
        scale = scale * 2.0**-PICK_SHIFT
        t0, t1 = _nibbles(words, scale, 0)
        t2, t3 = _nibbles(words, scale, 1)
        t4, t5 = _nibbles(words, scale, 2)
        t6, t7 = _nibbles(words, scale, 3)
    else:
        up = tl.broadcast_to((scale * _EXP_118).to(tl.bfloat16), words.shape)
        t0, t1, t2, t3, t4, t5, t6, t7 = tl.inline_asm_elementwise(
            _E2M1_PAIRS, _E2M1_USES, [words, up],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2,
        )  # fmt: skip
    return _ordered(
        _columns(
            tl.reshape(t0, [N, W]), tl.reshape(t1, [N, W]), tl.reshape(t2, [N, W]),
            tl.reshape(t3, [N, W]), tl.reshape(t4, [N, W]), tl.reshape(t5, [N, W]),
            tl.reshape(t6, [N, W]), tl.reshape(t7, [N, W]),
        )
    )  # fmt: skip


@triton.jit
def widen_window(low, high, scale_byte):
    """Return columns, bfloat16 [n, 8 * w], of window payload; rows as in `widen_picks`.

    low, high: int32 [n, w], bytes of channels 0-3 and 4-7. scale_byte: UE8M0 bytes (uint8)
    [n, w / 4].
    """
    N: tl.constexpr = low.shape[0]
    W: tl.constexpr = low.shape[1]
    low, high = tl.reshape(low, [N, W // 4, 4]), tl.reshape(high, [N, W // 4, 4])
    if INTERPRET:
        scale = scale_of_byte(scale_byte, WINDOW)[:, :, None]
        t0, t1 = _bytes(low, scale, 0), _bytes(low, scale, 1)
        t2, t3 = _bytes(low, scale, 2), _bytes(low, scale, 3)
        t4, t5 = _bytes(high, scale, 0), _bytes(high, scale, 1)
        t6, t7 = _bytes(high, scale, 2), _bytes(high, scale, 3)
    else:
        e = scale_byte.to(tl.int16)
        bits = tl.where(e == 0, 0x40, tl.where(e == 255, 0x7FC0, e << 7)).to(tl.int16)
        scale = tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True)[:, :, None], low.shape)
        t0, t1, t2, t3 = tl.inline_asm_elementwise(
            _E4M3_PAIRS, _E4M3_USES, [low, scale],
            dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
        t4, t5, t6, t7 = tl.inline_asm_elementwise(
            _E4M3_PAIRS, _E4M3_USES, [high, scale],
            dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
    return _ordered(
        _columns(
            tl.reshape(t0, [N, W]), tl.reshape(t1, [N, W]), tl.reshape(t2, [N, W]),
            tl.reshape(t3, [N, W]), tl.reshape(t4, [N, W]), tl.reshape(t5, [N, W]),
            tl.reshape(t6, [N, W]), tl.reshape(t7, [N, W]),
        )
    )  # fmt: skip


@triton.jit
def row_of(i):
    """Return which row is loaded in place i: bits 0 and 2 change places."""
    return (i & ~5) | ((i & 1) << 2) | ((i >> 2) & 1)


@triton.jit
def _ordered(x):
    """Return rows in order, of rows loaded as `row_of` tells."""
    N: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    swapped = tl.permute(tl.reshape(x, [N // 8, 2, 2, 2, C]), [0, 3, 2, 1, 4])
    return tl.reshape(swapped, [N, C])
