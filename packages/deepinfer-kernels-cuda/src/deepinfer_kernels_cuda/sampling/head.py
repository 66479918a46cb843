"""The head of a row: its best tokens, among which top-k, top-p and min-p end.

Two passes follow the first one for rows that are cut; nothing is sorted.

    cut      a bound on values, from the maxima of groups: groups that reach it are as many as top-k
             keeps, or have the mass that top-p asks for, or reach down to what min-p drops;
             and the list of these groups
    collect  the tokens that reach the bound, in any order; other groups are not read

A row whose head would be too large gets a bound that keeps it small; the head then may not hold
the border, and `whole` ends the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.sampling.scan import (
    GROUPS,
    Scanned,
    cut_arguments,
    cut_flags,
    exp_of,
    is_cut,
    merge_mass,
    merge_row,
    scaled,
)
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["Head", "collect"]

_NO_LOGIT = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))
_LISTED = 32  # groups that a program reads at a time
_MOST_HALVINGS = tl.constexpr(40)


@dataclass(frozen=True, slots=True)
class Head:
    """Tokens that reach a row's bound.

    Attributes:
        bound: [N] float32; +inf where the row has no head, -inf where all its tokens are in it.
        peak: [N] float32. total: [N] float64, mass of the row, where top-p needs it.
        count: [N] int32, tokens that reach the bound; those beyond the room are not held.
        values: [N, room] float32, scaled. ids: [N, room] int32.
    """

    bound: Tensor
    peak: Tensor
    total: Tensor
    count: Tensor
    values: Tensor
    ids: Tensor


def collect(found: Scanned, inputs: SampleInputs) -> Head:
    """Find the heads of rows that are cut; `found` has the maxima of groups."""
    (num_rows, vocab_size), tiles = found.values.shape, found.tiles
    assert found.group_max is not None

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=found.values.device)

    head = Head(
        bound=empty(torch.float32),
        peak=empty(torch.float32),
        total=empty(torch.float64),
        count=empty(torch.int32),
        values=empty(torch.float32, tiles.size),
        ids=empty(torch.int32, tiles.size),
    )
    blank, groups = found.raw_max, empty(torch.int32, found.group_max.shape[1])
    num_groups = empty(torch.int32)
    _cut[(num_rows,)](
        inputs.temperature,
        inputs.temperature.stride(0),
        *cut_arguments(inputs.top_k, inputs.top_p, inputs.min_p, blank),
        found.raw_max,
        found.value_max,
        found.value_id,
        found.group_max,
        blank if found.mass is None else found.mass,
        head.bound,
        head.peak,
        head.total,
        head.count,
        groups,
        num_groups,
        vocab_size,
        tiles.count,
        tiles.wanted,
        TILES=tiles.padded,
        **cut_flags(inputs.top_k, inputs.top_p, inputs.min_p),
        num_warps=8,
        enable_fp_fusion=False,
    )
    readers = max(1, tiles.size // 256)  # programs that share a row's groups
    _collect[(num_rows * readers,)](
        inputs.temperature,
        inputs.temperature.stride(0),
        found.values,
        head.bound,
        head.peak,
        groups,
        num_groups,
        head.count,
        head.values,
        head.ids,
        vocab_size,
        groups.shape[1],
        ROOM=tiles.size,
        MEMBERS=tiles.size // GROUPS.value,
        LISTED=_LISTED,
        READERS=readers,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return head


@triton.jit
def _cut(
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
    bound_ptr,
    peak_ptr,
    total_ptr,
    count_ptr,
    groups_ptr,
    num_groups_ptr,
    vocab_size,
    num_tiles,
    wanted,
    TILES: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, _, broken = merge_row(row, num_tiles, raw_max_ptr, value_max_ptr, value_id_ptr, TILES)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
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
    tl.store(count_ptr + row, 0)
    tl.store(peak_ptr + row, peak)
    bound, listed = tl.full((), _INFINITY, tl.float32), tl.full((), 0, tl.int32)
    if cut & (temperature > 0) & (broken == 0):
        i = tl.arange(0, TILES * GROUPS)
        here = i < num_tiles * GROUPS
        groups_ptr += row * num_tiles * GROUPS
        top = tl.load(group_max_ptr + row * num_tiles * GROUPS + i, mask=here, other=_NO_LOGIT)
        v = scaled(top, peak, temperature)
        weight = exp_of(v)
        need, share = tl.where(k > 0, k, wanted), tl.full((), _INFINITY, tl.float32)
        if HAS_TOP_P:  # noqa: SIM102 (known when compiled)
            if (p < 1.0) & (k == 0):
                total = merge_mass(
                    row, num_tiles, peak, temperature, value_max_ptr, mass_ptr, TILES
                )
                tl.store(total_ptr + row, total)
                share = total.to(tl.float32) * p * 1.0001
        # The largest bound that enough groups reach, or some more than are needed. If all of them
        # are too few, the head takes in every token.
        upto, over = tl.sum((top > _NO_LOGIT).to(tl.int32), 0), tl.full((), 0, tl.int32)
        enough = upto >= need
        if HAS_TOP_P:
            enough = enough | (tl.sum(weight, 0) >= share)
        bound, high = tl.min(tl.where(top > _NO_LOGIT, top, peak), 0), peak
        bound = tl.where(enough, bound, _NO_LOGIT)
        steps = tl.where(enough, 0, _MOST_HALVINGS)
        while (upto - over > (upto >> 2) + 8) & (steps < _MOST_HALVINGS):
            middle = bound * 0.5 + high * 0.5
            reach = top >= middle
            seen = tl.sum(reach.to(tl.int32), 0)
            enough = seen >= need
            if HAS_TOP_P:
                enough = enough | (tl.sum(tl.where(reach, weight, 0.0), 0) >= share)
            bound = tl.where(enough, middle, bound)
            upto = tl.where(enough, seen, upto)
            high = tl.where(enough, high, middle)
            over = tl.where(enough, over, seen)
            steps += 1
        if HAS_MIN_P:  # noqa: SIM102 (known when compiled)
            # Among groups that min-p drops altogether, the best one is a bound too.
            if (low > 0.0) & (k == 0):
                dropped = tl.max(tl.where(weight < low, top, _NO_LOGIT), 0)
                bound = tl.where(p < 1.0, tl.maximum(dropped, bound), dropped)
        read = (v >= scaled(bound, peak, temperature)) & (top > _NO_LOGIT)
        place = tl.cumsum(read.to(tl.int32), 0) - 1
        tl.store(groups_ptr + place, i, mask=read)
        listed = tl.sum(read.to(tl.int32), 0)
    tl.store(bound_ptr + row, bound)
    tl.store(num_groups_ptr + row, listed)


@triton.jit
def _collect(
    temperature_ptr,
    temperature_stride,
    values_ptr,
    bound_ptr,
    peak_ptr,
    groups_ptr,
    num_groups_ptr,
    count_ptr,
    head_values_ptr,
    head_ids_ptr,
    vocab_size,
    most_groups,
    ROOM: tl.constexpr,
    MEMBERS: tl.constexpr,
    LISTED: tl.constexpr,
    READERS: tl.constexpr,
):
    pid = tl.program_id(0)
    row, reader = (pid // READERS).to(tl.int64), pid % READERS
    listed = tl.load(num_groups_ptr + row)
    if reader * LISTED < listed:
        peak = tl.load(peak_ptr + row)
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        least = scaled(tl.load(bound_ptr + row), peak, temperature)
        member = tl.arange(0, MEMBERS)
        for begin in range(reader * LISTED, listed, READERS * LISTED):
            i = begin + tl.arange(0, LISTED)
            group = tl.load(groups_ptr + row * most_groups + i, mask=i < listed, other=0)
            token = group[:, None] * MEMBERS + member[None, :]
            x = tl.load(
                values_ptr + row * vocab_size + token,
                mask=(i < listed)[:, None] & (token < vocab_size),
                other=_NO_LOGIT,
            )
            v = scaled(x, peak, temperature)
            keep = (v >= least) & (x > _NO_LOGIT)
            within = tl.cumsum(keep.to(tl.int32), 1)
            sizes = tl.sum(keep.to(tl.int32), 1)
            before = tl.cumsum(sizes, 0) - sizes
            first = tl.atomic_add(count_ptr + row, tl.sum(sizes, 0))
            slot = first + before[:, None] + within - 1
            keep = keep & (slot < ROOM)
            tl.store(head_values_ptr + row * ROOM + slot, v, mask=keep)
            tl.store(head_ids_ptr + row * ROOM + slot, token, mask=keep)
