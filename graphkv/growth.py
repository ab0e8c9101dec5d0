"""Memory that grows and shrinks at a fixed address: a reserved range, of which a leading part is mapped.

A captured graph keeps the addresses it has seen, so a pool that is to grow after capture reserves the addresses of its
largest size first. Memory stands behind the mapped part only: on CUDA by the driver's virtual memory calls, chunk by
chunk; on the CPU device by pages of an anonymous mapping, which come on first touch and go when the range shrinks.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Any, Protocol

import torch

from graphkv.device import Device, check_cuda, cuda_driver
from graphkv.errors import InvalidValue, OutOfMemory

_GIB = 1 << 30
_LARGEST_SHIFT = 4  # chunks of 32 MiB at the 2 MiB granularity of today's devices: few calls, little waste
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on; the number is Linux's


class _Range(Protocol):
    """Addresses of which whole chunks can be mapped and unmapped, from the front on."""

    chunk_bytes: int

    def map(self, first: int, end: int) -> None:
        """Put memory behind chunks `first` .. `end - 1`, or behind none of them: OutOfMemory."""

    def unmap(self, first: int, end: int) -> None:
        """Give the memory of chunks `first` .. `end - 1` back."""

    def tensor(self) -> torch.Tensor:
        """u8 over the whole range, which it keeps reserved; the first chunk is mapped by then."""


class ReservedMemory:
    """A byte tensor whose address is fixed while the memory behind it grows and shrinks.

    Attributes:
        data: u8 [reserved_bytes] on the device. Only the first `mapped_bytes` may be touched.
        reserved_bytes: the most that can be mapped.
        mapped_bytes: memory taken, whole chunks.
        chunk_bytes: what memory is taken and given back in.

    Args:
        reserved_bytes: largest size; costs addresses only.
        num_bytes: size to begin with.
    """

    def __init__(self, reserved_bytes: int, num_bytes: int, device: Device) -> None:
        if not 0 < num_bytes <= reserved_bytes:
            raise InvalidValue(f"num_bytes must be in 1..{reserved_bytes} (the bytes reserved), got {num_bytes}")
        self.reserved_bytes = reserved_bytes
        self.mapped_bytes = 0
        self._device = device
        self._range: _Range = _CudaRange(reserved_bytes, device) if device.is_cuda else _HostRange(reserved_bytes)
        self.chunk_bytes = self._range.chunk_bytes
        self.resize(num_bytes)
        with device.guard():
            self.data = self._range.tensor()

    def resize(self, num_bytes: int) -> None:
        """Map the first `num_bytes` bytes, rounded up to whole chunks. What stays mapped keeps its bytes.

        When it shrinks, nothing may touch the bytes past `num_bytes` any more, work in flight included.

        Raises:
            InvalidValue: outside the reserved range.
            OutOfMemory: nothing changed.
        """
        if not 0 < num_bytes <= self.reserved_bytes:
            raise InvalidValue(f"num_bytes must be in 1..{self.reserved_bytes} (the bytes reserved), got {num_bytes}")
        before, after = self.mapped_bytes // self.chunk_bytes, -(-num_bytes // self.chunk_bytes)
        with self._device.context():
            if after > before:
                self._range.map(before, after)
                self._device.ledger.device_allocations += 1
            elif after < before:
                self._range.unmap(after, before)
        self.mapped_bytes = after * self.chunk_bytes
        self._device.ledger.device_bytes += (after - before) * self.chunk_bytes


class _HostRange:
    """Pages of an anonymous mapping that commits no memory until it is touched."""

    chunk_bytes = mmap.PAGESIZE

    def __init__(self, num_bytes: int) -> None:
        self._pages = -(-num_bytes // self.chunk_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            self._memory = mmap.mmap(-1, self._pages * self.chunk_bytes, flags=flags)
        except OSError as error:
            raise OutOfMemory(f"{num_bytes} bytes of addresses cannot be reserved: {error}; reserve less") from error
        self._num_bytes = num_bytes

    def map(self, first: int, end: int) -> None:
        pass  # a page gets memory when it is touched

    def unmap(self, first: int, end: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, first * self.chunk_bytes, (end - first) * self.chunk_bytes)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)[: self._num_bytes]


class _CudaRange:
    """A reserved range of device addresses, one physical allocation a chunk."""

    def __init__(self, num_bytes: int, device: Device) -> None:
        driver = self._driver = cuda_driver()
        self._num_bytes = num_bytes
        self._properties = _properties(driver, device)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with device.context():
            granularity = int(check_cuda(driver.cuMemGetAllocationGranularity(self._properties, least)))
            shift = min(_LARGEST_SHIFT, max(0, (num_bytes // _GIB).bit_length() - 1))
            self.chunk_bytes = granularity << shift
            size = -(-num_bytes // self.chunk_bytes) * self.chunk_bytes
            status, address = driver.cuMemAddressReserve(size, 0, 0, 0)
        if int(status):
            raise OutOfMemory(f"{size} bytes of device addresses cannot be reserved: {status.name}; reserve less")
        self.address = int(address)
        self._mapped: set[int] = set()
        # Chunks are unmapped by whoever drops the last reference, the tensor (which holds this object) or the owner.
        weakref.finalize(self, _free_range, driver, self.address, size, self._mapped, self.chunk_bytes)

    def map(self, first: int, end: int) -> None:
        for chunk in range(first, end):
            status = self._map_chunk(chunk)
            if status:
                self.unmap(first, chunk)
                raise OutOfMemory(
                    f"the device has no room for {end - first} chunks of {self.chunk_bytes} bytes (it gave "
                    f"{chunk - first}, now given back): {self._driver.CUresult(status).name}; grow by less, or free "
                    "device memory first, e.g. with torch.cuda.empty_cache()"
                )

    def _map_chunk(self, chunk: int) -> int:
        driver, at = self._driver, self.address + chunk * self.chunk_bytes
        status, handle = driver.cuMemCreate(self.chunk_bytes, self._properties, 0)
        if int(status):
            return int(status)
        (status,) = driver.cuMemMap(at, self.chunk_bytes, 0, handle, 0)
        check_cuda(driver.cuMemRelease(handle))  # the mapping holds the memory from here on
        if int(status):
            return int(status)
        self._mapped.add(chunk)
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        (status,) = driver.cuMemSetAccess(at, self.chunk_bytes, [access], 1)
        if int(status):
            self.unmap(chunk, chunk + 1)
        return int(status)

    def unmap(self, first: int, end: int) -> None:
        for chunk in range(first, end):
            check_cuda(self._driver.cuMemUnmap(self.address + chunk * self.chunk_bytes, self.chunk_bytes))
            self._mapped.discard(chunk)

    def tensor(self) -> torch.Tensor:
        return torch.as_tensor(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Read by torch, which looks at the first address alone."""
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _properties(driver: Any, device: Device) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.torch.index
    return properties


def _free_range(driver: Any, address: int, size: int, mapped: set[int], chunk_bytes: int) -> None:
    with contextlib.suppress(Exception):  # at interpreter exit the driver may be gone before we are
        for chunk in mapped:
            driver.cuMemUnmap(address + chunk * chunk_bytes, chunk_bytes)
        driver.cuMemAddressFree(address, size)
