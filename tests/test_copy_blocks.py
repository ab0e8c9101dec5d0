"""copy_blocks at every place: each byte at both ends against an oracle, whole blocks and ranges of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import places
import pytest
import torch
from helpers import POISON

from graphkv import ops
from graphkv.errors import InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, PageLayout, index_k_layout, latent_layout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# pools of one call: (layout, pages a block, bytes between blocks at the source, at the target, first byte)
STANDARD = [
    (latent_layout(LatentFormat.FP8_DS_MLA, 512, 64, 64), 3, 0, 0, 0),
    (index_k_layout(IndexKFormat.FP8, 128, 64), 2, 0, 0, 0),
    (latent_layout(LatentFormat.BF16, 512, 64, 64), 1, 16, 0, 0),
    (index_k_layout(IndexKFormat.FP4, 128, 64), 5, 0, 48, 16),
]
ODD = [
    (latent_layout(LatentFormat.BF16, 21, 4, 4), 3, 3, 0, 1),
    (latent_layout(LatentFormat.FP8, 30, 5, 4), 7, 0, 5, 0),
    (latent_layout(LatentFormat.FP32, 5, 2, 4), 1, 4, 8, 4),
    (index_k_layout(IndexKFormat.FP8, 32, 4), 2, 1, 2, 3),
    (index_k_layout(IndexKFormat.FP4, 128, 4), 3, 0, 0, 8),
    (index_k_layout(IndexKFormat.FP32, 3, 4), 2, 0, 0, 0),
]
POOLS = {"standard": STANDARD, "odd": ODD}
GUARD = 64


@pytest.fixture(params=places.PLACES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter(request.param, monkeypatch)


class Ends:
    """Both ends of each pool, inside poisoned buffers, and the image that the target must have afterwards."""

    def __init__(self, pools: list[Any], blocks: tuple[int, int], rng: np.random.Generator) -> None:
        self.pools = pools
        self.source, self.target, self.before, self.image = [], [], [], []
        for layout, pages, source_gap, target_gap, start in pools:
            block = pages * layout.page_bytes
            for count, gap, tensors in (
                (blocks[0], source_gap, self.source),
                (blocks[1], target_gap, self.target),
            ):
                data = rng.integers(0, 256, count * (block + gap) + GUARD + start, np.uint8)
                tensors.append(torch.from_numpy(data.copy()))
                (self.before if tensors is self.source else self.image).append(data)

    def to(self, source: torch.device, target: torch.device) -> Ends:
        """Put the ends where they belong; the CPU's share is page-locked where the other end is a GPU's."""
        pin = "cuda" in (source.type, target.type)
        for tensors, device in ((self.source, source), (self.target, target)):
            tensors[:] = [
                one.to(device) if device.type == "cuda" else one.pin_memory() if pin else one for one in tensors
            ]
        return self

    def views(self, target: bool) -> list[torch.Tensor]:
        out = []
        for (layout, pages, source_gap, target_gap, start), one in zip(
            self.pools, self.target if target else self.source, strict=True
        ):
            stride = pages * layout.page_bytes + (target_gap if target else source_gap)
            count = (one.numel() - GUARD - start) // stride
            out.append(one.as_strided((count, pages, layout.page_bytes), (stride, layout.page_bytes, 1), start))
        return out

    def expect(self, moves: list[tuple[int, int, int, int]]) -> None:
        """Token by token, values and scales apart."""
        for (layout, pages, source_gap, target_gap, start), old, new in zip(
            self.pools, self.before, self.image, strict=True
        ):
            for source, target, first, end in moves:
                for page in range(pages):
                    at = start + source * (pages * layout.page_bytes + source_gap) + page * layout.page_bytes
                    to = start + target * (pages * layout.page_bytes + target_gap) + page * layout.page_bytes
                    for token in range(first, end):
                        for offset, width in _places(layout, token):
                            new[to + offset : to + offset + width] = old[at + offset : at + offset + width]

    def check(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for one, old in zip(self.source, self.before, strict=True):
            np.testing.assert_array_equal(one.cpu().numpy(), old)
        for one, new in zip(self.target, self.image, strict=True):
            np.testing.assert_array_equal(one.cpu().numpy(), new)


def _places(layout: PageLayout, token: int) -> list[tuple[int, int]]:
    values, scales = layout.value_bytes, layout.scale_bytes
    return [(token * values, values), (layout.block_size * values + token * scales, scales)]


def layouts(pools: list[Any]) -> list[PageLayout]:
    return [pool[0] for pool in pools]


def moves_of(kind: str, block_size: int, rng: np.random.Generator, blocks: tuple[int, int]) -> list[Any]:
    """Moves to distinct targets, first and last block at both ends among them."""
    sources = [0, blocks[0] - 1, *rng.integers(0, blocks[0], 3).tolist()]
    targets = [blocks[1] - 1, 0, *(1 + rng.permutation(blocks[1] - 2))[:3].tolist()]
    if kind == "whole":
        ranges = [(0, block_size)] * 5
    elif kind == "leading":
        ranges = [(0, int(n)) for n in rng.integers(1, block_size, 5)]
    else:
        ranges = [(0, block_size), (0, 0), (block_size - 1, block_size), (1, block_size - 1), (2, 2)]
    return [(s, t, *r) for s, t, r in zip(sources, targets, ranges, strict=True)]


@pytest.mark.parametrize("ctas", [0, 1, 7])
@pytest.mark.parametrize("kind", ["whole", "leading", "mixed"])
@pytest.mark.parametrize("name", list(POOLS))
def test_every_byte_of_the_tokens_and_no_other(
    device: torch.device, rng: np.random.Generator, name: str, kind: str, ctas: int
) -> None:
    pools = POOLS[name]
    ends = Ends(pools, (6, 5), rng).to(device, device)
    moves = moves_of(kind, pools[0][0].block_size, rng, (6, 5))
    ends.expect(moves)
    table = torch.tensor(moves, dtype=torch.int32)
    ops.copy_blocks(ends.views(False), ends.views(True), table, layouts(pools), ctas)
    ends.check()


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [8, 132])
@pytest.mark.parametrize("kind", ["whole", "mixed"])
@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("name", list(POOLS))
def test_across_the_bus(rng: np.random.Generator, name: str, to_host: bool, kind: str, ctas: int) -> None:
    pools = POOLS[name]
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ends = Ends(pools, (6, 5), rng).to(*((cuda, cpu) if to_host else (cpu, cuda)))
    moves = moves_of(kind, pools[0][0].block_size, rng, (6, 5))
    ends.expect(moves)
    table = torch.tensor(moves, dtype=torch.int32)
    ops.copy_blocks(ends.views(False), ends.views(True), table, layouts(pools), ctas)
    ends.check()


def test_more_moves_and_parts_than_one_launch_takes(device: torch.device, rng: np.random.Generator) -> None:
    pools = ODD * 3  # 6 pools, 10 parts, three times
    blocks = 200
    ends = Ends(pools, (blocks, blocks), rng).to(device, device)
    moves = [(int(s), t, t % 3, 3 + t % 2) for t, s in enumerate(rng.permutation(blocks))]
    ends.expect(moves)
    table = torch.tensor(moves, dtype=torch.int32)
    ops.copy_blocks(ends.views(False), ends.views(True), table, layouts(pools))
    ends.check()


def test_within_one_pool(device: torch.device, rng: np.random.Generator) -> None:
    """What fork and partial reuse ask for: source and target are blocks of the same memory."""
    ends = Ends(STANDARD, (6, 6), rng).to(device, device)
    ends.target, ends.image = ends.source, [data.copy() for data in ends.before]
    moves = [(0, 3, 0, 17), (0, 5, 0, 64), (2, 1, 0, 1)]
    ends.pools = [(layout, pages, gap, gap, start) for layout, pages, gap, _, start in STANDARD]
    ends.expect(moves)
    table = torch.tensor(moves, dtype=torch.int32)
    ops.copy_blocks(ends.views(False), ends.views(False), table, layouts(STANDARD))
    ends.before = ends.image
    ends.check()


def test_no_moves(device: torch.device, rng: np.random.Generator) -> None:
    ends = Ends(ODD, (2, 2), rng).to(device, device)
    ops.copy_blocks(ends.views(False), ends.views(True), torch.empty((0, 4), dtype=torch.int32), layouts(ODD))
    ends.check()


def blocks_of(count: int, pages: int = 2) -> torch.Tensor:
    return torch.full((count, pages, 4 * 8), POISON, dtype=torch.uint8)


LAYOUT = latent_layout(LatentFormat.FP8, 6, 2, 4)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([[0, 3, 0, 4]], "move 0 is from block 0 to 3, but there are 4 source and 3 target blocks"),
        ([[0, 0, 0, 4], [4, 1, 0, 4]], "move 1 is from block 4 to 1"),
        ([[-1, 0, 0, 4]], "move 0 is from block -1"),
        ([[0, 0, 0, 5]], "move 0 has tokens 0..5, but a block has tokens 0..4"),
        ([[0, 0, 3, 2]], "move 0 has tokens 3..2"),
        ([[0, 1, 0, 4], [2, 1, 0, 4]], "target blocks repeat"),
        ([[0, 1, 4]], "moves must be int32"),
    ],
)
def test_refused_moves(moves: list[list[int]], message: str) -> None:
    source, target = blocks_of(4), blocks_of(3)
    with pytest.raises(InvalidValue, match=message):
        ops.copy_blocks([source], [target], torch.tensor(moves, dtype=torch.int32), [LAYOUT])
    assert (target == POISON).all()


def test_refused_tensors() -> None:
    moves, good = torch.zeros((1, 4), dtype=torch.int32), blocks_of(2)
    apart = torch.zeros((2, 4, 32), dtype=torch.uint8)[:, ::2]
    for source, target, message in (
        ([good], [good.to(torch.int8)], r"target\[0\] must be uint8"),
        ([good], [blocks_of(2, 3)], r"target\[0\] must be uint8 \[blocks, 2, 32\]"),
        ([apart], [good], r"source\[0\] needs the pages of a block side by side"),
        ([good, good], [good], "one source, target and layout a pool"),
        ([], [], "one source, target and layout a pool"),
    ):
        with pytest.raises(InvalidValue, match=message):
            ops.copy_blocks(source, target, moves, [LAYOUT] * len(source))
    with pytest.raises(InvalidValue, match="a block is source and target of one call"):
        ops.copy_blocks([good], [good], torch.tensor([[0, 1, 0, 4], [1, 0, 0, 4]], dtype=torch.int32), [LAYOUT])
    with pytest.raises(InvalidValue, match="ctas must be 0"):
        ops.copy_blocks([good], [good], moves, [LAYOUT], -1)


@pytest.mark.gpu
def test_host_memory_that_is_not_pinned_is_refused() -> None:
    moves = torch.tensor([[0, 1, 0, 4]], dtype=torch.int32)
    with pytest.raises(InvalidValue, match="must be pinned"):
        ops.copy_blocks([blocks_of(2)], [blocks_of(2).cuda()], moves, [LAYOUT])
