"""Page sizes of consumers apart from the block size: the same bytes and slots, seen as smaller pages.

The block stays the unit of allocation. A layer's share of a block is one run of bytes, so a consumer whose pages are
`k` times smaller sees k pages where others see one: page p becomes pages `p * k` .. `p * k + k - 1`. A token slot keeps
its number, since `page * page_size + offset` counts tokens from the same base.

Latents, and index K without scales, have the same bytes either way. Quantised index K keeps its scales behind the
values of each page, so its bytes depend on the page size: all that store, gather, score or partly copy it must use the
one size. The byte offsets of a live set are those of unsplit pages.
"""

from __future__ import annotations

import torch

from graphkv.errors import InvalidValue


def pages_a_block(block_size: int, page_size: int) -> int:
    """How many pages of `page_size` tokens a block has; `InvalidValue` unless they fill it."""
    if page_size < 1 or block_size % page_size:
        raise InvalidValue(
            f"a page of {page_size} tokens does not divide a block of {block_size}; page sizes divide the block size, "
            "so raise block_size to a multiple of every page size"
        )
    return block_size // page_size


def split_pages(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """A page view u8 [pages, block_size, 1, token_bytes] as u8 [pages * k, page_size, 1, token_bytes]; no copy."""
    split = pages_a_block(pages.shape[1], page_size)
    return pages.view(pages.shape[0] * split, page_size, 1, pages.shape[3])


def split_page_table(
    page_table: torch.Tensor, block_size: int, page_size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The page table of `split_pages`, i32 [B, M * k] from i32 [B, M]; null pages become pages of the null block.

    Args:
        out: where to put it, e.g. of the step's workspace, so that a captured step allocates nothing.
    """
    split = pages_a_block(block_size, page_size)
    rows, columns = page_table.shape
    if out is None:
        out = page_table.new_empty((rows, columns * split))
    elif tuple(out.shape) != (rows, columns * split) or out.dtype != page_table.dtype:
        raise InvalidValue(
            f"out must be {page_table.dtype} [{rows}, {columns * split}], got {out.dtype} {list(out.shape)}"
        )
    for part in range(split):
        torch.add(torch.mul(page_table, split), part, out=out[:, part::split])
    return out
