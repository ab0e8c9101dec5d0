"""Slots of a window and its sinks, at every place, against plain loops; and attention over them."""

from __future__ import annotations

import numpy as np
import oracles
import places
import pytest
import torch
from helpers import POISON, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GuardedPages, tensor

from graphkv import ops
from graphkv.layout import LatentFormat, latent_layout

I32 = torch.int32


@pytest.fixture(params=places.PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch)


def wanted(table: list[int], length: int, size: int, window: int, sinks: int) -> list[int]:
    """Positions that a query at length - 1 reads, as slots: those of the null page as -1."""
    positions = [p for p in range(length) if p < sinks or p > length - 1 - window]
    return [-1 if table[p // size] == 0 else table[p // size] * size + p % size for p in positions]


def check(
    table: np.ndarray,
    context: list[int],
    rows: list[int],
    size: int,
    window: int,
    sinks: int,
    extra: int,
    device: object,
) -> None:
    k = window + sinks + extra
    buffer = poison(torch.empty(len(context) + 2, k, dtype=I32, device=device))
    wide = tensor(np.pad(table, ((0, 0), (0, 3)), constant_values=7), device)
    arrays = (tensor(np.array(context, np.int32), device), wide[:, : table.shape[1]])
    row = tensor(np.array(rows, np.int32), device)
    ops.window_slots(*arrays, row, size, window, sinks, buffer[1:-1])
    got = buffer.cpu()
    assert bool((got[[0, -1]].view(torch.uint8) == POISON).all())
    for t, length in enumerate(context):
        want = wanted(table[rows[t]].tolist(), length, size, window, sinks) if length else []
        assert got[1 + t].tolist() == want + [-1] * (k - len(want)), (t, length)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 0), (5, 3), (16, 1), (16, 20), (300, 7), (1500, 0)])
def test_lists_sinks_then_window_of_each_token(
    device: torch.device, rng: np.random.Generator, window: int, sinks: int
) -> None:
    size, columns = 8, 50
    table = rng.integers(1, 1000, (3, columns)).astype(np.int32)
    table[1, 5:9] = 0
    context = [400, 0, 1, window, window + 1, window + sinks, 77, 64, 0, 65]
    context = [min(length, 400) for length in context]
    rows = [0, 2**30, 2, 1, 1, 0, 1, 1, -5, 1]
    check(table, context, rows, size, window, sinks, 3, device)


@settings(max_examples=60)
@given(
    size=st.sampled_from([1, 4, 64]),
    window=st.integers(1, 40),
    sinks=st.integers(0, 20),
    context=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
)
@pytest.mark.parametrize("place", places.PLACES)
def test_any_window(place: str, size: int, window: int, sinks: int, context: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 4, (2, -(-60 // size))).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        device = places.enter(place, patch)
        check(table, context, [int(rng.integers(2)) for _ in context], size, window, sinks, 0, device)


def test_case_C2_positions_past_the_table_have_no_slot(device: torch.device, request: pytest.FixtureRequest) -> None:
    """The CPU side refuses such a context; the kernel reads no column past the table."""
    table = torch.tensor([[7, 9]], dtype=I32, device=device)
    slot, one = poison(torch.empty(1, 6, dtype=I32, device=device)), torch.zeros(1, dtype=I32, device=device)
    if request.node.callspec.params["device"] != "cpu":
        ops.window_slots(one + 10, table, one, 4, 5, 1, slot)
        assert slot.tolist() == [[28, 37, 38, 39, -1, -1]]


def test_case_C3_slots_up_to_2_to_31(device: torch.device) -> None:
    table = torch.tensor([[2**25 - 1]], dtype=I32, device=device)
    slot, one = poison(torch.empty(1, 2, dtype=I32, device=device)), torch.zeros(1, dtype=I32, device=device)
    ops.window_slots(one + 64, table, one, 64, 2, 0, slot)
    assert slot.tolist() == [[2**31 - 2, 2**31 - 1]]


def test_attention_over_a_window_reads_the_window_alone(device: torch.device, rng: np.random.Generator) -> None:
    layout = latent_layout(LatentFormat.FP32, 21, 5, 4)
    pages = GuardedPages(layout, 9, device)
    c, rope = (rng.standard_normal((36, width)).astype(np.float32) for width in (21, 5))
    records = oracles.latent_bytes(c, rope, "fp32", 1.0)
    oracles.place_rows(pages.image, pages.stride, 4, np.arange(36), records, np.empty((36, 0), np.uint8))
    pages.image[: layout.page_bytes] = 0xFF  # the null page decodes to NaN
    pages.sync()
    table = np.array([[3, 0, 0, 8, 2, 5]], np.int32)  # columns 1 and 2 are stale
    context, rows = np.array([24, 23, 0], np.int32), np.zeros(3, np.int32)
    slot = torch.empty(3, 12, dtype=I32, device=device)
    ops.window_slots(*(tensor(a, device) for a in (context, table, rows)), 4, 10, 2, slot)
    q = tensor(rng.standard_normal((3, 2, 26)).astype(np.float32), device)
    out = torch.full((3, 2, 21), float("nan"), device=device)
    ops.sparse_mla_decode(q, pages.view, slot, 0.3, "fp32", 1.0, 21, out)
    for t, length in enumerate(context[:2].tolist()):
        slots = wanted(table[0].tolist(), length, 4, 10, 2)
        assert min(slots) > 0
        latents = oracles.decode_latent(records[slots], "fp32", 1.0, 21)
        np.testing.assert_allclose(out[t].cpu(), oracles.attend(q[t].cpu().numpy(), latents, 0.3, 21), rtol=2e-5)
    assert not out[2].any()
