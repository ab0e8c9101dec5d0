"""Ops on latent pages: store, and attention over the selected tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.codecs import decode_latent, encode_latent
from graphkv.errors import InvalidValue
from graphkv.layout import LatentFormat, latent_layout
from graphkv.ops.check import FLOATS, INT32, INT32_MAX, INT64, ArgumentCheck, member
from graphkv.ops.launch import LATENT_FORMATS, SOURCES, has_wgmma, launch, no_result, sm_count
from graphkv.page_io import read_rows, write_rows

_CPU_LATENT_ELEMENTS = 1 << 24  # bound on the latents [tokens, k, R + P] held at once by the CPU side
_HEAD_TILE, _KEY_TILE = 16, 16  # query heads of a CTA of sparse_mla_decode, and keys it holds at once
# The same for warpgroup products, keys that are worth a CTA of their own, what the products are made for, and their
# kernel's shared memory.
_WGMMA_HEAD_TILE, _WGMMA_KEYS = 64, 64
_WGMMA_RANK, _WGMMA_ROPE = 512, 64
_WGMMA_SHARED_BYTES = 231_424


def store_latent(c: Tensor, rope: Tensor, pages: Tensor, slot: Tensor, format: str, scale: float = 1.0) -> None:
    """Encode latents with their rope parts and scatter the records into pages.

    Args:
        c: f32 or bf16 [T, R]; rows may be strided.
        rope: of the same dtype [T, P]; rows may be strided.
        pages: u8 [pages, block_size, 1, token_bytes], written.
        slot: i64 [T]; -1 writes nothing. A slot past the pages is refused on the CPU and skipped on CUDA.
        format: one of `LatentFormat`.
        scale: the cache's one scale of format `fp8`, value = code * scale.
    """
    op = "store_latent"
    check = ArgumentCheck(op, pages.device)
    fmt = member(op, "format", LatentFormat, format)
    check.tensor("c", c, FLOATS, "T R", free_rows=True)
    check.tensor("rope", rope, (c.dtype,), "T P", free_rows=True)
    check.tensor("slot", slot, INT64, "T")
    _check_scale(op, scale)
    check.pages(pages, latent_layout(fmt, c.shape[1], rope.shape[1], pages.shape[1]))
    _store_latent(c, rope, pages, slot, fmt.value, scale)


@torch.library.custom_op(
    "graphkv::store_latent",
    mutates_args=("pages",),
    schema="(Tensor c, Tensor rope, Tensor(a!) pages, Tensor slot, str format, float scale) -> ()",
    device_types="cpu",
)
def _store_latent(c: Tensor, rope: Tensor, pages: Tensor, slot: Tensor, format: str, scale: float) -> None:
    if not len(c):
        return
    fmt = LatentFormat(format)
    records = encode_latent(c, rope, fmt, scale)
    layout = latent_layout(fmt, c.shape[1], rope.shape[1], pages.shape[1])
    write_rows(pages, layout, slot, records, records.new_empty((len(records), 0)))


@_store_latent.register_kernel("cuda")
def _store_latent_cuda(c: Tensor, rope: Tensor, pages: Tensor, slot: Tensor, format: str, scale: float) -> None:
    tokens = len(c)
    if not tokens:
        return
    defines = {
        "LATENT_FORMAT": LATENT_FORMATS[LatentFormat(format)],
        "SOURCE": SOURCES[c.dtype],
        "RANK": c.shape[1],
        "ROPE": rope.shape[1],
        "BLOCK_SIZE": pages.shape[1],
    }
    num_slots = pages.shape[0] * pages.shape[1]
    args = (c, c.stride(0), rope, rope.stride(0), pages, pages.stride(0), slot, num_slots, tokens, scale)
    launch("store_latent", "PqPqPqPqif", -(-tokens // 4), 128, args, device=pages.device, defines=defines)


def sparse_mla_decode(
    q: Tensor,
    pages: Tensor,
    slot: Tensor,
    softmax_scale: float,
    format: str,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
) -> None:
    """Latent attention of each token over its selected tokens; the value is the first R values of a latent.

    Args:
        q: f32 or bf16 [T, H, R + P], in the latent's space (absorbed form).
        pages: u8 [pages, block_size, 1, token_bytes].
        slot: i32 [T, k], as `topk` writes it; -1 is skipped, wherever it stands. No slot at all gives zeros.
        softmax_scale: factor of q . k; the model's, not (R + P)^-0.5.
        format: one of `LatentFormat`.
        scale: the cache's one scale of format `fp8`.
        kv_lora_rank: R.
        out: of q's dtype [T, H, R], written.
    """
    op = "sparse_mla_decode"
    check = ArgumentCheck(op, pages.device)
    fmt = member(op, "format", LatentFormat, format)
    check.tensor("q", q, FLOATS, "T H R+P")
    if not 0 < kv_lora_rank <= q.shape[2]:
        raise InvalidValue(f"{op}: kv_lora_rank must be in 1..{q.shape[2]}, the width of q, got {kv_lora_rank}")
    check.tensor("out", out, (q.dtype,), f"T H {kv_lora_rank}")
    check.tensor("slot", slot, INT32, "T k")
    _check_scale(op, scale)
    check.pages(pages, latent_layout(fmt, kv_lora_rank, q.shape[2] - kv_lora_rank, pages.shape[1]))
    if pages.shape[0] * pages.shape[1] > INT32_MAX:
        raise InvalidValue(
            f"{op}: {pages.shape[0]} pages of {pages.shape[1]} tokens exceed the {INT32_MAX} slots that 32 bits can "
            "name; use fewer blocks"
        )
    _sparse_mla_decode(q, pages, slot, softmax_scale, fmt.value, scale, kv_lora_rank, out)


@torch.library.custom_op(
    "graphkv::sparse_mla_decode",
    mutates_args=("out",),
    schema="(Tensor q, Tensor pages, Tensor slot, float softmax_scale, str format, float scale, int kv_lora_rank, "
    "Tensor(a!) out) -> ()",
    device_types="cpu",
)
def _sparse_mla_decode(
    q: Tensor,
    pages: Tensor,
    slot: Tensor,
    softmax_scale: float,
    format: str,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
) -> None:
    if not slot.numel():
        out.zero_()
        return
    fmt = LatentFormat(format)
    layout = latent_layout(fmt, kv_lora_rank, q.shape[2] - kv_lora_rank, pages.shape[1])
    for some in torch.split(torch.arange(len(q)), max(1, _CPU_LATENT_ELEMENTS // (slot.shape[1] * q.shape[2]))):
        skipped = slot[some] < 0
        # Tokens of one row select much the same slots: decode each once.
        distinct, inverse = torch.unique(slot[some].clamp_min(0).long(), return_inverse=True)
        latent = decode_latent(read_rows(pages, layout, distinct)[0], fmt, scale, kv_lora_rank)[inverse]
        latent.masked_fill_(skipped.unsqueeze(2), 0.0)  # slot 0 stood in for them, and may hold anything
        scores = torch.bmm(q[some].float(), latent.transpose(1, 2)).mul_(softmax_scale)
        scores.masked_fill_(skipped.unsqueeze(1), -torch.inf)
        weights = scores.softmax(dim=2).masked_fill_(skipped.all(dim=1).view(-1, 1, 1), 0.0)
        out[some] = torch.bmm(weights, latent[:, :, :kv_lora_rank]).to(out.dtype)


@_sparse_mla_decode.register_kernel("cuda")
def _sparse_mla_decode_cuda(
    q: Tensor,
    pages: Tensor,
    slot: Tensor,
    softmax_scale: float,
    format: str,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
) -> None:
    tokens, heads, width = q.shape
    if not tokens or not heads:
        return
    wgmma = _fits_wgmma(q, pages, format, kv_lora_rank)
    head_tiles = -(-heads // (_WGMMA_HEAD_TILE if wgmma else _HEAD_TILE))
    cluster = _cluster(tokens * head_tiles, slot.shape[1], sm_count(q.device)) if wgmma else 1
    defines = {
        "FORMAT": LATENT_FORMATS[LatentFormat(format)],
        "SOURCE": SOURCES[q.dtype],
        "RANK": kv_lora_rank,
        "ROPE": width - kv_lora_rank,
        "BLOCK_SIZE": pages.shape[1],
        "WGMMA": int(wgmma),
        "CLUSTER": cluster,
    }
    num_slots = pages.shape[0] * pages.shape[1]
    args = (q, pages, pages.stride(0), num_slots, slot, slot.shape[1], softmax_scale, scale, out, heads, head_tiles)
    launch(
        "sparse_mla_decode",
        "PPqqPiffPii",
        tokens * head_tiles * cluster,
        512 if wgmma else 256,
        args,
        device=q.device,
        defines=defines,
        shared_bytes=_WGMMA_SHARED_BYTES if wgmma else 4 * (_HEAD_TILE + _KEY_TILE) * (-(-width // 64) * 64),
    )


def _fits_wgmma(q: Tensor, pages: Tensor, format: str, kv_lora_rank: int) -> bool:
    """The rule for warpgroup products: the device has them, bf16 queries of the one width, vectors of 16 bytes."""
    return (
        has_wgmma(q.device)
        and q.dtype == torch.bfloat16
        and format != LatentFormat.FP32
        and (kv_lora_rank, q.shape[2]) == (_WGMMA_RANK, _WGMMA_RANK + _WGMMA_ROPE)
        and (pages.data_ptr() | pages.stride(0) | q.data_ptr()) % 16 == 0
    )


def _cluster(units: int, keys: int, sms: int) -> int:
    """CTAs that share the keys of one unit, a token's 64 heads: as many as have an SM of their own.

    A cluster lies within one GPC, and what is left over there is lost: larger clusters find fewer SMs than there are.
    Of 16, each GPC holds one, and small ones none.
    """
    for cluster, places in ((16, sms // 2), (8, sms - sms // 11), (4, sms - sms // 11), (2, sms)):
        if units * cluster <= places and keys > _WGMMA_KEYS * cluster // 2:
            return cluster
    return 1


_sparse_mla_decode.register_fake(no_result)
_store_latent.register_fake(no_result)


def _check_scale(op: str, scale: float) -> None:
    if not 0 < scale < float("inf"):
        raise InvalidValue(f"{op}: scale must be positive and finite, got {scale}")
