"""The model of the fakes gives the reference's tokens, whatever the steps look like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.plans import Masks, Phase, RowStatus
from deepinfer_core.testing.fake_model import FakeModel
from deepinfer_core.testing.fake_worker import FakeWorker
from deepinfer_core.testing.hand_plans import PlanRow, make_plan
from deepinfer_core.testing.reference import (
    EMPTY_HASH,
    chain_rows,
    logprob_of,
    mix,
    next_token,
    next_token_rows,
    prompt_logprobs_reference,
    serial_reference,
)
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
from deepinfer_core.types import Request, SamplingParams


def test_hashes_of_arrays_equal_those_of_numbers():
    ids = np.array([5, 0, 39, 7, 7, 1])
    for lengths in ([6], [2, 1, 3], [1] * 6):
        expected, place = [], 0
        for row, length in enumerate(lengths):
            state = EMPTY_HASH + row
            for token_id in ids[place : place + length].tolist():
                expected.append(state := mix(state, token_id))
            place += length
        states = np.arange(len(lengths), dtype=np.uint64) + np.uint64(EMPTY_HASH)
        chained = chain_rows(states, ids, np.array(lengths))
        assert chained.tolist() == expected
        seeds = np.arange(6, dtype=np.uint64) + np.uint64(2**63)
        drawn = next_token_rows(chained, seeds, VOCAB)
        pairs = zip(expected, seeds.tolist(), strict=True)
        assert drawn.tolist() == [next_token(state, seed, VOCAB) for state, seed in pairs]


@pytest.mark.parametrize("checks", ["all", "window", "none"])
@pytest.mark.parametrize(
    "accepts", [1.0, 0.0, 0.5, lambda uid, position: (uid * 5 + position) % 3 > 0]
)
def test_tokens_through_the_carry_equal_the_reference(checks, accepts):
    model = FakeModel(LIMITS, vocab_size=VOCAB, checks=checks, accepts=accepts)
    rows = [replace(ENTERS[uid], blocks=tuple(range(9 * uid - 9, 9 * uid))) for uid in (1, 2)]
    result, order = run(model, make_plan(1, *rows)), [1, 2]
    produced: dict[int, tuple[int, ...]] = {1: (), 2: ()}
    for step in range(2, 8):
        for place, uid in enumerate(order):
            produced[uid] += tokens(result, place)
        rows = [
            PlanRow(
                uid=uid,
                slot=uid - 1,
                token_ids=(0,) * 3,
                start=len(PROMPT[uid]) + 3 * (step - 2),  # as if all drafts had been accepted
                phase=Phase.VERIFY,
                source=order.index(uid),
            )
            for uid in order[::-1]
        ]
        order.reverse()
        result = run(model, make_plan(step, *rows))
    for uid, found in produced.items():
        assert found == reference(uid, len(found))
    if isinstance(accepts, float):
        lengths = {1.0: {16}, 0.0: {6}, 0.5: set(range(7, 16))}[accepts]
        assert {len(found) for found in produced.values()} <= lengths


def test_drafts_fed_by_the_host_are_accepted_up_to_the_first_wrong_one():
    for wrong, expected in ((2, 2), (1, 1), (3, 3)):
        model = entered(1)
        ids = list(reference(1)[:3])
        if wrong < 3:
            ids[wrong] = (ids[wrong] + 1) % VOCAB
        result = run(model, make_plan(2, decode(1, 0, token_ids=tuple(ids))))
        assert tokens(result) == reference(1)[1 : 1 + expected]


def test_next_drafts_are_in_the_result_and_in_the_carry():
    model = entered(1)
    result = run(model, make_plan(2, decode(1, 0)))
    assert tuple(result.drafts[0].tolist()) == reference(1)[2:4]
    result = run(model, make_plan(3, decode(1, 1, 3, source=0)))
    assert tokens(result) == reference(1)[2:5]


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_chunks_give_what_the_whole_prompt_gives(size):
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    for step, start in enumerate(range(0, 9, size), start=1):
        ids = PROMPT[1][start : start + size]
        phase = Phase.CHUNK if start + size < 9 else Phase.FINAL_CHUNK
        row = replace(ENTERS[1], start=start, token_ids=ids, phase=phase, enters=not start)
        result = run(model, make_plan(step, row if not start else replace(row, blocks=())))
        assert (result.num_tokens[0] > 0) == (phase is Phase.FINAL_CHUNK)
    assert tokens(result) == reference(1)[:1]


def test_replay_rebuilds_windows_behind_shared_blocks():
    model = entered(1)
    result = run(model, make_plan(2, hit(2, 6)))
    state = EMPTY_HASH
    for token_id in PROMPT[1]:
        state = mix(state, token_id)
    assert tokens(result) == (next_token(state, 5, VOCAB),)
    both = make_plan(3, decode(1, 0), PlanRow(5, 2, tokens(result), 9, Phase.VERIFY))
    assert (run(model, both).status == RowStatus.OK).all()


def test_stored_window_states_resume_without_replay():
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    chunk = replace(ENTERS[1], token_ids=PROMPT[1][:8], phase=Phase.CHUNK)
    run(model, make_plan(1, chunk, window_saves=((0, STORED),)))
    rest = replace(ENTERS[1], token_ids=PROMPT[1][8:], start=8, enters=False, blocks=())
    assert tokens(run(model, make_plan(2, rest))) == reference(1)[:1]
    row = replace(hit(8, 0), window_start=0)
    result = run(model, make_plan(3, row, window_loads=((STORED, 2),)))
    result = run(model, make_plan(4, PlanRow(5, 2, tokens(result), 9, Phase.VERIFY)))
    assert result.status.tolist() == [RowStatus.OK]


def masks(*allowed: set[int]) -> Masks:
    bits = np.zeros((len(allowed), 64), dtype=np.uint8)
    for place, ids in enumerate(allowed):
        bits[place, list(ids)] = 1
    return Masks(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def test_masked_rows_take_the_first_allowed_token():
    model = entered(1, 2)
    plan = make_plan(2, decode(1, 0), decode(2, 0), delays_sampling=True)
    model.forward(plan)
    free = reference(1)[1]
    result = model.sample({0: masks({(free + 5) % VOCAB, (free - 1) % VOCAB})})
    assert tokens(result) == ((free + 5) % VOCAB,)
    assert tokens(result, 1) == reference(2)[1:2]


def test_reference_with_masks_equals_the_model():
    def allowed(produced):
        return np.arange(VOCAB) % 2 == len(produced) % 2

    request = Request(1, "", PROMPT[1], SamplingParams(max_tokens=4), seed=1)
    expected, _ = serial_reference(request, LIMITS.max_model_len, VOCAB, allowed)
    model, produced = FakeModel(LIMITS, vocab_size=VOCAB), []
    model.forward(make_plan(1, ENTERS[1], delays_sampling=True))
    for step in range(2, 6):
        mask = masks(set(np.flatnonzero(allowed(produced)).tolist()))
        produced.append(tokens(model.sample({0: mask}))[0])
        row = PlanRow(1, 0, (produced[-1],), 7 + step, Phase.VERIFY)
        model.forward(make_plan(step, row, delays_sampling=True))
    assert tuple(produced) == expected


def test_no_draft_is_accepted_behind_an_illegal_one():
    model = entered(1)
    model.forward(make_plan(2, decode(1, 0, 3), delays_sampling=True))
    other = (reference(1)[1] + 1) % VOCAB
    assert tokens(model.sample({0: masks({other}, set(), set())})) == (other,)


def test_row_without_an_allowed_token_is_not_finite():
    model = entered(1)
    model.forward(make_plan(2, decode(1, 0), delays_sampling=True))
    assert model.sample({0: masks(set())}).status.tolist() == [RowStatus.NON_FINITE]


def test_logprobs_come_for_those_who_asked():
    model = FakeModel(LIMITS, vocab_size=VOCAB)
    asked = replace(
        ENTERS[2],
        params=SamplingParams(logprobs=2, prompt_logprobs=1),
        prompt_targets=PROMPT[2][1:],
    )
    result = run(model, make_plan(1, ENTERS[1], asked))
    slab = result.logprobs
    assert slab.rows.tolist() == [1] and slab.num_top.tolist() == [2]
    request = Request(2, "", PROMPT[2], asked.params, seed=2)
    assert {p.position: p.value for p in result.prompt_logprobs[1]} == dict(
        prompt_logprobs_reference(request, VOCAB)
    )
    state = int(chain_rows(np.array([1], np.uint64), np.array(PROMPT[2]), np.array([5]))[-1])
    value = logprob_of(state, tokens(result, 1)[0], 2, VOCAB)
    assert slab.chosen[0, 0] == value.logprob
    assert tuple(zip(slab.best_ids[0, 0], slab.best[0, 0], strict=True)) == value.top


def test_empty_step_changes_nothing():
    model = entered(1)
    before = [array.copy() for array in model.arrays()]
    result = run(model, make_plan(2))
    assert len(result.token_ids) == 0
    assert all(map(np.array_equal, before, model.arrays()))


def test_worker_runs_what_is_launched_and_nothing_else():
    worker = FakeWorker(LIMITS, vocab_size=VOCAB)
    first = make_plan(1, ENTERS[1])
    second = make_plan(2, decode(1, 0, source=0), delays_sampling=True)
    worker.launch(first)
    worker.launch(second)
    assert worker.run_one() and worker.num_rows == 9
    assert worker.run_one() and worker.num_rows == 10
    assert not worker.run_one(), "its sampling is not launched"
    worker.launch_sampling(second, {})
    assert tokens(worker.result(second)) == reference(1)[1:2]
    assert tokens(worker.result(first)) == reference(1)[:1]
    with pytest.raises(AssertionError, match="step 2 was never launched"):
        worker.result(second)
