"""Block pools, slot pools and block tables: states, all-or-nothing, audits that see every fault."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_core.cache import (
    BlockPool,
    BlockPools,
    BlockState,
    BlockTables,
    Owner,
    PoolExhausted,
    SlotPool,
    num_blocks_for,
)

A, B = Owner(1, 0), Owner(2, 0)


@pytest.fixture
def pool():
    pool = BlockPool("compressed", 6)
    yield pool
    pool.audit()


def test_untouched_ids_come_last_and_lowest_first(pool):
    assert pool.allocate(A, 3).tolist() == [0, 1, 2]
    assert pool.allocate(B, 2).tolist() == [3, 4]
    pool.cancel(A, [2, 0])
    assert pool.allocate(B, 3).tolist() == [2, 0, 5]


def test_a_cancelled_reservation_leaves_the_order_as_it_was(pool):
    pool.cancel(A, pool.allocate(A, 4))
    assert pool.allocate(B, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_blocks_of_several_owners_are_taken_at_once(pool):
    assert pool.allocate_each(np.array([1, 2, 1]), np.array([0, 4, 0]), 3).tolist() == [0, 1, 2]
    assert pool.holders(BlockState.HELD) == {A: {0, 2}, Owner(2, 4): {1}}


def test_shared_blocks_belong_to_nobody_until_they_are_evicted(pool):
    pool.allocate(A, 3)
    pool.publish(A, 1)
    assert pool.count(BlockState.SHARED) == 1 and pool.num_free == 3
    assert pool.held(np.array([2, 1, 0])).tolist() == [2, 0]
    assert pool.holders(BlockState.HELD) == {A: {0, 2}}
    pool.evict([1])
    assert pool.num_free == 4


def test_allocation_beyond_the_pool_takes_nothing(pool):
    pool.allocate(A, 4)
    with pytest.raises(PoolExhausted, match="2 free blocks, 3 needed"):
        pool.allocate(B, 3)
    assert pool.num_free == 2


def test_every_block_is_in_exactly_one_state(pool):
    blocks = pool.allocate(A, 5)
    pool.defer(A, blocks[:4])
    pool.quarantine(A, blocks[:2])
    pool.free(A, blocks[2:3])
    counts = {state: pool.count(state) for state in BlockState}
    assert counts == {
        BlockState.FREE: 2,
        BlockState.HELD: 1,
        BlockState.SHARED: 0,
        BlockState.DEFERRED: 1,
        BlockState.QUARANTINED: 2,
    }
    assert pool.blocks(BlockState.QUARANTINED) == (0, 1)
    assert pool.holders(BlockState.HELD) == {A: {4}}
    assert pool.holders(BlockState.DEFERRED) == {A: {3}}
    pool.scrubbed([1, 0])
    assert pool.num_free == 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pool: pool.free(A, [0]),  # held, not deferred
        lambda pool: pool.defer(B, [0]),  # not its own
        lambda pool: pool.cancel(A, [5]),  # free already
        lambda pool: pool.scrubbed([0]),
        lambda pool: pool.quarantine(A, [0]),
        lambda pool: pool.publish(B, 0),  # not its own
        lambda pool: pool.publish(A, 3),  # free
        lambda pool: pool.evict([0]),  # held, not shared
        lambda pool: pool.defer(A, [0, 0]),  # twice
    ],
)
def test_moves_outside_the_table_are_caught(pool, wrong):
    pool.allocate(A, 2)
    with pytest.raises(AssertionError, match="block"):
        wrong(pool)


def test_a_deferred_block_becomes_free_once(pool):
    pool.allocate(A, 1)
    pool.defer(A, [0])
    pool.free(A, [0])
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.free(A, [0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._stack.__setitem__(0, 0),
        lambda pool: setattr(pool, "_num_free", 3),
        lambda pool: pool._state.__setitem__(0, 0),
        lambda pool: pool._uid.__setitem__(0, -1) or pool._generation.__setitem__(0, -1),
        lambda pool: pool._uid.__setitem__(5, 1),
        lambda pool: pool._counts.__setitem__(1, 7),
    ],
)
def test_audit_sees_damaged_books(damage):
    pool = BlockPool("index", 6)
    pool.allocate(A, 2)
    damage(pool)
    with pytest.raises(AssertionError, match="index"):
        pool.audit()


def test_pools_allocate_in_all_or_none():
    pools = BlockPools({"compressed": 6, "index": 4})
    assert pools.num_blocks == pools.num_free == 4
    taken = pools.allocate(A, 3)
    assert {name: ids.tolist() for name, ids in taken.items()} == {
        "compressed": [0, 1, 2],
        "index": [0, 1, 2],
    }
    with pytest.raises(PoolExhausted, match="index"):
        pools.allocate(B, 2)
    assert pools.pools["compressed"].num_free == 3
    assert pools.count(BlockState.HELD) == 3
    pools.audit()


def test_slots_come_back_to_be_used_again():
    slots = SlotPool(3)
    assert slots.acquire(A) == 0
    assert slots.acquire(B) == 1
    slots.defer(A, [0])
    slots.free(A, [0])
    assert slots.acquire(Owner(3, 0)) == 0
    assert slots.acquire(B) == 2
    slots.audit()
    with pytest.raises(PoolExhausted):
        slots.acquire(A)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_of_a_length(tokens, blocks):
    assert num_blocks_for(tokens, 4) == blocks


def plain(blocks):
    return {pool: ids.tolist() for pool, ids in blocks.items()}


def test_tables_grow_and_shrink_at_the_end():
    tables = BlockTables(("compressed", "index"), 3, 5)
    assert tables.extend(1, {"compressed": [7, 3], "index": [0, 1]}) == 2
    assert tables.extend(1, {"compressed": [5], "index": [2]}) == 1
    assert plain(tables.blocks(1)) == {"compressed": [7, 3, 5], "index": [0, 1, 2]}
    assert plain(tables.truncate(1, 1)) == {"compressed": [5], "index": [2]}
    assert tables.num_blocks.tolist() == [0, 2, 0]
    tables.clear(1)
    assert plain(tables.blocks(1)) == {"compressed": [], "index": []}


def test_tables_of_several_slots_grow_at_once():
    tables = BlockTables(("compressed", "index"), 3, 5)
    tables.extend(0, {"compressed": [9], "index": [9]})
    slots, places = np.array([2, 0, 2]), np.array([0, 1, 1])
    tables.extend_each(slots, places, {"compressed": np.arange(3), "index": np.arange(4, 7)})
    assert plain(tables.blocks(0)) == {"compressed": [9, 1], "index": [9, 5]}
    assert plain(tables.blocks(2)) == {"compressed": [0, 2], "index": [4, 6]}
