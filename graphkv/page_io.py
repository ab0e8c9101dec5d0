"""Rows of bytes into and out of pages by token slot: the torch path that every role and format shares."""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.errors import InvalidValue
from graphkv.layout import PageLayout


def value_rows(pages: Tensor, layout: PageLayout) -> Tensor:
    """View u8 [pages, block_size, value_bytes] of the values of a page view u8 [pages, block_size, 1, token_bytes]."""
    shape = (pages.shape[0], layout.block_size, layout.value_bytes)
    return pages.as_strided(shape, (pages.stride(0), layout.value_bytes, 1), pages.storage_offset())


def scale_rows(pages: Tensor, layout: PageLayout) -> Tensor:
    """View u8 [pages, block_size, scale_bytes] of the scales behind the values of each page."""
    shape = (pages.shape[0], layout.block_size, layout.scale_bytes)
    offset = pages.storage_offset() + layout.block_size * layout.value_bytes
    return pages.as_strided(shape, (pages.stride(0), layout.scale_bytes, 1), offset)


def write_rows(pages: Tensor, layout: PageLayout, slot: Tensor, values: Tensor, scales: Tensor) -> None:
    """Scatter rows by slot.

    Args:
        pages: u8 [pages, block_size, 1, token_bytes].
        slot: i64 [T], `page * block_size + offset`; -1 writes nothing.
        values, scales: u8 [T, value_bytes], u8 [T, scale_bytes].

    Raises:
        InvalidValue: a slot is outside the pages; nothing was written.
    """
    keep = slot >= 0
    if not bool(keep.all()):
        slot, values, scales = slot[keep], values[keep], scales[keep]
    page, offset = _split(pages, layout, slot)
    value_rows(pages, layout)[page, offset] = values
    if layout.scale_bytes:
        scale_rows(pages, layout)[page, offset] = scales


def read_rows(pages: Tensor, layout: PageLayout, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Gather rows by slot i64 [N] (none may be -1): values u8 [N, value_bytes] and scales u8 [N, scale_bytes]."""
    page, offset = _split(pages, layout, slot)
    return value_rows(pages, layout)[page, offset], scale_rows(pages, layout)[page, offset]


def table_slots(page_table: Tensor, row: Tensor, position: Tensor, block_size: int) -> Tensor:
    """Slots i64 [N] of positions i64 [N] of rows i64 [N] by page_table i32 [B, M]."""
    page = page_table[row, torch.div(position, block_size, rounding_mode="floor")].long()
    return page * block_size + position % block_size


def _split(pages: Tensor, layout: PageLayout, slot: Tensor) -> tuple[Tensor, Tensor]:
    num_slots = pages.shape[0] * layout.block_size
    if slot.numel() and not (int(slot.min()) >= 0 and int(slot.max()) < num_slots):
        raise InvalidValue(
            f"slots must be in 0..{num_slots - 1} ({pages.shape[0]} pages of {layout.block_size} tokens), "
            f"got {int(slot.min())}..{int(slot.max())}"
        )
    return torch.div(slot, layout.block_size, rounding_mode="floor"), slot % layout.block_size
