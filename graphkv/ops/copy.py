"""Op that copies blocks between pools and tiers: all pools of all listed blocks, whole or a range of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphkv.errors import InvalidValue
from graphkv.layout import PageLayout
from graphkv.ops.check import INT32, ArgumentCheck
from graphkv.ops.launch import launch, no_result, sm_count

BUS_CTAS = 32  # fill a PCIe bus from either side, and leave most SMs to the steps
_THREADS = 512
_CHUNK = _THREADS * 64  # bytes a CTA copies at a time, as cuda/copy_blocks.cu has it
_MAX_PARTS, _MAX_MOVES = 16, 192
# CopyPart: target, source, their block strides, page stride, pages, token bytes, chunks, first item
_PART = np.dtype("u8, u8, i8, i8, i8, i4, i4, i4, i4")
_PLAN = np.dtype([("parts", _PART, _MAX_PARTS), ("moves", "i4", (_MAX_MOVES, 4)), ("sizes", "i4", 4)])


class _Plan(ctypes.Structure):
    _fields_ = (("words", ctypes.c_int64 * (_PLAN.itemsize // 8)),)


def copy_blocks(
    source: Sequence[Tensor], target: Sequence[Tensor], moves: Tensor, layouts: Sequence[PageLayout], ctas: int = 0
) -> None:
    """Copy tokens of blocks, in every page of every pool, values and scales.

    Args:
        source, target: u8 [blocks, pages, page_bytes], one a pool; the pages of a block stand side by side, blocks any
            number of bytes apart. On CUDA either end may be pinned host memory.
        moves: i32 [N, 4] on the CPU: source block, target block, first token, end token. The targets differ from each
            other and, where both ends are the same memory, from all sources.
        layouts: bytes of a page, one a pool.
        ctas: thread blocks that copy at the same time; 0 chooses.

    Raises:
        InvalidValue: before anything was copied.
    """
    check = ArgumentCheck("copy_blocks", torch.device("cpu"))
    check.tensor("moves", moves, INT32, "N 4")
    if not (len(source) == len(target) == len(layouts) > 0):
        raise InvalidValue(
            f"copy_blocks: one source, target and layout a pool are wanted, got {len(source)}, {len(target)} and "
            f"{len(layouts)}"
        )
    if ctas < 0:
        raise InvalidValue(f"copy_blocks: ctas must be 0 (chosen) or more, got {ctas}")
    for number, (one, other, layout) in enumerate(zip(source, target, layouts, strict=True)):
        _check_pages(f"source[{number}]", one, layout, one.shape[1] if one.ndim > 1 else 0)
        _check_pages(f"target[{number}]", other, layout, one.shape[1])
    _check_memory([*source, *target])
    _check_moves(moves.numpy(), source, target, {layout.block_size for layout in layouts})
    values, scales = [layout.value_bytes for layout in layouts], [layout.scale_bytes for layout in layouts]
    _copy_blocks(list(source), list(target), moves, values, scales, ctas)


def _check_pages(name: str, tensor: Tensor, layout: PageLayout, pages: int) -> None:
    if tensor.dtype != torch.uint8 or tensor.ndim != 3 or tuple(tensor.shape[1:]) != (pages, layout.page_bytes):
        raise InvalidValue(
            f"copy_blocks: {name} must be uint8 [blocks, {pages}, {layout.page_bytes}], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    if not pages or not (tensor.stride(2) == 1 and tensor.stride(1) == layout.page_bytes):
        raise InvalidValue(
            f"copy_blocks: {name} needs the pages of a block side by side, {layout.page_bytes} bytes apart, got "
            f"{pages} pages with strides {list(tensor.stride())}"
        )


def _check_memory(tensors: list[Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    on_cuda = {device for device in devices if device.type == "cuda"}
    if len(on_cuda) > 1:
        raise InvalidValue(f"copy_blocks: the pools must be on one device, got {sorted(map(str, devices))}")
    if on_cuda and not all(tensor.is_cuda or tensor.is_pinned() for tensor in tensors):
        raise InvalidValue(
            "copy_blocks: host memory that a CUDA device copies must be pinned; use HostTier or pinned()"
        )


def _check_moves(
    moves: npt.NDArray[np.int32], source: Sequence[Tensor], target: Sequence[Tensor], block_sizes: set[int]
) -> None:
    if len(block_sizes) != 1:
        raise InvalidValue(f"copy_blocks: the pools must have one block size, got {sorted(block_sizes)}")
    if not len(moves):
        return
    block_size = block_sizes.pop()
    room = min(map(len, source)), min(map(len, target))
    ids, first, end = moves[:, :2], moves[:, 2], moves[:, 3]
    if (ids < 0).any() or (ids >= room).any():
        at = int(((ids < 0) | (ids >= room)).any(1).argmax())
        raise InvalidValue(
            f"copy_blocks: move {at} is from block {ids[at, 0]} to {ids[at, 1]}, but there are {room[0]} source and "
            f"{room[1]} target blocks"
        )
    if (first < 0).any() or (end < first).any() or (end > block_size).any():
        at = int(((first < 0) | (end < first) | (end > block_size)).argmax())
        raise InvalidValue(
            f"copy_blocks: move {at} has tokens {first[at]}..{end[at]}, but a block has tokens 0..{block_size}"
        )
    targets = ids[:, 1]
    if len(np.unique(targets)) < len(targets):
        raise InvalidValue(f"copy_blocks: target blocks repeat in {targets.tolist()}; copy one after the other")
    same = any(one.data_ptr() == other.data_ptr() for one, other in zip(source, target, strict=True))
    if same and np.isin(ids[:, 0], targets).any():
        raise InvalidValue(
            f"copy_blocks: a block is source and target of one call: {ids.tolist()}; copy one after the other"
        )


@torch.library.custom_op(
    "graphkv::copy_blocks",
    mutates_args=("target",),
    schema="(Tensor[] source, Tensor(a!)[] target, Tensor moves, int[] value_bytes, int[] scale_bytes, int ctas) -> ()",
    device_types="cpu",
)
def _copy_blocks(
    source: list[Tensor],
    target: list[Tensor],
    moves: Tensor,
    value_bytes: list[int],
    scale_bytes: list[int],
    ctas: int,
) -> None:
    for one, other, value, scale in zip(source, target, value_bytes, scale_bytes, strict=True):
        block_size = one.shape[2] // (value + scale)
        for i, j, first, end in moves.tolist():
            if end - first == block_size:
                other[j].copy_(one[i])
                continue
            for start, width in ((0, value), (block_size * value, scale)):
                tokens = slice(start + first * width, start + end * width)
                other[j, :, tokens] = one[i, :, tokens]


@_copy_blocks.register_kernel("cuda")
def _copy_blocks_cuda(
    source: list[Tensor],
    target: list[Tensor],
    moves: Tensor,
    value_bytes: list[int],
    scale_bytes: list[int],
    ctas: int,
) -> None:
    if not len(moves):
        return
    table = moves.numpy()
    span = table[:, 3] - table[:, 2]
    block_size = source[0].shape[2] // (value_bytes[0] + scale_bytes[0])
    device = next((tensor.device for tensor in (*source, *target) if tensor.is_cuda), source[0].device)
    if not ctas:
        on_bus = source[0].device != target[0].device
        ctas = BUS_CTAS if on_bus else 2 * sm_count(device)
    parts: list[tuple[int, ...]] = []
    for pool in zip(source, target, value_bytes, scale_bytes, strict=True):
        parts += _parts(*pool, whole=int(span.min()) == block_size)
    for first_part in range(0, len(parts), _MAX_PARTS):
        for first in range(0, len(table), _MAX_MOVES):
            moved = table[first : first + _MAX_MOVES]
            plan, items = _plan(parts[first_part : first_part + _MAX_PARTS], moved, int(span.max()))
            launch("copy_blocks", "S", max(1, min(ctas, items)), _THREADS, (plan,), device=device)


def _parts(source: Tensor, target: Tensor, value: int, scale: int, whole: bool) -> Sequence[tuple[int, ...]]:
    """Of each regular part of a pool: target, source, their block strides, page stride, pages, bytes a token."""
    pages, page_bytes = source.shape[1:]
    to, at, strides = target.data_ptr(), source.data_ptr(), (target.stride(0), source.stride(0))
    if whole:  # a block is one stretch of bytes
        return [(to, at, *strides, 0, 1, pages * (value + scale))]
    behind = page_bytes // (value + scale) * value
    parts = [
        (to, at, *strides, page_bytes, pages, value),
        (to + behind, at + behind, *strides, page_bytes, pages, scale),
    ]
    return parts if scale else parts[:1]


def _plan(parts: list[tuple[int, ...]], moves: npt.NDArray[np.int32], longest: int) -> tuple[_Plan, int]:
    """The kernel's argument, and the number of pieces that it tells the CTAs to copy."""
    plan = np.zeros((), _PLAN)
    items = 0
    for number, (*places, pages, token_bytes) in enumerate(parts):
        chunks = max(1, -(-longest * token_bytes // _CHUNK))
        plan["parts"][number] = (*places, pages, token_bytes, chunks, items)
        items += pages * chunks
    plan["moves"][: len(moves)] = moves
    plan["sizes"] = (len(parts), len(moves), items, 0)
    return _Plan.from_buffer_copy(plan.tobytes()), items * len(moves)


_copy_blocks.register_fake(no_result)
