"""A stand-in for cuda.bindings.driver: records calls, returns what a test wants, and needs no device."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222
    CUDA_ERROR_OUT_OF_MEMORY = 2


class CUfunction_attribute:  # noqa: N801 - the driver's own names
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUdevice_attribute:  # noqa: N801
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class FakeDriver:
    """One device and one module whose kernels take parameters of `sizes` bytes."""

    CUresult = CUresult
    CUfunction_attribute = CUfunction_attribute
    CUdevice_attribute = CUdevice_attribute

    def __init__(self, sizes: tuple[int, ...], version: int = 13000) -> None:
        self.sizes = sizes
        self.version = version
        self.context_stack: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.load_status = CUresult.CUDA_SUCCESS
        self.launch_statuses: list[CUresult] = []  # consumed one a launch, success after the last

    def cuDeviceGet(self, index: int) -> tuple[CUresult, str]:
        return CUresult.CUDA_SUCCESS, f"device {index}"

    def cuDeviceGetAttribute(self, attribute: int, device: str) -> tuple[CUresult, int]:
        return CUresult.CUDA_SUCCESS, 232448

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[CUresult, str]:
        return CUresult.CUDA_SUCCESS, f"context of {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[CUresult]:
        self.context_stack.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[CUresult, str]:
        return CUresult.CUDA_SUCCESS, self.context_stack.pop()

    def cuModuleLoadData(self, image: bytes) -> tuple[CUresult, str]:
        self.calls.append(("load", image[:4], tuple(self.context_stack)))
        return self.load_status, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[CUresult, str]:
        return CUresult.CUDA_SUCCESS, f"function {name.decode()}"

    def cuFuncGetParamInfo(self, function: str, index: int) -> tuple[CUresult, int, int]:
        if index < len(self.sizes):
            return CUresult.CUDA_SUCCESS, sum(self.sizes[:index]), self.sizes[index]
        return CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> tuple[CUresult]:
        self.calls.append(("attribute", attribute, value))
        return (CUresult.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[CUresult, int]:
        return CUresult.CUDA_SUCCESS, self.version

    def cuLaunchKernel(self, *args: Any) -> tuple[CUresult]:
        self.calls.append(("launch", tuple(self.context_stack), *args))
        return (self.launch_statuses.pop(0) if self.launch_statuses else CUresult.CUDA_SUCCESS,)
