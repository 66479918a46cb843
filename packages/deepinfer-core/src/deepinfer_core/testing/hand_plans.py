"""Step plans written by hand, a row a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepinfer_core.plans import (
    PHASES,
    PLACEHOLDER,
    Admission,
    Phase,
    RowExtras,
    SchedulerOutput,
    StepKind,
    StepPlan,
    StepRows,
    TableDelta,
)
from deepinfer_core.types import SamplingParams

__all__ = ["PlanRow", "make_plan"]

_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence of a step, its numbers as in `SequenceMetadata`.

    Args:
        token_ids: tokens fed; ignored, and only counted, when `source` is not -1.
        enters: whether it is admitted with this step.
        blocks: new block ids, the same in every pool.
        first_block: place of the first of them in the table.
        params, history: of the admission.
        prompt_targets: tokens to score, with `params.prompt_logprobs`.
    """

    uid: int
    slot: int
    token_ids: tuple[int, ...]
    start: int = 0
    phase: Phase = Phase.FINAL_CHUNK
    generation: int = 0
    source: int = -1
    num_replay: int = 0
    window_start: int = 0
    tail_start: int = 0
    enters: bool = False
    blocks: tuple[int, ...] = ()
    first_block: int = 0
    params: SamplingParams = _DEFAULTS
    history: tuple[int, ...] = ()
    prompt_targets: tuple[int, ...] = ()


def make_plan(
    step_seq: int, *rows: PlanRow, pools: tuple[str, ...] = ("compressed", "index"), **output: Any
) -> StepPlan:
    """Return a plan of these rows; a request's seed is its uid, and `output` goes to the output."""
    names = ("uid", "slot", "start", "generation", "source", "num_replay", "window_start")
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    fed = [(PLACEHOLDER,) * len(r.token_ids) if r.source >= 0 else r.token_ids for r in rows]
    verify = [row.phase is Phase.VERIFY for row in rows]
    table = StepRows.of(
        len(rows),
        **columns,
        phase=np.array([PHASES.index(row.phase) for row in rows]),
        tail_start=np.array([row.tail_start for row in rows]),
        num_rows=np.array([len(ids) for ids in fed]),
        num_drafts=np.array([len(ids) - 1 if v else 0 for ids, v in zip(fed, verify, strict=True)]),
        remaining=1,
    )
    extras = {place: _extras(row) for place, row in enumerate(rows)}
    kind = StepKind.DECODE if any(verify) else StepKind.PREFILL
    plain = SchedulerOutput(step_seq, kind, sum(map(len, fed)), strict=False)
    return StepPlan(
        replace(plain, **output),
        table,
        np.array([token_id for ids in fed for token_id in ids], dtype=np.int64),
        {place: extra for place, extra in extras.items() if extra != RowExtras()},
        _tables(rows, pools),
    )


def _extras(row: PlanRow) -> RowExtras:
    admission = None
    if row.enters:
        admission = Admission(row.params, row.uid, row.history, row.start + len(row.token_ids))
    asked = row.params.prompt_logprobs if row.prompt_targets else None
    return RowExtras(admission, asked, row.prompt_targets)


def _tables(rows: tuple[PlanRow, ...], pools: tuple[str, ...]) -> dict[str, TableDelta]:
    found = [
        (row.slot, row.first_block + offset, block)
        for row in rows
        for offset, block in enumerate(row.blocks)
    ]
    if not found:
        return {}
    return {pool: TableDelta(*np.array(found, dtype=np.int64).T.copy()) for pool in pools}
