"""Block pools, slot pools and block tables: states, all-or-nothing, audits that see every fault."""

from __future__ import annotations

import pytest

from deepinfer_core.cache import (
    BlockPool,
    BlockPools,
    BlockState,
    BlockTable,
    Owner,
    PoolExhausted,
    SlotPool,
    num_blocks_for,
)
from deepinfer_core.types import BlockDelta

A, B = Owner(1, 0), Owner(2, 0)


@pytest.fixture
def pool():
    pool = BlockPool("compressed", 6)
    yield pool
    pool.audit()


def test_lowest_free_ids_are_handed_out_first(pool):
    assert pool.allocate(A, 3) == [0, 1, 2]
    assert pool.allocate(B, 2) == [3, 4]
    pool.cancel(A, [2, 0])
    assert pool.allocate(B, 3) == [0, 2, 5]


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
    with pytest.raises(AssertionError, match="free of block 0"):
        pool.free(A, [0])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.remove(4),
        lambda pool: pool._state.__setitem__(0, BlockState.FREE),
        lambda pool: pool._owner.__setitem__(0, None),
        lambda pool: pool._owner.__setitem__(5, A),
        lambda pool: pool._counts.__setitem__(BlockState.HELD, 7),
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
    assert pools.allocate(A, 3) == {"compressed": [0, 1, 2], "index": [0, 1, 2]}
    with pytest.raises(PoolExhausted, match="index"):
        pools.allocate(B, 2)
    assert pools.pools["compressed"].num_free == 3
    assert pools.count(BlockState.HELD) == 3
    pools.audit()


def test_slots_are_one_to_an_owner():
    slots = SlotPool(3)
    assert slots.acquire(A) == 0
    assert slots.acquire(B) == 1
    slots.defer(A, [0])
    slots.free(A, [0])
    assert slots.acquire(Owner(3, 0)) == 0
    slots.audit()
    slots.acquire(B)
    with pytest.raises(AssertionError, match="holds the slots"):
        slots.audit()
    with pytest.raises(PoolExhausted):
        slots.acquire(A)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_of_a_length(tokens, blocks):
    assert num_blocks_for(tokens, 4) == blocks
    assert BlockTable(("compressed",), 4).missing(tokens) == blocks


def test_table_grows_by_what_is_missing_and_says_what_is_new():
    table = BlockTable(("compressed", "index"), 4)
    deltas = table.extend({"compressed": [7, 3], "index": [0, 1]})
    assert deltas == (BlockDelta("compressed", 0, (7, 3)), BlockDelta("index", 0, (0, 1)))
    assert table.num_blocks == 2
    assert table.missing(8) == 0 and table.missing(9) == 1
    assert table.room(0) == 8 and table.room(3) == 20
    more = table.extend({"compressed": [5], "index": [2]})
    assert more == (BlockDelta("compressed", 2, (5,)), BlockDelta("index", 2, (2,)))
    table.truncate(more)
    assert table.ids == {"compressed": [7, 3], "index": [0, 1]}
    with pytest.raises(AssertionError, match="last extension"):
        table.truncate(more)
