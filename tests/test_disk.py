"""The disk tier under faults: full, torn, missing, slow, no permission. A fault is a miss, never a wrong byte."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run_python
from tier_world import TierWorld, load, offload, onload, same, store, tier_config

from graphkv.device import Device
from graphkv.errors import InvalidValue, TransferTimeout
from graphkv.pool import Pools
from graphkv.tiers.disk import DiskTier, FileOps
from graphkv.tiers.host import UnitLayout

UNIT = UnitLayout.of(Pools(tier_config(), 2, Device.of("cpu")))


def payload(seed: int) -> memoryview:
    return memoryview(np.random.default_rng(seed).integers(0, 256, UNIT.num_bytes, np.uint8)).cast("B")


def nothing() -> memoryview:
    return memoryview(bytearray(UNIT.num_bytes))


def tier(folder: Path, slots: int = 3, files: FileOps | None = None) -> DiskTier:
    return DiskTier(folder, slots * (UNIT.num_bytes // 4096 + 1) * 4096, UNIT, files)


def path_of(disk: DiskTier, slot: int) -> Path:
    return Path(disk.folder) / f"{slot:08d}.block"


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    assert disk.num_slots == 3
    for seed, slot in enumerate((0, 2, 0, 1)):
        assert disk.store(slot, payload(seed)) == ""
    for slot, seed in ((0, 2), (1, 3), (2, 1)):
        into = nothing()
        assert disk.load(slot, into) == ""
        assert into == payload(seed)
    assert (disk.failed_stores, disk.misses) == (0, 0)


def test_an_empty_or_dropped_slot_is_a_miss(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    assert "holds no block" in disk.load(1, nothing())
    disk.store(1, payload(0))
    disk.drop(1)
    assert "holds no block" in disk.load(1, nothing())
    assert not path_of(disk, 1).exists()
    assert disk.misses == 2


def cut(image: bytearray) -> bytearray:
    return image[:-1]


def longer(image: bytearray) -> bytearray:
    return image + b"\0"


def emptied(image: bytearray) -> bytearray:
    return bytearray()


def zero_tail(image: bytearray) -> bytearray:
    """What a crash may leave of a file whose size was set before its bytes."""
    image[-4096:] = bytes(4096)
    return image


def flipped(at: int) -> Callable[[bytearray], bytearray]:
    def change(image: bytearray) -> bytearray:
        image[at] ^= 0x10
        return image

    return change


@pytest.mark.parametrize(
    "change", [cut, longer, emptied, zero_tail, *(flipped(at) for at in (0, 9, 26, 34, 41, 50, 79, 80, 500, -1))]
)
def test_a_file_that_is_not_as_written_is_a_miss(tmp_path: Path, change: Callable[[bytearray], bytearray]) -> None:
    disk = tier(tmp_path)
    disk.store(0, payload(0))
    path = path_of(disk, 0)
    path.write_bytes(change(bytearray(path.read_bytes())))
    assert disk.load(0, nothing()) != ""
    assert "holds no block" in disk.load(0, nothing()), "a file that was wrong once is not tried again"
    assert disk.store(0, payload(1)) == ""
    into = nothing()
    assert disk.load(0, into) == ""
    assert into == payload(1)


def test_a_file_of_another_slot_or_time_or_tier_is_a_miss(tmp_path: Path) -> None:
    disk, other = tier(tmp_path), tier(tmp_path)
    assert disk.folder != other.folder
    for one in (disk, other):
        for slot in (0, 1):
            one.store(slot, payload(slot))
    old = path_of(disk, 0).read_bytes()
    path_of(disk, 1).write_bytes(old)
    assert "not the file" in disk.load(1, nothing())
    disk.store(0, payload(5))
    path_of(disk, 0).write_bytes(old)
    assert "not the file" in disk.load(0, nothing())
    disk.store(0, payload(6))
    path_of(disk, 0).write_bytes(path_of(other, 0).read_bytes())
    assert "not the file" in disk.load(0, nothing())


def test_a_missing_file_is_a_miss(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    disk.store(0, payload(0))
    path_of(disk, 0).unlink()
    assert "cannot be read" in disk.load(0, nothing())


class Faulty(FileOps):
    """Fails as told: `fault(operation, path)` may raise, wait, or do nothing."""

    def __init__(self, fault: Callable[[str, str], None]) -> None:
        self.fault = fault

    def write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
        self.fault("write", path)
        super().write(path, parts)

    def replace(self, source: str, target: str) -> None:
        self.fault("replace", target)
        super().replace(source, target)

    def read(self, path: str, parts: Sequence[bytearray | memoryview]) -> int:
        self.fault("read", path)
        return super().read(path, parts)

    def remove(self, path: str) -> None:
        self.fault("remove", path)
        super().remove(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("operation", ["write", "replace", "remove"])
def test_a_store_that_fails_leaves_an_empty_slot(tmp_path: Path, operation: str, code: int) -> None:
    broken = False

    def fault(what: str, path: str) -> None:
        if broken and what == operation and not (what == "remove" and path.endswith(".part")):
            raise OSError(code, os.strerror(code))

    disk = tier(tmp_path, files=Faulty(fault))
    assert disk.store(0, payload(0)) == ""
    broken = True
    assert os.strerror(code) in disk.store(0, payload(1))
    assert "holds no block" in disk.load(0, nothing()), "neither the old block nor a part of the new one is served"
    broken = False
    assert disk.store(0, payload(2)) == ""
    into = nothing()
    assert disk.load(0, into) == ""
    assert into == payload(2)
    assert disk.failed_stores == 1


def test_a_disk_that_takes_only_a_part(tmp_path: Path) -> None:
    """A write that ends early leaves no file behind, not even the temporary one."""

    class Full(FileOps):
        def write(self, path: str, parts: Sequence[bytes | memoryview]) -> None:
            super().write(path, [memoryview(parts[-1])[:1000]])
            raise OSError(errno.ENOSPC, "No space left on device")

    disk = tier(tmp_path, files=Full())
    assert "No space left" in disk.store(1, payload(0))
    assert os.listdir(disk.folder) == []


def test_space_is_bounded(tmp_path: Path) -> None:
    disk = tier(tmp_path, slots=2)
    most = 0

    def fault(what: str, path: str) -> None:
        nonlocal most
        if what == "replace":
            most = max(most, used())

    def used() -> int:
        return sum(file.stat().st_blocks * 512 for file in Path(disk.folder).iterdir())

    disk._files = Faulty(fault)
    for number in range(10):
        disk.store(number % 2, payload(number))
        assert used() <= disk.num_bytes
    assert most <= disk.num_bytes == 2 * disk.file_bytes


@pytest.mark.parametrize("size", [0, UNIT.num_bytes])
def test_a_size_that_holds_no_block_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(InvalidValue, match="holds no block: one takes"):
        DiskTier(tmp_path, size, UNIT)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="cannot be used"):
        tier(tmp_path / "file")


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\nsys.path.insert(0, 'tests')\nimport test_disk\n"
        f"disk = test_disk.tier(pathlib.Path({str(tmp_path)!r}))\n"
        "assert disk.store(0, test_disk.payload(0)) == ''\nos._exit(0)"
    )
    alive = tier(tmp_path)
    alive.store(1, payload(3))
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 4  # a folder and a lock each
    disk = tier(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    into = nothing()
    assert alive.load(1, into) == ""
    assert into == payload(3)
    for one in (alive, disk):
        one.close()
        one.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_that_ends_leaves_its_parents_files(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\nsys.path.insert(0, 'tests')\nimport test_disk\n"
        f"disk = test_disk.tier(pathlib.Path({str(tmp_path)!r}))\n"
        "disk.store(0, test_disk.payload(0))\nchild = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\nprint(disk.load(0, test_disk.nothing()) == '')"
    )
    done = run_python(code)
    assert done.stdout == "True\n", done.stderr


# through the mover ----------------------------------------------------------------------------------------------------


def test_a_failed_job_fails_alone_and_what_is_read_from_it_fails_too(device: torch.device, tmp_path: Path) -> None:
    """Three blocks on disk, the middle one torn: a chain disk to host to device to host to disk carries two."""
    world = TierWorld(device, disk=tmp_path)
    mover = world.mover
    wanted = [world.get(block) for block in (1, 2, 3)]
    mover.wait(mover.submit(offload((1, 0), (2, 1), (3, 2))))
    assert mover.wait(mover.submit(store((0, 0), (1, 1), (2, 2)))) == (True,) * 3
    assert world.disk is not None
    os.truncate(path_of(world.disk, 1), 100)
    chain = [load((0, 3), (1, 4), (2, 0)), store((3, 3), (4, 0), (0, 1)), onload((3, 6), (4, 7), (0, 8))]
    tickets = [mover.submit(one) for one in chain]
    world.finish()
    assert [mover.poll(ticket) for ticket in tickets] == [(True, False, True)] * 3
    assert same(world.get(6), wanted[0])
    assert same(world.get(8), wanted[2])
    assert mover.wait(mover.submit(load((0, 2)))) == (False,), "a slot that nothing could be stored in was served"
    assert mover.stats().failed == {(2, 1): 2, (1, 2): 1, (1, 0): 1, (0, 1): 0}
    assert any("torn" in reason for reason in mover.failures())
    mover.wait(mover.submit(offload((5, 4))))  # the slot gets bytes again
    assert mover.wait(mover.submit(store((4, 0)))) == (True,)


def test_a_full_disk_loses_nothing(device: torch.device, tmp_path: Path) -> None:
    """What was stored stays, what could not be stored is still in host memory."""
    room = 2

    def fault(what: str, path: str) -> None:
        if what == "write" and len(os.listdir(os.path.dirname(path))) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")

    world = TierWorld(device, disk=tmp_path, files=Faulty(fault), file_workers=1)
    mover = world.mover
    wanted = [world.get(block) for block in (1, 2, 3)]
    mover.wait(mover.submit(offload((1, 0), (2, 1), (3, 2))))
    assert mover.wait(mover.submit(store((0, 0), (1, 1), (2, 2)))) == (True, True, False)
    assert same(world.get_slot(2), wanted[2])
    assert mover.wait(mover.submit(load((0, 3), (1, 4)))) == (True, True)
    assert same(world.get_slot(3), wanted[0])
    assert same(world.get_slot(4), wanted[1])


def test_a_slow_disk_is_waited_for_by_nobody(device: torch.device, tmp_path: Path) -> None:
    """Submitting returns, other blocks move, what is behind the file waits its turn, and its age is reported."""
    gate = threading.Event()

    def fault(what: str, path: str) -> None:
        if what in ("write", "read"):
            gate.wait(30)

    world = TierWorld(device, disk=tmp_path, files=Faulty(fault), limit_s=0.05)
    mover = world.mover
    one, two, three = (world.get(block) for block in (1, 2, 3))
    mover.wait(mover.submit(offload((1, 0))), 20)
    stored = mover.submit(store((0, 0)))
    behind = mover.submit(offload((2, 0)))  # must not overwrite what is being written out
    apart = mover.submit(offload((3, 1)))
    assert mover.wait(apart, 20) == (True,)
    assert same(world.get_slot(1), three)
    assert mover.poll(stored) is None
    assert mover.poll(behind) is None
    assert same(world.get_slot(0), one)
    with pytest.raises(TransferTimeout, match="has not ended"):
        mover.wait(behind)
    assert [error.ticket for error in mover.overdue()] == [stored, behind]
    with pytest.raises(InvalidValue, match="is not queued yet, since it waits for a file"):
        mover.order_steps([2])
    mover.order_steps([1, 3])
    gate.set()
    assert mover.wait(behind, 20) == (True,)
    assert mover.wait(stored, 20) == (True,)
    assert same(world.get_slot(0), two)
    assert mover.wait(mover.submit(load((0, 4))), 20) == (True,)
    assert same(world.get_slot(4), one)
    mover.close()


def test_a_file_operation_that_breaks_is_a_failure_like_any_other(tmp_path: Path) -> None:
    def fault(what: str, path: str) -> None:
        raise RuntimeError("a fault of the fault")

    world = TierWorld(disk=tmp_path, files=Faulty(fault))
    mover = world.mover
    mover.wait(mover.submit(offload((1, 0))))
    assert mover.wait(mover.submit(store((0, 0)))) == (False,)
    assert mover.failures() == ["RuntimeError: a fault of the fault"]
    assert mover.wait(mover.submit(load((0, 1)))) == (False,)


def test_files_of_many_blocks_at_once(tmp_path: Path) -> None:
    world = TierWorld(num_blocks=40, host_slots=39, disk=tmp_path, disk_slots=39, file_workers=4)
    mover = world.mover
    wanted: list[Any] = [world.get(block) for block in range(1, 40)]
    mover.wait(mover.submit(offload(*((block, block - 1) for block in range(1, 40)))))
    assert all(mover.wait(mover.submit(store(*((slot, 38 - slot) for slot in range(39))))))
    world.host.data.zero_()
    assert all(mover.wait(mover.submit(load(*((38 - slot, slot) for slot in range(39))))))
    assert all(same(world.get_slot(slot), data) for slot, data in enumerate(wanted))
