"""Noise that repeats: Philox4x32-10 words and the Gumbel noise made of them, inside kernels.

Every word is a function of (seed, position, stream, cycle, token id) alone: the key is the seed's
two words, the counter (token id // 4, position, stream, cycle), and a token takes word id % 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import INTERPRET

__all__ = ["MOST_NOISE", "gumbel", "gumbel_of", "philox_words"]

MOST_NOISE = tl.constexpr(16.7)  # above any Gumbel noise

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """Return four uint32 words of a counter and a key, uint32 each, scalars or tensors."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, _MULTIPLIER_0), c0 * _MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEP_0, k1 + _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def _log2(y):
    """Return the logarithm of normal positive float32 y; off by 2^-22 at most where y is near 1."""
    if INTERPRET:
        return tl.log2(y)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def gumbel(word):
    """Return -log(-log(u)) of words, float32, with u = ((word >> 9) + 0.5) / 2^23.

    u is exact and never 0 or 1: 23 bits behind the point of a number in [1, 2), less 1, plus half
    a step. -log(u) is right to an ulp even next to 1, where the largest noise comes from; the outer
    logarithm is off by 2e-7 at most, less than the rounding of what noise is added to.
    """
    above_one = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    u = (above_one - 1.0) + 5.9604644775390625e-08
    # u = 2^e * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2); log(1 + f) = f - f^2/2 + f^3 * q(f),
    # q fitted for the least relative error of the sum
    bits = u.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    q = tl.fma(f, 0.08700361102819443, -0.1426747590303421)
    q = tl.fma(q, f, 0.1491478681564331)
    q = tl.fma(q, f, -0.165775865316391)
    q = tl.fma(q, f, 0.19963061809539795)
    q = tl.fma(q, f, -0.2500133812427521)
    q = tl.fma(q, f, 0.3333390951156616)
    square = f * f
    rest = tl.fma(q * f, square, square * -0.5)
    log = tl.fma(e.to(tl.float32), 0.6931471805599453, f + rest)
    return _log2(-log) * -0.6931471805599453


@triton.jit
def gumbel_of(ids, position, stream, cycle, k0, k1):
    """Return the noise of token ids [n] int32, each by itself."""
    groups = (ids >> 2).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(groups, position, stream, cycle, k0, k1)
    odd, upper = (ids & 1) != 0, (ids & 2) != 0
    return gumbel(tl.where(upper, tl.where(odd, w3, w2), tl.where(odd, w1, w0)))
