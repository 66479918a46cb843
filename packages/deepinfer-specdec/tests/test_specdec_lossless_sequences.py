"""Whole sequences: drafter, confidences, policy, verification, and the token after it.

Tests 3, 4 and 5 of the losslessness tests. The target looks at two tokens, the drafter and its
confidences at one, so that every decision can be made once for each of finitely many states and
looked up for 100000 sequences at a time. Policies run through their own code.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from deepinfer_specdec import (
    CostTable,
    DelayedPlanner,
    FixedPlanner,
    Rejection,
    TargetNoise,
    ThresholdPlanner,
    best_lengths,
    early_stop_lengths,
    survival,
    threshold_lengths,
)
from deepinfer_specdec.noise import DRAFT, TARGET, gumbel

Array = np.ndarray


class Policy(Protocol):
    """How many drafts, from a record or None; which ones, from this step and a random number."""

    def total(self, record: Array | None) -> int: ...

    def lengths(self, current: Array, total: int, coin: int) -> Array: ...


@dataclass
class Planned:
    """A planner as engines use it."""

    planner: FixedPlanner | ThresholdPlanner | DelayedPlanner
    num_requests: int
    num_drafts: int

    def total(self, record: Array | None) -> int:
        shape = (self.num_requests, self.num_drafts)
        known = np.full(self.num_requests, record is not None)
        record = np.zeros(shape, np.float32) if record is None else record
        available = np.full(self.num_requests, self.num_drafts)
        return self.planner.budget(record, known, available).total

    def lengths(self, current: Array, total: int, coin: int) -> Array:
        available = torch.full((len(current),), self.num_drafts)
        return self.planner.lengths(torch.tensor(current), available, total).numpy()


@dataclass
class OfCurrent:
    """A rule that looks at the current step alone; it has no total."""

    rule: str
    costs: CostTable

    def total(self, record: Array | None) -> int:
        return 0

    def lengths(self, current: Array, total: int, coin: int) -> Array:
        available = np.full(len(current), current.shape[1])
        if self.rule == "early stop":
            return early_stop_lengths(current, available, self.costs)
        return threshold_lengths(torch.tensor(current), torch.tensor(available), 0.5).numpy()


@dataclass
class Backward:
    """Wrong: the total is the best one for the confidences of this very step."""

    costs: CostTable

    def total(self, record: Array | None) -> int:
        return 0

    def lengths(self, current: Array, total: int, coin: int) -> Array:
        available = np.full(len(current), current.shape[1])
        planner = DelayedPlanner(self.costs, full_every=0)
        best = planner.budget(current, np.ones(len(current), bool), available).total
        return best_lengths(torch.tensor(current), torch.tensor(available), best).numpy()


@dataclass
class FixedTotal:
    """A total that never changes, and the shipped order or (wrong) one with random ties."""

    number: int
    random_ties: bool

    def total(self, record: Array | None) -> int:
        return self.number

    def lengths(self, current: Array, total: int, coin: int) -> Array:
        if not self.random_ties:
            available = torch.full((len(current),), current.shape[1])
            return best_lengths(torch.tensor(current), available, total).numpy()
        shuffled = np.random.default_rng(coin).permutation(current.size)
        order = shuffled[np.argsort(-current.reshape(-1)[shuffled], kind="stable")]
        taken = np.bincount(order[:total] // current.shape[1], minlength=len(current))
        return taken.astype(np.int32)


@dataclass
class Loop:
    """A target, a drafter and its confidences over few tokens, for requests in batches of R.

    target [V, V, V]: of the token after two; draft [V, V]: after one; confidence [g, V]: of the
    draft behind a token. Token ids and positions 0 and 1 are given, both 0.
    """

    target: Array
    draft: Array
    confidence: Array
    num_requests: int
    rule: str = "rejection"
    with_cycle: bool = True

    @property
    def num_drafts(self) -> int:
        return len(self.confidence)

    @property
    def vocab_size(self) -> int:
        return len(self.draft)

    @cached_property
    def survivals(self) -> tuple[Array, Array]:
        """The different survivals of a request, and which of them each run of tokens has.

        [states, g], and [V^g] by the tokens that the confidences read.
        """
        size, num_drafts = self.vocab_size, self.num_drafts
        runs = np.arange(size**num_drafts)
        read = runs[:, None] // size ** np.arange(num_drafts) % size
        values = survival(self.confidence[np.arange(num_drafts), read])
        states, place = np.unique(values, axis=0, return_inverse=True)
        return states, place.reshape(-1)

    @property
    def states(self) -> Array:
        return self.survivals[0]

    def of_system(self, code: int) -> Array:
        """Survivals of the R requests of one batch, [R, g]."""
        count = len(self.states)
        return self.states[code // count ** np.arange(self.num_requests) % count]

    def run(
        self, policy: Policy, num_sequences: int, num_tokens: int, seed: int, num_coins: int = 1
    ) -> Array:
        """Return the first tokens of each sequence, [num_sequences, num_tokens]."""
        rng = np.random.default_rng(seed)
        num_systems = -(-num_sequences // self.num_requests)
        num_rows = num_systems * self.num_requests
        seeds = torch.tensor(rng.integers(0, 2**32, (num_rows, 2)))
        tokens = torch.zeros(num_rows, 2 + num_tokens * (self.num_drafts + 1), dtype=torch.int64)
        count = torch.full((num_rows,), 2)
        records: list[Array] = []
        most = self.num_requests * self.num_drafts + 1
        for _ in range(num_tokens):
            known = tokens.gather(1, count[:, None] - torch.tensor([2, 1]))
            drafts = self.drafts(known[:, 1], seeds, count)
            run = torch.cat([known, drafts], dim=1)
            codes = self.codes(run)
            totals = looked_up(
                records[-2] if len(records) >= 2 else np.full(num_systems, -1),
                lambda code: policy.total(None if code < 0 else self.of_system(code)),
            )
            records.append(codes)
            coins = rng.integers(0, num_coins, num_systems)
            lengths = looked_up(
                (codes * most + totals) * num_coins + coins,
                partial(self.lengths_of, policy, most, num_coins),
            )
            count += self.verify(run, torch.tensor(lengths).reshape(-1), seeds, count, tokens)
        return tokens[:num_sequences, 2 : 2 + num_tokens].numpy()

    def lengths_of(self, policy: Policy, most: int, num_coins: int, key: int) -> Array:
        key, coin = divmod(key, num_coins)
        code, total = divmod(key, most)
        return policy.lengths(self.of_system(code), total, coin)

    def drafts(self, anchor: Tensor, seeds: Tensor, count: Tensor) -> Tensor:
        logits = torch.tensor(self.draft, dtype=torch.float32).log()
        cycle = count - 1 if self.with_cycle else 0
        last, drafts = anchor, []
        for k in range(self.num_drafts):
            if self.rule == "rejection":
                noise = gumbel(seeds, count + k, self.vocab_size, DRAFT, cycle)
            else:
                noise = gumbel(seeds, count + k, self.vocab_size, TARGET)
            last = (logits[last] + noise).argmax(dim=1)
            drafts.append(last)
        return torch.stack(drafts, dim=1)

    def codes(self, run: Tensor) -> Array:
        read = run[:, 1 : self.num_drafts + 1].numpy()
        own = self.survivals[1][(read * self.vocab_size ** np.arange(self.num_drafts)).sum(axis=1)]
        return (
            own.reshape(-1, self.num_requests) * len(self.states) ** np.arange(self.num_requests)
        ).sum(axis=1)

    def verify(
        self, run: Tensor, lengths: Tensor, seeds: Tensor, count: Tensor, tokens: Tensor
    ) -> Tensor:
        """Write what comes out behind `count`, and return how many tokens that were."""
        target = torch.tensor(self.target, dtype=torch.float32)[run[:, :-1], run[:, 1:]]
        places = torch.arange(self.num_drafts + 1)
        if self.rule == "rejection":
            draft = torch.tensor(self.draft, dtype=torch.float32)[run[:, 1:-1]]
            found = Rejection().accept(
                run[:, 2:],
                lengths,
                torch.full((len(run), self.num_drafts + 1), -1),
                seeds=seeds,
                positions=count,
                probabilities=(draft, target),
            )
        else:
            noise = torch.stack(
                [gumbel(seeds, count + k, self.vocab_size, TARGET) for k in places.tolist()], dim=1
            )
            found = TargetNoise().accept(run[:, 2:], lengths, (target.log() + noise).argmax(dim=2))
        tokens.scatter_(1, count[:, None] + places, found.token_ids)
        return found.num_accepted + 1


def looked_up(keys: Array, decide: object) -> Array:
    """Return `decide(key)` of each key, called once for each that differs."""
    unique, place = np.unique(keys, return_inverse=True)
    return np.array([decide(int(key)) for key in unique])[place]


# ---- test 3: sequences --------------------------------------------------------------------------

NUM_SEQUENCES = 100_000
NUM_TOKENS = 6
NUM_TESTS = 40
SIGNIFICANCE = 1e-3 / NUM_TESTS
CAUGHT = 1e-9


def make_loop(num_requests: int, **changes: object) -> Loop:
    """Four tokens; confidences that depend strongly on the draft before, some of them exactly 1."""
    rng = np.random.default_rng(8)
    target, draft = rng.dirichlet([0.8] * 4, (4, 4)), rng.dirichlet([0.8] * 4, 4)
    num_drafts = 4 if num_requests == 1 else 2
    confidence = np.array(
        [[0.9, 0.7, 0.7, 0.9], [1.0, 0.05, 1.0, 0.05], [1.0, 0.1, 0.1, 1.0], [0.9, 0.1, 0.9, 0.1]]
    )
    return Loop(target, draft, confidence[:num_drafts], num_requests, **changes)


def smooth_costs(num_requests: int) -> CostTable:
    """Costs at which the best total lies well inside, and moves with what is recorded."""
    rows = tuple(range(num_requests, 6 * num_requests + 1))
    return CostTable(rows, tuple(1.0 + 0.35 * (each / num_requests - 1) for each in rows))


def stepped_costs(num_requests: int) -> CostTable:
    """Costs whose first draft is dear and whose others are cheap: the best total is 0 or many."""
    rows = (num_requests, num_requests + 1, 6 * num_requests)
    return CostTable(rows, (1.0, 1.9, 2.1))


def make_policy(name: str, loop: Loop) -> Policy:
    costs = smooth_costs(loop.num_requests)
    if name in ("early stop", "static threshold"):
        return OfCurrent(name, costs)
    steps = stepped_costs(loop.num_requests)
    if name == "backward":
        return Backward(steps)
    planner = {
        "fixed": FixedPlanner(),
        "threshold": ThresholdPlanner(0.5, full_every=0),
        "delayed": DelayedPlanner(costs, full_every=0),
        "delayed, stepped costs": DelayedPlanner(steps, full_every=0),
    }[name]
    return Planned(planner, loop.num_requests, loop.num_drafts)


def p_values(loop: Loop, tokens: Array) -> list[float]:
    """Return those of tokens 0 to 2 and of tokens 3 to 5, by chi-square over 64 cells."""
    size = loop.vocab_size
    state = np.zeros((size, size))
    state[0, 0] = 1
    target = np.asarray(loop.target, np.float32).astype(np.float64)
    target /= target.sum(axis=-1, keepdims=True)
    found = []
    for first in range(0, tokens.shape[1], 3):
        cells = np.einsum("ab,abc,bcd,cde->cde", state, target, target, target)
        cells = cells.reshape(-1) * len(tokens)
        codes = tokens[:, first] * size**2 + tokens[:, first + 1] * size + tokens[:, first + 2]
        counts = np.bincount(codes, minlength=size**3)
        few = cells < 10
        if few.any():
            cells = np.append(cells[~few], cells[few].sum())
            counts = np.append(counts[~few], counts[few].sum())
        found.append(float(stats.chisquare(counts, cells).pvalue))
        for _ in range(3):
            state = np.einsum("ab,abc->bc", state, target)
    return found


POLICIES = ("fixed", "threshold", "static threshold", "early stop", "delayed")


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("name", [*POLICIES, "delayed, stepped costs"])
def test_rejection_keeps_the_distribution_of_sequences(name: str, num_requests: int) -> None:
    loop = make_loop(num_requests)
    tokens = loop.run(make_policy(name, loop), NUM_SEQUENCES, NUM_TOKENS, seed=1)
    assert min(p_values(loop, tokens)) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("name", [*POLICIES, "delayed, stepped costs"])
def test_rejection_keeps_the_distribution_of_a_million_sequences(
    name: str, num_requests: int
) -> None:
    loop = make_loop(num_requests)
    policy = make_policy(name, loop)
    tokens = np.concatenate(
        [loop.run(policy, NUM_SEQUENCES, NUM_TOKENS, seed) for seed in range(10, 20)]
    )
    assert min(p_values(loop, tokens)) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("name", "num_requests"), [("fixed", 1), ("delayed", 3), ("backward", 1), ("backward", 3)]
)
def test_target_noise_keeps_the_distribution_under_any_policy(name: str, num_requests: int) -> None:
    loop = make_loop(num_requests, rule="target_noise")
    tokens = loop.run(make_policy(name, loop), NUM_SEQUENCES, NUM_TOKENS, seed=2)
    assert min(p_values(loop, tokens)) > SIGNIFICANCE


def test_policies_of_these_loops_really_choose() -> None:
    for num_requests in (1, 3):
        loop = make_loop(num_requests)
        codes = np.random.default_rng(0).integers(0, len(loop.states) ** num_requests, 200)
        for name, least in (("delayed", 3), ("delayed, stepped costs", 2), ("threshold", 3)):
            policy = make_policy(name, loop)
            assert len({policy.total(loop.of_system(int(code))) for code in codes}) >= least
        early = make_policy("early stop", loop)
        lengths = {tuple(early.lengths(loop.of_system(int(code)), 0, 0)) for code in codes}
        assert len(lengths) > 2


@pytest.mark.parametrize("num_requests", [1, 3])
def test_policy_that_looks_at_the_current_step_is_caught(num_requests: int) -> None:
    loop = make_loop(num_requests)
    tokens = loop.run(make_policy("backward", loop), NUM_SEQUENCES, NUM_TOKENS, seed=1)
    assert min(p_values(loop, tokens)) < CAUGHT


def test_draft_noise_that_a_record_has_seen_is_caught() -> None:
    # The third draft of two steps ago and the first of now may have the same position. A record
    # tells the one by the confidence behind it; with the same noise it would tell the other.
    loop = make_loop(1)
    loop.confidence = np.array([[1.0] * 4, [1.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 1.0]])
    loop.draft = np.full((4, 4), 0.25)
    costs = CostTable((1, 5), (1.0, 4.5), (1, 5))
    policy = Planned(DelayedPlanner(costs, full_every=0), 1, 4)
    for with_cycle in (True, False):
        loop.with_cycle = with_cycle
        worst = min(p_values(loop, loop.run(policy, NUM_SEQUENCES, NUM_TOKENS, seed=3)))
        assert worst > SIGNIFICANCE if with_cycle else worst < CAUGHT


# ---- test 4: the counterexample -----------------------------------------------------------------

# Speeds of 1, 0.5 and 0.45 steps a second for 1, 2 and 3 rows.
COUNTEREXAMPLE = CostTable((1, 2, 3), (1.0, 2.0, 1 / 0.45))
NUM_TRIALS = 200_000


def two_tokens(confidence: list[list[float]], num_requests: int) -> Loop:
    """Tokens A and B, always with the chances 0.7 and 0.3, drafted with 0.5 and 0.5."""
    target, draft = np.broadcast_to([0.7, 0.3], (2, 2, 2)), np.full((2, 2), 0.5)
    return Loop(target, draft, np.array(confidence), num_requests)


def counterexample() -> Loop:
    return two_tokens([[0.8, 0.8], [0.9, 0.0]], 1)


def share_of_a(tokens: Array) -> float:
    return float((tokens == 0).mean())


def standard_error(tokens: Array) -> float:
    return float(np.sqrt(0.7 * 0.3 / tokens.size))


@pytest.mark.parametrize("name", POLICIES)
def test_counterexample_leaves_the_chance_of_a_as_it_is(name: str) -> None:
    loop = counterexample()
    policy: Policy = {
        "fixed": Planned(FixedPlanner(), 1, 2),
        "threshold": Planned(ThresholdPlanner(0.5, full_every=0), 1, 2),
        "delayed": Planned(DelayedPlanner(COUNTEREXAMPLE, full_every=0), 1, 2),
    }.get(name) or OfCurrent(name, COUNTEREXAMPLE)
    tokens = loop.run(policy, NUM_TRIALS, 4, seed=4)
    for position in range(4):
        each = tokens[:, position]
        assert abs(share_of_a(each) - 0.7) < 4 * standard_error(each)


def test_counterexample_catches_a_search_over_the_current_step() -> None:
    loop = counterexample()
    policy = Backward(COUNTEREXAMPLE)
    # The first draft is verified only when it is A.
    after_a, after_b = (survival(np.array([[0.8, each]])) for each in (0.9, 0.0))
    assert policy.lengths(after_a, 0, 0).tolist() == [2]
    assert policy.lengths(after_b, 0, 0).tolist() == [0]
    tokens = loop.run(policy, NUM_TRIALS, 1, seed=4)
    assert share_of_a(tokens) > 0.84


# ---- test 5: ties -------------------------------------------------------------------------------


@pytest.mark.parametrize("random_ties", [False, True])
def test_order_of_ties_does_not_let_a_draft_decide_about_itself(random_ties: bool) -> None:
    loop = two_tokens([[0.9, 0.9], [1.0, 0.0]], 2)
    tokens = loop.run(FixedTotal(1, random_ties), 2 * NUM_TRIALS, 1, seed=5, num_coins=240)
    if random_ties:
        assert share_of_a(tokens) == pytest.approx(0.725, abs=0.005)
    else:
        assert abs(share_of_a(tokens) - 0.7) < 4 * standard_error(tokens)
