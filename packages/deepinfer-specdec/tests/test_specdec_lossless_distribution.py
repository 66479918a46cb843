"""One position: the token that comes out has the target's distribution, whatever the drafter.

Test 2 of the losslessness tests. Each wrong way of accepting kept here must be caught.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from deepinfer_specdec import Acceptance, Rejection, TargetNoise
from deepinfer_specdec.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, chances, gumbel

NUM_TRIALS = 200_000
VOCAB_SIZE = 8
NUM_PAIRS = 20
# Two tests a pair, and the special pairs.
SIGNIFICANCE = 1e-3 / (2 * NUM_PAIRS + 20)
CAUGHT = 1e-9


def random_pair(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return draft, target and next target distributions."""
    draft, target, after = np.random.default_rng(seed).dirichlet([0.7] * VOCAB_SIZE, 3)
    return draft, target, after


def special_pair(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draft, target, after = random_pair(1000)
    some = np.arange(VOCAB_SIZE) % 2 == 0
    if name == "draft with zeros":
        draft = draft * some
    elif name == "target with zeros":
        target = target * some
    elif name == "equal":
        draft = target
    elif name == "disjoint":
        draft, target = draft * some, target * ~some
    elif name == "certain draft":
        draft = np.eye(VOCAB_SIZE)[3]
    elif name == "certain target":
        target = np.eye(VOCAB_SIZE)[3]
    elif name == "both certain, and different":
        draft, target = np.eye(VOCAB_SIZE)[3], np.eye(VOCAB_SIZE)[5]
    return draft / draft.sum(), target / target.sum(), after


SPECIAL = (
    "draft with zeros",
    "target with zeros",
    "equal",
    "disjoint",
    "certain draft",
    "certain target",
    "both certain, and different",
)

Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], Acceptance]


def ship(
    drafts: Tensor,
    lengths: Tensor,
    own: Tensor,
    seeds: Tensor,
    positions: Tensor,
    probabilities: tuple[Tensor, Tensor],
) -> Acceptance:
    return Rejection().accept(
        drafts, lengths, own, seeds=seeds, positions=positions, probabilities=probabilities
    )


def by_target_noise(
    drafts: Tensor,
    lengths: Tensor,
    own: Tensor,
    seeds: Tensor,
    positions: Tensor,
    probabilities: tuple[Tensor, Tensor],
) -> Acceptance:
    return TargetNoise().accept(drafts, lengths, own)


def draw(chance: Tensor, noise: Tensor) -> Tensor:
    return (chance.log() + noise).argmax(dim=1)


def trial(
    pair: tuple[np.ndarray, np.ndarray, np.ndarray],
    accept: Accept,
    *,
    stream: int = DRAFT,
    seed: int = 0,
) -> tuple[float, float]:
    """Return p-values: of the first token, and of the second where there is one.

    Half of the trials verify the draft, half do not. Drafts come from noise of `stream`.
    """
    draft, target, after = (torch.tensor(each, dtype=torch.float32) for each in pair)
    rng = np.random.default_rng(seed)
    seeds = torch.tensor(rng.integers(0, 2**32, (NUM_TRIALS, 2)))
    positions = torch.tensor(rng.integers(1, 2**20, NUM_TRIALS))
    lengths = torch.arange(NUM_TRIALS) % 2
    cycle = positions - 1 if stream == DRAFT else 0
    drafts = draw(draft, gumbel(seeds, positions, VOCAB_SIZE, stream, cycle))[:, None]
    own = torch.full((NUM_TRIALS, 2), -1)
    if accept is by_target_noise:
        own[:, 0] = draw(target, gumbel(seeds, positions, VOCAB_SIZE, TARGET))
        own[:, 1] = draw(after, gumbel(seeds, positions + 1, VOCAB_SIZE, TARGET))
    probabilities = (
        draft.expand(NUM_TRIALS, 1, -1),
        torch.stack([target, after]).expand(NUM_TRIALS, 2, -1),
    )
    found = accept(drafts, lengths, own, seeds, positions, probabilities).token_ids
    second = found[:, 1][found[:, 1] >= 0]
    return fits(found[:, 0], target), fits(second, after)


def fits(token_ids: Tensor, chance: Tensor) -> float:
    """Return the p-value of a chi-square test; 0 where a token without a chance came out."""
    counts = np.bincount(token_ids.numpy(), minlength=VOCAB_SIZE)
    expected = chance.double().numpy() / chance.double().sum().item() * len(token_ids)
    if counts[expected == 0].any():
        return 0.0
    kept = expected > 0
    if len(token_ids) < 100 or kept.sum() < 2:
        return 1.0
    return float(stats.chisquare(counts[kept], expected[kept]).pvalue)


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_rejection_keeps_the_distribution(seed: int) -> None:
    first, second = trial(random_pair(seed), ship, seed=seed)
    assert first > SIGNIFICANCE and second > SIGNIFICANCE


@pytest.mark.parametrize("name", SPECIAL)
def test_rejection_keeps_the_distribution_of_special_pairs(name: str) -> None:
    first, second = trial(special_pair(name), ship)
    assert first > SIGNIFICANCE and second > SIGNIFICANCE


@pytest.mark.parametrize("seed", range(3))
def test_target_noise_keeps_the_distribution(seed: int) -> None:
    first, second = trial(random_pair(seed), by_target_noise, stream=TARGET, seed=seed)
    assert first > SIGNIFICANCE and second > SIGNIFICANCE


@pytest.mark.parametrize("name", SPECIAL)
def test_target_noise_keeps_the_distribution_of_special_pairs(name: str) -> None:
    first, second = trial(special_pair(name), by_target_noise, stream=TARGET)
    assert first > SIGNIFICANCE and second > SIGNIFICANCE


# ---- power: wrong ways must be caught -----------------------------------------------------------


def first_from_target(*case: object) -> Acceptance:
    """Wrong: a draft that falls is replaced by a token of the target, not of the residual."""
    _, lengths, _, seeds, positions, probabilities = case
    found = ship(*case)
    token_ids = found.token_ids.clone()
    fallen = (found.num_accepted == 0) & (lengths == 1)
    again = draw(probabilities[1][:, 0], gumbel(seeds, positions, VOCAB_SIZE, RESIDUAL))
    token_ids[:, 0] = torch.where(fallen, again, token_ids[:, 0])
    return Acceptance(token_ids, found.num_accepted)


def chance_from_draft_noise(*case: object) -> Acceptance:
    """Wrong: whether a draft stands is drawn with a word that drew the draft."""
    drafts, lengths, _, seeds, positions, (draft, target) = case
    of_draft = draft[:, 0].gather(1, drafts)[:, 0]
    of_target = target[:, 0].gather(1, drafts)[:, 0]
    stands = chances(seeds, positions, DRAFT, positions - 1) * of_draft < of_target
    rest = (target[:, 0] - draft[:, 0]).clamp(min=0)
    other = draw(rest, gumbel(seeds, positions, VOCAB_SIZE, RESIDUAL))
    sampled = draw(target[:, 0], gumbel(seeds, positions, VOCAB_SIZE, TARGET))
    verified = torch.where(stands, drafts[:, 0], other)
    first = torch.where(lengths == 1, verified, sampled)
    return Acceptance(torch.stack([first, torch.full_like(first, -1)], dim=1), lengths)


def bonus_without_the_unverified_draft(*case: object) -> Acceptance:
    """Wrong: the token after the verified drafts leaves out what the next draft covers."""
    _, lengths, _, seeds, positions, (draft, target) = case
    found = ship(*case)
    token_ids = found.token_ids.clone()
    rest = (target[:, 0] - draft[:, 0]).clamp(min=0)
    wrong = draw(rest, gumbel(seeds, positions, VOCAB_SIZE, TARGET))
    token_ids[:, 0] = torch.where(lengths == 0, wrong, token_ids[:, 0])
    return Acceptance(token_ids, found.num_accepted)


def every_draft_stands(*case: object) -> Acceptance:
    """Wrong: no draft is ever rejected."""
    drafts, lengths, *_ = case
    token_ids = ship(*case).token_ids.clone()
    token_ids[:, 0] = torch.where(lengths == 1, drafts[:, 0], token_ids[:, 0])
    return Acceptance(token_ids, lengths)


def bonus_with_the_draft_noise(*case: object) -> Acceptance:
    """Wrong: without verification the token is drawn with the noise that decides of drafts."""
    drafts, lengths, _, seeds, positions, (draft, target) = case
    found = ship(*case)
    u = chances(seeds, positions, ACCEPT)
    of_draft = draft[:, 0].gather(1, drafts)[:, 0]
    of_target = target[:, 0].gather(1, drafts)[:, 0]
    token_ids = found.token_ids.clone()
    token_ids[:, 0] = torch.where(
        (lengths == 0) & (u * of_draft < of_target), drafts[:, 0], token_ids[:, 0]
    )
    return Acceptance(token_ids, found.num_accepted)


@pytest.mark.parametrize(
    "wrong",
    [
        first_from_target,
        chance_from_draft_noise,
        bonus_without_the_unverified_draft,
        every_draft_stands,
        bonus_with_the_draft_noise,
    ],
)
def test_wrong_acceptance_is_caught(wrong: Accept) -> None:
    first, _ = trial(random_pair(0), wrong)
    assert first < CAUGHT


def test_wrong_second_token_is_caught() -> None:
    def second_from_first(*case: object) -> Acceptance:
        """Wrong: the token after an accepted draft is drawn with the row before."""
        _, _, _, seeds, positions, probabilities = case
        found = ship(*case)
        again = draw(probabilities[1][:, 0], gumbel(seeds, positions + 1, VOCAB_SIZE, TARGET))
        token_ids = found.token_ids.clone()
        token_ids[:, 1] = torch.where(token_ids[:, 1] >= 0, again, -1)
        return Acceptance(token_ids, found.num_accepted)

    _, second = trial(random_pair(0), second_from_first)
    assert second < CAUGHT
