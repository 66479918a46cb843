"""Table rows of hashed n-grams, from the history of folded ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.attention.window import is_newest
from deepinfer_kernels_cuda.checks import check_number, check_rows, check_tensor, check_value
from deepinfer_kernels_cuda.values import Rows

__all__ = ["engram_rows"]

ROWS_A_PROGRAM = 16


@triton.jit(do_not_specialize=["num_rows", "depth", "pad_id", "heads"])
def _hash_rows(
    folded_ptr,
    history_ptr,
    position_ptr,
    sequence_ptr,
    slot_ptr,
    first_ptr,
    multiplier_ptr,
    prime_ptr,
    out_ptr,
    num_rows,
    depth,
    pad_id,
    heads,
    GRAM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = tl.program_id(1)
    valid = row < num_rows
    position = tl.load(position_ptr + row, mask=valid, other=0)
    sequence = tl.load(sequence_ptr + row, mask=valid, other=-1)
    slot = tl.load(slot_ptr + row, mask=valid, other=0)
    token = tl.load(folded_ptr + row, mask=valid, other=-1)
    real = sequence >= 0
    # Rows of this sequence that came before this one in the step; none for padding.
    first = tl.load(first_ptr + sequence, mask=valid & real, other=0)
    age = tl.where(real, position - first, 0)

    column = tl.arange(0, BLOCK)
    used = column < COLUMNS
    prime = tl.load(prime_ptr + layer * COLUMNS + column, mask=used, other=1)
    offset = tl.cumsum(tl.where(used, prime, 0), axis=0) - prime

    alive = token >= 0
    multiplier = tl.load(multiplier_ptr + layer * GRAM)
    hashed = tl.where(alive, token, pad_id.to(tl.int64)) * multiplier
    chosen = tl.zeros((ROWS, BLOCK), tl.int64)
    for back in tl.static_range(1, GRAM):
        earlier = position - back
        here = age >= back  # that row is in this step
        recent = tl.load(folded_ptr + row - back, mask=valid & here & (row >= back), other=-1)
        place = slot * depth + tl.maximum(earlier, 0) % depth
        older = tl.load(history_ptr + place, mask=valid & real & ~here & (earlier >= 0), other=-1)
        token = tl.where(here, recent, older)
        # An image position and the start of the sequence end the look-back.
        alive = alive & (earlier >= 0) & (token >= 0)
        multiplier = tl.load(multiplier_ptr + layer * GRAM + back)
        hashed = hashed ^ (tl.where(alive, token, pad_id.to(tl.int64)) * multiplier)
        chosen = tl.where((column // heads == back - 1)[None, :], hashed[:, None], chosen)
    result = chosen % prime[None, :] + offset[None, :]
    place = (layer * num_rows.to(tl.int64) + row)[:, None] * COLUMNS + column[None, :]
    tl.store(out_ptr + place, result, mask=valid[:, None] & used[None, :])


@triton.jit(do_not_specialize=["num_rows", "depth"])
def _write_history(
    folded_ptr,
    history_ptr,
    position_ptr,
    sequence_ptr,
    slot_ptr,
    first_ptr,
    start_ptr,
    num_rows,
    depth,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    position = tl.load(position_ptr + row, mask=valid, other=0)
    sequence = tl.load(sequence_ptr + row, mask=valid, other=-1)
    real = valid & (sequence >= 0)
    last = is_newest(start_ptr, first_ptr, sequence, position, real, depth)
    slot = tl.load(slot_ptr + row, mask=valid, other=0)
    token = tl.load(folded_ptr + row, mask=valid, other=-1)
    tl.store(history_ptr + slot * depth + position % depth, token, mask=last)


def engram_rows(
    folded: Tensor,
    history: Tensor,
    rows: Rows,
    pad_id: int,
    multipliers: Tensor,
    primes: Tensor,
) -> Tensor:
    """Return the table rows of each row's n-grams, for all Engram layers at once.

    Ids 1 to n - 1 positions back come from this step's rows of the sequence and, before them, from
    `history` as it was before the step. From the start of the sequence and from an image position
    on, `pad_id` stands. The hash of k + 1 ids is the XOR of id times multiplier, in int64; column c
    takes it modulo its prime, plus the sum of the primes of the columns before.

    Args:
        folded: [B] int64, folded ids; -1 at image positions.
        history: [slots + 1, depth] int64, depth >= n - 1: folded id of position p at p % depth.
            Changed: the last `depth` rows of every sequence are written, padding never.
        rows: see `values.Rows`. Padding gets ids of valid table rows.
        pad_id: folded pad id.
        multipliers: [layers, n] int64, n >= 2, positive; products fit 63 bits.
        primes: [layers, n - 1, heads] int64.
    Returns:
        [layers, B, (n - 1) * heads] int64. Exact. n and the number of columns are compile-time
        sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.engram.engram_rows.
    """
    device = folded.device
    check_tensor("folded", folded, shape=(None,), dtype=torch.int64)
    check_tensor("history", history, shape=(None, None), dtype=torch.int64, device=device)
    check_tensor("multipliers", multipliers, shape=(None, None), dtype=torch.int64, device=device)
    (layers, gram), count, depth = multipliers.shape, folded.shape[0], history.shape[1]
    check_value("multipliers.shape[1]", gram, gram >= 2, "n-grams of 2 ids or more")
    needs = f"a depth of {gram - 1} or more, for the ids before a row"
    check_value("history.shape[1]", depth, depth >= gram - 1, needs)
    check_number("pad_id", pad_id, 0)
    per_layer = (layers, gram - 1, None)
    check_tensor("primes", primes, shape=per_layer, dtype=torch.int64, device=device)
    fields = ("positions", "sequence", "slots", "first_position", "row_start")
    check_rows(rows, count, device, fields)
    heads = primes.shape[2]
    columns = (gram - 1) * heads
    out = torch.empty((layers, count, columns), dtype=torch.int64, device=device)
    if count == 0:
        return out
    grid = triton.cdiv(count, ROWS_A_PROGRAM)
    if layers and heads:
        _hash_rows[(grid, layers)](
            folded,
            history,
            rows.positions,
            rows.sequence,
            rows.slots,
            rows.first_position,
            multipliers,
            primes,
            out,
            count,
            depth,
            pad_id,
            heads,
            GRAM=gram,
            COLUMNS=columns,
            ROWS=ROWS_A_PROGRAM,
            BLOCK=triton.next_power_of_2(columns),
            num_warps=4,
        )
    # A launch of its own: every program above has read the history before one of these writes it.
    _write_history[(triton.cdiv(count, 128),)](
        folded,
        history,
        rows.positions,
        rows.sequence,
        rows.slots,
        rows.first_position,
        rows.row_start,
        count,
        depth,
        ROWS=128,
        num_warps=4,
    )
    return out
