"""The prefix cache: what is found again, what never is, and that a hit changes no output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_core.config import EngineConfig
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.engine.engine import Engine, build_engine
from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.plans import Phase, SequenceMetadata
from deepinfer_core.scheduler import SchedulerLimits
from deepinfer_core.testing.driven_loop import VOCAB, DrivenLoop, make_request
from deepinfer_core.testing.reference import serial_reference
from deepinfer_core.types import Request, SamplingParams, SequenceUpdate

GOLDEN = Path(__file__).parents[3] / "tests" / "conformance" / "model" / "tiny_a_fp"
WINDOW = 6
LIMITS = SchedulerLimits(
    block_size=4,
    num_blocks={"compressed": 60, "index": 64},
    num_slots=4,
    max_model_len=100,
    max_step_tokens=64,
    max_chunk_tokens=64,
    window=WINDOW,
    history_len=3,
    prefix_cache=True,
)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
PROMPT = tuple((7 * i * i + 3 * i) % VOCAB for i in range(60))


def drive(depth: int = 2, accepts=1.0, **changes) -> DrivenLoop:
    return DrivenLoop(
        replace(LIMITS, **changes), depth, accepts=accepts, step_time_ns=1000, copy_time_ns=10
    )


def replaying(uid: int, prompt: int | tuple[int, ...], **changes) -> Request:
    """Return a request that rebuilds its windows after a hit."""
    return make_request(uid, prompt, replay_encoder=True, **changes)


def run(driven: DrivenLoop, *requests: Request) -> None:
    """Run requests to their ends and compare each with the request alone."""
    driven.submit(*requests)
    driven.run()
    driven.expect_reference()


def first_step(driven: DrivenLoop, uid: int, generation: int = 0) -> SequenceMetadata:
    return next(
        meta
        for plan in driven.plans
        for meta in plan.sequences
        if (meta.uid, meta.generation) == (uid, generation)
    )


def hit(driven: DrivenLoop, uid: int, generation: int = 0) -> int:
    """Return how many tokens a request found."""
    first = first_step(driven, uid, generation)
    return first.start + first.num_replay


def num_published(driven: DrivenLoop) -> int:
    return driven.scheduler.counts().blocks["index"]["shared"]


# What is found


@DEPTHS
@pytest.mark.parametrize("place", range(1, 9))
def test_next_turn_finds_all_that_was_said_and_nothing_behind_the_stop(depth, place):
    """Accepted tokens behind a stop, and those of the step behind it, are in no key."""
    driven = drive(depth, max_drafts=5)
    request = replaying(1, PROMPT[:10], max_tokens=40)
    stop = serial_reference(request, 100, VOCAB)[0][place]
    run(driven, replace(request, stop_ids=frozenset({stop})))
    said = PROMPT[:10] + driven.tokens(1)
    published = num_published(driven) * 4
    # The last token was not fed unless it was an accepted draft.
    assert published in (len(said) // 4 * 4, (len(said) - 1) // 4 * 4)
    run(driven, replaying(2, (*said, 3, 1, 4, 1, 5)))
    assert hit(driven, 2) == published


@DEPTHS
@pytest.mark.parametrize("length", [1, 4, 5, 8, 12, 13, 16])
def test_prompt_that_is_known_as_a_whole_computes_at_least_a_token(depth, length):
    driven = drive(depth)
    run(driven, replaying(1, PROMPT[:length]))
    run(driven, replaying(2, PROMPT[:length]))
    assert hit(driven, 2) == (length - 1) // 4 * 4 < length
    assert first_step(driven, 2).phase is Phase.FINAL_CHUNK


def test_shares_of_prompts_that_are_found_on_a_fixed_trace():
    driven = drive()
    system, other = PROMPT[:20], PROMPT[40:]
    trace = [
        ((*system, 1, 2, 3), 0),
        ((*system, 4, 5, 6, 7, 8), 20),
        (system[:9], 8),
        (other, 0),
        ((*system, 1, 2, 3, 9, 9, 9), 20),  # what follows was produced, not given
        (other + system, 20),
        ((*system, 4, 5, 6, 7, 0), 24),
    ]
    for uid, (prompt, _) in enumerate(trace, start=1):
        run(driven, replaying(uid, prompt, max_tokens=3))
    found = [hit(driven, uid) for uid in range(1, len(trace) + 1)]
    assert found == [expected for _, expected in trace]
    totals = driven.scheduler.totals
    assert (
        totals.hit_tokens == sum(found) == sum(driven.end(u).num_cached_tokens for u in range(1, 8))
    )
    assert totals.prompt_tokens == sum(len(prompt) for prompt, _ in trace)


@pytest.mark.parametrize("uses", [False, True])
def test_progress_of_five_chunks_does_not_depend_on_the_cache(uses):
    driven = drive(2, max_chunk_tokens=4, prefix_cache=True)
    driven.submit(replaying(1, PROMPT[:18], use_cache=uses))
    driven.run()
    chunks = [m for p in driven.plans for m in p.sequences if m.phase is not Phase.VERIFY]
    assert [(m.start, m.num_rows) for m in chunks] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 2)]
    assert bool(num_published(driven)) is uses
    driven.expect_reference()


@DEPTHS
def test_preempted_request_that_comes_back_finds_what_it_had(depth):
    driven = drive(depth, max_drafts=2)
    driven.submit(replaying(1, PROMPT[:9], max_tokens=20), make_request(2, 9, max_tokens=20))
    while len(driven.tokens(1)) < 8:
        driven.iterate()
    driven.loop.post(lambda: driven.scheduler._roster.preempt(driven.scheduler._roster.resident[1]))
    driven.run()
    again = first_step(driven, 1, generation=1)
    tokens = PROMPT[:9] + driven.tokens(1)
    assert hit(driven, 1, generation=1) >= 16
    assert again.num_replay == WINDOW and again.start == hit(driven, 1, 1) - WINDOW
    assert again.num_rows < 9 + 8, "it is not computed again from the start"
    assert again.token_ids == tokens[again.start : again.start + again.num_rows]
    driven.expect_reference()


# What is shared


@DEPTHS
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_equal_prompts_of_one_step_keep_their_own_blocks_until_they_end(depth, order):
    driven = drive(depth)
    caps = {uid: 4 + 4 * place for place, uid in enumerate(order)}
    driven.submit(*(replaying(u, PROMPT[:13], seed=u, max_tokens=caps[u]) for u in (1, 2, 3)))
    driven.iterate()
    assert [m.uid for m in driven.plans[0].sequences] == [1, 2, 3]
    named = driven.plans[0].tables["index"].block_ids.tolist()
    assert len(set(named)) == len(named) == 12
    driven.run()
    driven.expect_reference()
    run(driven, replaying(4, PROMPT[:13]))
    assert hit(driven, 4) == 12


@DEPTHS
def test_prefix_that_was_evicted_is_not_found_and_its_blocks_serve_others(depth):
    driven = drive(depth, num_blocks={"compressed": 12, "index": 14})
    run(driven, replaying(1, PROMPT[:17], max_tokens=2))
    for uid in range(2, 6):
        run(driven, replaying(uid, PROMPT[3 * uid : 3 * uid + 29], max_tokens=6))
    run(driven, replaying(6, PROMPT[:17], max_tokens=6))
    assert hit(driven, 6) == 0, "it was evicted"
    run(driven, replaying(7, PROMPT[:17], max_tokens=6))
    assert hit(driven, 7) == 16


def test_eviction_spares_what_is_in_use():
    driven = drive(2, num_blocks={"compressed": 14, "index": 14}, num_slots=3)
    run(driven, replaying(1, PROMPT[:17], max_tokens=2))
    driven.submit(replaying(2, PROMPT[:17], max_tokens=20))
    driven.iterate(2)
    driven.submit(*(replaying(uid, 12, max_tokens=9) for uid in range(3, 8)))
    driven.run()
    assert hit(driven, 2) == 16
    driven.expect_reference()


@DEPTHS
@pytest.mark.parametrize("num_stored", [1, 2, 8])
def test_stored_window_states_starve_no_request_of_its_slot(depth, num_stored):
    """Each of 16 prompts leaves a stored state; slots are few."""
    driven = drive(depth, num_slots=1, num_stored=num_stored)
    driven.submit(
        *(make_request(u, PROMPT[u : u + 9], strict=True, max_tokens=3) for u in range(1, 17))
    )
    driven.run()
    driven.expect_reference()
    assert driven.scheduler._roster.prefixes.index.num_window_slots == num_stored


# Windows behind a hit


@DEPTHS
@pytest.mark.parametrize("length", [5, 9, 14, 30])
@pytest.mark.parametrize("decoder", [False, True])
def test_windows_behind_a_hit_are_those_of_the_prompt(depth, length, decoder):
    """The device compares them with the blocks; a window of somebody else is noticed."""
    driven = drive(depth, num_slots=2, max_drafts=2)
    request = replaying(1, PROMPT[:length], replay_decoder=decoder)
    run(driven, request, make_request(9, 20, max_tokens=20))
    for uid in (2, 3):  # in slots where others were before
        run(driven, make_request(10 * uid, 20, max_tokens=3))
        run(driven, replace(request, uid=uid, client_id=f"r{uid}"))
        first = first_step(driven, uid)
        assert hit(driven, uid) == (length - 1) // 4 * 4
        assert first.num_replay == min(WINDOW, hit(driven, uid))


@DEPTHS
@pytest.mark.parametrize("length", [9, 14, 30])
def test_strict_request_resumes_from_stored_windows_and_says_the_same(depth, length):
    driven = drive(depth, num_stored=2, max_drafts=2)
    request = make_request(1, PROMPT[:length], strict=True, logprobs=2, max_tokens=9)
    run(driven, request)
    run(driven, replace(request, uid=2, client_id="warm"))
    first = first_step(driven, 2)
    assert hit(driven, 2) == (length - 1) // 4 * 4 > 0
    assert first.num_replay == 0 and not driven.end(2).replayed
    told = {u: [item for each in driven.updates if each.uid == u for item in each.logprobs]
            for u in (1, 2)}  # fmt: skip
    assert told[1] == told[2] and len(told[1]) == 9


def test_strict_request_reads_nothing_that_a_replay_has_computed():
    driven = drive(2, num_stored=2)
    run(driven, replaying(1, PROMPT[:14]))
    run(driven, make_request(2, PROMPT[:14], strict=True))
    run(driven, make_request(3, PROMPT[:14]))
    assert hit(driven, 2) == 0 and hit(driven, 3) == 0, "neither has windows to start from"


# The same on a model

Told = tuple[list[int], list[tuple[int, float]], int]


def engine(**options) -> Engine:
    settings = {"block_size": 4, "max_model_len": 120, "max_step_tokens": 64, **options}
    config = EngineConfig(model=str(GOLDEN), numerics="release", **settings)
    return build_engine(config, CpuBackend("release"), GOLDEN, TextCodec(GOLDEN).tokenizer)


def generate(target: Engine, uid: int, prompt: tuple[int, ...], **fields) -> Told:
    """Return tokens, their log-probabilities with those of the best, and cached tokens."""
    params = SamplingParams(max_tokens=4, logprobs=3, temperature=1.0)
    target.submit(Request(uid, f"r{uid}", prompt, params, seed=7, **fields))
    updates: list[SequenceUpdate] = []
    while target.has_work:
        updates += target.step()
        target.audit()
    tokens = [token for update in updates for token in update.token_ids]
    best = [pair for u in updates for item in u.logprobs for pair in item.top]
    return tokens, best, updates[-1].num_cached_tokens


@pytest.fixture(scope="module")
def warm() -> Engine:
    return engine(prefix_cache=True, stored_windows=4)


@pytest.fixture(scope="module")
def cold() -> Engine:
    return engine(prefix_cache=False)


def test_warm_strict_request_has_the_bits_of_a_cold_one(warm, cold):
    prompt = tuple((31 * i * i + 7 * i) % 500 + 3 for i in range(26))
    first = generate(warm, 1, prompt, strict=True)
    generate(warm, 2, prompt[::-1], strict=True)
    again = generate(warm, 3, prompt, strict=True)
    assert (first[2], again[2]) == (0, 24)
    assert first[:2] == again[:2] == generate(cold, 1, prompt, strict=True)[:2]


def test_next_turn_of_a_strict_request_has_the_bits_of_a_cold_one(warm, cold):
    prompt = tuple((17 * i * i + 5 * i) % 500 + 3 for i in range(21))
    tokens = generate(warm, 4, prompt, strict=True)[0]
    turn = (*prompt, *tokens, 5, 6, 7, 8, 9)
    again = generate(warm, 5, turn, strict=True)
    assert again[2] >= 20 and again[:2] == generate(cold, 5, turn, strict=True)[:2]
