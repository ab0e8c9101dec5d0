"""Pools of a runtime that grow and shrink under live graphs. Case A3 at this level, on both devices."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from test_runtime_tiers import HOST, cool, prompt, run
from tier_shadow import tier_runtime

from graphkv.errors import InvalidValue, OutOfBlocks, OutOfMemory
from graphkv.layout import Role, Side
from graphkv.manager.events import EventKind
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch


def addresses(runtime: DecodeRuntime) -> list[int]:
    views = [runtime.pools.view(side, role, 0).data_ptr() for side in runtime.config.sides for role in Role]
    live = [t.data_ptr() for side in runtime.config.sides for t in runtime.metadata(4, side).tensors().values()]
    return views + live


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_case_A3_captured_graphs_go_on_through_growth_and_shrinking(device: torch.device, mode: str) -> None:
    runtime, shadow = tier_runtime(device, num_blocks=8, max_num_blocks=5000, mode=mode)
    before = addresses(runtime)
    a = run(shadow, 1, 60)
    runtime.retire()
    with pytest.raises(OutOfBlocks, match="4 more blocks needed"):
        shadow.prefill([shadow.open(prompt(2, 50))])
    (b,) = (sequence for sequence in shadow.sequences if sequence is not a)
    launches = runtime.stats().graph_launches
    in_flight = shadow.step([a])
    shadow.grow(4000)
    assert runtime.stats().steps_retired < in_flight or not runtime.device.is_cuda
    shadow.prefill([b])
    batch = Batch([a, b])
    for _ in range(30):
        shadow.step(batch)
    shadow.check()
    assert runtime.manager.block_table.max() >= 8
    bytes_then = runtime.stats().pool_bytes
    shadow.close(b)
    last = int(runtime.manager.block_table.max())
    with pytest.raises(InvalidValue, match=f"1 blocks with ids from {last} to 3999 are in use"):
        runtime.shrink(last)
    runtime.shrink(last + 1)
    assert addresses(runtime) == before
    assert runtime.stats().blocks_total == last
    a_chunk_each = len(list(runtime.pools)) * (2 << 20)  # CUDA maps memory in chunks of 2 MiB
    assert runtime.stats().pool_bytes <= bytes_then // 10 + (a_chunk_each if runtime.device.is_cuda else 0)
    for _ in range(10):
        shadow.step([a])
    shadow.check()
    shadow.grow(20)
    c = run(shadow, 3, 90, steps=10)
    shadow.step([c, a])
    shadow.check()
    assert runtime.stats().graph_launches == (launches + 42 + 10 if mode == "graph" else launches)
    assert addresses(runtime) == before


def test_held_blocks_are_in_the_way_and_nothing_changed(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, num_blocks=20, max_num_blocks=20)
    a, b = run(shadow, 1, 60), run(shadow, 2, 60)
    runtime.retire()
    before, cached = runtime.stats(), runtime.manager.probe_match(prompt(2, 61))
    with pytest.raises(InvalidValue, match="4 blocks with ids from 5 to 19 are in use, so the pools cannot go from 20"):
        runtime.shrink(5)
    assert runtime.stats() == before
    assert runtime.manager.probe_match(prompt(2, 61)) == cached
    shadow.close(a)
    with pytest.raises(InvalidValue, match="4 blocks with ids from 5 to 19"):
        runtime.shrink(5)
    assert runtime.manager.probe_match(prompt(1, 61)) > 0, "what is cached stays where nothing can be given up"
    shadow.step([b])
    runtime.shrink(9)
    shadow.step([b])
    shadow.close(b)
    runtime.shrink(2)
    assert runtime.stats().blocks_total == runtime.stats().blocks_free == 1
    shadow.check()


def test_what_is_cached_in_blocks_that_go_is_evicted_with_what_builds_on_it(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, num_blocks=20, max_num_blocks=40, event_capacity=1000)
    shadow.close(run(shadow, 1, 60))
    shadow.close(run(shadow, 2, 60))
    runtime.retire()
    first = runtime.manager.stats().blocks_cached
    runtime.shrink(6)  # the second one's blocks begin at 5
    assert 0 < runtime.manager.stats().blocks_cached < first
    assert runtime.manager.probe_match(prompt(1, 61)) == 48
    assert runtime.manager.probe_match(prompt(2, 61)) < 48
    shadow.grow(30)
    events = runtime.manager.take_events()
    assert [e.block for e in events if e.kind == EventKind.RESIZED] == [5, 29]
    a = shadow.open(prompt(1, 61))
    assert a.cached_tokens == 48
    shadow.prefill([a])
    shadow.step([a])
    shadow.check()


def test_shrinking_keeps_what_is_in_a_colder_tier(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=12, max_num_blocks=12)
    shadow.close(run(shadow, 1, 60))
    runtime.retire()
    runtime.drain()
    runtime.shrink(2)
    assert runtime.manager.probe_match(prompt(1, 70)) == 48
    shadow.grow(12)
    a = shadow.open(prompt(1, 70))
    runtime.wait_ready(a)
    assert a.counts.cached == (0, 48)
    shadow.prefill([a])
    shadow.check()


def test_shrinking_waits_for_copies_that_nobody_asked_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=12, max_num_blocks=12)
    shadow.mover.late = True
    shadow.close(run(shadow, 1, 60))
    runtime.retire()
    runtime.poll()
    assert shadow.mover.held
    monkeypatch.setattr(time, "sleep", lambda _: shadow.mover.release_all())
    runtime.shrink(2)
    assert runtime.manager.probe_match(prompt(1, 70)) == 48
    shadow.check()


def test_a_transfer_holds_its_blocks_against_shrinking(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=12, max_num_blocks=12)
    cool(runtime, shadow, run(shadow, 1, 60))
    shadow.mover.late = True
    a = shadow.open(prompt(1, 70))
    with pytest.raises(InvalidValue, match="blocks with ids from 2 to 11 are in use"):
        runtime.shrink(2)
    shadow.mover.release_all()
    runtime.wait_ready(a)
    shadow.prefill([a])
    shadow.check()


@pytest.mark.parametrize(
    ("options", "verb", "size", "message"),
    [
        ({"max_num_blocks": 30}, "grow", 24, "24 blocks are no more than the 24 there are"),
        ({"max_num_blocks": 30}, "grow", 31, "num_blocks=31 exceeds the 30 blocks reserved"),
        ({"max_num_blocks": 30}, "shrink", 24, "24 blocks are not within 2 .* and less than the 24 there are"),
        ({"max_num_blocks": 30}, "shrink", 1, "1 blocks are not within 2 .* and less than the 24 there are"),
        ({}, "grow", 30, "24 blocks for good; build the runtime with max_num_blocks"),
        ({}, "shrink", 20, "24 blocks for good; build the runtime with max_num_blocks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, Any], verb: str, size: int, message: str) -> None:
    runtime, shadow = tier_runtime("cpu", **options)
    shadow.close(run(shadow, 1, 60))
    runtime.retire()
    before, cached = runtime.stats(), runtime.manager.stats().blocks_cached
    with pytest.raises(InvalidValue, match=message):
        getattr(runtime, verb)(size)
    assert runtime.stats() == before
    assert runtime.manager.stats().blocks_cached == cached
    with pytest.raises(InvalidValue, match="exceeds the 20 blocks reserved"):
        tier_runtime("cpu", max_num_blocks=20)


def test_memory_that_the_device_does_not_give_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, shadow = tier_runtime("cpu", max_num_blocks=100)
    a = run(shadow, 1, 40)

    def refuse(first: int, end: int) -> None:
        raise OutOfMemory("no room")

    monkeypatch.setattr(runtime.pools.pool(Side.DRAFT, Role.INDEX_K)._memory._range, "map", refuse)
    with pytest.raises(OutOfMemory):
        runtime.grow(100)
    assert runtime.pools.num_blocks == runtime.stats().blocks_total + 1 == 24
    shadow.step([a])
    shadow.check()


@pytest.mark.parametrize("seed", range(3))
def test_sequences_live_through_sizes_that_come_and_go(device: torch.device, seed: int) -> None:
    rng = np.random.default_rng(seed)
    runtime, shadow = tier_runtime(device, HOST if seed else None, num_blocks=16, max_num_blocks=60)
    sizes = refused = 0
    for turn in range(40):
        while len(shadow.sequences) < 3:
            sequence = shadow.open(prompt(1 + turn % 5, int(rng.integers(5, 70))))
            runtime.wait_ready(sequence)
            try:
                shadow.prefill([sequence])
            except OutOfBlocks:
                shadow.close(sequence)
                break
        try:
            for _ in range(int(rng.integers(1, 12))):
                shadow.step(list(shadow.sequences))
        except (OutOfBlocks, InvalidValue):
            shadow.close(next(iter(shadow.sequences)))
        target, now = int(rng.integers(2, 60)), runtime.pools.num_blocks
        try:
            if target > now:
                shadow.grow(target)
            elif target < now:
                runtime.shrink(target)
            sizes += 1
        except InvalidValue:
            refused += 1
            shadow.close(next(iter(shadow.sequences)))
        shadow.check()
    assert sizes > 15
    assert refused > 2
