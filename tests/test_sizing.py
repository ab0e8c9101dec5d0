"""Static byte counts equal the published numbers, add up, and never pass a budget."""

from __future__ import annotations

import pytest
import torch

from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.layout import Role, Side
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
