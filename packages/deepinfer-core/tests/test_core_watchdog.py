"""The watchdog: deadlines, near misses, stuck steps, stalls and progress."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_core.engine.records import StepRecord, StepRecords
from deepinfer_core.engine.watchdog import FIRST_S, FLOOR_S, SLACK, Watchdog
from deepinfer_core.errors import DeepInferError, StuckStep
from deepinfer_core.plans import (
    PHASES,
    Phase,
    RowStatus,
    SchedulerOutput,
    StepKind,
    StepPlan,
    StepResult,
    StepRows,
)

CHUNK, VERIFY = PHASES.index(Phase.CHUNK), PHASES.index(Phase.VERIFY)


def step(
    *,
    phase: int = CHUNK,
    uids: tuple[int, ...] = (1,),
    start: int = 0,
    num_rows: int = 8,
    num_tokens: int = 0,
    status: RowStatus = RowStatus.OK,
) -> tuple[StepPlan, StepResult]:
    """A step of equal sequences, and its result."""
    num = len(uids)
    rows = StepRows.of(num, uid=np.array(uids), phase=phase, start=start, num_rows=num_rows)
    output = SchedulerOutput(17, StepKind.PREFILL, num * num_rows, False)
    plan = StepPlan(output, rows, np.zeros(num * num_rows, dtype=np.int64))
    result = StepResult(
        17,
        token_ids=np.zeros((num, 1), dtype=np.int64),
        num_tokens=np.full(num, num_tokens),
        status=np.full(num, status.value),
        start=np.full(num, start),
        num_verified=np.zeros(num, dtype=np.int64),
    )
    return plan, result


def test_first_step_has_time_to_compile() -> None:
    assert Watchdog().timeout_s() == FIRST_S


def test_deadline_is_never_below_its_floor() -> None:
    watchdog = Watchdog()
    watchdog.observed(0.001)
    assert watchdog.timeout_s() == FLOOR_S


def test_deadline_follows_the_moving_mean() -> None:
    watchdog = Watchdog()
    for _ in range(200):
        watchdog.observed(1.0)
    assert watchdog.timeout_s() == pytest.approx(SLACK)
    for _ in range(200):
        watchdog.observed(2.0)
    assert watchdog.timeout_s() == pytest.approx(2 * SLACK, rel=0.01)


def test_long_chunk_behind_short_steps_has_more_time() -> None:
    watchdog = Watchdog()
    for _ in range(50):
        watchdog.observed(0.5, num_rows=1)
    assert watchdog.timeout_s(num_rows=512) == pytest.approx(512 * 0.5 * SLACK)
    assert watchdog.timeout_s(num_rows=1) == pytest.approx(0.5 * SLACK)


def test_steps_above_half_their_deadline_are_near_misses() -> None:
    watchdog = Watchdog()
    watchdog.observed(300.0)  # the first: nothing to compare with
    watchdog = Watchdog()
    watchdog.observed(0.01)
    watchdog.observed(FLOOR_S / 2)
    assert watchdog.near_misses == 0
    watchdog = Watchdog()
    watchdog.observed(0.01)
    watchdog.observed(FLOOR_S / 2 + 0.01)
    assert watchdog.near_misses == 1


def test_stuck_step_is_an_error_that_says_what_and_where(tmp_path: Path) -> None:
    watchdog, records = Watchdog(tmp_path), StepRecords()
    for seq in range(100):
        records.append(StepRecord(seq, StepKind.DECODE))
    watchdog.observed(0.2)
    watchdog.timeout_s()
    plan, _ = step(uids=(1, 2), num_rows=8)
    error = watchdog.stuck(plan, records)
    assert isinstance(error, StuckStep)
    assert isinstance(error, DeepInferError)
    assert error.step_seq == 17
    assert error.dump is not None
    assert error.dump.parent == tmp_path
    for words in ("Step 17", "prefill", "16 rows", "2 sequences", "10.0 s", "200 ms"):
        assert words in str(error)
    assert str(error.dump) in str(error)
    lines = error.dump.read_text().splitlines()
    assert [json.loads(line)["step_seq"] for line in lines] == list(range(36, 100))


def test_two_dumps_of_one_step_do_not_overwrite_each_other(tmp_path: Path) -> None:
    watchdog, (plan, _) = Watchdog(tmp_path), step()
    assert watchdog.stuck(plan, StepRecords()).dump != watchdog.stuck(plan, StepRecords()).dump


def test_dump_that_cannot_be_written_does_not_hide_the_fault(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path / "missing")
    error = watchdog.stuck(step()[0], StepRecords())
    assert error.dump is None
    assert "could not be written" in str(error)
    assert "Step 17" in str(error)


def test_slow_host_is_counted() -> None:
    watchdog = Watchdog()
    watchdog.host_ran(0.1)
    assert watchdog.stalls == 0
    watchdog.host_ran(0.11)
    assert watchdog.stalls == 1


def stale(watchdog: Watchdog, num: int, **fields: object) -> list[str]:
    """Settle the same step again and again; return what was reported."""
    found = [watchdog.settled(*step(**fields)) for _ in range(num)]
    return [sentence for sentence in found if sentence is not None]


def test_same_chunk_again_and_again_is_reported_once_per_run_of_steps() -> None:
    watchdog = Watchdog(progress_steps=10)
    watchdog.settled(*step(start=0, num_rows=8))
    assert stale(watchdog, 9, start=0, num_rows=8) == []
    [sentence] = stale(watchdog, 1, start=0, num_rows=8)
    assert "10 steps" in sentence
    assert "step 17" in sentence
    assert watchdog.violations == 1
    assert len(stale(watchdog, 10, start=0, num_rows=8)) == 1
    assert watchdog.violations == 2


def test_token_is_progress() -> None:
    watchdog = Watchdog(progress_steps=3)
    for _ in range(10):
        assert stale(watchdog, 2, num_rows=0) == []
        assert watchdog.settled(*step(phase=VERIFY, num_tokens=1)) is None


def test_longer_prompt_part_than_ever_is_progress() -> None:
    watchdog = Watchdog(progress_steps=2)
    for start in range(0, 80, 8):
        assert watchdog.settled(*step(start=start)) is None
    # Preempted: the same again brings nothing until it is longer than before.
    reported = [watchdog.settled(*step(start=start)) for start in range(0, 88, 8)]
    assert sum(sentence is not None for sentence in reported) == 5
    assert reported[-1] is None


def test_two_prompts_that_preempt_one_another_get_nowhere() -> None:
    watchdog = Watchdog(progress_steps=6)
    for uid in (1, 2):
        watchdog.settled(*step(uids=(uid,)))
    for _ in range(3):
        stale(watchdog, 1, uids=(1,))
        stale(watchdog, 1, uids=(2,))
    assert watchdog.violations == 1


def test_row_that_failed_is_no_progress() -> None:
    watchdog = Watchdog(progress_steps=2)
    failed = {"phase": VERIFY, "num_tokens": 1, "status": RowStatus.NON_FINITE}
    assert len(stale(watchdog, 2, **failed)) == 1


def test_prompts_that_ended_are_forgotten() -> None:
    watchdog = Watchdog(progress_steps=10)
    for uid in range(10_000):
        watchdog.settled(*step(uids=(uid,)))
    assert len(watchdog._reached) <= 4096
    assert watchdog.violations == 0
