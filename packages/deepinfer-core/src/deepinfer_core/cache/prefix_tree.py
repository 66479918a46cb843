"""The parts of the prefix index: a node for each published block, and the queue of leaves.

Nodes hold references and counts, but decide nothing; `PrefixIndex` changes them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

__all__ = ["LeafQueue", "Node"]


class Node:
    """One published block of every pool. Only the index changes it; key and blocks never change.

    Attributes:
        key: chain key of the tokens up to its block's end.
        parent: the node of the block before it; None at depth 1.
        blocks: its block in each pool, in the order of the pools.
        depth: blocks from position 0 to its end.
        window_slot: slot with the window state after exactly these tokens, or None.
        window_tail: rows below this position are missing in that state's late layers.
        window_pins: planned loads of it.
        refs: references to it, those of planned window loads included.
        num_children: nodes right below it; num_active: those with a reference in their subtree.
    """

    __slots__ = (
        "blocks",
        "depth",
        "key",
        "last_used",
        "num_active",
        "num_children",
        "number",
        "parent",
        "queued",
        "refs",
        "window_pins",
        "window_slot",
        "window_tail",
    )

    def __init__(
        self, key: bytes, parent: Node | None, blocks: tuple[int, ...], number: int, now: int
    ) -> None:
        """Make a node without references; `number` grows with every node of an index."""
        self.key = key
        self.parent = parent
        self.blocks = blocks
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.number = number
        self.last_used = now
        self.num_children = self.num_active = self.refs = 0
        self.queued = False  # whether it stands in the eviction queue
        self.window_slot: int | None = None
        self.window_tail = self.window_pins = 0

    @property
    def active(self) -> bool:
        """Whether it or a node below it is referred to, which keeps both."""
        return bool(self.refs or self.num_active)


class LeafQueue:
    """Leaves without references, least recently used first, the deeper one first on ties.

    A node stands in it at most once. Since it was put there it may have been used, referred to or
    extended, which is looked at when its turn comes: using a node costs nothing here.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[tuple[int, int, int, Node]] = []

    def __iter__(self) -> Iterator[Node]:
        """Walk through all nodes in it, in no order."""
        return (entry[-1] for entry in self._heap)

    def __len__(self) -> int:
        """Return how many nodes it holds."""
        return len(self._heap)

    def push(self, node: Node) -> None:
        """Put a node in that has just become a leaf without references."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, -node.depth, node.number, node))

    def pop(self) -> Node | None:
        """Take the first one out, or return None when there is no leaf without references."""
        heap = self._heap
        while heap:
            last_used, _, _, node = heap[0]
            if last_used < node.last_used and not node.num_children and not node.refs:
                heapq.heapreplace(heap, (node.last_used, -node.depth, node.number, node))
                continue
            heapq.heappop(heap)
            node.queued = False
            if not node.num_children and not node.refs:
                return node
        return None
