"""Sampling against its twin: tokens are equal, but where two are as good within float32's error.

In the interpreter vocabularies are small, and tiles with them: 256 tokens up to V = 8192, so that a
row of a few hundred tokens has several of them, and a head of 256 tokens.
"""

from dataclasses import fields, replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.reference import sampling as twins
from deepinfer_kernels_cuda.sampling.inputs import Tiles
from deepinfer_kernels_cuda.sampling.logprobs import logprobs
from deepinfer_kernels_cuda.sampling.noise import gumbel, gumbel_of, philox_words
from deepinfer_kernels_cuda.sampling.probabilities import probabilities
from deepinfer_kernels_cuda.sampling.sample import sample
from deepinfer_kernels_cuda.testing.compare import assert_same_bits
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU
from deepinfer_kernels_cuda.values import SampleInputs

V = 129280
NEAR = 1e-5  # two scores of up to 20 that differ by less may change places


def take(inputs: SampleInputs, rows: list[int]) -> SampleInputs:
    values = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    return SampleInputs(**{k: v[rows] if isinstance(v, Tensor) else v for k, v in values.items()})


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(23)


def apart(tensor: Tensor) -> Tensor:
    """Return a view with the same numbers whose rows lie apart, garbage between them."""
    width = tensor.shape[1]
    wide = torch.empty(len(tensor), width + 5, dtype=tensor.dtype, device=tensor.device)
    return wide[:, 3 : width + 3].copy_(tensor)


def column(*values: float) -> Tensor:
    dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float32
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def settings(count: int, temperature: float = 1.0, **given) -> SampleInputs:
    made = {
        "seeds": torch.randint(0, 2**32, (count, 2)),
        "positions": torch.randint(0, 2**20, (count,)),
        "temperature": torch.full((count,), temperature),
    }
    made |= {key: value for key, value in given.items() if value is not None}
    placed = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in made.items()}
    return SampleInputs(**placed)


def normal(count: int, vocab_size: int, spread: float = 3.0) -> Tensor:
    return (spread * torch.randn(count, vocab_size)).to(DEVICE)


def filters(count: int, vocab_size: int) -> dict[str, Tensor]:
    return {
        "bias": torch.randn(count, vocab_size),
        "mask": torch.randint(-(2**31), 2**31, (count, -(-vocab_size // 32))).int(),
        "penalties": torch.rand(count, 3) + 0.5,
        "prompt_seen": torch.rand(count, vocab_size) < 0.3,
        "output_counts": torch.randint(0, 3, (count, vocab_size)).int(),
    }


def assert_tokens(logits: Tensor, inputs: SampleInputs) -> None:
    found, expected = sample(logits, inputs), twins.sample(logits, inputs)
    assert_same_bits(found.status, expected.status, "status")
    same = found.token_ids == expected.token_ids
    if not bool(same.all()):
        chances = twins.probabilities(logits, inputs)
        noise = twins.gumbel_noise(
            inputs.seeds, inputs.positions, logits.shape[1], inputs.stream,
            torch.zeros_like(inputs.positions) if inputs.cycle is None else inputs.cycle,
        )  # fmt: skip
        score = chances.log() + noise
        best, got = (score.gather(1, each.token_ids.unsqueeze(1)) for each in (expected, found))
        assert bool((same | ((best - got).squeeze(1) < NEAR)).all()), (found, expected)


# noise


@triton.jit
def _words(counter_ptr, key_ptr, word_ptr, noise_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    c0, c1, c2, c3 = (
        tl.load(counter_ptr + 4 * i).to(tl.uint32),
        tl.load(counter_ptr + 4 * i + 1).to(tl.uint32),
        tl.load(counter_ptr + 4 * i + 2).to(tl.uint32),
        tl.load(counter_ptr + 4 * i + 3).to(tl.uint32),
    )
    k0, k1 = tl.load(key_ptr + 2 * i).to(tl.uint32), tl.load(key_ptr + 2 * i + 1).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(c0, c1, c2, c3, k0, k1)
    tl.store(word_ptr + 4 * i, w0.to(tl.int64))
    tl.store(word_ptr + 4 * i + 1, w1.to(tl.int64))
    tl.store(word_ptr + 4 * i + 2, w2.to(tl.int64))
    tl.store(word_ptr + 4 * i + 3, w3.to(tl.int64))
    tl.store(noise_ptr + i, gumbel(w0))


PUBLISHED = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def test_words_are_the_published_ones_and_the_twin_s():
    counter, key = torch.randint(0, 2**32, (64, 4)), torch.randint(0, 2**32, (64, 2))
    for place, (counters, keys, _) in enumerate(PUBLISHED):
        counter[place] = torch.tensor([int(word, 16) for word in counters.split()])
        key[place] = torch.tensor([int(word, 16) for word in keys.split()])
    counter, key = counter.to(DEVICE), key.to(DEVICE)
    words, noise = torch.empty_like(counter), torch.empty(64, device=DEVICE)
    _words[(1,)](counter, key, words, noise, N=64)
    for place, (_, _, expected) in enumerate(PUBLISHED):
        assert words[place].tolist() == [int(word, 16) for word in expected.split()]
    assert torch.equal(words, twins.philox_words(counter, key))
    u = ((words[:, 0] >> 9).double() + 0.5) * 2.0**-23
    assert float((noise - -(-u.log()).log()).abs().max()) < 3e-6


@triton.jit
def _noise_of(id_ptr, noise_ptr, position, stream, cycle, k0, k1, N: tl.constexpr):
    i = tl.arange(0, N)
    keys = position.to(tl.uint32), stream.to(tl.uint32), cycle.to(tl.uint32)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    noise = gumbel_of(tl.load(id_ptr + i), keys[0], keys[1], keys[2], k0, k1)
    tl.store(noise_ptr + i, noise)


def test_noise_belongs_to_token_ids_in_any_order():
    ids = torch.randperm(1000)[:256].int().to(DEVICE)
    noise = torch.empty(256, device=DEVICE)
    _noise_of[(1,)](ids, noise, 70001, 3, 12, 2**31 + 5, 17, N=256)
    expected = twins.gumbel_noise(
        column(2**31 + 5, 17).unsqueeze(0), column(70001), 1000, 3, column(12)
    )
    assert float((noise - expected[0, ids.long()]).abs().max()) < 3e-6


# sample

SIZES = [(1, 1), (2, 2), (5, 31), (2, 256), (2, 257), (1, 1021)]
SIZES += [(1, V), (7, V), (129, V), (3, V + 1), (5, 2**18), (600, 4099)] if ON_GPU else []


def test_no_rows_yield_nothing():
    inputs, logits = settings(0), normal(0, 40)
    found = sample(logits, inputs)
    assert found.token_ids.shape == found.status.shape == (0,)
    assert probabilities(logits, inputs).shape == (0, 40)
    assert [each.shape for each in logprobs(logits, inputs.positions, 3)] == [(0,), (0, 3), (0, 3)]


@pytest.mark.parametrize(("count", "vocab_size"), SIZES)
def test_greedy_rows_take_the_lowest_id_of_the_maximum(count, vocab_size):
    logits = normal(count, vocab_size).round()
    found = sample(logits, settings(count, 0.0))
    assert torch.equal(found.token_ids, logits.argmax(-1))
    assert not found.status.any()


@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize(("count", "vocab_size"), SIZES)
def test_sampled_rows_equal_the_twin(count, vocab_size, stream):
    inputs = settings(count, stream=stream)
    temperature = torch.where(torch.arange(count) % 4 == 3, 0.0, torch.rand(count) * 2)
    inputs = replace(inputs, temperature=temperature.to(DEVICE))
    if stream:
        inputs = replace(inputs, cycle=inputs.positions // 3)
    assert_tokens(normal(count, vocab_size), inputs)


@pytest.mark.parametrize("cut", [{}, {"top_k": 9, "top_p": 0.8}])
@pytest.mark.parametrize(("count", "vocab_size"), [SIZES[4], *SIZES[6:]])
def test_mask_bias_and_penalties_equal_the_twin(count, vocab_size, cut):
    given = {name: column(*[value] * count) for name, value in cut.items()}
    inputs = settings(count, 0.7, **filters(count, vocab_size), **given)
    logits = normal(count, vocab_size)
    assert_tokens(logits, inputs)
    assert_tokens(logits, replace(inputs, temperature=torch.zeros_like(inputs.temperature)))


@pytest.mark.parametrize("name", ["mask", "bias", "penalties"])
def test_each_filter_alone_equals_the_twin(name):
    made = filters(2, 300)
    names = [name] if name != "penalties" else ["penalties", "prompt_seen", "output_counts"]
    assert_tokens(normal(2, 300), settings(2, 1.0, **{each: made[each] for each in names}))


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("cut", [None] + [0.9] * ON_GPU)
def test_a_broken_row_fails_alone(fault, cut):
    logits = normal(2, 300)
    if fault is None:
        logits[1] = float("-inf")
    else:
        logits[1, 299] = fault
    given = {} if cut is None else {"top_p": column(*[cut] * 2)}
    # masked, it breaks the row as well
    mask = torch.full((2, 10), -1, dtype=torch.int32)
    mask[1, 9] = 0
    inputs = settings(2, 1.0, mask=mask, **given)
    found, alone = sample(logits, inputs), take(inputs, [0])
    assert found.status.tolist() == [0, 1] and found.token_ids[1] == 0
    assert torch.equal(found.token_ids[:1], sample(logits[:1], alone).token_ids)
    chances = probabilities(logits, inputs)
    assert not chances[1].any()
    assert_same_bits(chances[:1], probabilities(logits[:1], alone))


def test_a_broken_row_that_is_cut_fails_alone():
    logits = normal(2, 300)
    logits[0, 7] = float("nan")
    inputs = settings(2, 1.0, top_p=column(0.5, 0.5))
    assert sample(logits, inputs).status.tolist() == [1, 0]
    assert_tokens(logits[1:], take(inputs, [1]))


def test_a_row_with_nothing_allowed_is_broken():
    inputs = settings(2, 1.0, mask=torch.zeros(2, 10, dtype=torch.int32))
    assert sample(normal(2, 300), inputs).status.tolist() == [1, 1]


def test_tokens_that_cannot_be_chosen_never_are():
    logits = normal(4, 300)
    logits[:, torch.arange(300) % 7 != 3] = float("-inf")
    tokens = sample(logits, settings(4, 50.0)).token_ids
    assert (tokens % 7 == 3).all()


def test_temperatures_near_zero_take_the_maximum():
    logits = normal(3, 600)
    inputs = replace(settings(3), temperature=column(1e-30, 1e-42, 1e-6))
    assert torch.equal(sample(logits, inputs).token_ids, logits.argmax(-1))


# top-k, top-p, min-p


def kept(logits: Tensor, **given) -> list[list[int]]:
    inputs = settings(len(logits), 1.0, **given)
    chances = probabilities(logits, inputs)
    assert torch.equal(chances > 0, twins.probabilities(logits, inputs) > 0)
    return [row.nonzero().flatten().tolist() for row in chances]


def test_top_k_keeps_the_lower_ids_of_equal_values():
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[0, 299], logits[1, :280], logits[2, ::3] = 1.0, -1.0, 2.0
    found = kept(logits, top_k=column(3, 3, 3))
    assert found == [[0, 1, 299], [280, 281, 282], [0, 3, 6]]


def test_top_k_of_any_size_keeps_as_many():
    ks = [1, 256, 257, 300, 0]
    found = kept(normal(5, 300).round(), top_k=column(*ks))
    assert [len(each) for each in found] == [1, 256, 257, 300, 300]


def test_top_p_ends_at_the_token_that_reaches_it():
    logits = torch.full((5, 700), float("-inf"), device=DEVICE)
    logits[:, 13:700:90] = 0.0  # eight equal ones: shares are exact
    ids = list(range(13, 700, 90))
    found = kept(logits, top_p=column(0.5, 0.50001, 0.0, 0.875, 1.0))
    assert found == [ids[:count] for count in (4, 5, 1, 7, 8)]


def test_top_p_counts_what_top_k_left():
    logits = torch.zeros(1, 300, device=DEVICE)
    assert kept(logits, top_k=column(10), top_p=column(0.5)) == [[0, 1, 2, 3, 4]]


def test_min_p_drops_what_is_less_likely_than_a_share_of_the_best():
    logits = torch.arange(600, device=DEVICE).neg().float().unsqueeze(0)
    assert kept(logits, min_p=column(0.05)) == [[0, 1, 2]]  # exp(-3) is 0.0498
    assert kept(logits, min_p=column(0.05), top_k=column(2)) == [[0, 1]]


@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_min_p_above_one_keeps_the_best(vocab_size):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = settings(3, temperature=1.0, min_p=column(1.0, 1.0000001, torch.inf))
    sampled = sample(logits, inputs)
    assert torch.equal(sampled.token_ids, logits.argmax(-1))
    assert not sampled.status.any()
    assert torch.equal(probabilities(logits, inputs).argmax(-1), logits.argmax(-1))
    assert torch.equal(twins.sample(logits, inputs).token_ids, logits.argmax(-1))


def test_settings_that_are_missing_or_unknown_are_named():
    logits = torch.zeros(1, 64, device=DEVICE)
    with pytest.raises(KernelInputError, match="`seeds` is None"):
        sample(logits, replace(settings(1), seeds=None))
    with pytest.raises(KernelInputError, match=r"`stream` is 7.*0 and at most 3"):
        sample(logits, replace(settings(1), stream=7))


@pytest.mark.parametrize(
    ("flat", "given"),
    [
        ("equal", {"top_k": 250, "top_p": 0.7}),
        ("few levels", {"top_p": 0.9}),
        ("wide", {"top_p": 0.9, "min_p": 0.5}),
        ("wide", {"min_p": 0.5}),
        ("narrow", {"top_p": 0.6}),
    ],
)
def test_rows_whose_head_is_too_small_are_searched_whole(flat, given):
    logits = {
        "equal": torch.zeros(1, 301, device=DEVICE),
        "few levels": normal(1, 301, 1.0).round(),
        "wide": normal(1, 301, 0.3),
        "narrow": normal(1, 301, 0.01),
    }[flat]
    cut = {name: column(value) for name, value in given.items()}
    kept(logits, **cut)
    assert_tokens(logits, settings(1, 1.0, **cut))


@pytest.mark.skipif(not ON_GPU, reason="too many tokens for the interpreter")
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    "given",
    [{"top_p": 0.95}, {"top_k": 30000}, {"top_k": 50000, "top_p": 0.9}, {"min_p": 0.003}],
)
def test_flat_rows_of_a_real_vocabulary_keep_what_the_twin_keeps(spread, given):
    logits = normal(5, V, spread)
    inputs = settings(5, 1.0, **{name: column(*[value] * 5) for name, value in given.items()})
    found, expected = probabilities(logits, inputs), twins.probabilities(logits, inputs)
    # a border within float32's error of top-p may move by a token
    assert int(((found > 0) != (expected > 0)).sum(-1).max()) <= 1
    both = (found > 0) & (expected > 0)
    assert float(((found - expected).abs() / expected)[both].max()) < 1e-4
    assert_tokens(logits, inputs)


RANDOM_CUTS = [(4, 600)] + ([(64, V), (9, 5003), (32, 2**17)] if ON_GPU else [])


@pytest.mark.parametrize(("count", "vocab_size"), RANDOM_CUTS)
def test_cut_rows_equal_the_twin(count, vocab_size):
    number = torch.arange(count)
    inputs = settings(
        count,
        0.8,
        top_k=torch.where(number % 3 == 0, 0, torch.randint(1, 40, (count,))),
        top_p=torch.where(number % 4 == 1, 1.0, 0.2 + 0.75 * torch.rand(count)),
        min_p=torch.where(number % 2 == 0, 0.0, 0.1 * torch.rand(count)),
    )
    logits = normal(count, vocab_size)
    assert_tokens(logits, inputs)
    found, expected = probabilities(logits, inputs), twins.probabilities(logits, inputs)
    assert torch.equal(found > 0, expected > 0)
    assert float(((found - expected).abs() / expected.clamp(min=1e-30)).max()) < 2e-6
    assert float((found.double().sum(-1) - 1).abs().max()) < 1e-5


def test_probabilities_of_greedy_rows_are_on_one_token():
    logits = normal(3, 500).round()
    chances = probabilities(logits, settings(3, 0.0))
    assert torch.equal(chances.nonzero()[:, 1], logits.argmax(-1)) and chances.sum() == 3


def test_probabilities_of_whole_rows_equal_the_twin():
    logits, inputs = normal(2, 700), settings(2, 1.3)
    expected = twins.probabilities(logits.double(), inputs)
    found = probabilities(logits, inputs)
    assert float(((found - expected).abs() / expected.clamp(min=1e-30)).max()) < 2e-6


# logprobs


@pytest.mark.parametrize(("count", "vocab_size"), SIZES)
@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_logprobs_equal_the_twin(count, vocab_size, num_top):
    logits = normal(count, vocab_size)
    if num_top == 5:
        logits = logits.round()  # many are equal
    ids = torch.randint(0, vocab_size, (count,), device=DEVICE)
    num_top = min(num_top, vocab_size)
    found, expected = logprobs(logits, ids, num_top), twins.logprobs(logits, ids, num_top)
    assert torch.equal(found[1], expected[1])
    for one, other in ((found[0], expected[0]), (found[2], expected[2])):
        assert torch.allclose(one, other, rtol=2e-7, atol=1e-6)


def test_logprobs_list_all_tokens_and_equal_ones_by_id():
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[1, 299] = 1.0
    for num_top in (7, 129, 300):
        ids = logprobs(logits, column(0, 0), num_top)[1]
        assert ids[0].tolist() == list(range(num_top))
        assert ids[1].tolist() == [299, *range(num_top - 1)]


# tokens that a head holds, in its smaller and its larger form, and too many of them
@pytest.mark.parametrize("vocab_size", [100, 250, 300] + [1000, 3000, 5000, V] * ON_GPU)
def test_logprobs_order_raw_logits_that_are_one_distance_from_the_peak(vocab_size):
    logits = 1e-5 * torch.randn(2, vocab_size, device=DEVICE)
    logits[0, :13] = column(1000.0, *[0.0] * 9, 0.1, 0.1000001, 0.10001)
    logits[1, 3:8] = column(1000.0, 1.0, -0.0, 0.0, -0.0)
    logits[1, 8:] = -logits[1, 8:].abs()  # the best are above zero, zero and below it
    logits[1, :3] = -1.0
    found, expected = (op(logits, column(1, 1), 20) for op in (logprobs, twins.logprobs))
    assert found[1][0, :4].tolist() == [0, 12, 11, 10]
    assert found[1][1, :5].tolist() == [3, 4, 5, 6, 7]
    assert torch.equal(found[1], expected[1])


def test_logprobs_of_tokens_that_cannot_be():
    logits = torch.full((1, 300), float("-inf"), device=DEVICE)
    logits[0, 7], logits[0, 9] = 1.0, 2.0
    chosen, ids, values = logprobs(logits, column(3), 4)
    assert chosen.item() == float("-inf") and ids.tolist() == [[9, 7, 0, 1]]
    assert torch.isneginf(values[0, 2:]).all()


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_logprobs_of_a_broken_row_are_nan_and_harm_no_other(fault):
    logits = normal(3, 500)
    clean = logprobs(logits, column(1, 2, 3), 5)
    logits[1] = fault
    found = logprobs(logits, column(1, 2, 3), 5)
    assert found[0][1].isnan() and found[2][1].isnan().all()
    assert ((found[1][1] >= 0) & (found[1][1] < 500)).all()
    for one, other in zip(found, clean, strict=True):
        assert_same_bits(one[[0, 2]], other[[0, 2]])


# rows alone and in batches


@pytest.mark.parametrize("count", [3] + [64, 129] * ON_GPU)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(count):
    vocab_size = V if ON_GPU else 300
    given = filters(count, vocab_size)
    given |= {"top_p": torch.full((count,), 0.9), "top_k": torch.arange(count) * 7 % 40}
    inputs = settings(count, 0.9, **given)
    logits = normal(count, vocab_size)
    ids = torch.randint(0, vocab_size, (count,), device=DEVICE)
    tokens, chances = sample(logits, inputs).token_ids, probabilities(logits, inputs)
    scores = logprobs(logits, ids, 5)
    for rows in ([count - 1], [1, 0]):
        part, own = logits[rows], take(inputs, rows)
        assert_same_bits(sample(part, own).token_ids, tokens[rows])
        assert_same_bits(probabilities(part, own), chances[rows])
        for one, other in zip(logprobs(part, ids[rows], 5), scores, strict=True):
            assert_same_bits(one, other[rows])


@pytest.mark.skipif(not ON_GPU, reason="programs of the interpreter run in one order")
def test_a_call_repeats_itself():
    inputs = settings(32, 1.0, top_p=torch.full((32,), 0.9))
    logits = normal(32, V)
    first, chances = sample(logits, inputs), probabilities(logits, inputs)
    for _ in range(20):
        assert_same_bits(sample(logits, inputs).token_ids, first.token_ids)
        assert_same_bits(probabilities(logits, inputs), chances)


def test_settings_may_be_columns_of_a_table():
    logits = normal(2, 300)
    inputs = settings(2, 1.0, top_k=torch.tensor([5, 0]), top_p=torch.tensor([0.5, 0.9]))
    reals = torch.stack((inputs.temperature, inputs.top_p, inputs.top_p), 1)
    integers = torch.cat(
        (inputs.seeds, inputs.top_k.unsqueeze(1), inputs.positions.unsqueeze(1)), 1
    )
    strided = replace(
        inputs,
        seeds=integers[:, :2],
        top_k=integers[:, 2],
        positions=integers[:, 3],
        temperature=reals[:, 0],
        top_p=reals[:, 1],
    )
    assert torch.equal(sample(logits, strided).token_ids, sample(logits, inputs).token_ids)
    assert_same_bits(probabilities(logits, strided), probabilities(logits, inputs))


def test_rows_may_lie_apart():
    logits, ids = normal(2, 70), column(69, 0)
    inputs = settings(2, 1.0, **filters(2, 70))
    wide = {name: apart(getattr(inputs, name)) for name in ("seeds", *filters(2, 70))}
    strided, views = replace(inputs, **wide), apart(logits)
    for name in wide:
        assert not getattr(strided, name).is_contiguous()
    assert torch.equal(sample(views, strided).token_ids, sample(logits, inputs).token_ids)
    assert_same_bits(probabilities(views, strided), probabilities(logits, inputs))
    for num_top in (4, 70):
        views_found, found = logprobs(views, ids, num_top), logprobs(logits, ids, num_top)
        for one, other in zip(views_found, found, strict=True):
            assert_same_bits(one, other)


def test_each_tensor_of_rows_may_lie_apart_alone():
    logits = normal(2, 70)
    inputs = settings(2, 1.0, **filters(2, 70))
    chances = probabilities(logits, inputs)
    for name in filters(2, 70):
        strided = replace(inputs, **{name: apart(getattr(inputs, name))})
        assert_same_bits(probabilities(logits, strided), chances, name)


# what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": torch.zeros(2)}, r"`top_k` is torch\.float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"`positions` .* \[3\]"),
        ({"bias": torch.zeros(2, 39)}, "`bias`"),
        ({"bias": torch.zeros(40, 2).t()}, r"`bias` .* contiguous last dimension"),
        ({"mask": torch.zeros(2, 1, dtype=torch.int32)}, "`mask`"),
        ({"penalties": torch.zeros(2, 3)}, "`prompt_seen` is None, but `penalties` is set"),
    ],
)
def test_settings_that_do_not_fit_are_named(change, message):
    inputs = replace(settings(2), **{name: value.to(DEVICE) for name, value in change.items()})
    for op in (sample, probabilities):
        with pytest.raises(KernelInputError, match=message):
            op(normal(2, 40), inputs)


def test_logits_that_do_not_fit_are_named():
    with pytest.raises(KernelInputError, match=r"`logits` is torch\.float64"):
        sample(normal(2, 40).double(), settings(2))
    with pytest.raises(KernelInputError, match="262145"):
        logprobs(torch.zeros(0, 2**18 + 1, device=DEVICE), settings(0).positions, 0)
    with pytest.raises(KernelInputError, match="`num_top` is 41"):
        logprobs(normal(2, 40), settings(2).positions, 41)


def test_tiles_depend_on_the_vocabulary_alone_and_cover_it():
    for vocab_size in (1, 256, 257, 4096, V, 2**18):
        tiles = Tiles.of(vocab_size)
        assert tiles.count * tiles.size >= vocab_size > (tiles.count - 1) * tiles.size
    assert Tiles.of(V) == Tiles(size=4096, count=32, padded=32, wanted=1408)
