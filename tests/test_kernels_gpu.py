"""Kernels on a real device: every kind of argument, capture and replay, threads, shared memory, forks."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from every_kind import Pair, load, put_kernel
from helpers import run_python

from graphkv import kernels
from graphkv.errors import DeviceFault, InvalidValue

pytestmark = pytest.mark.gpu

WANTED = [11, -3, 2**40, 0.5, 7, 0.25, -(2**50)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel folder that holds every_kind.cu."""
    put_kernel(tmp_path, "every_kind.cu")
    monkeypatch.setenv("GRAPHKV_KERNEL_DIR", str(tmp_path))
    return tmp_path


def arguments() -> tuple[object, ...]:
    """For `every_kind`; the last one is the output, whose first element counts the runs."""
    value = torch.tensor([11], dtype=torch.int32, device="cuda")
    return value, -3, 1 << 40, 0.5, Pair(7, 0.25, -(1 << 50)), torch.zeros(8, dtype=torch.float64, device="cuda")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def test_every_kind_of_argument(folder: Path) -> None:
    args = arguments()
    kernel = load()
    kernel.launch(1, 1, args, stream())
    packed = kernel.pack(*args)
    for _ in range(3):
        kernel.launch((1, 1, 1), 1, packed, stream())
    assert args[-1].tolist() == [4, *WANTED]


def test_pinned_memory_is_a_pointer_too(folder: Path) -> None:
    value = torch.tensor([11], dtype=torch.int32).pin_memory()
    out = torch.zeros(8, dtype=torch.float64).pin_memory()
    load().launch(1, 1, (value, -3, 1 << 40, 0.5, Pair(7, 0.25, -(1 << 50)), out), stream())
    torch.cuda.synchronize()
    assert out.tolist() == [1, *WANTED]
    with pytest.raises(InvalidValue, match="the tensor is on cpu and the kernel on cuda:0"):
        load().pack(torch.zeros(1), *arguments()[1:])


def test_case_J2_replay_after_the_packed_arguments_are_gone(folder: Path) -> None:
    kernel = load()
    args = list(arguments())
    value, out = args[0], args[-1]
    packed = kernel.pack(*args)
    kernel.launch(1, 1, packed, stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(1, 1, packed, stream())
    del packed, args
    gc.collect()
    same_size = [bytearray(b"\xa5" * size) for size in range(64, 512) for _ in range(20)]  # what a freed buffer becomes
    for runs in range(2, 12):
        out[1:].fill_(float("nan"))
        graph.replay()
        assert out.tolist() == [runs, *WANTED]
    assert len(same_size) == 448 * 20
    assert value.item() == 11


def test_dynamic_shared_memory_past_48_kib(folder: Path) -> None:
    given = torch.arange(16384, dtype=torch.int32, device="cuda")
    out = torch.full_like(given, -1)
    kernel = kernels.load("every_kind.cu", "reverse", "PP", dynamic_shared=65536)
    kernel.launch(1, 256, (given, out), stream(), 65536)
    assert torch.equal(out, given.flip(0))


def test_shared_memory_that_was_not_reserved(folder: Path) -> None:
    put_kernel(folder, "small.cu")
    kernel = kernels.load("small.cu", "reverse", "PP")
    out = torch.empty(16384, dtype=torch.int32, device="cuda")
    with pytest.raises(DeviceFault, match=r"reverse.*65536 bytes of dynamic shared memory.*reserved at load: 0"):
        kernel.launch(1, 256, (out, out), stream(), 65536)


@pytest.mark.parametrize("signature", ["PiqfS", "PiqfSPP", "PqqfSP", "PiqfSi"])
def test_signature_that_is_not_the_kernels(folder: Path, signature: str) -> None:
    with pytest.raises(InvalidValue, match=f"signature '{signature}'.*the kernel takes 6"):
        kernels.load("every_kind.cu", "every_kind", signature)


def test_first_use_inside_a_capture_is_refused(folder: Path) -> None:
    put_kernel(folder, "late.cu")
    out = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.add_(1)
        with pytest.raises(InvalidValue, match="for the first time inside a capture"):
            load("late.cu")


def test_case_J5_launch_from_a_new_thread(folder: Path) -> None:
    """A thread that has made no CUDA call has no current context."""
    kernel = load()
    args = arguments()
    packed, handle, failures = kernel.pack(*args), stream(), []

    def work() -> None:
        try:
            kernel.launch(1, 1, packed, handle)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    assert args[-1].tolist() == [1, *WANTED]


FORK = """
import os, sys, torch
from graphkv import kernels
from graphkv.errors import CudaUnavailable

def use():
    out = torch.zeros(8, dtype=torch.float64, device="cuda")
    kernels.load("every_kind.cu", "reverse", "PP", dynamic_shared=65536)
    print("used", flush=True)

BEFORE
child = os.fork()
if child == 0:
    try:
        use()
    except CudaUnavailable as error:
        print("refused", error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_case_J6_fork_then_use(folder: Path) -> None:
    """Importing, and compiling too, leave nothing in the parent that the child trips over."""
    done = run_python(FORK.replace("BEFORE", "kernels.compile_source('every_kind.cu', 'sm_90a')"))
    assert done.stdout == "used\n", done.stderr


def test_case_J6_use_then_fork(folder: Path) -> None:
    code = FORK.replace('    out = torch.zeros(8, dtype=torch.float64, device="cuda")\n', "").replace("BEFORE", "use()")
    done = run_python(code)
    used, refused = done.stdout.splitlines()
    assert used == "used"
    assert refused.startswith("refused CUDA was initialised before this process was forked")
    assert "spawn" in refused
