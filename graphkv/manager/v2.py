"""The manager: sequences in rows, content that outlives them, tiers that both can go to. It touches no byte.

A block is *private* (one owner, filling), *shared* (its content is findable, somebody references it) or *cached*
(findable, referenced by nobody, evictable):

    open (match, share, copy a partial block) -> extend, advance, settle -> commit (findable) -> close (cached)

Rows are `capacity`, what is in them `content_rows`, where it is `moving_rows`, all beside this module. Bytes move by
copies that the caller puts on the stream (`take_copies`) and by transfers that a `BlockMover` runs beside it; `poll`
takes note of those that ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from graphkv.errors import InvalidValue
from graphkv.manager.blocks import BlockCounts
from graphkv.manager.content import ContentCache
from graphkv.manager.events import Event, EventKind, EventLog
from graphkv.manager.moving_rows import MovingRows, RowState
from graphkv.manager.prefix import Digest, sha256
from graphkv.manager.self_check import check_content, check_references
from graphkv.manager.tiering import Tiering
from graphkv.transfer import DEVICE, BlockMover, CopyJob

__all__ = ["ManagerStats", "ManagerV2", "RowState"]


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """Counts of a manager at one moment, and totals since construction.

    Blocks exclude the null block; `blocks_held` (private and shared) + free + retiring + cached = total.

    Attributes:
        tokens_matched: tokens that sequences found cached when they were opened. What a step computes again, such as
            the last token of a prompt that is wholly known, is not among them.
        tokens_asked: tokens of all prompts that looked for a match.
        tokens_missed: tokens that were found as well, and not used: there was no room for them, their copy was bad, or
            they are still on their way.
        blocks_stored, blocks_evicted: how often content became findable on the device, and had to make room there.
        blocks_merged: full blocks given up at commit for an equal one that was there.
        tiers: counts of each colder tier.
        blocks_underway: blocks that running transfers between tiers name.
        blocks_moved, blocks_failed: blocks whose transfers ended well, and not.
        transfers_overdue: running transfers that are older than the limit.
        windows: counts of each layer group with a window; all others are of group 0.
    """

    blocks_total: int
    blocks_free: int
    blocks_held: int
    blocks_retiring: int
    blocks_peak_held: int
    rows_open: int
    rows_free: int
    rows_retiring: int
    edits_pending: int
    blocks_cached: int = 0
    blocks_shared: int = 0
    tokens_matched: int = 0
    tokens_asked: int = 0
    blocks_stored: int = 0
    blocks_evicted: int = 0
    blocks_merged: int = 0
    copies_pending: int = 0
    tiers: tuple[BlockCounts, ...] = ()
    blocks_underway: int = 0
    blocks_moved: int = 0
    blocks_failed: int = 0
    transfers_overdue: int = 0
    tokens_missed: int = 0
    windows: tuple[BlockCounts, ...] = ()

    @property
    def blocks_private(self) -> int:
        return self.blocks_held - self.blocks_shared


class V2Options(TypedDict, total=False):
    """Arguments of `ManagerV2` that no size of the cache settles, by the same names."""

    max_edits: int
    prefix_caching: bool
    tier_slots: Sequence[int]
    mover: BlockMover
    resume_limit: float
    transfer_limit_s: float
    max_blocks_underway: int
    whole_copies: bool
    event_capacity: int
    self_check: bool


class ManagerV2(MovingRows):
    """Rows, content and tiers. See `Capacity` and `ContentRows` for the other verbs and for the arrays.

    Args:
        num_blocks, block_size, max_rows, max_blocks, max_edits: see `Capacity`; num_blocks includes the null block.
        prefix_caching: whether content is made findable at all.
        tier_slots: slots of the colder tiers, from the warmest.
        mover: carries blocks between tiers.
        resume_limit: share of the device's blocks that may be in use after a resume.
        transfer_limit_s: age at which a transfer counts as overdue.
        max_blocks_underway: most blocks of transfers that the manager starts unasked, to have room in time.
        whole_copies: whether copies within the device take whole blocks, also where a part is wanted; for index K that
            is written in pages smaller than a block, whose part has another layout than the block's.
        event_capacity: events kept until `take_events`; 0 records none.
        self_check: run `check` after each retired step.
        clock: seconds, for time limits.
        digest: hash of content keys; anything weaker than SHA-256 is for tests alone.
        groups: layer groups that have lines in the block table; those behind group 0 are `WindowedManager`'s.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        max_edits: int | None = None,
        prefix_caching: bool = True,
        tier_slots: Sequence[int] = (),
        mover: BlockMover | None = None,
        resume_limit: float = 1.0,
        transfer_limit_s: float = 30.0,
        max_blocks_underway: int = 1024,
        whole_copies: bool = False,
        event_capacity: int = 0,
        self_check: bool = False,
        clock: Callable[[], float] = time.monotonic,
        digest: Digest = sha256,
        groups: int = 1,
    ) -> None:
        if bool(tier_slots) != (mover is not None):
            raise InvalidValue("colder tiers and a mover go together; give both tier_slots and mover, or none")
        if not 0 < resume_limit <= 1:
            raise InvalidValue(f"resume_limit must be a share within 0 .. 1, got {resume_limit}")
        self.events = EventLog(event_capacity)
        self.self_check, self.whole_copies = self_check, whole_copies
        cache = ContentCache(block_size, [num_blocks, *(n + 1 for n in tier_slots)], self.events, clock, digest)
        tiering = Tiering(cache, mover, block_size, clock, transfer_limit_s, max_blocks_underway)
        super().__init__(
            cache, tiering, block_size, max_rows, max_blocks, max_edits, prefix_caching, clock, resume_limit, groups
        )

    def evict(self, count: int | None = None) -> int:
        """Free up to `count` cached blocks now (all that can be, by default), in order of eviction; how many."""
        self.index_commits()
        slots = self._cache.device
        victims = slots.choose(slots.num_blocks if count is None else count)
        slots.evict(victims)
        return len(victims)

    def vacate(self, first: int) -> int:
        """Evict what is cached in the device's blocks with ids from `first` on, so that all of these are free.

        What has no copy in a colder tier is forgotten.

        Returns:
            How many of them are held, retiring or in a transfer. If there are any, nothing was evicted.
        """
        self.index_commits()
        victims, in_the_way = self._cache.device.to_vacate(first)
        if not in_the_way:
            self._cache.device.evict(victims)
        return len(in_the_way)

    def resize(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks on the device, the null block included, as the pools do. New ones are free at once.

        Raises:
            InvalidValue: blocks that go are not free, see `vacate`.
        """
        if busy := self._cache.device.busy_from(num_blocks).size if num_blocks >= 2 else 1:
            raise InvalidValue(
                f"{busy} blocks from id {num_blocks} on are not free; vacate them first, down to 2 in all"
            )
        self._cache.device.resize(num_blocks)
        self.events.add(EventKind.RESIZED, DEVICE, num_blocks - 1)

    def retire(self, step: int) -> None:
        """Every step up to `step` has retired: what waited for them is free, or findable."""
        super().retire(step)
        if self.self_check:
            self.check()

    def take_copies(self, step: int = 0) -> list[CopyJob]:
        """The copies to make before step `step`, in this order; 0 if they are made before the call returns."""
        jobs = super().take_copies(step)
        return [job._replace(tokens=self.block_size) for job in jobs] if self.whole_copies else jobs

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first; a jump of their numbers tells of dropped ones."""
        self.index_commits()
        return self.events.take()

    def stats(self) -> ManagerStats:
        """Counts of blocks, rows and edits, now."""
        self.index_commits()
        total, free, held, retiring, peak, cached, shared = self.blocks.counts()
        return ManagerStats(
            total,
            free,
            held,
            retiring,
            peak,
            *self.rows_by_state,
            self.edits_pending,
            blocks_cached=cached,
            blocks_shared=shared,
            tokens_matched=self._matched,
            tokens_asked=self._asked,
            blocks_stored=self._cache.stored[DEVICE],
            blocks_evicted=self._cache.evicted[DEVICE],
            blocks_merged=self._merged,
            copies_pending=len(self._copies),
            tiers=tuple(slots.counts() for slots in self._cache.tiers[1:]),
            blocks_underway=self._tiering.blocks_underway,
            blocks_moved=self._tiering.moved,
            blocks_failed=self._tiering.failed,
            transfers_overdue=len(self._tiering.overdue()),
            tokens_missed=self.missed,
        )

    def check(self) -> None:
        """`AssertionError` with the facts if an invariant is broken. For tests and debug modes: it reads everything."""
        self.index_commits()
        super().check()
        self._cache.check()
        check_content(self)
        for slots in self._cache.tiers[1:]:
            check_references(slots, self._references(slots.tier))
