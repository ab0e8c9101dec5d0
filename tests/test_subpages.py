"""Page sizes of consumers apart from the block size (case C4): the bytes and tables that such a consumer reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import poison

from graphkv import ops
from graphkv.errors import InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, index_k_layout, latent_layout
from graphkv.selection.subpages import pages_a_block, split_page_table, split_pages

D, LAYERS, BLOCKS = 128, 3, 4  # of a coalesced pool: layers side by side inside a block


@pytest.mark.parametrize("index_k", list(IndexKFormat))
@pytest.mark.parametrize(("block_size", "page_size"), [(128, 64), (64, 32), (64, 16), (64, 64)])
def test_case_C4_an_indexer_with_smaller_pages_finds_its_own_layout(
    device: torch.device, index_k: IndexKFormat, block_size: int, page_size: int, rng: np.random.Generator
) -> None:
    """Slots of the block size, stored through the split view: each byte is where a pool of that page size has it."""
    layout = index_k_layout(index_k, D, page_size)
    block_bytes = LAYERS * block_size * layout.token_bytes
    pool = poison(torch.empty(BLOCKS * block_bytes, dtype=torch.uint8, device=device))
    layer, blocks, length = 1, [3, 1], 2 * block_size - 5
    base = layer * block_size * layout.token_bytes
    shape = (BLOCKS * LAYERS - layer, block_size, 1, layout.token_bytes)
    pages = split_pages(pool[base:].view(shape), page_size)
    assert pages.data_ptr() == pool[base:].data_ptr()

    position = np.arange(length)
    slot = np.array(blocks)[position // block_size] * LAYERS * block_size + position % block_size
    k = torch.from_numpy(rng.standard_normal((length, D)).astype(np.float32)).to(device)
    ops.store_index_k(k, pages, torch.from_numpy(slot).to(device), index_k)

    room = 256  # of one page that holds them all: values, then scales
    alone = poison(torch.empty((1, room, 1, layout.token_bytes), dtype=torch.uint8, device=device))
    ops.store_index_k(k, alone, torch.arange(length, device=device), index_k)
    flat = alone.flatten().cpu().numpy()
    values = flat[: length * layout.value_bytes].reshape(length, layout.value_bytes)
    scales = flat[room * layout.value_bytes :][: length * layout.scale_bytes].reshape(length, layout.scale_bytes)
    expected = np.full(pool.numel(), 0xA5, np.uint8)
    for p in range(length):
        page_at = base + blocks[p // block_size] * block_bytes
        page_at += (p % block_size) // page_size * page_size * layout.token_bytes
        value_at = page_at + p % page_size * layout.value_bytes
        scale_at = page_at + page_size * layout.value_bytes + p % page_size * layout.scale_bytes
        expected[value_at : value_at + layout.value_bytes] = values[p]
        expected[scale_at : scale_at + layout.scale_bytes] = scales[p]
    np.testing.assert_array_equal(pool.cpu().numpy(), expected)

    table = torch.tensor([[b * LAYERS for b in blocks] + [0]], dtype=torch.int32, device=device)
    split = split_page_table(table, block_size, page_size)
    start = torch.tensor([0, length], dtype=torch.int32, device=device)
    out_values = poison(torch.empty((length, layout.value_bytes), dtype=torch.uint8, device=device))
    out_scales = poison(torch.empty((length, layout.scale_bytes), dtype=torch.uint8, device=device))
    ops.gather_index_k(pages, split, start, out_values, out_scales, index_k)
    np.testing.assert_array_equal(out_values.cpu().numpy(), values)
    np.testing.assert_array_equal(out_scales.cpu().numpy(), scales)


@pytest.mark.parametrize("latent", list(LatentFormat))
def test_case_C4_latents_have_the_same_bytes_at_every_page_size(device: torch.device, latent: LatentFormat) -> None:
    layout = latent_layout(latent, 128, 16, 64)
    c, rope = torch.randn(60, 128, device=device), torch.randn(60, 16, device=device)
    slot = torch.arange(130, 190, device=device)
    whole = poison(torch.empty((4, 64, 1, layout.token_bytes), dtype=torch.uint8, device=device))
    parts = whole.clone()
    ops.store_latent(c, rope, whole, slot, latent)
    ops.store_latent(c, rope, split_pages(parts, 16), slot, latent)
    assert torch.equal(whole, parts)


def test_a_split_table_names_each_part_and_null_pages_stay_in_the_null_block() -> None:
    table = torch.tensor([[6, 3, 0], [9, 0, 0]], dtype=torch.int32)
    expected = [[12, 13, 6, 7, 0, 1], [18, 19, 0, 1, 0, 1]]
    assert split_page_table(table, 64, 32).tolist() == expected
    out = torch.full((2, 6), -1, dtype=torch.int32)
    assert split_page_table(table[:, :], 64, 32, out) is out
    assert out.tolist() == expected
    assert split_page_table(table, 64, 64).tolist() == table.tolist()


@pytest.mark.parametrize("page_size", [48, 128, 0, -64])
def test_a_page_that_does_not_divide_the_block_is_refused(page_size: int) -> None:
    for call in (
        lambda: pages_a_block(64, page_size),
        lambda: split_pages(torch.zeros((2, 64, 1, 4), dtype=torch.uint8), page_size),
        lambda: split_page_table(torch.zeros((1, 2), dtype=torch.int32), 64, page_size),
    ):
        with pytest.raises(InvalidValue, match=f"a page of {page_size} tokens does not divide a block of 64"):
            call()


@pytest.mark.parametrize("shape", [(2, 5), (1, 6)])
def test_a_split_table_that_does_not_fit_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InvalidValue, match=r"out must be torch.int32 \[2, 6\]"):
        split_page_table(torch.zeros((2, 3), dtype=torch.int32), 64, 32, torch.zeros(shape, dtype=torch.int32))
