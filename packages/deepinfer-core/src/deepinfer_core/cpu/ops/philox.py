"""Noise that repeats: Philox4x32-10 words and the Gumbel noise made of them.

Every word is a function of (seed, position, stream, cycle, token id) alone. Nothing about the step,
the row or the batch enters, and noise belongs to a token id, never to its place in a sorted list.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "philox_words"]

_WORD = 0xFFFFFFFF
_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# Counters worked on at once: large enough for two threads, small enough for their caches. Measured
# on two cores of a server CPU, 64 rows of V = 129280: 0.13 s, against 0.22 s with half as many and
# 0.25 s with all at once.
_BLOCK = 1 << 16


def philox_words(counter: Tensor, key: Tensor) -> Tensor:
    """Return the words Philox4x32-10 makes of counters and keys.

    Args:
        counter: [..., 4] int64; the low 32 bits of each item count.
        key: [..., 2] int64, the same; leading dimensions broadcast with those of `counter`.
    Returns:
        [..., 4] int64, each from 0 to 2^32 - 1.
    Source: the published description of the generator; its known answers are a test.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    return torch.stack(_rounds(c0, c1, c2, c3, k0, k1), dim=-1)


def gumbel_noise(
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int,
    stream: int = 0,
    cycle: int | Tensor = 0,
) -> Tensor:
    """Return Gumbel noise for each row and token id: -log(-log(u)).

    The counter is (token_id // 4, position, stream, cycle), the token takes word token_id % 4, and
    u = ((word >> 9) + 0.5) * 2^-23: exact in float32, never 0 or 1. A row's bits do not depend on
    other rows.

    Args:
        seeds: [N, 2] int64, low and high 32 bits.
        positions: [N] int64, absolute index of the token being produced.
        vocab_size: V.
        stream: 0 target, 1 draft, 2 accept, 3 residual.
        cycle: a number, or [N] int64; 0 but for stream 1.
    Returns:
        [N, V] float32, from -2.82 to 16.64.
    """
    num_rows, num_groups = len(positions), -(-vocab_size // 4)
    noise = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=seeds.device)
    groups = torch.arange(num_groups, device=seeds.device)
    columns = torch.stack(
        [
            positions,
            torch.full_like(positions, stream),
            torch.as_tensor(cycle, device=positions.device).expand_as(positions),
            seeds[:, 0],
            seeds[:, 1],
        ]
    )
    rows_a_block = max(1, _BLOCK // max(1, num_groups))
    for first in range(0, num_rows, rows_a_block):
        last = min(first + rows_a_block, num_rows)
        words = _rounds(groups, *columns[:, first:last].unsqueeze(-1).unbind(0))
        block = noise.new_empty(last - first, num_groups, 4)
        for place, word in enumerate(words):
            block[:, :, place] = word >> 9
        block.add_(0.5).mul_(2.0**-23).log_().neg_().log_().neg_()
        noise[first:last] = block.view(last - first, -1)[:, :vocab_size]
    return noise


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0, c1, c2, c3, k0, k1 = (item & _WORD for item in (c0, c1, c2, c3, k0, k1))
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # The product has 64 bits, one more than int64 holds. Both multipliers lie in the top quarter of
    # 32 bits, so word * (multiplier - 2^32) takes 62 bits and a sign. What is missing is
    # word * 2^32: it adds `word` to the high half and nothing to the low one.
    short = word * (multiplier - (1 << 32))
    return (short >> 32) + word, short & _WORD
