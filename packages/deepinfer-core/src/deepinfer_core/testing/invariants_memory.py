"""Invariants of memory: blocks, slots, tokens in flight, published prefixes, deferred releases.

Numbers are those of the scheduler's design specification; `invariants` has the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deepinfer_core.cache.block_pool import BlockPool, BlockState, Owner
from deepinfer_core.cache.block_table import num_blocks_for
from deepinfer_core.cache.prefix_index import Node, chain_keys
from deepinfer_core.testing.world import World
from deepinfer_core.testing.world_watch import Named, Published

__all__ = ["i1", "i2", "i4", "i5", "i6", "i7", "i18", "i19", "i25"]


def i1(world: World) -> None:
    """Each block and slot is in exactly one state, and the states add up to the pool.

    All other books of the scheduler agree with that.
    """
    world.scheduler.audit()
    roster = world.scheduler._roster
    for pool in (*roster.pools.pools.values(), roster.slots):
        assert sum(pool.count(state) for state in BlockState) == pool.num_blocks, pool.name


def i2(world: World) -> None:
    """Tokens in flight are those of the unsettled steps: in all, by sequence, and in the ledger."""
    plans = [planned.plan for planned in world.unsettled]
    by_slot = np.zeros(len(world.scheduler._roster.by_slot), dtype=np.int64)
    for plan in plans:
        by_slot[plan.rows.slot] += plan.rows.num_rows - plan.rows.num_replay
    total = world.scheduler._ledger.total_inflight_tokens
    assert total == int(by_slot.sum()), f"I2: {total} tokens in flight, steps have {by_slot}"
    inflight = world.scheduler._roster.lanes.all.inflight
    assert np.array_equal(inflight, by_slot), f"I2: {inflight} in flight, steps have {by_slot}"
    assert len(plans) == world.scheduler.counts().unsettled_steps, "I2: unsettled steps differ"


def i4(world: World) -> None:
    """What unsettled steps may touch, up to U, has a block in every pool."""
    for named in _in_flight(world):
        needed = num_blocks_for(named.meta.kv_len, world.limits.block_size)
        for pool, ids in named.blocks.items():
            assert len(ids) == needed, f"I4: {named.owner} has {ids} of {needed} in {pool!r}"


def i5(world: World) -> None:
    """A block of an unsettled step is its sequence's own, or shared and referred to; never both.

    What the step writes, which is not below L, is its own.
    """
    settled = world.scheduler._roster.lanes.all.settled
    for name in world.limits.num_blocks:
        owners, nodes = _owners(world, name), _nodes(world, name)
        for named in _in_flight(world):
            first_own = int(settled[named.meta.slot]) // world.limits.block_size
            for place, block in enumerate(named.blocks[name]):
                own = owners.get(block) == named.owner
                node = nodes.get(block)
                shared = node is not None and node.active and place < first_own
                assert own or shared, (
                    f"I5: block {block} of {name!r}, place {place} of {named.owner} in flight, is "
                    f"{owners.get(block)}'s; its L is in place {first_own}"
                )


def i6(world: World) -> None:
    """What was given back is free only after its fence, and after transfers that touch it.

    Where a peer could not be shut out it is quarantined first.
    """
    roster = world.scheduler._roster
    roster.releases.audit()
    tickets = roster.releases.tickets
    for entry in roster.releases._entries:
        passed = entry.fence <= roster.last_settled and not tickets.holds(entry.owner)
        assert not passed, f"I6: {entry.owner} still waits for step {entry.fence}"
    open_owners = {ticket.owner for ticket in world.tickets.values()}
    assert open_owners == {owner for owner, _ in tickets._open.values()}, "I6: tickets differ"
    for name, pool in roster.pools.pools.items():
        if not (world.tickets or world.exposed):
            break
        owners, nodes = _owners(world, name), _nodes(world, name)
        for ticket in world.tickets.values():
            for block in ticket.blocks[name]:
                node = nodes.get(block)
                kept = owners.get(block) == ticket.owner or (node is not None and node.active)
                assert kept, f"I6: block {block} of {name!r} is gone under a transfer"
        out = set(pool.blocks(BlockState.QUARANTINED))
        out |= {block for scrub in world.fresh.scrubs for block in scrub.blocks[name]}
        for owner, before in world.exposed.items():
            now = {block for block, who in owners.items() if who == owner}
            left = before.get(name, set()) - now
            assert left <= out, f"I6: {left - out} of {owner} are free, a peer may write there"
            before[name] = now


def i7(world: World) -> None:
    """A slot is its sequence's own until the last step that names it is settled."""
    owners = _slot_owners(world)
    stored = set(world.scheduler._roster.slots.blocks(BlockState.SHARED))
    for named in _in_flight(world):
        owner = owners.get(named.meta.slot)
        assert owner == named.owner, f"I7: slot of {named.owner} in flight is {owner}'s"
    for planned in world.unsettled:
        for source, _ in planned.plan.output.window_loads:
            assert source in stored, f"I7: stored window {source} is gone while it is loaded"
        for source, target in planned.plan.output.window_saves:
            assert owners.get(target) == owners.get(source), f"I7: {target} is stored to"


def i18(world: World) -> None:
    """A published block's key is the chain over the tokens in it; its content never changes."""
    index, model = world.scheduler._roster.prefixes.index, world.model
    alive = set()
    for node in sorted(index._nodes.values(), key=lambda n: n.depth):
        content = tuple(
            tuple(getattr(model.pools[name], what)[block].tolist())
            for name, block in zip(world.limits.num_blocks, node.blocks, strict=True)
            for what in ("token", "position")
        )
        found = Published(node.key, node.blocks, content)
        alive.add(node.number)
        if node.number in world.shared:
            assert world.shared[node.number] == found, f"I18: {node.blocks} changed"
            continue
        world.shared[node.number] = found
        _check_key(world, node)
    for number in world.shared.keys() - alive:
        del world.shared[number]


def _check_key(world: World, node: Node) -> None:
    size = world.limits.block_size
    tokens: list[int] = []
    above: Node | None = node
    while above is not None:
        content = world.shared[above.number].content
        assert content[0] == content[2], f"I18: pools differ in {above.blocks}"
        first = (above.depth - 1) * size
        assert content[1] == tuple(range(first, first + size)), f"I18: {content[1]}"
        tokens = [*content[0], *tokens]
        above = above.parent
    kinds = ((True, False), (False, False), (False, True))
    keys = [
        chain_keys(tokens, size, exact=exact, replayed=replayed)[-1] for exact, replayed in kinds
    ]
    assert node.key in keys, f"I18: block {node.blocks} has the key of other tokens than {tokens}"


def i19(world: World) -> None:
    """Replayed rows stand on shared blocks alone, and computed rows begin behind them."""
    for planned in world.fresh.planned:
        for named in planned.rows:
            meta, size = named.meta, world.limits.block_size
            if not meta.num_replay:
                continue
            hit = meta.start + meta.num_replay
            assert hit % size == 0 and meta.window_start == meta.start, f"I19: {meta}"
            assert not world.known[meta.uid].request.strict, f"I19: strict {meta.uid} replays"
            for name, ids in named.blocks.items():
                shared = set(world.scheduler._roster.pools.pools[name].blocks(BlockState.SHARED))
                assert set(ids[: hit // size]) <= shared, f"I19: {meta} replays on {ids}"


def i25(world: World) -> None:
    """No container grows with the requests that ever were."""
    roster, scheduler = world.scheduler._roster, world.scheduler
    num_live, num_slots = len(roster.by_client), roster.slots.num_blocks
    assert len(roster.leaving) <= num_slots, f"I25: {len(roster.leaving)} leave"
    assert len(roster.releases) <= num_slots, f"I25: {len(roster.releases)} releases wait"
    assert len(roster._deadlines) <= 2 * num_live + 64, f"I25: {len(roster._deadlines)} deadlines"
    exposed = roster.releases._exposed
    assert len(exposed) <= num_live, f"I25: {len(exposed)} peers are not shut out"
    assert len(scheduler._ledger._steps) == len(world.unsettled), "I25: steps in the ledger"
    assert len(scheduler._preempted) <= max(64, 4 * num_live), "I25: preempted uids"


def _in_flight(world: World) -> list[Named]:
    return [named for planned in world.unsettled for named in planned.rows]


def _owners(world: World, name: str) -> Mapping[int, Owner]:
    """Return who holds each block, or has given it back a moment ago."""
    pool = world.scheduler._roster.pools.pools[name]
    return _owners_in(pool)


def _slot_owners(world: World) -> Mapping[int, Owner]:
    return _owners_in(world.scheduler._roster.slots)


def _owners_in(pool: BlockPool) -> dict[int, Owner]:
    states = (BlockState.HELD, BlockState.DEFERRED)
    return {
        block: owner
        for state in states
        for owner, blocks in pool.holders(state).items()
        for block in blocks
    }


def _nodes(world: World, name: str) -> Mapping[int, Node]:
    """Return the node of each published block of a pool."""
    place = list(world.limits.num_blocks).index(name)
    index = world.scheduler._roster.prefixes.index
    return {node.blocks[place]: node for node in index._nodes.values()}
