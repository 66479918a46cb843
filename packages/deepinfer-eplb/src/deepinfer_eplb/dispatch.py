"""Which replica computes a token's expert: the reference that a device kernel repeats to the bit.

    even    replica = hash mod number of replicas
    quota   replica = the first whose bound is above the upper 32 bits of the hash; bounds are the
            running sum of the plan's shares, times 2^32
    step    replica = the one into whose quota of this step's hits the token's running index falls

The hash is of token id, position and layer alone: no generator, no row, no step, no rank. The same
row gets the same replica in whatever batch it is computed, and again when a request is replayed.
`step` gives that up for the best balance of the step, and needs counts of the whole group.

All arithmetic of the hash is modulo 2^64, `^` is exclusive or, `>>` a shift that fills with zeros:

    x = (token_id mod 2^32) + (position mod 2^32) * 2^32
    x = x + (layer + 1) * 0xA54FF53A5F1D36F1
    x = (x ^ (x >> 32)) * 0x6A09E667F3BCC909
    x = (x ^ (x >> 29)) * 0xBB67AE8584CAA73B
    hash = x ^ (x >> 32)

The factors are the first 64 bits behind the point of the square roots of 7, 2 and 3, made odd.
For one layer the map from (token id, position) to the hash is one to one.

Replicas of an expert are in the order of `logical_to_physical`. A replica on the token's own rank
or node is not preferred: where that may be done without undoing the balance depends on quotas of
each source rank, which no plan of this package has.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.balance import MOST_HITS, largest_remainder, water_fill
from deepinfer_eplb.errors import PlanInputError, SettingError
from deepinfer_eplb.maps import Floats, Ints, Layout, even_split, is_whole

__all__ = ["MODES", "Maps", "bounds_of", "hash_of", "step_quotas", "to_physical"]

MODES = ("even", "quota", "step")

_LAYER_FACTOR = 0xA54FF53A5F1D36F1
_FACTORS = (0x6A09E667F3BCC909, 0xBB67AE8584CAA73B)
_LOW = 0xFFFFFFFF
_WHOLE = 1 << 64


class Maps(Protocol):
    """What dispatch reads: a `Plan`, or any value with these of its fields."""

    @property
    def layout(self) -> Layout:
        """Ranks and slots."""

    @property
    def physical_to_logical(self) -> Ints:
        """[L, P] int32, the expert in each slot."""

    @property
    def logical_to_physical(self) -> Ints:
        """[L, E, C] int32, the slots of each expert, padded with -1."""

    @property
    def num_replicas(self) -> Ints:
        """[L, E] int32, how many slots hold each expert."""

    @property
    def split(self) -> Floats | None:
        """[L, P] float64, the share of its expert that each slot takes; even if None."""


def to_physical(
    topk_ids: ArrayLike,
    layer: int,
    maps: Maps,
    mode: str,
    *,
    token_ids: ArrayLike,
    positions: ArrayLike,
    counts: ArrayLike | None = None,
    offsets: ArrayLike | None = None,
) -> Ints:
    """Return the physical expert of each choice of a router.

    Args:
        topk_ids: [rows, k] integers, logical experts; -1 is padding.
        layer: 0 to L - 1.
        maps: a plan, or its maps.
        mode: `even`, `quota` or `step`. Without a split, `quota` divides evenly.
        token_ids: [rows] integers, the token of each row.
        positions: [rows] integers, its place in its sequence. Not looked at, nor are `token_ids`,
            in mode `step`.
        counts: [E] integers, hits of this step and layer in the whole group; for `step` alone.
        offsets: [E] integers, those of the ranks before this one; for `step` alone.
    Returns:
        [rows, k] int32, `rank * slots_per_rank + i`; -1 where the id is -1.
    Raises:
        PlanInputError: a shape, a dtype or a value is not as above, or this rank's hits do not fit
            into `counts`.
        SettingError: the mode is unknown, or counts are missing, or given where nothing uses them.
    """
    if mode not in MODES:
        raise SettingError(f"`mode` is {mode!r}; allowed: {', '.join(map(repr, MODES))}.")
    for name, value in (("counts", counts), ("offsets", offsets)):
        if (value is None) == (mode == "step"):
            what = "needs it" if value is None else "has no use for it"
            raise SettingError(
                f"`{name}` is {'None' if value is None else 'given'}, but mode {mode!r} {what}; "
                f"mode 'step' takes `counts` and `offsets`, the others neither."
            )
    _check_layer(layer, maps)
    num_experts = maps.num_replicas.shape[1]
    ids = _integers(topk_ids, "topk_ids", (None, None), (-1, num_experts - 1))
    words = [
        _integers(value, name, (len(ids),))
        for name, value in (("token_ids", token_ids), ("positions", positions))
    ]
    hit = ids >= 0
    experts = ids[hit]
    if counts is not None and offsets is not None:
        replica = _by_quota(experts, layer, maps, counts, offsets)
    else:
        rows = np.nonzero(hit)[0]
        hashes = hash_of(words[0], words[1], layer)[rows]
        if mode == "even":
            replica = hashes % maps.num_replicas[layer][experts].astype(np.uint64)
        else:
            bounds = bounds_of(maps, layer)[experts]
            replica = (bounds <= (hashes >> np.uint64(32)).astype(np.int64)[:, None]).sum(1)
    physical = np.full(ids.shape, -1, np.int32)
    physical[hit] = maps.logical_to_physical[layer][experts, replica.astype(np.int64)]
    return physical


def hash_of(token_ids: ArrayLike, positions: ArrayLike, layer: int) -> NDArray[np.uint64]:
    """Return the hash of the module's text, uint64.

    Args:
        token_ids, positions: integers of one shape; their low 32 bits count.
        layer: from 0.
    Raises:
        PlanInputError: they are no integers, or shapes differ.
    """
    words = [np.asarray(each) for each in (token_ids, positions)]
    if words[0].shape != words[1].shape or any(each.dtype.kind not in "iu" for each in words):
        raise PlanInputError(
            f"`token_ids` is {list(words[0].shape)} {words[0].dtype} and `positions` "
            f"{list(words[1].shape)} {words[1].dtype}; needed: integers of one shape."
        )
    low, high = (each.astype(np.uint64) & np.uint64(_LOW) for each in words)
    x: NDArray[np.uint64] = low | (high << np.uint64(32))
    with np.errstate(over="ignore"):  # to wrap is meant; numpy warns of scalars
        x = x + np.uint64((layer + 1) * _LAYER_FACTOR % _WHOLE)
        x = (x ^ (x >> np.uint64(32))) * np.uint64(_FACTORS[0])
        x = (x ^ (x >> np.uint64(29))) * np.uint64(_FACTORS[1])
    return x ^ (x >> np.uint64(32))


def bounds_of(maps: Maps, layer: int) -> NDArray[np.int64]:
    """Return where the shares of an expert's replicas end, [E, C] int64, in units of 2^-32.

    The running sum of shares in float64, times 2^32, rounded to even. From the last replica on it
    is 2^32, which no hash reaches. A replica with share 0 ends where it begins and takes nothing.

    Raises:
        PlanInputError: the layer is out of range.
    """
    _check_layer(layer, maps)
    replicas = maps.logical_to_physical[layer]
    shares = _of_replicas(_split_of(maps, layer), replicas)
    bounds = np.rint(shares.cumsum(1) * 2.0**32).astype(np.int64)
    last = maps.num_replicas[layer][:, None] - 1
    return np.where(np.arange(replicas.shape[1]) < last, bounds, 1 << 32)


def step_quotas(maps: Maps, layer: int, counts: ArrayLike) -> NDArray[np.int64]:
    """Return how many of a step's hits each replica takes: [E, C] int64, [E] of them in sum.

    A few sweeps of `water_fill` from even shares, then `largest_remainder`: a rank takes at most
    one hit for each of its replicated experts more than the split says. The same on every rank.

    Args:
        maps: a plan, or its maps.
        layer: 0 to L - 1.
        counts: [E] integers, hits of the whole group.
    Raises:
        PlanInputError: the layer is out of range, or counts are not as above, negative, or beyond
            `balance.MOST_HITS`.
    """
    _check_layer(layer, maps)
    hits = _integers(counts, "counts", maps.num_replicas[layer].shape, (0, MOST_HITS))
    split = water_fill(maps.physical_to_logical[layer][None], hits[None], maps.layout)[0]
    return largest_remainder(_of_replicas(split, maps.logical_to_physical[layer]), hits)


def _by_quota(
    experts: NDArray[np.int64], layer: int, maps: Maps, counts: ArrayLike, offsets: ArrayLike
) -> NDArray[np.int64]:
    """Return the replica into whose quota each hit's place among the group's hits falls.

    hits of an expert, of all ranks:     rank 0          | rank 1    | rank 2
    quotas of its replicas:              replica 0  | replica 1   | replica 2
    """
    quotas = step_quotas(maps, layer, counts)
    before = _integers(offsets, "offsets", quotas.shape[:1], (0, MOST_HITS))
    total, own = quotas.sum(1), np.bincount(experts, minlength=len(quotas))
    if (own > total - before).any():
        expert = int((own > total - before).argmax())
        raise PlanInputError(
            f"Expert {expert} of layer {layer} has {own[expert]} hits on this rank and offset "
            f"{before[expert]}, but `counts` says {total[expert]} in the whole group; give the sum "
            f"over all ranks, and the sum over the ranks before this one, of this very step."
        )
    order = np.argsort(experts, kind="stable")  # rows stay in order
    first = np.cumsum(own) - own
    running = np.empty_like(experts)
    running[order] = np.arange(len(experts)) - first[experts[order]]
    running += before[experts]
    replica: NDArray[np.int64] = (quotas.cumsum(1)[experts] <= running[:, None]).sum(1)
    return replica


def _split_of(maps: Maps, layer: int) -> Floats:
    if maps.split is None:
        split = even_split(maps.physical_to_logical[[layer]], maps.num_replicas.shape[1])
    else:
        split = maps.split[[layer]]
    of_layer: Floats = split[0]
    return of_layer


def _of_replicas(split: Floats, replicas: Ints) -> Floats:
    """Return the shares of each expert's replicas, [E, C], of those of slots, [P]; 0 at padding."""
    shares: Floats = np.where(replicas >= 0, split[replicas], 0.0)
    return shares


def _check_layer(layer: int, maps: Maps) -> None:
    num_layers = len(maps.num_replicas)
    if not is_whole(layer) or not 0 <= layer < num_layers:
        raise PlanInputError(f"`layer` is {layer!r}; allowed: 0 to {num_layers - 1}.")


def _integers(
    value: ArrayLike,
    name: str,
    shape: tuple[int | None, ...],
    allowed: tuple[int, int] | None = None,
) -> NDArray[np.int64]:
    array = np.asarray(value)
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits or array.dtype.kind not in "iu":
        needed = ", ".join("any" if want is None else str(want) for want in shape)
        raise PlanInputError(
            f"`{name}` is {list(array.shape)} {array.dtype}; needed: [{needed}] integers."
        )
    if allowed is not None:
        wrong = (array < allowed[0]) | (array > allowed[1])
        if wrong.any():
            raise PlanInputError(
                f"`{name}` has {array[wrong][0]} at {[int(i) for i in np.argwhere(wrong)[0]]}; "
                f"allowed: {allowed[0]} to {allowed[1]}."
            )
    return array.astype(np.int64)
