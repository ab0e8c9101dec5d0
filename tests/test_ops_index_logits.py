"""Scores of FP8 index K by whole pages: how tokens form groups, how pages are dealt out, what is read and written.

At the place "host" the kernel's portable twin runs, with as many CTAs as a test asks for; on a device with wgmma the
real one does. Both are judged by the float64 oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import places
import pytest
import torch
from helpers import POISON, poison
from numpy.typing import NDArray
from places import GuardedPages, tensor

from graphkv import ops
from graphkv.layout import IndexKFormat, index_k_layout
from graphkv.ops import index_k
from graphkv.tile_map import TileMap

I32 = torch.int32
BLOCK, DIM = 64, 128
PLACES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("host", marks=pytest.mark.host)]

Ints = NDArray[np.int32]


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = places.enter(request.param, monkeypatch)
    if request.param == "host":
        monkeypatch.setattr(index_k, "has_wgmma", lambda _: True)
        monkeypatch.setattr(index_k, "_page_tiles", lambda _: TileMap())
    return device


@pytest.fixture(params=[1, 3, 40])
def ctas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """CTAs that share the work, at both places."""
    monkeypatch.setattr(index_k, "sm_count", lambda _: request.param)
    return int(request.param)


class Case:
    """Random keys, queries and page tables, and what must come out for given rows and contexts of the tokens."""

    def __init__(
        self, rng: np.random.Generator, row: Ints, context: Ints, heads: int, device: torch.device, *, gap: int = 0
    ) -> None:
        self.row, self.context, self.heads, self.device = row, context, heads, device
        live = row[context > 0]
        columns = max(1, -(-int(context.max(initial=0)) // BLOCK))
        self.pages = GuardedPages(index_k_layout(IndexKFormat.FP8, DIM, BLOCK), 11, device, gap)
        slots = np.arange(11 * BLOCK)
        k = rng.standard_normal((len(slots), DIM)).astype(np.float32) * 10.0 ** rng.integers(-2, 3, (len(slots), 1))
        stored = oracles.index_k_bytes(k.astype(np.float32), "fp8", linear=True)
        oracles.place_rows(self.pages.image, self.pages.stride, BLOCK, slots, *stored)
        self.pages.sync()
        missing = np.full((BLOCK, DIM), np.nan)
        self.keys = np.concatenate([oracles.decode_index_k(*stored, "fp8"), missing])
        self.table = rng.integers(0, 11, (int(live.max(initial=0)) + 1, columns)).astype(np.int32)
        self.q = tensor(rng.standard_normal((len(row), heads, DIM)).astype(np.float32), device).to(torch.float8_e4m3fn)
        self.weights = rng.standard_normal((len(row), heads)).astype(np.float32)

    def run(self, width: int | None = None, columns: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """The op's output [T, width], checked to be written nowhere else, with NaN where it was left alone."""
        tokens = len(self.row)
        width = width or int(self.context.max(initial=1)) + 3
        buffer = poison(torch.empty(tokens + 2, width + 8, dtype=dtype, device=self.device))
        table = tensor(np.pad(self.table, ((0, 0), (0, 3)), constant_values=-9), self.device)
        given = (tensor(self.row, self.device), tensor(self.context, self.device))
        view = table[:, : columns or self.table.shape[1]]
        weights = tensor(self.weights, self.device)
        ops.paged_index_logits(self.q, weights, self.pages.view, view, *given, buffer[1:-1, 5 : width + 5], "fp8")
        self.pages.check()
        bits = buffer.cpu().view(torch.uint8).numpy().reshape(tokens + 2, width + 8, -1)
        untouched = (bits == POISON).all(-1)
        assert untouched[[0, -1]].all()
        for t, length in enumerate(np.clip(self.context, 0, width)):
            assert untouched[1 + t, :5].all()
            assert untouched[1 + t, 5 + length :].all()
            assert not untouched[1 + t, 5 : 5 + length].any()
        return buffer[1:-1, 5:].float().cpu().numpy().astype(np.float64)

    def want(self, token: int, length: int) -> NDArray[np.float64]:
        return oracles.index_logits(*self._factors(token, length))

    def _factors(self, token: int, length: int) -> tuple[Any, Any, Any]:
        table = self.table[self.row[token]]
        slots = oracles.row_slots(np.where((table < 0) | (table > 10), 11, table), length, BLOCK)
        return self.q[token].float().cpu().numpy(), self.weights[token], self.keys[slots]

    def check(self, got: Any, rounding: float = 0.0) -> None:
        """Each score is off by a small part of what its terms add up to; tensor cores add FP8 in fewer bits than fp32.

        All together they are within DeepGEMM's metric, which asks for 1e-3.
        """
        part, metric = (2.0**-13, 1e-5) if self.device.type == "cuda" else (2.0**-20, 1e-11)
        error = size = 0.0
        for t, length in enumerate(self.context):
            if length > 0:
                want, logits = self.want(t, length), got[t, :length]
                terms = oracles.index_logits(*map(np.abs, self._factors(t, length)))
                off = np.abs(logits - want) > part * terms + rounding * np.abs(want)
                assert not off.any(), t
                assert (np.isnan(logits) == np.isnan(want)).all(), t
                error, size = error + np.nansum((logits - want) ** 2), size + np.nansum(logits**2 + want**2)
        assert error <= (metric + rounding**2) * size


def rows_of(*runs: tuple[int, int, int]) -> tuple[Ints, Ints]:
    """Rows and contexts of runs (row, tokens, context of the last one); contexts rise by one. Row -7: padded."""
    row = np.concatenate([np.full(tokens, row) for row, tokens, _ in runs]).astype(np.int32)
    context = np.concatenate([np.arange(last - tokens + 1, last + 1) for _, tokens, last in runs]).astype(np.int32)
    return row, np.where(row < 0, 0, context).astype(np.int32)


BATCHES = {
    "one token": rows_of((0, 1, 1)),
    "one row of each count": rows_of(*((n - 1, n, 60 + 9 * n) for n in range(1, 9))),
    "runs of more than a group": rows_of((1, 9, 130), (0, 16, 64), (2, 19, 200)),
    "padded ones between, before and behind": rows_of((-7, 2, 0), (1, 3, 65), (-7, 1, 0), (1, 2, 129), (-7, 40, 0)),
    "a row twice": rows_of((0, 1, 64), (1, 1, 65), (0, 1, 66)),
    "nothing": rows_of((-7, 5, 0)),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_of_a_row_share_its_pages(device: torch.device, rng: np.random.Generator, batch: str, ctas: int) -> None:
    case = Case(rng, *BATCHES[batch], 64 if ctas == 3 else 32, device, gap=48)
    case.check(case.run())


def test_many_short_rows_and_few_ctas(device: torch.device, rng: np.random.Generator, ctas: int) -> None:
    """More tokens than threads, and every warp's span ends inside a run."""
    tokens = 1500
    length = rng.integers(0, 4, tokens)
    row = np.repeat(np.arange(tokens), 1 + length)[:tokens].astype(np.int32) % 37
    context = rng.integers(-1, 6, tokens).astype(np.int32)  # also in no order, and negative
    case = Case(rng, row, context, 32, device)
    case.check(case.run())


def test_contexts_in_any_order_within_a_row(device: torch.device, rng: np.random.Generator) -> None:
    case = Case(rng, *(np.array(x, np.int32) for x in ([0] * 5, [3, 190, 64, 65, 1])), 64, device)
    case.check(case.run())


def test_scores_in_bf16(device: torch.device, rng: np.random.Generator) -> None:
    case = Case(rng, *rows_of((0, 3, 70), (1, 2, 9)), 64, device)
    case.check(case.run(dtype=torch.bfloat16), rounding=2.0**-8)


def test_scores_in_bf16_on_the_cpu(rng: np.random.Generator) -> None:
    case = Case(rng, *rows_of((0, 3, 70), (1, 2, 9)), 4, torch.device("cpu"))
    case.check(case.run(dtype=torch.bfloat16), rounding=2.0**-8)


def test_a_page_that_is_not_there_scores_nan_and_is_not_read(device: torch.device, rng: np.random.Generator) -> None:
    case = Case(rng, *rows_of((0, 2, 64 * 5), (1, 1, 64 * 5)), 64, device)
    case.table[0, [1, 3]] = -1, 11
    case.table[1, 0] = 2**31 - 1
    case.table[:, 4] = -1  # not in the view that the op is given
    case.check(case.run(columns=4))


def test_case_C2_contexts_past_the_columns_are_cut(device: torch.device, rng: np.random.Generator) -> None:
    case = Case(rng, *rows_of((0, 2, 300), (1, 3, 90)), 32, device)
    got = case.run(width=100)
    case.context = np.minimum(case.context, 100)
    case.check(got)


def test_a_nan_key_scores_nan(device: torch.device, rng: np.random.Generator) -> None:
    case = Case(rng, *rows_of((0, 1, 64)), 64, device)
    place = case.table[0, 0] * case.pages.stride + 5 * DIM
    case.pages.image[place + 77] = 0xFF
    case.pages.sync()
    got = case.run()[0, :64]
    assert np.flatnonzero(np.isnan(got)).tolist() == [5]


def test_a_score_does_not_depend_on_its_company(device: torch.device, rng: np.random.Generator) -> None:
    """The same bits whether a token is scored alone or with others of its row, by few CTAs or many."""
    case = Case(rng, *rows_of((0, 7, 500)), 64, device)
    together = case.run()
    case.row = np.arange(7, dtype=np.int32)
    case.table = np.repeat(case.table, 7, axis=0)
    alone = case.run()
    for t, length in enumerate(case.context):
        np.testing.assert_array_equal(together[t, :length], alone[t, :length])


def test_unaligned_pages_and_other_shapes_take_the_plain_kernel(device: torch.device, rng: np.random.Generator) -> None:
    case = Case(rng, *rows_of((0, 2, 100)), 64, device, gap=8)
    case.check(case.run())
    case = Case(rng, *rows_of((0, 2, 100)), 16, device)
    case.check(case.run())
