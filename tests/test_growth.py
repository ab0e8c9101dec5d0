"""Pools that grow and shrink at fixed addresses (case A3), on both devices."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver
from tier_world import TierWorld, offload, onload, same, tier_config

from graphkv import growth
from graphkv.device import Device, Ledger
from graphkv.errors import InvalidValue, OutOfMemory
from graphkv.growth import ReservedMemory
from graphkv.layout import Role, Side
from graphkv.pool import NULL_BLOCK, NULL_PATTERN, Pools
from graphkv.sizing import CacheSize

MIB = 1 << 20
SUCCESS = driver.CUresult.CUDA_SUCCESS
IDLE = lambda first: 0  # noqa: E731


def free_bytes(device: Device) -> int:
    """Memory that others can have: of the device, or of this process's share of the host."""
    if device.is_cuda:
        gc.collect()
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])
    return -4096 * int(Path("/proc/self/statm").read_text().split()[1])


def addresses(pools: Pools) -> list[int]:
    views = [pools.view(side, role, 0).data_ptr() for side in pools.config.sides for role in Role]
    return [*views, *(pool.data.data_ptr() for pool in pools)]


def test_memory_follows_the_size_and_the_address_stays(device: torch.device) -> None:
    where = Device.of(device)
    torch.zeros(MIB, dtype=torch.uint8, device=device).fill_(1).eq(1).all().item()  # what torch loads, it loads now
    before = free_bytes(where)
    memory = ReservedMemory(512 * MIB, 10 * MIB, where)
    address = memory.data.data_ptr()
    assert memory.data.shape == (512 * MIB,)
    assert memory.data.device == where.torch
    sizes = (10, 200, 64, 65, 300, 1)
    for size in sizes:
        memory.resize(size * MIB)
        memory.data[: size * MIB].fill_(size % 251)
        assert memory.mapped_bytes == -(-size * MIB // memory.chunk_bytes) * memory.chunk_bytes
        assert where.ledger.device_bytes == memory.mapped_bytes
        assert abs((before - free_bytes(where)) - memory.mapped_bytes) <= 32 * MIB
        assert memory.data.data_ptr() == address
    assert memory.data[:MIB].eq(1).all()
    del memory
    assert before - free_bytes(where) <= 32 * MIB


def test_what_stays_keeps_its_bytes(device: torch.device) -> None:
    memory = ReservedMemory(64 * MIB, 8 * MIB, Device.of(device))
    kept = torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, device=memory.data.device)
    memory.data[: 8 * MIB].copy_(kept)
    for size in (20, 40, 8):
        memory.resize(size * MIB)
        assert torch.equal(memory.data[: 8 * MIB], kept)


def test_a_view_keeps_the_memory(device: torch.device) -> None:
    view = ReservedMemory(64 * MIB, 8 * MIB, Device.of(device)).data[5:1000]
    gc.collect()
    assert view.fill_(3).sum().item() == 3 * 995


@pytest.mark.parametrize("size", [0, -1, 65 * MIB])
def test_sizes_outside_the_reserve_are_refused(device: torch.device, size: int) -> None:
    memory = ReservedMemory(64 * MIB, 8 * MIB, Device.of(device))
    with pytest.raises(InvalidValue, match=rf"must be in 1..{64 * MIB} \(the bytes reserved\), got {size}"):
        memory.resize(size)
    assert memory.mapped_bytes == 8 * MIB
    with pytest.raises(InvalidValue, match="the bytes reserved"):
        ReservedMemory(64 * MIB, size, Device.of(device))


def test_addresses_that_do_not_exist(device: torch.device) -> None:
    with pytest.raises(OutOfMemory, match="cannot be reserved"):
        ReservedMemory(1 << 61, MIB, Device.of(device))


@pytest.mark.gpu
def test_a_device_without_room_gives_back_what_it_gave() -> None:
    where = Device.of("cuda")
    total = torch.cuda.mem_get_info()[1]
    memory = ReservedMemory(2 * total, 8 * MIB, where)
    before, mapped = free_bytes(where), memory.mapped_bytes
    with pytest.raises(OutOfMemory, match="the device has no room"):
        memory.resize(total + (1 << 30))
    assert memory.mapped_bytes == mapped == where.ledger.device_bytes
    assert free_bytes(where) == before
    memory.resize(100 * MIB)
    memory.data[: 100 * MIB].fill_(7)


# pools ----------------------------------------------------------------------------------------------------------------


def test_case_A3_pools_grow_and_shrink_where_they_are(device: torch.device) -> None:
    where = Device.of(device)
    pools = Pools(tier_config(), 4, where, 50_000)
    before = addresses(pools)
    views = [pools.view(Side.TARGET, role, 2) for role in Role]
    data = [
        np.random.default_rng(n).integers(0, 256, tuple(pool.block(3).shape), np.uint8) for n, pool in enumerate(pools)
    ]
    for pool, part in zip(pools, data, strict=True):
        pool.block(3).copy_(torch.from_numpy(part))
    for size in (40_000, 50_000, 4, 1000):
        pools.resize(size, IDLE)
        assert pools.num_blocks == size
        assert addresses(pools) == before
        assert all(pools.view(Side.TARGET, role, 2) is view for role, view in zip(Role, views, strict=True))
        assert all(pool.num_blocks == size and pool.num_bytes >= size * pool.block_bytes for pool in pools)
        assert pools.num_bytes == sum(pool.num_bytes for pool in pools) == where.ledger.device_bytes
        for pool, part in zip(pools, data, strict=True):
            pool.block(size - 1).fill_(1)
            assert (pool.block(NULL_BLOCK) == NULL_PATTERN).all()
            np.testing.assert_array_equal(pool.block(3).cpu().numpy(), part if size > 4 else np.ones_like(part))
            pool.block(3).copy_(torch.from_numpy(part))


def test_a_shrink_over_blocks_in_use_is_refused(device: torch.device) -> None:
    pools = Pools(tier_config(), 100, Device.of(device), 200)
    used = np.zeros(100, bool)
    used[[1, 60, 99]] = True
    for size, count in ((99, 1), (60, 2), (2, 2)):
        with pytest.raises(InvalidValue, match=f"{count} blocks with ids from {size} to 99 are in use"):
            pools.resize(size, lambda first: int(used[first:].sum()))
    assert pools.num_blocks == 100
    used[99] = False
    pools.resize(61, lambda first: int(used[first:].sum()))
    assert [pool.num_blocks for pool in pools] == [61] * 4


def test_sizes_that_no_pool_can_have() -> None:
    device = Device.of("cpu")
    pools = Pools(tier_config(), 4, device, 10)
    for size, message in ((1, "needs 2 blocks"), (11, "exceeds the 10 blocks reserved"), (0, "needs 2 blocks")):
        with pytest.raises(InvalidValue, match=message):
            pools.resize(size, IDLE)
    assert pools.num_blocks == 4
    with pytest.raises(InvalidValue, match="num_blocks=4 exceeds the 3 blocks reserved"):
        Pools(tier_config(), 4, device, 3)
    with pytest.raises(InvalidValue, match="use at most"):
        Pools(tier_config(), 4, device, 2**31)
    fixed = Pools(tier_config(), 4, device)
    assert fixed.reserved_blocks == 4
    with pytest.raises(InvalidValue, match="build it with max_blocks_reserved"):
        fixed.resize(3, IDLE)


def test_growth_of_all_pools_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of four pools finds no room."""
    device = Device.of("cpu")
    pools = Pools(tier_config(), 4, device, 100)
    calls = []

    def refuse(self: object, first: int, end: int) -> None:
        calls.append(end)
        if len(calls) == 3:
            raise OutOfMemory("no room")

    before = pools.num_bytes
    monkeypatch.setattr(growth._HostRange, "map", refuse)
    with pytest.raises(OutOfMemory):
        pools.resize(100, IDLE)
    assert len(calls) == 3
    assert [pool.num_blocks for pool in pools] == [4] * 4
    assert pools.num_blocks == 4
    assert pools.num_bytes == before == device.ledger.device_bytes


def test_fixed_pools_take_what_the_estimate_says() -> None:
    device = Device.of("cpu")
    config = tier_config()
    pools = Pools(config, 7, device)
    assert pools.num_bytes == CacheSize.of(config).pool_bytes(7) == device.ledger.device_bytes


def test_new_blocks_move_between_tiers(device: torch.device) -> None:
    world = TierWorld(device, num_blocks=4, reserved=5000)
    with pytest.raises(InvalidValue, match=r"source slot 4999 is outside 1..3"):
        world.mover.submit(offload((4999, 0)))
    world.pools.resize(5000, IDLE)
    data = world.random_block()
    world.put(4999, data)
    world.device.synchronize()
    world.mover.wait(world.mover.submit(offload((4999, 0))))
    world.mover.wait(world.mover.submit(onload((0, 2))))
    world.finish()
    assert same(world.get(2), data)


@pytest.mark.gpu
def test_case_A3_a_captured_graph_reads_and_writes_blocks_that_came_after_it() -> None:
    """Capture with 4 blocks; grow; replay over the last new block, and again after a shrink and another growth."""
    pools = Pools(tier_config(), 4, Device.of("cuda"), 30_000)
    view = pools.view(Side.TARGET, Role.LATENT, 1)
    scale = pools.page_scale(Side.TARGET, Role.LATENT)
    page = torch.tensor([2 * scale], device="cuda")
    out = torch.zeros((1, *view.shape[1:]), dtype=torch.uint8, device="cuda")

    def step() -> None:
        out.copy_(view.index_select(0, page))
        view.index_copy_(0, page, out + 1)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for size in (30_000, 4, 20_000):
        pools.resize(size, IDLE)
        page.fill_((size - 1) * scale)
        view[(size - 1) * scale].fill_(size % 251)
        noise = [torch.full((MIB,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(8)]
        for replay in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert (out == size % 251 + replay).all()
        assert (view[(size - 1) * scale] == size % 251 + 3).all()
        assert all((one == 0xFF).all() for one in noise)
        assert (pools.pool(Side.TARGET, Role.LATENT).block(NULL_BLOCK) == NULL_PATTERN).all()


# the driver's part, without a device ----------------------------------------------------------------------------------


class Vmm:
    """The driver's virtual memory calls, with room for some chunks; everything else is the real module's."""

    GRANULARITY = 2 * MIB

    def __init__(self, room: int) -> None:
        self.room, self.reserved = room, {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.readable: set[int] = set()
        self.refuse_access_at: int | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(driver, name)

    def cuMemGetAllocationGranularity(self, properties: Any, which: Any) -> tuple[Any, ...]:
        assert properties.location.id == 0
        return SUCCESS, self.GRANULARITY

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> tuple[Any, ...]:
        assert size % self.GRANULARITY == 0
        self.reserved[1 << 40] = size
        return SUCCESS, 1 << 40

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert not self.mapped
        assert self.reserved.pop(address) == size
        return (SUCCESS,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if len(self.mapped) + len(self.handles) == self.room:
            return driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        handle = 77 + len(self.mapped)
        self.handles[handle] = size
        return SUCCESS, handle

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        (base, reserved), *_ = self.reserved.items()
        assert base <= address
        assert address + size <= base + reserved
        assert address not in self.mapped
        assert self.handles[handle] == size
        self.mapped[address] = size
        return (SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        del self.handles[handle]
        return (SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[Any, ...]:
        assert self.mapped[address] == size
        assert count == len(access) == 1
        assert access[0].flags == driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if len(self.readable) == self.refuse_access_at:
            return (driver.CUresult.CUDA_ERROR_INVALID_DEVICE,)
        self.readable.add(address)
        return (SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert self.mapped.pop(address) == size
        self.readable.discard(address)
        return (SUCCESS,)


class FakeDevice:
    """As much of a device as memory looks at."""

    is_cuda = True
    torch = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.context = self.guard = contextlib.nullcontext


@pytest.fixture
def vmm(monkeypatch: pytest.MonkeyPatch) -> Vmm:
    fake = Vmm(room=10)
    monkeypatch.setattr(growth, "cuda_driver", lambda: fake)
    monkeypatch.setattr(growth._CudaRange, "tensor", lambda self: self)
    return fake


def fake_memory(chunks: int) -> ReservedMemory:
    return ReservedMemory(100 * MIB, chunks * 2 * MIB, FakeDevice())  # type: ignore[arg-type]


def test_chunks_are_mapped_once_and_given_back(vmm: Vmm) -> None:
    memory = fake_memory(3)
    for chunks in (3, 7, 2, 10, 1):
        memory.resize(chunks * 2 * MIB - 5)
        assert sorted(vmm.mapped) == sorted(vmm.readable) == [(1 << 40) + n * 2 * MIB for n in range(chunks)]
        assert memory.mapped_bytes == chunks * 2 * MIB == memory._device.ledger.device_bytes
        assert vmm.handles == {}
    del memory
    gc.collect()
    assert (vmm.mapped, vmm.reserved) == ({}, {})


@pytest.mark.parametrize("refusal", ["memory", "access"])
def test_a_growth_that_fails_half_way_leaves_things_as_they_were(vmm: Vmm, refusal: str) -> None:
    memory = fake_memory(4)
    before = dict(vmm.mapped)
    vmm.refuse_access_at = 8 if refusal == "access" else None
    with pytest.raises(OutOfMemory, match=r"no room for 20 chunks of 2097152 bytes \(it gave (6|4), now given back\)"):
        memory.resize(48 * MIB)
    assert vmm.mapped == before
    assert vmm.readable == set(before)
    assert vmm.handles == {}
    assert memory.mapped_bytes == 8 * MIB == memory._device.ledger.device_bytes
    memory.resize(12 * MIB)
    assert len(vmm.mapped) == 6


@pytest.mark.parametrize(("gib", "mib"), [(0.5, 2), (1, 2), (2, 4), (7, 8), (16, 32), (140, 32)])
def test_chunks_grow_with_the_reserve(vmm: Vmm, gib: float, mib: int) -> None:
    memory = ReservedMemory(int(gib * (1 << 30)), MIB, FakeDevice())  # type: ignore[arg-type]
    assert memory.chunk_bytes == memory.mapped_bytes == mib * MIB
