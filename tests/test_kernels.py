"""Loading and launching: packing reaches the kernel, wrong use is refused, and processes that fork are told."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import SIGNATURE, SIZES, Pair, load, put_kernel
from fake_driver import CUresult, FakeDriver
from host_kernels import build
from hypothesis import given
from hypothesis import strategies as st

from graphkv import kernels, nvrtc
from graphkv.errors import CudaUnavailable, DeviceFault, InvalidValue, KernelCompileError
from graphkv.packing import ArgumentPacker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder that holds EVERY_KIND."""
    put_kernel(tmp_path, "every_kind.cu")
    monkeypatch.setenv("GRAPHKV_KERNEL_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A device of capability 9.0 that is not there."""
    driver = FakeDriver(SIZES)
    monkeypatch.setattr(kernels, "cuda_driver", lambda: driver)
    monkeypatch.setattr(kernels, "_current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_modules", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


def cpu_packer(signature: str = SIGNATURE, structs: tuple[int, ...] = (16,)) -> ArgumentPacker:
    return ArgumentPacker("every_kind", signature, torch.device("cpu"), structs)


# ---- packing


@given(
    i=st.integers(-(2**31), 2**31 - 1),
    q=st.integers(-(2**63), 2**63 - 1),
    f=st.floats(width=32, allow_nan=False),
    pair=st.tuples(
        st.integers(-(2**31), 2**31 - 1), st.floats(width=32, allow_nan=False), st.integers(-(2**52), 2**52)
    ),
)
def test_packed_values_are_where_the_pointers_say(i: int, q: int, f: float, pair: tuple[int, float, int]) -> None:
    packed = cpu_packer().pack((0x1234, i, q, f, Pair(*pair), None))
    pointers = (ctypes.c_uint64 * 6).from_address(packed.address)
    assert all(pointer % size == 0 for pointer, size in zip(pointers, (8, 4, 8, 4, 8, 8), strict=True))
    assert ctypes.c_uint64.from_address(pointers[0]).value == 0x1234
    assert ctypes.c_int32.from_address(pointers[1]).value == i
    assert ctypes.c_int64.from_address(pointers[2]).value == q
    assert ctypes.c_float.from_address(pointers[3]).value == f
    stored = Pair.from_address(pointers[4])
    assert (stored.a, stored.b, stored.c) == pair
    assert ctypes.c_uint64.from_address(pointers[5]).value == 0


def test_packed_arguments_reach_the_kernel(folder: Path) -> None:
    """The same array of pointers that the driver takes, given to the kernel on the CPU."""
    module = build(folder / "every_kind.cu")
    assert module.signature("every_kind") == SIGNATURE
    value, out = torch.tensor([11], dtype=torch.int32), torch.zeros(8, dtype=torch.float64)
    packed = cpu_packer().pack((value, -3, 1 << 40, 0.5, Pair(7, 0.25, -(1 << 50)), out))
    for runs in (1, 2):
        module.launch("every_kind", 1, 1, packed.address)
        assert out.tolist() == [runs, 11, -3, 2**40, 0.5, 7, 0.25, -(2**50)]


def test_packed_arguments_keep_their_owners() -> None:
    value, pair = torch.tensor([11], dtype=torch.int32), Pair(1, 2, 3)
    gone = [weakref.ref(value), weakref.ref(pair)]
    packed = cpu_packer("PS").pack((value, pair))
    del value, pair
    gc.collect()
    assert all(owner() is not None for owner in gone)
    del packed
    gc.collect()
    assert all(owner() is None for owner in gone)


@pytest.mark.parametrize(
    ("signature", "args", "says"),
    [
        ("PP", (0,), r"takes 2 arguments \(PP\), 1 were given"),
        ("i", (1 << 31,), "argument 0: a 32-bit signed integer is wanted, got 2147483648"),
        ("ii", (0, 1.5), "argument 1: a 32-bit signed integer is wanted, got 1.5"),
        ("q", (-(1 << 63) - 1,), "argument 0: a 64-bit signed integer"),
        ("f", (1e39,), r"argument 0: a number in float32's range is wanted, got 1e\+39"),
        ("f", ("1",), "argument 0: a number"),
        ("P", (-1,), "argument 0: a tensor on the kernel's device"),
        ("P", (1.0,), "argument 0: a tensor on the kernel's device"),
        ("P", (np.zeros(3),), "argument 0: a tensor on the kernel's device"),
        ("S", (7,), "argument 0: a ctypes.Structure is wanted, got 7"),
        ("S", (ctypes.c_int64(7),), "argument 0: a ctypes.Structure is wanted"),
    ],
)
def test_arguments_that_do_not_fit(signature: str, args: tuple[Any, ...], says: str) -> None:
    packer = cpu_packer(signature, (16,) * signature.count("S"))
    with pytest.raises(InvalidValue, match=f"every_kind.*{says}"):
        packer.pack(args)


def test_tensor_of_another_device_is_refused() -> None:
    packer = ArgumentPacker("every_kind", "iP", torch.device("cuda", 0))
    with pytest.raises(InvalidValue, match="argument 1: the tensor is on cpu and the kernel on cuda:0"):
        packer.pack((1, torch.empty(3)))


def test_struct_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidValue, match="Pair has 16 bytes and the kernel's struct 24"):
        cpu_packer("S", (24,)).pack((Pair(),))


@pytest.mark.parametrize(("signature", "structs"), [("Pd", ()), ("PS", ()), ("P", (8,))])
def test_bad_signature(signature: str, structs: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue, match="signature"):
        cpu_packer(signature, structs)


# ---- loading and launching, on a driver that only listens


def test_loads_machine_code_once_inside_the_devices_context(fake: FakeDriver) -> None:
    kernel = load()
    assert load() is kernel
    assert fake.calls == [("load", b"\x7fELF", ("context of device 0",))]
    assert fake.context_stack == []
    assert (kernel.entry, kernel.file, kernel.resources.spill_bytes) == ("every_kind", "every_kind.cu", 0)


def test_launch_hands_over_the_packed_address(fake: FakeDriver) -> None:
    kernel = load()
    args = (0x10, 1, 2, 0.5, Pair(), 0x20)
    packed = kernel.pack(*args)
    fake.calls.clear()
    kernel.launch(3, 64, packed, 0x77, 512)
    kernel.launch((2, 3, 4), 32, packed, 0)
    assert fake.calls == [
        ("launch", (), "function every_kind", 3, 1, 1, 64, 1, 1, 512, 0x77, packed.address, 0),
        ("launch", (), "function every_kind", 2, 3, 4, 32, 1, 1, 0, 0, packed.address, 0),
    ]
    kernel.launch(1, 32, args, 0)
    assert len(fake.calls) == 3


def test_arguments_of_another_kernel_are_refused(fake: FakeDriver) -> None:
    packed = cpu_packer("P", ()).pack((0,))
    fake.sizes = SIZES
    with pytest.raises(InvalidValue, match="packed for every_kind were given to every_kind"):
        load().launch(1, 1, packed, 0)


@pytest.mark.parametrize("sizes", [SIZES[:-1], (*SIZES, 8), (4, *SIZES[1:]), (*SIZES[:4], 8, 4)])
def test_signature_that_is_not_the_kernels(fake: FakeDriver, sizes: tuple[int, ...]) -> None:
    fake.sizes = sizes
    with pytest.raises(InvalidValue, match=f"signature 'PiqfSP' has 6 parameters and the kernel takes {len(sizes)}"):
        load()
    assert fake.context_stack == []


def test_unknown_entry(fake: FakeDriver) -> None:
    with pytest.raises(KernelCompileError, match=r"every_kind.cu has no entry 'nothing'; it has .*every_kind"):
        kernels.load("every_kind.cu", "nothing", "P")


def test_shared_memory_is_reserved_up_to_the_devices_limit(fake: FakeDriver) -> None:
    def reserve(num_bytes: int) -> None:
        kernels.load("every_kind.cu", "every_kind", SIGNATURE, dynamic_shared=num_bytes)

    reserve(100_000)
    reserve(50_000)
    reserve(200_000)
    assert [call for call in fake.calls if call[0] == "attribute"] == [
        ("attribute", 8, 100_000),
        ("attribute", 8, 200_000),
    ]
    with pytest.raises(InvalidValue, match=r"needs 232449 dynamic and 0 static bytes.*has 232448"):
        reserve(232_449)


def test_case_J3_driver_older_than_the_compiler(fake: FakeDriver) -> None:
    fake.load_status, fake.version = CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 12080
    with pytest.raises(
        DeviceFault, match=r"driver \(CUDA 12\.8\).*NVRTC 13\.\d.*sm_90a.*UNSUPPORTED_PTX_VERSION.*nvrtc\]==12\.8"
    ):
        load()
    assert fake.context_stack == []
    fake.load_status = CUresult.CUDA_SUCCESS
    load()  # the failure left nothing behind


def test_other_load_failures_do_not_blame_the_versions(fake: FakeDriver) -> None:
    fake.load_status = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceFault, match="OUT_OF_MEMORY") as caught:
        load()
    assert "NVRTC" not in str(caught.value)


def test_case_J5_launch_from_a_thread_on_another_device(fake: FakeDriver) -> None:
    """The driver refuses because another context is current: once more inside the kernel's own, then as before."""
    kernel = load()
    fake.calls.clear()
    fake.launch_statuses = [CUresult.CUDA_ERROR_INVALID_CONTEXT]
    kernel.launch(1, 32, (0, 1, 2, 0.5, Pair(), 0), 0)
    assert [call[1] for call in fake.calls] == [(), ("context of device 0",)]
    assert fake.context_stack == []


def test_failed_launch_tells_the_launch(fake: FakeDriver) -> None:
    kernel = load()
    fake.launch_statuses = [CUresult.CUDA_ERROR_INVALID_VALUE]
    says = r"every_kind.*INVALID_VALUE \(1\): grid \(0, 1, 1\), block 32, 99 bytes of dynamic.*reserved at load: 0"
    with pytest.raises(DeviceFault, match=says):
        kernel.launch(0, 32, (0, 1, 2, 0.5, Pair(), 0), 0, 99)


def test_first_use_inside_a_capture_is_refused(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(InvalidValue, match="for the first time inside a capture; run a warm-up"):
            load()
    assert fake.calls == []
    load()


def test_defines_and_folders_are_told_apart(fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load()
    fast = kernels.load("every_kind.cu", "every_kind", SIGNATURE, defines={"FAST": 1})
    other = tmp_path / "other"
    other.mkdir()
    put_kernel(other, "every_kind.cu")
    monkeypatch.setenv("GRAPHKV_KERNEL_DIR", str(other))
    assert len({id(plain), id(fast), id(load())}) == 3


# ---- processes that fork (case J6)


def test_case_J6_kernel_of_the_parent_process(fake: FakeDriver) -> None:
    kernel = load()
    fake.launch_statuses = [CUresult.CUDA_ERROR_NOT_INITIALIZED]

    def child() -> None:
        with pytest.raises(CudaUnavailable, match=r"every_kind: .*forked.*spawn"):
            kernel.launch(1, 32, (0, 1, 2, 0.5, Pair(), 0), 0)

    assert in_fork(child) == 0


def test_case_J6_cuda_initialised_before_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(CudaUnavailable, match=r"initialised before this process was forked.*spawn"):
        kernels.load("latch.cu", "latch", "P")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device() -> None:
    with pytest.raises(CudaUnavailable, match="no CUDA device"):
        kernels.load("latch.cu", "latch", "P")


def test_case_J6_fork_while_another_thread_compiles(folder: Path) -> None:
    """The child inherits the lock as held, by a thread that it does not have."""
    with nvrtc._lock, kernels._lock:
        assert in_fork(lambda: nvrtc.compile_source("every_kind.cu", "sm_80")) == 0


def in_fork(work: Callable[[], Any]) -> int:
    """Run `work` in a forked child; 0 if it returned, 1 if it raised, -14 if it took more than a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
