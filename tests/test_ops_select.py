"""Scores, selection and attention at every place, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import places
import pytest
import torch
from helpers import POISON, poison
from hypothesis import given
from hypothesis import strategies as st
from places import GuardedPages, tensor

from graphkv import ops
from graphkv.errors import InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, index_k_layout, latent_layout
from graphkv.ops import select
from graphkv.ops.launch import has_wgmma
from graphkv.ops.select import Limits, Split

I32 = torch.int32
SOURCES = {"f32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}

# index_k format, dtype of q, heads, head_dim, block_size, bytes between pages
SCORES = [
    ("fp32", "f32", 3, 20, 4, 0),
    ("bf16", "bf16", 64, 128, 64, 0),
    ("fp8", "e4m3", 64, 128, 64, 0),
    ("fp8", "bf16", 72, 32, 8, 1),
    ("fp4", "f32", 9, 128, 16, 0),
]
# latent format, dtype of q and out, heads, kv_lora_rank, rope width, block_size, bytes between pages
ATTENTION = [
    ("fp32", "f32", 3, 21, 5, 4, 0),
    ("fp32", "f32", 2, 600, 8, 4, 0),
    ("bf16", "bf16", 17, 512, 64, 64, 0),
    ("fp8", "bf16", 16, 64, 16, 16, 3),
    ("fp8_ds_mla", "f32", 5, 128, 6, 4, 1),
    ("fp8_ds_mla", "bf16", 33, 512, 64, 64, 0),
]


@pytest.fixture(params=places.PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch)


def stored_index_k(
    rng: np.random.Generator, fmt: str, head_dim: int, block_size: int, gap: int, device: torch.device
) -> GuardedPages:
    """Nine pages full of rows."""
    pages = GuardedPages(index_k_layout(IndexKFormat(fmt), head_dim, block_size), 9, device, gap)
    slots = np.arange(9 * block_size)
    k = rng.standard_normal((len(slots), head_dim)).astype(np.float32)
    oracles.place_rows(pages.image, pages.stride, block_size, slots, *oracles.index_k_bytes(k, fmt))
    pages.sync()
    return pages


@pytest.mark.parametrize(("fmt", "source", "heads", "head_dim", "block_size", "gap"), SCORES)
def test_paged_index_logits_scores_each_context_and_touches_nothing_else(
    device: torch.device,
    rng: np.random.Generator,
    fmt: str,
    source: str,
    heads: int,
    head_dim: int,
    block_size: int,
    gap: int,
) -> None:
    pages = stored_index_k(rng, fmt, head_dim, block_size, gap, device)
    layout = pages.layout
    full = 3 * block_size
    context = np.array([full, full - 1, 1, 0, block_size, block_size + 1, 0], np.int32)
    row = np.array([2, 2, 0, -5, 1, 1, 2**30], np.int32)  # a padded token's row may be anything
    table = np.stack([rng.permutation(9)[:3] for _ in range(3)]).astype(np.int32)
    q = tensor(rng.standard_normal((7, heads, head_dim)).astype(np.float32), device).to(SOURCES[source])
    weights = rng.standard_normal((7, heads)).astype(np.float32)
    buffer = poison(torch.empty(7, full + 9, device=device))
    wide = tensor(np.pad(table, ((0, 0), (0, 1)), constant_values=-9), device)
    given = (tensor(row, device), tensor(context, device))
    ops.paged_index_logits(q, tensor(weights, device), pages.view, wide[:, :3], *given, buffer[:, 2 : full + 4], fmt)
    got = buffer.cpu().numpy()
    untouched = got.view(np.uint8).reshape(7, -1, 4) == POISON
    for t, length in enumerate(context):
        assert untouched[t, :2].all()
        assert untouched[t, 2 + length :].all()
        if not length:
            continue
        slots = oracles.row_slots(table[row[t]], length, block_size)
        stored = oracles.take_rows(pages.image, pages.stride, block_size, slots, layout.value_bytes, layout.scale_bytes)
        want = oracles.index_logits(q[t].float().cpu().numpy(), weights[t], oracles.decode_index_k(*stored, fmt))
        logits = got[t, 2 : 2 + length].astype(np.float64)
        # Hopper's tensor cores add FP8 products in fewer bits than fp32 has.
        loose = 1000 if device.type == "cuda" and source == "e4m3" else 1
        np.testing.assert_allclose(logits, want, rtol=1e-5 * loose, atol=1e-6 * max(loose, 10) * heads * head_dim**0.5)
        assert np.sum((logits - want) ** 2) <= 1e-9 * loose * np.sum(logits**2 + want**2)  # DeepGEMM asks for 1e-3
    pages.check()


def run_topk(
    logits: np.ndarray[Any, Any], context: np.ndarray[Any, Any], k: int, block_size: int, device: torch.device
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions, slots, and the page table that made them; the rows of `logits` are strided."""
    tokens, width = logits.shape
    pages = -(-max(1, width) // block_size)
    table = np.random.default_rng(5).integers(0, 1000, (tokens, pages)).astype(np.int32)
    row = np.where(context > 0, np.arange(tokens)[::-1], -3).astype(np.int32)
    wide = tensor(np.pad(logits, ((0, 0), (1, 2)), constant_values=np.inf), device)
    slot, position = (poison(torch.empty(tokens + 2, k, dtype=I32, device=device)) for _ in range(2))
    lengths, rows = tensor(context.astype(np.int32), device), tensor(row, device)
    outs = (slot[1:-1], position[1:-1])
    ops.topk(wide[:, 1 : width + 1], lengths, tensor(table, device), rows, block_size, *outs)
    for guarded in (slot, position):
        assert bool((guarded[[0, -1]].cpu().view(torch.uint8) == POISON).all())
    return outs[1].cpu().numpy(), outs[0].cpu().numpy(), table[::-1]


def check_topk(logits: np.ndarray[Any, Any], context: np.ndarray[Any, Any], k: int, device: torch.device) -> None:
    block_size = 8
    positions, slots, table = run_topk(logits, context, k, block_size, device)
    for t, length in enumerate(context):
        want = oracles.select(logits[t, : max(0, length)], k)
        padding = [-1] * (k - len(want))
        assert positions[t].tolist() == want + padding
        assert slots[t].tolist() == [table[t, p // block_size] * block_size + p % block_size for p in want] + padding


@pytest.mark.parametrize(
    ("width", "k"), [(1, 1), (40, 7), (300, 64), (300, 512), (5000, 2048), (20_000, 9000), (33_000, 2048)]
)
def test_topk_is_exact(device: torch.device, rng: np.random.Generator, width: int, k: int) -> None:
    lengths = [width, width // 2, 1, 0, min(k, width), min(k + 1, width)]
    logits = (rng.standard_normal((6, width)) * 10.0 ** rng.integers(-3, 4, (6, 1))).astype(np.float32)
    check_topk(logits, np.array(lengths), k, device)


@pytest.mark.parametrize(
    "row",
    [
        np.zeros(200),
        np.where(np.arange(200) % 2, 0.0, -0.0),
        np.full(200, -np.inf),
        np.full(200, np.nan),
        np.where(np.arange(200) % 3, np.nan, -np.inf),
        np.where(np.arange(200) % 3, np.inf, np.nan),
        np.where(np.arange(200) < 150, 1.0, 2.0),
        np.where(np.arange(200) > 40, -1.0, -1e-45),
        np.arange(200) % 7 - 3.0,
    ],
    ids=["zeros", "signed zeros", "-inf", "nan", "nan and -inf", "inf and nan", "late best", "subnormal", "sevens"],
)
def test_topk_breaks_ties_by_lowest_position(device: torch.device, row: np.ndarray[Any, Any]) -> None:
    check_topk(np.stack([row, row[::-1]]).astype(np.float32), np.array([200, 171]), 64, device)


SPLITS = [
    *(pytest.param("host", split, marks=pytest.mark.host) for split in (Split(1024, 1, 8), Split(512, 1, 4))),
    pytest.param("cuda", Split(512, 1, 4), marks=pytest.mark.gpu),
    *(pytest.param("cuda", Split(1024, cluster, 4), marks=pytest.mark.gpu) for cluster in (1, 2, 4, 8)),
]


@pytest.mark.parametrize(("place", "split"), SPLITS, ids=str)
@pytest.mark.parametrize("kind", ["random", "narrow", "equal", "few values", "ascending", "descending"])
def test_topk_is_exact_however_rows_are_split(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, place: str, split: Split, kind: str
) -> None:
    device = places.enter(place, monkeypatch)
    monkeypatch.setattr(select, "split_rows", lambda *_: split)
    width = split.threads * split.cluster * 9 - 5  # the last keys of a thread are not kept in shared memory
    values = rng.standard_normal((5, width))
    logits = {
        "random": values,
        "narrow": 100 + 1e-3 * values,  # they differ in their last bits
        "equal": np.full_like(values, -2.5),
        "few values": np.rint(values),
        "ascending": np.sort(values),
        "descending": -np.sort(values),
    }[kind]
    # Whole, all but one, barely more than k, one thread's worth of a block, exactly k.
    check_topk(logits.astype(np.float32), np.array([width, width - 1, 601, split.threads + 1, 600]), 600, device)


def test_rows_are_split_by_number_and_width() -> None:
    h200 = Limits(132, 8, 227 * 1024 - 42 * 1024)
    for tokens, width, threads, cluster in [
        (1, 65536, 1024, 8),
        (64, 4096, 1024, 1),
        (64, 65536, 1024, 2),
        (32, 65536, 1024, 2),  # 32 clusters of 4 would not fit at once
        (256, 8192, 512, 1),
        (256, 65536, 1024, 2),
        (1, 1_000_000, 1024, 8),
    ]:
        assert select.split_rows(tokens, width, h200)[:2] == (threads, cluster)


@given(
    tokens=st.integers(1, 5000),
    width=st.integers(0, 2_000_000),
    limits=st.builds(Limits, st.integers(1, 200), st.sampled_from([1, 8]), st.integers(16 * 1024, 200 * 1024)),
)
def test_every_split_can_be_launched(tokens: int, width: int, limits: Limits) -> None:
    split = select.split_rows(tokens, width, limits)
    assert split.cluster <= limits.largest_cluster
    assert split.shared_items % 4 == 0
    assert 4 * split.threads * split.shared_items <= limits.shared_bytes
    assert split[:2] in {(threads, cluster) for threads in (512, 1024) for cluster in (1, 2, 4, 8)} - {
        (512, 2),
        (512, 4),
        (512, 8),
    }


@given(by=st.integers(1, 2**31 - 1), numbers=st.lists(st.integers(0, 2**31 - 1)))
def test_division_by_multiplication_is_exact(by: int, numbers: list[int]) -> None:
    _, multiplier, shift = select.divisor(by)
    assert -(2**31) <= multiplier < 2**31
    multiples = [n // by * by + near for n in numbers for near in (-1, 0, 1)]
    for n in (0, by - 1, by, 2**31 - 1, *numbers, *(m for m in multiples if 0 <= m < 2**31)):
        assert n * (multiplier % 2**32) >> 31 + shift == n // by


def test_topk_gives_the_same_twice(device: torch.device, rng: np.random.Generator) -> None:
    logits = rng.integers(-3, 3, (4, 4000)).astype(np.float32)
    context = np.array([4000, 3999, 2049, 2048])
    first, second = (run_topk(logits, context, 2048, 64, device) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def latents_go_as_16_bits(device: torch.device, source: str, rank: int) -> bool:
    return source == "bf16" and rank == 512 and has_wgmma(device)


@pytest.mark.parametrize(("fmt", "source", "heads", "rank", "rope_dim", "block_size", "gap"), ATTENTION)
def test_sparse_mla_decode_attends_to_the_selected_tokens(
    device: torch.device,
    rng: np.random.Generator,
    fmt: str,
    source: str,
    heads: int,
    rank: int,
    rope_dim: int,
    block_size: int,
    gap: int,
) -> None:
    layout = latent_layout(LatentFormat(fmt), rank, rope_dim, block_size)
    pages = GuardedPages(layout, 9, device, gap)
    k, scale, softmax_scale = 37, 0.02, 0.11
    slots = rng.integers(1, 9 * block_size, (5, k)).astype(np.int32)  # a slot may come twice
    slots[1, 3:30] = -1  # a gap that holds whole tiles
    slots[2] = -1
    slots[3, 1:] = -1
    slots[4, ::2] = -1
    c, rope = (rng.standard_normal((9 * block_size, width)).astype(np.float32) / 10 for width in (rank, rope_dim))
    records = oracles.latent_bytes(c, rope, fmt, scale)
    none = np.empty((len(records), 0), np.uint8)
    oracles.place_rows(pages.image, pages.stride, block_size, np.arange(len(records)), records, none)
    pages.image[: layout.value_bytes] = 0xFF  # slot 0, which nobody selects, decodes to NaN
    pages.sync()
    q = tensor(rng.standard_normal((5, heads, rank + rope_dim)).astype(np.float32), device).to(SOURCES[source])
    out = poison(torch.empty(7, heads, rank, dtype=q.dtype, device=device))
    ops.sparse_mla_decode(q, pages.view, tensor(slots, device), softmax_scale, fmt, scale, rank, out[1:-1])
    assert bool((out[[0, -1]].cpu().view(torch.uint8) == POISON).all())
    for t in range(5):
        chosen = slots[t][slots[t] >= 0].tolist()
        taken, _ = oracles.take_rows(pages.image, pages.stride, block_size, chosen, layout.value_bytes, 0)
        latents = oracles.decode_latent(taken, fmt, scale, rank)
        want = oracles.attend(q[t].float().cpu().numpy(), latents, softmax_scale, rank)
        got = out[1 + t].float().cpu().numpy()
        if latents_go_as_16_bits(device, source, rank):
            np.testing.assert_allclose(got, want, rtol=2.01 / 128, atol=1e-3)  # FlashMLA's own
        else:
            tolerance = 2e-5 if source == "f32" else 2.0**-8
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 0.01)
        assert chosen or not got.any()
    pages.check()


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_case_C1_padded_tokens_select_and_read_nothing(
    device: torch.device, rng: np.random.Generator, fmt: str
) -> None:
    """One real token and three padded ones through the whole chain; the padded ones end as zeros."""
    pages = stored_index_k(rng, fmt, 128, 16, 0, device)
    latents = GuardedPages(latent_layout(LatentFormat.BF16, 32, 8, 16), 9, device)
    latents.fill(rng, "bf16")
    context, row = torch.tensor([40, 0, 0, 0], dtype=I32, device=device), torch.zeros(4, dtype=I32, device=device)
    table = torch.tensor([[4, 8, 0]], dtype=I32, device=device)
    logits = torch.full((4, 48), float("nan"), device=device)
    slot, position = (poison(torch.empty(4, 8, dtype=I32, device=device)) for _ in range(2))
    out = poison(torch.empty(4, 2, 32, device=device))
    ops.paged_index_logits(
        torch.ones(4, 4, 128, device=device),
        torch.ones(4, 4, device=device),
        pages.view,
        table,
        row,
        context,
        logits,
        fmt,
    )
    ops.topk(logits, context, table, row, 16, slot, position)
    ops.sparse_mla_decode(torch.ones(4, 2, 40, device=device), latents.view, slot, 0.1, "bf16", 1.0, 32, out)
    assert bool(logits[1:].isnan().all())
    assert bool((slot[1:] == -1).all() and (position[1:] == -1).all() and (slot[0] >= 0).all())
    assert not out[1:].any()
    pages.check()
    latents.check()


def test_case_C2_contexts_past_the_table_are_not_read(device: torch.device, request: pytest.FixtureRequest) -> None:
    """No column past the table is read; the CPU side says so, the kernel clamps or gives no slot."""
    logits = torch.arange(12.0, device=device).repeat(1, 1)
    table = torch.tensor([[7, 9]], dtype=I32, device=device)
    slot, position = (poison(torch.empty(1, 4, dtype=I32, device=device)) for _ in range(2))
    one = torch.zeros(1, dtype=I32, device=device)
    arguments = (logits, one + 12, table, one, 4, slot, position)
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(InvalidValue, match=r"topk: a context_len of 12 exceeds 8, the least of 12 logit columns"):
            ops.topk(*arguments)
        assert bool((slot.view(torch.uint8) == POISON).all())
    else:
        ops.topk(*arguments)
        assert position.tolist() == [[8, 9, 10, 11]]
        assert slot.tolist() == [[-1] * 4]
