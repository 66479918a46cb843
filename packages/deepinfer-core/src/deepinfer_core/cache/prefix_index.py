"""Which blocks hold the KV of which tokens: a tree of full blocks, shared by all sequences.

A node is one published block in every pool. Its key is a chain: it stands for the tokens of its
block and of all blocks before it, so a node is in the map only while its ancestors are.

    root - A - B - C      a sequence refers to the deepest node of its chain alone;
                \\         A and B are kept because something below them is referred to
                 D - E    E has no reference: a leaf that may be evicted, then D; B stays
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from deepinfer_core.cache.block_pool import BlockPools, BlockState, Owner
from deepinfer_core.cache.prefix_tree import LeafQueue, Node
from deepinfer_core.cache.slots import SlotPool
from deepinfer_core.cache.swa import first_late_row

__all__ = ["Node", "PrefixIndex", "chain_keys"]

_KEY_BYTES = 16
# What the first block's key is chained to. Exact content is told from other content: a strict
# request must never read what was computed after a replay or by kernels that depend on the batch.
_ROOTS = {
    (True, False): b"deepinfer exact:",
    (False, False): b"deepinfer normal",
    (False, True): b"deepinfer replay",
}


def chain_keys(
    token_ids: Sequence[int],
    block_size: int,
    *,
    exact: bool,
    replayed: bool = False,
    keys: list[bytes] | None = None,
) -> list[bytes]:
    """Return a 16-byte key for each full block of `token_ids`, in order.

    Args:
        token_ids: ids from position 0 on, below 2^32.
        block_size: tokens of a block.
        exact: content of strict requests, which share nothing with others.
        replayed: content that may stand behind a replay; others share nothing with it either.
        keys: those of the first blocks, made earlier with the same arguments: extended in place
            and returned.
    """
    keys = [] if keys is None else keys
    first, last = len(keys), len(token_ids) // block_size
    if first >= last:
        return keys
    numbers = array("I", token_ids[first * block_size : last * block_size])
    raw, width = numbers.tobytes(), numbers.itemsize * block_size
    parent = keys[-1] if keys else _ROOTS[exact, replayed]
    for place in range(0, len(raw), width):
        content = parent + raw[place : place + width]
        parent = hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()
        keys.append(parent)
    return keys


class PrefixIndex:
    """The published blocks of a rank, and the window states stored with some of them.

    It frees what it holds at once: whoever refers to a node, or pins its window state, lets go only
    when the last step that may read it has passed its fence.
    """

    def __init__(self, pools: BlockPools, slots: SlotPool, block_size: int) -> None:
        """Make an empty index.

        Args:
            pools: where blocks come from and go back to; each node has one of each.
            slots: the same for stored window states.
            block_size: tokens of a block.
        """
        self.block_size = block_size
        self.published_blocks = 0  # in each pool, since the start
        self.evicted_blocks = 0
        self._names = tuple(pools.pools)
        self._pools = tuple(pools.pools.values())
        self._slots = slots
        self._nodes: dict[bytes, Node] = {}
        self._windows: dict[Node, None] = {}  # with a stored state, least recently used first
        self._num_active = self._num_pinned = 0
        self._now = 0
        self._leaves = LeafQueue()

    def __len__(self) -> int:
        """Return the number of nodes: published blocks in each pool."""
        return len(self._nodes)

    # Looking up

    def match(self, keys: Sequence[bytes]) -> Node | None:
        """Return the deepest node whose chain is a beginning of `keys` (of `chain_keys`), or None.

        Changes nothing: whoever wants to keep the node calls `acquire` before anything is evicted.
        """
        nodes = self._nodes
        low, high = 0, len(keys)  # a chain's keys are there up to some depth and not beyond it
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in nodes:
                low = middle
            else:
                high = middle - 1
        return nodes[keys[low - 1]] if low else None

    def match_window(
        self, keys: Sequence[bytes], *, window: int, tail_start: int = 0
    ) -> Node | None:
        """Return the deepest node of the match with a window state that serves a sequence, or None.

        Args:
            keys: as for `match`.
            window: positions a row sees, its own included.
            tail_start: of the sequence that would resume there. A state that was stored under
                decoder-side replay lacks late-layer rows below that prompt's tail; it does not
                serve a sequence that looks further back.
        """
        node = self.match(keys)
        while node is not None:
            if node.window_slot is not None:
                needed = first_late_row(node.depth * self.block_size, tail_start, window)
                if node.window_tail <= needed:
                    break
            node = node.parent
        return node

    def path_blocks(self, node: Node | None) -> dict[str, list[int]]:
        """Return, for each pool, the blocks from position 0 to the end of `node`."""
        found = []
        while node is not None:
            found.append(node.blocks)
            node = node.parent
        found.reverse()
        columns = zip(*found, strict=True) if found else ((),) * len(self._names)
        return {name: list(ids) for name, ids in zip(self._names, columns, strict=True)}

    # References

    def acquire(self, node: Node) -> None:
        """Keep a node, and with it all nodes it stands on, until `release`."""
        self._touch(node)
        node.refs += 1
        if node.refs > 1 or node.num_active:
            return
        self._num_active += 1
        above = node.parent
        while above is not None:
            above.num_active += 1
            if above.num_active > 1 or above.refs:  # it was active before
                return
            self._num_active += 1
            above = above.parent

    def release(self, node: Node) -> None:
        """Give up one reference of `acquire`."""
        assert node.refs > node.window_pins, f"block {node.blocks} has no reference to give up"
        self._let_go(node)

    # Content

    def publish(
        self, parent: Node | None, key: bytes, blocks: Sequence[int], owner: Owner
    ) -> tuple[Node, bool]:
        """Share a block that `owner` holds in every pool.

        All its positions are settled, and the step that wrote them has run.

        Args:
            parent: the node of the block before it, which the caller refers to.
            key: of `chain_keys`, for the tokens up to the block's end.
            blocks: its id in each pool, in the order of the pools.
            owner: who holds them; they are shared from now on.
        Returns:
            The node of these tokens, without a new reference, and whether the blocks became it. If
            not, somebody was first and the caller keeps its own.
        """
        known = self._nodes.get(key)
        if known is not None:
            return known, False
        assert parent is None or self._nodes.get(parent.key) is parent, (
            f"block {tuple(blocks)} follows a block that was evicted"
        )
        for pool, block in zip(self._pools, blocks, strict=True):
            pool.publish(owner, block)
        self.published_blocks += 1
        node = Node(key, parent, tuple(blocks), self.published_blocks, self._now)
        self._nodes[key] = node
        if parent is not None:
            parent.num_children += 1
        self._leaves.push(node)
        return node, True

    def store_window(self, node: Node, owner: Owner, slot: int, *, tail_start: int = 0) -> bool:
        """Keep the window state after exactly the tokens of `node`.

        Args:
            node: the caller refers to it.
            owner: who holds the slot; it is shared from now on.
            slot: where the state is; the step that copied it there has run.
            tail_start: of the sequence it was copied from.
        Returns:
            False when the node has a state: the caller keeps its slot.
        """
        assert self._nodes.get(node.key) is node, f"block {node.blocks} was evicted"
        if node.window_slot is not None:
            return False
        self._slots.publish(owner, slot)
        node.window_slot, node.window_tail = slot, tail_start
        self._windows[node] = None
        return True

    def pin_window(self, node: Node) -> int:
        """Keep a node and its window state until `unpin_window`; return the slot to copy from."""
        assert node.window_slot is not None, f"block {node.blocks} has no window state"
        self.acquire(node)
        node.window_pins += 1
        self._num_pinned += node.window_pins == 1
        del self._windows[node]
        self._windows[node] = None  # now the most recently used one
        return node.window_slot

    def unpin_window(self, node: Node) -> None:
        """Give up one `pin_window`: the step that loads the state has run."""
        assert node.window_pins > 0, f"the window state of block {node.blocks} is not pinned"
        node.window_pins -= 1
        self._num_pinned -= node.window_pins == 0
        self._let_go(node)

    # Eviction

    @property
    def num_evictable(self) -> int:
        """Blocks of each pool that `evict` could free now."""
        return len(self._nodes) - self._num_active

    @property
    def num_window_slots(self) -> int:
        """Slots with a stored window state."""
        return len(self._windows)

    @property
    def num_evictable_windows(self) -> int:
        """Slots that `evict_windows` could free now."""
        return len(self._windows) - self._num_pinned

    def evict(self, count: int) -> int:
        """Free up to `count` blocks of each pool, least recently used leaves first.

        Returns:
            How many: fewer only when no more are evictable.
        """
        freed: list[tuple[int, ...]] = []
        while len(freed) < count and (node := self._leaves.pop()) is not None:
            self._remove(node)
            freed.append(node.blocks)
        if freed:  # their keys are gone: nobody can find a block that is free
            for pool, blocks in zip(self._pools, zip(*freed, strict=True), strict=True):
                pool.evict(blocks)
        self.evicted_blocks += len(freed)
        return len(freed)

    def evict_windows(self, count: int) -> int:
        """Free up to `count` stored window states, least recently used first; nodes stay.

        Returns:
            How many: fewer only when no more are evictable.
        """
        wanted = min(count, self.num_evictable_windows)
        chosen: list[Node] = []
        for node in self._windows:
            if len(chosen) >= wanted:
                break
            if not node.window_pins:
                chosen.append(node)
        for node in chosen:
            self._drop_window(node)
        return len(chosen)

    def clear(self) -> None:
        """Free every block and window state that nobody refers to."""
        self.evict_windows(len(self._windows))
        self.evict(len(self._nodes))

    # Books

    def audit(self, held_refs: Mapping[Node, int]) -> None:
        """Check the tree, the counts, the queue and the pools against one another.

        Args:
            held_refs: references that users of the index hold, `pin_window` not included.
        Raises:
            AssertionError: they disagree; the message says where.
        """
        nodes = self._nodes.values()
        lost = [node.blocks for node in held_refs if self._nodes.get(node.key) is not node]
        _check(not lost, f"blocks {lost} are referred to but not in the index")
        children: dict[Node, list[Node]] = {}
        for node in nodes:
            if node.parent is not None:
                children.setdefault(node.parent, []).append(node)
        for node in sorted(nodes, key=lambda n: -n.depth):  # children first
            self._audit_node(node, children.get(node, []), held_refs.get(node, 0))
        _check(all(self._nodes.get(n.key) is n for n in children), "a parent is not in the index")
        active = sum(node.active for node in nodes)
        _check(active == self._num_active, f"{active} active nodes, {self._num_active} counted")
        marked, queued = {node for node in nodes if node.queued}, set(self._leaves)
        _check(marked == queued and len(marked) == len(self._leaves), "the eviction queue differs")
        for place, pool in enumerate(self._pools):
            mine, shared = sorted(n.blocks[place] for n in nodes), pool.blocks(BlockState.SHARED)
            _check(mine == list(shared), f"pool {pool.name!r} shares {shared}, the index {mine}")
        self._audit_windows()

    def _audit_node(self, node: Node, children: Sequence[Node], held: int) -> None:
        what, above = f"block {node.blocks}:", node.parent
        _check(self._nodes.get(node.key) is node, f"{what} found under another key")
        _check(node.depth == (above.depth if above else 0) + 1, f"{what} depth {node.depth}")
        _check(node.refs == held + node.window_pins, f"{what} {node.refs} references, {held} held")
        _check(node.num_children == len(children), f"{what} {node.num_children} children counted")
        active = sum(child.active for child in children)
        _check(node.num_active == active, f"{what} {node.num_active} active children counted")
        leaf = not node.active and not children
        _check(node.queued or not leaf, f"{what} could be evicted but is not in the queue")

    def _audit_windows(self) -> None:
        stored = {node for node in self._nodes.values() if node.window_slot is not None}
        _check(stored == set(self._windows), "stored window states differ from the nodes' slots")
        pinned = sum(bool(node.window_pins) for node in self._nodes.values())
        _check(pinned == self._num_pinned, f"{pinned} pinned, {self._num_pinned} counted")
        mine = sorted(node.window_slot for node in stored if node.window_slot is not None)
        shared = self._slots.blocks(BlockState.SHARED)
        _check(mine == list(shared), f"slots {shared} are shared, the index has {mine}")

    # How it is done

    def _touch(self, node: Node) -> None:
        self._now += 1
        node.last_used = self._now

    def _let_go(self, node: Node) -> None:
        self._touch(node)
        node.refs -= 1
        if node.active:
            return
        self._num_active -= 1
        if not node.num_children:
            self._leaves.push(node)
        above = node.parent
        while above is not None:
            above.num_active -= 1
            if above.num_active or above.refs:
                return
            self._num_active -= 1
            above = above.parent

    def _remove(self, node: Node) -> None:
        del self._nodes[node.key]
        if node.window_slot is not None:
            self._drop_window(node)
        above = node.parent
        if above is not None:
            above.num_children -= 1
            if not above.num_children and not above.refs:
                self._leaves.push(above)

    def _drop_window(self, node: Node) -> None:
        slot, node.window_slot = node.window_slot, None
        assert slot is not None and not node.window_pins, "a window state is dropped while needed"
        del self._windows[node]
        self._slots.evict([slot])


def _check(fine: bool, fault: str) -> None:
    if not fine:
        raise AssertionError(f"prefix index: {fault}")
