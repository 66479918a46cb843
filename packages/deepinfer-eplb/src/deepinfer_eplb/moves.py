"""The difference of two maps: what each slot does on the way from one to the other.

Contents of slots are named by the old map's slots, so a move is a gather:
``content_after[p] = content_before[source[p]]`` wherever `source` is not -1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.maps import Ints, Layout, Longs, check_map
from deepinfer_eplb.tables import aligned, size

__all__ = ["Change", "HasMap", "Moves", "difference", "reason_to_drop", "rounds"]


class HasMap(Protocol):
    """A value with a map: a `Plan`, a map of a file, another `Moves`."""

    @property
    def physical_to_logical(self) -> Ints:
        """[L, P] int32, the expert in each slot; -1 in empty ones."""


class Change(IntEnum):
    """What a slot does.

    A slot is LOCAL when its rank holds the expert in another slot, or receives it for one: a rank
    receives an expert once. It is LOADED when no rank that can send has the expert.
    """

    EMPTY = 0
    KEPT = 1
    LOCAL = 2
    RECEIVED = 3
    LOADED = 4


@dataclass(frozen=True, eq=False)
class Moves:
    """The difference of two maps, for every rank.

    Attributes:
        physical_to_logical: [L, P] int32, the new map, -1 on excluded ranks.
        source: [L, P] int32, the slot whose old content each slot takes, its own number where the
            content is kept; -1 where nothing can be copied: the slot is empty, or the expert lost.
        change: [L, P] int8, values of `Change`.
        layout: of the new map.
        expert_bytes: bytes of one expert of one layer, all its tensors; 0 if unknown.
        lost: (layer, expert) pairs that no rank can send, so that the ranks which get them must
            read them from the checkpoint.
    """

    physical_to_logical: Ints
    source: Ints
    change: NDArray[np.int8]
    layout: Layout
    expert_bytes: int
    lost: tuple[tuple[int, int], ...]

    @property
    def is_empty(self) -> bool:
        """Whether every slot keeps what it holds, or holds nothing."""
        return not (self.change > Change.KEPT).any()

    def count(self, change: Change) -> Longs:
        """Return how many slots of each layer do this: [L] int64."""
        counts: Longs = (self.change == change).sum(1, dtype=np.int64)
        return counts

    @cached_property
    def num_sent(self) -> Longs:
        """[L, R] int64, experts that each rank sends to other ranks."""
        layer, slot = np.nonzero(self.change == Change.RECEIVED)
        return self._per_rank(layer, self.source[layer, slot])

    @cached_property
    def num_received(self) -> Longs:
        """[L, R] int64, experts that each rank receives from other ranks."""
        return self._per_rank(*np.nonzero(self.change == Change.RECEIVED))

    def _per_rank(self, layer: NDArray[np.integer], slot: NDArray[np.integer]) -> Longs:
        counts = np.zeros((len(self.change), self.layout.num_ranks), np.int64)
        np.add.at(counts, (layer, slot // self.layout.slots_per_rank), 1)
        return counts

    def transfers(self, layer: int) -> Longs:
        """Return what comes to a rank from elsewhere: [n, 2] int64, by destination.

        A row is the old slot that the expert comes from, -1 for the checkpoint, and the slot it is
        for. LOCAL slots are not among them.
        """
        slot = np.flatnonzero(self.change[layer] >= Change.RECEIVED)
        return np.stack([self.source[layer, slot], slot], 1).astype(np.int64)

    def report(self) -> str:
        """Return a table for a terminal: layer, what slots do, the busiest ranks, bytes.

        Bytes are those of the rank that sends most and of the one that receives most.
        """
        header = ("layer", *(each.name.lower() for each in list(Change)[1:]), "most sent", "bytes")
        header += ("most received", "bytes")
        counts = np.stack([self.count(each) for each in list(Change)[1:]], 1)
        rows = [header]
        busiest = (self.num_sent.max(1), self.num_received.max(1))
        for layer, values in enumerate(counts):
            rows.append(self._row(str(layer), values, busiest[0][layer], busiest[1][layer]))
        # The sums of a rank over the layers, not sums of each layer's busiest.
        most = (self.num_sent.sum(0).max(), self.num_received.sum(0).max())
        rows.append(self._row("all", counts.sum(0), *most))
        lines = [aligned(rows)]
        if self.lost:
            named = ", ".join(f"{expert} of layer {layer}" for layer, expert in self.lost[:8])
            more = f" and {len(self.lost) - 8} more" if len(self.lost) > 8 else ""
            lines.append(f"To be read from the checkpoint: expert {named}{more}.")
        return "\n".join(lines)

    def _row(self, name: str, counts: Longs, sent: int, received: int) -> tuple[str, ...]:
        cells = [name, *map(str, counts)]
        for value in (sent, received):
            cells += [str(value), size(int(value) * self.expert_bytes)]
        return tuple(cells)


def difference(
    old: ArrayLike | HasMap,
    new: ArrayLike | HasMap,
    layout: Layout,
    expert_bytes: int = 0,
    cannot_send: Iterable[int] | None = None,
) -> Moves:
    """Return what each slot does on the way from one map to another. Deterministic.

    A rank receives an expert of a layer at most once. Each rank that has it sends it to at most
    ceil(receivers / ranks that have it) others, to those of its own node first; among the ranks
    that may, the one that sends least in this layer does, and of equal ones the lower.

    Args:
        old: [L, P] integers, the live map, or a value that has it as `physical_to_logical`, such
            as a plan; -1 for an empty slot. It may lack experts and may use slots of ranks that
            `layout` excludes.
        new: the same of a whole map for `layout`.
        layout: of the new map; ranks, nodes and slots are also those of the old one.
        expert_bytes: bytes of one expert of one layer, all its tensors; 0 if unknown.
        cannot_send: ranks whose weights are out of reach. None: the excluded ones. A rank that is
            being drained is excluded and can send: leave it out.
    Raises:
        PlanInputError: a map or a number is not as above.
    """
    after, before, num_experts = _check_maps(_slots_of(old), _slots_of(new), layout)
    if isinstance(expert_bytes, bool) or int(expert_bytes) != expert_bytes or expert_bytes < 0:
        raise PlanInputError(f"`expert_bytes` is {expert_bytes!r}; allowed: whole numbers from 0.")
    can_send = np.ones(layout.num_ranks, bool)
    for rank in layout.excluded if cannot_send is None else cannot_send:
        if not 0 <= rank < layout.num_ranks:
            raise PlanInputError(
                f"`cannot_send` names rank {rank!r}; allowed: 0 to {layout.num_ranks - 1}."
            )
        can_send[rank] = False
    source = np.full(after.shape, -1, np.int32)
    change = np.zeros(after.shape, np.int8)
    lost: list[tuple[int, int]] = []
    for layer in range(len(after)):
        first = _first_slots(before[layer], layout, num_experts)
        source[layer], change[layer] = _at_home(before[layer], after[layer], first, layout)
        missing = _fetch(after[layer], first, can_send, layout, source[layer], change[layer])
        lost.extend((layer, expert) for expert in missing)
    return Moves(after, source, change, layout, int(expert_bytes), tuple(lost))


def rounds(
    transfers: NDArray[np.integer], layout: Layout, experts_per_round: int
) -> tuple[Longs, ...]:
    """Divide a layer's transfers into rounds that spare the links. Deterministic.

    Args:
        transfers: [n, 2], see `Moves.transfers`.
        layout: of the map.
        experts_per_round: most experts that a rank sends, and most that it takes in, in a round; 1
            or more. What it reads from the checkpoint counts as taken in.
    Returns:
        Arrays [n_i, 2] int64, none empty: each transfer in the first round that has room on both
        sides.
    Raises:
        PlanInputError: `experts_per_round` is below 1.
    """
    if experts_per_round < 1:
        raise PlanInputError(
            f"`experts_per_round` is {experts_per_round}; allowed: whole numbers from 1."
        )
    filled: list[list[NDArray[np.integer]]] = []
    busy = np.zeros((len(transfers), 2, layout.num_ranks + 1), np.int64)
    for transfer in transfers:
        # The checkpoint stands in the last column, and can be read by any number of ranks.
        sender, receiver = transfer // layout.slots_per_rank
        sender = sender if transfer[0] >= 0 else -1
        busy[:, 0, -1] = 0
        room = (busy[:, 0, sender] < experts_per_round) & (busy[:, 1, receiver] < experts_per_round)
        number = int(room.argmax())
        busy[number, 0, sender] += 1
        busy[number, 1, receiver] += 1
        if number == len(filled):
            filled.append([])
        filled[number].append(transfer)
    return tuple(np.stack(each).astype(np.int64) for each in filled)


def reason_to_drop(
    ratio_before: float,
    ratio_after: float,
    interval_steps: int,
    step_seconds: float,
    copy_seconds: float,
    min_ratio: float = 1.03,
) -> str | None:
    """Return why a plan is not worth its copies, or None if it is.

    Args:
        ratio_before: slowest rank over mean under the live map; NaN without one: nothing to drop.
        ratio_after: the same under the plan, on the same loads.
        interval_steps: steps until the next plan.
        step_seconds: of a step as it is now, taken to be proportional to the slowest rank.
        copy_seconds: what moving the experts costs the steps.
        min_ratio: below it the live map is left alone.
    """
    if np.isnan(ratio_before):
        return None
    if ratio_before < min_ratio:
        return f"slowest/mean is {ratio_before:.3f}, below `min_ratio` {min_ratio:g}"
    gain = (1 - ratio_after / ratio_before) * interval_steps * step_seconds
    if gain <= 0:
        return f"slowest/mean would be {ratio_after:.3f} and is {ratio_before:.3f}"
    if gain < copy_seconds:
        return (
            f"{interval_steps} steps would gain {gain:.3g} s, and the copies take "
            f"{copy_seconds:.3g} s"
        )
    return None


def _slots_of(value: ArrayLike | HasMap) -> NDArray[np.integer]:
    return np.asarray(getattr(value, "physical_to_logical", value))


def _check_maps(
    before: NDArray[np.integer], given: NDArray[np.integer], layout: Layout
) -> tuple[Ints, Ints, int]:
    """Return the new map, the old one and the number of experts."""
    # A whole map has a slot for every expert, so the last one tells how many there are.
    num_experts = int(given.max(initial=0)) + 1 if given.dtype.kind in "iu" else 1
    after = check_map(given, num_experts, layout, name="new")
    if before.shape != after.shape or before.dtype.kind not in "iu":
        raise PlanInputError(
            f"`old` is {before.dtype} of shape {list(before.shape)}; needed: integers of shape "
            f"{list(after.shape)}, as `new` has."
        )
    wrong = (before < -1) | (before >= num_experts)
    if wrong.any():
        layer, slot = (int(i) for i in np.argwhere(wrong)[0])
        raise PlanInputError(
            f"`old`[{layer}, {slot}] is {before[layer, slot]}; allowed: 0 to {num_experts - 1}, "
            "the experts of `new`, and -1 for an empty slot."
        )
    return after, before.astype(np.int32), num_experts


def _first_slots(before: Ints, layout: Layout, num_experts: int) -> Ints:
    """Return the first slot of each rank that holds each expert, -1 if none: [R, E]."""
    first = np.full((layout.num_ranks, num_experts), -1, np.int32)
    slots = np.flatnonzero(before >= 0)[::-1]  # the last one written is the first of the rank
    first[slots // layout.slots_per_rank, before[slots]] = slots
    return first


def _at_home(
    before: Ints, after: Ints, first: Ints, layout: Layout
) -> tuple[Ints, NDArray[np.int8]]:
    """Return sources and changes of a layer, as far as no other rank is needed."""
    slots = np.arange(len(after), dtype=np.int32)
    used = after >= 0
    here = np.where(used, first[slots // layout.slots_per_rank, np.maximum(after, 0)], -1)
    kept = used & (before == after)
    source = np.where(kept, slots, here).astype(np.int32)
    change = np.where(kept, Change.KEPT, np.where(here >= 0, Change.LOCAL, Change.EMPTY))
    return source, change.astype(np.int8)


def _fetch(
    after: Ints,
    first: Ints,
    can_send: NDArray[np.bool_],
    layout: Layout,
    source: Ints,
    change: NDArray[np.int8],
) -> list[int]:
    """Fill in the slots of a layer that need another rank; return the lost experts."""
    need: dict[int, dict[int, list[int]]] = {}
    for slot in np.flatnonzero((after >= 0) & (source < 0)).tolist():
        ranks = need.setdefault(int(after[slot]), {})
        ranks.setdefault(slot // layout.slots_per_rank, []).append(slot)
    holders = {expert: np.flatnonzero((first[:, expert] >= 0) & can_send) for expert in need}
    num_sent = [0] * layout.num_ranks
    # Those with the fewest senders first: the others can still go around the ranks they load.
    for expert in sorted(need, key=lambda expert: (len(holders[expert]), expert)):
        senders = _senders(list(need[expert]), holders[expert].tolist(), num_sent, layout)
        for rank, slots in need[expert].items():
            sender = senders.get(rank)
            # Another slot of the same rank copies what this one gets.
            change[slots] = Change.LOCAL
            change[slots[0]] = Change.LOADED if sender is None else Change.RECEIVED
            source[slots] = -1 if sender is None else first[sender, expert]
    return sorted(expert for expert in need if not len(holders[expert]))


def _senders(
    receivers: list[int], holders: list[int], num_sent: list[int], layout: Layout
) -> dict[int, int]:
    """Return who sends an expert to each receiver, and count it in `num_sent`."""
    chosen: dict[int, int] = {}
    if not holders:
        return chosen
    per_node = layout.num_ranks // layout.num_nodes
    most = -(-len(receivers) // len(holders))
    left = dict.fromkeys(holders, most)
    # First inside the nodes, so that a receiver of another node cannot take a neighbour's place.
    for same_node in (True, False):
        for receiver in receivers:
            free = [
                rank
                for rank in holders
                if left[rank] and (not same_node or rank // per_node == receiver // per_node)
            ]
            if receiver in chosen or not free:
                continue
            sender = min(free, key=lambda rank: (num_sent[rank], rank))
            chosen[receiver] = sender
            left[sender] -= 1
            num_sent[sender] += 1
    return chosen
