"""The selection of tokens: top-k of the scores, fused with the translation into slots of the latent pool."""

from __future__ import annotations

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
    table = (page_table, page_table.stride(0), page_table.shape[1])
    args = (logits, logits.stride(0), logits.shape[1], context_len, *table, token_row, block_size)
    launch("topk", "PqiPPqiPiiPP", tokens, 1024, (*args, k, out_slot, out_position), device=logits.device)


_topk.register_fake(no_result)
