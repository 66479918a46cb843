"""The worker, driven by hand-made plans: drafts, carry, ring, faults, masks, stored state."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_core.bench.make_checkpoint import write_checkpoint
from deepinfer_core.bench.whole_texts import open_model
from deepinfer_core.config import EngineConfig
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.engine.memory import MemoryPlan, plan_memory
from deepinfer_core.engine.sampler import num_accepted
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.plans import Masks, RowStatus
from deepinfer_core.testing.drafters import NgramDrafter, ScriptedDrafter, right_with
from deepinfer_core.testing.planners import ChosenPlanner, ScriptedVerifier
from deepinfer_core.testing.rig import Part, Rig, Text
from deepinfer_core.testing.runs import load_run
from deepinfer_core.testing.tiny_model import tiny_config
from deepinfer_core.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, logprobs=0)
PENALISED = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={9: 2.0}, logprobs=1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("worker") / "tiny"
    write_checkpoint(path, tiny_config(), seed=3)
    return path


@pytest.fixture(scope="module")
def model(folder) -> DeepseekV41:
    return open_model(folder, CpuBackend("ideal"))


def prompt(uid: int, count: int) -> list[int]:
    return [(17 * uid + 31 * i * i + 7 * i) % 300 + 5 for i in range(count)]


def text(uid: int = 0, count: int = 30, slot: int = 0, params=GREEDY, seed: int = 5) -> Text:
    return Text(uid, slot, prompt(uid, count), params, seed)


def plain(model, subject: Text, count: int, **options) -> list[int]:
    """Return `count` tokens of plain decoding, each step settled before the next."""
    rig = Rig(model, **options)
    rig.run(Part(subject))
    while len(subject.token_ids) < subject.prompt_len + count:
        rig.run(Part(subject, num_drafts=0))
    return subject.token_ids[subject.prompt_len :]


def bits(logprobs, place: int, count: int) -> list[float]:
    row = logprobs.rows.tolist().index(place)
    return logprobs.chosen[row, :count].tolist()


# Against the model itself


def test_plain_decoding_is_that_of_the_model_alone(folder, model):
    run = load_run(folder, "ideal")
    ids = prompt(0, 30)
    first = int(run.logits(run.prefill(torch.tensor(ids)).hidden[-1:]).argmax())
    assert plain(model, text(), 8) == run.greedy(first, 30, 8)


# Drafts


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("numerics", ["ideal", "release"])
def test_logits_of_verify_rows_are_those_of_decoding_one_by_one(folder, numerics, block_size):
    model, longest = open_model(folder, CpuBackend(numerics)), 7
    seen: list[torch.Tensor] = []
    rig = Rig(model, numerics=numerics, block_size=block_size, max_drafts=longest)
    record(rig, seen)
    alone = text()
    rig.run(Part(alone))
    for _ in range(longest + 3):
        rig.run(Part(alone, num_drafts=0))
    wanted = torch.cat(seen[1:])
    truth = alone.token_ids[alone.prompt_len :]
    for num_drafts in range(longest + 1):
        for aside in range(2):  # both parities of a ratio-2 group
            seen.clear()
            other = text()
            rig = Rig(model, numerics=numerics, block_size=block_size, max_drafts=longest)
            record(rig, seen)
            rig.run(Part(other))
            for _ in range(aside):
                rig.run(Part(other, num_drafts=0))
            seen.clear()
            drafts = truth[aside + 1 : aside + 1 + num_drafts]
            result = rig.run(Part(other, num_drafts=num_drafts, drafts=drafts))
            assert result.num_tokens.tolist() == [1 + num_drafts]
            assert torch.equal(seen[0], wanted[aside : aside + 1 + num_drafts])


def record(rig: Rig, seen: list[torch.Tensor]) -> None:
    """Keep the logits of every step of the rig."""
    forward = rig.worker._forward
    model = forward._model
    forward._model = Recording(model, seen)


class Recording:
    """A model that keeps its logits."""

    def __init__(self, model, seen) -> None:
        self._model, self._seen = model, seen

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def logits(self, backend, hidden):
        self._seen.append(self._model.logits(backend, hidden))
        return self._seen[-1]


def decode(rig: Rig, subject: Text, count: int, num_drafts: int, *, overlap: bool):
    """Decode until `count` tokens are there; returns their log-probabilities too."""
    rig.run(Part(subject))
    found: list[float] = []
    flying = None
    while len(subject.token_ids) < subject.prompt_len + count:
        source = 0 if flying or overlap else -1
        step = Part(
            subject,
            num_drafts=num_drafts,
            source=source,
            drafts=() if source == 0 else draft_by_host(rig, subject, num_drafts),
        )
        ticket = rig.worker.launch(rig.plan(step))
        if flying is not None:
            take(rig, flying, found)
        flying = (ticket, step)
        if not overlap:
            take(rig, flying, found)
            flying = None
    return subject.token_ids[subject.prompt_len :][:count], found[: count - 1]


def take(rig: Rig, flying, found: list[float]) -> None:
    ticket, step = flying
    before = step.text.settled
    result = rig.settle(ticket, step)
    assert before == result.start[0] <= ticket.plan.rows.start[0]
    assert result.status.tolist() == [0]
    found += bits(result.logprobs, 0, int(result.num_tokens[0]))


def draft_by_host(rig: Rig, subject: Text, num_drafts: int) -> list[int]:
    return [(3 * len(subject.token_ids) + i) % 300 for i in range(num_drafts)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "top_p", "penalty"])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 5])
def test_tokens_do_not_depend_on_drafts_or_overlap(model, params, threads, num_drafts):
    count = 24
    wanted, scores = decode(Rig(model), text(params=params), count, 0, overlap=False)
    drafter = ScriptedDrafter(
        num_drafts, model.config.vocab_size, {0: prompt(0, 30) + wanted}, right_with(0.7)
    )
    rig = Rig(model, threads=threads, drafter=drafter)
    assert decode(rig, text(params=params), count, num_drafts, overlap=True) == (wanted, scores)
    rig.runtime.close()


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_adversarial_and_perfect_drafts_change_only_the_number_of_steps(model, right):
    wanted = plain(model, text(), 20)
    script = {0: prompt(0, 30) + wanted}
    drafter = ScriptedDrafter(3, model.config.vocab_size, script, right_with(right))
    rig, subject = Rig(model, drafter=drafter), text()
    found, _ = decode(rig, subject, 20, 3, overlap=True)
    assert found == wanted
    assert rig.step_seq == (21 if right == 0.0 else 7)


def test_no_more_drafts_are_accepted_than_were_verified(model):
    wanted = plain(model, text(), 8)
    script = {0: prompt(0, 30) + wanted}
    rig, one = Rig(model, drafter=ScriptedDrafter(3, model.config.vocab_size, script)), text()
    rig.run(Part(one))
    for num_drafts in (1, 0, 2):
        result = rig.run(Part(one, num_drafts=num_drafts, source=0))
        assert result.num_tokens.tolist() == [1 + num_drafts]
        assert result.drafts.shape == (1, 3)
        one.bound = one.settled
    assert one.token_ids[one.prompt_len :] == wanted[:7]


def test_accepted_drafts_are_those_before_the_first_that_differs():
    generator = torch.Generator().manual_seed(4)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    targets, drafts = draw(2, 200, 5), draw(2, 200, 4)
    faults, counts = draw(6, 200, 5) == 0, draw(5, 200)
    found = num_accepted(targets, faults, drafts, counts)
    for row in range(200):
        wanted = 0
        while wanted < counts[row] and (
            drafts[row, wanted] == targets[row, wanted] and not faults[row, wanted]
        ):
            wanted += 1
        assert found[row] == wanted
    none = num_accepted(targets[:, :1], faults[:, :1], drafts[:, :0], counts * 0)
    assert none.tolist() == [0] * 200


def test_drafts_of_the_host_are_verified_too(model):
    wanted = plain(model, text(), 12)
    rig, subject = Rig(model), text()
    rig.run(Part(subject))
    right_then_wrong = [wanted[1], wanted[2], wanted[3] + 1, wanted[4]]
    result = rig.run(Part(subject, num_drafts=4, drafts=right_then_wrong))
    assert result.num_tokens.tolist() == [3]
    assert result.token_ids[0, :3].tolist() == wanted[1:4]
    assert rig.run(Part(subject, num_drafts=0)).token_ids[0, 0] == wanted[4]


def test_ragged_verify_rows_and_prompts_share_a_step(model):
    subjects = [
        text(uid, 20 + uid, uid, params)
        for uid, params in enumerate([GREEDY, PENALISED, SAMPLED, GREEDY])
    ]
    alone = {}
    for each in subjects:
        copy = replace(each, token_ids=list(each.token_ids), slot=2)
        alone[each.uid] = plain(model, copy, 8)
    rig = Rig(model)
    rig.run(Part(subjects[0]), Part(subjects[1]), Part(subjects[2], num_rows=5))
    first = [
        Part(subjects[2], num_rows=9),
        Part(subjects[1], num_drafts=3, drafts=[*alone[1][1:3], 2]),
        Part(subjects[3]),
        Part(subjects[0], num_drafts=1, drafts=[alone[0][1] + 1]),
    ]
    result = rig.run(*first)
    assert result.num_tokens.tolist() == [0, 3, 1, 1]
    second = [Part(subjects[0], num_drafts=0), Part(subjects[2]), Part(subjects[1], num_drafts=0)]
    rig.run(*second)
    for each in subjects:
        produced = each.token_ids[each.prompt_len :]
        assert produced == alone[each.uid][: len(produced)]
        assert produced
    assert result.logprobs.rows.tolist() == [1, 2, 3]
    assert result.logprobs.num_top.tolist() == [1, 2, 2]


def test_penalties_see_the_drafts_before_a_row(model):
    """With a huge penalty no token comes twice, inside an accepted run either."""
    params = SamplingParams(temperature=0.0, frequency_penalty=100.0, logprobs=0)
    wanted = plain(model, text(params=params), 40)
    assert len(set(wanted)) == 40
    script = {0: prompt(0, 30) + wanted}
    rig = Rig(model, drafter=ScriptedDrafter(5, model.config.vocab_size, script))
    assert decode(rig, text(params=params), 40, 5, overlap=True)[0] == wanted


# Lengths that the device chooses


def say(uid: int, position: int) -> float:
    """What a script says of a draft, before the sigmoid; now and then nothing that is a number."""
    value = (uid * 5 + position * 3) % 7
    return float("nan") if value == 6 else value - 2.0


def survival_at(uid: int, first: int, count: int) -> list[float]:
    """Return the survival of drafts for positions from `first` on, by float32 alone."""
    found, so_far = [], np.float32(1)
    for position in range(first, first + count):
        chance = torch.sigmoid(torch.tensor(say(uid, position))).numpy()[()]
        so_far = so_far * (np.float32(0) if np.isnan(chance) else chance)
        found.append(float(so_far))
    return found


def choosing(model, wanted: dict[int, list[int]], num_drafts: int, **options) -> Rig:
    """Return a rig whose drafts are right in 7 of 10 cases, and whose verifier trims them."""
    script = {uid: prompt(uid, 20 + uid) + ids for uid, ids in wanted.items()}
    right = right_with(0.7)
    drafter = ScriptedDrafter(num_drafts, model.config.vocab_size, script, right, say)
    verifier = ScriptedVerifier(ChosenPlanner(lambda most: most))
    return Rig(model, drafter=drafter, verifier=verifier, max_drafts=num_drafts, **options)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_tokens_do_not_depend_on_which_drafts_are_verified(model, threads, count):
    kinds, num_drafts = [GREEDY, SAMPLED, PENALISED], 4
    wanted, scores = {}, {}
    for uid in range(count):
        alone = text(uid, 20 + uid, uid, kinds[uid])
        wanted[uid], scores[uid] = decode(Rig(model), alone, 24, 0, overlap=False)
    rig = choosing(model, wanted, num_drafts, threads=threads)
    texts = [text(uid, 20 + uid, uid, kinds[uid]) for uid in range(count)]
    parts = [Part(each) for each in texts]
    before = rig.run(*parts)
    drawn, found, seen = np.random.default_rng(3), {uid: [] for uid in wanted}, []
    parts = [Part(each, num_drafts=num_drafts, source=row) for row, each in enumerate(texts)]
    while min(len(each.token_ids) - each.prompt_len for each in texts) < 16:
        room = int(drawn.integers(0, num_drafts * count + 1))
        result = rig.run(*parts, num_rows=count + room)
        lengths = result.num_verified.tolist()
        pairs = [(-before.survival[r, j], j, r) for r in range(count) for j in range(num_drafts)]
        best = [row for _, _, row in sorted(pairs)[:room]]
        assert lengths == [best.count(row) for row in range(count)]
        assert result.status.tolist() == [0] * count
        assert (result.num_tokens <= 1 + result.num_verified).all()
        for row, each in enumerate(texts):
            assert result.start[row] + result.num_tokens[row] == each.settled
            told = survival_at(each.uid, each.settled + 1, num_drafts)
            assert result.survival[row].tolist() == pytest.approx(told, rel=1e-6)
            found[each.uid] += bits(result.logprobs, row, int(result.num_tokens[row]))
            each.bound = each.settled
        seen.append(tuple(lengths))
        before = result
    for each in texts:
        produced = each.token_ids[each.prompt_len :]
        assert produced[:24] == wanted[each.uid][: len(produced)]
        assert found[each.uid][: len(scores[each.uid])] == scores[each.uid][: len(found[each.uid])]
    assert len(set(seen)) > 2 and min(map(min, seen)) == 0 and max(map(max, seen)) == num_drafts
    rig.runtime.close()


def test_trimmed_steps_follow_one_another_unsettled(model):
    """Places of the next step are upper bounds twice over: what was refused, and what was left."""
    wanted = {0: plain(model, text(0, 20), 12)}
    rig, one = choosing(model, wanted, 4, threads=True), text(0, 20)
    rig.run(Part(one))
    part = Part(one, num_drafts=4, source=0)
    tickets = [rig.worker.launch(rig.plan(part, num_rows=1 + room)) for room in (1, 3)]
    bounds = [int(ticket.plan.rows.start[0]) for ticket in tickets]
    for ticket, room in zip(tickets, (1, 3), strict=True):
        result = rig.settle(ticket, part)
        assert result.num_verified.tolist() == [room]
    assert bounds[1] == bounds[0] + 5 > result.start[0]
    assert one.token_ids[one.prompt_len :] == wanted[0][: len(one.token_ids) - one.prompt_len]
    rig.runtime.close()


def test_masks_of_drafts_that_are_left_out_do_no_harm(model):
    vocab_size = model.config.vocab_size
    free = {uid: plain(model, text(uid, 20 + uid, uid), 6) for uid in (0, 1)}
    rig = choosing(model, free, 2)
    texts = [text(uid, 20 + uid, uid) for uid in (0, 1)]
    rig.run(*(Part(each) for each in texts))
    parts = [Part(each, num_drafts=2, source=row) for row, each in enumerate(texts)]
    for room in range(5):
        rig = choosing(model, free, 2)
        texts = [text(uid, 20 + uid, uid) for uid in (0, 1)]
        rig.run(*(Part(each) for each in texts))
        parts = [Part(each, num_drafts=2, source=row) for row, each in enumerate(texts)]
        ticket = rig.worker.launch(rig.plan(*parts, num_rows=2 + room, delays_sampling=True))
        masks = np.stack([allowed(vocab_size, token) for token in (free[1][1], 40, 41)])
        rig.worker.launch_sampling(ticket, {1: Masks(masks)})
        result = rig.settle(ticket, *parts)
        count = int(result.num_tokens[1])
        assert result.token_ids[1, :count].tolist() == [free[1][1], 40, 41][:count]
        count = int(result.num_tokens[0])
        assert result.token_ids[0, :count].tolist() == free[0][1 : 1 + count]


def test_trimmed_steps_near_the_tail_of_their_prompt_see_windows_from_there_on(model):
    script = {0: plain(model, text(0, 20), 10)}

    def run(room: int | None, tail: int) -> tuple[list[int], list[float]]:
        """Ten tokens and scores behind a prompt whose late layers ran from 16 on."""
        rig, one, scores = choosing(model, script, 5), text(0, 20), []
        rig.run(Part(one, columns={"tail_start": 16}))
        drafts = {"num_drafts": 0} if room is None else {"num_drafts": 5, "source": 0}
        part = Part(one, columns={"tail_start": tail}, **drafts)
        while len(one.token_ids) < 20 + 10:
            result = rig.run(part, num_rows=1 + (room or 0))
            scores += bits(result.logprobs, 0, int(result.num_tokens[0]))
            one.bound = one.settled
        return one.token_ids[20:30], scores[:9]

    wanted = run(None, 16)
    assert run(None, 0) != wanted, "the tail makes no difference"
    for room in (0, 2, 4):
        assert run(room, 16) == wanted


def test_a_step_that_leaves_a_choice_needs_decoding_sequences_and_somebody_who_chooses(model):
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    rig.run(Part(one))
    part = Part(one, num_drafts=2, drafts=[1, 2])
    with pytest.raises(AssertionError, match="nothing chooses among them"):
        rig.run(part, num_rows=2)
    one.bound = one.settled
    with pytest.raises(AssertionError, match="trims a prompt"):
        rig.worker.launch(rig.plan(part, Part(two), num_rows=31))


# Carry


def test_rows_find_their_carry_wherever_they_stood(model):
    wanted = {uid: plain(model, text(uid, slot=uid), 4) for uid in range(3)}
    rig, texts = Rig(model), [text(uid, slot=uid) for uid in range(3)]
    rig.run(*(Part(each) for each in texts))
    order = [(2, 2), (0, 0), (1, 1)]
    first = [Part(texts[uid], num_drafts=0, source=source) for uid, source in order]
    one = rig.worker.launch(rig.plan(*first))
    second = [Part(texts[1], num_drafts=0, source=2), Part(texts[2], num_drafts=0, source=0)]
    two = rig.worker.launch(rig.plan(*second))
    assert rig.settle(one, *first).token_ids[:, 0].tolist() == [wanted[u][1] for u in (2, 0, 1)]
    assert rig.settle(two, *second).token_ids[:, 0].tolist() == [wanted[u][2] for u in (1, 2)]


@pytest.mark.parametrize(
    "columns", [{"source": 1}, {"source": 3}, {"uid": 77}, {"generation": 1}], ids=str
)
def test_a_wrong_source_fails_alone_and_writes_scratch_only(model, columns):
    wanted = plain(model, text(1, slot=1), 3)
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    rig.run(Part(one), Part(two))
    before = snapshot(rig, one.slot)
    parts = [
        Part(one, num_drafts=0, source=0, columns=columns),
        Part(two, num_drafts=0, source=1),
    ]
    ticket = rig.worker.launch(rig.plan(*parts))
    after = Part(one, num_drafts=0, source=0)
    behind = rig.worker.launch(rig.plan(after, Part(two, num_drafts=0, source=1)))
    result = ticket.result(60)
    assert result.status.tolist() == [RowStatus.BAD_SOURCE, RowStatus.OK]
    assert result.num_tokens.tolist() == [1, 1]
    assert result.token_ids[:, 0].tolist() == [0, wanted[1]]
    assert behind.result(60).status.tolist() == [RowStatus.BAD_SOURCE, RowStatus.OK]
    assert behind.result(60).token_ids[1, 0] == wanted[2]
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(rig, one.slot), strict=True))


def snapshot(rig: Rig, slot: int) -> list[torch.Tensor]:
    """Return copies of all device state of a slot, blocks included."""
    found = [ring[slot].clone() for ring in rig.state._rings()]
    for pool, sources in rig.state.blocks.items():
        mine = rig.state.tables[pool][slot].long()
        found += [source.data[mine].clone() for source in sources.values()]
    return [*found, rig.state.history[slot].clone()]


@pytest.mark.parametrize("illegal", [-1, 10**6])
@pytest.mark.parametrize("place", [0, 5, 29])
def test_an_illegal_id_of_the_host_is_a_bad_source(model, illegal, place):
    wanted = plain(model, text(1, slot=1), 1)
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    one.token_ids[place] = illegal
    result = rig.run(Part(one), Part(two))
    assert result.status.tolist() == [RowStatus.BAD_SOURCE, RowStatus.OK]
    assert result.token_ids[:, 0].tolist() == [0, wanted[0]]


def test_what_an_older_step_left_is_no_source(model):
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    rig.run(Part(one), Part(two))
    for _ in range(2):  # the second writes where the first step left something of both
        rig.run(Part(one, num_drafts=0, source=0))
    late = [Part(one, num_drafts=0, source=0), Part(two, num_drafts=0, source=1)]
    assert rig.run(*late).status.tolist() == [RowStatus.OK, RowStatus.BAD_SOURCE]


def test_a_prompt_that_is_not_finished_leaves_no_carry(model):
    rig, one = Rig(model), text(0)
    rig.run(Part(one, num_rows=8))
    part = Part(one, num_drafts=0, source=0)
    assert rig.run(part).status.tolist() == [RowStatus.BAD_SOURCE]


# Faults of the model


def poison(rig: Rig, token_id: int, monkeypatch) -> None:
    """Make the embedding of one token not finite."""
    embed = CpuBackend.embed

    def poisoned(self, token_ids, table):
        rows = embed(self, token_ids, table)
        return rows.masked_fill((token_ids == token_id).unsqueeze(-1), float("nan"))

    monkeypatch.setattr(CpuBackend, "embed", poisoned)


BAD_ID = 340


@pytest.mark.parametrize("tail", [0, 20])
def test_a_chunk_that_is_not_finite_says_so(model, monkeypatch, tail):
    wanted = plain(model, text(1, slot=1), 2)
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    poison(rig, BAD_ID, monkeypatch)
    one.token_ids[3] = BAD_ID
    result = rig.run(Part(one, num_rows=12, columns={"tail_start": tail}), Part(two))
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    assert result.num_tokens.tolist() == [0, 1]
    assert result.token_ids[1, 0] == wanted[0]


def test_a_draft_that_is_not_finite_and_refused_harms_nobody(model, monkeypatch):
    wanted = plain(model, text(), 6)
    rig, one = Rig(model), text()
    poison(rig, BAD_ID, monkeypatch)
    rig.run(Part(one))
    result = rig.run(Part(one, num_drafts=2, drafts=[wanted[1], BAD_ID]))
    assert result.status.tolist() == [RowStatus.OK] and result.num_tokens.tolist() == [2]
    for _ in range(3):
        rig.run(Part(one, num_drafts=0))
    assert one.token_ids[one.prompt_len :] == wanted


def test_a_sampled_row_that_is_not_finite_yields_a_pad_and_no_carry(model, monkeypatch):
    wanted = plain(model, text(1, slot=1), 3)
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    poison(rig, BAD_ID, monkeypatch)
    rig.run(Part(one), Part(two))
    one.token_ids[-1] = BAD_ID
    parts = [Part(one, num_drafts=1, drafts=[0]), Part(two, num_drafts=0)]
    ticket = rig.worker.launch(rig.plan(*parts))
    behind = rig.worker.launch(
        rig.plan(Part(one, num_drafts=1, source=0), Part(two, num_drafts=0, source=1))
    )
    result = ticket.result(60)
    assert result.status.tolist() == [RowStatus.NON_FINITE, RowStatus.OK]
    assert result.num_tokens.tolist() == [1, 1] and result.token_ids[0, 0] == 0
    assert behind.result(60).status.tolist() == [RowStatus.BAD_SOURCE, RowStatus.OK]
    assert behind.result(60).token_ids[1, 0] == wanted[2]


# Queues and the ring


def test_a_step_is_launched_while_another_runs(model):
    wanted = plain(model, text(), 3)
    rig, one = Rig(model, threads=True), text()
    rig.run(Part(one))
    gate = threading.Event()
    rig.runtime.queue("forward").submit(gate.wait)
    first = rig.worker.launch(rig.plan(Part(one, num_drafts=0, source=0)))
    second = rig.worker.launch(rig.plan(Part(one, num_drafts=0, source=0)))
    assert not first.forward_done.done() and not second.out_done.done()
    with pytest.raises(TimeoutError):
        first.result(0.0)
    gate.set()
    found = [int(ticket.result(60).token_ids[0, 0]) for ticket in (first, second)]
    assert found == wanted[1:]
    times = [ticket.times() for ticket in (first, second)]
    for each in times:
        assert each.copy_in[0] <= each.copy_in[1] <= each.forward[0] < each.forward[1]
        assert each.forward[1] <= each.copy_out[0] <= each.copy_out[1]
    assert times[1].copy_in[1] < times[0].forward[1] <= times[1].forward[0]
    rig.runtime.close()


def test_nothing_of_a_plan_is_read_after_launch(model):
    params = PENALISED
    wanted = plain(model, text(params=params), 2)
    rig, one = Rig(model, threads=True), text(params=params)
    gate = threading.Event()
    rig.runtime.queue("forward").submit(gate.wait)
    plan = rig.plan(Part(one))
    ticket = rig.worker.launch(plan)
    rig.runtime.queue("copy_in").record().wait(60)
    plan.token_ids[:] = 7
    plan.rows.data.flags.writeable = True
    plan.rows.data[:] = 3
    for delta in plan.tables.values():
        delta.block_ids[:] = 0
    place = rig.worker._ring[0]
    place.buffers._steady.host.fill_(3)  # the host's buffers as well: they were sent
    place.buffers._extra._mirror.host.fill_(3)
    gate.set()
    assert ticket.result(60).token_ids[0, 0] == wanted[0]
    rig.runtime.close()


def test_results_outlive_their_place_in_the_ring(model):
    rig, one = Rig(model, depth=0), text()
    results = [rig.run(Part(one))]
    results += [rig.run(Part(one, num_drafts=0)) for _ in range(5)]
    found = [int(result.token_ids[0, 0]) for result in results]
    assert found == one.token_ids[one.prompt_len :]


def test_a_place_in_use_is_not_taken_again(model):
    rig, one = Rig(model, threads=True, depth=0), text()
    rig.run(Part(one))
    gate = threading.Event()
    rig.runtime.queue("forward").submit(gate.wait)
    plans = [rig.plan(Part(one, num_drafts=0, source=0)) for _ in range(3)]
    tickets = [rig.worker.launch(plan) for plan in plans[:2]]
    with pytest.raises(AssertionError, match="step 2 still uses its place"):
        rig.worker.launch(plans[2])
    gate.set()
    for ticket in tickets:
        assert ticket.result(60).status.tolist() == [RowStatus.OK]
    assert rig.worker.launch(plans[2]).result(60).status.tolist() == [RowStatus.OK]
    with pytest.raises(AssertionError, match="overwritten"):
        tickets[0].result()
    assert tickets[0].times() is None
    rig.runtime.close()


def test_a_plan_larger_than_the_buffers_is_refused(model):
    rig = Rig(model, max_rows=16)
    with pytest.raises(AssertionError, match="30 rows of 1 sequences, but the worker was made for"):
        rig.worker.launch(rig.plan(Part(text())))
    with pytest.raises(AssertionError, match="6 drafts"):
        rig.worker.launch(rig.plan(Part(text(count=1), num_drafts=6, drafts=[0] * 6)))


@pytest.mark.parametrize("threads", [False, True])
def test_a_failed_step_fails_those_behind_it_and_no_others(model, monkeypatch, threads):
    wanted = plain(model, text(), 3)
    rig, one = Rig(model, threads=threads), text()
    rig.run(Part(one))
    gate = threading.Event()
    if threads:
        rig.runtime.queue("forward").submit(gate.wait)
    broken = True
    forward = model.forward

    def sometimes(*args, **kwargs):
        if broken:
            raise RuntimeError("the device is on fire")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", sometimes)
    flying = [rig.worker.launch(rig.plan(Part(one, num_drafts=0, source=0))) for _ in range(2)]
    gate.set()
    for ticket in flying:
        with pytest.raises(RuntimeError, match="on fire"):
            ticket.result(60)
        assert ticket.forward_done.done()
    broken = False
    stale = rig.worker.launch(rig.plan(Part(one, num_drafts=0, source=0)))
    assert stale.result(60).status.tolist() == [RowStatus.BAD_SOURCE]  # older carry, same sequence
    one.bound = one.settled
    assert [rig.run(Part(one, num_drafts=0)).token_ids[0, 0] for _ in range(2)] == wanted[1:]
    rig.worker.backend.runtime.synchronize()
    rig.runtime.close()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("delays", [False, True])
def test_a_launch_that_is_cut_off_leaves_the_ring_whole(model, monkeypatch, threads, delays):
    wanted = plain(model, text(), 6)
    rig, one = Rig(model, threads=threads, depth=0), text()
    rig.run(Part(one))
    plan = rig.plan(Part(one, num_drafts=0, source=0), delays_sampling=delays)

    def interrupt(event) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rig.worker._copy_out, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ticket = rig.worker.launch(plan)
            rig.worker.launch_sampling(ticket, {})
    for _ in range(5):
        rig.run(Part(one, num_drafts=0))
    assert one.token_ids[one.prompt_len :] == wanted
    rig.runtime.close()


# Sampling that waits for masks


def allowed(vocab_size: int, *token_ids: int) -> np.ndarray:
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("threads", [False, True])
def test_sampling_waits_for_masks_of_each_position(model, threads):
    vocab_size = model.config.vocab_size
    free = plain(model, text(1, slot=1), 3)
    rig, one, two = Rig(model, threads=threads), text(0), text(1, slot=1)
    rig.run(Part(one), Part(two))
    parts = [Part(two, num_drafts=0), Part(one, num_drafts=2, drafts=[40, 41])]
    ticket = rig.worker.launch(rig.plan(*parts, delays_sampling=True))
    assert ticket.forward_done is None and ticket.out_done is None
    masks = np.stack([allowed(vocab_size, 40), allowed(vocab_size, 6), allowed(vocab_size, 41)])
    rig.worker.launch_sampling(ticket, {1: Masks(masks)})
    behind = rig.worker.launch(
        rig.plan(Part(one, num_drafts=0, source=1), Part(two, num_drafts=0, source=0))
    )
    result = rig.settle(ticket, *parts)
    assert result.num_tokens.tolist() == [1, 2]
    assert result.token_ids[1, :2].tolist() == [40, 6]
    assert result.token_ids[0, 0] == free[1]
    assert behind.result(60).token_ids[1, 0] == free[2]
    alone = Rig(model)
    same = Text(0, 0, [*one.token_ids[:-1], 6])
    assert alone.run(Part(same)).token_ids[0, 0] == behind.result(60).token_ids[0, 0]
    rig.runtime.close()


@pytest.mark.parametrize("refused", [False, True])
def test_forced_tokens_take_the_place_of_the_drafts_behind_what_is_yielded(model, refused):
    vocab_size = model.config.vocab_size
    drafter = ScriptedDrafter(3, vocab_size, {}, confidence=lambda uid, position: 0.0)
    rig = Rig(model, drafter=drafter, max_drafts=3)
    one, two = text(0), text(1, slot=1)
    rig.run(Part(one), Part(two))
    drafts = [40, 99 if refused else 41]
    parts = [Part(two, num_drafts=0), Part(one, num_drafts=2, drafts=drafts)]
    ticket = rig.worker.launch(rig.plan(*parts, delays_sampling=True))
    masks = np.stack([allowed(vocab_size, token) for token in (40, 41, 42)])
    rig.worker.launch_sampling(ticket, {1: Masks(masks, (40, 41, 42, 43, 44))})
    result = rig.settle(ticket, parts[0], parts[1])
    count = int(result.num_tokens[1])
    assert count == (2 if refused else 3)
    ahead = [42, 43, 44] if refused else [43, 44]
    # the drafter knows no text, so its drafts are 0 and pass with one half each
    assert result.drafts.tolist() == [[0, 0, 0], [*ahead, 0][:3]]
    assert result.survival[0].tolist() == [0.5, 0.25, 0.125]
    assert result.survival[1].tolist() == [*[1.0] * len(ahead), 0.125][:3]
    rig.runtime.close()


def test_sampling_is_launched_once(model):
    rig, one = Rig(model), text()
    ticket = rig.worker.launch(rig.plan(Part(one), delays_sampling=True))
    with pytest.raises(AssertionError, match="was never launched"):
        ticket.result()
    rig.worker.launch_sampling(ticket, {})
    assert ticket.result().status.tolist() == [RowStatus.OK]
    with pytest.raises(AssertionError, match="does not wait"):
        rig.worker.launch_sampling(ticket, {})


def test_step_that_was_cut_off_before_its_sampling_is_dropped_by_the_next_launch(model):
    rig, one = Rig(model), text()
    lost = rig.worker.launch(rig.plan(Part(one), delays_sampling=True))
    ticket = rig.worker.launch(rig.plan(Part(text(uid=2, slot=1))))
    assert ticket.result().status.tolist() == [RowStatus.OK]
    with pytest.raises(AssertionError, match="does not wait"):
        rig.worker.launch_sampling(lost, {})


# Stored state


def test_state_that_was_stored_resumes_where_it_was_taken(model):
    """Window state saved behind one sequence's chunk lets another go on from shared blocks."""
    rig, one = Rig(model, num_stored=2), text(0, 30)
    stored = rig.sizes.num_slots + 1
    rig.run(Part(one, num_rows=16), window_saves=((0, stored),))
    wanted = rig.run(Part(one))  # goes on: the stored copy does not move with it
    other = text(0, 30, slot=2)
    other.bound = other.settled = 16
    length = rig.sizes.table_len
    rig.blocks[2 * length : 3 * length] = rig.blocks[:length]
    found = rig.run(Part(other), window_loads=((stored, 2),))
    for name in ("chosen", "best_ids", "best"):
        assert np.array_equal(getattr(found.logprobs, name), getattr(wanted.logprobs, name))


def test_copied_slots_are_equal_in_all_but_their_tables(model):
    rig = Rig(model, num_stored=1)
    rig.run(Part(text(0, slot=0)), Part(text(1, slot=1)))
    tables = {pool: table.clone() for pool, table in rig.state.tables.items()}
    first, second = per_slot(rig, 0), per_slot(rig, 1)
    rig.state.copy_slots(torch.tensor([[0, 1], [1, 0], [0, 4]]))
    for slot, wanted in ((0, second), (1, first), (4, first)):
        assert all(torch.equal(a, b) for a, b in zip(per_slot(rig, slot), wanted, strict=True))
    assert all(torch.equal(tables[pool], table) for pool, table in rig.state.tables.items())
    assert rig.sizes.scratch_slot == 5 == len(rig.state.history) - 1


def per_slot(rig: Rig, slot: int) -> list[torch.Tensor]:
    rings = [*rig.state.windows, *rig.state.carried.values(), *rig.state.draft_windows]
    return [ring.data[slot].clone() for ring in rings] + [rig.state.history[slot].clone()]


def test_memory_counts_slots_of_stored_state(folder):
    config = ModelConfig.from_folder(folder)

    def planned(stored: int) -> MemoryPlan:
        options = EngineConfig(max_sequences=3, stored_windows=stored, block_size=4, num_blocks=9)
        return plan_memory(config, options, CpuBackend("ideal"))

    none, some = planned(0), planned(5)
    assert some.sizes.num_stored == 5 and some.sizes.scratch_slot == 8
    assert some.state_bytes - none.state_bytes == 5 * sum(none.slot_bytes.values())
    assert any("3 + 5 stored + 1 slots" in note for _, _, note in some.table())


# Log-probabilities


def test_prompt_logprobs_stand_beside_those_of_tokens(model):
    rig, one, two = Rig(model), text(0), text(1, slot=1)
    targets = tuple(one.token_ids[1:])
    asked = {"prompt_logprobs": 2, "prompt_targets": targets}
    result = rig.run(Part(two), Part(one, extras=asked))
    found = result.prompt_logprobs[1]
    assert [value.position for value in found] == list(range(1, 30))
    assert [value.value.token_id for value in found] == list(targets)
    assert all(len(value.value.top) == 2 for value in found)
    alone = Rig(model).run(Part(text(0)))
    place = result.logprobs.rows.tolist().index(1)
    assert result.logprobs.chosen[place, 0] == alone.logprobs.chosen[0, 0]
    assert result.logprobs.best_ids[place, 0].tolist() == alone.logprobs.best_ids[0, 0].tolist()


def test_nobody_asked_for_logprobs(model):
    result = Rig(model).run(Part(text(params=SamplingParams(temperature=0.0))))
    assert result.logprobs is None and result.drafts is None and not result.prompt_logprobs


# Drafter in the loop


def test_ngram_drafts_come_from_the_text(model):
    wanted = plain(model, text(), 30)
    sizes = Rig(model).sizes
    rig = Rig(model, drafter=NgramDrafter(4, sizes, torch.device("cpu")))
    subject = text()
    found, _ = decode(rig, subject, 30, 4, overlap=True)
    assert found == wanted
