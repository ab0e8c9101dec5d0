"""A kernel that takes every kind of argument, for the tests of loading and launching."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from helpers import CUDA

from graphkv import kernels

SIGNATURE = "PiqfSP"
SIZES = (8, 4, 8, 4, 16, 8)
EVERY_KIND = r"""
#include "common.cuh"
struct Pair { i32 a; float b; i64 c; };
extern "C" __global__ void every_kind(const i32* p, i32 i, i64 q, float f, Pair s, double* out) {
  out[0] += 1;
  out[1] = *p, out[2] = i, out[3] = static_cast<double>(q), out[4] = f;
  out[5] = s.a, out[6] = s.b, out[7] = static_cast<double>(s.c);
}
extern "C" __global__ void reverse(const i32* in, i32* out) {
  GK_DYN_SHARED(i32, box);
  for (i32 i = threadIdx.x; i < 16384; i += blockDim.x) box[i] = in[i];
  __syncthreads();
  for (i32 i = threadIdx.x; i < 16384; i += blockDim.x) out[i] = box[16383 - i];
}
"""


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int32), ("b", ctypes.c_float), ("c", ctypes.c_int64)]


def put_kernel(folder: Path, file: str) -> None:
    """Make `folder` a kernel folder that holds EVERY_KIND as `file`."""
    shutil.copy(CUDA / "common.cuh", folder)
    (folder / file).write_text(EVERY_KIND)


def load(file: str = "every_kind.cu") -> kernels.Kernel:
    """`every_kind` of `file` in the kernel folder of now."""
    return kernels.load(file, "every_kind", SIGNATURE)
