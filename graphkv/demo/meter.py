"""What a step costs: host time, GPU time and allocations, measured around each submission."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from graphkv.runtime import DecodeRuntime


class Meter:
    """Measures steps of one runtime.

    Attributes:
        host_us: time of each submission on the host, in microseconds.
        allocations: allocations made by the submissions: graphkv's ledger and, on CUDA, every request to torch's
            device and pinned allocators, also those that their caches served.
    """

    def __init__(self, runtime: DecodeRuntime) -> None:
        self.device = runtime.device
        self.host_us: list[float] = []
        self.allocations = 0
        self._stream = runtime.stream
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def measure(self, submit: Callable[[], int]) -> int:
        """Calls `submit` and returns what it returns."""
        before = self._allocated()
        events = self._record()
        start = time.perf_counter_ns()
        step = submit()
        self.host_us.append((time.perf_counter_ns() - start) / 1e3)
        if events is not None:
            events[1].record(self._stream)
            self._events.append(events)
        self.allocations += self._allocated() - before
        return step

    def gpu_us(self) -> float | None:
        """Median time between the events around a step, in microseconds; None on the CPU device."""
        if not self._events:
            return None
        self.device.synchronize()
        times: list[float] = [first.elapsed_time(last) * 1e3 for first, last in self._events]
        return median(times)

    def _record(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if self._stream is None:
            return None
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record(self._stream)
        return events

    def _allocated(self) -> int:
        own = self.device.ledger.allocations
        if not self.device.is_cuda:
            return own
        on_device: int = torch.cuda.memory_stats(self.device.torch)["allocation.all.allocated"]
        pinned: int = sum(n for key, n in torch.cuda.host_memory_stats().items() if _counts_pinned(key))
        return own + on_device + pinned


def _counts_pinned(key: str) -> bool:
    """Whether a key of torch's pinned-memory statistics counts blocks handed out or made; releases differ in names."""
    return key == "num_host_alloc" or (key.endswith(".allocated") and "bytes" not in key)
