"""Static byte counts equal the published numbers, add up, and never pass a budget."""

from __future__ import annotations

import pytest
import torch

from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfBlocks
from graphkv.layout import Role, Side
from graphkv.manager.v2 import ManagerV2
from graphkv.pool import Pools
from graphkv.sizing import CacheSize

FULL, SHARED = LayerSpec(Indexer.FULL), LayerSpec(Indexer.SHARED)


@pytest.mark.parametrize(
    ("latent", "index_k", "expected"),
    [
        ("fp8", "fp8", 43_188),
        ("fp8", "fp4", 39_284),
        ("bf16", "fp8", 78_324),
        ("bf16", "fp4", 74_420),
        ("fp8_ds_mla", "fp8", 48_068),
        ("fp8_ds_mla", "fp4", 44_164),
        ("fp32", "fp8", 61 * (576 * 4 + 132)),
        ("bf16", "bf16", 61 * (576 * 2 + 256)),
    ],
)
def test_bytes_a_token_of_61_layers(latent: str, index_k: str, expected: int) -> None:
    size = CacheSize.of(CacheConfig.named("deepseek-v3.2", latent=latent, index_k=index_k))
    assert size.token_bytes() == expected
    assert size.block_bytes() == 64 * expected
    assert size.pool_bytes(1000) == 64_000 * expected


def test_bytes_of_a_block_by_pool() -> None:
    size = CacheSize.of(CacheConfig.named("deepseek-v3.2"))
    assert size.block_bytes(role=Role.LATENT) == 4_497_408
    assert size.block_bytes(Side.TARGET, Role.INDEX_K) == 515_328
    assert size.block_bytes(Side.TARGET, Role.INDEX_K, 60) == 8_448
    assert size.block_bytes(Side.DRAFT) == 0


@pytest.mark.parametrize(("index_k", "index_bytes"), [("fp8", 132), ("fp4", 68)])
@pytest.mark.parametrize("full", [4, 2])
@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 30])
def test_case_I1_estimate_counts_indexer_and_draft_and_stays_in_the_quota(
    device: torch.device, index_k: str, index_bytes: int, full: int, memory_bytes: int
) -> None:
    layers = (FULL,) * 4 if full == 4 else (FULL, SHARED, FULL, SHARED)
    config = CacheConfig(layers=layers, draft_layers=(FULL,), latent="fp8", index_k=index_k)  # type: ignore[arg-type]
    size = CacheSize.of(config)
    num_blocks = size.blocks_for(memory_bytes)
    target, draft = 4 * 576 + full * index_bytes, 576 + index_bytes
    assert size.token_bytes() == target + draft
    assert (size.token_bytes(Side.TARGET), size.token_bytes(Side.DRAFT)) == (target, draft)
    pools = Pools(config, num_blocks, Device.of(device))
    allocated = pools.num_bytes
    assert allocated == size.pool_bytes(num_blocks) == num_blocks * 64 * (target + draft)
    for side in config.sides:
        for role in Role:
            assert pools.pool(side, role).data.nbytes == size.pool_bytes(num_blocks, side, role)
    assert allocated <= memory_bytes < size.pool_bytes(num_blocks + 1)


def test_items_name_every_page_once_and_add_up() -> None:
    size = CacheSize.of(CacheConfig(layers=(FULL, SHARED, FULL), draft_layers=(FULL,), latent="fp8"))  # type: ignore[arg-type]
    items = [(page.side, page.role, page.layer, page.token_bytes) for page in size.pages]
    assert items == [
        ("target", "latent", 0, 576),
        ("target", "latent", 1, 576),
        ("target", "latent", 2, 576),
        ("target", "index_k", 0, 132),
        ("target", "index_k", 2, 132),
        ("draft", "latent", 0, 576),
        ("draft", "index_k", 0, 132),
    ]
    assert sum(page.page_bytes for page in size.pages) == size.block_bytes()
    assert size.token_bytes(Side.TARGET, layer=1) == 576


@pytest.mark.parametrize(("tokens", "num_blocks"), [(1, 2), (63, 2), (64, 2), (65, 3), (131_072, 2_049)])
def test_blocks_for_tokens_counts_the_null_block(tokens: int, num_blocks: int) -> None:
    assert CacheSize.of(CacheConfig.named("glm-5")).blocks_for_tokens(tokens) == num_blocks


def test_a_budget_below_two_blocks_is_refused_with_the_numbers() -> None:
    size = CacheSize.of(CacheConfig.named("deepseek-v3.2"))
    block = 5_012_736
    assert size.blocks_for(2 * block) == 2
    for memory_bytes, holds in ((2 * block - 1, 1), (block - 1, 0), (0, 0), (-5, 0)):
        with pytest.raises(InvalidValue, match=f"^memory_bytes {memory_bytes} holds {holds} blocks of {block} bytes"):
            size.blocks_for(memory_bytes)
    with pytest.raises(InvalidValue, match=r"got 1$"):
        size.pool_bytes(1)
    with pytest.raises(InvalidValue, match="got 0"):
        size.blocks_for_tokens(0)


@pytest.mark.parametrize(("share", "beside"), [(1.0, 0), (0.9, 0), (0.5, 12_345_678)])
def test_blocks_in_a_share_of_free_memory(share: float, beside: int) -> None:
    size, free = CacheSize.of(CacheConfig.named("deepseek-v3.2")), 80_000_000_001
    num_blocks = size.blocks_in(free, share, beside)
    assert size.pool_bytes(num_blocks) + beside <= free * share < size.pool_bytes(num_blocks + 1) + beside


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1 << 30, 0.0), "share must be within 0 .. 1, got 0.0"),
        ((1 << 30, 1.1), "share must be within 0 .. 1, got 1.1"),
        ((-1, 0.5), "must not be negative"),
        ((1 << 30, 0.5, -1), "must not be negative"),
        ((1 << 20, 0.5), "give at least"),
    ],
)
def test_a_share_that_makes_no_sense_is_refused(given: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        CacheSize.of(CacheConfig.named("deepseek-v3.2")).blocks_in(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_blocks", "rows", "next_n"), [(2, 1, 1), (40, 1, 1), (40, 8, 1), (40, 8, 4), (40, 40, 1)])
def test_the_longest_sequence_beside_others(num_blocks: int, rows: int, next_n: int) -> None:
    """It and the others are opened and fed in a manager of that size, and one token more does not fit."""
    config = CacheConfig(layers=(FULL,), block_size=16)
    longest = CacheSize.of(config).longest_sequence(num_blocks, rows=rows, next_n=next_n)
    manager = ManagerV2(num_blocks=num_blocks, block_size=16, max_rows=rows, max_blocks=64, max_edits=4096)
    others = [manager.open() for _ in range(rows - 1)]
    for row in others:
        manager.extend([row], 1 + next_n)
    if not longest:
        assert manager.stats().blocks_free == 0
        return
    row = manager.open()
    with pytest.raises(OutOfBlocks):
        manager.extend([row], longest + 1 + next_n)
    manager.extend([row], longest + next_n)
    with pytest.raises(InvalidValue, match="at least 1"):
        CacheSize.of(config).longest_sequence(num_blocks, rows=0)
