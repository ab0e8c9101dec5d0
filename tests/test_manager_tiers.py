"""Blocks that move between tiers: refusals, aborts, transfers that fail or never end. Cases H1 and H5 at this level."""

from __future__ import annotations

from typing import Any

import pytest
from manager_model import Bytes, FakeMover
from test_manager_content import blocks, close, fill, ids, rows

from graphkv.errors import InvalidValue, OutOfBlocks, TransferTimeout
from graphkv.manager.v2 import ManagerV2, RowState
from graphkv.transfer import CopyJob


def make(tiers: tuple[int, ...] = (8,), **changes: Any) -> tuple[ManagerV2, FakeMover]:
    mover = FakeMover(Bytes(16))
    options = {"num_blocks": 6, "block_size": 16, "max_rows": 4, "max_blocks": 4, "max_edits": 50} | changes
    return ManagerV2(**options, tier_slots=tiers, mover=mover), mover


def test_suspend_and_resume_bring_a_row_back_into_other_blocks() -> None:
    manager, mover = make()
    row = fill(manager, ids(0, 40))
    before = blocks(manager, row)
    manager.suspend(row)
    assert manager.state(row) == RowState.SUSPENDING
    assert mover.running == {1: [CopyJob(0, block, 1, slot, 16) for block, slot in zip(before, (2, 1, 0), strict=True)]}
    with pytest.raises(InvalidValue, match="row 0 is suspended or being brought in"):
        manager.extend(rows(row), 1)
    mover.end_all()
    assert manager.stats().blocks_held == 3, "nobody looked"
    manager.poll()
    assert manager.state(row) == RowState.SUSPENDED
    assert manager.stats().blocks_held == 0
    assert manager.length[row] == 40
    other = fill(manager, ids(500, 532))
    manager.evict()
    manager.resume(row)
    assert manager.state(row) == RowState.LOADING
    mover.end_all()
    manager.poll()
    assert manager.state(row) == RowState.READY
    assert not set(blocks(manager, row)) & set(blocks(manager, other))
    assert max(blocks(manager, row)) < 6, "case H1: ids of the device, whatever the host slots are"
    assert manager.blocks_held[row] == 3
    manager.check()


def test_what_cannot_complete_is_refused_before_anything_changed() -> None:
    manager, mover = make(tiers=(2,), resume_limit=0.7)
    row = fill(manager, ids(0, 40))
    with pytest.raises(OutOfBlocks, match="3 more blocks needed in tier 1, 2 free") as caught:
        manager.suspend(row)
    assert (caught.value.tier, caught.value.needed) == (1, 3)
    assert (manager.state(row), mover.running) == (RowState.READY, {})
    with pytest.raises(InvalidValue, match="row 0 is ready; only a suspended row"):
        manager.resume(row)
    small = fill(manager, ids(300, 332))
    manager.suspend(small)
    mover.end_all()
    manager.poll()
    manager.extend(rows(row), 9)
    with pytest.raises(OutOfBlocks, match="2 more blocks needed, 0 free"):
        manager.resume(small)  # 4 of 5 blocks are in use, 3 may be
    assert manager.state(small) == RowState.SUSPENDED
    manager.submitted = 1
    with pytest.raises(InvalidValue, match="row 0 may be in step 1"):
        manager.suspend(row)
    manager.check()


def test_a_failed_copy_leaves_the_row_ready_and_a_failed_return_leaves_it_suspended() -> None:
    manager, mover = make()
    row = fill(manager, ids(0, 40))
    manager.suspend(row)
    mover.end(1, failed=[1])
    manager.poll()
    assert manager.state(row) == RowState.READY
    assert manager.stats().blocks_failed == 1
    manager.suspend(row)
    assert len(mover.running[2]) == 2, "one block's copy is still there"
    mover.end_all()
    manager.poll()
    manager.evict()
    manager.resume(row)
    mover.end(3, failed=[2])
    manager.poll()
    assert manager.state(row) == RowState.SUSPENDED
    manager.resume(row)
    mover.end_all()
    manager.poll()
    assert manager.state(row) == RowState.READY
    manager.check()


def test_case_H5_blocks_of_an_aborted_load_come_back_when_its_transfer_ends_and_not_before() -> None:
    manager, mover = make(num_blocks=5)
    a = fill(manager, ids(0, 64))
    manager.suspend(a)
    mover.end_all()
    manager.poll()
    close(manager, a)
    manager.evict()
    b = manager.open(tokens=ids(0, 64))
    assert manager.state(b) == RowState.LOADING
    targets = {job.target for jobs in mover.running.values() for job in jobs}
    close(manager, b)  # aborted
    c = manager.open()
    taken = manager.extend(rows(c), 16)
    assert taken == 1
    assert not set(blocks(manager, c)) & targets
    with pytest.raises(OutOfBlocks):
        manager.extend(rows(c), 64)
    manager.check()
    mover.end_all()
    manager.poll()
    assert manager.extend(rows(c), 64) == 3
    assert set(blocks(manager, c)) >= targets
    manager.check()


def test_case_H5_a_transfer_that_never_ends_is_reported_and_costs_its_own_blocks_only() -> None:
    now = [0.0]
    manager, mover = make(clock=lambda: now[0], transfer_limit_s=5.0)
    row = fill(manager, ids(0, 40))
    manager.suspend(row)
    close(manager, row)
    now[0] = 4.0
    manager.poll()
    assert manager.overdue() == []
    now[0] = 6.0
    (error,) = manager.overdue()
    assert isinstance(error, TransferTimeout)
    assert (error.ticket, error.seconds) == (1, 6.0)
    stats = manager.stats()
    assert (stats.transfers_overdue, stats.blocks_underway, stats.blocks_held) == (1, 3, 3)
    other = fill(manager, ids(700, 732))
    manager.check()
    mover.end_all()
    manager.poll()
    assert manager.overdue() == []
    close(manager, other)
    assert manager.stats().blocks_held == 0
    manager.check()


def test_a_match_in_a_colder_tier_stops_where_a_copy_is_lost() -> None:
    manager, mover = make(event_capacity=100)
    a = fill(manager, ids(0, 48))
    manager.suspend(a)
    mover.end_all()
    manager.poll()
    close(manager, a)
    manager.evict()
    manager.take_events()
    assert manager.probe_match(ids(0, 49)) == 48
    b = manager.open(tokens=ids(0, 49))
    assert (manager.length[b], manager.state(b)) == (0, RowState.LOADING)
    mover.end(2, failed=[1])
    manager.poll()
    assert (manager.length[b], manager.cached_tokens[b], manager.state(b)) == (16, 16, RowState.READY)
    assert manager.probe_match(ids(0, 49)) == 16, "what was built on the lost block is lost with it"
    assert [event.kind for event in manager.take_events()].count("removed") >= 2
    manager.check()


def test_the_next_ones_to_go_have_a_copy_before_their_room_is_needed() -> None:
    manager, mover = make(event_capacity=100)
    close(manager, fill(manager, ids(0, 64)))
    manager.poll()
    (jobs,) = mover.running.values()
    assert len(jobs) == 4
    mover.end_all()
    manager.poll()
    assert manager.stats().tiers[0].cached == 4
    manager.poll()
    assert not mover.running, "once is enough"
    manager.take_events()
    fill(manager, ids(900, 964))  # needs their room: no wait, since the copies are there
    events = manager.take_events()
    assert [(event.kind, event.to_tier) for event in events if event.kind == "moved"] == [("moved", 1)] * 3
    assert manager.probe_match(ids(0, 64)) >= 48
    manager.check()


def test_prefetch_makes_an_open_find_it_on_the_device() -> None:
    manager, mover = make(tiers=(8, 8))
    a = fill(manager, ids(0, 48))
    manager.suspend(a)
    mover.end_all()
    manager.poll()
    close(manager, a)
    manager.evict()
    assert manager.prefetch(ids(0, 49)) == 3
    assert manager.prefetch(ids(600, 649)) == 0
    mover.end_all()
    manager.poll()
    b = manager.open(tokens=ids(0, 49))
    assert (manager.length[b], manager.state(b)) == (48, RowState.READY)
    manager.check()


def test_tiers_and_a_mover_go_together() -> None:
    for options in ({"tier_slots": (4,)}, {"mover": FakeMover(Bytes(16))}):
        with pytest.raises(InvalidValue, match="go together"):
            ManagerV2(num_blocks=4, block_size=16, max_rows=1, max_blocks=2, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="resume_limit must be a share"):
        ManagerV2(num_blocks=4, block_size=16, max_rows=1, max_blocks=2, resume_limit=1.5)
    manager = ManagerV2(num_blocks=4, block_size=16, max_rows=1, max_blocks=2)
    row = fill(manager, ids(0, 20))
    with pytest.raises(InvalidValue, match="no colder tier to suspend to"):
        manager.suspend(row)
