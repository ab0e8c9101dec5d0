"""V1's host side: its bookkeeping against a plain model, its pools, and its metadata against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mix import mix_config
from step_oracle import live_set
from step_world import assert_live

from graphkv.baseline.metadata import MetadataBuilder, UploadedBatch
from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows
from graphkv.layout import Role, Side
from graphkv.manager.v1 import LayerPools, ManagerV1
from graphkv.metadata import DerivePlan
from graphkv.pool import NULL_PATTERN
from graphkv.sizing import CacheSize

# metadata -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_k", ["fp8", "fp4", "bf16"])
@pytest.mark.parametrize("query", [[1, 1, 1], [3, 3, 3], [20, 1, 7]], ids=["decode", "drafts", "ragged"])
def test_the_metadata_is_what_the_oracle_says(device: torch.device, query: list[int], index_k: str) -> None:
    own, config = Device.of(device), mix_config("bf16", index_k)
    rows, lengths = [4, 0, 2], [15, 600, 0]
    table = np.zeros((6, 48), np.int32)
    ids = iter(np.random.default_rng(1).permutation(np.arange(1, 200)))
    for row, length, count in zip(rows, lengths, query, strict=True):
        for column in range(-(-(length + count + 5) // 16)):
            table[row, column] = next(ids)
    starts = np.cumsum([0, *query]).astype(np.int32)
    up = [torch.from_numpy(a).to(device) for a in (table[rows], np.int32(rows), np.int32(lengths), starts)]
    batch = UploadedBatch(*up, tokens=int(starts[-1]))
    builder = MetadataBuilder(config, own)
    token_ids = torch.arange(batch.tokens, device=device)

    def expected(lengths: list[int], query: list[int]) -> dict[str, np.ndarray]:
        layout = config.page_layout(Role.INDEX_K)
        return live_set(
            rows=3,
            tokens=sum(query),
            next_n=1,
            batch=list(zip(rows, lengths, query, strict=True)),
            table=table,
            block_size=16,
            latent_scale=1,
            index_scale=1,
            value_bytes=layout.value_bytes,
            scale_bytes=layout.scale_bytes,
            parts=own.sm_count,
        )

    live = builder.live(Side.TARGET, batch, token_ids)
    assert_live(live, expected(lengths, query))
    assert live.token_ids is token_ids
    mirrored = builder.derive(Side.DRAFT, batch, DerivePlan())
    assert_live(mirrored, expected(lengths, query))
    assert mirrored.side is Side.DRAFT
    accepted = torch.tensor([1, 3, 2], dtype=torch.int32, device=device)
    moved = builder.derive(Side.DRAFT, batch, DerivePlan(query_len=2, shift=1, accepted=accepted))
    assert_live(moved, expected([17, 604, 3], [2, 2, 2]))


def test_a_token_past_its_rows_blocks_is_written_nowhere(device: torch.device) -> None:
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device)
    row, length = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1], [15, 31]))
    start = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    live = MetadataBuilder(mix_config("bf16", "fp8"), Device.of(device)).live(
        Side.TARGET, UploadedBatch(table, row, length, start, 4), torch.zeros(4, dtype=torch.int64, device=device)
    )
    assert live.latent_slot.tolist() == [63, -1, 47, -1]
    assert live.context_len.tolist() == [16, 0, 32, 0]
    for name in ("index_slot", "index_value_offset", "index_scale_offset"):
        assert (getattr(live, name) < 0).tolist() == [False, True, False, True]


def test_a_pool_holds_one_layer_and_all_of_them_the_bytes_of_v2(device: torch.device) -> None:
    own, config = Device.of(device), mix_config("fp8_ds_mla", "fp4", draft=True)
    pools = LayerPools(config, 10, own)
    assert pools.num_bytes == CacheSize.of(config).pool_bytes(10) == own.ledger.device_bytes
    assert len(list(pools)) == 3 + 2 + 2 + 1
    for role in Role:
        layout, view = config.page_layout(role), pools.view(Side.TARGET, role, 2)
        assert list(view.shape) == [10, 16, 1, layout.token_bytes]
        assert view is pools.view(Side.TARGET, role, 2)
        assert (view[0] == NULL_PATTERN).all()
        assert pools.page_scale(Side.TARGET, role) == 1
    with pytest.raises(InvalidValue, match="shared indexer and owns no index_k"):
        pools.view(Side.TARGET, Role.INDEX_K, 1)
    with pytest.raises(InvalidValue, match="layer 3 is out of range"):
        pools.view(Side.TARGET, Role.LATENT, 3)


# the manager --------------------------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "extend", "extend", "advance", "rewind", "close", "retire"]),
        st.integers(0, 30),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(operations=OPERATIONS)
def test_the_manager_agrees_with_a_plain_model(operations: list[tuple[str, int, int]]) -> None:
    manager = ManagerV1(num_blocks=12, block_size=4, max_rows=3, max_blocks=6)
    lengths: dict[int, int] = {}
    blocks: dict[int, int] = {}
    waiting: dict[int, int] = {}
    step = 0
    for what, number, pick in operations:
        step += 1
        free = 11 - sum(blocks.values()) - sum(waiting.values())
        row = sorted(lengths)[pick % len(lengths)] if lengths else None
        if what == "open":
            if len(lengths) == 3:
                with pytest.raises(OutOfRows, match="all 3 rows"):
                    manager.open()
            else:
                new = manager.open()
                lengths[new] = blocks[new] = 0
        elif what == "retire":
            manager.retire(step - 2)
            waiting = {s: n for s, n in waiting.items() if s > step - 2}
        elif row is None:
            continue
        elif what == "extend":
            want = max(0, -(-(lengths[row] + number) // 4) - blocks[row])
            if lengths[row] + number > 24:
                with pytest.raises(InvalidValue, match=r"has room for 24|not within 0 .. 24"):
                    manager.extend([row], number)
            elif want > free:
                with pytest.raises(OutOfBlocks) as caught:
                    manager.extend([row], number)
                assert (caught.value.needed, caught.value.free) == (want, free)
            else:
                assert manager.extend([row], number) == want
                blocks[row] += want
        elif what == "advance":
            if lengths[row] + number > blocks[row] * 4:
                with pytest.raises(InvalidValue, match=r"extend first|not within"):
                    manager.advance([row], number)
            else:
                manager.advance([row], number)
                lengths[row] += number
        elif what == "rewind":
            if number > lengths[row]:
                with pytest.raises(InvalidValue, match=r"is more than|not within"):
                    manager.rewind([row], number, step)
            else:
                lengths[row] -= number
                keep = -(-lengths[row] // 4)
                assert manager.rewind([row], number, step) == blocks[row] - keep
                waiting[step] = waiting.get(step, 0) + blocks[row] - keep
                blocks[row] = keep
        else:
            serial = int(manager.serial[row])
            assert manager.close(row, step, serial)
            assert not manager.close(row, step, serial)
            waiting[step] = waiting.get(step, 0) + blocks.pop(row)
            del lengths[row]
        manager.check()
        stats = manager.stats()
        assert (stats.blocks_held, stats.blocks_retiring) == (sum(blocks.values()), sum(waiting.values()))
        assert stats.blocks_free + stats.blocks_held + stats.blocks_retiring == stats.blocks_total == 11
        assert stats.rows_open == len(lengths)
        assert {r: int(manager.length[r]) for r in lengths} == lengths
        out = np.full((len(lengths), 6), -1, np.int32)
        manager.block_tables(sorted(lengths), out)
        assert [(line > 0).sum() for line in out] == [blocks[r] for r in sorted(lengths)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.extend([0, 0], 1), "named more than once"),
        (lambda m: m.extend([1], 1), "row 1 is not open"),
        (lambda m: m.extend([7], 1), "row 7 is not open"),
        (lambda m: m.extend([0], -1), "count of -1"),
        (lambda m: m.extend([0], [1, 2]), "one for each of 1 rows"),
        (lambda m: m.extend([0], 0.5), "must be an integer"),
        (lambda m: m.extend([[0]], 1), "one-dimensional"),
        (lambda m: m.advance([0], 9), "cannot advance to 9 tokens with room for 4"),
        (lambda m: m.settle([0], 1), "surplus 1 is more than the 0 tokens"),
        (lambda m: m.close(0, 0, 2), "never opened with serial 2"),
        (lambda m: m.open(99), "does not fit a row of 24"),
        (lambda m: m.blocks(-1), "row -1 is not open"),
    ],
)
def test_a_careless_caller_is_told_and_nothing_changed(call: object, message: str) -> None:
    manager = ManagerV1(num_blocks=12, block_size=4, max_rows=3, max_blocks=6)
    manager.extend([manager.open()], 1)
    before = manager.stats(), manager.length.tolist()
    with pytest.raises(InvalidValue, match=message):
        call(manager)  # type: ignore[operator]
    assert (manager.stats(), manager.length.tolist()) == before
    manager.check()


@pytest.mark.parametrize("wrong", [{"num_blocks": 1}, {"block_size": 0}, {"max_rows": 0}, {"max_blocks": -1}])
def test_a_manager_of_no_size_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(wrong))):
        ManagerV1(**({"num_blocks": 12, "block_size": 4, "max_rows": 3, "max_blocks": 6} | wrong))


def test_all_rows_grow_or_none() -> None:
    manager = ManagerV1(num_blocks=4, block_size=4, max_rows=3, max_blocks=6)
    a, b = manager.open(), manager.open()
    with pytest.raises(OutOfBlocks, match="4 more blocks needed, 3 free"):
        manager.extend([a, b], 8)
    assert manager.blocks(a) == manager.blocks(b) == []
    assert manager.extend([a, b], [8, 1]) == 3


def test_listeners_hear_which_blocks_a_rewind_gives_up() -> None:
    manager = ManagerV1(num_blocks=9, block_size=4, max_rows=3, max_blocks=6)
    heard: list[tuple[int, int, list[int]]] = []
    manager.on_rewind.append(lambda row, length, ids: heard.append((row, length, ids.tolist())))
    row = manager.open()
    manager.extend([row], 10)
    manager.advance([row], 10)
    ids = list(manager.blocks(row))
    assert manager.rewind([row], 1, 5) == 0
    assert heard == []
    assert manager.rewind([row], 5, 5) == 2
    assert heard == [(row, 4, ids[1:])]
    assert manager.stats().blocks_retiring == 2
    manager.retire(5)
    assert manager.stats().blocks_free == 7


@pytest.mark.parametrize("spoil", [lambda m: m._free.append(1), lambda m: m._free.pop(), lambda m: m.length.fill(9)])
def test_check_finds_what_is_broken(spoil: object) -> None:
    manager = ManagerV1(num_blocks=9, block_size=4, max_rows=3, max_blocks=6)
    manager.extend([manager.open()], 3)
    manager.check()
    spoil(manager)  # type: ignore[operator]
    with pytest.raises(AssertionError, match="blocks"):
        manager.check()
