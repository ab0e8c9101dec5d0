"""What a runtime tells of itself: counts by tier, role and request, events in order, and its checks of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_runtime_tiers import HOST, cool, on_disk, prompt, run
from tier_shadow import tier_runtime

from graphkv.layout import Role, Side
from graphkv.loop.guard import POISON
from graphkv.manager.events import EventKind
from graphkv.sequence import SequenceCounts


def test_counts_by_tier_and_role_add_up(device: torch.device, tmp_path: Path) -> None:
    runtime, shadow = tier_runtime(device, on_disk(tmp_path))
    a = run(shadow, 1, 40)
    cool(runtime, shadow, run(shadow, 2, 60), tier=2)
    runtime.suspend(a)
    runtime.drain()
    runtime.evict()
    b = run(shadow, 3, 20)
    runtime.retire()
    stats = runtime.stats()
    assert [tier.tier for tier in stats.tiers] == [0, 1, 2]
    device_tier, host, disk = stats.tiers
    assert (device_tier.private, device_tier.shared, device_tier.free) == (1, 1, 21)
    assert (host.private, host.shared) == (1, 2), "two full blocks and a part"
    assert disk.cached >= 3
    for tier in stats.tiers:
        assert tier.free + tier.private + tier.shared + tier.cached + tier.retiring == tier.total
        assert [(entry.side, entry.role) for entry in tier.roles] == [(side, role) for side in Side for role in Role]
        for entry in tier.roles:
            size = runtime.pools.pool(entry.side, entry.role).block_bytes
            assert (entry.total, entry.used) == (tier.total * size, (tier.total - tier.free) * size)
    assert device_tier.memory_bytes == sum(pool.num_bytes for pool in runtime.pools)
    assert host.memory_bytes == runtime.tiers.host.num_bytes
    assert disk.memory_bytes == runtime.tiers.disk.num_bytes
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.block")) <= disk.memory_bytes
    assert stats.blocks_moved == sum(runtime.tiers.mover.stats().moved.values())
    assert device_tier.stored >= 6
    assert b.counts == SequenceCounts((0, 0, 0), 0, 0)


def test_a_request_knows_where_its_tokens_came_from_also_when_it_is_over(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    cool(runtime, shadow, run(shadow, 1, 60))
    a = shadow.open(prompt(1, 35))
    runtime.wait_ready(a)  # two blocks from the host; the two tokens that it shares of the third are computed again
    b = shadow.open(prompt(1, 70))
    runtime.wait_ready(b)  # the same two from the device, and the third
    assert (a.counts, b.counts) == (SequenceCounts((0, 32), 2, 2), SequenceCounts((32, 16), 0, 1))
    shadow.prefill([a, b])
    step = shadow.step([a, b])
    child = shadow.fork(a)
    assert child.counts == SequenceCounts((36, 0), 0, 0)
    shadow.step([a, child])
    for sequence in (a, b, child):
        shadow.close(sequence)
    runtime.retire()
    assert (a.counts, b.counts, child.cached_tokens) == (
        SequenceCounts((0, 32), 2, 2),
        SequenceCounts((32, 16), 0, 1),
        36,
    )
    stats = runtime.stats()
    assert stats.steps_retired == step + 1
    assert (stats.tokens_asked, stats.tokens_matched, stats.tokens_missed) == (60 + 35 + 70, 80, 2)


def test_events_tell_in_which_tier_content_is(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, event_capacity=1000)
    created = runtime.take_events()
    assert [(event.kind, event.tier, event.block) for event in created] == [("created", 0, 23), ("created", 1, 16)]
    cool(runtime, shadow, run(shadow, 1, 60))
    a = shadow.open(prompt(1, 70))
    runtime.wait_ready(a)
    shadow.prefill([a])
    runtime.rewind(a, 30)
    events = runtime.take_events()
    assert [event.number for event in events] == list(range(3, 3 + len(events)))
    kinds = [(event.kind, event.tier) for event in events]
    assert kinds[:3] == [("stored", 0)] * 3
    assert kinds.count(("stored", 1)) == 3
    assert kinds.count(("moved", 0)) == 3, "they left the device and are on the host"
    assert kinds.count(("stored", 0)) >= 6
    assert events[-1].kind == EventKind.REWOUND
    assert (events[-1].row, events[-1].length) == (a.row, 40)
    assert runtime.take_events() == []
    few, other = tier_runtime(device, event_capacity=2)
    run(other, 1, 60)
    few.retire()
    assert few.stats().events_dropped == 2


def test_self_check_poisons_what_is_free_and_finds_who_wrote_there(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, self_check=True, max_num_blocks=40)
    a, b = run(shadow, 1, 40), run(shadow, 2, 40)
    runtime.retire()
    runtime.evict()
    runtime.grow(30)
    shadow.close(b)
    shadow.step([a])
    runtime.retire()
    held = set(runtime.manager.block_table[a.row].tolist())
    cached = [slot for slot, node in enumerate(runtime.manager.blocks.node_at) if node is not None]
    free = [block for block in range(1, 30) if block not in held and block not in cached]
    assert len(free) > 20
    runtime.device.synchronize()
    for pool in runtime.pools:
        assert all((pool.block(block) == POISON).all() for block in free)
    runtime.shrink(28)
    shadow.step([a])
    shadow.check_reads(a)
    runtime.check()
    runtime.pools.pool(Side.DRAFT, Role.INDEX_K).block(free[5])[0, 7] = 1
    with pytest.raises(AssertionError, match=f"block {free[5]} is free, and somebody wrote into it in pool 3"):
        runtime.check()


def test_self_check_looks_at_the_host_state_after_each_step(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, self_check=True)
    a = run(shadow, 1, 40)
    runtime.retire()
    runtime.manager.block_table[a.row, 1] = 9  # somebody's bug
    shadow.step([a])
    with pytest.raises(AssertionError, match="block"):
        runtime.retire()
    plain, other = tier_runtime(device)
    sequence = run(other, 1, 40)
    plain.manager.block_table[sequence.row, 1] = 9
    other.step([sequence])
    plain.retire()
    with pytest.raises(AssertionError, match="block"):
        plain.check()
