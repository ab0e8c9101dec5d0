"""A pytest-benchmark timer that reads the GPU's own clock.

pytest-benchmark calls its timer before and after the measured calls and subtracts, so the timer may return any object
with `-`: here each call records a CUDA event on the current stream, and the subtraction waits and gives seconds.
Use it with `benchmark.pedantic` only: the automatic calibration would spend its time on events. Without a GPU it is
`time.perf_counter`.
"""

from __future__ import annotations

import time

import torch

_calls = 1


class GpuTick:
    """A point in the current stream's work."""

    __slots__ = ("_calls", "_event")

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, start: GpuTick) -> float:
        """Seconds of GPU time from `start` to here for each of the calls between them."""
        self._event.synchronize()
        return start._event.elapsed_time(self._event) * 1e-3 / self._calls


class HostTick:
    """The same on a machine without a GPU."""

    __slots__ = ("_calls", "_time")

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._time = time.perf_counter()

    def __sub__(self, start: HostTick) -> float:
        return (self._time - start._time) / self._calls


def gpu_timer() -> GpuTick | HostTick:
    """The timer to name in `@pytest.mark.benchmark(timer=gpu_timer)`."""
    return GpuTick(_calls) if torch.cuda.is_available() else HostTick(_calls)


def wall_timer() -> HostTick:
    """Host time, for measured functions that make several calls, see `count_calls`."""
    return HostTick(_calls)


def count_calls(calls: int) -> None:
    """One measured call does the work of `calls`: report the time of each. Reset to 1 before every benchmark."""
    global _calls
    _calls = calls
