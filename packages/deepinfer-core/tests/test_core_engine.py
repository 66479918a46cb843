"""The engine on a tiny model: strict output never depends on chunks, neighbours or preemption."""

from pathlib import Path

import pytest

from deepinfer_core.config import EngineConfig
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.engine.engine import Engine, build_engine
from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.types import FinishReason, Request, SamplingParams, SequenceUpdate

GOLDEN = Path(__file__).parents[3] / "tests" / "conformance" / "model" / "tiny_a_fp"
EOS = 1


def engine(numerics: str = "release", **options) -> Engine:
    settings = {"block_size": 4, "max_model_len": 200, **options}
    config = EngineConfig(model=str(GOLDEN), numerics=numerics, **settings)
    return build_engine(config, CpuBackend(numerics), GOLDEN, TextCodec(GOLDEN).tokenizer)


def request(
    uid: int, prompt_len: int, *, max_tokens: int = 6, strict: bool = True, **params
) -> Request:
    prompt = tuple((17 * uid + 31 * i * i + 7 * i) % 500 + 3 for i in range(prompt_len))
    settings = SamplingParams(max_tokens=max_tokens, logprobs=2, **params)
    return Request(uid, f"r{uid}", prompt, settings, seed=uid + 1, strict=strict)


def run(target: Engine, requests: list[Request], *, abort_after: dict[int, str] | None = None):
    """Run to the end; returns everything each request got, by uid."""
    for each in requests:
        target.submit(each)
    found: dict[int, list[SequenceUpdate]] = {each.uid: [] for each in requests}
    step = 0
    while target.has_work:
        if abort_after and step in abort_after:
            target.abort(abort_after[step])
        for update in target.step():
            found[update.uid].append(update)
        target.audit()
        step += 1
    return {uid: collect(updates) for uid, updates in found.items()}


def collect(updates: list[SequenceUpdate]):
    tokens = [token for update in updates for token in update.token_ids]
    logprobs = [value for update in updates for value in update.logprobs]
    assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1)
    return tokens, logprobs, updates[-1].finish_reason


LENGTHS = (45, 1, 2, 33, 64, 5, 17, 90, 16, 15, 31, 3, 70, 8, 12, 50, 23)
SUBJECT = request(0, LENGTHS[0], temperature=1.0, top_p=0.95)


@pytest.fixture(scope="module")
def alone():
    return run(engine(max_step_tokens=64), [SUBJECT])[0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 200])
def test_strict_output_is_equal_for_every_chunk_size(alone, chunk):
    assert run(engine(max_step_tokens=chunk), [SUBJECT])[0] == alone


@pytest.mark.parametrize("numerics", ["ideal", "cache"])
def test_strict_output_is_equal_for_chunks_in_other_numerics(numerics):
    whole = run(engine(numerics, max_step_tokens=200), [SUBJECT])
    assert run(engine(numerics, max_step_tokens=7), [SUBJECT]) == whole


def neighbours() -> list[Request]:
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {9: 2.0}},
    ]
    return [
        request(uid, length, max_tokens=3 + uid % 5, **settings[uid % 4])
        for uid, length in enumerate(LENGTHS)
        if uid
    ]


@pytest.fixture(scope="module")
def batch():
    """A batch of 17 with ragged lengths that never waits for memory."""
    return run(engine(max_sequences=17, max_step_tokens=64), [SUBJECT, *neighbours()])


def test_strict_output_is_equal_alone_and_in_a_batch_of_17(alone, batch):
    assert batch[0] == alone
    for each in neighbours()[:4]:
        assert run(engine(max_step_tokens=13), [each])[each.uid] == batch[each.uid]


def test_strict_output_is_equal_with_preemption(batch):
    tight = engine(max_sequences=17, max_step_tokens=48, num_blocks=40)
    found = run(tight, [SUBJECT, *neighbours()])
    assert tight.stats.preemptions > 0, "the pool was not tight enough to test anything"
    assert found == batch


def test_strict_output_is_equal_after_neighbours_abort(batch):
    target = engine(max_sequences=17, max_step_tokens=64)
    gone = {2: "r4", 4: "r7", 6: "r12", 9: "r1"}
    found = run(target, [SUBJECT, *neighbours()], abort_after=gone)
    for uid, result in found.items():
        if f"r{uid}" not in gone.values():
            assert result == batch[uid]
    assert any(result[2] is FinishReason.ABORT for result in found.values())


def test_two_seeds_give_two_texts(alone):
    other = Request(0, "r0", SUBJECT.prompt_token_ids, SUBJECT.params, seed=99, strict=True)
    assert run(engine(), [other])[0][0] != alone[0]


def test_prompt_logprobs_are_equal_for_every_chunk_size():
    asked = request(3, 40, temperature=0.0, prompt_logprobs=2)

    def values(chunk: int):
        target = engine(max_step_tokens=chunk)
        target.submit(asked)
        found = []
        while target.has_work:
            for update in target.step():
                found += update.prompt_logprobs
        return found

    whole = values(200)
    assert [item.position for item in whole] == list(range(1, 40))
    assert [item.value.token_id for item in whole] == list(asked.prompt_token_ids[1:])
    assert all(item.value.logprob <= 0 and len(item.value.top) == 2 for item in whole)
    assert values(3) == whole


def test_decoder_replay_does_not_depend_on_chunks_and_is_no_exact_prefill():
    def output(chunk: int, replay: bool):
        base = request(5, 120, temperature=0.0)
        asked = Request(
            5, "r5", base.prompt_token_ids, base.params, 1, strict=True, replay_decoder=replay
        )
        return run(engine(max_step_tokens=chunk), [asked])[5]

    whole = output(200, True)
    assert output(7, True) == whole
    assert output(50, True) == whole
    assert output(200, False)[1] != whole[1]


def test_short_prompts_are_exact_under_decoder_replay():
    base = request(6, 16, temperature=0.0)
    replayed = Request(
        6, "r6", base.prompt_token_ids, base.params, 1, strict=True, replay_decoder=True
    )
    assert run(engine(), [replayed]) == run(engine(), [base])


def test_penalties_count_committed_tokens_once():
    """With a huge frequency penalty greedy output never repeats, through preemption too."""
    asked = [
        request(uid, 20, max_tokens=25, temperature=0.0, frequency_penalty=100.0)
        for uid in range(4)
    ]
    tight = engine(max_sequences=4, num_blocks=30)
    for tokens, _, _ in run(tight, asked).values():
        assert len(tokens) == len(set(tokens)) == 25
    assert tight.stats.preemptions > 0


@pytest.mark.parametrize("place", ["before", "after", "between"])
def test_prompt_logprobs_beside_a_replaying_neighbour_are_those_of_the_request_alone(place):
    """A neighbour that skips late layers leaves fewer hidden rows than the step has rows."""

    def replaying(uid: int) -> Request:
        base = request(uid, 60, temperature=0.0)
        return Request(
            uid, f"r{uid}", base.prompt_token_ids, base.params, 1, strict=True, replay_decoder=True
        )

    asked = request(1, 20, temperature=0.0, prompt_logprobs=1)
    others = {"before": [replaying(0)], "after": [replaying(2)]}
    others["between"] = [*others["before"], *others["after"]]
    batch = sorted([asked, *others[place]], key=lambda each: each.uid)

    def values(requests: list[Request]):
        target, found = engine(max_step_tokens=200), []
        for each in requests:
            target.submit(each)
        while target.has_work:
            for update in target.step():
                found += update.prompt_logprobs
        return found

    assert values(batch) == values([asked])
    assert len(values([asked])) == 19


def test_penalties_of_a_slot_are_those_of_its_present_request():
    """Slots are used again: what the last request said must not count."""
    asked = [
        request(uid, 12, max_tokens=8, temperature=0.0, repetition_penalty=1.9) for uid in range(4)
    ]
    together = run(engine(max_sequences=1), asked)
    for each in asked:
        assert run(engine(max_sequences=1), [each])[each.uid] == together[each.uid]
