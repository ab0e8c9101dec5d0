"""The indexer of a decode step as one op: the scores of each token's context, and the selection of the best of them."""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.layout import IndexKFormat, index_k_layout
from graphkv.ops import index_k, select
from graphkv.ops.check import FLOAT32, FLOATS, INT32, ArgumentCheck, member
from graphkv.ops.launch import no_result


def index_topk(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    index_page_table: Tensor,
    token_row: Tensor,
    context_len: Tensor,
    latent_page_table: Tensor,
    block_size: int,
    logits: Tensor,
    out_slot: Tensor,
    out_position: Tensor,
    format: str,
) -> None:
    """Select each token's min(k, context_len) best positions by the indexer's scores, as `topk` orders them.

    It runs the kernels of `paged_index_logits` and `topk` one after the other: a kernel that scores fills every
    multiprocessor to its end, and what it leaves in `logits` the selection finds in the L2 cache.

    Args:
        q, weights, pages, format: see `paged_index_logits`.
        index_page_table: i32 [B, M] of the index K pool; rows may be strided.
        token_row: i32 [T], the row of each token; not read where context_len is 0.
        context_len: i32 [T], positions to score and select from; 0 (a padded token) selects nothing.
        latent_page_table: i32 [B, N] of the latent pool; rows may be strided.
        block_size: tokens a page of the latent pool.
        logits: f32 [T, W], workspace, W at least the longest context; rows may be strided.
        out_slot: i32 [T, k], the selected positions' slots in the latent pool, then -1.
        out_position: i32 [T, k], the positions, ascending, then -1.
    """
    op = "index_topk"
    check = ArgumentCheck(op, pages.device)
    fmt = member(op, "format", IndexKFormat, format)
    check.tensor("q", q, (*FLOATS, torch.float8_e4m3fn), "T H D")
    check.tensor("weights", weights, FLOAT32, "T H")
    check.pages(pages, index_k_layout(fmt, q.shape[2], pages.shape[1]))
    check.tensor("index_page_table", index_page_table, INT32, "B M", free_rows=True)
    check.tensor("token_row", token_row, INT32, "T")
    check.tensor("context_len", context_len, INT32, "T")
    check.tensor("latent_page_table", latent_page_table, INT32, "B N", free_rows=True)
    check.at_least("block_size", block_size, 1)
    check.tensor("logits", logits, FLOAT32, "T W", free_rows=True)
    check.tensor("out_slot", out_slot, INT32, "T k")
    check.tensor("out_position", out_position, INT32, "T k")
    lookup = (index_page_table, token_row, context_len, latent_page_table, block_size)
    _index_topk(q, weights, pages, *lookup, logits, out_slot, out_position, fmt.value)


@torch.library.custom_op(
    "graphkv::index_topk",
    mutates_args=("logits", "out_slot", "out_position"),
    schema="(Tensor q, Tensor weights, Tensor pages, Tensor index_page_table, Tensor token_row, Tensor context_len, "
    "Tensor latent_page_table, int block_size, Tensor(a!) logits, Tensor(b!) out_slot, Tensor(c!) out_position, "
    "str format) -> ()",
)
def _index_topk(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    index_page_table: Tensor,
    token_row: Tensor,
    context_len: Tensor,
    latent_page_table: Tensor,
    block_size: int,
    logits: Tensor,
    out_slot: Tensor,
    out_position: Tensor,
    format: str,
) -> None:
    index_k._paged_index_logits(q, weights, pages, index_page_table, token_row, context_len, logits, format)
    select._topk(logits, context_len, latent_page_table, token_row, block_size, out_slot, out_position)


_index_topk.register_fake(no_result)
