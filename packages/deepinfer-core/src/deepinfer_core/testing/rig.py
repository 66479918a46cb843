"""Drive a worker by hand: sequences, plans and tables without a scheduler. For tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.cpu.runtime import CpuRuntime
from deepinfer_core.engine.drafting import Drafter
from deepinfer_core.engine.step_ring import WorkerStepState
from deepinfer_core.engine.worker import Worker
from deepinfer_core.interfaces import Verifier
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.model.state import POOLS, ModelState, StateSizes
from deepinfer_core.plans import (
    PHASES,
    Admission,
    Phase,
    RowExtras,
    SchedulerOutput,
    StepKind,
    StepPlan,
    StepResult,
    StepRows,
    TableDelta,
)
from deepinfer_core.types import SamplingParams

__all__ = ["Part", "Rig", "Text"]


@dataclass
class Text:
    """A sequence as its owner knows it.

    Attributes:
        token_ids: prompt and settled tokens. settled: positions whose content is final.
        bound: one past the highest position that a launched step may have written.
    """

    uid: int
    slot: int
    token_ids: list[int]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 1
    generation: int = 0
    settled: int = 0
    bound: int = 0
    prompt_len: int = 0
    entered: bool = False

    def __post_init__(self) -> None:
        """Take note of the prompt's length."""
        self.prompt_len = len(self.token_ids)


@dataclass(frozen=True)
class Part:
    """What a text does in a step.

    Args:
        num_rows: rows of a chunk; the rest of the prompt when None.
        num_drafts: drafts to verify, None for a chunk.
        source: place in the step before, or -1.
        drafts: the drafts, where the host supplies them.
        columns: fields of `StepRows` to set otherwise.
    """

    text: Text
    num_rows: int | None = None
    num_drafts: int | None = None
    source: int = -1
    drafts: Sequence[int] = ()
    columns: Mapping[str, int] = field(default_factory=dict)
    extras: Mapping[str, object] = field(default_factory=dict)


class Rig:
    """A worker, and the books of the texts it runs.

    Args:
        model: weights; shared between rigs.
        numerics: mode of the backend.
        threads: run the queues in threads.
        other arguments: as in `StateSizes` and `Worker`.
    """

    def __init__(
        self,
        model: DeepseekV41,
        *,
        numerics: str = "ideal",
        threads: bool = False,
        num_slots: int = 4,
        block_size: int = 4,
        max_len: int = 160,
        max_drafts: int = 5,
        num_stored: int = 0,
        max_rows: int = 256,
        depth: int = 2,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """Make fresh state."""
        self.runtime = CpuRuntime(threads=threads)
        self.backend = CpuBackend(numerics, True, self.runtime)
        self.sizes = StateSizes(
            num_slots, dict.fromkeys(POOLS, 0), block_size, max_len, max_drafts, num_stored
        )
        count = num_slots * self.sizes.table_len
        self.sizes = StateSizes(
            num_slots, dict.fromkeys(POOLS, count), block_size, max_len, max_drafts, num_stored
        )
        self.blocks = torch.randperm(count, generator=torch.Generator().manual_seed(7)).numpy()
        self.state = ModelState.allocate(model.config, self.backend, self.sizes)
        self.worker = Worker(
            self.backend,
            model,
            self.state,
            max_rows=max_rows,
            depth=depth,
            drafter=drafter,
            verifier=verifier,
        )
        self.step_seq = 0

    def plan(self, *parts: Part, **output: object) -> StepPlan:
        """Return a step of these parts, and move the texts' bounds.

        A smaller `num_rows` than the parts have leaves the choice of drafts to the verifier.
        """
        rows, ids, extras = [], [], {}
        tables: list[int] = []
        for place, part in enumerate(parts):
            text = part.text
            row, tokens = _row(part)
            rows.append({**row, **part.columns})
            ids += tokens
            fields = dict(part.extras)
            if not text.entered:
                text.entered = True
                tables.append(text.slot)
                fields["admission"] = _admission(text, row["start"])
            if fields:
                extras[place] = RowExtras(**fields)  # type: ignore[arg-type]
        self.step_seq += 1
        names = {name for row in rows for name in row}
        columns = {name: np.array([row.get(name, 0) for row in rows]) for name in names}
        kind = StepKind.DECODE if all(p.num_drafts is not None for p in parts) else StepKind.PREFILL
        settings: dict[str, object] = {"num_rows": len(ids), "strict": True, **output}
        return StepPlan(
            SchedulerOutput(self.step_seq, kind, **settings),  # type: ignore[arg-type]
            StepRows.of(len(parts), **columns),
            np.array(ids, dtype=np.int64),
            extras,
            {pool: self._table(tables) for pool in POOLS},
        )

    def run(self, *parts: Part, **output: object) -> StepResult:
        """Launch a step, wait for it, and settle it."""
        return self.settle(self.worker.launch(self.plan(*parts, **output)), *parts)

    def settle(self, ticket: WorkerStepState, *parts: Part) -> StepResult:
        """Take a step's result into the books."""
        result = ticket.result(60.0)
        for place, part in enumerate(parts):
            text, count = part.text, int(result.num_tokens[place])
            rows = int(ticket.plan.rows.num_rows[place])
            text.settled += rows if part.num_drafts is None else count
            text.token_ids += result.token_ids[place, :count].tolist()
        return result

    def _table(self, slots: Sequence[int]) -> TableDelta:
        length = self.sizes.table_len
        owners = np.repeat(np.array(slots, dtype=np.int64), length)
        places = np.tile(np.arange(length), len(slots))
        return TableDelta(owners, places, self.blocks[owners * length + places])


def _row(part: Part) -> tuple[dict[str, int], list[int]]:
    text = part.text
    row = {"uid": text.uid, "generation": text.generation, "slot": text.slot, "remaining": 99}
    row["source"] = part.source
    if part.num_drafts is None:
        left = text.prompt_len - text.bound
        count = left if part.num_rows is None else part.num_rows
        phase = Phase.FINAL_CHUNK if count == left else Phase.CHUNK
        tokens = text.token_ids[text.bound : text.bound + count]
    else:
        phase, count = Phase.VERIFY, 1 + part.num_drafts
        row["num_drafts"] = part.num_drafts
        if part.source < 0:
            text.bound = text.settled  # nothing is in flight
            tokens = [text.token_ids[-1], *part.drafts]
        else:
            tokens = [-1] * count
    row |= {"phase": PHASES.index(phase), "start": text.bound, "num_rows": count}
    text.bound += count
    return row, tokens


def _admission(text: Text, start: int) -> Admission:
    needs = text.params.uses_penalties
    return Admission(
        params=text.params,
        seed=text.seed,
        history=tuple(text.token_ids[max(0, start - 8) : start]),
        prompt_len=text.prompt_len,
        token_ids=tuple(text.token_ids) if needs else (),
    )
