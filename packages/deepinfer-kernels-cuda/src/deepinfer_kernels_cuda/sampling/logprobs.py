"""Log-probabilities of raw logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor, check_value
from deepinfer_kernels_cuda.sampling.head import collect
from deepinfer_kernels_cuda.sampling.inputs import check_logits
from deepinfer_kernels_cuda.sampling.scan import ALL_MASSES, merge_mass, merge_row, scan
from deepinfer_kernels_cuda.sampling.search import ID_BITS, ID_MASK
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["logprobs"]

# Beyond so many alternatives one sort of all tokens is quicker than to pick them one by one.
_MOST_PICKED = 128
_SMALL = 256  # tokens of heads that most rows have

_NO_LOGIT = tl.constexpr(float("-inf"))
_NO_RANK = tl.constexpr((1 << 62) - 1)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of raw logits: of given tokens, and of the most likely ones.

    Four terms at a time are summed in float32, these sums in float64; logarithms are in float64,
    and results rounded once.

    Args:
        logits: [N, V] float32, V up to 2^18; rows that lie apart cost a copy. Not modified.
        token_ids: [N] int64, contiguous, from 0 to V - 1; others yield NaN.
        num_top: from 0 to V; known to the host.
    Returns:
        chosen [N] float32, ids [N, num_top] int64 and values [N, num_top] float32, by descending
        logit, the lower id first among equal ones. A row with a NaN or +inf, or without a finite
        logit, has NaN values and ids from 0 on. Rows do not affect one another.
    Raises:
        KernelInputError: a shape, dtype or device is not as above.
    Source: reference.sampling.logprobs.
    """
    num_rows, vocab_size = check_logits(logits)
    logits, device = logits.contiguous(), logits.device
    check_tensor("token_ids", token_ids, shape=(num_rows,), dtype=torch.int64, device=device)
    check_value(
        "num_top",
        num_top,
        0 <= num_top <= vocab_size,
        f"0 to {vocab_size} (all tokens)",
    )
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    values = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    if num_rows == 0:
        return chosen, ids, values
    listed = num_top > _MOST_PICKED or num_top == vocab_size
    if listed:
        broken = ~logits.amax(-1, keepdim=True).isfinite()
        ordered = logits.masked_fill(broken, 0.0).sort(dim=-1, descending=True, stable=True)
        ids = ordered.indices[:, :num_top].contiguous()
    picks = num_top > 0 and not listed
    ones = torch.ones(num_rows, dtype=torch.float32, device=device)
    top_k = torch.full_like(token_ids, num_top) if picks else None
    # what puts the best tokens of every row in its head; the first two play no part
    best = SampleInputs(token_ids, token_ids, ones, top_k)
    found = scan(logits, best, filters=False, groups=picks, masses=ALL_MASSES)
    head = collect(found, best) if picks else None
    _score[(num_rows,)](
        logits,
        token_ids,
        found.raw_max,
        found.value_max,
        found.value_id,
        found.mass,
        token_ids if head is None else head.count,
        token_ids if head is None else head.ids,
        chosen,
        ids,
        values,
        vocab_size,
        found.tiles.count,
        num_top,
        TILE=found.tiles.size,
        TILES=found.tiles.padded,
        SMALL=min(_SMALL, found.tiles.size // 2),
        PICK=picks,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return chosen, ids, values


@triton.jit
def _score(
    logits_ptr,
    token_ptr,
    raw_max_ptr,
    value_max_ptr,
    value_id_ptr,
    mass_ptr,
    count_ptr,
    head_ids_ptr,
    chosen_ptr,
    ids_ptr,
    best_ptr,
    vocab_size,
    num_tiles,
    num_top,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SMALL: tl.constexpr,
    PICK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, _, broken = merge_row(row, num_tiles, raw_max_ptr, value_max_ptr, value_id_ptr, TILES)
    logits_ptr += row * vocab_size
    total = merge_mass(row, num_tiles, peak, 1.0, value_max_ptr, mass_ptr, TILES)
    total = tl.where(broken, 1.0, total)
    base = tl.where(broken, float("nan"), peak).to(tl.float64) + tl.log(total)
    token = tl.load(token_ptr + row)
    legal = (token >= 0) & (token < vocab_size)
    logit = tl.load(logits_ptr + token, mask=legal, other=float("nan"))
    tl.store(chosen_ptr + row, (logit.to(tl.float64) - base).to(tl.float32))
    ids_ptr += row * num_top
    best_ptr += row * num_top
    if PICK:
        count = tl.load(count_ptr + row)
        if broken:
            for place in range(0, num_top):
                tl.store(ids_ptr + place, place)
                tl.store(best_ptr + place, float("nan"))
        elif (count <= TILE) & (count >= num_top):
            head_ids_ptr += row * TILE
            if count <= SMALL:
                _pick(head_ids_ptr, count, num_top, base, logits_ptr, ids_ptr, best_ptr, SMALL)
            else:
                _pick(head_ids_ptr, count, num_top, base, logits_ptr, ids_ptr, best_ptr, TILE)
        else:  # many are equal, or few are finite
            last = tl.full((), -1, tl.int64)
            for place in range(0, num_top):
                next_rank = tl.full((), _NO_RANK, tl.int64)
                for begin in range(0, vocab_size, TILE):
                    ids = begin + tl.arange(0, TILE)
                    inside = ids < vocab_size
                    x = tl.load(logits_ptr + ids, mask=inside, other=_NO_LOGIT)
                    rank = _order(x, ids)
                    rank = tl.where(inside & (rank > last), rank, _NO_RANK)
                    next_rank = tl.minimum(next_rank, tl.min(rank, 0))
                last = next_rank
                _store_pick(place, last, base, logits_ptr, ids_ptr, best_ptr)
    else:
        for place in range(0, num_top):
            token = tl.load(ids_ptr + place)
            value = tl.load(logits_ptr + token).to(tl.float64) - base
            tl.store(best_ptr + place, value.to(tl.float32))


@triton.jit
def _order(x, ids):
    """Return ranks, int64, of raw logits and their token ids: ascending as logits descend.

    Not by distance from the peak, as `ranked` does: where the peak is far, it rounds away what sets
    logits apart.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)  # 0 and -0 are equal
    # of numbers below zero, which follow as unsigned ones, larger bits are a lower number
    order = tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)
    return (order.to(tl.int64) << ID_BITS) | ids.to(tl.int64)


@triton.jit
def _pick(
    head_ids_ptr, count, num_top, base, logits_ptr, ids_ptr, best_ptr, ROOM: tl.constexpr
):  # fmt: skip
    """Store the best tokens of a head, one after another."""
    i = tl.arange(0, ROOM)
    here = i < count
    ids = tl.load(head_ids_ptr + i, mask=here, other=0)
    x = tl.load(logits_ptr + ids, mask=here, other=_NO_LOGIT)
    rank = tl.where(here, _order(x, ids), _NO_RANK)
    last = tl.full((), -1, tl.int64)
    for place in range(0, num_top):
        last = tl.min(tl.where(rank > last, rank, _NO_RANK), 0)
        _store_pick(place, last, base, logits_ptr, ids_ptr, best_ptr)


@triton.jit
def _store_pick(place, rank, base, logits_ptr, ids_ptr, best_ptr):
    token = rank & ID_MASK
    value = tl.load(logits_ptr + token).to(tl.float64) - base
    tl.store(ids_ptr + place, token)
    tl.store(best_ptr + place, value.to(tl.float32))
