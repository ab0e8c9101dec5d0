"""The attention for sm_90a's tensor cores, on a device and on the CPU, where its instructions are imitated."""

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
from graphkv.layout import LatentFormat, latent_layout
from graphkv.ops.latent import _cluster
from graphkv.ops.launch import has_wgmma

RANK, ROPE, PAGES = 512, 64, 5
FORMATS = ["fp8_ds_mla", "fp8", "bf16"]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("host", marks=pytest.mark.host)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "host":
        return places.enter_hopper(monkeypatch)
    if not has_wgmma(torch.device("cuda")):
        pytest.skip("the device has no warpgroup products")
    return torch.device("cuda")


class Attention:
    """Pages of latents, and what attention over them must give."""

    def __init__(self, fmt: str, device: torch.device, c: NDArray[np.float32], rope: NDArray[np.float32]) -> None:
        self.fmt = fmt
        self.scale = 0.02
        self.pages = GuardedPages(latent_layout(LatentFormat(fmt), RANK, ROPE, 64), PAGES, device, gap=16)
        self.records = oracles.latent_bytes(c, rope, fmt, self.scale)
        none = np.empty((len(c), 0), np.uint8)
        oracles.place_rows(self.pages.image, self.pages.stride, 64, np.arange(len(c)), self.records, none)
        self.pages.image[: self.records.shape[1]] = 0xFF  # slot 0, which nobody selects, decodes to NaN
        self.pages.sync()

    def run(self, q: torch.Tensor, slots: NDArray[Any], softmax_scale: float) -> tuple[NDArray[Any], NDArray[Any]]:
        """Given and wanted [T, H, RANK]."""
        tokens, heads, _ = q.shape
        out = poison(torch.empty(tokens + 2, heads, RANK, dtype=q.dtype, device=q.device))
        given = (self.pages.view, tensor(slots.astype(np.int32), q.device), softmax_scale, self.fmt, self.scale, RANK)
        ops.sparse_mla_decode(q, *given, out[1:-1])
        assert bool((out[[0, -1]].cpu().view(torch.uint8) == POISON).all())
        self.pages.check()
        want = [
            oracles.attend(
                q[t].float().cpu().numpy(),
                oracles.decode_latent(self.records[row[row >= 0]], self.fmt, self.scale, RANK),
                softmax_scale,
                RANK,
            )
            for t, row in enumerate(slots)
        ]
        return out[1:-1].float().cpu().numpy(), np.stack(want)


def random_rows(rng: np.random.Generator, magnitude: NDArray[Any] | float) -> tuple[NDArray[Any], NDArray[Any]]:
    c, rope = (rng.standard_normal((PAGES * 64, width)) for width in (RANK, ROPE))
    return (c * magnitude).astype(np.float32), (rope / 10).astype(np.float32)


def queries(rng: np.random.Generator, shape: tuple[int, ...], device: torch.device, by: float = 0.1) -> torch.Tensor:
    return tensor((rng.standard_normal((*shape, RANK + ROPE)) * by).astype(np.float32), device).to(torch.bfloat16)


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(("heads", "keys"), [(1, 1), (16, 64), (65, 150), (128, 300)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_within_flashmla_s_tolerances(
    device: torch.device, rng: np.random.Generator, fmt: str, heads: int, keys: int
) -> None:
    """With keys left out at the start, in the middle, at the end, and altogether."""
    attention = Attention(fmt, device, *random_rows(rng, 0.1))
    slots = rng.integers(1, PAGES * 64, (4, keys))
    slots[1, keys // 3 : -1] = -1
    slots[1, :2] = -1
    slots[2] = -1
    slots[3, keys // 2 :] = -1
    slots[3, 0] = 7
    got, want = attention.run(queries(rng, (4, heads), device), slots, (RANK + ROPE) ** -0.5)
    np.testing.assert_allclose(got, want, rtol=2.01 / 128, atol=1e-3)
    assert 1 - 2 * np.sum(got * want) / np.sum(got**2 + want**2) < 5e-6
    assert not got[2].any()


@pytest.mark.parametrize(("by", "softmax_scale"), [(1e8, 1e-9), (1e-12, 1e11), (0.1, -0.3), (0.1, 0.0)])
def test_queries_of_any_magnitude(
    device: torch.device, rng: np.random.Generator, by: float, softmax_scale: float
) -> None:
    """fp16 holds none of these without the power of two of its row."""
    attention = Attention("fp8_ds_mla", device, *random_rows(rng, 1.0))
    slots = rng.integers(1, PAGES * 64, (1, 100))
    got, want = attention.run(queries(rng, (1, 3), device, by), slots, softmax_scale)
    assert relative_error(got, want) < 4e-3


def test_scales_of_very_different_keys(device: torch.device, rng: np.random.Generator) -> None:
    """Tile scales over six powers of ten and all-zero tiles; large scales come last, and first."""
    magnitude = 10.0 ** rng.uniform(-3, 3, (PAGES * 64, 4))
    magnitude[rng.random(magnitude.shape) < 0.1] = 0.0
    attention = Attention("fp8_ds_mla", device, *random_rows(rng, np.repeat(magnitude, 128, axis=1)))
    ascending = 1 + np.argsort(magnitude[1:, 0])
    got, want = attention.run(queries(rng, (2, 5), device, 1e-4), np.stack([ascending, ascending[::-1]]), 0.1)
    for tile in range(4):
        columns = slice(128 * tile, 128 * tile + 128)
        assert relative_error(got[..., columns], want[..., columns]) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 10, 25, 70])
@pytest.mark.parametrize("fmt", FORMATS)
def test_split_keys_are_merged(rng: np.random.Generator, fmt: str, tokens: int) -> None:
    """Clusters of 16, 8, 4, 2 and 1 CTAs on 132 SMs, and the same bits every time."""
    device = torch.device("cuda")
    if not has_wgmma(device):
        pytest.skip("the device has no warpgroup products")
    attention = Attention(fmt, device, *random_rows(rng, 0.1))
    slots = rng.integers(1, PAGES * 64, (tokens, 2048))
    slots[0, 100:] = -1  # most CTAs of the cluster have no key
    q = queries(rng, (tokens, 128), device)
    got, want = attention.run(q, slots, 0.04)
    np.testing.assert_allclose(got, want, rtol=2.01 / 128, atol=1e-3)
    np.testing.assert_array_equal(attention.run(q, slots, 0.04)[0], got)


def test_cluster_sizes_fill_the_device_and_no_more() -> None:
    assert [_cluster(units, 2048, 132) for units in (4, 5, 15, 16, 30, 31, 66, 67)] == [16, 8, 8, 4, 4, 2, 2, 1]
    assert [_cluster(2, keys, 132) for keys in (64, 65, 128, 129, 256, 257, 512, 513)] == [1, 2, 2, 4, 4, 8, 8, 16]
