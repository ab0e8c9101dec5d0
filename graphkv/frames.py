"""Two frames: all the host writes for one step, preallocated twice, so that it never touches a byte still to be read.

A frame is a pinned host arena, a device arena and two events. The front frame is in flight, the back one is being
written; `swap` exchanges the two references. `acquire` is the only wait of a step: until the step that last used the
back frame has retired.
"""

from __future__ import annotations

from typing import Literal

import torch

from graphkv.device import Device, stream_handle
from graphkv.errors import InvalidValue
from graphkv.packet import PacketSize, PacketWriter

Upload = Literal["copy", "pull"]
"""How a packet reaches device memory: an async copy on the upload stream that overlaps the replay in flight, or a first
node of the graph that reads the pinned arena (no copy call, no event; a little more GPU time)."""


class Frame:
    """One full set of staging. Its parity is the parity of every step number it carries."""

    def __init__(self, parity: int, size: PacketSize, device: Device) -> None:
        self.parity = parity
        self.host = device.pinned(size.words, torch.int32)
        self.device = device.zeros(size.words, torch.int32) if device.is_cuda else self.host
        self.writer = PacketWriter(self.host.numpy(), size)
        self.uploaded = device.event()
        self.done = device.event()
        self.step = 0
        """The last step submitted with this frame, 0 before the first."""


class Frames:
    """The pair. Step n uses the frame of parity n & 1, which is what the latch looks for.

    Args:
        size: packet capacity.
        upload: see `Upload`.
        compute_stream: the stream that replays run on.
    """

    def __init__(
        self, size: PacketSize, device: Device, upload: Upload, compute_stream: torch.cuda.Stream | None
    ) -> None:
        if upload not in ("copy", "pull"):
            raise InvalidValue(f"upload must be 'copy' or 'pull', got {upload!r}")
        self.size = size
        self._upload = upload
        self._device = device
        self._compute = stream_handle(compute_stream)
        self._upload_stream = device.stream() if device.is_cuda and upload == "copy" else None
        self._upload_handle = stream_handle(self._upload_stream)
        self.even, self.odd = Frame(0, size, device), Frame(1, size, device)
        self.front, self.back = self.even, self.odd  # step 1 is odd

    def of(self, step: int) -> Frame:
        """The frame that carries, or carried, `step`."""
        return self.odd if step & 1 else self.even

    @property
    def device_arenas(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the latch reads packets, by parity."""
        return self.even.device, self.odd.device

    @property
    def host_arenas(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where the graph pulls packets from, by parity; None where the host copies them."""
        return (self.even.host, self.odd.host) if self._upload == "pull" and self._device.is_cuda else None

    def forget(self) -> None:
        """Trust nothing that an earlier packet left in the arenas."""
        for frame in (self.even, self.odd):
            frame.writer.amended()

    def publish(self, num_bytes: int) -> None:
        """Send the back frame's packet on its way; whatever is launched on the compute stream next finds it there."""
        if self._upload_stream is None:
            return
        frame = self.back
        self._device.copy_to_device(frame.device.data_ptr(), frame.host.data_ptr(), num_bytes, self._upload_handle)
        frame.uploaded.record(self._upload_handle)
        frame.uploaded.make_wait(self._compute)

    def submitted(self, step: int) -> None:
        """The back frame's step was launched: note it and swap."""
        self.back.step = step
        self.back.done.record(self._compute)
        self.front, self.back = self.back, self.front
