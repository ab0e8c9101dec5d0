"""Where an op runs in a test: its CPU side, its CUDA side on a device, or its CUDA side with the kernel on the CPU.

The third place keeps everything of the CUDA side (defines, grid, arguments, shared memory) and swaps only the launch,
so what a GPU is asked to do is checked without one. One test body then serves all three against the same oracle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import host_kernels
import numpy as np
import pytest
import torch
from helpers import POISON

from graphkv.layout import PageLayout
from graphkv.ops import copy, index_k, latent, layer, select, window

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("host", marks=pytest.mark.host)]

_OPS = (
    (index_k, ("_store_index_k", "_gather_index_k", "_paged_index_logits")),
    (latent, ("_store_latent", "_sparse_mla_decode")),
    (layer, ("_store_layer",)),
    (select, ("_topk",)),
    (window, ("_window_slots",)),
    (copy, ("_copy_blocks",)),
)


def enter(place: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Make the ops run at `place` for one test; the device to put tensors on."""
    if place == "host":
        for module, names in _OPS:
            for name in names:
                monkeypatch.setattr(module, name, getattr(module, f"{name}_cuda"))
            monkeypatch.setattr(module, "launch", _launch)
        for module in (index_k, latent, copy):
            monkeypatch.setattr(module, "sm_count", lambda _: 1)
        # Keys of more than 12 * 1024 columns do not fit; clusters do not run on the CPU.
        monkeypatch.setattr(select, "limits_of", lambda _: select.Limits(4, 1, 48 * 1024))
    return torch.device("cuda" if place == "cuda" else "cpu")


def enter_hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """As `enter("host")`, with the kernels that are made for sm_90a, their instructions imitated."""
    device = enter("host", monkeypatch)
    monkeypatch.setattr(latent, "has_wgmma", lambda _: True)
    return device


def _launch(
    name: str,
    signature: str,
    grid: int | tuple[int, int, int],
    block: int,
    args: tuple[Any, ...],
    *,
    device: torch.device,
    defines: Mapping[str, int | str] | None = None,
    shared_bytes: int = 0,
) -> None:
    if defines is not None and defines.get("WGMMA"):
        defines = {**defines, "GK_HOPPER": 1}
    module = host_kernels.build(f"{name}.cu", defines)
    assert signature == module.signature(name)
    module.launch(name, grid, block, args, shared_bytes)


class GuardedPages:
    """Pages inside a poisoned buffer: guard bytes at both ends and `gap` bytes between pages. Compare all of it."""

    GUARD = 512

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device, gap: int = 0) -> None:
        self.layout = layout
        self.stride = layout.page_bytes + gap
        self.buffer = torch.full((num_pages * self.stride + 2 * self.GUARD,), POISON, dtype=torch.uint8, device=device)
        shape = (num_pages, layout.block_size, 1, layout.token_bytes)
        strides = (self.stride, layout.token_bytes, layout.token_bytes, 1)
        self.view = self.buffer.as_strided(shape, strides, self.GUARD)
        self.expected = np.full(len(self.buffer), POISON, np.uint8)

    @property
    def image(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The expected bytes from the first page on, for an oracle to write to."""
        return self.expected[self.GUARD :]

    def fill(self, rng: np.random.Generator, fmt: str) -> None:
        """Put random rows of ordinary numbers everywhere, the same in the pages and in what is expected of them."""
        data = rng.integers(0, 256, len(self.expected), np.uint8)
        if fmt in ("fp32", "bf16"):
            data = np.where(data & 0x7F > 0x3E, data & 0xBE, data).astype(np.uint8)  # no exponent above 2^-1
        self.expected[:] = data
        self.sync()

    def sync(self) -> None:
        self.buffer.copy_(torch.from_numpy(self.expected))

    def check(self) -> None:
        """Every byte is as expected, guards and gaps included."""
        np.testing.assert_array_equal(self.buffer.cpu().numpy(), self.expected)


def rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Random rows over many magnitudes, with the awkward ones among the first eight."""
    x = rng.standard_normal((count, width)).astype(np.float32) * np.float32(10) ** rng.integers(-6, 5, (count, 1))
    x = x.astype(np.float32)
    awkward = [
        np.zeros(width),
        np.where(np.arange(width) == 1, 448.0 * 4, x[1 % count] / 1e5),
        np.where(np.arange(width) % 5 == 0, -0.0, 1e-42),
        np.where(np.arange(width) == 3, np.nan, x[3 % count]),
        np.where(np.arange(width) == 2, -np.inf, x[4 % count]),
        np.full(width, 6.0) * np.where(np.arange(width) % 2, 1, -1),
        np.arange(width) * 0.25 % 6.5,
        np.where(np.arange(width) == 0, 448.0, np.arange(width) * 0.0009765625),
    ]
    for t, row in enumerate(awkward[:count]):
        x[t] = row
    return x


def tensor(array: np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An owned tensor with the array's values."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype, copy=True)
