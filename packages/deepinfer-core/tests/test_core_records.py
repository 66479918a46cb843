"""Records of steps: the ring, its file, and what is read off a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_core.engine.records import (
    StepRecord,
    StepRecords,
    bubble_cause,
    device_gaps_ns,
    overlap_ratio,
)
from deepinfer_core.engine.step_ring import DeviceTimes
from deepinfer_core.plans import SchedulerOutput, StepKind, StepPlan, StepRows

DECODE = StepKind.DECODE


def forward(step_seq: int, begin: int, end: int, **fields: object) -> StepRecord:
    """A record of which only the forward's times are known."""
    device = DeviceTimes((begin - 2, begin - 1), (begin, end), (end + 1, end + 2))
    return StepRecord(step_seq, DECODE, device=device, **fields)


def iteration(step_seq: int, begin: int, **lengths: int) -> StepRecord:
    """A record with the given lengths of its iteration's parts."""
    record, now = StepRecord(step_seq, DECODE, begin_ns=begin), begin
    for part, field in (
        ("settle", "settled_ns"),
        ("grammar", "masked_ns"),
        ("drain", "drained_ns"),
        ("inbox", "inbox_ns"),
        ("vote", "voted_ns"),
        ("build", "built_ns"),
        ("launch", "launched_ns"),
    ):
        if part in lengths:
            now += lengths[part]
            setattr(record, field, now)
    return record


def ring(*records: StepRecord, capacity: int = 8) -> StepRecords:
    found = StepRecords(capacity)
    for record in records:
        found.append(record)
    return found


def test_record_has_the_sizes_of_its_plan() -> None:
    rows = StepRows.of(2, uid=np.array([7, 9]), phase=2, num_rows=3, num_drafts=2)
    plan = StepPlan(SchedulerOutput(5, DECODE, 6, False), rows, np.zeros(6, dtype=np.int64))
    record = StepRecord.of(plan, begin_ns=1234)
    assert (record.step_seq, record.kind, record.begin_ns) == (5, DECODE, 1234)
    assert (record.num_sequences, record.num_rows, record.num_drafts) == (2, 6, 4)
    assert record.uids.tolist() == [7, 9]


def test_record_does_not_keep_the_matrix_of_its_plan_alive() -> None:
    rows = StepRows.of(2, uid=np.array([7, 9]))
    plan = StepPlan(SchedulerOutput(5, DECODE, 0, False), rows, np.zeros(0, dtype=np.int64))
    uids = StepRecord.of(plan, begin_ns=0).uids
    assert not np.shares_memory(uids, rows.data)
    assert uids.base is None


def test_ring_forgets_the_oldest_first() -> None:
    records = ring(*(StepRecord(step, DECODE) for step in range(6)), capacity=4)
    assert [record.step_seq for record in records] == [2, 3, 4, 5]
    assert len(records) == 4


@pytest.mark.parametrize(
    ("num", "steps"), [(0, []), (2, [2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_last_steps_come_oldest_first(num: int, steps: list[int]) -> None:
    records = ring(*(StepRecord(step, DECODE) for step in range(4)))
    assert [record.step_seq for record in records.last(num)] == steps


def test_dump_is_one_object_a_line_with_all_that_is_known(tmp_path: Path) -> None:
    full = forward(1, 100, 200, uids=np.array([3, 4]), num_sequences=2, bubble="build")
    assert ring(StepRecord(0, StepKind.PREFILL), full).dump(tmp_path / "steps.jsonl") == 2
    first, second = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (first["step_seq"], first["kind"], first["device"]) == (0, "prefill", None)
    assert second["device"] == {
        "copy_in": [98, 99],
        "forward": [100, 200],
        "copy_out": [201, 202],
        "stalled_ns": 0,
    }
    assert (second["uids"], second["bubble"]) == ([3, 4], "build")
    assert set(first) == set(StepRecord.__slots__)


def test_dump_holds_the_newest_when_fewer_are_asked_for(tmp_path: Path) -> None:
    records = ring(*(StepRecord(step, DECODE) for step in range(5)))
    assert records.dump(tmp_path / "steps.jsonl", 2) == 2
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step_seq"] for line in lines] == [3, 4]


def test_overlap_ratio_is_busy_time_over_the_whole_time() -> None:
    records = [forward(0, 1000, 1400), forward(1, 1500, 1900), forward(2, 1900, 2000)]
    assert overlap_ratio(records) == pytest.approx(900 / 1000)
    assert device_gaps_ns(records).tolist() == [100, 0]


def test_idling_is_neither_a_gap_nor_lost_overlap() -> None:
    records = [
        forward(0, 1000, 1400),
        forward(1, 9400, 9800, after_idle=True),
        forward(2, 9900, 10300),
    ]
    assert overlap_ratio(records) == pytest.approx(1200 / 1300)
    assert device_gaps_ns(records).tolist() == [100]


def test_nothing_is_said_of_a_device_that_does_not_tell() -> None:
    records = [StepRecord(0, DECODE), StepRecord(1, DECODE)]
    assert overlap_ratio(records) is None
    assert device_gaps_ns(records).tolist() == []


def test_clocks_that_disagree_by_a_little_make_no_negative_gap() -> None:
    records = [forward(0, 1000, 1405), forward(1, 1400, 1800)]
    assert device_gaps_ns(records).tolist() == [0]


def test_launch_in_time_is_no_bubble() -> None:
    late = iteration(1, 1100, settle=10, build=50, launch=20)
    late.device = forward(1, 1300, 1600).device
    records = ring(forward(0, 1000, 1300, launched_ns=900), late)
    assert records.judge(late) is None
    assert late.bubble is None


@pytest.mark.parametrize("part", ["settle", "grammar", "drain", "inbox", "vote", "build", "launch"])
def test_bubble_names_the_longest_part(part: str) -> None:
    lengths = dict.fromkeys(
        ("settle", "grammar", "drain", "inbox", "vote", "build", "launch"), 40
    ) | {part: 700}
    late = iteration(1, 1100, **lengths)
    assert ring(forward(0, 1000, 1300, launched_ns=1100), late).judge(late) == part
    assert late.bubble == part


def test_wait_for_the_device_is_not_blamed_on_settlement() -> None:
    late = iteration(2, 1100, settle=500, build=90, launch=20)
    older = forward(0, 900, 1000, wait_begin_ns=1100, wait_end_ns=1590)
    records = ring(older, forward(1, 1000, 1300, launched_ns=1090), late)
    assert records.waited_ns(late) == 490
    assert records.judge(late) == "build"


def test_deferred_part_of_the_iteration_before_is_a_cause() -> None:
    late = iteration(2, 1900, settle=10, build=90, launch=20)
    older = forward(0, 900, 1000, deferred_begin_ns=1095, deferred_end_ns=1890)
    records = ring(older, forward(1, 1000, 1300, launched_ns=1090), late)
    assert records.judge(late) == "deferred"


def test_other_is_the_cause_when_nobody_called_the_loop() -> None:
    late = iteration(1, 1900, settle=10, build=90, launch=20)
    assert ring(forward(0, 1000, 1300, launched_ns=1090), late).judge(late) == "other"


def test_first_step_after_idling_is_no_bubble() -> None:
    late = iteration(1, 9000, build=90, launch=20)
    late.after_idle = True
    assert ring(forward(0, 1000, 1300, launched_ns=1090), late).judge(late) is None


def test_first_step_of_all_is_no_bubble() -> None:
    first = iteration(0, 100, build=90, launch=20)
    assert ring(first).judge(first, ran_dry=True) is None


def test_loop_can_say_itself_that_the_device_ran_dry() -> None:
    before, late = iteration(0, 100, launch=10), iteration(1, 110, build=90, launch=20)
    records = ring(before, late)
    assert records.judge(late) is None  # nobody knows
    assert records.judge(late, ran_dry=True) == "build"
    assert records.judge(late, ran_dry=False) is None


def test_part_that_did_not_run_takes_no_time() -> None:
    parts = iteration(0, 100, settle=5, build=70, launch=20).parts_ns()
    assert parts == {
        **{"settle": 5, "grammar": 0, "drain": 0, "inbox": 0, "vote": 0},
        **{"build": 70, "launch": 20},
    }
    assert bubble_cause(StepRecord(0, DECODE), iteration(1, 0, build=5, launch=3)) == "build"
