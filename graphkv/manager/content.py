"""Content in its tiers: what is findable, where its copies are, what becomes of it when its slot is needed.

Content may be in several tiers, and leaves each of them when its slot there is evicted. Content that left its last tier
is forgotten, and with it all that builds on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from graphkv.manager.events import EventKind, EventLog
from graphkv.manager.eviction import ContentSlots
from graphkv.manager.prefix import ABSENT, Digest, Node, PrefixIndex, sha256
from graphkv.manager.retention import Worth
from graphkv.transfer import DEVICE


class ContentCache:
    """The prefix tree and the slots of all tiers.

    Attributes:
        index: the tree.
        tiers: slots of the device, then of the colder tiers; ids from 1 in each of them.
        stored, evicted: for each tier, how often content came to be there, and had to make room.
        on_lost: called with content that was forgotten.

    Args:
        block_size: tokens a block.
        tier_blocks: slots of each tier, the unused id 0 included.
        events: where to record what becomes of content.
        clock: seconds, for retention with a time limit.
        digest: see `PrefixIndex`.
    """

    def __init__(
        self,
        block_size: int,
        tier_blocks: Sequence[int],
        events: EventLog,
        clock: Callable[[], float],
        digest: Digest = sha256,
    ) -> None:
        self.index = PrefixIndex(block_size, len(tier_blocks), digest)
        self.tiers = [ContentSlots(tier, count, self) for tier, count in enumerate(tier_blocks)]
        self.events, self._clock = events, clock
        self._ends: list[tuple[float, int, Node]] = []  # limited retention by its end; the number keeps ties apart
        self._limits = 0
        self.on_lost: list[Callable[[Node], None]] = []
        self.stored, self.evicted = [0] * len(self.tiers), [0] * len(self.tiers)
        for slots in self.tiers:
            events.add(EventKind.CREATED, slots.tier, slots.num_blocks - 1)

    @property
    def device(self) -> ContentSlots:
        return self.tiers[DEVICE]

    def attach(self, node: Node, tier: int, slot: int) -> None:
        """A held slot of a tier has the content of `node`, which was not there."""
        if node.slots[tier] != ABSENT or node.parent is None:
            raise AssertionError(f"the block at depth {node.depth} is in tier {tier} already")
        slots, parent = self.tiers[tier], node.parent
        node.slots[tier] = slot
        parent.children_in[tier] += 1
        slots.withdraw(parent.slots[tier])
        slots.put(slot, node)
        self.stored[tier] += 1
        self._tell(EventKind.STORED, node, tier, slot)

    def evict(self, tier: int, slot: int) -> None:
        """A cached slot is wanted for something else: what it holds stays in the other tiers, or is lost."""
        node = self.tiers[tier].node_at[slot]
        if node is None:
            raise AssertionError(f"slot {slot} of tier {tier} holds nothing to evict")
        self.evicted[tier] += 1
        others = [t for t, s in enumerate(node.slots) if s != ABSENT and t != tier]
        if others:
            self._detach(node, tier)
            self._tell(EventKind.MOVED, node, tier, slot, to_tier=others[0])
        else:
            self.lose(node)

    def spoil(self, node: Node, tier: int) -> None:
        """A copy turned out to be bad: it is no longer there, nor is what builds on it if it was the last."""
        if sum(slot != ABSENT for slot in node.slots) == 1:
            self.lose(node)
        else:
            slot = node.slots[tier]
            self._detach(node, tier)
            self._tell(EventKind.REMOVED, node, tier, slot)

    def lose(self, node: Node) -> None:
        """Forget content, and all that builds on it, in every tier; nobody may reference it."""
        for child in list(node.children()):
            self.lose(child)
        for tier, slot in enumerate(node.slots):
            if slot != ABSENT:
                self._detach(node, tier)
                self._tell(EventKind.REMOVED, node, tier, slot)
        self.index.remove(node)
        for listener in self.on_lost:
            listener(node)

    def retain(self, node: Node, worth: Worth) -> None:
        """Content is worth at least that much: what it is worth already counts if it is more."""
        if worth is node.worth:  # made with it just now
            if worth.until == math.inf:
                return
        elif worth[:2] <= node.worth[:2]:
            return
        node.worth = worth
        if worth.until < math.inf:
            self._limits += 1
            heapq.heappush(self._ends, (worth.until, self._limits, node))
        self._reorder(node)

    def expire(self) -> None:
        """Retention whose time is over falls to what comes after it."""
        if not self._ends:
            return
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            node = heapq.heappop(self._ends)[2]
            if node.worth.until <= now:
                node.worth = Worth(node.worth.after, math.inf, node.worth.after)
                self._reorder(node)

    def check(self) -> None:
        """`AssertionError` unless tree, slots and states agree in each tier."""
        self.index.check()
        for slots in self.tiers:
            slots.check()
        for node in self.index:
            parent = node.parent
            if parent is not None and parent.depth and node.slots[DEVICE] and not parent.slots[DEVICE]:
                raise AssertionError(f"the block at depth {node.depth} is on the device without the one before it")
        known = {(tier, slot): node for node in self.index for tier, slot in enumerate(node.slots) if slot != ABSENT}
        listed = {(s.tier, slot): node for s in self.tiers for slot, node in enumerate(s.node_at) if node is not None}
        if known != listed:
            raise AssertionError(f"{len(known)} copies in the tree and {len(listed)} in slots differ")

    def _detach(self, node: Node, tier: int) -> None:
        slot, parent = node.slots[tier], node.parent
        node.slots[tier] = ABSENT
        self.tiers[tier].clear(slot)
        if parent is not None:
            parent.children_in[tier] -= 1
            if not parent.children_in[tier] and parent.slots[tier] != ABSENT:
                self.tiers[tier].offer(parent.slots[tier])

    def _reorder(self, node: Node) -> None:
        for tier, slot in enumerate(node.slots):
            if slot != ABSENT:
                self.tiers[tier].offer(slot)

    def _tell(self, kind: EventKind, node: Node, tier: int, slot: int, to_tier: int = -1) -> None:
        if self.events.capacity:
            parent = node.parent.key if node.parent is not None else b""
            self.events.add(
                kind,
                tier,
                slot if tier == DEVICE else slot - 1,
                key=node.key,
                parent=parent,
                scope=node.root.key,
                priority=node.worth.priority,
                to_tier=to_tier,
            )
