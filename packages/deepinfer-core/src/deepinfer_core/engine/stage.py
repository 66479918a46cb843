"""A plan's numbers as device tensors: what the host sends before a step runs.

Everything here follows from the plan alone, so it can be made while the step before still runs; the
forward queue then works on tensors and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepinfer_core.model.deepseek_v41 import Tail
from deepinfer_core.types import SequenceMetadata, StepPlan

__all__ = ["PLACEHOLDER", "PromptRows", "StagedStep", "TableDelta", "stage"]

PLACEHOLDER = -1  # an illegal id: one that reaches the model is a fault, not a token


@dataclass(frozen=True)
class TableDelta:
    """New entries of a pool's block tables: `table[slots, places] = block_ids`, each [n] int64."""

    pool: str
    slots: Tensor
    places: Tensor
    block_ids: Tensor


@dataclass(frozen=True)
class PromptRows:
    """Rows of one sequence whose next prompt token is to be scored.

    Attributes:
        row: the sequence's place in the plan. first: place of its first row among hidden rows.
        targets: [n] int64, the tokens after its first n rows.
    """

    row: int
    first: int
    targets: Tensor


@dataclass(frozen=True)
class StagedStep:
    """The plan on the device.

    Attributes:
        plan: where it came from.
        first_tokens, start, uids, remap, slots, window_floor, write_floor: [R] int64.
        tokens: [B] int64; a placeholder where the carry supplies it.
        num_rows: rows of each sequence.
        history: (slot, start, [n] int64 token ids before start) of sequences that enter.
        tables: new block-table entries of each pool.
        tail: rows that run every layer; None when all do and see no window that was cut.
        sampled: [N] int64, places in the plan of sequences that sample.
        last_hidden: place of their last rows among hidden rows, [N] int64.
        prompt_rows: sequences with prompt log-probabilities in this step.
    """

    plan: StepPlan
    first_tokens: Tensor
    start: Tensor
    uids: Tensor
    remap: Tensor
    slots: Tensor
    window_floor: Tensor
    write_floor: Tensor
    tokens: Tensor
    num_rows: Sequence[int]
    history: Sequence[tuple[int, int, Tensor]]
    tables: Sequence[TableDelta]
    tail: Tail | None
    sampled: Tensor
    last_hidden: Tensor
    prompt_rows: Sequence[PromptRows]


def stage(plan: StepPlan, window: int, device: torch.device) -> StagedStep:
    """Send a plan to the device.

    Args:
        window: positions a row sees, its own included.
    """
    sequences = plan.sequences
    first = [meta.token_ids[0] if meta.token_ids else PLACEHOLDER for meta in sequences]
    replayed = [meta.start + meta.num_replay if meta.num_replay else 0 for meta in sequences]
    # rows that skip the late layers are the first ones of a chunk below its prompt's tail
    skipped = [min(meta.num_rows, max(0, meta.tail_start - meta.start)) for meta in sequences]
    kept = [meta.num_rows - skip for meta, skip in zip(sequences, skipped, strict=True)]
    hidden_start = [0, *accumulate(kept)]
    sampled = [row for row, meta in enumerate(sequences) if meta.samples]
    flat = [
        token for meta in sequences for token in (meta.token_ids or (PLACEHOLDER,) * meta.num_rows)
    ]
    return StagedStep(
        plan=plan,
        first_tokens=_send(first, device),
        start=_send([meta.start for meta in sequences], device),
        uids=_send([meta.uid for meta in sequences], device),
        remap=_send(plan.output.remap, device),
        slots=_send([meta.slot for meta in sequences], device),
        window_floor=_send([meta.window_start for meta in sequences], device),
        write_floor=_send(replayed, device),
        tokens=_send(flat, device),
        num_rows=[meta.num_rows for meta in sequences],
        history=[
            (meta.slot, meta.start, _send(meta.admission.history, device))
            for meta in sequences
            if meta.admission is not None and meta.admission.history
        ],
        tables=_tables(sequences, device),
        tail=_tail(sequences, skipped, window, device),
        sampled=_send(sampled, device),
        last_hidden=_send([hidden_start[row + 1] - 1 for row in sampled], device),
        prompt_rows=[
            PromptRows(row, hidden_start[row], _send(meta.prompt_targets, device))
            for row, meta in enumerate(sequences)
            if meta.prompt_logprobs is not None and meta.prompt_targets
        ],
    )


def _send(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _tail(
    sequences: Sequence[SequenceMetadata],
    skipped: Sequence[int],
    window: int,
    device: torch.device,
) -> Tail | None:
    # Rows this far above a tail's start see nothing below it: decoding needs no tail.
    if all(not m.tail_start or m.start >= m.tail_start + window - 1 for m in sequences):
        return None
    keep: list[int] = []
    floor: list[int] = []
    first = 0
    for meta, skip in zip(sequences, skipped, strict=True):
        keep += range(first + skip, first + meta.num_rows)
        floor += [meta.tail_start] * (meta.num_rows - skip)
        first += meta.num_rows
    return Tail(_send(keep, device), _send(floor, device))


def _tables(sequences: Sequence[SequenceMetadata], device: torch.device) -> list[TableDelta]:
    entries: dict[str, list[tuple[int, int, int]]] = {}
    for meta in sequences:
        for delta in meta.blocks:
            entries.setdefault(delta.pool, []).extend(
                (meta.slot, delta.first + offset, block_id)
                for offset, block_id in enumerate(delta.block_ids)
            )
    return [
        TableDelta(pool, *_send(found, device).unbind(1))
        for pool, found in entries.items()
        if found
    ]
