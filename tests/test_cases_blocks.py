"""Who owns a block, and what it holds: cases E1, E3, F2, G3, H1, H4 and I3 as a caller sees them, in bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from manager_model import Bytes, FakeMover
from mix import MixModel, mix_config
from probe import PER_REQUEST, probe_config, probe_runtime
from test_cases_runtime import stall
from test_manager_content import close, fill, ids
from tier_shadow import tier_runtime

from graphkv.errors import InvalidValue
from graphkv.layout import Role, Side
from graphkv.manager.v2 import ManagerV2, RowState
from graphkv.runtime import DecodeRuntime
from graphkv.sizing import CacheSize
from graphkv.tiers.hierarchy import TierOptions
from graphkv.tiers.host import UnitLayout


def test_case_E1_two_sequences_behind_every_double_release_share_no_block(device: torch.device) -> None:
    """Closed twice in flight and again when retired, suspended when finished; then two take the whole pool."""
    runtime, shadow = tier_runtime(device, TierOptions(host_blocks=8), num_blocks=9, prefix_caching=False)
    a, b, c = (shadow.open([i * PER_REQUEST, 1 + i * PER_REQUEST]) for i in (1, 2, 3))
    shadow.prefill([a, b, c])
    stall(runtime)
    shadow.step([a, b])
    runtime.suspend(c)
    for sequence in (a, b, c):
        shadow.close(sequence)
        runtime.close(sequence)
    runtime.retire()
    runtime.drain()
    for sequence in (a, b, c):
        runtime.close(sequence)
        with pytest.raises(InvalidValue, match="is closed; open a new one"):
            runtime.suspend(sequence)
    d, e = (shadow.open(list(range(i * PER_REQUEST, i * PER_REQUEST + 60))) for i in (4, 5))
    shadow.prefill([d, e])
    shadow.step([e, d])
    table = runtime.manager.block_table[[d.row, e.row], :4]
    assert sorted(table.ravel().tolist()) == list(range(1, 9)), "the whole pool, each block once"
    shadow.check()


def test_case_E3_device_and_host_counts_stay_true_while_cached_blocks_move() -> None:
    mover = FakeMover(Bytes(16))
    manager = ManagerV2(
        num_blocks=5, block_size=16, max_rows=4, max_blocks=4, max_edits=200, tier_slots=(4,), mover=mover
    )
    close(manager, fill(manager, ids(0, 64)))
    rng = np.random.default_rng(0)
    held: list[int] = []
    for i in range(20):
        if len(held) == 4 or (held and rng.random() < 0.4):
            close(manager, held.pop(int(rng.integers(len(held)))))
        manager.poll()
        mover.end_all()
        manager.poll()
        held.append(fill(manager, ids(1000 * i, 1000 * i + 16)))
        stats = manager.stats()
        (host,) = stats.tiers
        assert stats.blocks_free + stats.blocks_held + stats.blocks_cached == stats.blocks_total == 4
        assert host.free + host.held + host.cached == host.total == 4
        manager.check()  # each block is on one list
    assert manager.stats().tiers[0].cached == 4
    assert manager.stats().blocks_moved > 4


def test_case_F2_a_copy_of_a_part_leaves_the_shared_block_its_bytes(device: torch.device) -> None:
    """Request 2 shares 10 tokens of a block and writes what follows; request 3 has all 16; the stream is stalled."""
    runtime, shadow = tier_runtime(device, draft="F")
    first = list(range(PER_REQUEST, PER_REQUEST + 20))
    a = shadow.open(first)
    shadow.prefill([a])
    runtime.retire()
    block = int(runtime.manager.block_table[a.row, 0])
    before = [pool.block(block).clone() for pool in runtime.pools]
    stall(runtime)
    b = shadow.open([*first[:10], *range(7 * PER_REQUEST, 7 * PER_REQUEST + 12)])
    assert b.cached_tokens == 10
    shadow.prefill([b])
    shadow.close(a)
    c = shadow.open([*first[:16], 5])
    assert c.cached_tokens == 16
    assert int(runtime.manager.block_table[c.row, 0]) == block != int(runtime.manager.block_table[b.row, 0])
    shadow.prefill([c])
    shadow.step([b, c])
    shadow.check()
    assert all(torch.equal(pool.block(block), was) for pool, was in zip(runtime.pools, before, strict=True))


@pytest.mark.parametrize("tokens", [15, 31])
def test_case_G3_a_rewind_across_a_block_edge_behind_a_stalled_step(device: torch.device, tokens: int) -> None:
    """15 committed, 4 drafted into a second block, back to 15; another request grows at once over the same pool."""
    runtime, _, shadow = probe_runtime(device, probe_config(draft="F"), next_n=4, num_blocks=4 + tokens // 16)
    heard: list[tuple[int, int, list[int]]] = []
    runtime.manager.on_rewind.append(lambda row, length, gone: heard.append((row, length, gone.tolist())))
    a, b = shadow.open(1, tokens), shadow.open(2, 14)
    shadow.prefill([a, b])
    runtime.retire()
    stall(runtime)
    step = shadow.step([a])
    (freed,) = runtime.manager.block_table[a.row, (tokens + 1) // 16 :][:1].tolist()
    assert freed, "the step writes into a block of its own"
    accepted = shadow.length[a] - tokens
    runtime.rewind(a, accepted)
    shadow.length[a] = tokens
    assert heard == [(a.row, tokens, [freed])]
    assert runtime.stats().steps_retired >= step, "the step that wrote the block is done before anyone gets it"
    assert freed not in runtime.manager.block_table
    shadow.step([b])
    assert freed in runtime.manager.block_table[b.row]
    shadow.check()


def test_case_H1_all_metadata_names_device_slots(device: torch.device) -> None:
    """Device 4, host 4: after swaps target, draft and indexer tables say the slot, whatever its block was before."""
    runtime, shadow = tier_runtime(device, TierOptions(host_blocks=4), num_blocks=5, max_seq_len=32)
    a, b = (shadow.open(list(range(i * PER_REQUEST, i * PER_REQUEST + 17))) for i in (1, 2))
    shadow.prefill([a, b])
    moved = set()
    for _ in range(3):
        for sequence in (a, b):
            runtime.suspend(sequence)
            runtime.drain()
        runtime.evict()
        for sequence in (b, a):
            runtime.resume(sequence)
            runtime.wait_ready(sequence)
        shadow.step([a, b])
        runtime.retire()
        runtime.device.synchronize()
        table = runtime.manager.block_table[[a.row, b.row], :2]
        moved.add(tuple(table.ravel().tolist()))
        for side in Side:
            live = runtime.metadata(2, side)
            for pages, role in ((live.latent_page_table, Role.LATENT), (live.index_page_table, Role.INDEX_K)):
                scale = runtime.pools.page_scale(side, role)
                np.testing.assert_array_equal(pages[:2, :2].cpu().numpy(), table * scale)
                assert int(pages.max()) < 5 * scale
    assert len(moved) > 1, "nothing changed places"
    shadow.check()


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("side", list(Side))
def test_case_H4_a_block_without_one_of_its_parts_is_a_miss(
    device: torch.device, tmp_path: Path, side: Side, role: Role
) -> None:
    """A prompt longer than top-k, in files; one part of one block is damaged: its tokens are computed again."""
    config = mix_config("fp8", "fp8", draft=True)
    sizes = {"max_rows": 2, "max_seq_len": 144, "num_blocks": 20, "prefill_chunk": 48}
    plain = DecodeRuntime(config, MixModel(config, device), device=device, **sizes)
    tiers = TierOptions(host_blocks=8, disk_folder=tmp_path, disk_bytes=1 << 24)
    runtime = DecodeRuntime(config, MixModel(config, device), device=device, tiers=tiers, **sizes)
    prompt = np.random.default_rng(2).integers(0, 97, 70)

    def decode(of: DecodeRuntime) -> tuple[int, list[int]]:
        sequence = of.open(prompt)
        if not sequence.is_ready:
            of.wait_ready(sequence)
        of.prefill([sequence])
        for _ in range(6):
            of.step([sequence])
        of.retire()
        return sequence.cached_tokens, sequence.tokens.tolist()

    expected = decode(plain)[1]
    sequence = runtime.open(prompt)
    runtime.prefill([sequence])
    runtime.retire()
    runtime.close(sequence)
    for tier in (0, 1):
        runtime.drain()
        slots = runtime.manager._cache.tiers[tier]
        slots.evict(slots.choose(slots.num_blocks))
    files = sorted(tmp_path.glob("*/*.block"))
    assert len(files) == 4
    keys = [(s, r) for s in config.sides for r in Role]
    part = UnitLayout.of(runtime.pools).parts[keys.index((side, role))]
    whole = sum(part.num_bytes for part in UnitLayout.of(runtime.pools).parts)
    for file in files[2:]:
        data = bytearray(file.read_bytes())
        data[len(data) - whole + part.offset + part.num_bytes // 2] ^= 4
        file.write_bytes(data)
    cached, tokens = decode(runtime)
    assert cached in (0, 16, 32), "a block without its part counts as known"
    assert tokens == expected
    runtime.check()


def test_case_I3_pools_are_what_was_asked_for_however_much_memory_is_free(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks whose devices have different free memory schedule alike: no size is read from the machine."""
    asked = CacheSize.of(probe_config()).pool_bytes(9)
    blocks = []
    for free in (1 << 40, 1 << 20):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 1 << 40))
        runtime, _, _ = probe_runtime(device, num_blocks=None, memory_bytes=asked)
        blocks.append((runtime.stats().blocks_total, runtime.manager.table.max_edits, runtime.stats().pool_bytes))
    assert blocks[0] == blocks[1]
    assert blocks[0][0] == 8


def test_a_suspended_row_costs_no_device_block() -> None:
    manager = ManagerV2(
        num_blocks=6, block_size=16, max_rows=2, max_blocks=4, tier_slots=(4,), mover=FakeMover(Bytes(16))
    )
    row = fill(manager, ids(0, 40), match=False)
    manager.suspend(row)
    manager._tiering._mover.end_all()
    manager.poll()
    manager.evict()
    assert manager.state(row) == RowState.SUSPENDED
    assert manager.stats().blocks_free == manager.stats().blocks_total
