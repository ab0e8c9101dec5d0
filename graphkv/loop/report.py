"""The numbers of a runtime, put together from those of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphkv.device import Device
from graphkv.engine import StepEngine
from graphkv.layout import Role
from graphkv.manager.blocks import BlockCounts
from graphkv.manager.v2 import ManagerV2
from graphkv.pool import Pools
from graphkv.stats import RoleBytes, RuntimeStats, TierStats
from graphkv.tiers.hierarchy import ColdTiers
from graphkv.transfer import DEVICE


def runtime_stats(
    engine: StepEngine, manager: ManagerV2, pools: Pools, tiers: ColdTiers | None, device: Device
) -> RuntimeStats:
    """Everything that `RuntimeStats` has."""
    counts, ledger = manager.stats(), device.ledger
    return RuntimeStats(
        steps_submitted=engine.submitted,
        steps_retired=engine.retired,
        graph_launches=engine.graphs.launches,
        blocks_total=counts.blocks_total,
        blocks_held=counts.blocks_held,
        blocks_free=counts.blocks_free,
        blocks_retiring=counts.blocks_retiring,
        blocks_peak=counts.blocks_peak_held,
        rows_open=counts.rows_open,
        pool_bytes=pools.num_bytes,
        device_bytes=ledger.device_bytes,
        pinned_bytes=ledger.pinned_bytes,
        allocations=ledger.allocations,
        tiers=_tiers(manager, counts.windows, pools, tiers),
        tokens_asked=counts.tokens_asked,
        tokens_matched=counts.tokens_matched,
        tokens_missed=counts.tokens_missed,
        blocks_merged=counts.blocks_merged,
        blocks_moved=counts.blocks_moved,
        blocks_failed=counts.blocks_failed,
        blocks_underway=counts.blocks_underway,
        transfers_overdue=counts.transfers_overdue,
        events_dropped=manager.events.dropped,
    )


def _tiers(
    manager: ManagerV2, windows: Sequence[BlockCounts], pools: Pools, tiers: ColdTiers | None
) -> tuple[TierStats, ...]:
    colder = () if tiers is None else tuple(tier.num_bytes for tier in (tiers.host, tiers.disk) if tier is not None)
    memory = pools.num_bytes, *colder
    found: list[TierStats] = []
    for tier, (counts, stored, evicted) in enumerate(manager.tier_counts()):
        groups = counts, *(windows if tier == DEVICE else ())
        found.append(
            TierStats(
                tier,
                counts.total,
                counts.free,
                counts.held - counts.shared,
                counts.shared,
                counts.cached,
                counts.retiring,
                counts.peak_held,
                stored,
                evicted,
                memory[tier],
                tuple(_roles(pools, groups)),
            )
        )
    return tuple(found)


def _roles(pools: Pools, groups: Sequence[BlockCounts]) -> Iterator[RoleBytes]:
    config = pools.config
    for group, counts in enumerate(groups):
        for side in config.sides:
            for role in Role:
                if config.page_scale(side, role, group):
                    size = pools.pool(side, role, group).block_bytes
                    yield RoleBytes(side, role, counts.total * size, (counts.total - counts.free) * size, group)
