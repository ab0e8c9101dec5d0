"""Op that stores all of a layer's new tokens, index K and latent, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.errors import InvalidValue
from graphkv.layout import MIN_AMAX_FLOOR, IndexKFormat, LatentFormat, ScaleMode, index_k_layout, latent_layout
from graphkv.ops.check import FLOATS, INT64, ArgumentCheck, member
from graphkv.ops.index_k import _store_index_k
from graphkv.ops.latent import _check_scale, _store_latent
from graphkv.ops.launch import INDEX_K_FORMATS, LATENT_FORMATS, SOURCES, launch, no_result


def store_layer(
    c: Tensor,
    rope: Tensor,
    latent_pages: Tensor,
    latent_slot: Tensor,
    k: Tensor,
    index_pages: Tensor,
    index_slot: Tensor,
    latent_format: str,
    index_k_format: str,
    *,
    latent_scale: float = 1.0,
    scale_mode: str = "pow2",
    amax_floor: float = 1e-4,
) -> None:
    """What `store_latent` and `store_index_k` do, in one launch.

    Args:
        c, rope, latent_pages, latent_slot, latent_format, latent_scale: see `store_latent`.
        k: as for `store_index_k`, with the dtype of `c` and as many rows.
        index_pages, index_slot, index_k_format, scale_mode, amax_floor: see `store_index_k`; pages of both roles hold
            equally many tokens.
    """
    op = "store_layer"
    check = ArgumentCheck(op, latent_pages.device)
    latent = member(op, "latent_format", LatentFormat, latent_format)
    index_k = member(op, "index_k_format", IndexKFormat, index_k_format)
    mode = member(op, "scale_mode", ScaleMode, scale_mode)
    check.tensor("c", c, FLOATS, "T R", free_rows=True)
    check.tensor("rope", rope, (c.dtype,), "T P", free_rows=True)
    check.tensor("k", k, (c.dtype,), "T D", free_rows=True)
    check.tensor("latent_slot", latent_slot, INT64, "T")
    check.tensor("index_slot", index_slot, INT64, "T")
    _check_scale(op, latent_scale)
    check.at_least("amax_floor", amax_floor, MIN_AMAX_FLOOR)
    block_size = latent_pages.shape[1]
    check.pages(latent_pages, latent_layout(latent, c.shape[1], rope.shape[1], block_size), "latent_pages")
    check.pages(index_pages, index_k_layout(index_k, k.shape[1], block_size), "index_pages")
    _store_layer(
        c,
        rope,
        latent_pages,
        latent_slot,
        k,
        index_pages,
        index_slot,
        latent.value,
        index_k.value,
        latent_scale,
        mode.value,
        amax_floor,
    )


@torch.library.custom_op(
    "graphkv::store_layer",
    mutates_args=("latent_pages", "index_pages"),
    schema="(Tensor c, Tensor rope, Tensor(a!) latent_pages, Tensor latent_slot, Tensor k, Tensor(b!) index_pages, "
    "Tensor index_slot, str latent_format, str index_k_format, float latent_scale, str scale_mode, float amax_floor) "
    "-> ()",
    device_types="cpu",
)
def _store_layer(
    c: Tensor,
    rope: Tensor,
    latent_pages: Tensor,
    latent_slot: Tensor,
    k: Tensor,
    index_pages: Tensor,
    index_slot: Tensor,
    latent_format: str,
    index_k_format: str,
    latent_scale: float,
    scale_mode: str,
    amax_floor: float,
) -> None:
    _check_slots(latent_slot, latent_pages)
    _check_slots(index_slot, index_pages)
    _store_latent(c, rope, latent_pages, latent_slot, latent_format, latent_scale)
    _store_index_k(k, index_pages, index_slot, index_k_format, scale_mode, amax_floor)


def _check_slots(slot: Tensor, pages: Tensor) -> None:
    """Refuse what one of the two stores would refuse, before the other has written."""
    num_slots = pages.shape[0] * pages.shape[1]
    if slot.numel() and int(slot.max()) >= num_slots:
        raise InvalidValue(
            f"store_layer: slots must be in 0..{num_slots - 1} ({pages.shape[0]} pages of {pages.shape[1]} tokens), or "
            f"-1, got {int(slot.max())}"
        )


@_store_layer.register_kernel("cuda")
def _store_layer_cuda(
    c: Tensor,
    rope: Tensor,
    latent_pages: Tensor,
    latent_slot: Tensor,
    k: Tensor,
    index_pages: Tensor,
    index_slot: Tensor,
    latent_format: str,
    index_k_format: str,
    latent_scale: float,
    scale_mode: str,
    amax_floor: float,
) -> None:
    tokens = len(c)
    if not tokens:
        return
    block_size = latent_pages.shape[1]
    defines = {
        "LATENT_FORMAT": LATENT_FORMATS[LatentFormat(latent_format)],
        "INDEX_K_FORMAT": INDEX_K_FORMATS[IndexKFormat(index_k_format)],
        "SOURCE": SOURCES[c.dtype],
        "RANK": c.shape[1],
        "ROPE": rope.shape[1],
        "HEAD_DIM": k.shape[1],
        "BLOCK_SIZE": block_size,
        "LINEAR_SCALE": int(scale_mode == ScaleMode.LINEAR),
    }
    latent_slots, index_slots = latent_pages.shape[0] * block_size, index_pages.shape[0] * block_size
    latent = (c, c.stride(0), rope, rope.stride(0), latent_pages, latent_pages.stride(0), latent_slot, latent_slots)
    index_k = (k, k.stride(0), index_pages, index_pages.stride(0), index_slot, index_slots)
    args = (*latent, latent_scale, *index_k, amax_floor, tokens)
    grid = -(-tokens // 4) + -(-tokens // 16)
    launch("store_layer", "PqPqPqPqfPqPqPqfi", grid, 128, args, device=c.device, defines=defines)


_store_layer.register_fake(no_result)
