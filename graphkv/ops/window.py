"""The tokens that a layer with a window reads, as slots: what such a layer has in place of a top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.errors import InvalidValue
from graphkv.ops.check import INT32, ArgumentCheck, check_contexts
from graphkv.ops.launch import launch, no_result

_THREADS = 256
_ENTRIES_A_THREAD = 4


def window_slots(
    context_len: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    block_size: int,
    window: int,
    sinks: int,
    out_slot: Tensor,
) -> None:
    """List the slots that each token reads: those of its sinks, then those of its window, in ascending order.

    A token at position p = context_len - 1 reads the positions below `sinks` and p - window + 1 .. p, each once.

    Args:
        context_len: i32 [T]; 0 (a padded token) lists nothing.
        page_table: i32 [B, M] of the latent pool of the layer's group; rows may be strided.
        token_row: i32 [T], the row of each token; not read where context_len is 0.
        block_size: tokens a page of that pool.
        window, sinks: see `graphkv.window.Window`.
        out_slot: i32 [T, k], k at least window + sinks: `page * block_size + offset`, -1 for a position without a page,
            and behind the list. `sparse_mla_decode` takes it.
    """
    check = ArgumentCheck("window_slots", page_table.device)
    check.tensor("context_len", context_len, INT32, "T")
    check.tensor("page_table", page_table, INT32, "B M", free_rows=True)
    check.tensor("token_row", token_row, INT32, "T")
    check.tensor("out_slot", out_slot, INT32, "T k")
    check.at_least("block_size", block_size, 1)
    check.at_least("window", window, 1)
    check.at_least("sinks", sinks, 0)
    if out_slot.shape[1] < window + sinks:
        raise InvalidValue(
            f"window_slots: out_slot has {out_slot.shape[1]} entries a token, but a window of {window} with {sinks} "
            f"sinks lists up to {window + sinks}"
        )
    _window_slots(context_len, page_table, token_row, block_size, window, sinks, out_slot)


@torch.library.custom_op(
    "graphkv::window_slots",
    mutates_args=("out_slot",),
    schema="(Tensor context_len, Tensor page_table, Tensor token_row, int block_size, int window, int sinks, "
    "Tensor(a!) out_slot) -> ()",
    device_types="cpu",
)
def _window_slots(
    context_len: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    block_size: int,
    window: int,
    sinks: int,
    out_slot: Tensor,
) -> None:
    columns = page_table.shape[1]
    check_contexts("window_slots", context_len, token_row, columns * block_size, page_table, block_size)
    length = context_len.long().unsqueeze(1)
    start = (length - window).clamp_min(0)
    first = start.clamp_max(sinks)
    entry = torch.arange(out_slot.shape[1])
    position = torch.where(entry < first, entry, start + entry - first)
    row = torch.where(context_len > 0, token_row, 0).long().unsqueeze(1)
    page = page_table[row, torch.div(position, block_size, rounding_mode="floor").clamp_max(columns - 1)]
    there = (position < length) & (page != 0)
    out_slot.copy_(torch.where(there, page * block_size + position % block_size, -1))


@_window_slots.register_kernel("cuda")
def _window_slots_cuda(
    context_len: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    block_size: int,
    window: int,
    sinks: int,
    out_slot: Tensor,
) -> None:
    tokens, k = out_slot.shape
    if not tokens:
        return
    chunks = -(-k // (_THREADS * _ENTRIES_A_THREAD))
    table = (page_table, page_table.stride(0), page_table.shape[1])
    args = (context_len, *table, token_row, block_size, window, sinks, k, out_slot)
    launch("window_slots", "PPqiPiiiiP", (tokens, chunks, 1), _THREADS, args, device=page_table.device)


_window_slots.register_fake(no_result)
