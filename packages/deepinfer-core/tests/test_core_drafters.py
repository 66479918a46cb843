"""Drafters for tests: the scripted one keeps to its script, the other one looks into the text."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.engine.drafting import Drafter, DraftInputs, Entering
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.state import StateSizes
from deepinfer_core.testing.drafters import NgramDrafter, ScriptedDrafter, right_with

BACKEND = CpuBackend("ideal")
SIZES = StateSizes(3, {}, block_size=4, max_len=60, max_drafts=4, num_stored=1)


def integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@dataclass(frozen=True)
class Fed:
    """A sequence in a step: tokens fed from `start` on, and what it yielded."""

    uid: int
    slot: int
    start: int
    tokens: list[int]
    yielded: list[int]
    end: int


def step(*fed: Fed) -> DraftInputs:
    """Return what a drafter sees of a step."""
    rows = RowBatch.build(
        BACKEND,
        [len(each.tokens) for each in fed],
        [each.start for each in fed],
        [each.slot for each in fed],
        window=4,
    )
    wide = 1 + SIZES.max_drafts
    tokens = [each.yielded + [0] * (wide - len(each.yielded)) for each in fed]
    return DraftInputs(
        uids=integers([each.uid for each in fed]),
        generations=integers([0 for _ in fed]),
        slots=rows.sequence_slots,
        token_ids=integers(tokens).view(len(fed), wide),
        num_tokens=integers([len(each.yielded) for each in fed]),
        end=integers([each.end for each in fed]),
        fed=integers([token for each in fed for token in each.tokens]),
        rows=rows,
        hidden=torch.zeros(len(rows.positions), 2),
        features=None,
        hidden_rows=rows,
        samples=True,
        pick=lambda logits, drafts: logits.argmax(-1),
    )


def entering(slot: int, known: list[int]) -> Entering:
    history = [[slot, position, token] for position, token in enumerate(known)]
    return Entering(
        slots=integers([slot]),
        uids=integers([1]),
        generations=integers([0]),
        starts=integers([len(known)]),
        history=integers(history).view(-1, 3).T,
    )


def drafts(drafter: Drafter, *fed: Fed) -> list[list[int]]:
    found = drafter.propose(BACKEND, step(*fed)).token_ids
    assert found.dtype == torch.int64
    return found.tolist()


# Scripted


def test_scripted_drafts_follow_the_text_behind_the_last_token() -> None:
    drafter = ScriptedDrafter(3, 50, {7: [10, 11, 12, 13, 14, 15], 8: [1, 2]})
    fed = [Fed(7, 0, 0, [10, 11], [12], 2), Fed(8, 1, 0, [1], [2], 1), Fed(9, 2, 0, [5], [6], 1)]
    assert drafts(drafter, *fed) == [[13, 14, 15], [0, 0, 0], [0, 0, 0]]
    assert drafts(drafter, Fed(7, 0, 2, [12, 13], [13, 14], 4)) == [[15, 0, 0]]


def test_scripted_drafts_are_wrong_where_they_are_told() -> None:
    text = {7: [10, 11, 12, 13, 49]}
    drafter = ScriptedDrafter(3, 50, text, lambda uid, position: position == 3)
    assert drafts(drafter, Fed(7, 0, 0, [10], [11], 1)) == [[13, 13, 0]]


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_choices_are_right_as_often_as_told_and_repeat(probability: float) -> None:
    right, again = right_with(probability, 5), right_with(probability, 5)
    places = [(uid, position) for uid in range(20) for position in range(100)]
    found = [right(*place) for place in places]
    assert found == [again(*place) for place in places]
    assert abs(sum(found) / len(found) - probability) < 0.05
    assert probability in (0.0, 1.0) or found != [right_with(probability, 6)(*p) for p in places]


def test_script_says_what_it_thinks_of_each_draft() -> None:
    text = {7: list(range(10, 30))}
    drafter = ScriptedDrafter(3, 50, text, confidence=lambda uid, place: uid + place / 4)
    found = drafter.propose(BACKEND, step(Fed(7, 0, 0, [10], [11], 1), Fed(8, 1, 4, [5], [6], 5)))
    assert found.confidence is not None and found.confidence.dtype == torch.float32
    assert found.confidence.tolist() == [[7.5, 7.75, 8.0], [9.5, 9.75, 10.0]]
    assert found.token_ids.tolist() == [[12, 13, 14], [0, 0, 0]]
    silent = ScriptedDrafter(3, 50, text).propose(BACKEND, step(Fed(7, 0, 0, [10], [11], 1)))
    assert silent.confidence is None


def test_no_sequences_no_drafts() -> None:
    says = ScriptedDrafter(3, 50, {}, confidence=lambda uid, place: 0.0)
    ngrams = NgramDrafter(3, SIZES, torch.device("cpu"))
    for drafter in (ScriptedDrafter(3, 50, {}), says, ngrams):
        assert drafter.propose(BACKEND, step()).token_ids.shape == (0, 3)
    assert says.propose(BACKEND, step()).confidence.shape == (0, 3)


# Prompt lookup


def lookup(text: list[int], num_drafts: int, length: int) -> list[int]:
    """Return what followed the last earlier occurrence of the last tokens, the slow way."""
    last = text[-length:]
    for end in range(len(text) - 2, length - 2, -1):
        if text[end - length + 1 : end + 1] == last:
            repeat = text[end + 1 :]
            return [repeat[i % len(repeat)] for i in range(num_drafts)]
    return [0] * num_drafts


@pytest.mark.parametrize("length", [1, 2, 3])
def test_ngram_drafts_are_what_followed_the_last_time(length: int) -> None:
    rng = random.Random(length)
    found = 0
    for _ in range(60):
        drafter = NgramDrafter(4, SIZES, torch.device("cpu"), length)
        texts = [[rng.randrange(1, 4) for _ in range(rng.randrange(2, 40))] for _ in range(2)]
        for slot in range(2):
            drafter.admit(entering(slot, []))
        fed = [Fed(s, s, 0, text[:-1], text[-1:], len(text) - 1) for s, text in enumerate(texts)]
        wanted = [lookup(text, 4, length) for text in texts]
        assert drafts(drafter, *fed) == wanted
        found += sum(any(each) for each in wanted)
    assert found > 20


def test_ngram_forgets_refused_drafts_and_the_last_owner_of_a_slot() -> None:
    drafter = NgramDrafter(3, SIZES, torch.device("cpu"))
    drafter.admit(entering(0, []))
    drafts(drafter, Fed(1, 0, 0, [5, 6, 7, 8], [9], 4))
    # of [9, 5, 6] the drafts 5, 6 are refused: [5, 6] is followed by 7, not by what came now
    assert drafts(drafter, Fed(1, 0, 4, [9, 5, 6], [5], 5)) == [[0, 0, 0]]
    assert drafts(drafter, Fed(1, 0, 5, [5], [6], 6)) == [[7, 8, 9]]
    drafter.admit(entering(0, []))
    assert drafts(drafter, Fed(2, 0, 0, [5], [6], 1)) == [[0, 0, 0]]


def test_ngram_knows_what_lies_before_the_first_row() -> None:
    drafter = NgramDrafter(2, SIZES, torch.device("cpu"))
    drafter.admit(entering(2, [1, 2, 3, 4]))
    assert drafts(drafter, Fed(1, 2, 4, [1], [2], 5)) == [[3, 4]]


def test_ngram_leaves_sequences_that_failed_alone() -> None:
    """Their rows name the scratch slot, the last one."""
    drafter = NgramDrafter(2, SIZES, torch.device("cpu"))
    drafter.admit(entering(0, [1, 2, 3]))
    fed = [Fed(1, 0, 3, [1], [2], 4), Fed(2, SIZES.scratch_slot, 2, [1], [0], 3)]
    assert drafts(drafter, *fed)[0] == [3, 1]
