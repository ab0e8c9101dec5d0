"""The device a cache lives on: memory (every allocation counted), streams, events, and the facts kernels need.

The CPU device offers the same surface: its streams are absent, its events are complete when recorded, its copies are
done when they return. Nothing here touches CUDA before a CUDA `Device` is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphkv.errors import CudaUnavailable, DeviceFault, InvalidValue, OutOfMemory

DeviceKind = Literal["cpu", "cuda"]


@dataclass(slots=True)
class Ledger:
    """Every buffer that graphkv itself has made on one device, counted: the proof that a steady step makes none."""

    device_allocations: int = 0
    device_bytes: int = 0
    pinned_allocations: int = 0
    pinned_bytes: int = 0

    @property
    def allocations(self) -> int:
        return self.device_allocations + self.pinned_allocations


class Event:
    """A point in a stream's work. On the CPU device all work before it is already done."""

    def record(self, stream: int) -> None:
        """Mark the work queued so far on `stream` (a raw handle, 0 on the CPU device)."""

    def make_wait(self, stream: int) -> None:
        """Let later work on `stream` start only after the marked work; returns at once."""

    def synchronize(self) -> None:
        """Return once the marked work is done."""

    def done(self) -> bool:
        """Whether the marked work is done; never waits."""
        return True


class CudaEvent(Event):
    """A CUDA event without timing, used through the driver because its calls sit on the step path."""

    __slots__ = ("_driver", "_handle")

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._handle = check_cuda(driver.cuEventCreate(flags))

    def record(self, stream: int) -> None:
        check_cuda(self._driver.cuEventRecord(self._handle, stream))

    def make_wait(self, stream: int) -> None:
        check_cuda(self._driver.cuStreamWaitEvent(stream, self._handle, 0))

    def synchronize(self) -> None:
        check_cuda(self._driver.cuEventSynchronize(self._handle))

    def done(self) -> bool:
        (status,) = self._driver.cuEventQuery(self._handle)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check_cuda((status,))
        return True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit the driver may be gone before we are
            self._driver.cuEventDestroy(self._handle)


class Device:
    """One CPU or CUDA device. Make it with `Device.of`."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        self.kind: DeviceKind = "cuda" if torch_device.type == "cuda" else "cpu"
        self.ledger = Ledger()
        self.sm_count = 1
        self._driver: Any = None
        self._context: Any = None
        if self.is_cuda:
            with self.guard():
                torch.cuda.init()
                torch.cuda.current_stream()  # makes the primary context current, which the driver calls below rely on
                self.sm_count = torch.cuda.get_device_properties(torch_device).multi_processor_count
            self._driver = cuda_driver()
            handle = check_cuda(self._driver.cuDeviceGet(torch_device.index))
            self._context = check_cuda(self._driver.cuDevicePrimaryCtxRetain(handle))  # torch's, for good

    @classmethod
    def of(cls, spec: Device | torch.device | str = "auto") -> Device:
        """The device that `spec` names: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1", a torch.device."""
        if isinstance(spec, Device):
            return spec
        if spec == "auto":
            spec = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(spec)
        except RuntimeError as error:
            raise InvalidValue(f"device must be auto, cpu, cuda or cuda:N, got {spec!r}") from error
        if device.type not in ("cpu", "cuda"):
            raise InvalidValue(f"device must be auto, cpu, cuda or cuda:N, got {spec!r}")
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise CudaUnavailable(f"device {spec} was asked for, but torch sees no CUDA device; use device='cpu'")
            index = torch.cuda.current_device() if device.index is None else device.index
            if index >= torch.cuda.device_count():
                raise InvalidValue(f"device cuda:{index} is out of range: {torch.cuda.device_count()} devices are here")
            device = torch.device("cuda", index)
        return cls(device)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.is_cuda else "cpu"

    def __repr__(self) -> str:
        return f"Device({self.torch})"

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this device current inside the block and restores the caller's after it."""
        return torch.cuda.device(self.torch) if self.is_cuda else contextlib.nullcontext()

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Makes the device's context current for driver calls, also in a thread that has made no CUDA call yet."""
        if self._context is None:
            yield
            return
        check_cuda(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            check_cuda(self._driver.cuCtxPopCurrent())

    # memory -----------------------------------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the device."""
        tensor = torch.empty(shape, dtype=dtype, device=self.torch)
        self.ledger.device_allocations += 1
        self.ledger.device_bytes += tensor.nbytes
        return tensor

    def zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled tensor on the device."""
        return self.empty(shape, dtype).zero_()

    def pinned(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled host tensor that the device can read and write at the address `data_ptr()`."""
        tensor = torch.zeros(shape, dtype=dtype, pin_memory=self.is_cuda)
        self.ledger.pinned_allocations += 1
        self.ledger.pinned_bytes += tensor.nbytes
        return tensor

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Queue an asynchronous copy from pinned host address `source` to device address `target` on `stream`."""
        check_cuda(self._driver.cuMemcpyHtoDAsync(target, source, num_bytes, stream))

    def copy_all(self, targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
        """Queue copies between any addresses, device or pinned host, on `stream`; they may run in any order.

        One call of the driver, and no gap between the copies: one call each leaves a copy engine idle for 5 us a copy.
        """
        driver = self._driver
        how = driver.CUmemcpyAttributes()
        how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        ends = [[driver.CUdeviceptr(address) for address in side] for side in (targets, sources)]
        check_cuda(driver.cuMemcpyBatchAsync(*ends, sizes, len(sizes), [how], [0], 1, stream))

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory, so that the device reads and writes it at the same address; nothing on the CPU device.

        Raises:
            OutOfMemory: the system locks no more pages.
            DeviceFault: the device sees host memory at other addresses than the host does.
        """
        if not self.is_cuda:
            return
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        with self.context():
            (status,) = self._driver.cuMemHostRegister(address, num_bytes, flags)
            if int(status):
                raise OutOfMemory(f"{num_bytes} bytes of host memory cannot be pinned: {status.name}; ask for less")
            seen = int(check_cuda(self._driver.cuMemHostGetDevicePointer(address, 0)))
            if seen != address:
                self.unpin(address)
                raise DeviceFault(f"the device sees host address {address:#x} at {seen:#x}; host tiers need them equal")

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy of that memory may be under way."""
        with self.context():
            if self.is_cuda:
                check_cuda(self._driver.cuMemHostUnregister(address))

    # streams and events -----------------------------------------------------------------------------------------

    def stream(self) -> torch.cuda.Stream | None:
        """A new stream, None on the CPU device."""
        if not self.is_cuda:
            return None
        return torch.cuda.Stream(self.torch)

    def event(self) -> Event:
        if not self.is_cuda:
            return Event()
        with self.context():
            return CudaEvent(self._driver)

    def capturing(self, stream: int) -> bool:
        """Whether `stream` is being captured, so that only work of the graph may go there."""
        if not self.is_cuda:
            return False
        status = check_cuda(self._driver.cuStreamIsCapturing(stream))
        return bool(status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    @contextlib.contextmanager
    def running_on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """torch work inside the block goes to `stream` of this device."""
        if stream is None:
            yield
            return
        with self.guard(), torch.cuda.stream(stream):
            yield

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)


def stream_handle(stream: torch.cuda.Stream | None) -> int:
    """The raw handle that the driver takes, 0 on the CPU device."""
    return 0 if stream is None else stream.cuda_stream


def cuda_driver() -> Any:
    """The driver bindings of cuda-python, imported on first use so that importing graphkv touches no CUDA."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable("cuda-python is not installed; install graphkv with its dependencies") from error
    return driver


def check_cuda(result: tuple[Any, ...]) -> Any:
    """The value of a driver call's result tuple, or DeviceFault with the driver's own name for the error."""
    status = result[0]
    if int(status) != 0:
        raise DeviceFault(f"the CUDA driver reported {status.name} ({int(status)})")
    return result[1] if len(result) == 2 else result[1:]
