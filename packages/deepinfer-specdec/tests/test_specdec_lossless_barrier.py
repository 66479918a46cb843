"""The barrier: whether a draft is verified does not depend on what it is.

Test 6 of the losslessness tests. A draft is replaced, and with it everything that is computed from
it; the decision about it must stay. This finds leaks that no statistic sees.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from deepinfer_specdec import (
    CostTable,
    DelayedPlanner,
    best_lengths,
    early_stop_lengths,
    survival,
    threshold_lengths,
)
from deepinfer_specdec.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, philox

Array = np.ndarray
NUM_STATES = 10_000


@dataclass
class State:
    """A step of a few requests, and what the past decided about it.

    Confidences come from few values, 0 and 1 among them, so that many survivals tie.
    """

    confidence: Array
    available: Array
    total: int
    costs: CostTable

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "State":
        num_requests, num_drafts = int(rng.integers(1, 4)), int(rng.integers(2, 6))
        available = rng.integers(0, num_drafts + 1, num_requests)
        total = int(rng.integers(0, available.sum() + 1))
        costs = COSTS[rng.integers(2)]
        return cls(confidences(rng, num_requests, num_drafts), available, total, costs)


Rule = Callable[[State, Array], Array]  # survivals [R, g] -> lengths [R]

# Small steps often, large steps seldom.
ROWS = tuple(range(1, 21))
COSTS = (
    CostTable(ROWS, tuple(1.0 + 0.2 * (rows // 2) for rows in ROWS)),
    CostTable(ROWS, tuple(1.0 + 0.8 * (rows // 4) for rows in ROWS)),
)


def confidences(rng: np.random.Generator, *shape: int) -> Array:
    return np.array([0.0, 0.5, 0.9, 1.0, 1.0], np.float32)[rng.integers(0, 5, shape)]


def best(state: State, values: Array) -> Array:
    """The shipped choice with a total that the past decided."""
    available = torch.tensor(state.available)
    return best_lengths(torch.tensor(values), available, state.total).numpy()


def threshold(state: State, values: Array) -> Array:
    return threshold_lengths(torch.tensor(values), torch.tensor(state.available), 0.4).numpy()


def early_stop(state: State, values: Array) -> Array:
    return early_stop_lengths(values, state.available, state.costs)


def backward(state: State, values: Array) -> Array:
    """Wrong: the total is the best for this very step."""
    planner = DelayedPlanner(state.costs, full_every=0)
    total = planner.budget(values, np.ones(len(values), bool), state.available).total
    return best_lengths(torch.tensor(values), torch.tensor(state.available), total).numpy()


def later_drafts_first(state: State, values: Array) -> Array:
    """Wrong: of equal survivals the larger draft number comes first."""
    drafts = sorted(
        (-float(values[r, j]), -j, r) for r in range(len(values)) for j in range(state.available[r])
    )
    taken = [r for _, _, r in drafts[: state.total]]
    return np.bincount(taken, minlength=len(values))


def count_leaks(rule: Rule, num_states: int, every: bool = False) -> int:
    """Count drafts whose replacement changes the decision about them.

    A confidence reads the token before its draft, so replacing draft k changes the confidences
    behind k and no others. One draft of each state is replaced, or every one in turn.
    """
    rng = np.random.default_rng(6)
    leaks = 0
    for _ in range(num_states):
        state = State.draw(rng)
        num_requests, num_drafts = state.confidence.shape
        lengths = rule(state, survival(state.confidence))
        other = confidences(rng, num_requests, num_drafts)
        places = [(r, k) for r in range(num_requests) for k in range(num_drafts - 1)]
        for r, k in places if every else [places[rng.integers(len(places))]]:
            replaced = state.confidence.copy()
            replaced[r, k + 1 :] = other[r, k + 1 :]
            leaks += (lengths[r] > k) != (rule(state, survival(replaced))[r] > k)
    return leaks


@pytest.mark.parametrize("rule", [best, threshold, early_stop])
def test_decision_about_a_draft_does_not_depend_on_the_draft(rule: Rule) -> None:
    assert count_leaks(rule, NUM_STATES) == 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", [best, threshold, early_stop])
def test_decision_about_no_draft_of_a_state_depends_on_the_draft(rule: Rule) -> None:
    assert count_leaks(rule, NUM_STATES, every=True) == 0


@pytest.mark.parametrize("rule", [best, threshold, early_stop])
def test_decisions_of_these_states_differ(rule: Rule) -> None:
    # A rule that always decided the same would pass whatever it did.
    rng = np.random.default_rng(0)
    states = [State.draw(rng) for _ in range(500)]
    found = {tuple(rule(each, survival(each.confidence)).tolist()) for each in states}
    assert len(found) > 30


@pytest.mark.parametrize(("rule", "num_states"), [(backward, 400), (later_drafts_first, 1000)])
def test_rule_that_leaks_is_caught(rule: Rule, num_states: int) -> None:
    assert count_leaks(rule, num_states, every=True) > 10


def test_lengths_never_read_behind_the_first_draft_left_out() -> None:
    # What stands behind the verified drafts of all requests may be anything of lower survival.
    rng = np.random.default_rng(1)
    for _ in range(200):
        values = torch.tensor(survival(rng.random((4, 5)) ** 0.3))
        available = torch.full((4,), 5)
        total = int(rng.integers(0, 21))
        lengths = best_lengths(values, available, total)
        behind = torch.arange(5) > lengths[:, None]
        assert best_lengths(torch.where(behind, 0.0, values), available, total).equal(lengths)


# ---- noise of rejection sampling ----------------------------------------------------------------


def words_of_cycle(anchor: int, with_cycle: bool = True) -> set[tuple[int, int]]:
    """Every word that one cycle of five drafts from an anchor takes, with the token it is for."""
    vocab_size, words = 16, set()
    for k in range(1, 6):
        for group in range(vocab_size // 4):
            counter = (group, anchor + k, DRAFT, anchor if with_cycle else 0)
            items = tuple(torch.tensor(each) for each in counter)
            for place, word in enumerate(philox(items, (torch.tensor(5), torch.tensor(6)))):
                words.add((4 * group + place, int(word)))
    return words


def test_two_cycles_that_cover_the_same_positions_share_no_noise() -> None:
    for distance in range(1, 5):
        assert not words_of_cycle(100) & words_of_cycle(100 + distance)


def test_noise_without_a_cycle_would_be_shared() -> None:
    assert words_of_cycle(100, with_cycle=False) & words_of_cycle(102, with_cycle=False)


def test_streams_share_no_noise_at_a_position() -> None:
    zero = torch.tensor(0)
    key = (torch.tensor(5), torch.tensor(6))
    groups = torch.arange(100)
    words = []
    for stream in (TARGET, DRAFT, ACCEPT, RESIDUAL):
        found = philox((groups, torch.tensor(7), torch.tensor(stream), zero), key)
        words.append(set(torch.stack(found).flatten().tolist()))
    assert len(set.union(*words)) == sum(map(len, words)) == 1600
