"""Load compiled kernels on the current CUDA device and launch them with arguments packed beforehand.

A launch hands the driver one address: an array of pointers to argument values, laid out once by `Kernel.pack`. The
driver copies the values while it launches or captures, so packed arguments may be dropped after that; what their
pointers point at may not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from graphkv.device import check_cuda, cuda_driver
from graphkv.errors import CudaUnavailable, DeviceFault, InvalidValue, KernelCompileError
from graphkv.nvrtc import (
    NO_DEFINES,
    CompiledKernel,
    Defines,
    KernelResources,
    arch_of,
    compile_source,
    compiler_version,
    kernel_dir,
)
from graphkv.packing import ArgumentPacker, PackedArgs

__all__ = ["CompiledKernel", "Kernel", "KernelResources", "PackedArgs", "compile_source", "kernel_dir", "load"]

_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400  # CUresult: another device, or none, is current in the calling thread
_PORTABLE_CLUSTER = 8  # blocks; a kernel with larger clusters has to ask for them
_UNREADABLE = (200, 209, 218, 222)  # CUresult: bad image, no code for this device, bad PTX, PTX of a newer version
_USE_SPAWN = (
    "CUDA was initialised before this process was forked, and does not survive a fork; start worker processes with "
    'the "spawn" method, e.g. multiprocessing.get_context("spawn"), or touch CUDA only in the workers'
)


class Kernel:
    """One entry of a kernel source, loaded on one device. Made by `load`."""

    __slots__ = ("_context", "_driver", "_function", "_launch", "_pid", "_shared_limit", "file", "packer", "resources")

    def __init__(
        self, file: str, driver: Any, context: Any, function: Any, packer: ArgumentPacker, resources: KernelResources
    ) -> None:
        self.file = file
        self.packer = packer
        self.resources = resources
        self._driver = driver
        self._context = context
        self._function = function
        self._launch = driver.cuLaunchKernel
        self._pid = os.getpid()
        self._shared_limit = 0

    @property
    def entry(self) -> str:
        return self.packer.entry

    def pack(self, *args: Any) -> PackedArgs:
        """Lay out arguments for any number of launches.

        Args:
            args: as the signature says: P a tensor, an address or None; i, q integers; f a number; S a structure.
        Raises:
            InvalidValue: count, type, range, or a tensor of another device.
        """
        return self.packer.pack(args)

    def launch(
        self,
        grid: int | tuple[int, int, int],
        block: int,
        args: PackedArgs | tuple[Any, ...],
        stream: int,
        shared_bytes: int = 0,
    ) -> None:
        """Queue the kernel on `stream` (a raw handle). Capturable; no device memory is allocated.

        Args:
            grid: blocks, in x or in (x, y, z); each at least 1.
            block: threads of a block.
            shared_bytes: dynamic shared memory of a block, at most what `load` was told.
        Raises:
            InvalidValue: arguments packed for another kernel, or not packable.
            CudaUnavailable: the kernel was loaded before this process was forked.
            DeviceFault: the driver refused; the message holds the launch.
        """
        packed = args if isinstance(args, PackedArgs) else self.packer.pack(args)
        if packed.packer is not self.packer:
            raise InvalidValue(f"arguments packed for {packed.packer.entry} were given to {self.entry}")
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        status = self._launch(self._function, x, y, z, block, 1, 1, shared_bytes, stream, packed.address, 0)[0]
        if status:
            self._recover(int(status), (x, y, z), block, packed, stream, shared_bytes)

    def reserve_shared(self, num_bytes: int) -> None:
        """Allow launches with up to `num_bytes` of dynamic shared memory, on top of the kernel's static share."""
        if num_bytes <= self._shared_limit:
            return
        most = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        device = check_cuda(self._driver.cuDeviceGet(self.packer.device.index))
        limit = int(check_cuda(self._driver.cuDeviceGetAttribute(most, device)))
        if self.resources.shared_bytes + num_bytes > limit:
            raise InvalidValue(
                f"{self.entry} needs {num_bytes} dynamic and {self.resources.shared_bytes} static bytes of shared "
                f"memory in a block; {self.packer.device} has {limit}"
            )
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check_cuda(self._driver.cuFuncSetAttribute(self._function, attribute, num_bytes))
        self._shared_limit = num_bytes

    def _recover(
        self, status: int, grid: tuple[int, int, int], block: int, args: PackedArgs, stream: int, shared_bytes: int
    ) -> None:
        """Off the hot path: launch again with the kernel's own device current, or say why it cannot be launched."""
        if os.getpid() != self._pid:
            raise CudaUnavailable(f"{self.entry}: {_USE_SPAWN}")
        if status in (_INVALID_CONTEXT, _INVALID_HANDLE):
            with _Current(self._driver, self._context):
                again = self._launch(self._function, *grid, block, 1, 1, shared_bytes, stream, args.address, 0)[0]
            status = int(again)
        if status:
            raise DeviceFault(
                f"launch of {self.entry} ({self.file}) failed with {self._driver.CUresult(status).name} ({status}): "
                f"grid {grid}, block {block}, {shared_bytes} bytes of dynamic shared memory (reserved at load: "
                f"{self._shared_limit}), {self.resources.registers} registers a thread, stream {stream:#x}"
            )


_lock = threading.RLock()
_kernels: dict[tuple[Any, ...], Kernel] = {}
_modules: dict[tuple[Any, ...], tuple[CompiledKernel, Any, Any]] = {}


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it


def load(file: str, entry: str, signature: str, *, defines: Defines = NO_DEFINES, dynamic_shared: int = 0) -> Kernel:
    """The kernel `entry` of `file` on torch's current CUDA device; compiled and loaded on the first call, then kept.

    Not while a stream captures: the first call loads code. Warm up before.

    Args:
        file: a name in the kernel folder.
        signature: one letter a parameter: P pointer, i int32, q int64, f float32, S struct by value.
        defines: preprocessor macros to compile with.
        dynamic_shared: the most dynamic shared memory in bytes that a launch will ask for.
    Raises:
        CudaUnavailable: no device, no NVRTC, or CUDA was initialised before a fork.
        KernelCompileError: the source does not compile or has no such entry.
        InvalidValue: the signature is not the kernel's, or the device has less shared memory.
        DeviceFault: the driver cannot load the code.
    """
    device = _current_device()
    place = (device.index, os.environ.get("GRAPHKV_KERNEL_DIR"), file, _frozen(defines))
    kernel = _kernels.get((*place, entry, signature))
    if kernel is None:
        with _lock:
            kernel = _kernels.get((*place, entry, signature)) or _load(device, place, entry, signature, defines)
            _kernels[(*place, entry, signature)] = kernel
    if dynamic_shared:
        kernel.reserve_shared(dynamic_shared)
    return kernel


def _frozen(defines: Mapping[str, int | str]) -> tuple[tuple[str, int | str], ...]:
    return tuple(sorted(defines.items())) if defines else ()


def _current_device() -> torch.device:
    if torch.cuda._is_in_bad_fork():
        raise CudaUnavailable(_USE_SPAWN)
    if not torch.cuda.is_initialized():
        if not torch.cuda.is_available():
            raise CudaUnavailable("torch sees no CUDA device; kernels are loaded only on a CUDA device")
        torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device())


def _load(device: torch.device, place: tuple[Any, ...], entry: str, signature: str, defines: Defines) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise InvalidValue(
            f"{entry} ({place[2]}) is used for the first time inside a capture; run a warm-up step before"
        )
    driver = cuda_driver()
    if place not in _modules:
        _modules[place] = load_module(driver, device, place[2], defines)
    compiled, context, module = _modules[place]
    if entry not in compiled.resources:
        raise KernelCompileError(f"{compiled.file} has no entry {entry!r}; it has {', '.join(compiled.resources)}")
    with _Current(driver, context):
        function = check_cuda(driver.cuModuleGetFunction(module, entry.encode()))
        sizes = parameter_sizes(driver, function)
        structs = [size for letter, size in zip(signature, sizes, strict=False) if letter == "S"]
        packer = ArgumentPacker(entry, signature, device, structs) if len(sizes) == len(signature) else None
        if packer is None or packer.sizes != sizes:
            raise InvalidValue(
                f"{entry}: signature {signature!r} has {len(signature)} parameters and the kernel takes {len(sizes)}, "
                f"of {list(sizes)} bytes"
            )
        if int(defines.get("CLUSTER", 1)) > _PORTABLE_CLUSTER:
            larger = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check_cuda(driver.cuFuncSetAttribute(function, larger, 1))
        return Kernel(compiled.file, driver, context, function, packer, compiled.resources[entry])


def load_module(driver: Any, device: torch.device, file: str, defines: Defines) -> tuple[CompiledKernel, Any, Any]:
    """Compile `file` for `device` and load it into the primary context, which is torch's and lives as long as we do."""
    compiled = compile_source(file, arch_of(*torch.cuda.get_device_capability(device)), defines)
    context = check_cuda(driver.cuDevicePrimaryCtxRetain(check_cuda(driver.cuDeviceGet(device.index))))
    with _Current(driver, context):
        result = driver.cuModuleLoadData(compiled.cubin)
        if int(result[0]) in _UNREADABLE:
            version = check_cuda(driver.cuDriverGetVersion())
            theirs, ours = f"{version // 1000}.{version % 1000 // 10}", ".".join(map(str, compiler_version()))
            raise DeviceFault(
                f"{file}: the driver (CUDA {theirs}) cannot load machine code that NVRTC {ours} made for "
                f"{compiled.arch}: {result[0].name} ({int(result[0])}); update the driver, or install an NVRTC no "
                f"newer than the driver: pip install 'cuda-toolkit[nvrtc]=={theirs}.*'"
            )
        return compiled, context, check_cuda(result)


def parameter_sizes(driver: Any, function: Any) -> tuple[int, ...]:
    """Bytes of each parameter of a loaded function, in order."""
    sizes: list[int] = []
    while int((result := driver.cuFuncGetParamInfo(function, len(sizes)))[0]) == 0:
        sizes.append(int(result[2]))
    return tuple(sizes)


class _Current:
    """Makes a context current in this thread and restores what was."""

    def __init__(self, driver: Any, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        check_cuda(self._driver.cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        check_cuda(self._driver.cuCtxPopCurrent())
