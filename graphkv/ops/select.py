"""The selection of tokens: top-k of the scores, fused with the translation into slots of the latent pool."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphkv.ops.check import FLOAT32, INT32, ArgumentCheck, check_contexts
from graphkv.ops.launch import launch, no_result


def topk(
    logits: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    block_size: int,
    out_slot: Tensor,
    out_position: Tensor,
) -> None:
    """Select each token's min(k, context_len) best positions, ties by lowest position, in ascending order.

    The same input gives the same output, bit for bit. A NaN ranks with -inf, and -0.0 with 0.0.

    Args:
        logits: f32 [T, W]; only columns below a token's context_len are read; rows may be strided.
        context_len: i32 [T]; 0 (a padded token) selects nothing.
        page_table: i32 [B, M] of the latent pool; rows may be strided.
        token_row: i32 [T], the row of each token; not read where context_len is 0.
        block_size: tokens a page of that pool.
        out_slot: i32 [T, k], `page * block_size + offset` of each selected position, then -1.
        out_position: i32 [T, k], the positions, then -1.
    """
    check = ArgumentCheck("topk", logits.device)
    check.tensor("logits", logits, FLOAT32, "T W", free_rows=True)
    check.tensor("context_len", context_len, INT32, "T")
    check.tensor("page_table", page_table, INT32, "B M", free_rows=True)
    check.tensor("token_row", token_row, INT32, "T")
    check.tensor("out_slot", out_slot, INT32, "T k")
    check.tensor("out_position", out_position, INT32, "T k")
    check.at_least("block_size", block_size, 1)
    _topk(logits, context_len, page_table, token_row, block_size, out_slot, out_position)


class Limits(NamedTuple):
    """What of a device decides how rows are split."""

    sm_count: int
    largest_cluster: int  # blocks that may share a row
    shared_bytes: int  # dynamic shared memory that a block may have


class Split(NamedTuple):
    """How rows are split: threads of a block, blocks of a row, keys that a thread keeps in shared memory."""

    threads: int
    cluster: int
    shared_items: int


_STATIC_SHARED = 42 * 1024  # of the kernel's largest variant
_LEAST_SHARE = 8192  # columns of a block below which another block of the row would cost more than it saves
_GROUP = 4  # keys that a thread handles at once


@functools.cache
def limits_of(device: torch.device) -> Limits:
    properties: Any = torch.cuda.get_device_properties(device)
    cluster = 8 if properties.major >= 9 else 1  # the most that every device with clusters can do
    shared = properties.shared_memory_per_block_optin - _STATIC_SHARED
    return Limits(properties.multi_processor_count, cluster, shared)


def split_rows(tokens: int, width: int, limits: Limits) -> Split:
    """Decide from what a captured launch may depend on: the number of rows and the widest that one may be.

    Up to one row a multiprocessor, clusters spread the rows over all of them. Of more rows than that, two blocks share
    a multiprocessor while the keys of both fit, and clusters only make the keys of wide rows fit.
    """
    threads = 512 if tokens > limits.sm_count and width <= 512 * 32 else 1024
    most_items = limits.shared_bytes // (4 * threads) // _GROUP * _GROUP
    cluster = 1
    while threads == 1024 and 2 * cluster <= limits.largest_cluster:
        # Clusters above 2 leave multiprocessors idle where their number in a GPC is no multiple.
        room = limits.sm_count if cluster == 1 else limits.sm_count * 9 // 10
        spread = 2 * cluster * tokens <= room and width > cluster * _LEAST_SHARE
        if not (spread or (tokens > limits.sm_count and width > cluster * 1024 * most_items)):
            break
        cluster *= 2
    needed = -(-width // (threads * cluster))
    return Split(threads, cluster, min(-(-needed // _GROUP) * _GROUP, most_items))


def divisor(by: int) -> tuple[int, int, int]:
    """-> by, multiplier, shift, such that n // by == n * multiplier >> 31 + shift for 0 <= n < 2**31.

    The multiplier, less than 2**32, is given as the int32 of the same bits.
    """
    shift = (by - 1).bit_length()  # 2**shift >= by bounds the error of the rounded-up multiplier
    multiplier = (1 << 31 + shift) // by + 1
    return by, multiplier - (1 << 32 if multiplier >= 1 << 31 else 0), shift


@torch.library.custom_op(
    "graphkv::topk",
    mutates_args=("out_slot", "out_position"),
    schema="(Tensor logits, Tensor context_len, Tensor page_table, Tensor token_row, int block_size, "
    "Tensor(a!) out_slot, Tensor(b!) out_position) -> ()",
    device_types="cpu",
)
def _topk(
    logits: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    block_size: int,
    out_slot: Tensor,
    out_position: Tensor,
) -> None:
    check_contexts("topk", context_len, token_row, logits.shape[1], page_table, block_size)
    out_slot.fill_(-1)
    out_position.fill_(-1)
    width = int(context_len.max()) if context_len.numel() else 0
    if width <= 0 or not out_slot.shape[1]:
        return
    column = torch.arange(width)
    past = column >= context_len.unsqueeze(1)
    if width <= out_slot.shape[1]:
        position = column.expand(len(logits), width)  # everything is selected
    else:
        scores = logits[:, :width].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        # Stable, so a tie goes to the lowest position, and columns past the context come behind any -inf within it.
        order = scores.masked_fill_(past, -torch.inf).argsort(dim=1, descending=True, stable=True)
        position = order[:, : out_slot.shape[1]].sort(dim=1).values
    chosen = position < context_len.unsqueeze(1)  # a context below k leaves its last columns unchosen
    row = torch.where(context_len > 0, token_row, 0).long().unsqueeze(1)
    column_of_table = torch.div(position, block_size, rounding_mode="floor")
    slot = page_table[row, column_of_table] * block_size + position % block_size
    out_slot[:, : position.shape[1]] = torch.where(chosen, slot, -1)
    out_position[:, : position.shape[1]] = torch.where(chosen, position, -1)


@_topk.register_kernel("cuda")
def _topk_cuda(
    logits: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    block_size: int,
    out_slot: Tensor,
    out_position: Tensor,
) -> None:
    tokens, k = out_slot.shape
    if not tokens or not k:
        return
    split = split_rows(tokens, logits.shape[1], limits_of(logits.device))
    table = (page_table, page_table.stride(0), page_table.shape[1])
    args = (logits, logits.stride(0), logits.shape[1], context_len, *table, token_row, *divisor(block_size))
    launch(
        "topk",
        "PqiPPqiPiiiiiPP",
        tokens * split.cluster,
        split.threads,
        (*args, k, split.shared_items, out_slot, out_position),
        device=logits.device,
        defines={"THREADS": split.threads, "CLUSTER": split.cluster},
        shared_bytes=4 * split.threads * split.shared_items,
    )


_topk.register_fake(no_result)
