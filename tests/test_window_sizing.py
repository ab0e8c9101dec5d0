"""Windows, groups and their sizes, against plain counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.layout import Role, Side
from graphkv.pool import Pools
from graphkv.sizing import CacheSize
from graphkv.window import Window
from graphkv.window_sizing import GroupLoad, choose_blocks, group_blocks, split

FULL, SHARED, W = LayerSpec(), LayerSpec("shared"), LayerSpec(window=128)  # type: ignore[arg-type]
SINKS = LayerSpec(window=128, sinks=4)
CONFIG = CacheConfig(layers=(W, FULL, SINKS, W, SHARED), draft_layers=(SINKS,), latent="fp8")  # type: ignore[arg-type]


@given(
    tokens=st.integers(1, 40),
    sinks=st.integers(0, 20),
    position=st.integers(0, 120),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_columns_are_those_of_the_positions_that_are_read(tokens: int, sinks: int, position: int, size: int) -> None:
    window = Window(tokens, sinks)
    read = [p for p in range(position) if p < sinks or p > position - tokens]
    assert {p // size for p in read} <= set(window.columns(position, size))
    behind_sinks = [p // size for p in read if p // size >= -(-sinks // size)]
    assert window.columns(position, size) == sorted(
        {*range(min(-(-sinks // size), -(-position // size))), *behind_sinks}
    )
    assert window.start(position) == max(0, position - tokens + 1)
    assert len(window.columns(position, size)) <= window.most_blocks(0, size)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (63, 0), (94, 0), (95, 1), (127, 2), (256, 6)])
def test_the_first_column_is_that_of_trtllms_stale_ranges(position: int, first: int) -> None:
    """Window 64, blocks of 32, position h: [0, (h + 1 - 64) // 32) is stale."""
    assert Window(64).first_column(position, 32) == first
    assert Window(64, 33).first_column(position, 32) == max(2, first), "behind two blocks of sinks"


def test_most_blocks_is_reached_and_not_passed() -> None:
    for tokens, sinks, size, more in ((1, 0, 16, 0), (32, 0, 16, 4), (33, 17, 16, 0), (7, 2, 4, 9)):
        window = Window(tokens, sinks)
        needed = []
        for position in range(200):
            end = -(-(position + more) // size)
            needed.append(len({*window.columns(position, size), *range(position // size, end)}))
        assert max(needed) <= window.most_blocks(more, size) <= max(needed) + 1


def test_groups_are_layers_that_read_alike_on_either_side() -> None:
    assert CONFIG.groups == (None, Window(128), Window(128, 4))
    assert [CONFIG.group_of(Side.TARGET, layer) for layer in range(5)] == [1, 0, 2, 1, 0]
    assert CONFIG.side_groups(Side.TARGET) == (0, 1, 2)
    assert CONFIG.side_groups(Side.DRAFT) == (2,)
    assert [CONFIG.page_scale(Side.TARGET, Role.LATENT, group) for group in range(3)] == [2, 2, 1]
    assert [CONFIG.page_scale(Side.TARGET, Role.INDEX_K, group) for group in range(3)] == [1, 0, 0]
    assert [CONFIG.page_scale(Side.DRAFT, Role.LATENT, group) for group in range(3)] == [0, 0, 1]
    assert [CONFIG.layer_offset(Side.TARGET, Role.LATENT, layer) for layer in range(5)] == [0, 0, 0, 1, 1]
    assert CONFIG.owner_of_topk(Side.TARGET, 4) == 1
    assert W.indexer is Indexer.NONE
    assert CacheConfig(layers=(FULL,)).groups == (None,)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LayerSpec(window=0), "window must be an integer of at least 1, got 0"),
        (lambda: LayerSpec(window=True), "window must be an integer"),
        (lambda: LayerSpec(window=4, sinks=-1), "sinks must be an integer of at least 0, got -1"),
        (lambda: LayerSpec(sinks=4), "sinks=4 is for a layer with a window"),
        (lambda: LayerSpec("full", window=4), "indexer=full does not go with window=4"),  # type: ignore[arg-type]
        (lambda: LayerSpec("none"), "indexer=none does not go with window=None"),  # type: ignore[arg-type]
        (lambda: CacheConfig(layers=(W, SHARED)), "layer 1 is a shared indexer, but no layer before it"),
        (lambda: CONFIG.owner_of_topk(Side.TARGET, 3), "layer 3 has a window, all of whose tokens it reads"),
        (lambda: CONFIG.layer_offset(Side.TARGET, Role.INDEX_K, 2), "layer 2 has a window, .* owns no index_k bytes"),
        (lambda: CONFIG.group_of(Side.DRAFT, 1), "draft layer 1 is out of range"),
        (lambda: CacheSize.of(CONFIG).blocks_for(1 << 30), "memory_bytes alone gives none; use .*split"),
        (lambda: GroupLoad(rows=0, longest=4), "rows must be at least 1, got 0"),
        (lambda: split(CONFIG, 1000, GroupLoad(rows=1, longest=4)), "memory_bytes 1000 does not hold the groups"),
        (lambda: choose_blocks(CONFIG, 9, None, [5], GroupLoad(rows=1, longest=4)), "for each of 2 groups"),
        (lambda: choose_blocks(CONFIG, 9, 9, None, GroupLoad(rows=1, longest=4)), "not both or none"),
        (lambda: Pools(CONFIG, 4, Device.of("cpu")), r"for each of 2 groups with a window, got \[\]"),
        (lambda: Pools(CONFIG, 4, Device.of("cpu"), window_blocks=[3, 1]), "got num_blocks=1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        make()  # type: ignore[operator]


def test_bytes_by_group_are_what_is_allocated() -> None:
    size = CacheSize.of(CONFIG)
    assert [size.token_bytes(group=group) for group in range(3)] == [2 * 576 + 132, 2 * 576, 2 * 576]
    pools = Pools(CONFIG, 7, Device.of("cpu"), window_blocks=[4, 3])
    for group, blocks in enumerate((7, 4, 3)):
        allocated = sum(pool.num_bytes for pool in pools.of_group(group))
        assert allocated == size.pool_bytes(blocks, group=group) == blocks * size.block_bytes(group=group)
    for side, role, layer, scale in (
        (Side.TARGET, Role.LATENT, 3, 2),
        (Side.DRAFT, Role.LATENT, 0, 1),
        (Side.TARGET, Role.INDEX_K, 1, 1),
    ):
        group = CONFIG.group_of(side, layer)
        view = pools.view(side, role, layer)
        assert pools.page_scale(side, role, group) == scale
        assert (
            view.data_ptr()
            == pools.pool(side, role, group).data.data_ptr()
            + CONFIG.layer_offset(side, role, layer) * pools.pool(side, role, group).layout.page_bytes
        )
    with pytest.raises(InvalidValue, match="no target layer of group 1 owns index_k bytes"):
        pools.pool(Side.TARGET, Role.INDEX_K, 1)
    with pytest.raises(InvalidValue, match="layer 0 has a window"):
        pools.view(Side.TARGET, Role.INDEX_K, 0)


def test_a_long_sequence_needs_little_of_a_window() -> None:
    load = GroupLoad(rows=8, longest=131_072, next_n=2, prefill_chunk=512)
    blocks = group_blocks(CONFIG, load)
    assert blocks[0] == 1 + 8 * 2049
    assert blocks[1] <= 1 + 8 * 6 + 32
    assert blocks[2] == blocks[1] + 8, "a block of sinks each"
    assert group_blocks(CONFIG, GroupLoad(rows=8, longest=60))[1] == 1 + 8, "never more than the whole"


@pytest.mark.parametrize("budget", [50_000_000, 400_000_000, 2_000_000_000])
def test_a_budget_is_split_and_used(budget: int) -> None:
    load = GroupLoad(rows=8, longest=16_384, next_n=2, prefill_chunk=512)
    size, need = CacheSize.of(CONFIG), group_blocks(CONFIG, load)
    blocks = split(CONFIG, budget, load)
    used = sum(size.pool_bytes(count, group=group) for group, count in enumerate(blocks))
    step = sum(size.block_bytes(group=group) for group in range(3))
    assert budget - step < used <= budget
    if budget >= sum(size.pool_bytes(count, group=group) for group, count in enumerate(need)):
        assert blocks[1:] == need[1:]
        assert blocks[0] > need[0]
    else:
        shares = [count / wanted for count, wanted in zip(blocks, need, strict=True)]
        assert max(shares) <= 1
        assert min(shares) > 0.9 * max(shares) or min(blocks) < 20


def test_group_0_without_layers_costs_nothing() -> None:
    config = CacheConfig(layers=(W,) * 4, latent="fp8")  # type: ignore[arg-type]
    load = GroupLoad(rows=2, longest=1000)
    assert split(config, 10_000_000, load) == group_blocks(config, load)
    assert [pool.page_scale for pool in Pools(config, 33, Device.of("cpu"), window_blocks=[9])] == [4]
