"""The model of the fakes notices what a scheduler gets wrong: one thing in each test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.plans import Phase, RowStatus
from deepinfer_core.testing.fake_model import FakeModel
from deepinfer_core.testing.hand_plans import PlanRow, make_plan
from deepinfer_core.testing.two_requests import (
    ENTERS,
    LIMITS,
    PROMPT,
    STORED,
    VOCAB,
    decode,
    entered,
    hit,
    reference,
    run,
    tokens,
)
from deepinfer_core.types import SamplingParams


@pytest.mark.parametrize("pool", ["compressed", "index"])
@pytest.mark.parametrize("name", ["position", "token", "hash"])
@pytest.mark.parametrize("position", range(9))
def test_any_changed_position_is_found(pool, name, position):
    model = entered(1)
    getattr(model.pools[pool], name)[position // 4, position % 4] += 1
    with pytest.raises(AssertionError, match=r"foreign content|window|pair"):
        run(model, make_plan(2, decode(1, 0)))


@pytest.mark.parametrize("position", range(4, 9))
def test_any_changed_window_entry_is_found(position):
    model = entered(1)
    model.windows.window.hash[0, position % model.windows.window.length] += np.uint64(1)
    with pytest.raises(AssertionError, match="the window of request 1 is stale"):
        run(model, make_plan(2, decode(1, 0)))


def test_window_checks_read_the_last_window_alone():
    model = FakeModel(replace(LIMITS, window=3), vocab_size=VOCAB, checks="window")
    run(model, make_plan(1, ENTERS[1]))
    model.pools["index"].token[0, 1] += 1
    run(model, make_plan(2, decode(1, 0)))
    model.pools["index"].token[1, 3] += 1
    with pytest.raises(AssertionError, match="foreign content"):
        run(model, make_plan(3, decode(1, 1)))


WRONG_ROWS = {
    "length too large": (decode(1, 0, start=10), "starts at 10, .* at 9"),
    "length too small": (decode(1, 0, start=8), "starts at 8, .* at 9"),
    "slot of another": (decode(1, 0, slot=1), "slot 1 belongs to 2/0"),
    "old generation": (decode(1, 0, generation=1), "slot 0 belongs to 1/0"),
    "placeholder fed": (decode(1, 0, token_ids=(-1,)), "two sources"),
    "illegal id": (decode(1, 0, token_ids=(VOCAB,)), "illegal id"),
    "stale table entry": (decode(1, 0, blocks=(5,), first_block=1), "block 5 holds"),
    "block of another": (decode(1, 0, blocks=(9,), first_block=0), "block 9 holds"),
    "gap in the table": (decode(1, 0, blocks=(5,), first_block=6), "a gap"),
    "block that is none": (decode(1, 0, blocks=(18,), first_block=3), "no block among"),
    "longer than planned": (decode(1, 0, start=8, source=0), "longer than its upper bound"),
    "no rows": (decode(1, 0, phase=Phase.CHUNK, token_ids=()), "without rows"),
    "too many drafts": (decode(1, 0, 4), "more drafts"),
    "chunk from the carry": (decode(1, 0, phase=Phase.FINAL_CHUNK, source=0), "a chunk reads"),
    "window cut behind its row": (decode(1, 0, window_start=10), "a window starts behind"),
    "sampled row without late layers": (decode(1, 0, tail_start=10), "skips the late layers"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_wrong_row_is_noticed(name):
    row, message = WRONG_ROWS[name]
    model = entered(1, 2)
    with pytest.raises(AssertionError, match=message):
        run(model, make_plan(2, row))


def test_pools_that_hold_different_prefixes_are_noticed():
    model, other = entered(1), FakeModel(LIMITS, vocab_size=VOCAB)
    run(other, make_plan(1, replace(ENTERS[1], token_ids=(0, *PROMPT[1][1:]))))
    for name in ("token", "hash"):
        getattr(model.pools["index"], name)[:] = getattr(other.pools["index"], name)
    with pytest.raises(AssertionError, match="'index' holds another prefix of request 1"):
        run(model, make_plan(2, decode(1, 0)))


def test_block_that_became_unclean_is_not_read():
    model = entered(1)
    model.pools["index"].unclean[1] = True
    with pytest.raises(AssertionError, match="at position 4, holds values that are not finite"):
        run(model, make_plan(2, decode(1, 0)))


def test_table_entries_of_a_sequence_outside_the_step_are_noticed():
    plan = make_plan(2, decode(1, 0))
    stray = make_plan(2, replace(ENTERS[2], blocks=(4,), enters=False)).tables
    with pytest.raises(AssertionError, match="nobody in the step"):
        run(entered(1, 2), replace(plan, tables=stray))


def test_scored_row_without_late_layers_is_noticed():
    row = replace(
        ENTERS[1],
        tail_start=3,
        params=SamplingParams(prompt_logprobs=0),
        prompt_targets=PROMPT[1][1:],
    )
    with pytest.raises(AssertionError, match="a scored row"):
        run(FakeModel(LIMITS, vocab_size=VOCAB), make_plan(1, row))


def test_rows_past_the_table_of_a_sequence_are_noticed():
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    with pytest.raises(AssertionError, match="writes past its blocks"):
        run(model, make_plan(1, replace(ENTERS[1], blocks=(0, 1))))


def test_row_count_that_differs_is_noticed():
    with pytest.raises(AssertionError, match="counts 8 rows, its sequences 9"):
        run(FakeModel(LIMITS), make_plan(1, ENTERS[1], num_rows=8))


def test_two_sequences_in_one_slot_are_noticed():
    with pytest.raises(AssertionError, match="share a slot"):
        run(FakeModel(LIMITS), make_plan(1, ENTERS[1], replace(ENTERS[2], slot=0)))


def test_two_rows_of_one_carry_are_noticed():
    with pytest.raises(AssertionError, match="the same carry"):
        rows = (decode(1, 0, source=0), decode(2, 0, source=0))
        run(entered(1, 2), make_plan(2, *rows))


@pytest.mark.parametrize("source", [1, 7])
def test_carry_of_another_sequence_is_a_bad_source(source):
    model = entered(1, 2)
    result = run(model, make_plan(2, decode(1, 0, source=source), decode(2, 0)))
    assert result.status.tolist() == [RowStatus.BAD_SOURCE, RowStatus.OK]
    assert tokens(result, 1) == reference(2)[1:2]


def test_chunk_leaves_no_carry():
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    run(model, make_plan(1, replace(ENTERS[1], phase=Phase.CHUNK)))
    result = run(model, make_plan(2, decode(1, 0, source=0)))
    assert result.status.tolist() == [RowStatus.BAD_SOURCE]


def test_stored_window_state_that_is_not_finite_is_not_loaded():
    model = FakeModel(LIMITS, vocab_size=VOCAB, poison=lambda meta: True)
    run(model, make_plan(1, ENTERS[1], window_saves=((0, STORED),)))
    row = PlanRow(5, 2, (1, 2), enters=True, blocks=(5,))
    with pytest.raises(AssertionError, match="stored window 3 is not finite"):
        run(model, make_plan(2, row, window_loads=((STORED, 2),)))


def test_carry_is_gone_after_one_step():
    model = entered(1, 2)
    run(model, make_plan(2, decode(2, 0)))
    result = run(model, make_plan(3, decode(1, 0, source=0)))
    assert result.status.tolist() == [RowStatus.BAD_SOURCE]


def test_block_freed_too_early_is_noticed_when_its_owner_reads_it():
    model = entered(1)
    run(model, make_plan(2, replace(ENTERS[2], blocks=(8, 1))))
    with pytest.raises(AssertionError, match=r"block 1 .* request 1 .* changed hands"):
        run(model, make_plan(3, decode(1, 0)))


def test_block_that_another_row_of_the_step_reads_is_not_written():
    with pytest.raises(AssertionError, match=r"writes block 1 .* somebody else uses"):
        run(entered(1), make_plan(2, decode(1, 0), replace(ENTERS[2], blocks=(8, 1))))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (hit(2, 5), "the compression pair of request 5"),
        (hit(2, 4), "writes block 1 .* somebody else uses"),
        (hit(8, 0), "the window of request 5 is stale"),
        (replace(hit(2, 6), token_ids=(9, *PROMPT[1][3:])), "replays another token"),
        (replace(hit(2, 6), blocks=(1, 0, 5)), "foreign content"),
        (hit(2, 7), "replay without a computed row"),
    ],
    ids=["odd floor", "floor inside a block", "no replay", "token", "blocks", "nothing computed"],
)
def test_wrong_replay_is_noticed(row, message):
    model = entered(1)
    with pytest.raises(AssertionError, match=message):
        run(model, make_plan(2, replace(row, window_start=row.start * bool(row.num_replay))))


def test_window_state_of_another_length_is_noticed():
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    chunk = replace(ENTERS[1], token_ids=PROMPT[1][:4], phase=Phase.CHUNK)
    run(model, make_plan(1, chunk, window_saves=((0, STORED),)))
    rest = replace(ENTERS[1], token_ids=PROMPT[1][4:], start=4, enters=False, blocks=())
    run(model, make_plan(2, rest))
    with pytest.raises(AssertionError, match=r"request 5 starts at 8, .* at 4"):
        row = replace(hit(8, 0), window_start=0)
        run(model, make_plan(3, row, window_loads=((STORED, 2),)))


def test_late_layers_pruned_too_early_are_noticed():
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    chunk = replace(ENTERS[1], token_ids=PROMPT[1][:8], phase=Phase.CHUNK, tail_start=8)
    run(model, make_plan(1, chunk))
    rest = replace(ENTERS[1], token_ids=PROMPT[1][8:], start=8, enters=False, blocks=())
    with pytest.raises(AssertionError, match="late layers' window of request 1"):
        run(model, make_plan(2, replace(rest, tail_start=3)))


def test_non_finite_values_stay_until_they_are_scrubbed():
    model = entered(1, 2, poison=lambda meta: meta.uid == 1 and meta.start >= 9)
    result = run(model, make_plan(2, decode(1, 0), decode(2, 0)))
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    model.poison = None
    result = run(model, make_plan(3, decode(1, 0, start=10, source=0)))
    assert result.status.tolist() == [RowStatus.NON_FINITE], "its window is not finite"
    again = PlanRow(3, 2, (1, 2), enters=True, blocks=(2,))
    with pytest.raises(AssertionError, match=r"block 2 .* was not scrubbed"):
        run(model, make_plan(4, again))
    model.scrub({"compressed": (2,), "index": (2,)}, ())
    with pytest.raises(AssertionError, match="slot 0 was not scrubbed"):
        run(model, make_plan(5, replace(again, slot=0)))
    model.scrub({}, (0,))
    assert run(model, make_plan(6, replace(again, slot=0))).status.tolist() == [RowStatus.OK]


def test_sampling_comes_once_after_each_forward():
    model = entered(1)
    with pytest.raises(AssertionError, match="without a forward"):
        model.sample()
    model.forward(make_plan(2, decode(1, 0)))
    with pytest.raises(AssertionError, match="was not launched"):
        model.forward(make_plan(3, decode(1, 1)))


@pytest.mark.parametrize("history", [(), (4,), (5, 4), (3, 4, 5)])
def test_wrong_history_is_noticed(history):
    limits = replace(LIMITS, history_len=2)
    model = FakeModel(limits, vocab_size=VOCAB)
    run(model, make_plan(1, ENTERS[1]))
    with pytest.raises(AssertionError, match="history of request 5"):
        run(model, make_plan(2, hit(2, 6, history=history)))
    model = FakeModel(limits, vocab_size=VOCAB)
    run(model, make_plan(1, ENTERS[1]))
    run(model, make_plan(2, hit(2, 6, history=(3, 4))))
