"""The distribution that `sample` draws from."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.sampling.choose import choose
from deepinfer_kernels_cuda.sampling.head import collect
from deepinfer_kernels_cuda.sampling.inputs import check_inputs
from deepinfer_kernels_cuda.sampling.scan import (
    ALL_MASSES,
    exp_of,
    merge_row,
    quotient,
    scaled,
    scan,
)
from deepinfer_kernels_cuda.sampling.search import ranked
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["probabilities"]

_NO_LOGIT = tl.constexpr(float("-inf"))


def probabilities(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """Return the distribution that `sample` draws from.

    Args:
        logits: [N, V] float32, V up to 2^18. Not modified.
        inputs: settings of each row, strided as `sample` takes them; noise plays no part.
    Returns:
        [N, V] float32; one token has it all where the temperature is 0, none has any where `sample`
        gives status 1. Deterministic, and rows do not affect one another.
    Raises:
        KernelInputError: as `sample`.
    Source: reference.sampling.probabilities.
    """
    logits, inputs = check_inputs(logits, inputs)
    num_rows, vocab_size = logits.shape
    out = torch.empty_like(logits)
    if num_rows == 0:
        return out
    cuts = not (inputs.top_k is None and inputs.top_p is None and inputs.min_p is None)
    found = scan(logits, inputs, filters=True, groups=cuts, masses=ALL_MASSES)
    ends = choose(found, collect(found, inputs) if cuts else None, inputs, None, None)
    min_p = inputs.min_p
    _spread[(num_rows * found.tiles.count,)](
        found.values,
        inputs.temperature,
        inputs.temperature.stride(0),
        found.raw_max if min_p is None else min_p,
        0 if min_p is None else min_p.stride(0),
        found.raw_max,
        found.value_max,
        found.value_id,
        ends.limit,
        ends.mass,
        out,
        vocab_size,
        found.tiles.count,
        TILE=found.tiles.size,
        TILES=found.tiles.padded,
        HAS_MIN_P=min_p is not None,
        num_warps=found.tiles.num_warps,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _spread(
    values_ptr,
    temperature_ptr,
    temperature_stride,
    min_p_ptr,
    min_p_stride,
    raw_max_ptr,
    value_max_ptr,
    value_id_ptr,
    limit_ptr,
    kept_mass_ptr,
    out_ptr,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    pid = tl.program_id(0)
    row, tile = (pid // num_tiles).to(tl.int64), pid % num_tiles
    peak, best, broken = merge_row(row, num_tiles, raw_max_ptr, value_max_ptr, value_id_ptr, TILES)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab_size
    if (temperature > 0) & (broken == 0):
        x = tl.load(values_ptr + row * vocab_size + token, mask=inside, other=_NO_LOGIT)
        v = scaled(x, peak, temperature)
        weight = exp_of(v)
        kept = ranked(v, token) <= tl.load(limit_ptr + row)
        if HAS_MIN_P:
            low = tl.minimum(tl.load(min_p_ptr + row * min_p_stride), 1.0)  # the best one stays
            kept = kept & (weight >= low)
        mass = tl.load(kept_mass_ptr + row).to(tl.float32)
        share = quotient(tl.where(kept, weight, 0.0), mass)
        tl.store(out_ptr + row * vocab_size + token, share, mask=inside)
    else:
        sure = tl.where((token == best) & (broken == 0), 1.0, 0.0)
        tl.store(out_ptr + row * vocab_size + token, sure, mask=inside)
