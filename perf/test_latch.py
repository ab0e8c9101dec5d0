"""Metadata in the graph: GPU time that the step protocol's nodes add to a replay.

Each replay is isolated: its packet is published and everything is idle before it starts, and it is timed from event to
event. What the nodes add is that less `test_empty_graph`, timed the same way in the same run. Columns "probe" are what
the prototype took on an H200 (`latch` with the copy 3.0, with the pull 7.0 at batch 256; `advance` 1.5 to 1.9 more).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from graphkv import packet as pk
from graphkv.device import Device
from graphkv.frames import Frames
from graphkv.latch import CudaNodes, Ring
from graphkv.layout import IndexKFormat, Side, index_k_layout
from graphkv.metadata import LiveSet, LiveShape, StepState
from perf.replay import Replay, empty_replay
from perf.timer import gpu_timer

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=gpu_timer)]

BLOCK_SIZE, LAYERS = 64, 61
ROUNDS, WARM_UP = 300, 30
PROBE_US = {  # (upload, rows, columns, next_n): added by the prototype's latch
    ("copy", 1, 2048, 1): 1.0,
    ("copy", 32, 2048, 1): 1.8,
    ("copy", 256, 2048, 1): 3.0,
    ("copy", 512, 2048, 1): 4.8,
    ("copy", 1024, 2048, 1): 8.4,
    ("copy", 256, 512, 1): 2.2,
    ("copy", 256, 16384, 1): 13.8,
    ("copy", 256, 2048, 4): 2.7,
    ("pull", 1, 2048, 1): 3.9,
    ("pull", 32, 2048, 1): 4.6,
    ("pull", 256, 2048, 1): 7.0,
    ("pull", 512, 2048, 1): 10.0,
    ("pull", 1024, 2048, 1): 16.1,
    ("pull", 256, 512, 1): 6.0,
    ("pull", 256, 16384, 1): 17.6,
    ("pull", 256, 2048, 4): 6.9,
}
PROBE_ADVANCE_US = 1.7


class LatchWorld:
    """The nodes of one batch shape alone, with frames to publish packets through.

    Args:
        full: contexts are uniform over the table's width; otherwise they are below 512 tokens.
    """

    def __init__(self, rows: int, columns: int, next_n: int, upload: str, full: bool) -> None:
        self.rows, self.next_n, self.step = rows, next_n, 0
        self.device = device = Device.of("cuda")
        self.stream = device.stream()
        layout = index_k_layout(IndexKFormat.FP8, 128, BLOCK_SIZE)
        shape = LiveShape(rows, rows * next_n, columns, BLOCK_SIZE, LAYERS, LAYERS, layout, device.sm_count)
        self.live = {Side.TARGET: LiveSet(Side.TARGET, shape, device)}
        self.state = StepState(rows + 8, columns, next_n, device)
        ring = Ring(rows, next_n, device)
        size = pk.PacketSize(rows=rows, edits=rows, tokens=rows * next_n)
        self.frames = Frames(size, device, upload, self.stream)
        self.nodes = CudaNodes(self.live, self.state, ring, self.frames.device_arenas, self.frames.host_arenas)
        self.output = device.zeros((rows, next_n), torch.int64)
        rng = np.random.default_rng(0)
        self.batch = rng.permutation(rows + 8)[:rows].astype(np.int32)
        top = columns * BLOCK_SIZE - (ROUNDS + WARM_UP + 8) * next_n
        length = rng.integers(1, top if full else min(top, 512), rows + 8)
        self.state.length.copy_(torch.from_numpy(length.astype(np.int32)))
        self.state.block_table.copy_(torch.from_numpy(rng.integers(1, 30000, (rows + 8, columns)).astype(np.int32)))

    def replay(self, advance: bool) -> Replay:
        """latch (with pull before it where the graph pulls), and advance behind it."""
        calls = [lambda stream: self.nodes.latch(self.rows, self.rows * self.next_n, stream)]
        if advance:
            calls.append(lambda stream: self.nodes.advance(self.rows, self.output, None, False, stream))
        return Replay(calls, stream=self.stream, warm=False)

    def publish(self) -> None:
        """The next step's packet, and a quiet device."""
        self.step += 1
        writer = self.frames.back.writer
        writer.records(self.batch, self.next_n)
        tokens = self.rows * self.next_n
        used = writer.seal(self.step, rows=self.rows, tokens=tokens, edits=0, token_words=0, bucket=self.rows)
        self.frames.publish(used)
        self.frames.submitted(self.step)
        self.device.synchronize()

    def check(self) -> None:
        """Every published packet was accepted."""
        self.device.synchronize()
        assert self.state.fault.tolist()[0] == 0
        assert self.state.step.tolist() == [self.step]


def test_empty_graph(benchmark: Any) -> None:
    replay = empty_replay()
    benchmark.group = "metadata in the graph"
    benchmark.extra_info |= {"table": "latch", "nodes": "empty"}
    with replay.timed():
        benchmark.pedantic(replay.launch, rounds=ROUNDS, warmup_rounds=WARM_UP, setup=torch.cuda.synchronize)


CASES = [
    *((rows, 2048, 1, True, nodes) for rows in (1, 32, 256, 512, 1024) for nodes in ("latch", "latch+advance")),
    (256, 512, 1, True, "latch"),
    (256, 16384, 1, True, "latch"),
    (256, 2048, 4, True, "latch"),
    (256, 2048, 4, True, "latch+advance"),
    (256, 2048, 1, False, "latch"),
    (256, 16384, 1, False, "latch"),
    (1024, 2048, 1, False, "latch"),
]


@pytest.mark.parametrize("upload", ["copy", "pull"])
@pytest.mark.parametrize(("rows", "columns", "next_n", "full", "nodes"), CASES)
def test_latch(benchmark: Any, rows: int, columns: int, next_n: int, full: bool, nodes: str, upload: str) -> None:
    world = LatchWorld(rows, columns, next_n, upload, full)
    advance = nodes == "latch+advance"
    replay = world.replay(advance)
    probe = PROBE_US.get((upload, rows, columns, next_n)) if full else None
    benchmark.group = "metadata in the graph"
    benchmark.extra_info |= {"table": "latch", "nodes": nodes, "upload": upload, "rows": rows, "columns": columns}
    benchmark.extra_info |= {"next_n": next_n, "contexts": "up to the width" if full else "below 512"}
    if probe is not None:
        benchmark.extra_info["probe_us"] = round(probe + PROBE_ADVANCE_US * advance, 1)
    with replay.timed():
        benchmark.pedantic(replay.launch, rounds=ROUNDS, warmup_rounds=WARM_UP, setup=world.publish)
    world.check()
