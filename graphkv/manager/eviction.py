"""Which cached slot of a tier goes first, and slots that hold content beyond the life of their owners.

The order is: lowest priority, then least recently used, and of one use the deepest of a chain. A slot whose content has
children in the same tier waits for them, so a chain is never cut in its middle; one that an unretired step may touch
waits for that step.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from graphkv.errors import OutOfBlocks
from graphkv.manager.blocks import BlockAllocator, Index
from graphkv.manager.prefix import Node


class Owner(Protocol):
    """Who knows what the content of slots is good for."""

    def evict(self, tier: int, slot: int) -> None:
        """A cached slot is about to be handed out: `clear` it."""
        ...

    def expire(self) -> None:
        """Bring priorities up to date: an eviction is about to be decided."""
        ...


class _Candidate(NamedTuple):
    priority: int
    last_use: int
    height: int  # minus the depth
    slot: int
    stamp: int


class ContentSlots(BlockAllocator):
    """Slots of one tier, some of which hold findable content; `take` makes room by evicting what nobody references.

    Args:
        tier: its number.
        num_blocks: slots, the unused id 0 included.
        owner: see `Owner`.
    """

    def __init__(self, tier: int, num_blocks: int, owner: Owner) -> None:
        super().__init__(num_blocks)
        self.tier = tier
        self.node_at: list[Node | None] = [None] * num_blocks
        self._owner = owner
        self._last_use = np.zeros(num_blocks, np.int64)
        self._stamp = [0] * num_blocks  # a candidate whose stamp is older was referenced since
        self.uses = 0  # counts what can change the order of eviction
        self._order: list[_Candidate] = []
        self._unsettled: dict[int, list[int]] = {}  # unretired step -> cached slots it may touch

    def take(self, n: int) -> Index:
        """`n` slots, each with one reference, evicting what it must; `OutOfBlocks` with nothing changed if too few."""
        if n > self.free:
            self.evict(self._victims(n))
        return super().take(n)

    def evict(self, slots: list[int]) -> None:
        """Free chosen slots."""
        for slot in slots:
            if self.node_at[slot] is not None:  # it went with one before, which it built on
                self._owner.evict(self.tier, slot)

    def _victims(self, n: int) -> list[int]:
        """Whom to evict for `n` slots; `OutOfBlocks` if that is not enough."""
        victims = self.choose(n - self.free)
        if len(victims) < n - self.free:
            self.put_back(victims)
            counts = self.counts()
            raise OutOfBlocks(n, counts.free, counts.retiring, len(victims), self.tier)
        return victims

    def require(self, n: int) -> None:
        """`OutOfBlocks` if `take(n)` would raise it now."""
        if n > self.free:
            self.put_back(self._victims(n))

    def available(self, n: int) -> bool:
        """Whether `take(n)` would succeed now."""
        try:
            self.require(n)
        except OutOfBlocks:
            return False
        return True

    def share(self, ids: NDArray[np.integer]) -> None:
        super().share(ids)
        for slot in ids.tolist():
            self._stamp[slot] += 1

    def hold(self, slot: int) -> None:
        """One more reference to one slot."""
        self.share(np.array([slot], np.intp))

    def drop(self, slot: int, step: int = 0) -> None:
        """Give up one reference to one slot."""
        self.release(np.array([slot], np.intp), step)

    def release(self, ids: NDArray[np.integer], step: int) -> Index:
        cached = super().release(ids, step)
        if cached.size:
            self.uses += 1
            self._last_use[cached] = self.uses
            for slot in cached.tolist():
                self.offer(slot)
        return cached

    def retire(self, step: int) -> None:
        super().retire(step)
        for done in sorted(s for s in self._unsettled if s <= step):
            for slot in self._unsettled.pop(done):
                self.offer(slot)

    def check(self) -> None:
        """`AssertionError` if a state is wrong, or something referenced or built upon could be evicted."""
        super().check()
        for candidate in self._order:
            slot = candidate.slot
            if candidate.stamp != self._stamp[slot]:
                continue
            node = self.node_at[slot]
            if node is None or self._refs[slot] or node.children_in[self.tier] or self._last_step[slot] > self.retired:
                raise AssertionError(f"slot {slot} of tier {self.tier} may be evicted, but is in use or not a leaf")

    def put(self, slot: int, node: Node) -> None:
        """A held slot has the content of `node` from now on."""
        self.keep(slot)
        self.node_at[slot] = node

    def clear(self, slot: int) -> None:
        """A slot's content is no longer findable there."""
        self.node_at[slot] = None
        self._stamp[slot] += 1
        self.forget(slot)

    def offer(self, slot: int) -> None:
        """Make a slot a candidate for eviction, if it is cached and without children in this tier."""
        node = self.node_at[slot]
        if node is None or self._refs[slot] or node.children_in[self.tier]:
            return
        last = int(self._last_step[slot])
        if last > self.retired:
            self._unsettled.setdefault(last, []).append(slot)
            return
        self._push_candidate(slot, node)

    def withdraw(self, slot: int) -> None:
        """A slot got a child in this tier: until that is gone, it is no candidate."""
        self._stamp[slot] += 1

    def choose(self, n: int) -> list[int]:
        """The next `n` slots to evict, or all that can be, in order. Each must then be evicted or offered again."""
        self._owner.expire()
        chosen: list[int] = []
        children_left: dict[int, int] = {}  # of parents whose children were chosen
        while self._order and len(chosen) < n:
            slot, stamp = heapq.heappop(self._order)[3:]
            node = self.node_at[slot]
            if stamp != self._stamp[slot] or node is None:
                continue
            chosen.append(slot)
            parent = node.parent
            above = 0 if parent is None else parent.slots[self.tier]
            if parent is None or not above:
                continue
            left = children_left[above] = children_left.get(above, parent.children_in[self.tier]) - 1
            if not left and not self._refs[above] and self._last_step[above] <= self.retired:
                self._push_candidate(above, parent)
        for slot in children_left.keys() - set(chosen):
            self._stamp[slot] += 1  # while its children stay, a parent is no candidate
        return chosen

    def put_back(self, slots: list[int]) -> None:
        """Slots that were chosen stay after all."""
        for slot in slots:
            self.offer(slot)

    def _push_candidate(self, slot: int, node: Node) -> None:
        self._stamp[slot] += 1
        use = int(self._last_use[slot])
        heapq.heappush(self._order, _Candidate(node.worth.priority, use, -node.depth, slot, self._stamp[slot]))
        if len(self._order) > 2 * self.num_blocks + 64:  # most are stale then: each slot has one that is not
            self._order = [c for c in self._order if c.stamp == self._stamp[c.slot]]
            heapq.heapify(self._order)
