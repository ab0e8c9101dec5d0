"""Content that is to be forgotten at a later time, unless somebody else has come to need it by then."""

from __future__ import annotations

from collections.abc import Sequence

from graphkv.errors import InvalidValue
from graphkv.manager.content import ContentCache
from graphkv.manager.prefix import ABSENT, Node


class DropPlan:
    """Blocks to forget, such as those of a conversation that will end. Made by `ManagerV2.plan_drop`.

    Attributes:
        is_dropped: whether `drop` has been called.
    """

    def __init__(self, cache: ContentCache, chain: Sequence[Node]) -> None:
        self.is_dropped = False
        self._cache, self._chain = cache, chain
        for node in chain:
            node.plans += 1

    def __len__(self) -> int:
        """Blocks that the plan names."""
        return len(self._chain)

    def drop(self) -> int:
        """Forget the plan's blocks in all tiers, from the last on, up to one that is needed; how many went.

        A block is needed while a sequence, a copy or a transfer uses it, while other content builds on it, and while
        another plan names it. What was evicted meanwhile is not counted.

        Raises:
            InvalidValue: it was called before.
        """
        if self.is_dropped:
            raise InvalidValue(f"this plan of {len(self)} blocks has been dropped already; plan again")
        self.is_dropped = True
        for node in self._chain:
            node.plans -= 1
        gone = 0
        for node in reversed(self._chain):
            if not self._cache.index.knows(node):
                continue
            if node.plans or not node.is_leaf or self._is_used(node):
                break
            self._cache.lose(node)
            gone += 1
        return gone

    def _is_used(self, node: Node) -> bool:
        slots = enumerate(node.slots)
        return any(slot != ABSENT and self._cache.tiers[tier].refs[slot] for tier, slot in slots)
