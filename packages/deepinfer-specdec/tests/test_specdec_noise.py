"""Noise: the published generator, the stated words, the same bits anywhere."""

import numpy as np
import pytest
import torch

from deepinfer_specdec import VerifyInputError
from deepinfer_specdec.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, chances, gumbel, philox

KNOWN_ANSWERS = {
    "zeros": ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}

SEED = (0x9ABCDEF0, 0x12345678)


def words_by_integers(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 once more, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        even, odd = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(odd >> 32) ^ c[1] ^ k[0], odd % 2**32, (even >> 32) ^ c[3] ^ k[1], even % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def uniform_by_integers(
    seed: tuple[int, int], token_id: int, position: int, stream: int, cycle: int
) -> float:
    word = words_by_integers([token_id // 4, position, stream, cycle], list(seed))[token_id % 4]
    return ((word >> 9) + 0.5) * 2.0**-23


def words(counter: np.ndarray, key: np.ndarray) -> list[list[int]]:
    found = philox(tuple(torch.tensor(counter).unbind(-1)), tuple(torch.tensor(key).unbind(-1)))
    return torch.stack(found, dim=-1).tolist()


@pytest.mark.parametrize("case", KNOWN_ANSWERS)
def test_philox_gives_the_published_words(case: str) -> None:
    counter, key, expected = ([int(w, 16) for w in text.split()] for text in KNOWN_ANSWERS[case])
    assert words(np.array(counter), np.array(key)) == expected
    assert words_by_integers(counter, key) == expected


def test_philox_equals_integer_arithmetic() -> None:
    rng = np.random.default_rng(0)
    counter, key = rng.integers(0, 2**32, (300, 4)), rng.integers(0, 2**32, (300, 2))
    expected = [
        words_by_integers(c, k) for c, k in zip(counter.tolist(), key.tolist(), strict=True)
    ]
    assert words(counter, key) == expected


@pytest.mark.parametrize("vocab_size", [1, 4, 5, 131])
@pytest.mark.parametrize("stream", [TARGET, RESIDUAL])
def test_gumbel_noise_comes_from_seed_position_stream_cycle_and_token(
    vocab_size: int, stream: int
) -> None:
    rng = np.random.default_rng(vocab_size)
    seeds, positions = rng.integers(0, 2**32, (3, 2)), np.array([0, 7, 2**20 + 1])
    cycle = np.array([0, 5, 2**31])
    noise = gumbel(
        torch.tensor(seeds), torch.tensor(positions), vocab_size, stream, torch.tensor(cycle)
    )
    for row in range(3):
        for token_id in range(vocab_size):
            u = uniform_by_integers(
                tuple(seeds[row].tolist()), token_id, int(positions[row]), stream, int(cycle[row])
            )
            assert float(noise[row, token_id]) == pytest.approx(-np.log(-np.log(u)), abs=3e-6)


def test_noise_is_that_of_the_target_unless_another_stream_is_asked_for() -> None:
    seeds, positions = torch.tensor([SEED]), torch.tensor([9])
    assert gumbel(seeds, positions, 7).equal(gumbel(seeds, positions, 7, TARGET, 0))
    assert not gumbel(seeds, positions, 7).equal(gumbel(seeds, positions, 7, DRAFT))


def test_chances_are_those_of_token_zero() -> None:
    seeds = torch.tensor([SEED, (1, 2)])
    positions = torch.tensor([[3, 4, 5], [100, 101, 2**31]])
    found = chances(seeds, positions, ACCEPT)
    for row in range(2):
        for column in range(3):
            expected = uniform_by_integers(
                tuple(seeds[row].tolist()), 0, int(positions[row, column]), ACCEPT, 0
            )
            assert float(found[row, column]) == expected
    assert chances(seeds, positions[:, 0], ACCEPT).equal(found[:, 0])


def test_chances_are_never_zero_or_one() -> None:
    found = chances(torch.tensor([SEED]), torch.arange(100_000)[None], DRAFT, 7)
    assert 0 < float(found.min()) < 1e-4 and 1 - 1e-4 < float(found.max()) < 1


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    rng = np.random.default_rng(4)
    seeds = torch.tensor(rng.integers(0, 2**32, (17, 2)))
    positions, streams = torch.tensor(rng.integers(0, 2**20, 17)), torch.arange(17) % 4
    together = gumbel(seeds, positions, 33, streams)
    for row in range(17):
        alone = gumbel(seeds[row, None], positions[row, None], 33, int(streams[row]))
        assert alone.numpy().tobytes() == together[row].numpy().tobytes()


def test_noise_of_no_rows_is_empty() -> None:
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert gumbel(none, none[:, 0], 5).shape == (0, 5)
    assert chances(none, none[:, :0], ACCEPT).shape == (0, 0)


def test_shapes_and_dtypes_out_of_contract_are_refused() -> None:
    seeds, positions = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(VerifyInputError, match=r"`seeds` is \(2, 2\)"):
        gumbel(seeds, positions, 5)
    with pytest.raises(VerifyInputError, match=r"int32"):
        chances(seeds, positions[:2].int(), ACCEPT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_makes_the_same_chances() -> None:
    rng = np.random.default_rng(5)
    seeds, positions = torch.tensor(rng.integers(0, 2**32, (64, 2))), torch.arange(64)
    found = chances(seeds.cuda(), positions.cuda(), ACCEPT)
    assert found.cpu().equal(chances(seeds, positions, ACCEPT))
    noise = gumbel(seeds.cuda(), positions.cuda(), 1001).cpu()
    assert torch.allclose(noise, gumbel(seeds, positions, 1001), atol=3e-6, rtol=0)
