"""Constrained requests: what their grammar sees, what it forbids, and how it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.driven_loop import VOCAB, DrivenLoop, make_request
from deepinfer_core.testing.one_by_one import OneByOne
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import FinishReason, Request

LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 60, "index": 60},
    num_slots=4,
    max_model_len=100,
    max_step_tokens=32,
    max_chunk_tokens=32,
    window=6,
    vocab_size=VOCAB,
)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
DRAFTS = pytest.mark.parametrize("drafts", [0, 1, 5])
Rule = Callable[[Sequence[int]], np.ndarray]


class Grammar(OneByOne):
    """Allows what a rule says of the tokens so far, and ends after some number of them.

    It trusts nobody: it sees legal ids alone, each once, and never after its end.
    """

    def __init__(self, rule: Rule, end: int = 1000) -> None:
        self.rule, self.end = rule, end
        self.token_ids: list[int] = []
        self.calls = {"fill_window": 0, "accept": 0, "forced": 0}
        self.fails_at: tuple[str, int] | None = None  # a call, and which of its kind

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.fails_at == (name, self.calls[name]):
            raise ValueError(f"broken {name}")

    @property
    def done(self) -> bool:
        return len(self.token_ids) == self.end

    def fill_window(self, rows: np.ndarray, drafts: Sequence[int]) -> int:
        self._called("fill_window")
        assert not self.done, "asked after its end"
        assert rows.shape == (len(drafts) + 1, -(-VOCAB // 32)) and rows.flags.c_contiguous
        ids = list(self.token_ids)
        rows[:] = 0
        for row, draft in zip(rows, (*drafts, None), strict=True):
            if len(ids) == self.end:
                break
            bits = np.zeros(32 * len(row), dtype=np.uint8)
            bits[:VOCAB] = self.rule(ids)
            row[:] = np.packbits(bits, bitorder="little").view(np.int32)
            if draft is None or not bits[draft]:
                break
            ids.append(draft)
        return len(ids) - len(self.token_ids)

    def accept(self, token_ids: Sequence[int]) -> int:
        self._called("accept")
        assert not self.done, "advanced after its end"
        for count, token_id in enumerate(token_ids):
            assert 0 <= token_id < VOCAB, f"it sees id {token_id}"
            if self.done or not self.rule(self.token_ids)[token_id]:
                return count
            self.token_ids.append(token_id)
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        self._called("forced")
        assert not self.done, "asked after its end"
        ids = list(self.token_ids)
        while len(ids) < self.end and (allowed := self.rule(ids)).sum() == 1:
            ids.append(int(allowed.argmax()))
        return ids[len(self.token_ids) :]


def anything(token_ids: Sequence[int]) -> np.ndarray:
    return np.ones(VOCAB, dtype=bool)


def only(every: int) -> Rule:
    """Return a rule that allows multiples of a number alone."""
    return lambda token_ids: np.arange(VOCAB) % every == 0


def all_but(place: int, token_id: int) -> Rule:
    """Return a rule that forbids one token at one place."""
    return lambda ids: ~((np.arange(VOCAB) == token_id) & (len(ids) == place))


def drive(depth: int, drafts: int, accepts=1.0, **changes) -> DrivenLoop:
    return DrivenLoop(replace(LIMITS, max_drafts=drafts, **changes), depth, accepts=accepts)


def constrained(uid: int, rule: Rule, end: int = 1000, **changes) -> Request:
    return make_request(uid, constraint=Grammar(rule, end), **{"max_tokens": 16, **changes})


def expect_constrained(driven: DrivenLoop, uid: int) -> None:
    """Compare with the request alone, one token after another."""
    request = driven.requests[uid]
    grammar = request.constraint
    tokens, reason = serial_reference(request, 100, VOCAB, grammar.rule)
    if len(tokens) >= grammar.end:
        tokens, reason = tokens[: grammar.end], FinishReason.STOP
    assert (driven.tokens(uid), driven.end(uid).finish_reason) == (tokens, reason)


# What it forbids


@DEPTHS
@DRAFTS
@pytest.mark.parametrize("accepts", [0.5, 1.0])
def test_output_follows_the_grammar_for_any_drafts_and_depth(depth, drafts, accepts):
    driven = drive(depth, drafts, accepts)
    driven.submit(
        constrained(1, only(3)),
        constrained(2, lambda ids: np.arange(VOCAB) % (2 + len(ids) % 3) == 0, end=9),
        make_request(3, max_tokens=16),
        constrained(4, anything, stop_ids=frozenset({5, 6, 7})),
    )
    driven.run()
    for uid in (1, 2, 4):
        expect_constrained(driven, uid)
    driven.expect_reference(3)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("place", range(14))
def test_illegal_draft_at_any_offset_of_a_run_is_not_accepted(depth, place):
    forbidden = serial_reference(make_request(1, max_tokens=16), 100, VOCAB)[0][place]
    driven = drive(depth, 5)
    driven.submit(constrained(1, all_but(place, forbidden)), make_request(2, max_tokens=16))
    driven.run()
    assert driven.tokens(1)[place] != forbidden
    expect_constrained(driven, 1)
    driven.expect_reference(2)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("place", range(14))
def test_grammar_that_begins_inside_a_run_holds_from_there_on(depth, place):
    switch = serial_reference(make_request(1, max_tokens=16), 100, VOCAB)[0][place]

    def after_switch(ids: Sequence[int]) -> np.ndarray:
        return np.arange(VOCAB) % 4 == 0 if switch in ids else np.ones(VOCAB, dtype=bool)

    driven = drive(depth, 5)
    driven.submit(constrained(1, after_switch))
    driven.run()
    expect_constrained(driven, 1)


# Its end


@DEPTHS
@DRAFTS
@pytest.mark.parametrize("end", [1, 2, 3, 6, 7, 8])
def test_end_of_the_grammar_is_the_end_of_the_output_anywhere_in_a_run(depth, drafts, end):
    driven = drive(depth, drafts)
    driven.submit(constrained(1, anything, end, max_tokens=40), make_request(2, max_tokens=16))
    driven.run()
    assert len(driven.tokens(1)) == end
    assert len(driven.requests[1].constraint.token_ids) == end
    expect_constrained(driven, 1)
    driven.expect_reference(2)


@pytest.mark.parametrize("drafts", [0, 3])
def test_grammar_is_not_advanced_by_the_step_behind_its_end(drafts):
    driven = drive(2, drafts)
    driven.submit(constrained(1, anything, 5, max_tokens=40), make_request(2, max_tokens=16))
    while 1 not in {update.uid for update in driven.updates if update.finish_reason}:
        driven.iterate()
    assert 1 in driven.plans[-2].rows.uid, "it ran one step too far"
    calls = dict(driven.requests[1].constraint.calls)
    driven.run()
    assert driven.requests[1].constraint.calls == calls


# What it forces


def phrase(ids: Sequence[int]) -> np.ndarray:
    """Leave no choice at all."""
    return np.arange(VOCAB) == (7 * len(ids) + 3) % VOCAB


def now_and_then(ids: Sequence[int]) -> np.ndarray:
    """Leave no choice for five tokens of every seven."""
    if len(ids) % 7 > 1:
        return phrase(ids)
    return np.arange(VOCAB) % 3 == (ids[-1] % 3 if ids else 0)


@DEPTHS
@DRAFTS
def test_forced_tokens_are_drafts_that_need_no_drafter(depth, drafts):
    driven = drive(depth, drafts, 0.0)
    driven.submit(constrained(1, phrase, max_tokens=25))
    driven.run()
    expect_constrained(driven, 1)
    rows = -(-24 // (1 + drafts))  # the first token is the prompt's
    assert rows <= driven.scheduler.totals.decode_rows <= rows + depth
    calls = driven.requests[1].constraint.calls
    assert (calls["forced"] > 0) == (drafts > 0)


@DEPTHS
@DRAFTS
@pytest.mark.parametrize("accepts", [0.0, 0.5])
def test_forced_tokens_change_no_output(depth, drafts, accepts):
    driven = drive(depth, drafts, accepts)
    driven.submit(
        constrained(1, now_and_then, max_tokens=30),
        make_request(2, max_tokens=16),
        constrained(3, phrase, end=11, max_tokens=30),
        constrained(4, now_and_then, end=19, max_tokens=30, max_drafts=1),
    )
    driven.run()
    for uid in (1, 3, 4):
        expect_constrained(driven, uid)
    driven.expect_reference(2)


def test_grammar_that_forces_what_it_refuses_costs_its_drafts_alone():
    driven = drive(2, 4, 1.0)
    request = constrained(1, only(3))
    request.constraint.forced = lambda: (1, 2, 4, 5, 7, 8)
    driven.submit(request, make_request(2, max_tokens=16))
    driven.run()
    expect_constrained(driven, 1)
    driven.expect_reference(2)


# What it sees


@DEPTHS
@pytest.mark.parametrize("accepts", [0.0, 0.5, 1.0])
def test_grammar_stands_at_the_committed_tokens_after_every_settlement(depth, accepts):
    driven = drive(depth, 4, accepts)
    driven.submit(constrained(1, only(3)), constrained(2, anything, max_tokens=20))
    while driven.loop.has_work:
        driven.iterate()
        for sequence in driven.scheduler._roster.resident.values():
            committed = sequence.tokens[sequence.prompt_len :]
            assert sequence.request.constraint.token_ids == committed
    for uid in (1, 2):
        assert tuple(driven.requests[uid].constraint.token_ids) == driven.tokens(uid)
    driven.audit_idle()


def test_grammar_keeps_its_place_through_a_preemption():
    driven = drive(
        2, 2, 0.7, num_blocks={"compressed": 7, "index": 7}, growth_permille=0, num_slots=3
    )
    driven.submit(*(constrained(uid, only(3), max_tokens=14) for uid in (1, 2, 3)))
    driven.run()
    assert driven.scheduler.totals.preemptions > 0
    for uid in (1, 2, 3):
        expect_constrained(driven, uid)


# How it fails


@DEPTHS
@pytest.mark.parametrize("call", ["fill_window", "accept", "forced"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_broken_grammar_ends_its_request_and_its_row_stays_in_the_step(depth, call, nth):
    whole = drive(depth, 2, 0.6)
    whole.submit(constrained(1, anything), make_request(2, max_tokens=16))
    whole.run()
    driven = drive(depth, 2, 0.6)
    request = constrained(1, anything)
    request.constraint.fails_at = (call, nth)
    driven.submit(request, make_request(2, max_tokens=16))
    driven.run()
    end = driven.end(1)
    assert end.error_code == "constraint" and f"broken {call}" in end.error
    tokens = serial_reference(driven.requests[1], 100, VOCAB)[0]
    assert driven.tokens(1) == tokens[: len(driven.tokens(1))]
    assert driven.scheduler.totals.row_status == {}
    driven.expect_reference(2)
    for one, other in zip(driven.plans, whole.plans, strict=False):
        # Until it ended its steps are those of the run in which nothing failed.
        if 1 not in one.rows.uid:
            break
        assert one.rows.uid.tolist() == other.rows.uid.tolist()
        assert one.output.delays_sampling == other.output.delays_sampling


@pytest.mark.parametrize("depth", [0, 2])
def test_grammar_that_allows_nothing_ends_its_request_alone(depth):
    driven = drive(depth, 2)

    def nothing_after_four(ids: Sequence[int]) -> np.ndarray:
        return np.full(VOCAB, len(ids) < 4)

    driven.submit(constrained(1, nothing_after_four), make_request(2, max_tokens=16))
    driven.run()
    assert driven.end(1).finish_reason is FinishReason.ERROR
    assert len(driven.tokens(1)) == 4
    driven.expect_reference(2)
