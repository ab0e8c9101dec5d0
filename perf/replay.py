"""Graphs for the suites to replay: calls captured back to back, and the empty graph under all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from graphkv import kernels
from graphkv.device import Device, stream_handle
from graphkv.graph import GraphSet


class Replay:
    """Some calls, captured as one straight-line graph on a stream of their own.

    Args:
        calls: what to capture, in order; each takes the stream's raw handle.
        warm: run every call once before, so that nothing compiles or allocates inside the capture.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[int], object]],
        *,
        stream: torch.cuda.Stream | None = None,
        warm: bool = True,
    ) -> None:
        device = Device.of("cuda")
        self.calls = calls
        self.stream = device.stream() if stream is None else stream
        torch.cuda.synchronize()
        if warm:
            with torch.cuda.stream(self.stream):
                self._run(1)
            torch.cuda.synchronize()
        self._graphs = GraphSet((1,), device, self.stream)
        self._graphs.capture(self._run)

    def _run(self, bucket: int) -> None:
        for call in self.calls:
            call(stream_handle(self.stream))

    def launch(self) -> None:
        """Queue one replay."""
        self._graphs.launch(1)

    def timed(self) -> torch.cuda.StreamContext:
        """Inside, the GPU timer's events go to the stream of the replays."""
        return torch.cuda.stream(self.stream)


def empty_replay() -> Replay:
    """A graph of one node that does nothing."""
    with _own_kernels():
        nop = kernels.load("nop.cu", "nop", "P")
    nothing = nop.pack(None)
    return Replay([lambda stream: nop.launch(1, 32, nothing, stream)])


@contextmanager
def _own_kernels() -> Iterator[None]:
    """`graphkv.kernels` reads this folder instead of its own."""
    before = os.environ.get("GRAPHKV_KERNEL_DIR")
    os.environ["GRAPHKV_KERNEL_DIR"] = str(Path(__file__).parent)
    try:
        yield
    finally:
        if before is None:
            del os.environ["GRAPHKV_KERNEL_DIR"]
        else:
            os.environ["GRAPHKV_KERNEL_DIR"] = before
