"""Pools: coalesced pages, one id for all layers, views that an external kernel can index, a patterned null block."""

from __future__ import annotations

import pytest
import torch

from graphkv import CacheConfig, CacheSize, Device, InvalidValue, LayerSpec, Pools, Role, Side

FULL, SHARED = LayerSpec("full"), LayerSpec("shared")


@pytest.mark.parametrize(("index_k", "in_view", "absolute"), [("fp8", 126_976, 143_872), ("fp4", 65_408, 74_112)])
def test_a_layers_view_puts_scaled_pages_where_the_design_works_them_out(
    device: torch.device, index_k: str, in_view: int, absolute: int
) -> None:
    """Scale 3, block 5, layer 2, in-page position 2: the value byte seen from the view and from the pool's base."""
    config = CacheConfig(layers=(FULL,) * 3, index_k=index_k)
    pools = Pools(config, 10, Device.of(device))
    pool, view = pools.pool(Side.TARGET, Role.INDEX_K), pools.view(Side.TARGET, Role.INDEX_K, 2)
    layout = config.page_layout(Role.INDEX_K)
    assert view.shape == (28, 64, 1, layout.token_bytes)
    assert view.is_contiguous()
    pool.data.zero_()
    view[5 * 3].view(-1)[2 * layout.value_bytes] = 77
    assert view.reshape(-1)[in_view] == 77
    assert pool.data.nonzero().tolist() == [[absolute]]
    assert view.data_ptr() - pool.data.data_ptr() == 2 * layout.page_bytes


def test_every_page_belongs_to_one_layer_of_one_block(device: torch.device) -> None:
    config = CacheConfig(layers=(FULL, SHARED, FULL), draft_layers=(FULL, SHARED), latent="fp8_ds_mla", block_size=16)
    pools = Pools(config, 5, Device.of(device))
    tag = 0
    for pool in pools:
        pool.data.zero_()
    for side in config.sides:
        for role in Role:
            for layer, spec in enumerate(config.side_layers(side)):
                if spec.owns(role):
                    view, scale = pools.view(side, role, layer), pools.page_scale(side, role)
                    for block in range(5):
                        tag += 1
                        assert not view[block * scale].any(), "two layers or blocks share a page"
                        view[block * scale] = tag % 250 + 1
    assert all((pool.data != 0).all() for pool in pools), "a byte belongs to no page"
    assert pools.num_bytes == CacheSize.of(config).pool_bytes(5)


def test_the_null_block_is_patterned_and_reads_as_tiny_numbers(device: torch.device) -> None:
    config = CacheConfig(layers=(FULL,) * 2, latent="fp32", index_k="fp32")
    for pool in Pools(config, 3, Device.of(device)):
        assert (pool.block(0) == 0xA5).all()
        assert pool.block(0).view(torch.float32).abs().max() < 1e-15


def test_what_a_pool_cannot_be_is_refused_with_numbers() -> None:
    config = CacheConfig(layers=(FULL,) * 61)
    device = Device.of("cpu")
    with pytest.raises(InvalidValue, match=r"2 blocks .* got num_blocks=1"):
        Pools(config, 1, device)
    with pytest.raises(
        InvalidValue, match=r"600000 blocks of 61 latent pages make 2342400000 .* at most 550072 blocks"
    ):
        Pools(config, 600_000, device)
    pools = Pools(CacheConfig(layers=(FULL, SHARED), block_size=16), 3, device)
    with pytest.raises(InvalidValue, match=r"target layer 1 is a shared indexer .* use layer 0"):
        pools.view(Side.TARGET, Role.INDEX_K, 1)
    with pytest.raises(InvalidValue, match="layer 7 is out of range"):
        pools.view(Side.TARGET, Role.LATENT, 7)
    with pytest.raises(InvalidValue, match="no draft side"):
        pools.view(Side.DRAFT, Role.LATENT, 0)


@pytest.mark.parametrize("spec", ["tpu", "meta", "cuda:-3"])
def test_a_device_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(InvalidValue, match="auto, cpu, cuda or cuda:N"):
        Device.of(spec)
