"""Where transfers run: lanes of work in order, and the record of one transfer on its way."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from graphkv.device import Device, Event, stream_handle

Places = NDArray[np.intp]
"""Slots of all tiers, numbered through: those of a colder tier come after those of the warmer ones."""


class Lane(Protocol):
    """Work that is queued without waiting and done in the order of queueing."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue `work`, which queues copies on torch's current stream; it is called at once or later, once."""

    def wait(self, event: Event) -> None:
        """Let what is queued from here on start only after `event`."""

    def record(self) -> Event:
        """An event after all that is queued so far."""

    def capturing(self) -> bool:
        """Whether the lane takes nothing but work of a graph that is being captured."""


class StreamLane:
    """A stream of a CUDA device; on the CPU device, which has none, work is done when `run` returns."""

    def __init__(self, device: Device, stream: torch.cuda.Stream | None) -> None:
        self._device, self._stream = device, stream
        self._handle = stream_handle(stream)

    def run(self, work: Callable[[], None]) -> None:
        with self._device.running_on(self._stream):
            work()

    def wait(self, event: Event) -> None:
        event.make_wait(self._handle)

    def record(self) -> Event:
        event = self._device.event()
        event.record(self._handle)
        return event

    def capturing(self) -> bool:
        return self._device.capturing(self._handle)


class State(Enum):
    """Of a transfer: behind others that must end or be queued first; queued or at work; over."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Transfer:
    """One call of `submit`.

    Attributes:
        tiers: source and target tier.
        pairs: intp [N, 2], source and target slot of each job.
        reads, writes: the same slots as places.
        lane: where its copies are queued, None for files.
        since: `time.monotonic()` of its submission.
        fence: what was submitted to the steps' stream before it; None for files.
        after: earlier transfers that touch its slots.
        ok: whether each job brought, or will bring, the right bytes.
        event: the end of its copies on `lane`.
        left: files still to be written or read.
    """

    ticket: int
    tiers: tuple[int, int]
    pairs: NDArray[np.intp]
    reads: Places
    writes: Places
    lane: Lane | None
    since: float
    fence: Event | None = None
    after: list[Transfer] = field(default_factory=list)
    ok: list[bool] = field(default_factory=list)
    state: State = State.WAITING
    event: Event | None = None
    left: int = 0

    def can_start(self) -> bool:
        """Streams wait for each other by themselves; for files, and before files, the host sees the end first."""
        return all(
            other.state is State.ENDED
            or (other.state is State.RUNNING and self.lane is not None and other.lane is not None)
            for other in self.after
        )

    def has_ended(self) -> bool:
        """Never waits."""
        return self.left == 0 if self.event is None else self.event.done()

    def __str__(self) -> str:
        pairs = ", ".join(f"{source} to {target}" for source, target in self.pairs[:4].tolist())
        more = f" and {len(self.pairs) - 4} more" if len(self.pairs) > 4 else ""
        return f"tier {self.tiers[0]} to {self.tiers[1]}, slots {pairs}{more}"


class FileWorkers:
    """Threads that write and read files. They make no CUDA call.

    Attributes:
        reasons: why jobs failed, the last hundred.
    """

    def __init__(self, count: int) -> None:
        self.reasons: deque[str] = deque(maxlen=100)
        self._tasks: queue.SimpleQueue[tuple[Transfer, int, Callable[[], str]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        arguments = (self._tasks, self._lock, self.reasons)
        for number in range(count):  # daemons: a disk that hangs must not keep the process
            threading.Thread(target=_work, args=arguments, name=f"graphkv-files-{number}", daemon=True).start()
        self._stop = weakref.finalize(self, _stop, self._tasks, count)

    def add(self, transfer: Transfer, tasks: list[Callable[[], str]]) -> None:
        """Let `tasks[i]` decide job i: it returns "" if the bytes are right, else why not."""
        transfer.left = len(tasks)
        for number, task in enumerate(tasks):
            self._tasks.put((transfer, number, task))

    def close(self) -> None:
        """The threads end after what is queued."""
        self._stop()


def _work(
    tasks: queue.SimpleQueue[tuple[Transfer, int, Callable[[], str]] | None],
    lock: threading.Lock,
    reasons: deque[str],
) -> None:
    while (item := tasks.get()) is not None:
        transfer, number, task = item
        try:
            reason = task()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            reasons.append(reason)
        transfer.ok[number] = not reason
        with lock:
            transfer.left -= 1
        del item, transfer, task  # a thread that waits keeps nothing alive


def _stop(tasks: queue.SimpleQueue[tuple[Transfer, int, Callable[[], str]] | None], count: int) -> None:
    with contextlib.suppress(Exception):  # at interpreter exit the queue may be gone
        for _ in range(count):
            tasks.put(None)
