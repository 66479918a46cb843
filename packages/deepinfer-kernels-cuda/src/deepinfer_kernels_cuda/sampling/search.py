"""Where top-k and top-p end, among tokens that a program holds or along a whole row.

A rank is one integer, the distance from the peak and then the token id, so that ascending ranks
are descending values and, among equal ones, ascending ids. Masses are integers too, in units of
2^-44: no sum depends on an order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels_cuda.sampling.scan import MASS_UNIT, exp_of, mass_of, scaled

__all__ = [
    "ID_BITS",
    "ID_MASK",
    "LAST_RANK",
    "find_border",
    "load_tile",
    "measure",
    "ranked",
    "reaches",
    "search",
]

ID_BITS = tl.constexpr(18)  # of a token id in a rank
ID_MASK = tl.constexpr((1 << 18) - 1)
LAST_RANK = tl.constexpr((0x7F800000 << 18) - 1)  # of a finite distance

# Halvings of distances, where most tokens are a few units from the peak, before those of their
# bits, which end wherever they are.
_BY_DISTANCE = tl.constexpr(12)

_NO_LOGIT = tl.constexpr(float("-inf"))


@triton.jit
def ranked(v, ids):
    """Return ranks, int64, of scaled values and their token ids."""
    distance = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (distance.to(tl.int64) << ID_BITS) | ids.to(tl.int64)


@triton.jit
def reaches(mass, total, p):
    """Say whether an integer mass is a share p of the float64 total, rounded to float32."""
    return (mass.to(tl.float64) * MASS_UNIT / total).to(tl.float32) >= p


@triton.jit
def load_tile(values_ptr, begin, vocab_size, peak, temperature, TILE: tl.constexpr):
    """Return scaled values, ids, ranks and weights of a tile; -inf has a rank behind the last."""
    ids = begin + tl.arange(0, TILE)
    x = tl.load(values_ptr + ids, mask=ids < vocab_size, other=_NO_LOGIT)
    v = scaled(x, peak, temperature)
    return v, ids, ranked(v, ids), exp_of(v)


@triton.jit
def measure(
    rank, mass, bound, values_ptr, vocab_size, peak, temperature,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return number and mass of tokens up to a rank, of those held or, if WHOLE, of the row."""
    if WHOLE:
        count, total = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
        for begin in range(0, vocab_size, TILE):
            _, _, ranks, weight = load_tile(values_ptr, begin, vocab_size, peak, temperature, TILE)
            inside = ranks <= bound
            count += tl.sum(inside.to(tl.int32), 0)
            total += tl.sum(tl.where(inside, mass_of(weight), 0), 0)
        return count, total
    else:
        inside = rank <= bound
        return tl.sum(inside.to(tl.int32), 0), tl.sum(tl.where(inside, mass, 0), 0)


@triton.jit
def _between(low, high, by_distance):
    """Return a rank from `low` to below `high`: halfway by distance or in the integers."""
    near, far = (low >> ID_BITS).to(tl.int32), (high >> ID_BITS).to(tl.int32)
    halfway = near.to(tl.float32, bitcast=True) * 0.5 + far.to(tl.float32, bitcast=True) * 0.5
    between = halfway.to(tl.int32, bitcast=True)
    split = by_distance & (between > near) & (between < far)
    return tl.where(split, between.to(tl.int64) << ID_BITS, (low + high) >> 1)


@triton.jit
def search(
    rank, mass, k, p, total, before, lighter, low, high, count, values_ptr, vocab_size, peak,
    temperature, BY_MASS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the smallest rank up to which there are k tokens, or a share p of `total`.

    Args:
        rank, mass: of tokens held; not used with WHOLE.
        before, lighter: number and mass of tokens that precede those, and are not among them.
        low, high: ranks that bracket the border. count: tokens up to `high`, `before` left out.
    """
    # The border is the rank of a token, so the search ends as soon as one is left.
    below, upto = tl.full((), 0, tl.int32), count
    steps = tl.full((), 0, tl.int32)
    while (low < high) & (upto - below > 1):
        middle = _between(low, high, steps < _BY_DISTANCE)
        steps += 1
        seen, sum_ = measure(
            rank, mass, middle, values_ptr, vocab_size, peak, temperature, TILE, WHOLE
        )
        if BY_MASS:  # noqa: SIM108 (known when compiled)
            enough = reaches(sum_ + lighter, total, p)
        else:
            enough = seen + before >= k
        high = tl.where(enough, middle, high)
        upto = tl.where(enough, seen, upto)
        low = tl.where(enough, low, middle + 1)
        below = tl.where(enough, below, seen)
    border = tl.full((), LAST_RANK, tl.int64)
    if WHOLE:
        for begin in range(0, vocab_size, TILE):
            _, _, ranks, _ = load_tile(values_ptr, begin, vocab_size, peak, temperature, TILE)
            ranks = tl.where((ranks >= low) & (ranks <= high), ranks, LAST_RANK)
            border = tl.minimum(border, tl.min(ranks, 0))
    else:
        border = tl.min(tl.where((rank >= low) & (rank <= high), rank, LAST_RANK), 0)
    return border


@triton.jit
def find_border(
    rank, mass, k, p, total, count, high, values_ptr, vocab_size, peak, temperature,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the rank of the last token that top-k and top-p keep.

    Args:
        rank, mass: [n] int64 of tokens held, the best ones of the row; not used with WHOLE.
        k: 0 keeps all. p: 1 keeps all. total: mass of the row, for top-p without top-k.
        count: tokens up to rank `high`; the border is one of them.
    """
    limit, zero = high, tl.full((), 0, tl.int64)
    none = tl.full((), 0, tl.int32)
    if k > 0:
        limit = search(
            rank, mass, k, p, total, none, zero, zero, high, count, values_ptr, vocab_size, peak,
            temperature, False, TILE, WHOLE,
        )  # fmt: skip
        if p < 1.0:
            count, sum_ = measure(
                rank,
                mass,
                limit,
                values_ptr,
                vocab_size,
                peak,
                temperature,
                TILE,
                WHOLE,
            )
            total = sum_.to(tl.float64) * MASS_UNIT
    if p < 1.0:
        limit = search(
            rank, mass, k, p, total, none, zero, zero, limit, count, values_ptr, vocab_size, peak,
            temperature, True, TILE, WHOLE,
        )  # fmt: skip
    return limit
