"""The end of rows: of those that are cut, by their heads or as a whole, and of all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.sampling.draw import (
    Drawn,
    draw_arguments,
    draw_key,
    merge_draw,
)
from deepinfer_kernels_cuda.sampling.head import Head
from deepinfer_kernels_cuda.sampling.inputs import Sampled
from deepinfer_kernels_cuda.sampling.noise import gumbel_of
from deepinfer_kernels_cuda.sampling.scan import (
    MASS_UNIT,
    NOBODY,
    Scanned,
    cut_arguments,
    cut_flags,
    exp_of,
    is_cut,
    mass_of,
    merge_mass,
    merge_row,
    scaled,
)
from deepinfer_kernels_cuda.sampling.search import (
    LAST_RANK,
    find_border,
    ranked,
    reaches,
)
from deepinfer_kernels_cuda.sampling.whole import end_whole_rows
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["Ends", "choose"]

_NO_LOGIT = tl.constexpr(float("-inf"))
# Tokens of heads that most rows have. H200, 128 rows with heads of about 50 tokens: 7 us.
_SMALL = 1024


@dataclass(frozen=True, slots=True)
class Ends:
    """Where rows end.

    Attributes:
        limit: [N] int64, rank of the last token that top-k and top-p keep.
        mass: [N] float64, what is kept, min-p applied.
        open: [N] int32: 1 for rows whose end is still to be found.
    """

    limit: Tensor
    mass: Tensor
    open: Tensor


def choose(
    found: Scanned,
    head: Head | None,
    inputs: SampleInputs,
    drawn: Drawn | None,
    sampled: Sampled | None,
) -> Ends:
    """End what `scan`, `collect` and `draw` began.

    Args:
        head: None where no filter cuts any row.
        drawn, sampled: tokens and status are written to `sampled`; both None: only ends are found.
    """
    num_rows, vocab_size = found.values.shape
    blank = found.raw_max
    ends = Ends(
        torch.empty(num_rows, dtype=torch.int64, device=blank.device),
        torch.empty(num_rows, dtype=torch.float64, device=blank.device),
        torch.empty(num_rows, dtype=torch.int32, device=blank.device),
    )
    _choose[(num_rows,)](
        *draw_arguments(inputs, blank),
        *cut_arguments(inputs.top_k, inputs.top_p, inputs.min_p, blank),
        found.raw_max,
        found.value_max,
        found.value_id,
        blank if found.mass is None else found.mass,
        blank if drawn is None else drawn.values,
        blank if drawn is None else drawn.ids,
        blank if head is None else head.bound,
        blank if head is None else head.total,
        blank if head is None else head.count,
        blank if head is None else head.values,
        blank if head is None else head.ids,
        blank if sampled is None else sampled.token_ids,
        blank if sampled is None else sampled.status,
        ends.limit,
        ends.mass,
        ends.open,
        vocab_size,
        found.tiles.count,
        0 if drawn is None else drawn.parts,
        TILE=found.tiles.size,
        TILES=found.tiles.padded,
        PARTS=1 if drawn is None else drawn.padded,
        SMALL=min(_SMALL, found.tiles.size // 2),
        HAS_CYCLE=inputs.cycle is not None,
        **cut_flags(inputs.top_k, inputs.top_p, inputs.min_p),
        DRAW=sampled is not None,
        num_warps=1 if head is None else 8,
        enable_fp_fusion=False,
    )
    if head is not None:
        end_whole_rows(found, head, inputs, ends.limit, ends.mass, ends.open, sampled)
    return ends


@triton.jit
def _by_head(
    head_values_ptr, head_ids_ptr, count, k, p, low, total, least, complete, position, key, cycle,
    k0, k1, ROOM: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Return whether the head holds the border, the border, the mass kept, and the token drawn."""
    i = tl.arange(0, ROOM)
    here = i < count
    v = tl.load(head_values_ptr + i, mask=here, other=_NO_LOGIT)
    ids = tl.load(head_ids_ptr + i, mask=here, other=0)
    rank = tl.where(here, ranked(v, ids), LAST_RANK + 1)
    weight = exp_of(v)
    mass = tl.where(here, mass_of(weight), 0)
    held = tl.sum(mass, 0)
    by_mass = (p < 1.0) & reaches(held, total, p)
    by_weight = (low > 0.0) & (exp_of(least) < low)
    holds = (count <= ROOM) & (complete | tl.where(k > 0, k <= count, by_mass | by_weight))
    limit, token = tl.full((), LAST_RANK, tl.int64), tl.full((), 0, tl.int32)
    kept_mass = tl.full((), 0.0, tl.float64)
    if holds:
        high = tl.max(tl.where(here, rank, 0), 0)
        limit = find_border(
            rank,
            mass,
            k,
            p,
            total,
            count,
            high,
            head_values_ptr,
            ROOM,
            0.0,
            1.0,
            ROOM,
            False,
        )
        kept = (rank <= limit) & (weight >= low)
        kept_mass = tl.sum(tl.where(kept, mass, 0), 0).to(tl.float64) * MASS_UNIT
        if DRAW:
            noisy = v + gumbel_of(ids, position, key, cycle, k0, k1)
            noisy = tl.where(kept, noisy, _NO_LOGIT)
            most = tl.max(noisy, 0)
            token = tl.min(tl.where(kept & (noisy == most), ids, NOBODY), 0)
    return holds, limit, kept_mass, token


@triton.jit
def _choose(
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    cycle_ptr,
    temperature_stride,
    seeds_stride,
    positions_stride,
    cycle_stride,
    stream,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    raw_max_ptr,
    value_max_ptr,
    value_id_ptr,
    mass_ptr,
    drawn_ptr,
    drawn_id_ptr,
    bound_ptr,
    total_ptr,
    count_ptr,
    head_values_ptr,
    head_ids_ptr,
    token_ptr,
    status_ptr,
    limit_ptr,
    kept_mass_ptr,
    open_ptr,
    vocab_size,
    num_tiles,
    parts,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    SMALL: tl.constexpr,
    HAS_CYCLE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    DRAW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, token, broken = merge_row(row, num_tiles, raw_max_ptr, value_max_ptr, value_id_ptr, TILES)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    sampled = (temperature > 0) & (broken == 0)
    k, p, low, cut = is_cut(
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
    limit, kept_mass = tl.full((), LAST_RANK, tl.int64), tl.full((), 0.0, tl.float64)
    unfinished = tl.full((), 0, tl.int32)
    if HAS_TOP_K or HAS_TOP_P or HAS_MIN_P:  # noqa: SIM102 (known when compiled)
        if sampled & cut:
            position, key, cycle, k0, k1 = draw_key(
                row,
                seeds_ptr,
                positions_ptr,
                cycle_ptr,
                seeds_stride,
                positions_stride,
                cycle_stride,
                stream,
                HAS_CYCLE,
            )
            count = tl.load(count_ptr + row)
            bound = tl.load(bound_ptr + row)
            least, complete = scaled(bound, peak, temperature), bound == _NO_LOGIT
            total = tl.full((), 1.0, tl.float64)
            if (p < 1.0) & (k == 0):
                total = tl.load(total_ptr + row)
            head_values_ptr += row * TILE
            head_ids_ptr += row * TILE
            if count <= SMALL:
                holds, limit, kept_mass, token = _by_head(
                    head_values_ptr, head_ids_ptr, count, k, p, low, total, least, complete,
                    position, key, cycle, k0, k1, SMALL, DRAW,
                )  # fmt: skip
            else:
                holds, limit, kept_mass, token = _by_head(
                    head_values_ptr, head_ids_ptr, count, k, p, low, total, least, complete,
                    position, key, cycle, k0, k1, TILE, DRAW,
                )  # fmt: skip
            unfinished = tl.where(holds, 0, 1)
    if sampled & (cut == 0):
        if DRAW:
            token = merge_draw(row, parts, drawn_ptr, drawn_id_ptr, PARTS)
        else:
            kept_mass = merge_mass(
                row, num_tiles, peak, temperature, value_max_ptr, mass_ptr, TILES
            )
    if DRAW:
        tl.store(token_ptr + row, tl.where(broken, 0, token).to(tl.int64))
        tl.store(status_ptr + row, broken.to(tl.int32))
    else:
        tl.store(limit_ptr + row, limit)
        tl.store(kept_mass_ptr + row, kept_mass)
    tl.store(open_ptr + row, unfinished)
