"""Blocks across the bus: DeepSeek-V3.2-sized, 61 layers, about 5 MB a block with BF16 latent and FP8 index K.

`python -m pytest perf/test_tiers.py --benchmark-only -s` prints GB/s (1e9 bytes; both directions added where both run).

- `transfer`: the mover, one way and both ways at once.
- `layers`: what uncoalesced caches do, one copy a layer, role and block.
- `plain`: one pinned copy of the same size, the most that the bus gives.
- `beside`: time of a captured step of matrix products and memory reads, alone and while blocks move both ways.
- `growth`: time to map 1 GiB more behind live pools, and to give it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.pool import Pools
from graphkv.tiers.host import HOST, HostTier, UnitLayout
from graphkv.tiers.mover import TierMover
from graphkv.transfer import DEVICE, CopyJob

pytestmark = pytest.mark.gpu

BLOCKS = 128  # a direction
DIRECTIONS = ("offload", "onload", "both")
FORMATS = {"bf16+fp8": {"latent": "bf16"}, "fp8+fp8": {"latent": "fp8"}}


class World:
    """Pools, a host tier twice as large as what moves one way, and a mover."""

    def __init__(self, fmt: str = "bf16+fp8", reserved: int | None = None) -> None:
        self.device = Device.of("cuda")
        config = CacheConfig.named("deepseek-v3.2", **FORMATS[fmt])
        self.pools = Pools(config, 2 * BLOCKS + 1, self.device, reserved)
        for pool in self.pools:
            pool.blocks[: 2 * BLOCKS + 1].random_(0, 256)
        self.unit = UnitLayout.of(self.pools)
        self.host = HostTier(2 * BLOCKS * self.unit.num_bytes, self.unit, self.device)
        self.steps = self.device.stream()
        self.mover = TierMover(self.pools, self.device, host=self.host, steps=self.steps, limit_s=60)
        self.order = torch.randperm(BLOCKS).tolist()  # so that no copies could be joined into one
        self.device.synchronize()

    def submit(self, direction: str) -> list[int]:
        """Blocks 1.. to the first slots, the last slots to the last blocks; the two halves never touch."""
        tickets, pairs = [], list(enumerate(self.order))
        if direction in ("offload", "both"):
            tickets.append(self.mover.submit([CopyJob(DEVICE, n + 1, HOST, slot, 64) for n, slot in pairs]))
        if direction in ("onload", "both"):
            half = BLOCKS
            tickets.append(
                self.mover.submit([CopyJob(HOST, half + slot, DEVICE, half + 1 + n, 64) for n, slot in pairs])
            )
        return tickets

    def move(self, direction: str) -> None:
        tickets = self.submit(direction)
        torch.cuda.synchronize()
        for ticket in tickets:
            assert self.mover.poll(ticket) == (True,) * BLOCKS

    def num_bytes(self, direction: str) -> int:
        return BLOCKS * self.unit.num_bytes * (2 if direction == "both" else 1)


def measure(benchmark: Any, run: Callable[[], object], moved: int, **facts: Any) -> None:
    """Median of some runs, and the rate of `moved` bytes in each."""
    benchmark.group = f"tiers: {facts['figure']}"
    benchmark.extra_info |= {"table": "tiers", "bytes": moved, **facts}
    benchmark.pedantic(run, rounds=7, warmup_rounds=2)
    if benchmark.stats is not None:
        rate = moved / benchmark.stats.stats.median / 1e9
        benchmark.extra_info["gb_s"] = round(rate, 1)
        print(f"\n{' '.join(map(str, facts.values()))}: {rate:.1f} GB/s")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_transfer(benchmark: Any, fmt: str, direction: str) -> None:
    world = World(fmt)
    moved = world.num_bytes(direction)
    facts = {"figure": "transfer", "format": fmt, "direction": direction}
    measure(benchmark, lambda: world.move(direction), moved, **facts)
    world.mover.close()
    for n in range(0, BLOCKS, 31):
        for part, pool in zip(world.host.parts, world.pools, strict=True):
            slot = world.order[n]
            if direction != "onload":
                assert torch.equal(part[slot].cuda(), pool.block(n + 1))
            if direction != "offload":
                assert torch.equal(part[BLOCKS + slot].cuda(), pool.block(BLOCKS + n + 1))
    world.host.close()


@pytest.mark.parametrize("direction", ["offload", "onload"])
def test_layers(benchmark: Any, direction: str) -> None:
    """One asynchronous copy a page, as a cache with an allocation a layer has to make."""
    world, blocks = World(), 8
    stream = torch.cuda.Stream()

    def move() -> None:
        for part, pool in zip(world.host.parts, world.pools, strict=True):
            for n in range(blocks):
                for layer in range(pool.page_scale):
                    ends = part[n, layer].data_ptr(), pool.blocks[n + 1, layer].data_ptr()
                    target, source = ends if direction == "offload" else ends[::-1]
                    world.device.copy_all([target], [source], [pool.layout.page_bytes], stream.cuda_stream)
        stream.synchronize()

    measure(benchmark, move, blocks * world.unit.num_bytes, figure="layers", direction=direction)
    world.host.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_plain(benchmark: Any, direction: str) -> None:
    world = World()
    size = BLOCKS * world.unit.num_bytes
    there = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = world.host.data.view(-1)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def move() -> None:
        if direction != "onload":
            world.device.copy_all([host.data_ptr()], [there[0].data_ptr()], [size], streams[0].cuda_stream)
        if direction != "offload":
            world.device.copy_all([there[1].data_ptr()], [host[size:].data_ptr()], [size], streams[1].cuda_stream)
        torch.cuda.synchronize()

    measure(benchmark, move, world.num_bytes(direction), figure="plain", direction=direction)
    world.host.close()


def captured_step(stream: Any) -> torch.cuda.CUDAGraph:
    """About 2.5 ms: 12 pairs of a matrix product that fills every SM and a read of 256 MiB."""
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    data = torch.zeros(128 << 20, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        for _ in range(12):
            torch.mm(a, b)
            data.sum()

    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    graph.kept = (a, b, data)  # type: ignore[attr-defined]
    return graph


@pytest.mark.parametrize("transfers", ["none", "both"])
def test_beside(benchmark: Any, transfers: str) -> None:
    """GPU time of a step, with transfers both ways queued behind the first step and still running after the last."""
    world = World()
    graph, steps, rounds = captured_step(world.steps), 5, 7
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, still_running = [], 0

    def run() -> None:
        nonlocal still_running
        with torch.cuda.stream(world.steps):
            graph.replay()
            tickets = [] if transfers == "none" else world.submit("both")
            graph.replay()
            begin.record()
            for _ in range(steps):
                graph.replay()
            end.record()
        end.synchronize()
        still_running += sum(world.mover.poll(ticket) is None for ticket in tickets)
        torch.cuda.synchronize()
        world.mover.overdue()
        times.append(begin.elapsed_time(end) / steps)

    benchmark.group = "tiers: step beside transfers"
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=2)
    median = sorted(times[2:])[(len(times) - 2) // 2]
    facts = {"figure": "beside", "transfers": transfers, "step_ms": round(median, 3)}
    benchmark.extra_info |= {"table": "tiers", **facts, "transfers_outlived_steps": still_running}
    print(f"\nstep beside {transfers}: {median:.3f} ms ({still_running} transfers outlived the steps)")
    world.mover.close()
    world.host.close()


def test_growth(benchmark: Any) -> None:
    """Host time to grow live pools by 1 GiB and to shrink them again, with a step in flight that uses them."""
    world = World(reserved=20_000)
    graph = captured_step(world.steps)
    before, more = world.pools.num_blocks, (1 << 30) // world.unit.num_bytes

    def run() -> None:
        graph.replay()
        world.pools.resize(before + more, lambda _: 0)
        world.pools.resize(before, lambda _: 0)

    measure(benchmark, run, 1 << 30, figure="growth")
    torch.cuda.synchronize()
    world.host.close()
