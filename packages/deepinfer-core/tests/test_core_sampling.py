"""The sampler against exact distributions, its noise against known answers, rows against batches.

Longer than the house's 300 lines: the oracle, the cases it judges and the proof that it can say no
belong together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from deepinfer_core.cpu.ops.philox import gumbel_noise, philox_words
from deepinfer_core.cpu.ops.sampling import logprobs, probabilities, sample
from deepinfer_core.engine.sampler import RowSettings
from deepinfer_core.errors import KernelInputError

NUM_DRAWS = 24_000
VOCAB_SIZE = 24
SIGNIFICANCE = 1e-3


# ---- the generator ------------------------------------------------------------------------------


def words_by_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 once more, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        even, odd = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(odd >> 32) ^ c[1] ^ k[0], odd % 2**32, (even >> 32) ^ c[3] ^ k[1], even % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


KNOWN_ANSWERS = {
    "zeros": ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


@pytest.mark.parametrize("case", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(case: str) -> None:
    counter, key, expected = ([int(w, 16) for w in text.split()] for text in KNOWN_ANSWERS[case])
    assert philox_words(torch.tensor(counter), torch.tensor(key)).tolist() == expected
    assert words_by_integers(counter, key) == expected


def test_philox_equals_integer_arithmetic(rng: np.random.Generator) -> None:
    counter, key = rng.integers(0, 2**32, (300, 4)), rng.integers(0, 2**32, (300, 2))
    words = philox_words(torch.tensor(counter), torch.tensor(key)).tolist()
    expected = zip(counter.tolist(), key.tolist(), strict=True)
    assert words == [words_by_integers(c, k) for c, k in expected]


@pytest.mark.parametrize("vocab_size", [1, 4, 5, 131])
@pytest.mark.parametrize("stream", [0, 3])
def test_noise_comes_from_seed_position_stream_cycle_and_token(
    vocab_size: int, stream: int, rng: np.random.Generator
) -> None:
    seeds, positions = rng.integers(0, 2**32, (3, 2)), np.array([0, 7, 2**20 + 1])
    cycle = np.array([0, 5, 2**31])
    noise = gumbel_noise(
        torch.tensor(seeds), torch.tensor(positions), vocab_size, stream, torch.tensor(cycle)
    )
    for row in range(3):
        for token_id in range(vocab_size):
            counter = [token_id // 4, int(positions[row]), stream, int(cycle[row])]
            word = words_by_integers(counter, seeds[row].tolist())[token_id % 4]
            u = ((word >> 9) + 0.5) * 2.0**-23
            assert float(noise[row, token_id]) == pytest.approx(-np.log(-np.log(u)), abs=3e-6)


def test_noise_of_a_row_has_the_same_bits_in_any_batch(rng: np.random.Generator) -> None:
    seeds = torch.tensor(rng.integers(0, 2**32, (17, 2)))
    positions = torch.tensor(rng.integers(0, 2**20, 17))
    for vocab_size in (8, 512, 1000, 40_001):
        together = gumbel_noise(seeds, positions, vocab_size)
        for row in range(17):
            alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab_size)
            assert torch.equal(alone[0], together[row])
    assert torch.equal(gumbel_noise(seeds, positions, 1000), together[:, :1000])


# ---- an exact oracle ----------------------------------------------------------------------------


class Inputs(RowSettings):
    """`SampleInputs` of N rows that can be taken apart."""

    def take(self, rows: Tensor) -> Inputs:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        taken = {k: v[rows] if isinstance(v, Tensor) else v for k, v in values.items()}
        return Inputs(**taken)


@dataclass(frozen=True)
class Settings:
    """Filters of one row as plain numbers; `allowed` is a set of ids or None."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: frozenset[int] | None = None


def make_inputs(
    rows: list[Settings], vocab_size: int, seeds: Tensor, positions: Tensor, everything: bool = True
) -> Inputs:
    """Lay settings out as tensors; without `everything`, fields that no row uses are None."""

    def column(name: str, dtype: torch.dtype) -> Tensor | None:
        values = [getattr(row, name) for row in rows]
        unused = all(value == getattr(Settings(), name) for value in values)
        return None if unused and not everything else torch.tensor(values, dtype=dtype)

    size = (len(rows), vocab_size)
    penalties = torch.tensor([[r.repetition, r.frequency, r.presence] for r in rows])
    seen, counts = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int32)
    bias, words = torch.zeros(size), np.zeros((len(rows), -(-vocab_size // 32)), np.uint32)
    for i, row in enumerate(rows):
        seen[i, list(row.prompt)] = True
        for token_id in row.output:
            counts[i, token_id] += 1
        for token_id, value in row.bias:
            bias[i, token_id] = value
        for token_id in range(vocab_size) if row.allowed is None else row.allowed:
            words[i, token_id // 32] |= np.uint32(1 << (token_id % 32))
    uses_penalties = everything or bool((penalties != torch.tensor([1.0, 0.0, 0.0])).any())
    return Inputs(
        seeds,
        positions,
        torch.tensor([row.temperature for row in rows]),
        column("top_k", torch.int64),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        penalties if uses_penalties else None,
        seen if uses_penalties else None,
        counts if uses_penalties else None,
        bias if everything or any(row.bias for row in rows) else None,
        torch.tensor(words.view(np.int32))
        if everything or any(row.allowed is not None for row in rows)
        else None,
    )


def exact(logits: np.ndarray, s: Settings) -> np.ndarray:
    """Return the probabilities in float64, filter by filter in the stated order."""
    x = logits.astype(np.float64)
    ids = range(len(x))
    if s.allowed is not None:
        x[[i for i in ids if i not in s.allowed]] = -np.inf
    for i, value in s.bias:
        x[i] += value
    for i in set(s.prompt) | set(s.output):
        x[i] = x[i] / s.repetition if x[i] > 0 else x[i] * s.repetition
    for i in set(s.output):
        x[i] -= s.frequency * s.output.count(i) + s.presence
    x /= s.temperature
    order = sorted(ids, key=lambda i: (-x[i], i))
    if s.top_k:
        x[order[s.top_k :]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if s.top_p < 1:
        reached = int(np.argmax(np.cumsum(p[order]) >= s.top_p))
        p[order[reached + 1 :]] = 0
    p[p < s.min_p * p.max()] = 0
    return p / p.sum()


def p_value(token_ids: Tensor, expected: np.ndarray) -> float:
    """Chi-square of drawn tokens; 0 if one of probability 0 was drawn, rare ones share a bin."""
    counts = np.bincount(token_ids.numpy(), minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    mean = expected * len(token_ids)
    rare = mean < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    mean = np.append(mean[~rare], mean[rare].sum())
    keep = mean > 0
    return float(stats.chisquare(observed[keep], mean[keep]).pvalue)


def draw(logits: Tensor, settings: Settings, vary: str, rng: np.random.Generator) -> Tensor:
    """Sample the same logits many times at other positions, or with other seeds."""
    seeds = torch.tensor(rng.integers(0, 2**32, (NUM_DRAWS, 2)))
    positions = torch.arange(NUM_DRAWS)
    if vary == "positions":
        seeds = seeds[:1].expand(NUM_DRAWS, 2)
    else:
        positions = positions[:1].expand(NUM_DRAWS)
    one = make_inputs([settings], VOCAB_SIZE, seeds[:1], positions[:1], everything=False)
    many = one.take(torch.zeros(NUM_DRAWS, dtype=torch.int64))
    many = Inputs(seeds, positions, *(getattr(many, f.name) for f in fields(many)[2:]))
    result = sample(logits.expand(NUM_DRAWS, VOCAB_SIZE), many)
    assert not result.status.any()
    return result.token_ids


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Many small ops: threads gain little here, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SEEN: dict[str, Any] = {"prompt": (0, 3, 3, 7, 11), "output": (1, 3, 3, 3, 9, 9, 14)}
CASES = {
    "plain": Settings(),
    "cold": Settings(temperature=0.7),
    "hot": Settings(temperature=1.5),
    "top_k": Settings(top_k=5),
    "top_p": Settings(top_p=0.8),
    "min_p": Settings(min_p=0.1),
    "repetition": Settings(repetition=1.7, **SEEN),
    "frequency": Settings(frequency=0.6, **SEEN),
    "presence": Settings(presence=0.8, **SEEN),
    "bias": Settings(bias=((2, 1.5), (5, -2.0), (20, 0.5))),
    "mask": Settings(allowed=frozenset(range(1, VOCAB_SIZE, 3))),
    "all": Settings(
        temperature=1.3,
        top_k=9,
        top_p=0.9,
        min_p=0.08,
        repetition=1.2,
        frequency=0.3,
        presence=-0.4,
        bias=((2, 1.0), (8, -1.0)),
        allowed=frozenset(range(VOCAB_SIZE)) - {4, 6},
        **SEEN,
    ),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(
    case: str, vary: str, rng: np.random.Generator
) -> None:
    logits = torch.tensor(rng.normal(0, 1.5, VOCAB_SIZE), dtype=torch.float32)
    expected = exact(logits.numpy(), CASES[case])
    assert p_value(draw(logits, CASES[case], vary, rng), expected) > SIGNIFICANCE


SEED_AND_PLACE = (torch.tensor([[1, 2]]), torch.tensor([3]))


@pytest.mark.parametrize("case", CASES)
def test_probabilities_are_what_draws_follow(case: str, rng: np.random.Generator) -> None:
    logits = torch.tensor(rng.normal(0, 1.5, VOCAB_SIZE), dtype=torch.float32)
    found = probabilities(logits[None], make_inputs([CASES[case]], VOCAB_SIZE, *SEED_AND_PLACE))
    np.testing.assert_allclose(found[0].numpy(), exact(logits.numpy(), CASES[case]), atol=2e-6)


def test_probabilities_of_greedy_and_broken_rows() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, torch.nan, 1.0]])
    found = probabilities(logits, plain_inputs(2, temperature=torch.zeros(2)))
    assert found.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_streams_and_cycles_draw_other_noise(rng: np.random.Generator) -> None:
    logits = torch.zeros(64, VOCAB_SIZE)
    base = plain_inputs(64)
    drawn = {
        (stream, cycle): tuple(
            sample(
                logits, replace(base, stream=stream, cycle=torch.full((64,), cycle))
            ).token_ids.tolist()
        )
        for stream in (0, 1)
        for cycle in (0, 9)
    }
    assert len(set(drawn.values())) == 4
    assert drawn[0, 0] == tuple(sample(logits, base).token_ids.tolist())


WRONG = {
    "top_k_of_one_more": (Settings(top_k=5), Settings(top_k=6)),
    "top_p_without_the_token_that_reaches_it": (Settings(top_p=0.8), Settings(top_p=0.72)),
    "temperature_off_by_a_twentieth": (Settings(), Settings(temperature=1.05)),
    "min_p_of_all_instead_of_the_best": (Settings(min_p=0.1), Settings(min_p=0.02)),
    "prompt_not_penalised": (CASES["repetition"], Settings(repetition=1.7, output=SEEN["output"])),
    "frequency_once": (CASES["frequency"], Settings(presence=0.6, **SEEN)),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", WRONG)
def test_the_chi_square_notices_a_wrong_filter(case: str, rng: np.random.Generator) -> None:
    stated, done = WRONG[case]
    # Probabilities that no two filters confuse: a geometric row, 0.27 of what is left each time.
    logits = torch.arange(VOCAB_SIZE).float() * np.log(0.73)
    drawn = draw(logits, done, "positions", rng)
    assert p_value(drawn, exact(logits.numpy(), done)) > SIGNIFICANCE
    assert p_value(drawn, exact(logits.numpy(), stated)) < SIGNIFICANCE


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("vary", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(vary: str, rng: np.random.Generator) -> None:
    settings = Settings(allowed=frozenset(range(6)))
    drawn = draw(torch.zeros(VOCAB_SIZE), settings, vary, rng)
    pairs = drawn[0::2] * 6 + drawn[1::2]
    assert p_value(pairs, np.full(36, 1 / 36)) > SIGNIFICANCE


def by_rank(logits: Tensor, inputs: Inputs) -> Tensor:
    """A sampler that is wrong: noise goes to places of the sorted list."""
    ordered, ids = logits.sort(dim=-1, descending=True)
    noise = gumbel_noise(inputs.seeds, inputs.positions, 8)
    place = (ordered[:, :8] + noise).argmax(dim=-1, keepdim=True)
    return ids.gather(1, place)[:, 0]


def test_noise_stays_with_the_token_when_near_ties_change_places(rng: np.random.Generator) -> None:
    num_rows = 500
    near = torch.zeros(num_rows, VOCAB_SIZE) - 5
    near[:, :8] = torch.tensor(rng.normal(0, 1e-5, (num_rows, 8)))
    other = near.clone()
    other[:, :8] = torch.tensor(rng.normal(0, 1e-5, (num_rows, 8)))
    seeds, positions = torch.zeros(num_rows, 2, dtype=torch.int64), torch.arange(num_rows)
    inputs = make_inputs([Settings(top_k=8)] * num_rows, VOCAB_SIZE, seeds, positions)

    def agreement(draw_from: Callable[[Tensor], Tensor]) -> float:
        return (draw_from(near) == draw_from(other)).double().mean().item()

    assert agreement(lambda x: sample(x, inputs).token_ids) > 0.99
    assert agreement(lambda x: by_rank(x, inputs)) < 0.5


# ---- rows ---------------------------------------------------------------------------------------


def mixed_rows(num_rows: int, vocab_size: int, rng: np.random.Generator) -> tuple[Tensor, Inputs]:
    """Rows that differ in everything; the fifth is broken."""
    kinds = [*CASES.values(), Settings(temperature=0.0), Settings(temperature=0.0, **SEEN)]
    rows = []
    for i in range(num_rows):
        row = {f.name: getattr(kinds[i % len(kinds)], f.name) for f in fields(Settings)}
        row["temperature"] *= 3  # so that what a filter should have dropped is drawn soon
        for name in ("prompt", "output"):
            row[name] = tuple(token_id % vocab_size for token_id in row[name])
        row["bias"] = tuple((i % vocab_size, value) for i, value in row["bias"])
        row["allowed"] = row["allowed"] and frozenset(range(i % 2, vocab_size, 2))
        rows.append(Settings(**row))
    logits = torch.tensor(rng.normal(0, 3, (num_rows, vocab_size)), dtype=torch.float32)
    if num_rows > 4:
        logits[4, vocab_size // 2] = float("nan")
    seeds = torch.tensor(rng.integers(0, 2**32, (num_rows, 2)))
    positions = torch.tensor(rng.integers(0, 5000, num_rows))
    return logits, make_inputs(rows, vocab_size, seeds, positions)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [(n, v) for n in (2, 7, 17) for v in (8, 512, 1000)] + [(5, 129_280)],
)
def test_a_row_is_the_same_alone_and_in_a_batch(
    num_rows: int, vocab_size: int, rng: np.random.Generator
) -> None:
    logits, first = mixed_rows(num_rows, vocab_size, rng)
    for shift in range(3 if vocab_size <= 1000 else 1):
        inputs = replace(first, positions=first.positions + shift)
        together = sample(logits, inputs)
        assert together.status.tolist() == [int(row == 4) for row in range(num_rows)]
        for row in range(num_rows):
            at = torch.tensor([row])
            alone = sample(logits[at], inputs.take(at))
            assert alone.token_ids.item() == together.token_ids[row]
            assert alone.status.item() == together.status[row]


@pytest.mark.parametrize("vocab_size", [8, 512, 1000, 129_280])
def test_logprobs_of_a_row_have_the_same_bits_in_any_batch(
    vocab_size: int, rng: np.random.Generator
) -> None:
    logits = mixed_rows(7, vocab_size, rng)[0]
    token_ids = torch.arange(7)
    together = logprobs(logits, token_ids, 5)
    for row in range(7):
        alone = logprobs(logits[row : row + 1], token_ids[row : row + 1], 5)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one.nan_to_num(), all_rows[row : row + 1].nan_to_num())


def test_order_of_rows_does_not_matter(rng: np.random.Generator) -> None:
    logits, inputs = mixed_rows(17, 512, rng)
    order = torch.tensor(rng.permutation(17))
    shuffled = sample(logits[order], inputs.take(order))
    assert torch.equal(shuffled.token_ids, sample(logits, inputs).token_ids[order])


def plain_inputs(num_rows: int, **other: Tensor) -> Inputs:
    seeds, positions = torch.full((num_rows, 2), 3), torch.arange(num_rows)
    return Inputs(seeds, positions, **{"temperature": torch.ones(num_rows), **other})


def test_two_seeds_differ_in_either_half(rng: np.random.Generator) -> None:
    logits = torch.zeros(64, VOCAB_SIZE)
    tokens = []
    for seed in ([3, 3], [4, 3], [3, 4]):
        seeds = torch.tensor([seed]).expand(64, 2)
        inputs = Inputs(seeds, torch.arange(64), torch.ones(64))
        tokens.append(sample(logits, inputs).token_ids)
    assert torch.equal(tokens[0], sample(logits, plain_inputs(64)).token_ids)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (tokens[a] == tokens[b]).sum() < 20


# ---- filters ------------------------------------------------------------------------------------


def neutral_tensors(num_rows: int, vocab_size: int) -> dict[str, dict[str, Tensor]]:
    size = (num_rows, vocab_size)
    counted = {
        "prompt_seen": torch.ones(size, dtype=torch.bool),
        "output_counts": torch.full(size, 3, dtype=torch.int32),
    }
    penalties = torch.tensor([[1.0, 0.0, 0.0]]).expand(num_rows, 3)
    words = -(-vocab_size // 32)
    return {
        "top_k": {"top_k": torch.zeros(num_rows, dtype=torch.int64)},
        "top_k_of_all": {"top_k": torch.full((num_rows,), vocab_size)},
        "top_p": {"top_p": torch.ones(num_rows)},
        "min_p": {"min_p": torch.zeros(num_rows)},
        "penalties": {"penalties": penalties, **counted},
        "bias": {"bias": torch.zeros(size)},
        "mask": {"mask": torch.full((num_rows, words), -1, dtype=torch.int32)},
    }


@pytest.mark.parametrize("name", neutral_tensors(1, 8))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_neutral_filter_changes_nothing(
    name: str, temperature: float, rng: np.random.Generator
) -> None:
    logits = torch.tensor(rng.normal(0, 1, (300, 100)), dtype=torch.float32)
    logits[:, 70] = float("-inf")
    heat = torch.full((300,), temperature)
    filtered = plain_inputs(300, temperature=heat, **neutral_tensors(300, 100)[name])
    plain = sample(logits, plain_inputs(300, temperature=heat))
    assert torch.equal(sample(logits, filtered).token_ids, plain.token_ids)


@pytest.mark.parametrize(
    ("name", "setting"), [("top_k", 3), ("top_p", 0.375), ("top_k", 1), ("top_p", 1e-6)]
)
def test_ties_at_a_border_keep_the_lower_ids(name: str, setting: float) -> None:
    logits = torch.full((2000, VOCAB_SIZE), -1e4)
    logits[:, 16:] = 2.0  # eight equal tokens, an eighth each
    kind = torch.int64 if name == "top_k" else torch.float32
    inputs = plain_inputs(2000, **{name: torch.full((2000,), setting, dtype=kind)})
    kept = 3 if setting in (3, 0.375) else 1
    assert set(sample(logits, inputs).token_ids.tolist()) == set(range(16, 16 + kept))


def test_min_p_of_one_keeps_all_that_are_most_likely() -> None:
    logits = torch.zeros(500, VOCAB_SIZE)
    logits[:, [3, 8]] = 1e-3
    inputs = plain_inputs(500, min_p=torch.ones(500))
    assert set(sample(logits, inputs).token_ids.tolist()) == {3, 8}


@pytest.mark.parametrize("first", [0, 5, 500, 998])
def test_greedy_takes_the_lowest_of_equal_ids(first: int) -> None:
    logits = torch.zeros(3, 1000)
    logits[:, [first, 999]] = 7.0
    greedy = plain_inputs(3, temperature=torch.zeros(3))
    assert sample(logits, greedy).token_ids.tolist() == [first] * 3
    ids = logprobs(logits, torch.zeros(3, dtype=torch.int64), 4)[1]
    rest = [i for i in range(4) if i != first][:2]
    assert ids.tolist() == [[first, 999, *rest]] * 3


def test_greedy_obeys_mask_bias_and_penalties_alone() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]]).repeat(4, 1)
    rows = [
        Settings(temperature=0.0, allowed=frozenset({2, 3})),
        Settings(temperature=0.0, bias=((3, 9.0),)),
        Settings(temperature=0.0, presence=1.5, output=(0,)),
        Settings(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9),
    ]
    inputs = make_inputs(rows, 4, torch.zeros(4, 2, dtype=torch.int64), torch.arange(4))
    assert sample(logits, inputs).token_ids.tolist() == [2, 3, 1, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38])
def test_a_tiny_temperature_is_as_good_as_greedy(
    temperature: float, rng: np.random.Generator
) -> None:
    logits = torch.tensor(rng.normal(0, 1e4, (50, 40)), dtype=torch.float32)
    inputs = plain_inputs(50, temperature=torch.full((50,), temperature))
    result = sample(logits, inputs)
    assert torch.equal(result.token_ids, logits.argmax(dim=-1))
    assert not result.status.any()


def test_the_last_word_of_a_mask_may_be_partly_used() -> None:
    only = make_inputs(
        [Settings(allowed=frozenset({32}))] * 9,
        33,
        torch.zeros(9, 2, dtype=torch.int64),
        torch.arange(9),
    )
    assert sample(torch.zeros(9, 33), only).token_ids.tolist() == [32] * 9


# ---- rows that cannot be sampled ----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_fail_alone(temperature: float, rng: np.random.Generator) -> None:
    good = torch.tensor(rng.normal(0, 1, (6, 40)), dtype=torch.float32)
    heat = torch.full((6,), temperature)
    wanted = sample(good, plain_inputs(6, temperature=heat)).token_ids
    bad = good.clone()
    bad[0, 3] = float("nan")
    bad[1] = float("-inf")
    bad[2, 39] = float("inf")
    bad[3] = float("nan")
    bad[4, :-1] = float("-inf")
    mask = torch.full((6, 2), -1, dtype=torch.int32)
    for masked in (None, mask):
        result = sample(bad, plain_inputs(6, temperature=heat, mask=masked))
        assert result.status.tolist() == [1, 1, 1, 1, 0, 0]
        assert result.token_ids.tolist() == [0, 0, 0, 0, 39, int(wanted[5])]
    mask[5] = 0
    mask[0, 0] = ~(1 << 3)
    result = sample(bad, plain_inputs(6, temperature=heat, mask=mask))
    assert result.status.tolist() == [1, 1, 1, 1, 0, 1]
    assert result.token_ids.tolist() == [0, 0, 0, 0, 39, 0]


def test_logprobs_of_broken_rows_are_nan_and_fail_alone() -> None:
    logits = torch.zeros(4, 10)
    logits[0, 2], logits[1, 9] = float("nan"), float("inf")
    logits[2] = float("-inf")
    chosen, ids, values = logprobs(logits, torch.tensor([2, 1, 0, 4]), 3)
    assert chosen[:3].isnan().all() and values[:3].isnan().all()
    assert ids.tolist() == [[0, 1, 2]] * 4
    assert torch.allclose(chosen[3], torch.tensor(0.1).log())


# ---- log-probabilities --------------------------------------------------------------------------


def test_logprobs_equal_float64_arithmetic(rng: np.random.Generator) -> None:
    logits = torch.tensor(rng.normal(0, 8, (20, 77)).round(1), dtype=torch.float32)
    logits[3, 5:] = float("-inf")
    wide = logits.double().numpy()
    token_ids = rng.integers(0, 77, 20)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    chosen, ids, values = logprobs(logits, torch.tensor(token_ids), 77)
    np.testing.assert_allclose(chosen, expected[np.arange(20), token_ids], rtol=2e-6, atol=2e-7)
    order = [sorted(range(77), key=lambda i, x=row: (-x[i], i)) for row in wide]
    assert ids.tolist() == order
    in_order = np.take_along_axis(expected, np.array(order), -1)
    np.testing.assert_allclose(values, in_order, rtol=2e-6, atol=2e-7)
    for num_top in (0, 1, 10):
        part = logprobs(logits, torch.tensor(token_ids), num_top)
        assert torch.equal(part[1], ids[:, :num_top])
        assert torch.equal(part[2], values[:, :num_top])


def test_logprobs_are_differentiable(rng: np.random.Generator) -> None:
    logits = torch.tensor(rng.normal(0, 2, (5, 30)), dtype=torch.float32, requires_grad=True)
    token_ids = torch.tensor(rng.integers(0, 30, 5))
    (ours,) = torch.autograd.grad(logprobs(logits, token_ids, 2)[0].sum(), logits)
    log_softmax = torch.log_softmax(logits, -1).gather(1, token_ids[:, None])
    (theirs,) = torch.autograd.grad(log_softmax.sum(), logits)
    assert torch.allclose(ours, theirs, atol=1e-6)


# ---- contract -----------------------------------------------------------------------------------


def test_no_rows_give_no_tokens() -> None:
    for temperature in (0.0, 1.0):
        inputs = make_inputs(
            [Settings(temperature)], 9, torch.zeros(1, 2).long(), torch.zeros(1).long()
        )
        result = sample(torch.zeros(0, 9), inputs.take(torch.zeros(0, dtype=torch.int64)))
        assert result.token_ids.shape == result.status.shape == (0,)
    shapes = [t.shape for t in logprobs(torch.zeros(0, 9), torch.zeros(0).long(), 3)]
    assert shapes == [(0,), (0, 3), (0, 3)]


def test_inputs_are_not_modified(rng: np.random.Generator) -> None:
    logits, inputs = mixed_rows(14, 64, rng)
    before = logits.clone()
    found = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    tensors = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
    result = sample(logits, inputs)
    logprobs(logits, result.token_ids, 3)
    assert torch.equal(logits, before) or torch.equal(logits.isnan(), before.isnan())
    assert all(torch.equal(getattr(inputs, name), value) for name, value in tensors.items())
    assert result.token_ids.dtype == torch.int64 and result.status.dtype == torch.int32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", torch.ones(4)),
        ("top_k", torch.ones(3)),
        ("mask", torch.zeros(3, 1, dtype=torch.int32)),
        ("bias", torch.zeros(3, 39)),
        ("penalties", torch.ones(3, 3)),
    ],
)
def test_a_tensor_outside_the_contract_is_named(name: str, value: Tensor) -> None:
    named = "prompt_seen" if name == "penalties" else name
    with pytest.raises(KernelInputError, match=f"`{named}`"):
        sample(torch.zeros(3, 40), plain_inputs(3, **{name: value}))


def test_logprobs_refuse_ids_outside_the_vocabulary() -> None:
    for token_id in (-1, 9):
        with pytest.raises(KernelInputError, match="`token_ids`"):
            logprobs(torch.zeros(1, 9), torch.tensor([token_id]), 0)
    with pytest.raises(KernelInputError, match="`num_top` is 10"):
        logprobs(torch.zeros(1, 9), torch.tensor([0]), 10)
    with pytest.raises(KernelInputError, match="`logits`"):
        logprobs(torch.zeros(1, 9, dtype=torch.float64), torch.tensor([0]), 1)
