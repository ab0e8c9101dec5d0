"""A pytest-benchmark timer that reads the GPU's own clock.

pytest-benchmark calls its timer before and after the measured calls and subtracts, so the timer may return any object
with `-`: here each call records a CUDA event on the current stream, and the subtraction waits and gives seconds.
Use it with `benchmark.pedantic` only: the automatic calibration would spend its time on events. Without a GPU it is
`time.perf_counter`.
"""

from __future__ import annotations

import time

import torch

_CYCLES_A_MILLISECOND = 2e6

_calls = 1
_events: list[torch.cuda.Event] = []  # used in turn: making one takes longer than a small graph runs
_ticks = 0


class GpuTick:
    """A point in the current stream's work. Good until the next but two is taken."""

    __slots__ = ("_calls", "_event")

    def __init__(self, calls: int) -> None:
        global _ticks
        if not _events:
            _events.extend(torch.cuda.Event(enable_timing=True) for _ in range(4))
        self._calls = calls
        self._event = _events[_ticks & 3]
        self._event.record()
        _ticks += 1

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


def hold_stream(milliseconds: float) -> None:
    """Keep the current stream busy for about that long, so that what is queued behind it runs without gaps.

    Longer than the host takes to queue it: then the events bracket GPU time alone. Without it, they also bracket the
    host's time between its calls.
    """
    torch.cuda._sleep(int(milliseconds * _CYCLES_A_MILLISECOND))
