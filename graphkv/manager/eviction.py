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
from graphkv.manager.blocks import BlockAllocator, Index, resized
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

    def to_vacate(self, first: int) -> tuple[list[int], list[int]]:
        """What stands in slots from `first` on: the slots to evict for them to be free, and the slots in the way.

        What builds on content that must go goes with it, and first. A slot is in the way if it, or what builds on it,
        is referenced, or may be touched by an unretired step.
        """
        victims: dict[int, None] = {}
        in_the_way: list[int] = []
        for slot in self.busy_from(first).tolist():
            node = self.node_at[slot]
            going = [] if node is None else self._with_descendants(node)
            if not going or any(self._refs[s] or self._last_step[s] > self.retired for s in going):
                in_the_way.append(slot)
            else:
                victims.update(dict.fromkeys(going))
        return sorted(victims, key=lambda slot: -self._depth(slot)), in_the_way

    def _with_descendants(self, node: Node) -> list[int]:
        """The slots in this tier of content and of all that builds on it."""
        slots, nodes = [], [node]
        while nodes:
            node = nodes.pop()
            if there := node.slots[self.tier]:
                slots.append(there)
                nodes += node.children()
        return slots

    def _depth(self, slot: int) -> int:
        node = self.node_at[slot]
        return 0 if node is None else node.depth

    def resize(self, num_blocks: int) -> None:
        super().resize(num_blocks)
        self.node_at = [*self.node_at[:num_blocks], *[None] * (num_blocks - len(self.node_at))]
        self._stamp = [*self._stamp[:num_blocks], *[0] * (num_blocks - len(self._stamp))]
        self._last_use = resized(self._last_use, num_blocks)
        self._order = [candidate for candidate in self._order if candidate.slot < num_blocks]
        heapq.heapify(self._order)
        for step, slots in self._unsettled.items():
            self._unsettled[step] = [slot for slot in slots if slot < num_blocks]

    def _push_candidate(self, slot: int, node: Node) -> None:
        self._stamp[slot] += 1
        use = int(self._last_use[slot])
        heapq.heappush(self._order, _Candidate(node.worth.priority, use, -node.depth, slot, self._stamp[slot]))
        if len(self._order) > 2 * self.num_blocks + 64:  # most are stale then: each slot has one that is not
            self._order = [c for c in self._order if c.stamp == self._stamp[c.slot]]
            heapq.heapify(self._order)
