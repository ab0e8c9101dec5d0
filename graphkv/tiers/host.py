"""The colder places of blocks: host memory that the device reaches, and the shape of a block in them.

A slot of a colder tier holds one block whole: its bytes of every pool (latent and index K, target and draft), side by
side. So a block is either there with all its parts or not there.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfMemory
from graphkv.layout import PageLayout
from graphkv.pool import Pool

HOST = 1
"""Tier number of host memory. 0 is `graphkv.transfer.DEVICE`."""
DISK = 2
"""Tier number of disk."""

_ALIGNMENT = 16  # of every part, so that copies go in pieces of 16 bytes wherever the pool's own blocks allow it


@dataclass(frozen=True, slots=True)
class UnitPart:
    """What one pool has of a block.

    Attributes:
        layout: bytes of a page.
        pages: pages a block.
        offset: byte of the unit where they begin.
    """

    layout: PageLayout
    pages: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.pages * self.layout.page_bytes


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How a block stands in a slot of a colder tier.

    Attributes:
        parts: one a pool, in the pools' order.
        num_bytes: bytes of a slot.
    """

    parts: tuple[UnitPart, ...]
    num_bytes: int

    @classmethod
    def of(cls, pools: Iterable[Pool]) -> UnitLayout:
        """The unit of these pools."""
        parts: list[UnitPart] = []
        offset = 0
        for pool in pools:
            parts.append(UnitPart(pool.layout, pool.page_scale, offset))
            offset += -(-parts[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(parts), offset)


class HostTier:
    """Slots in host memory of exactly the size asked for, page-locked for a CUDA device, plain for the CPU device.

    The memory is mapped here and locked where it lies: allocators of page-locked memory round up to powers of two.

    Attributes:
        asked_bytes: what was asked for.
        num_bytes: memory taken: whole slots, at most `asked_bytes` (rounded up to a page of the system).
        num_slots: blocks that fit.
        data: u8 [num_slots, unit.num_bytes].
        parts: u8 [num_slots, pages, page_bytes] of each pool, views of `data`.

    Args:
        num_bytes: size of the tier.
        unit: a slot's layout.

    Raises:
        InvalidValue: not one slot fits.
        OutOfMemory: the system does not give or lock that much.
    """

    def __init__(self, num_bytes: int, unit: UnitLayout, device: Device) -> None:
        self.asked_bytes = num_bytes
        self.unit = unit
        self.num_slots = num_bytes // unit.num_bytes
        if self.num_slots < 1:
            raise InvalidValue(
                f"a host tier of {num_bytes} bytes holds no block: one takes {unit.num_bytes} bytes; ask for that much "
                "or have no host tier"
            )
        used = self.num_slots * unit.num_bytes
        self.num_bytes = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(
                f"{self.num_bytes} bytes of host memory cannot be mapped: {error}; ask for less"
            ) from error
        if device.is_cuda:
            _advise(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        device.pin(whole.data_ptr(), self.num_bytes)
        self._release = weakref.finalize(self, _unpin, device, whole)
        device.ledger.pinned_allocations += 1
        device.ledger.pinned_bytes += self.num_bytes
        self.data = whole[:used].view(self.num_slots, unit.num_bytes)
        self.parts = [
            self.data[:, part.offset : part.offset + part.num_bytes].unflatten(1, (part.pages, part.layout.page_bytes))
            for part in unit.parts
        ]

    def slot(self, number: int) -> memoryview:
        """The bytes of one slot."""
        return self.data[number].numpy().data

    def close(self) -> None:
        """Unlock the memory. No transfer may be under way; the tensors must not be used on the device afterwards."""
        self._release()


def _advise(memory: mmap.mmap) -> None:
    """Large pages lock faster; a forked child, which could not use locked pages, gets no copy of them."""
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):  # hints, which a system may lack
            memory.madvise(getattr(mmap, advice))


def _unpin(device: Device, whole: torch.Tensor) -> None:
    with contextlib.suppress(Exception):  # at interpreter exit the driver may be gone before we are
        device.unpin(whole.data_ptr())
