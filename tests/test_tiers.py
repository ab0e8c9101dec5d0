"""Blocks between device, host and disk: case classes H, E3, I2 and D3 at the level of the mover, on both devices."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from tier_world import TierWorld, jobs, load, offload, onload, same, store, tier_config, within

from graphkv import ops
from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfMemory
from graphkv.layout import Role, Side
from graphkv.pool import Pools
from graphkv.tiers.host import DISK, HOST, HostTier, UnitLayout
from graphkv.tiers.mover import TierMover
from graphkv.transfer import DEVICE, CopyJob

GIB = 1 << 30


# what a tier takes ------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_unit_is_every_pool_of_a_block() -> None:
    pools = Pools(tier_config(), 3, Device.of("cpu"))
    unit = UnitLayout.of(pools)
    assert len(unit.parts) == 4  # latent and index K of target and draft
    assert sum(part.num_bytes for part in unit.parts) == sum(pool.block_bytes for pool in pools) == unit.num_bytes
    ends = [(part.offset, part.offset + part.num_bytes) for part in unit.parts]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


@pytest.mark.parametrize("sizes", [[2.08], [1.2] * 3])
def test_case_I2_host_memory_is_what_was_asked_for(device: torch.device, sizes: list[float]) -> None:
    """2.08 GiB and three times 1.2 GiB on a GPU; a hundredth of that where memory is plain."""
    scale = GIB if device.type == "cuda" else GIB // 100
    where = Device.of(device)
    unit = UnitLayout.of(Pools(tier_config(), 2, where))
    asked = [int(size * scale) for size in sizes]
    before, ledger = resident_bytes(), where.ledger.pinned_bytes
    tiers = [HostTier(size, unit, where) for size in asked]
    for tier in tiers:
        tier.data.fill_(1)
    grown = resident_bytes() - before
    assert [tier.asked_bytes for tier in tiers] == asked
    for tier in tiers:
        assert 0.99 * tier.asked_bytes <= tier.num_bytes <= tier.asked_bytes + 4095
        assert tier.num_slots * unit.num_bytes <= tier.num_bytes < tier.num_slots * unit.num_bytes + 4096
    assert where.ledger.pinned_bytes - ledger == sum(tier.num_bytes for tier in tiers)
    slack = 0.01 * sum(asked) + (4 << 20)
    assert abs(grown - sum(asked)) <= slack
    for tier in tiers:
        tier.close()


def test_host_tier_too_small_for_a_block_is_refused() -> None:
    device = Device.of("cpu")
    unit = UnitLayout.of(Pools(tier_config(), 2, device))
    with pytest.raises(InvalidValue, match=f"one takes {unit.num_bytes} bytes"):
        HostTier(unit.num_bytes - 1, unit, device)
    assert HostTier(unit.num_bytes, unit, device).num_slots == 1


def test_host_tier_that_the_system_does_not_give() -> None:
    device = Device.of("cpu")
    unit = UnitLayout.of(Pools(tier_config(), 2, device))
    with pytest.raises(OutOfMemory, match="cannot be mapped"):
        HostTier(1 << 62, unit, device)
    assert device.ledger.pinned_bytes == 0


@pytest.mark.gpu
def test_case_A5_a_host_tier_is_made_and_events_are_asked_while_a_stream_captures() -> None:
    """From another thread, as the runtime captures: the capture goes on, and the next one works."""
    world = TierWorld("cuda")
    ticket = world.mover.submit(offload((1, 0)))
    done: list[Any] = []

    def work() -> None:
        tier = HostTier(64 << 20, world.unit, world.device)
        done.append(world.mover.poll(ticket))
        tier.close()
        done.append(True)

    value = torch.zeros(4, device="cuda")
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        thread = threading.Thread(target=work)
        with torch.cuda.graph(graph, stream=world.streams["steps"], capture_error_mode="thread_local"):
            value.add_(1)
            if not done:
                thread.start()
                thread.join()
            with pytest.raises(InvalidValue, match="being captured"):
                world.mover.submit(offload((2, 1)))
            with pytest.raises(InvalidValue, match="being captured"):
                world.mover.copy(within((1, 2, 3)))
        graph.replay()
    torch.cuda.synchronize()
    assert done[-1] is True
    assert value.tolist() == [2.0] * 4
    world.finish()


# there and back -----------------------------------------------------------------------------------------------------


def test_case_H1_bytes_follow_the_slots_and_no_slot_leaves_its_tier(device: torch.device) -> None:
    """Blocks are swapped until the one that was 6 is in device slot 2; a slot holds what was last brought there."""
    world = TierWorld(device, num_blocks=8)
    six, two = world.get(6), world.get(2)
    mover = world.mover
    mover.wait(mover.submit(offload((6, 4), (2, 1))))
    mover.wait(mover.submit(onload((4, 2), (1, 5))))
    world.finish()
    assert same(world.get(2), six)
    assert same(world.get(5), two)
    for bad in (offload((8, 0)), offload((0, 0)), offload((1, 5)), onload((0, 8)), onload((5, 1)), onload((0, 0))):
        with pytest.raises(InvalidValue, match="is outside"):
            mover.submit(bad)
    assert mover.stats().moved == {(DEVICE, HOST): 2, (HOST, DEVICE): 2}


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "fp4"])
@pytest.mark.parametrize("latent", ["bf16", "fp8", "fp8_ds_mla"])
def test_every_format_comes_back_whole(device: torch.device, tmp_path: Path, fmt: str, latent: str) -> None:
    widths = {"kv_lora_rank": 128} if latent == "fp8_ds_mla" else {}
    config = tier_config(index_k=fmt, latent=latent, **widths)
    world = TierWorld(device, config=config, disk=tmp_path)
    mover, ids = world.mover, [1, 8, 3]
    wanted = [world.get(block) for block in ids]
    others = {block: world.get(block) for block in (2, 4, 5, 6, 7)}
    mover.wait(mover.submit(offload(*zip(ids, (4, 0, 2), strict=True))))
    for block in ids:
        world.put(block, world.random_block())
    world.device.synchronize()
    mover.wait(mover.submit(store((4, 0), (0, 1), (2, 2))))
    world.host.data.fill_(0xA5)
    assert mover.wait(mover.submit(load((0, 1), (1, 3), (2, 0)))) == (True, True, True)
    mover.wait(mover.submit(onload((1, 8), (3, 3), (0, 1))))
    world.finish()
    for block, data in zip((8, 3, 1), wanted, strict=True):
        assert same(world.get(block), data)
    assert all(same(world.get(block), data) for block, data in others.items())


def test_case_H4_a_block_is_one_unit(device: torch.device, tmp_path: Path) -> None:
    """Latent, index and draft bytes go and come together; with only the index K lost on disk the block is a miss."""
    world = TierWorld(device, disk=tmp_path)
    mover = world.mover
    before = world.get(3)
    mover.wait(mover.submit(offload((3, 0))))
    slot = world.get_slot(0)
    assert same(slot, before)
    assert [part.layout.role for part in world.unit.parts] == [Role.LATENT, Role.INDEX_K] * 2
    mover.wait(mover.submit(store((0, 2))))
    assert world.disk is not None
    path = Path(world.disk.folder) / "00000002.block"
    image = bytearray(path.read_bytes())
    index_k = world.unit.parts[1]
    start = len(image) - world.unit.num_bytes + index_k.offset
    for at in (start, start + index_k.num_bytes - 1):
        image[at] ^= 1
    path.write_bytes(image)
    assert mover.wait(mover.submit(load((2, 1)))) == (False,)
    assert "checksum" in mover.failures()[-1]
    assert mover.wait(mover.submit(onload((1, 4)))) == (False,), "bytes of a failed load were passed on"


def test_case_D3_fp4_values_and_scales_survive_tiers_and_a_partial_copy(device: torch.device) -> None:
    """Tokens 0, 1, 63 and elements 0, 1, 126, 127 in the first and the last block, read by the gather."""
    config = tier_config(index_k="fp4", block_size=64, draft_layers=())
    world = TierWorld(device, num_blocks=6, config=config)
    pages = world.pools.view(Side.TARGET, Role.INDEX_K, 2)
    scale, bs = world.pools.page_scale(Side.TARGET, Role.INDEX_K), 64
    k = np.random.default_rng(3).standard_normal((2 * bs, 128)).astype(np.float32)
    slots = np.concatenate([np.arange(bs) + 1 * scale * bs, np.arange(bs) + 5 * scale * bs])
    on = world.device.torch
    ops.store_index_k(torch.from_numpy(k).to(on), pages, torch.from_numpy(slots).to(on), "fp4", amax_floor=1e-4)
    values, scales = oracles.index_k_bytes(k, "fp4")

    def gathered(first: int, last: int) -> tuple[Any, Any]:
        table = torch.tensor([[first * scale, last * scale]], dtype=torch.int32, device=on)
        start = torch.tensor([0, 2 * bs], dtype=torch.int32, device=on)
        out = [torch.full((2 * bs, n), 0xA5, dtype=torch.uint8, device=on) for n in (64, 4)]
        ops.gather_index_k(pages, table, start, *out, "fp4")
        return out[0].cpu().numpy(), out[1].cpu().numpy()

    mover = world.mover
    world.device.synchronize()
    mover.wait(mover.submit(offload((1, 3), (5, 0))))
    mover.wait(mover.submit(onload((3, 2), (0, 4))))
    for got, wanted in zip(gathered(2, 4), (values, scales), strict=True):
        np.testing.assert_array_equal(got, wanted)
    decoded = oracles.decode_index_k(*gathered(2, 4), "fp4")
    for token in (0, 1, 63, bs, bs + 1, bs + 63):
        for element in (0, 1, 126, 127):
            assert abs(decoded[token, element] - k[token, element]) <= np.abs(k[token]).max() / 4
    for block in (1, 5):
        world.put(block, world.random_block())
    noise = world.pools.pool(Side.TARGET, Role.INDEX_K).block(5).cpu().numpy().copy()
    world.device.synchronize()
    world.mover.copy(jobs(DEVICE, DEVICE, (2, 1), tokens=bs) + jobs(DEVICE, DEVICE, (4, 5), tokens=2))
    world.finish()
    got_values, got_scales = gathered(1, 5)
    np.testing.assert_array_equal(got_values[: bs + 2], values[: bs + 2])
    np.testing.assert_array_equal(got_scales[: bs + 2], scales[: bs + 2])
    page = noise[config.layer_offset(Side.TARGET, Role.INDEX_K, 2)]
    np.testing.assert_array_equal(got_values[bs + 2 :], page[: bs * 64].reshape(bs, 64)[2:])
    np.testing.assert_array_equal(got_scales[bs + 2 :], page[bs * 64 :].reshape(bs, 4)[2:])


# what is refused ------------------------------------------------------------------------------------------------------


def test_refused_transfers_change_nothing(tmp_path: Path) -> None:
    world = TierWorld(disk=tmp_path)
    before = [world.get(block) for block in range(1, 9)], world.mover.stats()
    for bad, message in (
        ([], "at least one job"),
        (offload((1, 0), (2, 0)), "a target slot repeats"),
        (offload((1, 0)) + onload((1, 2)), "all jobs of a call go from one tier to one other"),
        (jobs(DEVICE, DISK, (1, 0)), "cannot go from tier 0 to tier 2"),
        (jobs(DEVICE, DEVICE, (1, 2)), "cannot go from tier 0 to tier 0"),
        (store((5, 0)), "source slot 5 is outside 0..4"),
        (load((4, 0)), "source slot 4 is outside 0..3"),
    ):
        with pytest.raises(InvalidValue, match=message):
            world.mover.submit(bad)
    for bad, message in (
        (within((1, 2, 17)), "tokens must be in 0..16"),
        (within((1, 9, 3)), "target slot 9 is outside 1..8"),
        (within((0, 1, 3)), "source slot 0 is outside 1..8"),
        (offload((1, 0)), "all jobs of a call"),
    ):
        with pytest.raises(InvalidValue, match=message):
            world.mover.copy(bad)
    assert world.mover.stats() == before[1]
    assert all(same(world.get(block), data) for block, data in enumerate(before[0], 1))


def test_tiers_must_fit_the_pools(tmp_path: Path) -> None:
    world, other = TierWorld(disk=tmp_path), TierWorld(config=tier_config(block_size=32))
    with pytest.raises(InvalidValue, match="the host tier was built for blocks of"):
        TierMover(world.pools, world.device, host=other.host)
    with pytest.raises(InvalidValue, match="a disk tier needs a host tier"):
        TierMover(world.pools, world.device, disk=world.disk)
    with pytest.raises(InvalidValue, match="blocks cannot go from tier 0 to tier 1; here they go between \\[\\]"):
        TierMover(world.pools, world.device).submit(offload((1, 0)))


def test_case_E3_moving_has_no_part_in_who_owns_a_slot() -> None:
    """A mover keeps no list of free slots: what it is told to move it moves, and counts each block once."""
    world = TierWorld(num_blocks=5, host_slots=4)
    rng = np.random.default_rng(1)
    for moved in range(1, 21):
        block, slot = int(rng.integers(1, 5)), int(rng.integers(0, 4))
        assert world.mover.wait(world.mover.submit(offload((block, slot)))) == (True,)
        assert world.mover.stats().moved == {(DEVICE, HOST): moved}
        assert same(world.get_slot(slot), world.get(block))


def test_jobs_are_the_managers_type() -> None:
    assert offload((1, 0)) == [CopyJob(DEVICE, 1, HOST, 0, 16)]
