"""Arithmetic that kernels share: number formats, rounding and products.

Everything here is written so that the interpreter on a CPU and a GPU give the same bits, but for
`dot`, `exp` and `log`, whose last bits differ between devices.

    UE8M0   a byte e that means 2^(e - 127); 255 is NaN
    E4M3    fp8: sign, 4 exponent bits, 3 mantissa bits, no infinity, largest 448
    E2M1    4-bit code: sign, then an index into 0, .5, 1, 1.5, 2, 3, 4, 6
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRET",
    "INVERSE_448",
    "as_bf16",
    "as_e4m3",
    "ceil_ue8m0",
    "dot",
    "e2m1_code",
    "e2m1_value",
    "e4m3_value",
    "round_bf16",
    "sigmoid",
    "ue8m0_value",
]

# Whether kernels run in Triton's interpreter. It is fixed when a kernel is decorated, and so here.
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

INVERSE_448 = tl.constexpr(0.002232142857142857)  # rounded to float32 before it multiplies


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), float32, with an exact division."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def round_bf16(x):
    """Return float32 x as it reads back from bfloat16 (nearest, ties to even), still float32."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def as_bf16(x):
    """Return float32 x as bfloat16, nearest, ties to even: the interpreter alone would truncate."""
    if INTERPRET:
        return round_bf16(x).to(tl.bfloat16)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def ceil_ue8m0(x):
    """Return the UE8M0 byte (int32) of the smallest power of two >= x, for normal positive x."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    return tl.minimum(exponent, 255)


@triton.jit
def ue8m0_value(exponent):
    """Return 2^(e - 127) of integer bytes e, float32; 255 gives NaN."""
    e = exponent.to(tl.int32)
    bits = tl.where(e == 0, 0x00400000, e << 23)
    bits = tl.where(e == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_byte(x):
    """Return the E4M3 byte of float32 |x| <= 448, nearest, ties to even; NaN gives 0x7F."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal results: drop 20 mantissa bits, move the exponent's bias from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9. Adding 2^14 leaves them in the last bits, rounded.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def as_e4m3(x):
    """Return float32 x as E4M3 (`tl.float8e4nv`), clamped to +-448, nearest, ties to even."""
    clamped = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
    if INTERPRET:
        return _e4m3_byte(clamped).to(tl.float8e4nv, bitcast=True)
    else:
        return clamped.to(tl.float8e4nv)


@triton.jit
def e4m3_value(x):
    """Return E4M3 values (`tl.float8e4nv`) as float32."""
    return x.to(tl.float32)


@triton.jit
def e2m1_code(x):
    """Return 4-bit codes (int32) of float32 x: nearest, ties to even, saturating, -0 kept."""
    a = tl.abs(x)
    code = (
        (a > 0.25).to(tl.int32)
        + (a >= 0.75).to(tl.int32)
        + (a > 1.25).to(tl.int32)
        + (a >= 1.75).to(tl.int32)
        + (a > 2.5).to(tl.int32)
        + (a >= 3.5).to(tl.int32)
        + (a > 5.0).to(tl.int32)
    )
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_value(code):
    """Return float32 values of 4-bit integer codes."""
    c = code.to(tl.int32)
    # Sign and exponent and mantissa moved to their float32 places: a value 2^126 times too small,
    # subnormal for codes 0 and 1 as it is in E2M1.
    bits = ((c & 8) << 28) | ((c & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def dot(a, b, acc):
    """Return `acc + a @ b`, summed in float32. fp8, bfloat16 or float32 operands.

    float32 operands are not rounded to tf32. The interpreter's bfloat16 product is wrong, so there
    operands are widened first.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
