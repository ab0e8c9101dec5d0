"""A whole decode step around a model that only stores: graph against eager, and against the engines' way.

- `host`: time that the caller of `step` is kept, results of older steps already read.
- `wall`: time per step of a loop that keeps two steps in flight and reads each step's tokens.
- `gpu`: from event to event around one step queued behind other work, so without the host's time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from perf.engine_way import check_agreement
from perf.model import STORES, EngineLoop, StoreModel
from perf.timer import count_calls, gpu_timer, hold_stream, wall_timer
from perf.world import steady_runtime, synchronize

WAYS = ("graph-copy", "graph-pull", "eager", "engine")
SHAPES = [pytest.param(8, "cpu", id="8-cpu")] + [
    pytest.param(rows, "cuda", id=str(rows), marks=pytest.mark.gpu) for rows in (1, 32, 256)
]
COLUMNS, ROOM = 256, 4096  # contexts up to 12,288 tokens in tables of 16,384
LOOP = 20


class Loop:
    """One of the ways, behind three calls."""

    def __init__(self, way: str, rows: int, device: str) -> None:
        model = StoreModel(STORES, max(rows, 64), device)
        mode = "eager" if way == "eager" else "graph"
        upload = "pull" if way == "graph-pull" else "copy"
        runtime, batch = steady_runtime(
            rows, device, config=STORES, model=model, columns=COLUMNS, room=ROOM, mode=mode, upload=upload
        )
        self.device, self.runtime, self.check = device, runtime, runtime.check
        self.step: Callable[[], object]
        if way == "engine":
            check_agreement(runtime)
            engine = EngineLoop(runtime, model)
            self.step, self.stream, self.settle = engine.step, engine.stream, engine.read
        else:
            self.step, self.stream, self.settle = lambda: runtime.step(batch), runtime.stream, runtime.retire

    def idle(self) -> None:
        self.settle()
        synchronize(self.device)

    def held(self) -> None:
        self.idle()
        hold_stream(4)

    def many(self) -> None:
        """Steps in a loop; `DecodeRuntime.step` reads the step before the last, the engine loop the last."""
        for _ in range(LOOP):
            self.step()
        self.settle()

    def timed(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def describe(benchmark: Any, figure: str, way: str, rows: int, device: str) -> None:
    benchmark.group = f"{figure} time of a whole step, batch {rows}, {device}"
    benchmark.extra_info |= {"table": "step", "figure": figure, "way": way, "rows": rows, "device": device}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "device"), SHAPES)
def test_step_host(benchmark: Any, way: str, rows: int, device: str) -> None:
    loop = Loop(way, rows, device)
    describe(benchmark, "host", way, rows, device)
    benchmark.pedantic(loop.step, rounds=200 if device == "cuda" else 5, warmup_rounds=5, setup=loop.idle)
    loop.idle()
    loop.check()


@pytest.mark.benchmark(timer=wall_timer)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "device"), SHAPES)
def test_step_wall(benchmark: Any, way: str, rows: int, device: str) -> None:
    loop = Loop(way, rows, device)
    describe(benchmark, "wall", way, rows, device)
    count_calls(LOOP)
    benchmark.pedantic(loop.many, rounds=30 if device == "cuda" else 1, warmup_rounds=1, setup=loop.idle)
    loop.check()


@pytest.mark.gpu
@pytest.mark.benchmark(timer=gpu_timer)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "device"), SHAPES[1:])
def test_step_gpu(benchmark: Any, way: str, rows: int, device: str) -> None:
    loop = Loop(way, rows, device)
    describe(benchmark, "gpu", way, rows, device)
    with loop.timed():
        benchmark.pedantic(loop.step, rounds=200, warmup_rounds=10, setup=loop.held)
    loop.idle()
    loop.check()
