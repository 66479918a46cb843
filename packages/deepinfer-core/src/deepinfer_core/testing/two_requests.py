"""Two requests whose steps are written by hand, for tests of the fakes.

Request 1 sits in slot 0 with blocks from 0 on, request 2 in slot 1 with blocks from 8 on; their
prompts have 9 and 5 tokens. Request 5 is request 1 once more in slot 2, behind shared blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer_core.plans import Phase, StepPlan, StepResult
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.fake_model import FakeModel
from deepinfer_core.testing.hand_plans import PlanRow, make_plan
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import Request, SamplingParams

__all__ = [
    "ENTERS", "LIMITS", "PROMPT", "STORED", "VOCAB", "decode", "entered", "hit", "reference",
    "run", "tokens",
]  # fmt: skip

VOCAB = 40
LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 18, "index": 20},
    num_slots=3,
    num_stored=1,
    max_model_len=60,
    max_step_tokens=64,
    max_chunk_tokens=64,
    window=6,
    max_drafts=2,
)
PROMPT = {1: tuple(range(3, 12)), 2: (20, 21, 22, 23, 24)}
ENTERS = {
    1: PlanRow(1, 0, PROMPT[1], enters=True, blocks=(0, 1, 2, 3)),
    2: PlanRow(2, 1, PROMPT[2], enters=True, blocks=(8, 9, 10)),
}
STORED = 3  # a slot for a stored window state


def reference(uid: int, length: int = 12) -> tuple[int, ...]:
    """Return the first tokens of a request, alone; its seed is its uid."""
    request = Request(uid, "", PROMPT[uid], SamplingParams(max_tokens=length), seed=uid)
    return serial_reference(request, LIMITS.max_model_len, VOCAB)[0]


def run(model: FakeModel, plan: StepPlan) -> StepResult:
    """Run a whole step."""
    model.forward(plan)
    return model.sample()


def entered(*uids: int, **options: Any) -> FakeModel:
    """Return a model that has run the prompts, as step 1."""
    model = FakeModel(LIMITS, vocab_size=VOCAB, **options)
    run(model, make_plan(1, *(ENTERS[uid] for uid in uids)))
    return model


def decode(uid: int, offset: int, num_rows: int = 1, **changes: Any) -> PlanRow:
    """Return a row that feeds the reference's tokens from `offset` on."""
    ids = reference(uid)[offset : offset + num_rows]
    row = PlanRow(uid, uid - 1, ids, len(PROMPT[uid]) + offset, Phase.VERIFY)
    return replace(row, **changes)


def tokens(result: StepResult, row: int = 0) -> tuple[int, ...]:
    """Return the tokens that a sequence of the step yields."""
    return tuple(result.token_ids[row, : result.num_tokens[row]].tolist())


def hit(start: int, num_replay: int, **changes: Any) -> PlanRow:
    """Return request 5 as it enters behind the first two blocks of request 1."""
    row = PlanRow(5, 2, PROMPT[1][start:], start, enters=True, blocks=(0, 1, 5))
    return replace(row, num_replay=num_replay, window_start=start, **changes)
