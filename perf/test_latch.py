"""Metadata in the graph: GPU time that the step protocol's nodes add to a replay.

Two figures, each from event to event with the packet published before, each less `test_empty_graph` timed the same way:

- `isolated`: everything is idle when the replay is launched. The prototype's figures were taken so on an H200 (at batch
  256 it added 3.0 us with the copy, 7.0 with the pull, and 1.5 to 1.9 more with `advance`); host time between launch
  and event can hide up to a few microseconds.
- `queued`: the replay waits behind other work when it is launched, as in a loop that keeps the GPU busy.
"""

from __future__ import annotations

from collections.abc import Callable
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
from perf.engine_way import beside, check_agreement
from perf.replay import Replay, empty_replay
from perf.timer import gpu_timer, hold_stream
from perf.world import steady_runtime

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
FIGURES = ("isolated", "queued")


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
        self.live = {Side.TARGET: (LiveSet(Side.TARGET, shape, device),)}
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


def measure(benchmark: Any, replay: Replay, figure: str, ready: Callable[[], None], **facts: Any) -> None:
    def setup() -> None:
        ready()
        if figure == "queued":
            hold_stream(0.3)

    benchmark.group = f"metadata in the graph, {figure}"
    benchmark.extra_info |= {"table": "latch", "figure": figure, **facts}
    with replay.timed():
        benchmark.pedantic(replay.launch, rounds=ROUNDS, warmup_rounds=WARM_UP, setup=setup)


@pytest.mark.parametrize("figure", FIGURES)
def test_empty_graph(benchmark: Any, figure: str) -> None:
    measure(benchmark, empty_replay(), figure, torch.cuda.synchronize, nodes="empty")


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


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("upload", ["copy", "pull"])
@pytest.mark.parametrize(("rows", "columns", "next_n", "full", "nodes"), CASES)
def test_latch(
    benchmark: Any, rows: int, columns: int, next_n: int, full: bool, nodes: str, upload: str, figure: str
) -> None:
    world = LatchWorld(rows, columns, next_n, upload, full)
    advance = nodes == "latch+advance"
    facts: dict[str, Any] = {"nodes": nodes, "upload": upload, "rows": rows, "columns": columns, "next_n": next_n}
    facts["contexts"] = "up to the width" if full else "below 512"
    probe = PROBE_US.get((upload, rows, columns, next_n)) if full else None
    if probe is not None and figure == "isolated":
        facts["probe_us"] = round(probe + PROBE_ADVANCE_US * advance, 1)
    measure(benchmark, world.replay(advance), figure, world.publish, **facts)
    world.check()


@pytest.mark.parametrize("rows", [1, 32, 256, 1024])
def test_eager_metadata(benchmark: Any, rows: int) -> None:
    """GPU time of the same metadata by fresh uploads and a chain of torch ops, queued behind other work."""
    runtime, _ = steady_runtime(rows, "cuda")
    check_agreement(runtime)
    baseline = beside(runtime)

    def setup() -> None:
        torch.cuda.synchronize()
        hold_stream(4)

    benchmark.group = "metadata in the graph, queued"
    benchmark.extra_info |= {"table": "chain", "rows": rows}
    benchmark.pedantic(
        lambda: baseline.derive(*baseline.upload()), rounds=ROUNDS // 3, warmup_rounds=WARM_UP, setup=setup
    )
