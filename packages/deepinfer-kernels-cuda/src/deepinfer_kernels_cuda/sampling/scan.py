"""The first pass over logits: filters of single logits, and what tiles of a row have to say.

A row is cut into tiles, one program each. What tiles leave is put together by `merge_row`, which
other kernels of this family begin with. Maxima are exact, so no order of work shows in them.

    values  logits after mask, bias and penalties; kept where they are not the logits themselves
    peak    a row's largest value; one that is not finite makes the row broken
    groups  64 of a tile; their maxima tell where the best tokens are
    mass    the sum of exp((value - m) / temperature) over a tile, m the tile's own maximum: of
            four at a time in float32, of these sums in float64, always in the same order
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.kernel_math import INTERPRET
from deepinfer_kernels_cuda.sampling.inputs import Tiles
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = [
    "ALL_MASSES",
    "CUT_MASSES",
    "GROUPS",
    "MASS_UNIT",
    "NOBODY",
    "NO_MASSES",
    "Scanned",
    "cut_arguments",
    "cut_flags",
    "exp_of",
    "is_cut",
    "mass_of",
    "merge_mass",
    "merge_row",
    "quotient",
    "scaled",
    "scan",
]

GROUPS = tl.constexpr(64)  # of a tile
NOBODY = tl.constexpr(0x7FFFFFFF)  # above any token id
MASS_UNIT = tl.constexpr(2.0**-44)
NO_MASSES, CUT_MASSES, ALL_MASSES = 0, 1, 2

_SUMMED = tl.constexpr(4)
_MASS_SCALE = tl.constexpr(2.0**44)
_NO_LOGIT = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))


@dataclass(frozen=True, slots=True)
class Scanned:
    """What the first pass leaves, and how its rows are cut.

    Attributes:
        values: [N, V] float32: the logits themselves where no filter changes them.
        raw_max, value_max: [N, tiles] float32 before and after filters; +inf stands for NaN too.
        value_id: [N, tiles] int32, lowest id of a tile's maximum.
        group_max: [N, tiles * 64] float32, or None.
        mass: [N, tiles] float64, of rows that were asked for, or None.
    """

    tiles: Tiles
    values: Tensor
    raw_max: Tensor
    value_max: Tensor
    value_id: Tensor
    group_max: Tensor | None
    mass: Tensor | None


def scan(
    logits: Tensor, inputs: SampleInputs, *, filters: bool, groups: bool, masses: int
) -> Scanned:
    """Run the first pass over logits [N, V] float32, N of at least 1.

    Args:
        filters: apply mask, bias and penalties.
        groups: leave the maxima of groups.
        masses: NO_MASSES, ALL_MASSES of sampled rows, or CUT_MASSES, of those that top-p cuts and
            top-k does not.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    tiles = Tiles.of(vocab_size)
    mask, bias, penalties = inputs.mask, inputs.bias, inputs.penalties
    if not filters:
        mask = bias = penalties = None
    filtered = not (mask is None and bias is None and penalties is None)

    def each(dtype: torch.dtype, width: int = 1) -> Tensor:
        return torch.empty(num_rows, tiles.count * width, dtype=dtype, device=device)

    found = Scanned(
        tiles=tiles,
        values=torch.empty_like(logits) if filtered else logits,
        raw_max=each(torch.float32),
        value_max=each(torch.float32),
        value_id=each(torch.int32),
        group_max=each(torch.float32, GROUPS.value) if groups else None,
        mass=each(torch.float64) if masses else None,
    )
    cuts = (inputs.top_k, inputs.top_p, inputs.min_p) if masses == CUT_MASSES else (None,) * 3
    blank = found.raw_max
    _scan[(num_rows * tiles.count,)](
        logits,
        found.values,
        blank if mask is None else mask,
        blank if bias is None else bias,
        blank if penalties is None else penalties,
        blank if inputs.prompt_seen is None else inputs.prompt_seen,
        blank if inputs.output_counts is None else inputs.output_counts,
        inputs.temperature,
        inputs.temperature.stride(0),
        *cut_arguments(*cuts, blank),
        found.raw_max,
        found.value_max,
        found.value_id,
        blank if found.group_max is None else found.group_max,
        blank if found.mass is None else found.mass,
        vocab_size,
        tiles.count,
        0 if mask is None else mask.stride(0),
        0 if penalties is None else penalties.stride(0),
        TILE=tiles.size,
        HAS_MASK=mask is not None,
        HAS_BIAS=bias is not None,
        HAS_PENALTIES=penalties is not None,
        **cut_flags(*cuts),
        GROUP=groups,
        MASS=masses,
        num_warps=tiles.num_warps,
        enable_fp_fusion=False,
    )
    return found


def cut_arguments(
    top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, blank: Tensor
) -> tuple[Tensor | int, ...]:
    """Return the arguments from `top_k_ptr` to `min_p_stride`."""
    settings = (top_k, top_p, min_p)
    return (
        *(blank if each is None else each for each in settings),
        *(0 if each is None else each.stride(0) for each in settings),
    )


def cut_flags(top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> dict[str, bool]:
    """Return what kernels know of the cuts when they are compiled."""
    settings = {"HAS_TOP_K": top_k, "HAS_TOP_P": top_p, "HAS_MIN_P": min_p}
    return {name: each is not None for name, each in settings.items()}


@triton.jit
def quotient(d, divisor):
    """Return d / divisor, rounded to nearest, of finite d or -inf and one positive divisor.

    The reciprocal is the same for a whole row; one step of Newton's makes the quotient exact.
    """
    if INTERPRET:  # whose `fma` rounds twice
        return tl.div_rn(d, divisor)
    else:
        inverse = tl.minimum(tl.div_rn(1.0, divisor), 3.0e38)
        near = d * inverse
        rest = tl.fma(-near, divisor, d)
        exact = tl.fma(rest, inverse, near)
        return tl.where(near > _NO_LOGIT, exact, near)


@triton.jit
def scaled(x, peak, temperature):
    """Return (x - peak) / temperature, rounded twice; x may be -inf, never above the peak."""
    return quotient(x - peak, temperature)


@triton.jit
def is_cut(
    row,
    vocab_size,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    """Return top-k, top-p and min-p of a row, neutral where unused, and whether any is used."""
    k = tl.full((), 0, tl.int64)
    p, low = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
    if HAS_TOP_K:
        k = tl.load(top_k_ptr + row * top_k_stride)
        k = tl.where((k > 0) & (k < vocab_size), k, 0)
    if HAS_TOP_P:
        p = tl.load(top_p_ptr + row * top_p_stride)
    if HAS_MIN_P:
        low = tl.minimum(tl.load(min_p_ptr + row * min_p_stride), 1.0)  # the best one stays
    return k, p, low, (k > 0) | (p < 1.0) | (low > 0.0)


@triton.jit
def exp_of(v):
    """Return exp of float32 v <= 0 to two ulp, as far down as v goes."""
    if INTERPRET:
        return tl.exp(v)
    else:
        v = tl.maximum(v, -200.0)
        ln, low = 1.4426950216293335, 1.9259629911e-08  # 1 / ln 2 in two parts
        whole = v * ln
        rest = tl.fma(v, low, tl.fma(v, ln, -whole))
        power = tl.exp2(whole)
        return tl.fma(power, rest * 0.6931471805599453, power)


@triton.jit
def mass_of(weight):
    """Return probabilities relative to a maximum's, as integers of 2^-44."""
    return (weight * _MASS_SCALE).to(tl.int64)


@triton.jit
def _adjust(
    x,
    token,
    inside,
    row,
    tile,
    vocab_size,
    mask_ptr,
    bias_ptr,
    penalties_ptr,
    seen_ptr,
    counts_ptr,
    mask_stride,
    penalties_stride,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):
    """Apply what acts on single logits; each step is rounded on its own."""
    if HAS_MASK:
        SIZE: tl.constexpr = x.shape[0] * x.shape[1]
        number = tile * (SIZE // 32) + tl.arange(0, SIZE // 32)
        words = tl.load(
            mask_ptr + row * mask_stride + number, mask=number * 32 < vocab_size, other=0
        )
        bits = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        x = tl.where(tl.reshape(bits, (x.shape[0], x.shape[1])) != 0, x, _NO_LOGIT)
    if HAS_BIAS:
        x += tl.load(bias_ptr + row * vocab_size + token, mask=inside, other=0.0)
    if HAS_PENALTIES:
        repetition = tl.load(penalties_ptr + row * penalties_stride)
        frequency = tl.load(penalties_ptr + row * penalties_stride + 1)
        presence = tl.load(penalties_ptr + row * penalties_stride + 2)
        count = tl.load(counts_ptr + row * vocab_size + token, mask=inside, other=0)
        seen = tl.load(seen_ptr + row * vocab_size + token, mask=inside, other=0) != 0
        produced = count > 0
        repeated = tl.where(x > 0, quotient(x, repetition), x * repetition)
        x = tl.where(produced | seen, repeated, x)
        x = x - frequency * count.to(tl.float32)
        x = x - tl.where(produced, presence, 0.0)
    return x


@triton.jit
def _scan(
    logits_ptr,
    values_ptr,
    mask_ptr,
    bias_ptr,
    penalties_ptr,
    seen_ptr,
    counts_ptr,
    temperature_ptr,
    temperature_stride,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    raw_max_ptr,
    value_max_ptr,
    value_id_ptr,
    group_max_ptr,
    mass_ptr,
    vocab_size,
    num_tiles,
    mask_stride,
    penalties_stride,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    GROUP: tl.constexpr,
    MASS: tl.constexpr,
):
    pid = tl.program_id(0)
    row, tile = (pid // num_tiles).to(tl.int64), pid % num_tiles
    member = tl.arange(0, TILE // GROUPS)
    token = tile * TILE + tl.arange(0, GROUPS)[:, None] * (TILE // GROUPS) + member[None, :]
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + token, mask=inside, other=_NO_LOGIT)
    place = row * num_tiles + tile
    raw = _maximum(x)
    tl.store(raw_max_ptr + place, raw)
    if HAS_MASK or HAS_BIAS or HAS_PENALTIES:
        x = _adjust(
            x,
            token,
            inside,
            row,
            tile,
            vocab_size,
            mask_ptr,
            bias_ptr,
            penalties_ptr,
            seen_ptr,
            counts_ptr,
            mask_stride,
            penalties_stride,
            HAS_MASK,
            HAS_BIAS,
            HAS_PENALTIES,
        )
        x = tl.where(inside, x, _NO_LOGIT)
        tl.store(values_ptr + row * vocab_size + token, x, mask=inside)
        top = _maximum(x)
    else:
        top = raw
    best = tl.min(_flat(tl.where(x == top, token, NOBODY)), 0)
    tl.store(value_max_ptr + place, top)
    tl.store(value_id_ptr + place, best)
    if GROUP:
        tl.store(group_max_ptr + place * GROUPS + tl.arange(0, GROUPS), tl.max(x, 1))
    if MASS:
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        k, p, _, _ = is_cut(
            row,
            vocab_size,
            top_k_ptr,
            top_p_ptr,
            min_p_ptr,
            top_k_stride,
            top_p_stride,
            min_p_stride,
            HAS_TOP_K,
            HAS_TOP_P,
            HAS_MIN_P,
        )
        if (temperature > 0) & ((MASS == 2) | ((p < 1.0) & (k == 0))):
            mass = tl.full((), 0.0, tl.float64)
            if tl.abs(top) < _INFINITY:
                weight = exp_of(scaled(x, top, temperature))
                fours = tl.sum(tl.reshape(weight, (TILE // _SUMMED, _SUMMED)), 1)
                mass = tl.sum(fours.to(tl.float64), 0)
            tl.store(mass_ptr + place, mass)


@triton.jit
def _flat(x):
    """Return a tile in one dimension and any order."""
    return tl.reshape(x, (x.shape[0] * x.shape[1],), can_reorder=True)


@triton.jit
def _maximum(x):
    """Return the maximum of a tile; +inf where there is a NaN."""
    return tl.max(_flat(tl.where(x == x, x, _INFINITY)), 0)


@triton.jit
def merge_row(
    row,
    num_tiles,
    raw_max_ptr,
    value_max_ptr,
    value_id_ptr,
    TILES: tl.constexpr,
):
    """Return a row's peak, its lowest id, and whether the row is broken."""
    tile = tl.arange(0, TILES)
    here, place = tile < num_tiles, row * num_tiles + tile
    raw = tl.max(tl.load(raw_max_ptr + place, mask=here, other=_NO_LOGIT), 0)
    tops = tl.load(value_max_ptr + place, mask=here, other=_NO_LOGIT)
    peak = tl.max(tops, 0)
    ids = tl.load(value_id_ptr + place, mask=here, other=NOBODY)
    best = tl.min(tl.where(here & (tops == peak), ids, NOBODY), 0)
    return peak, best, (tl.abs(raw) == _INFINITY) | (tl.abs(peak) == _INFINITY)


@triton.jit
def merge_mass(row, num_tiles, peak, temperature, value_max_ptr, mass_ptr, TILES: tl.constexpr):
    """Return the sum of exp((value - peak) / temperature) over a row, float64."""
    tile = tl.arange(0, TILES)
    here, place = tile < num_tiles, row * num_tiles + tile
    tops = tl.load(value_max_ptr + place, mask=here, other=_NO_LOGIT)
    masses = tl.load(mass_ptr + place, mask=here, other=0.0)
    # one quotient, rounded as those of values are, so that equal values weigh the same
    factor = tl.exp(scaled(tops, peak, temperature).to(tl.float64))
    return tl.sum(tl.where(masses > 0, masses * factor, 0.0), 0)
