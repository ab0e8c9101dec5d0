"""The ops that move bytes, at every place: each byte of the pages and of the outputs against the oracle."""

from __future__ import annotations

from typing import Any

import golden
import numpy as np
import oracles
import places
import pytest
import torch
from helpers import POISON, poison
from places import GuardedPages, tensor

from graphkv import ops
from graphkv.errors import InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, PageLayout, index_k_layout, latent_layout

I32, I64 = torch.int32, torch.int64

# format, input dtype, head_dim, block_size, scale mode, bytes between pages
INDEX_K = [
    ("fp32", torch.float32, 128, 64, "pow2", 0),
    ("bf16", torch.bfloat16, 128, 64, "pow2", 0),
    ("bf16", torch.float32, 20, 5, "pow2", 2),
    ("fp8", torch.float32, 128, 64, "pow2", 0),
    ("fp8", torch.bfloat16, 128, 64, "linear", 4),
    ("fp8", torch.float32, 128, 5, "linear", 1),
    ("fp8", torch.float32, 32, 4, "pow2", 0),
    ("fp8", torch.bfloat16, 64, 16, "pow2", 0),
    ("fp8", torch.float32, 256, 8, "pow2", 0),
    ("fp4", torch.float32, 128, 64, "pow2", 0),
    ("fp4", torch.bfloat16, 128, 5, "pow2", 3),
]
# format, head_dim, block_size, bytes between pages
GATHER = [
    ("fp32", 128, 64, 0),
    ("bf16", 20, 4, 0),
    ("fp8", 128, 64, 0),
    ("fp8", 128, 5, 0),
    ("fp8", 128, 64, 4),
    ("fp4", 128, 64, 0),
    ("fp4", 128, 5, 1),
]
# format, input dtype, kv_lora_rank, rope width, block_size, bytes between pages
LATENT = [
    ("fp32", torch.float32, 20, 6, 4, 0),
    ("fp32", torch.bfloat16, 512, 64, 64, 0),
    ("bf16", torch.bfloat16, 512, 64, 64, 0),
    ("bf16", torch.float32, 21, 3, 5, 1),
    ("fp8", torch.float32, 512, 64, 64, 0),
    ("fp8", torch.bfloat16, 30, 5, 4, 2),
    ("fp8_ds_mla", torch.bfloat16, 512, 64, 64, 0),
    ("fp8_ds_mla", torch.float32, 128, 6, 4, 1),
    ("fp8_ds_mla", torch.float32, 1024, 32, 4, 16),
    ("fp8", torch.bfloat16, 128, 16, 4, 16),
]
# latent format, index_k format, dtype, kv_lora_rank, rope width, head_dim, scale mode, bytes between pages
LAYER = [
    ("fp8_ds_mla", "fp8", torch.bfloat16, 512, 64, 128, "pow2", 0),
    ("fp8_ds_mla", "fp4", torch.float32, 512, 64, 128, "pow2", 16),
    ("bf16", "bf16", torch.bfloat16, 512, 64, 128, "linear", 0),
    ("fp8", "fp8", torch.float32, 30, 5, 64, "linear", 1),
]


@pytest.fixture(params=places.PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch)


def slots_of(rng: np.random.Generator, layout: PageLayout, num_pages: int, tokens: int) -> np.ndarray[Any, Any]:
    """Distinct slots, the first and the last one among them, and two -1."""
    last = num_pages * layout.block_size - 1
    slots = np.concatenate([[0, last, -1, -1], 1 + rng.permutation(last - 1)])[:tokens].astype(np.int64)
    rng.shuffle(slots)
    return slots


def ordinary(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Without the NaN, whose payload bf16 and fp32 do not pin."""
    return np.nan_to_num(x, nan=7.0, posinf=np.inf, neginf=-np.inf)


@pytest.mark.parametrize("lead", [3, 16], ids=["any address", "vectors"])
@pytest.mark.parametrize(("fmt", "dtype", "head_dim", "block_size", "mode", "gap"), INDEX_K)
def test_store_index_k_writes_the_row_and_nothing_else(
    device: torch.device,
    rng: np.random.Generator,
    lead: int,
    fmt: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    mode: str,
    gap: int,
) -> None:
    pages = GuardedPages(index_k_layout(IndexKFormat(fmt), head_dim, block_size), 6, device, gap)
    k = places.rows(rng, 19, head_dim)
    # Rows that are not side by side, and aligned only where all starts are multiples of 16.
    wide = np.pad(ordinary(k) if fmt in ("fp32", "bf16") else k, ((0, 0), (lead, lead - lead % 2)))
    given = tensor(wide, device).to(dtype)[:, lead : lead + head_dim]
    slots = slots_of(rng, pages.layout, 6, 19)
    ops.store_index_k(given, pages.view, tensor(slots, device), fmt, mode, 1e-4)
    values, scales = oracles.index_k_bytes(given.float().cpu().numpy(), fmt, mode == "linear", 1e-4)
    oracles.place_rows(pages.image, pages.stride, block_size, slots, values, scales)
    pages.check()


@pytest.mark.parametrize("lead", [3, 16], ids=["any address", "vectors"])
@pytest.mark.parametrize(("fmt", "dtype", "rank", "rope_dim", "block_size", "gap"), LATENT)
def test_store_latent_writes_the_record_and_nothing_else(
    device: torch.device,
    rng: np.random.Generator,
    lead: int,
    fmt: str,
    dtype: torch.dtype,
    rank: int,
    rope_dim: int,
    block_size: int,
    gap: int,
) -> None:
    pages = GuardedPages(latent_layout(LatentFormat(fmt), rank, rope_dim, block_size), 6, device, gap)
    both = places.rows(rng, 17, rank + rope_dim)
    if fmt != "fp8":
        both = ordinary(both)
    joined = tensor(np.pad(both, ((0, 0), (lead, 0))), device).to(dtype)
    c, rope = joined[:, lead : lead + rank], joined[:, lead + rank :]
    slots = slots_of(rng, pages.layout, 6, 17)
    ops.store_latent(c, rope, pages.view, tensor(slots, device), fmt, 0.37)
    records = oracles.latent_bytes(c.float().cpu().numpy(), rope.float().cpu().numpy(), fmt, 0.37)
    no_scales = np.empty((17, 0), np.uint8)
    oracles.place_rows(pages.image, pages.stride, block_size, slots, records, no_scales)
    pages.check()


@pytest.mark.parametrize("tokens", [1, 18])
@pytest.mark.parametrize(("latent", "index_k", "dtype", "rank", "rope_dim", "head_dim", "mode", "gap"), LAYER)
def test_store_layer_writes_what_the_two_stores_write(
    device: torch.device,
    rng: np.random.Generator,
    latent: str,
    index_k: str,
    dtype: torch.dtype,
    rank: int,
    rope_dim: int,
    head_dim: int,
    mode: str,
    gap: int,
    tokens: int,
) -> None:
    latents = GuardedPages(latent_layout(LatentFormat(latent), rank, rope_dim, 16), 6, device, gap)
    keys = GuardedPages(index_k_layout(IndexKFormat(index_k), head_dim, 16), 4, device, gap)
    c, rope, k = (
        tensor(ordinary(places.rows(rng, tokens, width)), device).to(dtype) for width in (rank, rope_dim, head_dim)
    )
    slots = slots_of(rng, latents.layout, 6, tokens), slots_of(rng, keys.layout, 4, tokens)
    ops.store_layer(
        c,
        rope,
        latents.view,
        tensor(slots[0], device),
        k,
        keys.view,
        tensor(slots[1], device),
        latent,
        index_k,
        latent_scale=0.37,
        scale_mode=mode,
        amax_floor=1e-12,
    )
    records = oracles.latent_bytes(c.float().cpu().numpy(), rope.float().cpu().numpy(), latent, 0.37)
    oracles.place_rows(latents.image, latents.stride, 16, slots[0], records, np.empty((tokens, 0), np.uint8))
    rows = oracles.index_k_bytes(k.float().cpu().numpy(), index_k, mode == "linear", 1e-12)
    oracles.place_rows(keys.image, keys.stride, 16, slots[1], *rows)
    latents.check()
    keys.check()


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 0.37, 3.0, 1e31])
def test_quotients_are_rounded_as_a_division_rounds_them(
    device: torch.device, rng: np.random.Generator, scale: float
) -> None:
    """Also where a quotient is a tie between two codes, overflows, or comes from tiny numbers."""
    pages = GuardedPages(latent_layout(LatentFormat.FP8, 512, 64, 64), 2, device)
    codes = rng.integers(0, 0x7E, (64, 576))
    ties = (oracles.E4M3[codes] + oracles.E4M3[codes + 1]) / 2 * float(np.float32(scale))
    near = ties.astype(np.float32) * (1 + rng.integers(-2, 3, ties.shape) * np.float32(2.0**-23))
    near[:, :4] = [3e38, -3e38, np.inf, -1e-45]
    joined = tensor((near * rng.choice([1, -1], near.shape)).astype(np.float32), device)
    slots = torch.arange(64, device=device)
    ops.store_latent(joined[:, :512], joined[:, 512:], pages.view, slots, "fp8", scale)
    with np.errstate(over="ignore"):
        records = oracles.latent_bytes(*np.split(joined.cpu().numpy(), [512], axis=1), "fp8", scale)
    oracles.place_rows(pages.image, pages.stride, 64, np.arange(64), records, np.empty((64, 0), np.uint8))
    pages.check()


@pytest.mark.parametrize(("fmt", "head_dim", "block_size", "gap"), GATHER)
def test_case_D2_gather_index_k_copies_the_rows_and_nothing_else(
    device: torch.device, rng: np.random.Generator, fmt: str, head_dim: int, block_size: int, gap: int
) -> None:
    """Also for page strides that are no multiple of 16."""
    layout = index_k_layout(IndexKFormat(fmt), head_dim, block_size)
    pages = GuardedPages(layout, 9, device, gap)
    pages.fill(rng, fmt)
    lengths = [0, 3 * block_size, 0, 0, 1, 2 * block_size - 1, block_size + 1, 0]
    table = np.stack([rng.permutation(9)[:3] for _ in lengths]).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    room = int(start[-1]) + 5
    values = poison(torch.empty(room, layout.value_bytes, dtype=torch.uint8, device=device))
    scales = poison(torch.empty(room, layout.scale_bytes, dtype=torch.uint8, device=device))
    wide = tensor(np.pad(table, ((0, 0), (0, 2)), constant_values=-9), device)
    ops.gather_index_k(pages.view, wide[:, :3], tensor(start, device), values, scales, fmt)
    slots = [s for b, n in enumerate(lengths) for s in oracles.row_slots(table[b], n, block_size)]
    want = oracles.take_rows(pages.image, pages.stride, block_size, slots, layout.value_bytes, layout.scale_bytes)
    for got, rows in zip((values, scales), want, strict=True):
        untouched = np.full((5, rows.shape[1]), POISON, np.uint8)
        np.testing.assert_array_equal(got.cpu().numpy(), np.concatenate([rows, untouched]))
    pages.check()


@pytest.mark.parametrize(("rows", "longest"), [(1, 300), (31, 9), (33, 40), (257, 3), (1100, 2)])
def test_case_D2_gather_finds_the_row_of_each_token(
    device: torch.device, rng: np.random.Generator, rows: int, longest: int
) -> None:
    """Many rows, many of them empty; the first output tokens belong to no row."""
    layout = index_k_layout(IndexKFormat.FP8, 128, 8)
    pages = GuardedPages(layout, 40, device)
    pages.fill(rng, "fp8")
    lengths = rng.integers(0, longest + 1, rows) * (rng.random(rows) < 0.7)
    lengths[-1] = longest
    table = rng.integers(0, 40, (rows, -(-longest // 8))).astype(np.int32)
    start = (5 + np.concatenate([[0], np.cumsum(lengths)])).astype(np.int32)
    values, scales = (
        poison(torch.empty(int(start[-1]) + 3, width, dtype=torch.uint8, device=device)) for width in (128, 4)
    )
    ops.gather_index_k(pages.view, tensor(table, device), tensor(start, device), values, scales, "fp8")
    slots = [s for b, n in enumerate(lengths) for s in oracles.row_slots(table[b], int(n), 8)]
    want = oracles.take_rows(pages.image, pages.stride, 8, slots, 128, 4)
    for got, taken in zip((values, scales), want, strict=True):
        padded = np.pad(taken, ((5, 3), (0, 0)), constant_values=POISON)
        np.testing.assert_array_equal(got.cpu().numpy(), padded)


@pytest.mark.parametrize(("fmt", "place", "top"), [("fp8", golden.FP8_PLACE, 448.0), ("fp4", golden.FP4_PLACE, 6.0)])
def test_store_index_k_puts_the_worked_position_where_the_golden_vector_says(
    device: torch.device, fmt: str, place: tuple[int, ...], top: float
) -> None:
    position, block_size, page, value_at, scale_at = place
    pages = GuardedPages(index_k_layout(IndexKFormat(fmt), 128, block_size), page + 1, device)
    k = torch.zeros(1, 128, device=device)
    k[0, ::32] = top
    slot = torch.tensor([page * block_size + position % block_size], device=device)
    ops.store_index_k(k, pages.view, slot, fmt)
    image = pages.buffer.cpu().numpy()[GuardedPages.GUARD :]
    assert image[value_at] == {"fp8": 0x7E, "fp4": 0x07}[fmt]
    assert image[scale_at : scale_at + 4].tobytes() == {"fp8": golden.FP8_SCALE_ONE, "fp4": b"\x7f" * 4}[fmt]
    written = np.flatnonzero(image[: -GuardedPages.GUARD] != POISON)
    value_bytes = {"fp8": 128, "fp4": 64}[fmt]
    assert set(written) == {*range(value_at, value_at + value_bytes), *range(scale_at, scale_at + 4)}


@pytest.mark.parametrize(("fmt", "value_bytes", "page_bytes"), [("fp8", 128, 64 * 132), ("fp4", 64, 64 * 68)])
def test_case_D1_scales_stand_behind_all_values_of_the_page(
    device: torch.device, fmt: str, value_bytes: int, page_bytes: int
) -> None:
    tokens, blocks = (0, 1, 63), (0, 1, 6)
    pages = GuardedPages(index_k_layout(IndexKFormat(fmt), 128, 64), 7, device)
    pairs = [(block, token) for block in blocks for token in tokens]
    exponents = np.arange(len(pairs)) - 4  # a scale of its own for each
    k = np.zeros((len(pairs), 128), np.float32)
    k[:, ::32] = ({"fp8": 448.0, "fp4": 6.0}[fmt] * 2.0**exponents)[:, None]
    slots = np.array([block * 64 + token for block, token in pairs])
    ops.store_index_k(tensor(k, device), pages.view, tensor(slots, device), fmt)
    image = pages.buffer.cpu().numpy()[GuardedPages.GUARD :]
    for (block, token), exponent in zip(pairs, exponents, strict=True):
        at = block * page_bytes + 64 * value_bytes + 4 * token
        scale = image[at : at + 4]
        want = np.array([2.0**exponent], np.float32).view(np.uint8) if fmt == "fp8" else [127 + exponent] * 4
        np.testing.assert_array_equal(scale, want)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_case_D3_elements_come_back_in_order(device: torch.device, fmt: str) -> None:
    """Elements 0, 1, 126, 127 of tokens 0, 1, 63 in the first and last block: stored, gathered, compared."""
    layout = index_k_layout(IndexKFormat(fmt), 128, 64)
    pages = GuardedPages(layout, 4, device)
    k = np.zeros((6, 128), np.float32)
    k[:, [0, 1, 126, 127]] = [
        [1, 2, 3, 6],
        [-1, 3, 4, -6],
        [0.5, 1, 1.5, 6],
        [6, 4, 3, 2],
        [2, -2, 6, -6],
        [6, 1, 4, -1],
    ]
    slots = [block * 64 + token for block in (0, 3) for token in (0, 1, 63)]
    ops.store_index_k(tensor(k, device), pages.view, torch.tensor(slots, device=device), fmt)
    values = poison(torch.empty(128, layout.value_bytes, dtype=torch.uint8, device=device))
    scales = poison(torch.empty(128, 4, dtype=torch.uint8, device=device))
    table = torch.tensor([[0, 3]], dtype=I32, device=device)
    ops.gather_index_k(pages.view, table, torch.tensor([0, 128], dtype=I32, device=device), values, scales, fmt)
    picked = [0, 1, 63, 64, 65, 127]
    back = oracles.decode_index_k(values.cpu().numpy()[picked], scales.cpu().numpy()[picked], fmt)
    np.testing.assert_array_equal(back, k)


@pytest.mark.parametrize("fmt", list(IndexKFormat))
def test_case_C1_padded_tokens_store_no_index_k(device: torch.device, rng: np.random.Generator, fmt: str) -> None:
    """Live data in block 0 and in the last slot of a pool of 5 blocks; one row is real, three are padding."""
    pages = GuardedPages(index_k_layout(IndexKFormat(fmt), 128, 16), 5, device)
    pages.fill(rng, fmt)
    k = rng.standard_normal((4, 128)).astype(np.float32)
    slots = np.array([2 * 16 + 5, -1, -1, -1])
    for _ in range(10):
        ops.store_index_k(tensor(k, device), pages.view, tensor(slots, device), fmt)
    oracles.place_rows(pages.image, pages.stride, 16, slots, *oracles.index_k_bytes(k, fmt))
    pages.check()


@pytest.mark.parametrize("fmt", list(LatentFormat))
def test_case_C1_padded_tokens_store_no_latent(device: torch.device, rng: np.random.Generator, fmt: str) -> None:
    pages = GuardedPages(latent_layout(LatentFormat(fmt), 128, 8, 16), 5, device)
    pages.fill(rng, fmt)
    c, rope = (rng.standard_normal((4, width)).astype(np.float32) for width in (128, 8))
    slots = np.array([-1, -1, 4 * 16 + 14, -1])
    for _ in range(10):
        ops.store_latent(tensor(c, device), tensor(rope, device), pages.view, tensor(slots, device), fmt, 0.5)
    records = oracles.latent_bytes(c, rope, fmt, 0.5)
    oracles.place_rows(pages.image, pages.stride, 16, slots, records, np.empty((4, 0), np.uint8))
    pages.check()


@pytest.mark.parametrize("store", ["index_k", "latent"])
def test_a_slot_outside_the_pool_writes_nothing(
    device: torch.device, request: pytest.FixtureRequest, store: str
) -> None:
    """The CPU side says so; a kernel, which cannot, skips the token."""
    layout = (
        index_k_layout(IndexKFormat.FP8, 128, 4) if store == "index_k" else latent_layout(LatentFormat.FP8, 8, 4, 4)
    )
    pages = GuardedPages(layout, 3, device)
    slot = torch.tensor([12, -7, 2**40], device=device)

    def run() -> None:
        if store == "index_k":
            ops.store_index_k(torch.ones(3, 128, device=device), pages.view, slot, "fp8")
        else:
            ops.store_latent(torch.ones(3, 8, device=device), torch.ones(3, 4, device=device), pages.view, slot, "fp8")

    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(InvalidValue, match=r"slots must be in 0\.\.11 \(3 pages of 4 tokens\), got 12"):
            run()
    else:
        run()
    pages.check()


def test_no_tokens_is_no_error(device: torch.device) -> None:
    pages = GuardedPages(index_k_layout(IndexKFormat.FP8, 128, 4), 2, device)
    none = torch.empty(0, dtype=I64, device=device)
    ops.store_index_k(torch.empty(0, 128, device=device), pages.view, none, "fp8")
    values, scales = (torch.empty(0, n, dtype=torch.uint8, device=device) for n in (128, 4))
    table, start = torch.zeros(2, 1, dtype=I32, device=device), torch.zeros(3, dtype=I32, device=device)
    ops.gather_index_k(pages.view, table, start, values, scales, "fp8")
    pages.check()
