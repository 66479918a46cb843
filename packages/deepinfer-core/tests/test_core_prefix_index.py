"""The prefix index: what is found, what is kept, what is evicted, and books that always agree."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from deepinfer_core.cache import BlockPools, BlockState, Owner, SlotPool
from deepinfer_core.cache.prefix_index import Node, PrefixIndex, chain_keys

A, B = Owner(1, 0), Owner(2, 0)
SIZE = 2


def ids_of(taken) -> list[int]:
    """Return the block of each pool, of an allocation of one."""
    return [int(blocks[0]) for blocks in taken.values()]


class Shelf:
    """An index with two pools, and sequences that publish whole chains."""

    def __init__(self, blocks: int = 12, slots: int = 4) -> None:
        self.pools = BlockPools({"compressed": blocks + 2, "index": blocks})
        self.slots = SlotPool(slots)
        self.index = PrefixIndex(self.pools, self.slots, SIZE)
        self.pools.pools["compressed"].allocate(B, 1)  # ids differ between the pools

    def publish(self, token_ids, owner: Owner = A) -> Node:
        """Publish what is missing of a chain; the last node comes back without a reference."""
        node = None
        for key in chain_keys(token_ids, SIZE, exact=False):
            taken = self.pools.allocate(owner, 1)
            node, published = self.index.publish(node, key, ids_of(taken), owner)
            if not published:
                self.pools.cancel(owner, taken)
        assert node is not None
        return node

    def store(self, node: Node, owner: Owner = A, tail_start: int = 0) -> int:
        """Store a window state with a node."""
        slot = self.slots.acquire(owner)
        assert self.index.store_window(node, owner, slot, tail_start=tail_start)
        return slot

    def found(self, token_ids) -> int:
        """Return the number of tokens found."""
        node = self.index.match(chain_keys(token_ids, SIZE, exact=False))
        return 0 if node is None else node.depth * SIZE

    def audit(self, *held: Node) -> None:
        """Check all books, given every reference there is."""
        self.pools.audit()
        self.slots.audit()
        self.index.audit(Counter(held))


@pytest.fixture
def shelf():
    return Shelf()


# Keys


def test_a_key_stands_for_all_tokens_up_to_its_block():
    keys = chain_keys([1, 2, 3, 4, 5, 6, 7], 2, exact=False)
    assert len(keys) == 3 and all(len(key) == 16 for key in keys)
    assert chain_keys([1, 2, 3, 4, 9, 9], 2, exact=False)[:2] == keys[:2]
    changed = chain_keys([9, 2, 3, 4, 5, 6], 2, exact=False)
    assert not set(changed) & set(keys), "an early token changes every later key"
    assert chain_keys([3, 4], 2, exact=False)[0] not in keys, "the same block at another place"


def test_keys_do_not_depend_on_where_they_were_extended():
    ids = list(range(100, 129))
    whole = chain_keys(ids, 4, exact=True)
    keys: list[bytes] = []
    for end in range(len(ids) + 1):
        assert chain_keys(ids[:end], 4, exact=True, keys=keys) is keys
        assert keys == whole[: end // 4]


def test_exact_content_shares_no_key_with_other_content():
    ids = list(range(8))
    assert not set(chain_keys(ids, 2, exact=True)) & set(chain_keys(ids, 2, exact=False))


def test_ids_that_look_alike_as_bytes_have_different_keys():
    assert chain_keys([1, 256], 2, exact=False) != chain_keys([256, 1], 2, exact=False)
    assert chain_keys([1, 0], 1, exact=False)[0] != chain_keys([256], 1, exact=False)[0]


# Looking up and publishing


@pytest.mark.parametrize("length", range(1, 9))
def test_match_finds_the_longest_published_beginning(shelf, length):
    shelf.publish(range(2 * length))
    for asked in range(9):
        assert shelf.found(range(2 * asked)) == 2 * min(asked, length)
    assert shelf.found([5, 5, 2, 3]) == 0
    assert shelf.found([0, 1, 5, 5]) == 2
    assert shelf.index.match([]) is None


def test_path_blocks_are_those_that_were_published_in_order(shelf):
    ids = [5, 6, 7, 8, 9, 10]
    node = shelf.publish(ids)
    path = shelf.index.path_blocks(node)
    assert path == {"compressed": [1, 2, 3], "index": [0, 1, 2]}
    for pool, blocks in path.items():
        assert shelf.pools.pools[pool].blocks(BlockState.SHARED) == tuple(blocks)
    assert shelf.index.path_blocks(None) == {"compressed": [], "index": []}


def test_a_second_copy_of_a_block_stays_private(shelf):
    first = shelf.publish([1, 2])
    before = first.blocks
    blocks = ids_of(shelf.pools.allocate(B, 1))
    node, published = shelf.index.publish(None, first.key, blocks, B)
    assert node is first and not published and first.blocks == before
    assert shelf.pools.pools["index"].holders(BlockState.HELD) == {B: {blocks[1]}}
    assert shelf.index.published_blocks == len(shelf.index) == 1
    shelf.audit()


def test_chains_with_the_same_beginning_share_it(shelf):
    one, two = shelf.publish([1, 2, 3, 4, 5, 6]), shelf.publish([1, 2, 3, 4, 7, 8])
    assert one.parent is two.parent and len(shelf.index) == 4
    assert shelf.pools.pools["index"].count(BlockState.SHARED) == 4


def test_a_block_after_an_evicted_one_is_refused(shelf):
    parent = shelf.publish([1, 2])
    shelf.index.evict(1)
    key = chain_keys([1, 2, 3, 4], SIZE, exact=False)[1]
    blocks = ids_of(shelf.pools.allocate(A, 1))
    with pytest.raises(AssertionError, match="follows a block that was evicted"):
        shelf.index.publish(parent, key, blocks, A)


# References and eviction


def test_a_reference_to_the_last_block_keeps_the_whole_chain(shelf):
    last = shelf.publish(range(8))
    shelf.publish([0, 1, 9, 9])
    shelf.index.acquire(last)
    assert shelf.index.num_evictable == 1
    assert shelf.index.evict(10) == 1
    assert shelf.found(range(8)) == 8 and shelf.found([0, 1, 9, 9]) == 2
    shelf.audit(last)
    shelf.index.release(last)
    assert shelf.index.num_evictable == 4
    shelf.audit()


def test_a_node_with_two_references_needs_two_releases(shelf):
    node = shelf.publish([1, 2])
    shelf.index.acquire(node)
    shelf.index.acquire(node)
    shelf.index.release(node)
    assert shelf.index.evict(1) == 0
    shelf.index.release(node)
    with pytest.raises(AssertionError, match="no reference to give up"):
        shelf.index.release(node)
    assert shelf.index.evict(1) == 1


def test_eviction_goes_from_the_least_recently_used_end_up(shelf):
    """A chain goes from its end on, before another one that was used later."""
    old, new = shelf.publish([1, 2, 3, 4, 5, 6]), shelf.publish([7, 8, 9, 10])
    for node in (new, old, new):
        shelf.index.acquire(node)
        shelf.index.release(node)
    found = []
    for _ in range(5):
        assert shelf.index.evict(1) == 1
        found.append((shelf.found([1, 2, 3, 4, 5, 6]), shelf.found([7, 8, 9, 10])))
        shelf.audit()
    assert found == [(4, 4), (2, 4), (0, 4), (0, 2), (0, 0)]


def test_a_beginning_used_by_itself_outlives_what_followed_it(shelf):
    shelf.publish([1, 2, 3, 4])
    other = shelf.publish([7, 8])
    beginning = shelf.index.match(chain_keys([1, 2], SIZE, exact=False))
    for node in (other, beginning):
        shelf.index.acquire(node)
        shelf.index.release(node)
    assert shelf.index.evict(2) == 2
    assert (shelf.found([1, 2, 3, 4]), shelf.found([7, 8])) == (2, 0)


def test_evicted_blocks_are_free_in_every_pool_and_found_by_nobody(shelf):
    node = shelf.publish([1, 2, 3, 4])
    free = {name: pool.num_free for name, pool in shelf.pools.pools.items()}
    assert shelf.index.evict(1) == 1 and shelf.index.evicted_blocks == 1
    for name, pool in shelf.pools.pools.items():
        assert pool.num_free == free[name] + 1
    assert shelf.index.match([node.key]) is None
    assert shelf.found([1, 2, 3, 4]) == 2


def test_keys_go_before_their_blocks_become_free(shelf, monkeypatch):
    keys = chain_keys([1, 2, 3, 4], SIZE, exact=False)
    shelf.publish([1, 2, 3, 4])
    pool, seen = shelf.pools.pools["compressed"], []
    evict = pool.evict
    monkeypatch.setattr(
        pool, "evict", lambda blocks: (seen.append(shelf.index.match(keys)), evict(blocks))
    )
    shelf.index.evict(2)
    assert seen == [None]


def test_clear_leaves_what_is_in_use(shelf):
    kept = shelf.publish([1, 2])
    shelf.publish([1, 2, 3, 4])
    shelf.publish([5, 6])
    shelf.store(kept)
    shelf.index.acquire(kept)
    shelf.index.clear()
    assert len(shelf.index) == 1 and shelf.found([1, 2, 3, 4]) == 2
    assert shelf.index.num_window_slots == 0 and shelf.slots.num_free == 4
    shelf.audit(kept)


# Stored window states


def test_match_window_finds_the_deepest_stored_state(shelf):
    ids = [1, 2, 3, 4, 5, 6]
    keys = chain_keys(ids, SIZE, exact=False)
    node = shelf.publish(ids)
    assert shelf.index.match_window(keys, window=4) is None
    slot = shelf.store(node.parent)
    assert shelf.index.match_window(keys, window=4) is node.parent
    assert node.parent.window_slot == slot
    assert shelf.index.match_window(keys[:1], window=4) is None
    shelf.audit()


@pytest.mark.parametrize(
    ("stored_tail", "tail_start", "serves"),
    [
        (0, 0, True),
        (3, 0, True),  # the first row above the hit sees 3 .. 6
        (4, 0, False),
        (4, 3, False),  # the tail begins a row before what is there
        (4, 4, True),
        (4, 9, True),  # late layers look at nothing that was stored
        (9, 8, False),  # nothing was stored for late layers
    ],
)
def test_a_state_without_the_late_rows_a_sequence_looks_at_does_not_serve(
    shelf, stored_tail, tail_start, serves
):
    ids = [1, 2, 3, 4, 5, 6]
    keys = chain_keys(ids, SIZE, exact=False)
    node = shelf.publish(ids)
    shelf.store(node, tail_start=stored_tail)
    shallow = node.parent.parent
    shelf.store(shallow, B)
    found = shelf.index.match_window(keys, window=4, tail_start=tail_start)
    assert found is (node if serves else shallow)


def test_a_second_window_state_stays_with_its_owner(shelf):
    node = shelf.publish([1, 2])
    shelf.store(node)
    slot = shelf.slots.acquire(B)
    assert not shelf.index.store_window(node, B, slot)
    assert shelf.slots.holders(BlockState.HELD) == {B: {slot}}


def test_window_states_are_evicted_by_last_use_and_their_blocks_stay(shelf):
    nodes = [shelf.publish([10 * i, 1]) for i in range(3)]
    for node in nodes:
        shelf.store(node)
    shelf.index.pin_window(nodes[0])
    shelf.index.unpin_window(nodes[0])
    assert shelf.index.evict_windows(1) == 1
    assert [node.window_slot is None for node in nodes] == [False, True, False]
    assert shelf.index.evict_windows(5) == 2
    assert len(shelf.index) == 3 and shelf.slots.num_free == 4
    shelf.audit()


def test_a_pinned_window_state_and_its_blocks_stay(shelf):
    node = shelf.publish([1, 2, 3, 4])
    slot = shelf.store(node)
    assert shelf.index.pin_window(node) == slot
    shelf.index.pin_window(node)
    assert shelf.index.num_evictable_windows == shelf.index.evict_windows(1) == 0
    assert shelf.index.num_evictable == shelf.index.evict(2) == 0
    with pytest.raises(AssertionError, match="no reference"):
        shelf.index.release(node)
    shelf.index.unpin_window(node)
    assert shelf.index.evict_windows(1) == 0
    shelf.index.unpin_window(node)
    assert shelf.index.num_evictable_windows == shelf.index.evict_windows(1) == 1
    shelf.audit()
    with pytest.raises(AssertionError, match="no window state"):
        shelf.index.pin_window(node)
    with pytest.raises(AssertionError, match="not pinned"):
        shelf.index.unpin_window(node)


def test_evicting_a_block_frees_its_window_state(shelf):
    node = shelf.publish([1, 2])
    shelf.store(node)
    assert shelf.index.evict(1) == 1
    assert shelf.slots.num_free == 4 and shelf.index.num_window_slots == 0
    with pytest.raises(AssertionError, match="was evicted"):
        shelf.index.store_window(node, A, shelf.slots.acquire(A))


# Audits


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s, n: setattr(n, "refs", 2), "2 references, 1 held"),
        (lambda s, n: setattr(n.parent, "num_children", 2), "2 children counted"),
        (lambda s, n: setattr(n.parent, "num_active", 0), "0 active children counted"),
        (lambda s, n: setattr(n, "depth", 5), "depth 5"),
        (lambda s, n: setattr(s.index, "_num_active", 1), "1 counted"),
        (lambda s, n: setattr(s.index, "_num_pinned", 1), "1 counted"),
        (lambda s, n: s.index._nodes.pop(n.key), "referred to but not in the index"),
        (lambda s, n: s.index._nodes.pop(n.parent.key), "parent is not in the index"),
        (lambda s, n: setattr(n, "key", b"?" * 16), "not in the index|another key"),
        (lambda s, n: s.index._leaves._heap.clear(), "queue"),
        (lambda s, n: s.index._windows.clear(), "window states"),
        (lambda s, n: setattr(n, "blocks", (11, 11)), "shares"),
        (lambda s, n: setattr(n, "window_slot", 3), "slots"),
        (lambda s, n: s.pools.pools["index"].evict([0]), "'index'"),
    ],
)
def test_audit_sees_damaged_books(shelf, damage, message):
    node = shelf.publish([1, 2, 3, 4])
    shelf.publish([8, 9])
    shelf.store(node)
    shelf.index.acquire(node)
    shelf.audit(node)
    damage(shelf, node)
    with pytest.raises(AssertionError, match=message):
        shelf.index.audit({node: 1})


# Any order of operations, against a dictionary


class IndexMachine(RuleBasedStateMachine):
    """Sequences that match, publish and end, beside a dictionary of what must be found.

    A chain's tokens name its blocks: `content` says what each block was published with, so a block
    that is found under other tokens than its own, or that was changed or freed, shows at once.
    """

    @initialize(blocks=st.integers(2, 14), slots=st.integers(1, 3))
    def start(self, blocks: int, slots: int) -> None:
        self.shelf = Shelf(blocks, slots)
        self.index = self.shelf.index
        self.known: dict[tuple[int, ...], list[int]] = {}  # tokens -> block in each pool
        self.windows: dict[tuple[int, ...], int] = {}
        self.held: list[tuple[Node, tuple[int, ...]]] = []
        self.pinned: list[tuple[Node, tuple[int, ...]]] = []

    ids = st.lists(st.integers(0, 1), min_size=2, max_size=10)

    def path(self, node: Node | None) -> int:
        return 0 if node is None else node.depth * SIZE

    def forget_evicted(self) -> list[tuple[int, ...]]:
        """Drop from the model what is not found; nobody may have needed it."""
        gone = [ids for ids in self.known if self.shelf.found(ids) < len(ids)]
        for ids in gone:
            del self.known[ids]
            self.windows.pop(ids, None)
        for node, ids in self.held + self.pinned:
            assert self.shelf.found(ids) == len(ids) == self.path(node)
        return gone

    @rule(ids=ids, owner=st.sampled_from([A, B]))
    def compute(self, ids: list[int], owner: Owner) -> None:
        """A sequence takes its hit, and publishes the rest as far as there is room."""
        keys = chain_keys(ids, SIZE, exact=False)
        node = self.index.match(keys)
        if node is not None:
            self.index.acquire(node)
        for place in range(self.path(node) // SIZE, len(keys)):
            if not self.shelf.pools.num_free:
                break
            taken = self.shelf.pools.allocate(owner, 1)
            blocks = ids_of(taken)
            child, published = self.index.publish(node, keys[place], blocks, owner)
            assert published and self.path(child) == (place + 1) * SIZE
            self.known[tuple(ids[: (place + 1) * SIZE])] = blocks
            self.index.acquire(child)
            if node is not None:
                self.index.release(node)
            node = child
        if node is not None:
            self.held.append((node, tuple(ids[: self.path(node)])))

    @rule(ids=ids)
    def publish_again(self, ids: list[int]) -> None:
        """Somebody computed a block at the same time: nothing changes."""
        node = self.index.match(chain_keys(ids, SIZE, exact=False))
        if node is None or not self.shelf.pools.num_free:
            return
        taken = self.shelf.pools.allocate(B, 1)
        assert self.index.publish(node.parent, node.key, ids_of(taken), B) == (node, False)
        self.shelf.pools.cancel(B, taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        node, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.index.release(node)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        node, ids = data.draw(st.sampled_from(self.held))
        if not self.shelf.slots.num_free:
            return
        slot = self.shelf.slots.acquire(A)
        stored = self.index.store_window(node, A, slot)
        assert stored is (ids not in self.windows)
        if stored:
            self.windows[ids] = slot
        else:
            self.shelf.slots.cancel(A, [slot])

    @rule(ids=ids)
    def resume(self, ids: list[int]) -> None:
        node = self.index.match_window(chain_keys(ids, SIZE, exact=False), window=4)
        stored = [known for known in self.windows if known == tuple(ids[: len(known)])]
        assert self.path(node) == max(map(len, stored), default=0)
        if node is not None:
            found = tuple(ids[: self.path(node)])
            assert self.index.pin_window(node) == self.windows[found]
            self.pinned.append((node, found))

    @precondition(lambda self: self.pinned)
    @rule()
    def loaded(self) -> None:
        self.index.unpin_window(self.pinned.pop(0)[0])

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        expected = min(count, self.index.num_evictable)
        assert self.index.evict(count) == expected
        assert len(self.forget_evicted()) == expected

    @rule(count=st.integers(1, 2))
    def evict_windows(self, count: int) -> None:
        expected = min(count, self.index.num_evictable_windows)
        assert self.index.evict_windows(count) == expected
        gone = [
            ids
            for ids in self.windows
            if self.index.match(chain_keys(ids, SIZE, exact=False)).window_slot is None
        ]
        assert len(gone) == expected
        for ids in gone:
            del self.windows[ids]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        gone = self.forget_evicted()
        assert self.index.num_evictable == self.index.num_evictable_windows == 0
        assert all(ids not in self.known for ids in gone)
        pinned = {ids for _, ids in self.pinned}
        self.windows = {ids: slot for ids, slot in self.windows.items() if ids in pinned}

    @rule(ids=ids)
    def look(self, ids: list[int]) -> None:
        """What is found are the blocks that were published with these very tokens."""
        node = self.index.match(chain_keys(ids, SIZE, exact=False))
        lengths = range(SIZE, len(ids) + 1, SIZE)
        there = [length for length in lengths if tuple(ids[:length]) in self.known]
        assert self.path(node) == max(there, default=0)
        blocks = [self.known[tuple(ids[:length])] for length in there]
        for place, found in enumerate(self.index.path_blocks(node).values()):
            assert found == [each[place] for each in blocks]

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "shelf"):
            self.shelf.audit(*(node for node, _ in self.held))
            kept = {
                ids[:end]
                for _, ids in self.held + self.pinned
                for end in range(SIZE, len(ids) + 1, SIZE)
            }
            assert self.index.num_evictable == len(self.known) - len(kept)
            assert len(self.index) == len(self.known)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
