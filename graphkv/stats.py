"""What a runtime has done and holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from graphkv.layout import Role, Side


@dataclass(frozen=True, slots=True)
class RoleBytes:
    """Bytes of one role of one side and layer group in one tier.

    Attributes:
        total: of all blocks.
        used: of blocks that are not free: held, cached, or given up and not yet retired.
    """

    side: Side
    role: Role
    total: int
    used: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, now. Blocks exclude the null block; `free + private + shared + cached + retiring == total`.

    Attributes:
        tier: 0 for the device, then the host, then the disk.
        private, shared: blocks that somebody references, without and with findable content. Transfers reference the
            blocks that they read and write.
        cached: findable blocks that nobody references.
        retiring: given up, but a step in flight may touch them.
        peak_held: the most that were referenced at a time.
        stored, evicted: how often content became findable here, and had to make room.
        memory_bytes: what the tier takes: mapped, pinned, or at most on disk.
        roles: bytes by side and role, of layer groups with a window too; all else here is of group 0.
    """

    tier: int
    total: int
    free: int
    private: int
    shared: int
    cached: int
    retiring: int
    peak_held: int
    stored: int
    evicted: int
    memory_bytes: int
    roles: tuple[RoleBytes, ...]


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Counts since construction, and the state now. Blocks are the device's and exclude the null block.

    Attributes:
        tiers: each tier, from the device on.
        tokens_asked, tokens_matched, tokens_missed: of all prompts: tokens in all, found cached and used, and found
            but computed again (or still on their way); see `SequenceCounts`.
        blocks_merged: full blocks given up for an equal one that was there.
        blocks_moved, blocks_failed: blocks whose transfers ended well, and not.
        blocks_underway, transfers_overdue: of transfers that run.
        events_dropped: events that nobody took before there were too many.
    """

    steps_submitted: int
    steps_retired: int
    graph_launches: int
    blocks_total: int
    blocks_held: int
    blocks_free: int
    blocks_retiring: int
    blocks_peak: int
    rows_open: int
    pool_bytes: int
    device_bytes: int
    pinned_bytes: int
    allocations: int
    tiers: tuple[TierStats, ...]
    tokens_asked: int
    tokens_matched: int
    tokens_missed: int
    blocks_merged: int
    blocks_moved: int
    blocks_failed: int
    blocks_underway: int
    transfers_overdue: int
    events_dropped: int
