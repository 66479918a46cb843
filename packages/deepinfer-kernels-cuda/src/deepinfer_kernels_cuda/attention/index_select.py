"""Choosing the block entries that a row attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels_cuda.attention.index_scores import UNIT, index_scores, score_plan
from deepinfer_kernels_cuda.attention.select import MOST_RANKED, select, select_sizes
from deepinfer_kernels_cuda.checks import check_number, check_tensor, check_value
from deepinfer_kernels_cuda.quant.entries import entry_width
from deepinfer_kernels_cuda.values import BlockStore, Rows

__all__ = ["Selected", "index_select"]

WORKSPACE_BYTES = 256 << 20  # scores of as many rows as fit are held at a time
MOST_PLACES = 1 << 21  # of a row: it has at most `MOST_RANKED` units


@dataclass(frozen=True)
class Selected:
    """What an index source chose for each row.

    Attributes:
        picks: [B, top_k] int32 entry numbers, ascending, -1 behind the last one.
        candidates: [B, publish] int32 candidate blocks, likewise; None unless published.
    """

    picks: Tensor
    candidates: Tensor | None


def index_select(
    queries: Tensor,
    weights: Tensor,
    keys: BlockStore,
    rows: Rows,
    *,
    top_k: int,
    candidates: Tensor | None,
    candidate_block: int,
    publish: int,
) -> Selected:
    """Score visible entries and keep the best: exactly, ties go to the lower entry.

    `score[j] = sum_h weights[h] * max(0, queries[h] . keys[j])`, where products, weighted terms and
    the sum are each rounded to bfloat16; entry j is visible to a row at p when
    j < (p + 1) // ratio. Nothing waits for the device; the memory for scores is bounded, whatever
    the context.

    Args:
        queries: [B, H, d] bfloat16, values of the index format; d is a multiple of 32.
        weights: [B, H] bfloat16. NaN counts as 0 in both; queries are held within +-2^60, weights
            within +-2^16.
        keys: entries of format `index`, at an address aligned to 4 bytes where an entry's width is
            a multiple of 4; scales below 2^-94 lose bits, those above 2^33 count as it.
        rows: positions, sequence, slots, sequence_slots are read. Rows of a sequence lie together.
        top_k: entries kept.
        candidates: [B, n] int32 blocks, ascending, -1 behind: nothing else competes. None: all do.
        candidate_block: entries of a candidate block: a power of two up to 64.
        publish: candidate blocks to publish by their best visible entry; the block of the newest
            visible entry is always one. 0: none, as it must be where `candidates` are given. For it
            as for top_k, at most 32768 keys are ranked at a time (`select.select_sizes`).
    Returns:
        `Selected`. Padding rows pick nothing. A row's result does not depend on other rows.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.indexer.index_select; model-v41.md 6 and 10.
    """
    check_tensor("queries", queries, shape=(None, None, None), dtype=torch.bfloat16)
    num_rows, num_heads, channels = queries.shape
    device = queries.device
    check_value("queries' last dimension", channels, channels % 32 == 0, "a multiple of 32")
    check_tensor(
        "weights",
        weights,
        shape=(num_rows, num_heads),
        dtype=torch.bfloat16,
        device=device,
    )
    width = entry_width("index", channels)
    check_tensor(
        "keys.data",
        keys.data,
        shape=(None, None, width),
        dtype=torch.uint8,
        device=device,
    )
    if width % 4 == 0:  # entries are read as words
        aligned = keys.data.data_ptr() % 4 == 0 and keys.data.storage_offset() % 4 == 0
        check_value(
            "keys.data's address", hex(keys.data.data_ptr()), aligned,
            "an allocation and an offset in it that are aligned to 4 bytes",
        )  # fmt: skip
    check_tensor(
        "keys.table", keys.table, shape=(None, None), dtype=torch.int32, device=device,
        contiguous=False,
    )  # fmt: skip
    sizes = {"positions": num_rows, "sequence": num_rows, "slots": num_rows, "sequence_slots": None}
    for name, size in sizes.items():
        tensor: Any = getattr(rows, name, None)
        check_tensor(f"rows.{name}", tensor, shape=(size,), dtype=torch.int64, device=device)
    check_number("keys.ratio", keys.ratio, 1)
    check_number("top_k", top_k, 1)
    power = candidate_block > 0 and candidate_block & (candidate_block - 1) == 0
    check_value(
        "candidate_block", candidate_block, power and candidate_block <= 64,
        "a power of two up to 64",
    )  # fmt: skip
    if candidates is not None:
        check_tensor(
            "candidates",
            candidates,
            shape=(num_rows, None),
            dtype=torch.int32,
            device=device,
        )
        check_value("publish", publish, publish == 0, "0 where `candidates` are given")
    check_value("publish", publish, publish >= 0, "0 or a number of blocks")
    sequences, entries_a_block = rows.sequence_slots.shape[0], keys.data.shape[1]
    if candidates is None:
        places = keys.table.shape[1] * entries_a_block
        check_value("keys.table", places, places <= MOST_PLACES, "at most 2^21 entries a slot")
    else:
        places = candidates.shape[1] * candidate_block
        check_value("candidates", places, places <= MOST_PLACES, "at most 2^21 entries a row")
    for name, kept, blocks in (("top_k", top_k, False), ("publish", publish, True)):
        if kept and places:
            ranked = max(select_sizes(places, kept, candidate_block, blocks))
            check_value(
                name, kept, ranked <= MOST_RANKED,
                f"so few that at most {MOST_RANKED} keys are ranked at a time (here {ranked})",
            )  # fmt: skip
    picks = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    published = (
        torch.empty(num_rows, publish, dtype=torch.int32, device=device) if publish else None
    )
    if num_rows == 0 or places == 0:
        for chosen in (picks, published):
            if chosen is not None:
                chosen.fill_(-1)
        return Selected(picks, published)

    plan = score_plan(num_rows, sequences, entries_a_block, candidates is not None, device)
    row_bytes = 2 * (places + UNIT) * (1 + candidate_block) // candidate_block
    at_once = max(plan.rows, WORKSPACE_BYTES // row_bytes // plan.rows * plan.rows)
    for first in range(0, num_rows, at_once):
        part = slice(first, min(first + at_once, num_rows))
        scores = index_scores(queries, weights, keys, rows, candidates, candidate_block, plan, part)
        sequence, positions = rows.sequence[part], rows.positions[part]
        select(
            scores, sequence, positions, ratio=keys.ratio, top_k=top_k,
            candidates=None if candidates is None else candidates[part],
            candidate_block=candidate_block, blocks=False, out=picks[part],
        )  # fmt: skip
        if published is not None:
            select(
                scores, sequence, positions, ratio=keys.ratio, top_k=publish, candidates=None,
                candidate_block=candidate_block, blocks=True, out=published[part],
            )  # fmt: skip
    return Selected(picks, published)
