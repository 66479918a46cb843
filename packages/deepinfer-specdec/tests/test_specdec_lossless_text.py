"""The default rule gives the text of plain decoding, token by token.

Test 1 of the losslessness tests: any drafter, any choice of lengths, any set and order of requests
in a step, greedy and sampled. Noise that is keyed by anything but the position must be caught.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_specdec import (
    CostTable,
    DelayedPlanner,
    FixedPlanner,
    TargetNoise,
    ThresholdPlanner,
    committed_lengths,
    early_stop_lengths,
    survival_of,
    threshold_lengths,
)
from deepinfer_specdec.noise import RESIDUAL, TARGET, gumbel

NUM_REQUESTS, NUM_TOKENS, NUM_DRAFTS, VOCAB_SIZE = 100, 100, 5, 16
CONTEXT_LEN = 3
COSTS = CostTable(
    tuple(range(8, 641, 8)), tuple(1.0 + 0.1 * (rows // 64) for rows in range(8, 641, 8))
)

RNG_SEED = 11
LOGITS = torch.tensor(
    np.random.default_rng(RNG_SEED).normal(0, 2, (509, VOCAB_SIZE)), dtype=torch.float32
)
SEEDS = torch.tensor(np.random.default_rng(RNG_SEED + 1).integers(0, 2**32, (NUM_REQUESTS, 2)))
# A third each greedy, cool and warm.
TEMPERATURE = torch.tensor([0.0, 0.7, 1.3]).repeat(NUM_REQUESTS)[:NUM_REQUESTS]

# Noise [n, V] of rows: ids of their requests, positions, places in the batch, number of the step,
# drafts before the row.
Noise = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def noise_table(stream: int) -> Tensor:
    """Noise of every request at every position, [R, positions, V], made once."""
    num_positions = 3 * NUM_TOKENS
    positions = torch.arange(num_positions).repeat(NUM_REQUESTS)
    noise = gumbel(SEEDS.repeat_interleave(num_positions, 0), positions, VOCAB_SIZE, stream)
    return noise.view(NUM_REQUESTS, num_positions, VOCAB_SIZE)


OF_TARGET, OF_RESIDUAL = noise_table(TARGET), noise_table(RESIDUAL)


def by_position(requests: Tensor, positions: Tensor, places: Tensor, step: int, k: int) -> Tensor:
    return OF_TARGET[requests, positions]


def logits_of(context: Tensor) -> Tensor:
    """The target: [n, 3] tokens -> [n, V]; a table by a hash of the tokens."""
    return LOGITS[(context * torch.tensor([7, 131, 29])).sum(dim=1) % len(LOGITS)]


def choose(logits: Tensor, requests: Tensor, noise: Tensor) -> Tensor:
    """Greedy or sampled, by the request."""
    temperature = TEMPERATURE[requests, None]
    sampled = logits / temperature.clamp(min=1e-6) + noise
    return torch.where(temperature > 0, sampled, logits).argmax(dim=1)


def plain() -> Tensor:
    """Decode without speculation: [R, NUM_TOKENS]."""
    everyone = torch.arange(NUM_REQUESTS)
    tokens = torch.zeros(NUM_REQUESTS, CONTEXT_LEN + NUM_TOKENS, dtype=torch.int64)
    for position in range(CONTEXT_LEN, CONTEXT_LEN + NUM_TOKENS):
        noise = by_position(everyone, torch.full_like(everyone, position), everyone, 0, 0)
        context = tokens[:, position - CONTEXT_LEN : position]
        tokens[:, position] = choose(logits_of(context), everyone, noise)
    return tokens[:, CONTEXT_LEN:]


def draft(requests: Tensor, context: Tensor, positions: Tensor, rng: np.random.Generator) -> Tensor:
    """Drafts [n, g] of a drafter that each request has for itself.

    By the number of the request: the target itself, the target with errors, at random, and one that
    never drafts what the target will say.
    """
    kind = requests % 4
    drafts = []
    for k in range(NUM_DRAFTS):
        noise = by_position(requests, positions + k, requests, 0, 0)
        right = choose(logits_of(context), requests, noise)
        errors = torch.tensor(rng.random(len(requests)) < 0.3)
        anything = torch.tensor(rng.integers(0, VOCAB_SIZE, len(requests)))
        drafted = torch.where((kind == 2) | ((kind == 1) & errors), anything, right)
        drafted = torch.where(kind == 3, (right + 1) % VOCAB_SIZE, drafted)
        drafts.append(drafted)
        context = torch.cat([context[:, 1:], drafted[:, None]], dim=1)
    return torch.stack(drafts, dim=1)


def choose_lengths(
    policy: str, planner: object, survival: Tensor, rng: np.random.Generator
) -> Tensor:
    """Return lengths by a policy, or at random; records are of any older step."""
    count = len(survival)
    available = torch.full((count,), NUM_DRAFTS)
    if policy == "random":
        return torch.tensor(rng.integers(0, NUM_DRAFTS + 1, count))
    if policy == "static threshold":
        return threshold_lengths(survival, available, 0.3)
    if policy == "early stop":
        return torch.tensor(early_stop_lengths(survival.numpy(), available.numpy(), COSTS))
    if policy.startswith("gamma"):
        return torch.full((count,), int(policy[-1]))
    record = survival.numpy()[rng.permutation(count)]
    budget = planner.budget(record, rng.random(count) < 0.9, available.numpy())
    return planner.lengths(survival, available, budget.total)


def speculate(
    policy: str, noise_of: Noise = by_position, bonus: Noise | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Decode with drafts: tokens [R, NUM_TOKENS], and the steps that each request took [R]."""
    rng = np.random.default_rng(seed)
    planner = {
        "fixed": FixedPlanner(),
        "threshold": ThresholdPlanner(0.3, full_every=7),
        "delayed": DelayedPlanner(COSTS, full_every=7),
    }.get(policy)
    tokens = torch.zeros(NUM_REQUESTS, CONTEXT_LEN + NUM_TOKENS + NUM_DRAFTS + 1, dtype=torch.int64)
    count = torch.full((NUM_REQUESTS,), CONTEXT_LEN)
    num_steps = torch.zeros_like(count)
    step = 0
    while len(live := (count < CONTEXT_LEN + NUM_TOKENS).nonzero()[:, 0]):
        # Some requests are preempted for this step, the others come in any order.
        order = torch.tensor(rng.permutation(len(live))[: max(1, round(0.9 * len(live)))])
        requests, places = live[order], torch.arange(len(order))
        positions = count[requests]
        back = torch.arange(-CONTEXT_LEN, 0)
        context = tokens[requests[:, None], positions[:, None] + back]
        drafts = draft(requests, context, positions, rng)
        confidence = torch.tensor(rng.random((len(order), NUM_DRAFTS)) ** 0.3)
        lengths = choose_lengths(policy, planner, survival_of(confidence), rng)
        run = torch.cat([context, drafts], dim=1)
        target = torch.stack(
            [
                choose(
                    logits_of(run[:, k : k + CONTEXT_LEN]),
                    requests,
                    torch.where(
                        (lengths == k)[:, None] & (bonus is not None),
                        (bonus or noise_of)(requests, positions + k, places, step, k),
                        noise_of(requests, positions + k, places, step, k),
                    ),
                )
                for k in range(NUM_DRAFTS + 1)
            ],
            dim=1,
        )
        # Rows behind the verified drafts do not exist.
        span = torch.arange(NUM_DRAFTS + 1)
        target = torch.where(span > lengths[:, None], -1, target)
        found = TargetNoise().accept(drafts, lengths, target)
        remaining = CONTEXT_LEN + NUM_TOKENS - positions
        kept = committed_lengths(found, torch.tensor([], dtype=torch.int64), remaining)
        at = positions[:, None] + span
        tokens[requests[:, None], at] = torch.where(span < kept[:, None], found.token_ids, 0)
        count[requests] += kept
        num_steps[requests] += 1
        step += 1
    return tokens[:, CONTEXT_LEN : CONTEXT_LEN + NUM_TOKENS], num_steps


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return plain()


POLICIES = ("random", "fixed", "threshold", "static threshold", "early stop", "delayed")


@pytest.mark.parametrize("policy", [*POLICIES, *(f"gamma {number}" for number in range(6))])
def test_text_equals_plain_decoding_under_any_choice_of_lengths(
    policy: str, expected: Tensor
) -> None:
    text, _ = speculate(policy)
    assert text.equal(expected)


def test_text_is_varied_and_good_drafts_save_steps(expected: Tensor) -> None:
    assert len(expected.unique()) == VOCAB_SIZE
    greedy, sampled = expected[TEMPERATURE == 0], expected[TEMPERATURE > 0]
    assert (greedy[:30] != sampled[:30]).float().mean() > 0.5
    _, num_steps = speculate("fixed")
    kind = torch.arange(NUM_REQUESTS) % 4
    assert num_steps[kind == 0].eq(-(-NUM_TOKENS // (NUM_DRAFTS + 1))).all()
    assert num_steps[kind == 1].float().mean() < NUM_TOKENS / 2
    assert num_steps[kind == 3].eq(NUM_TOKENS).all()


# ---- power: noise keyed otherwise must be caught ------------------------------------------------


def by_place(requests: Tensor, positions: Tensor, places: Tensor, step: int, k: int) -> Tensor:
    """Wrong: keyed by the place of the row in the batch."""
    return OF_TARGET[places, positions]


def by_step(requests: Tensor, positions: Tensor, places: Tensor, step: int, k: int) -> Tensor:
    """Wrong: keyed by the number of the step and of the row in the request."""
    return OF_TARGET[requests, CONTEXT_LEN + step + k]


def other_stream(requests: Tensor, positions: Tensor, places: Tensor, step: int, k: int) -> Tensor:
    """Wrong for the default rule: a stream that belongs to rejection sampling."""
    return OF_RESIDUAL[requests, positions]


@pytest.mark.parametrize("noise_of", [by_place, by_step])
def test_noise_that_is_not_keyed_by_position_is_caught(noise_of: Noise, expected: Tensor) -> None:
    text, _ = speculate("random", noise_of)
    sampled = TEMPERATURE > 0
    assert (text != expected)[sampled].any(dim=1).all()
    assert text[~sampled].equal(expected[~sampled])  # greedy requests have no noise


def test_bonus_of_another_stream_is_caught(expected: Tensor) -> None:
    text, _ = speculate("random", bonus=other_stream)
    assert (text != expected)[TEMPERATURE > 0].any(dim=1).all()


def test_draft_that_is_taken_without_comparison_is_caught(
    expected: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = TargetNoise.accept

    def eager(self: TargetNoise, drafts: Tensor, lengths: Tensor, target: Tensor) -> object:
        agreed = torch.cat([drafts[:, :1], target[:, 1:]], dim=1)
        return accept(self, drafts, lengths, torch.where(lengths[:, None] > 0, agreed, target))

    monkeypatch.setattr(TargetNoise, "accept", eager)
    text, _ = speculate("random")
    assert not text.equal(expected)
