"""Counters and histograms of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from deepinfer_core.engine.records import StepRecord
from deepinfer_core.engine.step_ring import DeviceTimes
from deepinfer_core.engine.watchdog import Watchdog
from deepinfer_core.metrics import Counter, Family, FamilyKind, Histogram, HistogramValues, Metrics
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
from deepinfer_core.scheduler.counts import SchedulerCounts
from deepinfer_core.scheduler.totals import Totals as SchedulerTotals


@dataclass
class Totals:
    """What a scheduler has counted."""

    rollback_tokens: int = 5
    fresh_name: int = 3
    row_status: dict[RowStatus, int] = field(default_factory=lambda: {RowStatus.BAD_SOURCE: 2})


COUNTS = {
    **{"waiting": 1, "prefilling": 2, "running": 3, "leaving": 4, "unsettled_steps": 2},
    **{"inflight_tokens": 24, "free_slots": 6, "preemptions": 0},
    "blocks": {"compressed": {"free": 7, "held": 2}, "index": {"free": 9}},
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def snapshot(metrics: Metrics, watchdog: Watchdog | None = None) -> dict[str, Family]:
    # Fields of the counts that other parts of the engine add are nothing to these tests.
    known = {name: COUNTS.get(name, 0) for name in SchedulerCounts.__dataclass_fields__}
    return metrics.snapshot(SchedulerCounts(**known), Totals(), watchdog)


def record(step_seq: int, begin: int, **fields: object) -> StepRecord:
    """A step whose parts take 1, 2, 3, 4, 5 and so on ns."""
    values: dict[str, object] = {
        **{"begin_ns": begin, "settled_ns": begin + 100, "drained_ns": begin + 101},
        **{"inbox_ns": begin + 103, "voted_ns": begin + 106, "built_ns": begin + 110},
        **{"launched_ns": begin + 115, "wait_begin_ns": begin + 500, "wait_end_ns": begin + 700},
        **{"settle_end_ns": begin + 706, "deferred_begin_ns": begin + 800},
        **{"deferred_end_ns": begin + 807, "num_sequences": 2, "num_rows": 4},
        "device": DeviceTimes((begin, begin), (begin + 200, begin + 600), (begin, begin)),
    }
    return StepRecord(step_seq, StepKind.DECODE, **{**values, **fields})


def total(family: Family, *labels: str) -> tuple[int, int]:
    values = family.values[labels]
    assert isinstance(values, HistogramValues)
    return values.count, values.total


def test_counter_counts_by_labels() -> None:
    counter = Counter()
    counter.add(2, "a")
    counter.add(1, "b")
    counter.add(1, "a")
    assert counter.values() == {("a",): 3, ("b",): 1}


def test_histogram_buckets_are_cumulative_and_hold_what_they_promise() -> None:
    histogram = Histogram()
    for value in (0, 1, 2, 3, 4, 1000):
        histogram.observe(value)
    values = histogram.values()
    assert values.buckets[:4] == ((0, 1), (1, 2), (3, 4), (7, 5))
    assert values.buckets[-1] == (1023, 6)
    assert (values.count, values.total) == (6, 1010)


def test_many_values_at_once_count_as_one_by_one() -> None:
    numbers = np.array([0, 1, 1, 5, 8, 300])
    one_by_one, at_once = Histogram(), Histogram()
    for value in numbers.tolist():
        one_by_one.observe(value)
    at_once.observe_all(numbers)
    assert at_once.values() == one_by_one.values()


def test_empty_histogram_has_no_buckets() -> None:
    assert Histogram().values() == HistogramValues((), 0, 0)


def test_negative_time_counts_as_none() -> None:
    histogram = Histogram()
    histogram.observe(-5)
    assert histogram.values() == HistogramValues(((0, 1),), 1, 0)


def test_parts_of_the_host_are_counted_by_name(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000))
    parts = snapshot(metrics)["host_iteration_ns"]
    expected = {"drain": 1, "inbox": 2, "vote": 3, "build": 4, "launch": 5, "settle": 6}
    expected |= {"deferred": 7, "wait": 200}
    assert {part: total(parts, part) for part in expected} == {
        part: (1, length) for part, length in expected.items()
    }
    assert total(parts, "grammar") == (0, 0)


def test_host_time_of_a_row_leaves_out_the_wait(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000))
    assert total(snapshot(metrics)["host_ns_per_row"]) == (1, (1 + 2 + 3 + 4 + 5 + 6 + 7) // 4)


def test_wait_for_masks_is_a_part_of_its_own(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000, masked_ns=1100 + 30, drained_ns=1131, inbox_ns=1133))
    parts = snapshot(metrics)["host_iteration_ns"]
    assert (total(parts, "grammar"), total(parts, "drain")) == ((1, 30), (1, 1))


def test_device_times_make_step_time_interval_gap_and_overlap(metrics: Metrics) -> None:
    for step in range(3):
        metrics.observe_step(record(step, 1000 + 500 * step))
    found = snapshot(metrics)
    assert total(found["step_time_ns"], "decode") == (3, 1200)
    assert total(found["step_interval_ns"], "decode") == (2, 1000)
    assert total(found["device_gap_ns"]) == (2, 200)
    assert found["overlap_ratio"].values[()] == pytest.approx(1200 / 1400)


def test_idling_is_neither_interval_nor_gap(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000))
    metrics.observe_step(record(1, 90_000, after_idle=True))
    found = snapshot(metrics)
    assert total(found["step_interval_ns"], "decode") == (0, 0)
    assert total(found["device_gap_ns"]) == (0, 0)
    assert found["overlap_ratio"].values[()] == 1.0


def test_without_device_times_a_step_lasts_from_launch_to_results(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000, device=None))
    found = snapshot(metrics)
    assert total(found["step_time_ns"], "decode") == (1, 700 - 115)
    assert "overlap_ratio" not in found


def test_bubbles_are_counted_by_cause_and_empty_steps_by_kind(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000, bubble="build"))
    metrics.observe_step(record(1, 2000, bubble="build"))
    metrics.observe_step(record(2, 3000, num_sequences=0, num_rows=0))
    found = snapshot(metrics)
    assert found["bubble_total"].values == {("build",): 2}
    assert found["empty_steps"].values == {("decode",): 1}
    assert total(found["rows"], "decode") == (2, 8)


def settled(phases: list[Phase], **columns: list[int]) -> tuple[StepPlan, StepResult]:
    """A step and its result, from columns."""
    num, num_verified = len(phases), columns.pop("num_verified", None)
    num_tokens = np.array(columns.pop("num_tokens"))
    rows = StepRows.of(
        num,
        phase=np.array([PHASES.index(phase) for phase in phases]),
        **{name: np.array(values) for name, values in columns.items()},
    )
    num_rows = int(rows.num_rows.sum())
    verified = rows.num_drafts if num_verified is None else np.array(num_verified)
    room = num_rows - int((rows.num_drafts - verified).sum())
    output = SchedulerOutput(1, StepKind.DECODE, room, False)
    zeros = np.zeros(num, dtype=np.int64)
    token_ids = np.zeros((num, 4), dtype=np.int64)
    result = StepResult(1, token_ids, num_tokens, zeros, zeros, verified)
    return StepPlan(output, rows, np.zeros(num_rows, dtype=np.int64)), result


def test_accepted_drafts_are_counted_by_position(metrics: Metrics) -> None:
    metrics.observe_settled(
        *settled(
            [Phase.VERIFY] * 4,
            num_rows=[4, 4, 2, 1],
            num_drafts=[3, 3, 1, 0],
            num_tokens=[4, 2, 1, 1],
        )
    )
    found = snapshot(metrics)
    assert total(found["verified_tokens_per_row"]) == (4, 11)
    assert total(found["accepted_len"]) == (4, 8)
    # Position 0 was drafted three times and accepted twice; 1 and 2: twice and once.
    assert found["acceptance"].values == {
        ("0",): pytest.approx(2 / 3),
        ("1",): pytest.approx(1 / 2),
        ("2",): pytest.approx(1 / 2),
    }


def test_acceptance_adds_up_over_steps_of_different_draft_lengths(metrics: Metrics) -> None:
    for drafts, tokens in ((1, 2), (2, 1), (2, 3)):
        metrics.observe_settled(
            *settled(
                [Phase.VERIFY], num_rows=[drafts + 1], num_drafts=[drafts], num_tokens=[tokens]
            )
        )
    values = snapshot(metrics)["acceptance"].values
    assert values == {("0",): pytest.approx(2 / 3), ("1",): pytest.approx(1 / 2)}


def test_drafts_that_the_device_left_out_are_not_counted(metrics: Metrics) -> None:
    step = settled(
        [Phase.VERIFY] * 3,
        num_rows=[4, 4, 4],
        num_drafts=[3, 3, 3],
        num_verified=[2, 1, 0],
        num_tokens=[3, 1, 1],
    )
    assert step[0].trims
    metrics.observe_settled(*step)
    found = snapshot(metrics)
    assert total(found["verified_tokens_per_row"]) == (3, 3 + 3)  # the rows of last tokens too
    assert found["acceptance"].values == {("0",): pytest.approx(1 / 2), ("1",): 1.0}


def verify(num_tokens: list[int], num_verified: list[int]) -> tuple[StepPlan, StepResult]:
    """A decode step of sequences with two drafts each."""
    num = len(num_tokens)
    return settled(
        [Phase.VERIFY] * num,
        num_rows=[3] * num,
        num_drafts=[2] * num,
        num_verified=num_verified,
        num_tokens=num_tokens,
    )


KNOWN = np.array([[0.9, 0.5], [0.9, 0.25], [0.3, 0.1]], dtype=np.float32)


def test_predictions_are_compared_with_what_stood_among_verified_drafts(metrics: Metrics) -> None:
    known = np.array([True, True, False])
    metrics.observe_settled(*verify([3, 1, 2], [2, 1, 1]), (KNOWN, known))
    found = snapshot(metrics)
    assert found["predicted_accepted_ratio"].values[()] == pytest.approx((0.9 + 0.5 + 0.9) / 2)
    assert found["verify_steps"].values == {("full",): 0, ("trimmed",): 1}
    assert found["rows_without_survival"].values == {(): 1}
    assert found["survival_ece"].values == {}  # what is unlikely was not tried


def test_calibration_errors_are_those_of_full_steps_by_position(metrics: Metrics) -> None:
    known = np.array([True, True, True])
    for num_tokens in ([3, 2, 1], [1, 3, 1]):
        metrics.observe_settled(*verify(num_tokens, [2, 2, 2]), (KNOWN, known))
    metrics.observe_settled(*verify([1, 1, 1], [2, 1, 2]), (KNOWN, known))
    found = snapshot(metrics)
    assert found["verify_steps"].values == {("full",): 2, ("trimmed",): 1}
    # position 0: 4 times 0.9, of which 3 stood, and twice 0.3, none; 1: each chance twice
    first = (abs(4 * 0.9 - 3) + abs(2 * 0.3 - 0)) / 6
    second = (abs(2 * 0.5 - 1) + abs(2 * 0.25 - 1) + abs(2 * 0.1 - 0)) / 6
    assert found["survival_ece"].values == {
        ("0",): pytest.approx(first, abs=1e-6),
        ("1",): pytest.approx(second, abs=1e-6),
    }


def test_nothing_is_told_of_predictions_before_a_draft_was_verified(metrics: Metrics) -> None:
    step = settled([Phase.VERIFY], num_rows=[1], num_drafts=[0], num_tokens=[1])
    metrics.observe_settled(*step, (KNOWN[:1], np.array([True])))
    metrics.observe_settled(*verify([0], [2]), (KNOWN[:1], np.array([True])))
    assert not {"verify_steps", "survival_ece"} & set(snapshot(metrics))


def test_row_that_yields_nothing_is_not_verified(metrics: Metrics) -> None:
    metrics.observe_settled(*settled([Phase.VERIFY], num_rows=[3], num_drafts=[2], num_tokens=[0]))
    found = snapshot(metrics)
    assert total(found["accepted_len"]) == (0, 0)
    assert found["acceptance"].values == {}


def test_chunks_are_counted_by_their_rows(metrics: Metrics) -> None:
    phases = [Phase.CHUNK, Phase.FINAL_CHUNK, Phase.VERIFY]
    metrics.observe_settled(
        *settled(phases, num_rows=[64, 10, 1], num_drafts=[0, 0, 0], num_tokens=[0, 1, 1])
    )
    found = snapshot(metrics)
    assert total(found["chunk_len"]) == (2, 74)
    assert total(found["accepted_len"]) == (1, 1)


def test_counts_and_totals_become_families(metrics: Metrics) -> None:
    found = snapshot(metrics)
    assert found["kv_blocks"].labels == ("pool", "state")
    assert found["kv_blocks"].values == {
        ("compressed", "free"): 7,
        ("compressed", "held"): 2,
        ("index", "free"): 9,
    }
    assert found["requests"].values[("prefilling",)] == 2
    assert found["total_inflight_tokens"].values == {(): 24}
    assert found["rollback_tokens"].values == {(): 5}
    assert found["rollback_tokens"].kind is FamilyKind.COUNTER
    assert found["row_status"].labels == ("kind",)
    assert found["row_status"].values == {("bad_source",): 2}
    assert found["fresh_name"].help == "Fresh name."


def test_totals_of_the_scheduler_take_no_other_name_away(metrics: Metrics) -> None:
    totals = SchedulerTotals()
    totals.count_status(RowStatus.NON_FINITE)
    known = {name: COUNTS.get(name, 0) for name in SchedulerCounts.__dataclass_fields__}
    bare = set(snapshot(metrics)) - set(Totals.__dataclass_fields__)
    assert not bare & set(SchedulerTotals.__dataclass_fields__)
    found = metrics.snapshot(SchedulerCounts(**known), totals)
    assert found["row_status"].values == {("non_finite",): 1}
    assert set(found) == bare | set(SchedulerTotals.__dataclass_fields__)


def test_watchdog_is_in_the_snapshot_when_there_is_one(metrics: Metrics) -> None:
    watchdog = Watchdog()
    watchdog.host_ran(1.0)
    assert snapshot(metrics, watchdog)["host_stalls"].values == {(): 1}
    assert "host_stalls" not in snapshot(metrics)


def test_snapshot_does_not_change_afterwards(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000, bubble="build"))
    before = snapshot(metrics)
    metrics.observe_step(record(1, 2000, bubble="build"))
    assert before["bubble_total"].values == {("build",): 1}
    assert total(before["step_time_ns"], "decode") == (1, 400)


def test_every_family_has_labels_that_fit_its_values(metrics: Metrics) -> None:
    metrics.observe_step(record(0, 1000, bubble="build"))
    for name, family in snapshot(metrics, Watchdog()).items():
        assert family.help.endswith("."), name
        assert all(len(key) == len(family.labels) for key in family.values), name
