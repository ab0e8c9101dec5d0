"""A small cache with its colder tiers, and lanes that a test can hold back, for the tests of movers.

On the CPU device the lanes are simulated: queues of work and of waits for events, which a test empties in any order
that the events allow. What a missing wait could spoil on a GPU, some order of these queues spoils as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphkv.config import CacheConfig, LayerSpec
from graphkv.device import Device, Event
from graphkv.pool import Pools
from graphkv.tiers.disk import DiskTier, FileOps
from graphkv.tiers.host import DISK, HOST, HostTier, UnitLayout
from graphkv.tiers.lanes import Lane, StreamLane
from graphkv.tiers.mover import TierMover
from graphkv.transfer import DEVICE, CopyJob

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SPIN_CYCLES = 100_000_000  # about 50 ms of a GPU


def tier_config(**changes: Any) -> CacheConfig:
    """Three target layers, of which one owns no index K, and a draft layer; every pool has another block size."""
    options: dict[str, Any] = {
        "layers": (LayerSpec(), LayerSpec("shared"), LayerSpec()),
        "draft_layers": (LayerSpec(),),
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "index_topk": 4,
        "block_size": 16,
    }
    return CacheConfig(**{**options, **changes})


class SimEvent(Event):
    """Of a simulated lane: done once the lane came to it."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed


class SimLane:
    """Work, waits and events in order; nothing happens until `step`."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None] | tuple[str, SimEvent]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        self.queue.append(("wait", event))

    def record(self) -> Event:
        event = SimEvent()
        self.queue.append(("record", event))
        return event

    def capturing(self) -> bool:
        return False

    def step(self) -> bool:
        """Do the first thing queued; False if there is none or it must wait."""
        if not self.queue:
            return False
        head = self.queue[0]
        if isinstance(head, tuple) and head[0] == "wait" and not head[1].passed:
            return False
        self.queue.popleft()
        if not isinstance(head, tuple):
            head()
        elif head[0] == "record":
            head[1].passed = True
        return True


class TierWorld:
    """Pools with random bytes, tiers and a mover; on CUDA with streams that a test can stall.

    Args:
        simulate: on the CPU device, simulated lanes instead of work that is done at once.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        num_blocks: int = 9,
        host_slots: int = 5,
        disk: Path | None = None,
        disk_slots: int = 4,
        files: FileOps | None = None,
        simulate: bool = False,
        config: CacheConfig | None = None,
        reserved: int | None = None,
        **options: Any,
    ) -> None:
        self.device = Device.of(device)
        self.config = config or tier_config()
        self.pools = Pools(self.config, num_blocks, self.device, reserved)
        self.unit = UnitLayout.of(self.pools)
        self.host = HostTier(host_slots * self.unit.num_bytes, self.unit, self.device)
        self.disk = None
        if disk is not None:
            one = DiskTier(disk, 2 * self.unit.num_bytes + 8192, self.unit)
            self.disk = DiskTier(disk, disk_slots * one.file_bytes, self.unit, files)
            one.close()
        self.lanes: dict[str, Any] = {}
        self.streams: dict[str, torch.cuda.Stream] = {}
        self._simulate = simulate and not self.device.is_cuda
        self.mover = TierMover(
            self.pools, self.device, host=self.host, disk=self.disk, lane_of=self._lane, **{"limit_s": 20.0, **options}
        )
        self.rng = np.random.default_rng(7)
        self._kept: list[Any] = []
        for block in range(1, num_blocks):
            self.put(block, self.random_block())
        self.device.synchronize()

    def _lane(self, name: str) -> Lane:
        if self.device.is_cuda:
            self.streams[name] = self.device.stream()
        lane = SimLane() if self._simulate else StreamLane(self.device, self.streams.get(name))
        self.lanes[name] = lane
        return lane

    def stall(self, name: str, times: int = 1) -> None:
        """Keep a lane's stream busy, so that what is queued on it later stays pending while the host runs on."""
        if self.device.is_cuda:
            with torch.cuda.stream(self.streams[name]):
                for _ in range(times):
                    torch.cuda._sleep(SPIN_CYCLES)

    def random_block(self) -> list[Bytes]:
        """Bytes for one block, one array [pages, page_bytes] a pool."""
        return [self.rng.integers(0, 256, (pool.page_scale, pool.layout.page_bytes), np.uint8) for pool in self.pools]

    def put(self, block: int, data: list[Bytes]) -> None:
        """Write a block's bytes at once."""
        for pool, part in zip(self.pools, data, strict=True):
            pool.block(block).copy_(torch.from_numpy(part))

    def get(self, block: int) -> list[Bytes]:
        """A block's bytes, now."""
        return [pool.block(block).cpu().numpy().copy() for pool in self.pools]

    def get_slot(self, slot: int) -> list[Bytes]:
        """A host slot's bytes, now."""
        return [part[slot].numpy().copy() for part in self.host.parts]

    def step_writes(self, block: int, data: list[Bytes]) -> None:
        """A step that writes a whole block: work on the steps' lane."""
        tensors = [torch.from_numpy(part).to(self.device.torch) for part in data]
        self._kept.append(tensors)  # the allocator does not know of the other stream's use

        def work() -> None:
            for pool, part in zip(self.pools, tensors, strict=True):
                pool.block(block).copy_(part)

        self.lanes["steps"].run(work)

    def hurry(self, name: str) -> None:
        """Let a simulated lane run ahead of the others as far as the events allow."""
        if self._simulate:
            while self.lanes[name].step():
                pass

    def run_all(self) -> None:
        """Empty the simulated lanes, in turn; nothing to do elsewhere."""
        if self._simulate:
            while any(lane.step() for lane in self.lanes.values()):
                pass

    def finish(self) -> None:
        """Every transfer ends, and everything queued is done."""
        self.run_all()
        while self.mover.stats().waiting + self.mover.stats().running:
            self.mover.overdue()
            self.run_all()
        self.device.synchronize()


def jobs(source_tier: int, target_tier: int, *pairs: tuple[int, int], tokens: int = 16) -> list[CopyJob]:
    return [CopyJob(source_tier, source, target_tier, target, tokens) for source, target in pairs]


def offload(*pairs: tuple[int, int]) -> list[CopyJob]:
    return jobs(DEVICE, HOST, *pairs)


def onload(*pairs: tuple[int, int]) -> list[CopyJob]:
    return jobs(HOST, DEVICE, *pairs)


def store(*pairs: tuple[int, int]) -> list[CopyJob]:
    return jobs(HOST, DISK, *pairs)


def load(*pairs: tuple[int, int]) -> list[CopyJob]:
    return jobs(DISK, HOST, *pairs)


def within(*moves: tuple[int, int, int]) -> list[CopyJob]:
    """Copies of leading tokens from block to block."""
    return [CopyJob(DEVICE, source, DEVICE, target, tokens) for source, target, tokens in moves]


def same(one: list[Bytes], other: list[Bytes]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
