"""The CPU runner itself: collectives, faults it must find, and every kernel test again under the sanitizers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, kernel_files, python_call
from host_kernels import HostKernelError, HostModule, build
from hypothesis import given
from hypothesis import strategies as st

COLLECTIVES = r"""
#include "common.cuh"
extern "C" __global__ void collectives(const i32* in, i32* before, i32* total, float* most, i32* lane_sums, i32 n) {
  __shared__ i32 scratch[gk::WARP];
  __shared__ float scratch_f[gk::WARP];
  const i32 t = threadIdx.x, value = t < n ? in[t] : 0;
  i32 all;
  before[t] = gk::block_exclusive_scan(value, scratch, all);
  const float largest = gk::block_reduce(t < n ? float(in[t]) : gk::negative_infinity(), gk::negative_infinity(),
                                         gk::Max{}, scratch_f);
  const i32 again = gk::block_sum(value, scratch);
  if (t == 0) total[0] = all, total[1] = again, most[0] = largest;
  lane_sums[t] = gk::warp_sum(value, 8);
}
extern "C" __global__ void places(const i64* slot, i64* page, i32* offset, i32 n, i32 block_size) {
  for (i32 i = threadIdx.x; i < n; i += blockDim.x) {
    gk::TokenPlace place = gk::token_place(slot[i], block_size);
    page[i] = place.page, offset[i] = place.offset;
  }
}
extern "C" __global__ void copy(const u8* from, u8* to, i64 bytes) {
  gk::copy_bytes(to, from, bytes, threadIdx.x, blockDim.x);
}
"""

WARPS = r"""
#include "common.cuh"
struct Pair { i32 a; float b; i64 c; };
// The lower half makes one exchange more than the upper one before all meet again.
extern "C" __global__ void uneven(i32* out) {
  const i32 t = threadIdx.x;
  i32 v = t;
  if (t < 16) v = __shfl_xor_sync(0x0000ffffu, v, 1);
  out[t] = __shfl_xor_sync(0xffffffffu, v, 16);
}
extern "C" __global__ void votes(i32* out) {
  const i32 t = threadIdx.x;
  const u32 odd = __ballot_sync(0xffffffffu, t & 1), same = __match_any_sync(0xffffffffu, t / 4);
  const i32 many = __syncthreads_count(t % 3 == 0), any = __syncthreads_or(t == 40), all = __syncthreads_and(t < 63);
  out[6 * t] = odd, out[6 * t + 1] = same, out[6 * t + 2] = many, out[6 * t + 3] = any, out[6 * t + 4] = all;
  out[6 * t + 5] = __reduce_max_sync(0xffffffffu, t);
}
extern "C" __global__ void left_early(i32* out) {
  if (threadIdx.x == 3) return;
  out[threadIdx.x] = __shfl_sync(0xffffffffu, static_cast<i32>(threadIdx.x), 3);
  __syncthreads();
}
extern "C" __global__ void count(u64* total, i32* last, i32 n) {
  if (static_cast<i32>(blockIdx.x * blockDim.x + threadIdx.x) >= n) return;
  atomicAdd(total, 1ull << 33);
  __threadfence();
  atomicMax(last, static_cast<i32>(blockIdx.x));
}
extern "C" __global__ void arguments(const i32* p, i32 i, i64 q, float f, Pair s, double* out) {
  out[0] = p ? *p : -1, out[1] = i, out[2] = static_cast<double>(q), out[3] = f, out[4] = s.a, out[5] = s.b;
  out[6] = static_cast<double>(s.c);
}
"""

FAULTS = r"""
#include "common.cuh"
extern "C" __global__ void stuck(i32* out) {
  if (threadIdx.x < 3) out[0] = __shfl_sync(0xffffffffu, 1, 0);
  else __syncthreads();
}
extern "C" __global__ void race(i32* out) {
  __shared__ i32 box[32];
  box[threadIdx.x] = threadIdx.x + 1;  // no barrier behind it
  out[threadIdx.x] = box[31 - threadIdx.x];
}
extern "C" __global__ void deep(i32* out, i32 n) {
  volatile i32 big[9000];
  for (i32 i = 0; i < n; ++i) big[i] = i;
  out[0] = big[n / 2];
}
extern "C" __global__ void planted(i32* out, i32 n, i32 fault) {
  GK_DYN_SHARED(i32, shared);
  const i32 t = threadIdx.x;
  if (fault == 1 && t <= n) out[t] = t;                              // one element behind the array
  if (fault == 2) shared[t + 1] = t;                                 // one behind the dynamic shared memory
  if (fault == 3) reinterpret_cast<int2*>(out + 1)->x = t;           // a vector access that is not aligned
  if (fault == 4) out[0] = n * 2000000000;                           // 32-bit arithmetic that overflows (case C3)
}
"""


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int32), ("b", ctypes.c_float), ("c", ctypes.c_int64)]


def written(folder: Path, name: str, text: str) -> Path:
    """A kernel folder with this source and common.cuh."""
    shutil.copy(ROOT / "cuda" / "common.cuh", folder)
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    return build(written(tmp_path_factory.mktemp("collectives"), "collectives.cu", COLLECTIVES))


@pytest.fixture(scope="module")
def warps(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    return build(written(tmp_path_factory.mktemp("warps"), "warps.cu", WARPS))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> HostModule:
    return build(written(tmp_path_factory.mktemp("faults"), "faults.cu", FAULTS))


@pytest.mark.host
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("threads", [32, 64, 96, 1024])
def test_block_collectives(collectives: HostModule, rng: np.random.Generator, threads: int, backwards: bool) -> None:
    for n in (0, 1, threads - 1, threads):
        given_ = rng.integers(-1000, 1000, n, dtype=np.int32)
        padded = np.concatenate([given_, np.zeros(threads - n, np.int32)])
        before, lane_sums = np.full((2, threads), -77, np.int32)
        total, most = np.full(2, -77, np.int32), np.full(1, np.nan, np.float32)
        args = [given_, before, total, most, lane_sums, n]
        collectives.launch("collectives", 1, threads, args, backwards=backwards)
        np.testing.assert_array_equal(before, np.cumsum(padded) - padded)
        assert total.tolist() == [padded.sum()] * 2
        assert most[0] == (given_.max() if n else -np.inf)
        np.testing.assert_array_equal(lane_sums, np.repeat(padded.reshape(-1, 8).sum(1), 8))


@pytest.mark.host
@given(
    slot=st.lists(st.integers(0, 2**62) | st.integers(2**32 - 300, 2**32 + 300), min_size=1, max_size=40),
    block_size=st.integers(1, 2**31 - 1) | st.sampled_from([16, 64]),
)
def test_case_C3_token_place_is_exact_past_32_bits(collectives: HostModule, slot: list[int], block_size: int) -> None:
    slots, page, offset = np.array(slot, np.int64), np.full(len(slot), -7, np.int64), np.full(len(slot), -7, np.int32)
    collectives.launch("places", 1, 32, [slots, page, offset, len(slot), block_size])
    assert page.tolist() == [one // block_size for one in slot]
    assert offset.tolist() == [one % block_size for one in slot]


@pytest.mark.host
@pytest.mark.parametrize("bytes_", [0, 1, 15, 16, 17, 132, 656, 4096])
@pytest.mark.parametrize(("skip_from", "skip_to"), [(0, 0), (4, 4), (0, 4), (1, 0)])
def test_copy_bytes(
    collectives: HostModule, rng: np.random.Generator, bytes_: int, skip_from: int, skip_to: int
) -> None:
    source = rng.integers(0, 256, skip_from + bytes_, dtype=np.uint8)
    target = np.full(skip_to + bytes_ + 16, 0xA5, np.uint8)
    collectives.launch("copy", 1, 32, [source[skip_from:], target[skip_to:], bytes_])
    assert target[skip_to : skip_to + bytes_].tobytes() == source[skip_from:].tobytes()
    assert set(target[:skip_to]) | set(target[skip_to + bytes_ :]) == {0xA5}


@pytest.mark.parametrize("backwards", [False, True])
def test_partial_masks_do_not_mix_exchanges(warps: HostModule, backwards: bool) -> None:
    out = np.full(32, -7, np.int32)
    warps.launch("uneven", 1, 32, [out], backwards=backwards)
    lower = np.arange(16) ^ 1
    assert out.tolist() == [*range(16, 32), *lower.tolist()]


def test_votes_and_reductions(warps: HostModule) -> None:
    out = np.full((64, 6), -7, np.int32)
    warps.launch("votes", 1, 64, [out])
    for t, row in enumerate(out.tolist()):
        same = 0xF << (t % 32 // 4 * 4)
        assert [value & 0xFFFFFFFF for value in row] == [0xAAAAAAAA, same, 22, 1, 0, t // 32 * 32 + 31]


def test_lane_that_left_reads_as_poison(warps: HostModule) -> None:
    out = np.zeros(32, np.int32)
    warps.launch("left_early", 1, 32, [out])
    assert set(np.delete(out, 3).view(np.uint32)) == {0xA5A5A5A5}


@pytest.mark.parametrize("threads", [1, 4])
def test_atomics_over_blocks(warps: HostModule, threads: int) -> None:
    total, last = np.zeros(1, np.uint64), np.full(1, -1, np.int32)
    warps.launch("count", (5, 4, 2), 64, [total, last, 10_000], threads=threads)
    assert total[0] == 5 * 4 * 2 * 64 << 33
    assert last[0] == 4


def test_arguments_of_every_kind(warps: HostModule) -> None:
    assert warps.signature("arguments") == "PiqfSP"
    out = np.full(7, np.nan)
    warps.launch("arguments", 1, 1, [np.array([9], np.int32), -2, 1 << 40, 0.5, Pair(3, 0.25, -(1 << 41)), out])
    assert out.tolist() == [9, -2, 2**40, 0.5, 3, 0.25, -(2**41)]
    warps.launch("arguments", 1, 1, [None, 0, 0, 0.0, Pair(), out])
    assert out[0] == -1


@pytest.mark.parametrize("args", [[None, 1, 2, 0.5], [None, 1 << 32, 2, 0.5, Pair(), None], [None, 1, 2, 0.5, 7, None]])
def test_wrong_arguments_are_refused(warps: HostModule, args: list[object]) -> None:
    with pytest.raises((TypeError, OverflowError), match="argument"):
        warps.launch("arguments", 1, 1, args)


def test_deadlock_is_found(faults: HostModule) -> None:
    with pytest.raises(HostKernelError, match=r"stuck: deadlock in block \(0, 0, 0\): of 32 threads left, 29 wait"):
        faults.launch("stuck", 1, 32, [np.zeros(1, np.int32)])
    with pytest.raises(HostKernelError, match="deadlock"):  # and the runner works on after one
        faults.launch("stuck", 3, 32, [np.zeros(1, np.int32)])


def test_stack_overflow_is_found(faults: HostModule) -> None:
    if os.environ.get("GRAPHKV_HOST_SANITIZE") == "1":
        pytest.skip("sanitized stacks are larger")
    with pytest.raises(HostKernelError, match="stack overflow"):
        faults.launch("deep", 1, 1, [np.zeros(1, np.int32), 9000])


def test_race_shows_as_a_difference_between_the_orders(faults: HostModule) -> None:
    out = np.full((2, 32), -1, np.int32)
    for backwards in (False, True):
        faults.launch("race", 1, 32, [out[int(backwards)]], backwards=backwards)
    assert out[0].tolist() != out[1].tolist()


def test_refused_source_brings_the_log(tmp_path: Path) -> None:
    with pytest.raises(HostKernelError, match="undeclared"):
        build(written(tmp_path, "bad.cu", 'extern "C" __global__ void bad(int* p) { *p = undeclared; }'))


# ---- the sanitizers, in processes of their own because their runtime has to be loaded first


def sanitized() -> dict[str, str]:
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {
        "LD_PRELOAD": library.stdout.strip(),
        "PYTHONMALLOC": "malloc",  # else Python's arenas would hide an array's end
        "ASAN_OPTIONS": "detect_leaks=0",
        "GRAPHKV_HOST_SANITIZE": "1",
        "GRAPHKV_HOST_BACKWARDS": "1",
    }


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        (1, "heap-buffer-overflow"),
        (2, "heap-buffer-overflow"),
        (3, "misaligned address"),
        (4, "signed integer overflow"),
    ],
)
def test_case_C3_sanitizers_find_a_planted_fault(tmp_path: Path, fault: int, report: str) -> None:
    source = written(tmp_path, "faults.cu", FAULTS)
    code = (
        "import sys, pathlib, numpy, host_kernels\n"
        f"module = host_kernels.build(pathlib.Path({str(source)!r}))\n"
        "out = numpy.zeros(20, numpy.int32)\n"
        "for fault in {fault}:\n"
        "    module.launch('planted', 1, 32, [out, 20, fault], 33 * 4 if fault == 0 else 32 * 4)\n"
        "    print('survived', fault, flush=True)\n"
    ).replace("{fault}", f"(0, {fault})")
    done = subprocess.run(**python_call(code, **sanitized()), capture_output=True, text=True, check=False)
    assert done.stdout == "survived 0\n", done.stderr
    assert done.returncode != 0
    assert report in done.stderr
    assert "faults.cu:" in done.stderr  # the line of the kernel, not of the runner


def test_every_kernel_passes_under_the_sanitizers(tmp_path: Path) -> None:
    """All tests marked `host` again, backwards and sanitized; together they must run every kernel of cuda/."""
    if os.environ.get("GRAPHKV_HOST_SANITIZE") == "1":
        pytest.skip("this is the sanitized run")
    log = tmp_path / "ran"
    environment = {**os.environ, **sanitized(), "GRAPHKV_HOST_LOG": str(log)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "host and not gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    missed = {file.stem for file in kernel_files()} - set(log.read_text().split())
    assert not missed, f"no test marked `host` runs {sorted(missed)}"
