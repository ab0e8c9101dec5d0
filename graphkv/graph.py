"""Capture and replay: one graph a bucket, captured once, launched with one driver call.

On the CPU device a "graph" is the step function bound to its fixed buffers and called again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphkv.device import Device, check_cuda, cuda_driver, stream_handle
from graphkv.errors import InvalidValue


class CapturedStep:
    """One captured graph, with everything alive that it points to."""

    def __init__(self, graph: torch.cuda.CUDAGraph, keep: object) -> None:
        self._graph = graph
        self._keep = keep
        driver = cuda_driver()
        self._launch = driver.cuGraphLaunch
        self._exec = driver.CUgraphExec(graph.raw_cuda_graph_exec())
        self.nodes: int = check_cuda(driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph())))[1]

    def launch(self, stream: int) -> None:
        check_cuda(self._launch(self._exec, stream))


class BoundStep:
    """The CPU device's stand-in for a graph: the same function over the same buffers."""

    nodes = 0

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def launch(self, stream: int) -> None:
        self._run()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No object in a cycle dies inside: destroying an old graph or event while a stream captures ends the capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphSet:
    """The captured steps by bucket, sharing one private memory pool.

    Args:
        buckets: batch sizes to capture, in any order; captured largest first.
    """

    def __init__(self, buckets: tuple[int, ...], device: Device, stream: torch.cuda.Stream | None) -> None:
        self.buckets = tuple(sorted(set(buckets)))
        self._device = device
        self._stream = stream
        self._steps: dict[int, CapturedStep | BoundStep] = {}
        self.launches = 0
        """Launches since construction: one a decode step."""

    def bucket_for(self, rows: int) -> int:
        """The smallest bucket that holds `rows` rows."""
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise InvalidValue(f"a batch of {rows} rows does not fit the largest bucket of {self.buckets[-1]}")

    def capture(self, run: Callable[[int], Any]) -> None:
        """Capture `run(bucket)` for every bucket. `run` has been warmed up: it allocates and compiles nothing new.

        An error leaves no bucket captured, so that a later attempt starts from the same state.
        """
        steps: dict[int, CapturedStep | BoundStep] = {}
        pool = torch.cuda.graph_pool_handle() if self._device.is_cuda else None
        for bucket in reversed(self.buckets):
            bound = functools.partial(run, bucket)
            steps[bucket] = self._captured(bound, pool) if self._device.is_cuda else BoundStep(bound)
        self._steps = steps

    def _captured(self, run: Callable[[], Any], pool: Any) -> CapturedStep:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with (
            _no_garbage_collection(),
            self._device.guard(),
            torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            kept = run()
        graph.instantiate()
        return CapturedStep(graph, kept)

    @property
    def nodes(self) -> dict[int, int]:
        """Graph nodes by bucket, 0 on the CPU device."""
        return {bucket: step.nodes for bucket, step in self._steps.items()}

    def launch(self, bucket: int) -> None:
        """Replay one bucket's graph on the compute stream."""
        self._steps[bucket].launch(stream_handle(self._stream))
        self.launches += 1
