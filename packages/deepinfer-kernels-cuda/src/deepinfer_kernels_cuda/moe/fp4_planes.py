"""FP4 words of `moe.prepare` as bfloat16."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import INTERPRET, as_bf16, ue8m0_value
from deepinfer_kernels_cuda.moe import prepare

__all__ = ["BLOCK", "PLANE", "scale_plane", "widen_block", "widen_words"]

PLANE = tl.constexpr(prepare.PLANE)
BLOCK = tl.constexpr(prepare.BLOCK)


@triton.jit
def _from_bits(bits):
    """Return bfloat16 bits (int32) as float32: the interpreter's own cast loses subnormals."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def widen_words(words):
    """Return the four planes of 16-bit words as bfloat16, 2^126 times too small.

    The interpreter, which has no inline assembly, makes the same values in float32.
    """
    if INTERPRET:
        w = words.to(tl.uint16, bitcast=True).to(tl.int32)
        p0 = w & 0x81C0
        p1 = (w << 3) & 0x81C0
        p2 = (w << 6) & 0x81C0
        p3 = ((w >> 4) & 0x00C0) | ((w >> 6) & 0x0100) | ((w << 2) & 0x8000)
        return _from_bits(p0), _from_bits(p1), _from_bits(p2), _from_bits(p3)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            and.b32 $0, $4, 0x81C081C0;
            shl.b32 t, $4, 3;
            and.b32 $1, t, 0x81C081C0;
            shl.b32 t, $4, 6;
            and.b32 $2, t, 0x81C081C0;
            shr.u32 t, $4, 4;
            and.b32 t, t, 0x00C000C0;
            shr.u32 u, $4, 6;
            lop3.b32 t, u, 0x01000100, t, 0xEA;
            shl.b32 u, $4, 2;
            lop3.b32 $3, u, 0x80008000, t, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def scale_plane(plane, scales, P: tl.constexpr, WIDE: tl.constexpr):
    """Return plane P [M, 32] times the scale of its group, byte P of words [M]; all exact."""
    if INTERPRET:
        exponent = ((scales >> (8 * P)) - 126) & 0xFF
        value = plane * 8.507059173023462e37  # 2^126
        return as_bf16(value * ue8m0_value(exponent)[:, None])
    elif WIDE:
        exponent = ((scales >> (8 * P)) - 126) & 0xFF
        bits = tl.where(exponent == 0, 0x40, exponent << 7)
        bits = tl.where(exponent == 255, 0x7FC0, bits).to(tl.uint16)
        return plane * 8.507059173023462e37 * bits.to(tl.bfloat16, bitcast=True)[:, None]
    else:
        # The byte is the biased exponent of 2^126 times the scale: into its place at once.
        bits = (scales << 7 if P == 0 else scales >> (8 * P - 7)) & 0x7F80
        return plane * bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def widen_block(words, scales, BM: tl.constexpr, WIDE: tl.constexpr):
    """Return words [BM, 32] of a block as bfloat16 [BM, 128], scaled; no value changes threads."""
    p0, p1, p2, p3 = widen_words(words)
    even = tl.join(scale_plane(p0, scales, 0, WIDE), scale_plane(p2, scales, 2, WIDE))
    odd = tl.join(scale_plane(p1, scales, 1, WIDE), scale_plane(p3, scales, 3, WIDE))
    planes = tl.permute(tl.join(even, odd), (0, 2, 3, 1))  # [row, half, plane of it, word]
    return tl.reshape(planes, (BM, BLOCK))
