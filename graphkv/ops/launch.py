"""How an op's CUDA side reaches its kernel: compiled for the tensors' device, on that device's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from graphkv import kernels
from graphkv.layout import IndexKFormat, LatentFormat

# The numbers that cuda/codec.cuh gives the formats and the dtypes of inputs.
INDEX_K_FORMATS = {IndexKFormat.FP32: 0, IndexKFormat.BF16: 1, IndexKFormat.FP8: 2, IndexKFormat.FP4: 3}
LATENT_FORMATS = {LatentFormat.FP32: 0, LatentFormat.BF16: 1, LatentFormat.FP8: 2, LatentFormat.FP8_DS_MLA: 4}
SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}


def launch(
    name: str,
    signature: str,
    grid: int | tuple[int, int, int],
    block: int,
    args: tuple[int | float | Tensor | ctypes.Structure, ...],
    *,
    device: torch.device,
    defines: Mapping[str, int | str] | None = None,
    shared_bytes: int = 0,
) -> None:
    """Run kernel `name` of `cuda/name.cu`; the caller's current device is as before afterwards."""
    with torch.cuda.device(device):
        kernel = kernels.load(f"{name}.cu", name, signature, defines=defines or {}, dynamic_shared=shared_bytes)
        kernel.launch(grid, block, args, torch.cuda.current_stream(device).cuda_stream, shared_bytes)


def no_result(*_: object) -> None:
    """The fake kernel of every op: results go to tensors of the caller, so there is nothing to describe."""


def sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def has_wgmma(device: torch.device) -> bool:
    """Whether kernels made for sm_90a's warpgroup products run there; where they do not, their portable twins do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
