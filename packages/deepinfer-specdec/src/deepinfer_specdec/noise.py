"""Noise that repeats: words of Philox4x32-10, chances and Gumbel noise made of them.

    key      the low and high 32 bits of the seed
    counter  (token id // 4, position, stream, cycle); a token id takes word token id % 4
    u        ((word >> 9) + 0.5) * 2^-23, exact in float32, never 0 or 1
    Gumbel   -log(-log(u)) in float32

`position` is the absolute index of the token being produced, prompt included. Nothing about step,
row, batch or clock enters, so the noise of a token is the same wherever it is produced. `cycle` is
0 but for stream 1, where it is the position of the anchor: the noise of a position that is drafted
a second time is fresh, and what is known of the first draft says nothing about the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_specdec.errors import VerifyInputError

__all__ = ["ACCEPT", "DRAFT", "RESIDUAL", "TARGET", "chances", "gumbel", "philox"]

# The streams. The last three serve rejection sampling only.
TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)

_WORD = (1 << 32) - 1
_NUM_ROUNDS = 10
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four words that Philox4x32-10 makes of a counter and a key.

    Args:
        counter: four int64 tensors of shapes that broadcast; their low 32 bits count.
        key: two of them.
    Returns:
        Four int64 tensors, 0 to 2^32 - 1.
    Source: the published description of the generator; its known answers are a test.
    """
    shape = torch.broadcast_shapes(*(each.shape for each in (*counter, *key)))
    a, b, c, d = (each.expand(shape) & _WORD for each in counter)
    low_key, high_key = (each & _WORD for each in key)
    for _ in range(_NUM_ROUNDS):
        a_high, a_low = _product(a, _FACTORS[0])
        c_high, c_low = _product(c, _FACTORS[1])
        a, b = c_high.bitwise_xor_(b).bitwise_xor_(low_key), c_low
        c, d = a_high.bitwise_xor_(d).bitwise_xor_(high_key), a_low
        low_key = (low_key + _KEY_STEPS[0]) & _WORD
        high_key = (high_key + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def chances(
    seeds: Tensor, positions: Tensor, stream: int | Tensor, cycle: int | Tensor = 0
) -> Tensor:
    """Return u of token id 0 at each position.

    Args:
        seeds: [N, 2] int64, low and high 32 bits.
        positions: [N] or [N, n] int64.
        stream: a number, or int64 of a shape that broadcasts with `positions`.
        cycle: the same.
    Returns:
        float32 of the shape of `positions`, above 0 and below 1.
    Raises:
        VerifyInputError: a shape or dtype is not as described.
    """
    _check(seeds, positions)
    low, high = (each.view(-1, *(1,) * (positions.dim() - 1)) for each in seeds.unbind(1))
    return _uniform(philox(_counter(0, positions, stream, cycle), (low, high))[0])


def gumbel(
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int,
    stream: int | Tensor = TARGET,
    cycle: int | Tensor = 0,
) -> Tensor:
    """Return the Gumbel noise of each token id at each position.

    Args:
        seeds: [N, 2] int64, low and high 32 bits.
        positions: [N] int64.
        vocab_size: V.
        stream: a number, or [N] int64.
        cycle: the same.
    Returns:
        [N, V] float32, from -2.82 to 16.64. A row's bits do not depend on other rows.
    Raises:
        VerifyInputError: a shape or dtype is not as described.
    """
    _check(seeds, positions)
    groups = torch.arange(-(-vocab_size // 4), device=positions.device)
    columns = [
        each[:, None] if isinstance(each, Tensor) else each for each in (positions, stream, cycle)
    ]
    low, high = (each[:, None] for each in seeds.unbind(1))
    words = philox(_counter(groups, *columns), (low, high))
    # One token id after the other; made float first, which halves what is moved.
    u = torch.stack([_uniform(each) for each in words], dim=-1).flatten(1)[:, :vocab_size]
    noise: Tensor = -torch.log(-torch.log(u))
    return noise


def _uniform(words: Tensor) -> Tensor:
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def _counter(*items: int | Tensor) -> tuple[Tensor, ...]:
    device = next(each.device for each in items if isinstance(each, Tensor))
    # Scalars are made on the device: a copy from the host would be a wait.
    return tuple(
        each if isinstance(each, Tensor) else torch.full((), each, dtype=torch.int64, device=device)
        for each in items
    )


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of a product, which int64 cannot hold.

    Both factors are above 3 * 2^30, so less 2^32 they are short and negative, and the product fits.
    The 2^32 * word that it lacks goes to the high half alone.
    """
    lacking = word * (factor - (1 << 32))
    return (lacking >> 32).add_(word), lacking.bitwise_and_(_WORD)


def _check(seeds: Tensor, positions: Tensor) -> None:
    if (
        seeds.dtype != torch.int64
        or positions.dtype != torch.int64
        or seeds.shape != (*positions.shape[:1], 2)
    ):
        raise VerifyInputError(
            f"`seeds` is {tuple(seeds.shape)!r} {seeds.dtype} and `positions` "
            f"{tuple(positions.shape)!r} {positions.dtype}; they must be int64, [N, 2] and [N] or "
            f"[N, n]. Split a seed in its low and high 32 bits."
        )
