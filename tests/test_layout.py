"""Where bytes stand, how many there are, and which configurations are refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import golden
import pytest

from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.errors import GraphKVError, InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, Role, Side, index_k_layout, latent_layout

GLM = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_types": ["full", "full", "shared", "shared"],
}


@pytest.mark.parametrize(("fmt", "place"), [("fp8", golden.FP8_PLACE), ("fp4", golden.FP4_PLACE)])
def test_offsets_of_the_worked_position(fmt: str, place: tuple[int, ...]) -> None:
    position, block_size, page, value, scale = place
    layout = index_k_layout(IndexKFormat(fmt), 128, block_size)
    assert layout.value_offset(page, position % block_size) == value
    assert layout.scale_offset(page, position % block_size) == scale


@pytest.mark.parametrize(("fmt", "place"), [("fp8", golden.FP8_COALESCED), ("fp4", golden.FP4_COALESCED)])
def test_offsets_in_a_coalesced_pool(fmt: str, place: tuple[int, ...]) -> None:
    layout = index_k_layout(IndexKFormat(fmt), 128, 64)
    page_scale, block, layer_offset, position = 3, 5, 2, 2
    value, scale, from_base = place
    assert layout.value_offset(block * page_scale, position) == value
    assert layout.scale_offset(block * page_scale, position) == scale
    assert layout.value_offset(block * page_scale + layer_offset, position) == from_base


@pytest.mark.parametrize("block_size", [1, 16, 64, 128])
@pytest.mark.parametrize("fmt", list(IndexKFormat))
def test_every_byte_of_an_index_k_page_belongs_to_one_token(fmt: IndexKFormat, block_size: int) -> None:
    layout = index_k_layout(fmt, 128, block_size)
    owner = [0] * layout.page_bytes
    for position in range(block_size):
        start = layout.value_offset(0, position)
        spans = [range(start, start + layout.value_bytes)]
        if layout.scale_bytes:
            start = layout.scale_offset(0, position)
            spans.append(range(start, start + layout.scale_bytes))
        for byte in (byte for span in spans for byte in span):
            owner[byte] += 1
    assert owner == [1] * layout.page_bytes


def test_a_page_without_scales_has_no_scale_offset() -> None:
    assert latent_layout(LatentFormat.FP8_DS_MLA, 512, 64, 64).scale_offset(3, 5) == -1


@pytest.mark.parametrize(
    ("fmt", "token_bytes"),
    [("fp32", 2304), ("bf16", 1152), ("fp8", 576), ("fp8_ds_mla", 656)],
)
def test_latent_bytes_at_the_standard_widths(fmt: str, token_bytes: int) -> None:
    layout = latent_layout(LatentFormat(fmt), 512, 64, 64)
    assert (layout.token_bytes, layout.page_bytes % 128) == (token_bytes, 0)


@pytest.mark.parametrize(
    ("fmt", "head_dim", "token_bytes"),
    [("fp32", 128, 512), ("bf16", 128, 256), ("fp8", 128, 132), ("fp4", 128, 68), ("fp8", 64, 68), ("fp8", 256, 264)],
)
def test_index_k_bytes(fmt: str, head_dim: int, token_bytes: int) -> None:
    layout = index_k_layout(IndexKFormat(fmt), head_dim, 64)
    assert layout.token_bytes == token_bytes
    assert layout.page_bytes == 64 * token_bytes


def bytes_per_token(config: CacheConfig) -> int:
    return sum(
        config.page_scale(side, role) * config.page_layout(role).token_bytes for side in config.sides for role in Role
    )


@pytest.mark.parametrize(("latent", "index_k", "size"), golden.BYTES_PER_TOKEN)
def test_bytes_per_token_of_61_layers(latent: str, index_k: str, size: int) -> None:
    assert bytes_per_token(CacheConfig.named("deepseek-v3.2", latent=latent, index_k=index_k)) == size


def test_a_layer_that_shares_a_topk_adds_no_index_bytes() -> None:
    specs = (LayerSpec(), LayerSpec(Indexer.SHARED), LayerSpec(), LayerSpec(Indexer.SHARED))
    config = CacheConfig(layers=specs)
    assert config.page_scale(Side.TARGET, Role.LATENT) == 4
    assert config.page_scale(Side.TARGET, Role.INDEX_K) == 2
    assert [config.owner_of_topk(Side.TARGET, layer) for layer in range(4)] == [0, 0, 2, 2]
    assert [config.layer_offset(Side.TARGET, Role.INDEX_K, layer) for layer in (0, 2)] == [0, 1]
    with pytest.raises(InvalidValue, match=r"layer 3 is a shared indexer.*use layer 2"):
        config.layer_offset(Side.TARGET, Role.INDEX_K, 3)


def test_the_draft_side_counts_apart() -> None:
    config = CacheConfig(layers=(LayerSpec(),) * 3, draft_layers=(LayerSpec(),))
    assert config.sides == (Side.TARGET, Side.DRAFT)
    assert [config.page_scale(side, Role.INDEX_K) for side in Side] == [3, 1]
    assert bytes_per_token(config) == 4 * (1152 + 132)


@pytest.mark.parametrize("wrap", [dict, lambda values: SimpleNamespace(**values)])
def test_from_hf_reads_dictionaries_and_config_objects(wrap: type) -> None:
    config = CacheConfig.from_hf(wrap(GLM), latent="fp8_ds_mla", block_size=32)
    assert [spec.indexer for spec in config.layers] == ["full", "full", "shared", "shared"]
    assert (config.index_heads, config.index_topk, config.block_size) == (32, 2048, 32)
    assert config.page_layout(Role.LATENT).token_bytes == 656


def test_from_hf_takes_every_layer_as_full_without_a_pattern() -> None:
    config = CacheConfig.from_hf({key: GLM[key] for key in GLM if key != "indexer_types"})
    assert config.page_scale(Side.TARGET, Role.INDEX_K) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["full"]}, "names 1 layers, but num_hidden_layers is 4"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "layer 0 is a shared indexer"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "indexer must be one of .*got 'half'"),
        ({"index_topk": None}, r"lacks \['index_topk'\]"),
    ],
)
def test_from_hf_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        CacheConfig.from_hf({**GLM, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"block_size": 48}, "power of two, got 48"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"index_topk": True}, "index_topk must be a positive integer"),
        ({"latent": "fp6"}, r"latent must be one of .*'fp8_ds_mla'.*got 'fp6'"),
        ({"index_k_scale": "log"}, "index_k_scale must be one of"),
        ({"latent": "fp8_ds_mla", "kv_lora_rank": 500}, "multiples of 128, got 500"),
        ({"index_head_dim": 96}, "fp8 needs index_head_dim 32, 64 or a multiple of 128, got 96"),
        ({"index_k": "fp4", "index_head_dim": 64}, "fp4 needs index_head_dim in multiples of 128, got 64"),
        ({"index_k_amax_floor": 0.0}, "must be at least 7.89e-31"),
        ({"latent_scale": -1.0}, "latent_scale must be positive, got -1.0"),
        ({"blocksize": 64}, r"unknown cache options \['blocksize'\]"),
    ],
)
def test_a_bad_configuration_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        CacheConfig(layers=(LayerSpec(),)).with_options(**changes)


def test_an_error_is_both_ours_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown model") as raised:
        CacheConfig.named("deepseek-v1")
    assert isinstance(raised.value, GraphKVError)


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig(layers=(LayerSpec(),)).block_size = 32  # type: ignore[misc]
