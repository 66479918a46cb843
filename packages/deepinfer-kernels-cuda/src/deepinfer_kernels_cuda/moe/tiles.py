"""What the grouped products share: which tile a program has, and the activation between them."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.kernel_math import as_bf16, round_bf16
from deepinfer_kernels_cuda.quant.activations import fp8_groups_wide

__all__ = ["activate", "clamped_product", "tile_of"]


@triton.jit
def tile_of(program, num_tiles, num_out_tiles, GROUP: tl.constexpr):
    """Return (row tile, out tile) of a program: GROUP row tiles share weights in turn."""
    group = program // (GROUP * num_out_tiles)
    inside = program % (GROUP * num_out_tiles)
    size = tl.minimum(num_tiles - group * GROUP, GROUP)
    return group * GROUP + inside % size, inside // size


@triton.jit
def clamped_product(gate, up, limit):
    """Return `silu(min(gate, limit)) * clip(up, +-limit)`, float32; a NaN stays one."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    # The division is approximate, 2 ulp of float32: an exact one is a third of the work here.
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def activate(gate, up, weight, limit, ROUND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return the input of the second product, [BN, BM] bfloat16.

    gate, up [BM, BN] float32 sums; weight [BN]. ROUND rounds it to fp8.
    """
    value = clamped_product(round_bf16(gate), round_bf16(up), limit) * weight[None, :]
    rows = tl.trans(value)
    if ROUND:
        groups = tl.reshape(round_bf16(rows), (BN * BM // 32, 32))
        return tl.reshape(fp8_groups_wide(groups), (BN, BM))
    else:
        return as_bf16(rows)
