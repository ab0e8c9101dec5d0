"""Blocks of a layer group with a window, some of which hold that group's share of findable content.

Content is known by its block in group 0. What a window's group has of it comes and goes on its own: nobody needs all
of it, since a match reads no more than the window behind its end. What no row references is evicted by priority, then
least recently used, and of one use the first of a chain; content that is lost in group 0 is lost here as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from graphkv.errors import OutOfBlocks
from graphkv.manager.blocks import BlockAllocator, Index
from graphkv.manager.events import EventKind, EventLog
from graphkv.manager.prefix import Node
from graphkv.transfer import DEVICE


class WindowBlocks(BlockAllocator):
    """Owner of a group's block ids; `take` evicts what it must.

    Args:
        group: its number.
        num_blocks: blocks in its pools, the null block included.
        events: where to record what becomes of content.
    """

    def __init__(self, group: int, num_blocks: int, events: EventLog) -> None:
        super().__init__(num_blocks)
        self.group = group
        self._events = events
        self._block_of: dict[Node, int] = {}
        self._node_of: dict[int, Node] = {}
        # Cached blocks by the priority that they had when they were given up, least recently used first.
        self._idle: dict[int, dict[int, None]] = {}
        self._priority: dict[int, int] = {}

    def block_of(self, node: Node) -> int:
        """The block that holds this group's share of content, 0 if there is none."""
        return self._block_of.get(node, 0)

    def node_of(self, block: int) -> Node | None:
        """The content that a block holds, None if it is not findable."""
        return self._node_of.get(block)

    def attach(self, node: Node, block: int) -> None:
        """A held block has this group's share of `node`, unless another one has it, or it is known already."""
        if node in self._block_of or block in self._node_of:
            return
        self.keep(block)
        self._block_of[node], self._node_of[block] = block, node
        self._tell(EventKind.STORED, node, block)

    def lose(self, node: Node) -> None:
        """Content is no longer findable: its block is private to who references it, or given up."""
        block = self._block_of.pop(node, 0)
        if not block:
            return
        del self._node_of[block]
        self._busy(block)
        self.forget(block)
        self._tell(EventKind.REMOVED, node, block)

    def require(self, n: int) -> None:
        """`OutOfBlocks` if `take(n)` would raise it now."""
        if not self.available(n):
            counts, evictable = self.counts(), len(self._victims(n))
            raise OutOfBlocks(n, counts.free, counts.retiring, evictable, group=self.group)

    def available(self, n: int) -> bool:
        """Whether `take(n)` would succeed now."""
        return n <= self.free or n <= self.free + len(self._victims(n - self.free))

    def take(self, n: int) -> Index:
        """`n` ids, each with one reference, evicting what it must; `OutOfBlocks` with nothing changed if too few."""
        if n > self.free:
            self.require(n)
            for block in self._victims(n - self.free):
                self.lose(self._node_of[block])
        return super().take(n)

    def share(self, ids: NDArray[np.integer]) -> None:
        super().share(ids)
        for block in ids.tolist():
            self._busy(block)

    def release(self, ids: NDArray[np.integer], step: int) -> Index:
        cached = super().release(ids, step)
        for block in sorted(cached.tolist(), key=lambda block: self._node_of[block].depth):
            priority = self._node_of[block].worth.priority
            self._priority[block] = priority
            self._idle.setdefault(priority, {})[block] = None
        return cached

    def check(self) -> None:
        """`AssertionError` if a state is wrong, or content and blocks do not agree."""
        super().check()
        if {block: node for node, block in self._block_of.items()} != self._node_of:
            raise AssertionError(f"group {self.group}: {len(self._block_of)} contents, {len(self._node_of)} blocks")
        kept = np.flatnonzero(self.kept).tolist()
        if sorted(self._node_of) != kept:
            raise AssertionError(f"group {self.group}: blocks {kept} are kept, {sorted(self._node_of)} have content")
        idle = sorted(block for bucket in self._idle.values() for block in bucket)
        if idle != [block for block in kept if not self.refs[block]] or idle != sorted(self._priority):
            raise AssertionError(f"group {self.group}: blocks {idle} may be evicted, not all that are cached")

    def _victims(self, n: int) -> list[int]:
        """The next `n` blocks to evict, or all that can be; one that an unretired step may touch is none."""
        victims: list[int] = []
        for priority in sorted(self._idle):
            for block in self._idle[priority]:
                if len(victims) >= n:
                    return victims
                if self._last_step[block] <= self.retired:
                    victims.append(block)
        return victims

    def _busy(self, block: int) -> None:
        """A block is not cached any more."""
        priority = self._priority.pop(block, None)
        if priority is not None:
            del self._idle[priority][block]
            if not self._idle[priority]:
                del self._idle[priority]

    def _tell(self, kind: EventKind, node: Node, block: int) -> None:
        if self._events.capacity:
            parent = node.parent.key if node.parent is not None else b""
            self._events.add(
                kind,
                DEVICE,
                block,
                key=node.key,
                parent=parent,
                scope=node.root.key,
                priority=node.worth.priority,
                group=self.group,
            )
