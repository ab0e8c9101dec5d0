"""Block ids are in one state each, become free only when their last step retired, and the journal tells every cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from graphkv.errors import InvalidValue, OutOfBlocks
from graphkv.manager.blocks import BlockAllocator, BlockCounts, BlockTable


def test_null_block_is_never_handed_out() -> None:
    blocks = BlockAllocator(6)
    assert sorted(blocks.take(5).tolist()) == [1, 2, 3, 4, 5]
    with pytest.raises(OutOfBlocks) as error:
        blocks.take(1)
    assert (error.value.needed, error.value.free, error.value.retiring) == (1, 0, 0)
    blocks.check()


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_too_few_blocks_are_refused(num_blocks: int) -> None:
    with pytest.raises(InvalidValue, match=f"got {num_blocks}"):
        BlockAllocator(num_blocks)


def test_a_refused_take_changes_nothing() -> None:
    blocks = BlockAllocator(8)
    blocks.release(blocks.take(4)[:2], step=3)
    before = blocks.counts()
    with pytest.raises(OutOfBlocks) as error:
        blocks.take(4)
    assert (error.value.needed, error.value.free, error.value.retiring) == (4, 3, 2)
    assert blocks.counts() == before == BlockCounts(total=7, free=3, held=2, retiring=2, peak_held=4)
    assert len(blocks.take(3)) == 3
    with pytest.raises(InvalidValue, match="-1"):
        blocks.take(-1)


def test_released_ids_wait_for_their_step() -> None:
    blocks = BlockAllocator(4)
    ids = blocks.take(3)
    blocks.release(ids[:1], step=5)
    blocks.release(ids[1:2], step=4)
    blocks.retire(3)
    with pytest.raises(OutOfBlocks):
        blocks.take(1)
    blocks.retire(4)
    assert blocks.take(1).tolist() == ids[1:2].tolist()
    blocks.retire(2)  # an older step is no news
    with pytest.raises(OutOfBlocks):
        blocks.take(1)
    blocks.retire(9)
    assert blocks.take(1).tolist() == ids[:1].tolist()
    blocks.release(ids[2:], step=9)  # retired already: free at once
    assert blocks.take(1).tolist() == ids[2:].tolist()
    blocks.check()


def test_a_shared_id_waits_for_the_latest_step_of_its_owners() -> None:
    blocks = BlockAllocator(2)
    ids = blocks.take(1)
    blocks.share(ids)
    blocks.release(ids, step=7)
    assert blocks.counts().held == 1
    blocks.release(ids, step=2)
    blocks.retire(6)
    assert blocks.counts() == BlockCounts(total=1, free=0, held=0, retiring=1, peak_held=1)
    blocks.retire(7)
    blocks.release(blocks.take(1), step=0)  # the steps of an earlier life do not linger
    assert blocks.counts().free == 1
    blocks.check()


@pytest.mark.parametrize(
    "misuse", ["twice", "twice in one call", "retiring", "never taken", "null", "past the end", "share"]
)
def test_misuse_of_an_id_is_caught_before_anything_changed(misuse: str) -> None:
    blocks = BlockAllocator(6)
    held, gone = blocks.take(2), blocks.take(1)
    blocks.release(gone, step=0 if misuse == "twice" else 9)
    before = blocks.counts(), blocks.refs.copy()
    calls = {
        "twice": lambda: blocks.release(gone, 0),
        "twice in one call": lambda: blocks.release(np.array([held[0], held[1], held[1]]), 1),
        "retiring": lambda: blocks.release(np.array([held[0], gone[0]]), 9),
        "never taken": lambda: blocks.release(np.array([5]), 0),
        "null": lambda: blocks.release(np.array([0]), 0),
        "past the end": lambda: blocks.release(np.array([held[0], 6]), 0),
        "share": lambda: blocks.share(np.array([held[0], gone[0]])),
    }
    with pytest.raises(AssertionError, match=r"block"):
        calls[misuse]()
    assert blocks.counts() == before[0]
    assert np.array_equal(blocks.refs, before[1])
    blocks.check()


@pytest.mark.parametrize("damage", ["free twice", "held and free", "leak", "null free", "late"])
def test_check_finds_planted_damage(damage: str) -> None:
    blocks = BlockAllocator(8)
    held = blocks.take(3)
    blocks.release(held[:1], step=4)
    blocks.check()
    if damage == "free twice":
        blocks._stack[0] = blocks._stack[1]
    elif damage == "held and free":
        blocks._stack[0] = held[1]
    elif damage == "leak":
        blocks._free -= 1
    elif damage == "null free":
        blocks._stack[0] = 0
    else:
        blocks.retired = 4
    with pytest.raises(AssertionError):
        blocks.check()


def test_refs_cannot_be_written_from_outside() -> None:
    with pytest.raises(ValueError, match="read-only"):
        BlockAllocator(3).refs[1] = 4


def test_take_edits_reports_current_ids_and_leaves_the_rest_of_out_alone() -> None:
    table = BlockTable(2, 4, 6)
    table.write(np.array([1, 0]), np.array([2, 3]), np.array([7, 9], np.int32))
    table.write(np.array([1]), np.array([2]), 0)
    out = np.full((5, 3), -7, np.int32)
    assert table.take_edits(out) == 3
    assert out.tolist() == [[1, 2, 0], [0, 3, 9], [1, 2, 0], [-7] * 3, [-7] * 3]
    assert table.edits_pending == 0
    assert table.take_edits(out[:0]) == 0


@pytest.mark.parametrize("out", [np.zeros((1, 3), np.int32), np.zeros((4, 2), np.int32), np.zeros((4, 3), np.int64)])
def test_take_edits_refuses_a_bad_out_and_keeps_the_journal(out: np.ndarray) -> None:
    table = BlockTable(2, 4, 6)
    table.write(np.array([1, 1]), np.array([0, 1]), np.array([7, 9], np.int32))
    with pytest.raises(InvalidValue, match="2 edits"):
        table.take_edits(out)
    assert table.edits_pending == 2


def test_a_dropped_row_is_cleared_on_the_device_when_it_is_reopened() -> None:
    table = BlockTable(2, 4, 6)
    device = np.zeros((2, 4), np.int32)
    out = np.zeros((6, 3), np.int32)

    def upload() -> None:
        for row, column, block in out[: table.take_edits(out)].tolist():
            device[row, column] = block

    table.write(np.zeros(3, np.intp), np.arange(3), np.array([5, 6, 7], np.int32))
    upload()
    table.drop(0, np.arange(3))
    upload()
    assert device[0].tolist() == [5, 6, 7, 0]  # nothing was owed for a row that nothing reads
    table.write(np.ones(4, np.intp), np.arange(4), np.array([1, 2, 3, 4], np.int32))
    with pytest.raises(InvalidValue, match="3 table edits do not fit the journal: 4 of 6"):
        table.reopen(0)
    upload()
    table.reopen(0)
    table.write(np.array([0]), np.array([0]), np.array([8], np.int32))
    upload()
    assert device.tolist() == table.ids.tolist() == [[8, 0, 0, 0], [1, 2, 3, 4]]


class AllocatorMachine(RuleBasedStateMachine):
    """`BlockAllocator` against a dictionary of references and a list of waits."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(self.NUM_BLOCKS)
        self.refs: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.retired = 0
        self.peak = 0

    def free(self) -> int:
        return self.NUM_BLOCKS - 1 - len(self.refs) - len(self.waiting)

    @rule(n=st.integers(0, 5))
    def take(self, n: int) -> None:
        if n > self.free():
            with pytest.raises(OutOfBlocks) as error:
                self.blocks.take(n)
            assert (error.value.needed, error.value.free, error.value.retiring) == (n, self.free(), len(self.waiting))
            return
        ids = self.blocks.take(n).tolist()
        assert len(set(ids)) == n
        assert not set(ids) & (set(self.refs) | set(self.waiting) | {0})
        self.refs.update(dict.fromkeys(ids, 1))
        self.last.update(dict.fromkeys(ids, 0))
        self.peak = max(self.peak, len(self.refs))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.refs)), max_size=3)) if self.refs else []
        self.blocks.share(np.array(ids, np.int32))
        for block in ids:
            self.refs[block] += 1

    @rule(data=st.data(), step=st.integers(0, 12))
    def release(self, data: st.DataObject, step: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.refs)), max_size=4)) if self.refs else []
        if any(ids.count(block) > self.refs[block] for block in ids):
            with pytest.raises(AssertionError):
                self.blocks.release(np.array(ids), step)
            return
        self.blocks.release(np.array(ids, np.int64), step)
        for block in ids:
            self.last[block] = max(self.last[block], step)
            self.refs[block] -= 1
        for block in {block for block in ids if self.refs[block] == 0}:
            del self.refs[block]
            if self.last[block] > self.retired:
                self.waiting[block] = self.last[block]

    @rule(step=st.integers(0, 14))
    def retire(self, step: int) -> None:
        self.blocks.retire(step)
        self.retired = max(self.retired, step)
        self.waiting = {block: last for block, last in self.waiting.items() if last > self.retired}

    @invariant()
    def agrees(self) -> None:
        self.blocks.check()
        assert self.blocks.counts() == BlockCounts(
            self.NUM_BLOCKS - 1, self.free(), len(self.refs), len(self.waiting), self.peak
        )
        assert {int(b): int(self.blocks.refs[b]) for b in np.flatnonzero(self.blocks.refs)} == self.refs


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
