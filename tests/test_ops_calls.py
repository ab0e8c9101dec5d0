"""What an op refuses, how it registers with torch, and pools beyond 2^31 bytes (case C3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import places
import pytest
import torch

from graphkv import ops
from graphkv.errors import InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, PageLayout, index_k_layout, latent_layout

I32, I64, U8 = torch.int32, torch.int64, torch.uint8
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(params=places.PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch)


def pages_of(layout: PageLayout, count: int = 3, device: str | torch.device = "cpu") -> torch.Tensor:
    return torch.zeros(count, layout.block_size, 1, layout.token_bytes, dtype=U8, device=device)


INDEX_K_PAGES = pages_of(index_k_layout(IndexKFormat.FP8, 128, 4))
LATENT_PAGES = pages_of(latent_layout(LatentFormat.BF16, 16, 8, 4))

GOOD: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "store_index_k": (
        ops.store_index_k,
        {"k": torch.ones(2, 128), "pages": INDEX_K_PAGES, "slot": torch.tensor([1, -1]), "format": "fp8"},
    ),
    "store_latent": (
        ops.store_latent,
        {
            "c": torch.ones(2, 16),
            "rope": torch.ones(2, 8),
            "pages": LATENT_PAGES,
            "slot": torch.tensor([1, -1]),
            "format": "bf16",
        },
    ),
    "store_layer": (
        ops.store_layer,
        {
            "c": torch.ones(2, 16),
            "rope": torch.ones(2, 8),
            "latent_pages": LATENT_PAGES,
            "latent_slot": torch.tensor([1, -1]),
            "k": torch.ones(2, 128),
            "index_pages": INDEX_K_PAGES,
            "index_slot": torch.tensor([2, -1]),
            "latent_format": "bf16",
            "index_k_format": "fp8",
        },
    ),
    "gather_index_k": (
        ops.gather_index_k,
        {
            "pages": INDEX_K_PAGES,
            "page_table": torch.ones(2, 2, dtype=I32),
            "start": torch.tensor([0, 3, 8], dtype=I32),
            "out_values": torch.zeros(9, 128, dtype=U8),
            "out_scales": torch.zeros(9, 4, dtype=U8),
            "format": "fp8",
        },
    ),
    "paged_index_logits": (
        ops.paged_index_logits,
        {
            "q": torch.ones(2, 3, 128),
            "weights": torch.ones(2, 3),
            "pages": INDEX_K_PAGES,
            "page_table": torch.ones(2, 2, dtype=I32),
            "token_row": torch.tensor([0, 1], dtype=I32),
            "context_len": torch.tensor([7, 0], dtype=I32),
            "out": torch.zeros(2, 8),
            "format": "fp8",
        },
    ),
    "topk": (
        ops.topk,
        {
            "logits": torch.ones(2, 8),
            "context_len": torch.tensor([7, 0], dtype=I32),
            "page_table": torch.ones(2, 2, dtype=I32),
            "token_row": torch.tensor([0, 1], dtype=I32),
            "block_size": 4,
            "out_slot": torch.zeros(2, 3, dtype=I32),
            "out_position": torch.zeros(2, 3, dtype=I32),
        },
    ),
    "window_slots": (
        ops.window_slots,
        {
            "context_len": torch.tensor([7, 0], dtype=I32),
            "page_table": torch.ones(2, 2, dtype=I32),
            "token_row": torch.tensor([0, 1], dtype=I32),
            "block_size": 4,
            "window": 3,
            "sinks": 1,
            "out_slot": torch.zeros(2, 4, dtype=I32),
        },
    ),
    "sparse_mla_decode": (
        ops.sparse_mla_decode,
        {
            "q": torch.ones(2, 3, 24),
            "pages": LATENT_PAGES,
            "slot": torch.tensor([[0, 5], [-1, -1]], dtype=I32),
            "softmax_scale": 0.5,
            "format": "bf16",
            "scale": 1.0,
            "kv_lora_rank": 16,
            "out": torch.zeros(2, 3, 16),
        },
    ),
}

BAD = [
    ("store_index_k", {"k": torch.ones(2, 128, dtype=torch.float16)}, r"k must be float32 or bfloat16 \[T, D\]"),
    ("store_index_k", {"slot": torch.ones(3, dtype=I64)}, r"slot must be int64 \[T=2\] on cpu, got int64 \[3\] on cpu"),
    ("store_index_k", {"slot": torch.ones(2, dtype=I32)}, r"slot must be int64 \[T=2\] on cpu, got int32 \[2\]"),
    ("store_index_k", {"format": "fp6"}, r"format must be one of \['fp32', 'bf16', 'fp8', 'fp4'\], got 'fp6'"),
    ("store_index_k", {"format": "fp4"}, r"pages must be uint8 \[pages, 4, 1, 68\] for index_k format fp4, got uint8"),
    ("store_index_k", {"scale_mode": "log"}, "scale_mode must be one of"),
    ("store_index_k", {"amax_floor": 0.0}, "amax_floor must be at least"),
    ("store_index_k", {"k": torch.ones(128, 2).T}, r"k \[2, 128\] must be contiguous within a row, got strides"),
    ("store_index_k", {"k": torch.ones(2, 128, device="meta")}, r"k must be .* on cpu, got float32 \[2, 128\] on meta"),
    ("store_index_k", {"pages": INDEX_K_PAGES.transpose(0, 1)}, "pages must be"),
    ("store_index_k", {"pages": INDEX_K_PAGES[:1].expand(3, -1, -1, -1)}, r"at least 528 bytes apart, got strides"),
    ("store_latent", {"rope": torch.ones(2, 8, dtype=BF16)}, r"rope must be float32 \[T=2, P\]"),
    ("store_latent", {"c": torch.ones(2, 17)}, r"pages must be uint8 \[pages, 4, 1, 50\]"),
    ("store_latent", {"scale": 0.0}, "scale must be positive and finite, got 0.0"),
    ("store_layer", {"k": torch.ones(2, 128, dtype=BF16)}, r"k must be float32 \[T=2, D\]"),
    ("store_layer", {"index_pages": LATENT_PAGES}, r"index_pages must be uint8 \[pages, 4, 1, 132\]"),
    ("store_layer", {"index_slot": torch.tensor([12, 0])}, r"slots must be in 0\.\.11 .* or -1, got 12"),
    ("gather_index_k", {"start": torch.zeros(2, dtype=I32)}, r"start must be int32 \[3\] on cpu, got int32 \[2\]"),
    ("gather_index_k", {"out_scales": torch.zeros(9, 8, dtype=U8)}, r"out_scales must be uint8 \[N=9, 4\]"),
    ("gather_index_k", {"start": torch.tensor([0, 7, 10], dtype=I32)}, "at most 9 output tokens"),
    ("gather_index_k", {"start": torch.tensor([3, 0, 5], dtype=I32)}, r"must rise .* got \[3, 0, 5\]"),
    ("gather_index_k", {"page_table": torch.ones(2, 1, dtype=I32)}, r"by at most 4 positions a row, got \[0, 3, 8\]"),
    ("gather_index_k", {"page_table": torch.full((2, 2), 3, dtype=I32)}, r"slots must be in 0\.\.11"),
    ("paged_index_logits", {"weights": torch.ones(2, 4)}, r"weights must be float32 \[T=2, H=3\] on cpu, got"),
    ("paged_index_logits", {"q": torch.ones(2, 128, 3).transpose(1, 2)}, r"q \[2, 3, 128\] must be contiguous, got"),
    ("paged_index_logits", {"context_len": torch.tensor([9, 0], dtype=I32)}, "a context_len of 9 exceeds 8"),
    ("paged_index_logits", {"token_row": torch.tensor([2, 0], dtype=I32)}, r"token_row must be in 0\.\.1, got 2\.\.2"),
    ("topk", {"out_position": torch.zeros(2, 4, dtype=I32)}, r"out_position must be int32 \[T=2, k=3\]"),
    ("topk", {"logits": torch.ones(2, 8, dtype=BF16)}, r"logits must be float32 \[T, W\]"),
    ("topk", {"block_size": 0}, "block_size must be at least 1, got 0"),
    ("window_slots", {"sinks": 2}, "has 4 entries a token, but a window of 3 with 2 sinks lists up to 5"),
    ("window_slots", {"window": 0}, "window must be at least 1, got 0"),
    ("window_slots", {"context_len": torch.tensor([9, 0], dtype=I32)}, "a context_len of 9 exceeds 8"),
    ("window_slots", {"token_row": torch.tensor([0], dtype=I32)}, r"token_row must be int32 \[T=2\]"),
    ("sparse_mla_decode", {"kv_lora_rank": 25}, r"kv_lora_rank must be in 1\.\.24"),
    ("sparse_mla_decode", {"out": torch.zeros(2, 3, 24)}, r"out must be float32 \[T=2, H=3, 16\]"),
    ("sparse_mla_decode", {"slot": torch.ones(2, 2, dtype=I64)}, r"slot must be int32 \[T=2, k\]"),
    ("sparse_mla_decode", {"slot": torch.full((2, 2), 12, dtype=I32)}, r"slots must be in 0\.\.11"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_a_bad_argument_is_named_and_nothing_changes(name: str, changes: dict[str, Any], message: str) -> None:
    function, good = GOOD[name]
    arguments = {**good, **changes}
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    with pytest.raises(InvalidValue, match=message):
        function(**arguments)
    for key, value in before.items():
        if value.device.type == "cpu":
            assert torch.equal(arguments[key], value), key


@pytest.mark.parametrize("name", list(GOOD))
def test_torch_finds_the_op_well_formed(name: str) -> None:
    """Schema, mutation, fake kernel and tracing, by torch's own checks."""
    _, good = GOOD[name]
    defaults: dict[str, Any] = {
        "store_index_k": {"scale_mode": "pow2", "amax_floor": 1e-4},
        "store_latent": {"scale": 1.0},
        "store_layer": {"latent_scale": 1.0, "scale_mode": "pow2", "amax_floor": 1e-4},
    }
    arguments = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in good.items()}
    operator = getattr(torch.ops.graphkv, name).default
    torch.library.opcheck(operator, (), {**arguments, **defaults.get(name, {})})


def test_a_compiled_model_traces_through_the_ops() -> None:
    def model(k: torch.Tensor, pages: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        ops.store_index_k(k * 2, pages, slot, "fp8")
        return pages.sum(dtype=I64)

    pages = INDEX_K_PAGES.clone()
    k, slot = torch.ones(2, 128), torch.tensor([3, 7])
    total = torch.compile(model, backend="aot_eager", fullgraph=True)(k, pages, slot)
    want = pages_of(index_k_layout(IndexKFormat.FP8, 128, 4))
    ops.store_index_k(k * 2, want, slot, "fp8")
    assert torch.equal(pages, want)
    assert total == want.sum(dtype=I64)


# ---- case C3: a pool of more than 2^31 bytes; only the pages in use are ever backed by memory on the CPU

EDGE = 2**31 // (64 * 132)  # 254,200: the page that 2^31 bytes fall into


def huge_pages(layout: PageLayout, count: int, used: list[int], device: torch.device) -> torch.Tensor:
    pages = torch.empty(count, layout.block_size, 1, layout.token_bytes, dtype=U8, device=device)
    for page in used:
        pages[page].fill_(places.POISON)
    return pages


def check_page(pages: torch.Tensor, page: int, want: np.ndarray[Any, Any]) -> None:
    np.testing.assert_array_equal(pages[page].reshape(-1).cpu().numpy(), want, err_msg=f"page {page}")


def test_case_C3_index_k_beyond_2_to_31_bytes(device: torch.device, rng: np.random.Generator) -> None:
    layout = index_k_layout(IndexKFormat.FP8, 128, 64)
    count = EDGE + 300
    used = [0, EDGE - 1, EDGE, EDGE + 1, count - 1]
    pages = huge_pages(layout, count, used, device)
    assert pages.numel() > 2**31
    k = rng.standard_normal((5, 128)).astype(np.float32)
    offsets = [0, 63, 31, 1, 63]
    slots = np.array([page * 64 + offset for page, offset in zip(used, offsets, strict=True)])
    ops.store_index_k(places.tensor(k, device), pages, places.tensor(slots, device), "fp8")
    values, scales = oracles.index_k_bytes(k, "fp8")
    for n, (page, offset) in enumerate(zip(used, offsets, strict=True)):
        want = np.full(layout.page_bytes, places.POISON, np.uint8)
        oracles.place_rows(want, layout.page_bytes, 64, np.array([offset]), values[n : n + 1], scales[n : n + 1])
        check_page(pages, page, want)

    table = torch.tensor([used], dtype=I32, device=device)
    start = torch.tensor([0, 5 * 64], dtype=I32, device=device)
    got = [torch.zeros(5 * 64, width, dtype=U8, device=device) for width in (128, 4)]
    ops.gather_index_k(pages, table, start, *got, "fp8")
    at = [64 * n + offset for n, offset in enumerate(offsets)]
    np.testing.assert_array_equal(got[0][at].cpu().numpy(), values)
    np.testing.assert_array_equal(got[1][at].cpu().numpy(), scales)

    logits = torch.zeros(1, 5 * 64, device=device)
    one = torch.ones(1, dtype=I32, device=device)
    q, weights = torch.ones(1, 2, 128, device=device), torch.tensor([[1.0, 0.5]], device=device)
    ops.paged_index_logits(q, weights, pages, table, one - 1, one * 5 * 64, logits, "fp8")
    stored = oracles.decode_index_k(values, scales, "fp8")
    want_logits = oracles.index_logits(np.ones((2, 128)), np.array([1.0, 0.5]), stored)
    np.testing.assert_allclose(logits[0, at].cpu().numpy(), want_logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("fmt", "beyond"),
    [("fp8_ds_mla", 2**31), ("bf16", 2**31), ("bf16", 2**32)],
    ids=["ds_mla", "bf16", "bf16 elements"],
)
def test_case_C3_latents_beyond_2_to_31_bytes_and_elements(
    device: torch.device, rng: np.random.Generator, fmt: str, beyond: int
) -> None:
    layout = latent_layout(LatentFormat(fmt), 512, 64, 64)
    edge = beyond // layout.page_bytes
    used = [0, edge - 1, edge, edge + 1, edge + 40]
    pages = huge_pages(layout, edge + 41, used, device)
    assert pages.numel() > beyond
    c, rope = (rng.standard_normal((5, width)).astype(np.float32) for width in (512, 64))
    offsets = [0, 63, 31, 1, 63]
    slots = np.array([page * 64 + offset for page, offset in zip(used, offsets, strict=True)])
    given = (places.tensor(c, device), places.tensor(rope, device))
    ops.store_latent(*given, pages, places.tensor(slots, device), fmt)
    records = oracles.latent_bytes(c, rope, fmt, 1.0)
    for n, (page, offset) in enumerate(zip(used, offsets, strict=True)):
        want = np.full(layout.page_bytes, places.POISON, np.uint8)
        want[offset * layout.token_bytes : (offset + 1) * layout.token_bytes] = records[n]
        check_page(pages, page, want)

    out = torch.full((1, 2, 512), float("nan"), device=device)
    q = torch.full((1, 2, 576), 0.25, device=device)
    ops.sparse_mla_decode(q, pages, places.tensor(slots[None].astype(np.int32), device), 0.1, fmt, 1.0, 512, out)
    latents = oracles.decode_latent(records, fmt, 1.0, 512)
    np.testing.assert_allclose(
        out[0].cpu().numpy(), oracles.attend(np.full((2, 576), 0.25), latents, 0.1, 512), rtol=1e-4, atol=1e-5
    )


def test_more_slots_than_32_bits_can_name_are_refused() -> None:
    layout = latent_layout(LatentFormat.FP8, 1, 0, 64)
    pages = torch.empty(2**25, 64, 1, layout.token_bytes, dtype=U8)
    q, slot, out = torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=I32), torch.zeros(1, 1, 1)
    with pytest.raises(InvalidValue, match="33554432 pages of 64 tokens exceed the 2147483647 slots"):
        ops.sparse_mla_decode(q, pages, slot, 1.0, "fp8", 1.0, 1, out)
