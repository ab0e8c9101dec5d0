"""The manager's verbs are transactions, its lengths stay true ahead of results, a freed block waits for its step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows
from graphkv.manager_v2 import ManagerV2


def make(**changes: Any) -> ManagerV2:
    return ManagerV2(**{"num_blocks": 12, "block_size": 4, "max_rows": 4, "max_blocks": 6} | changes)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def grow(manager: ManagerV2, row: int, n: int) -> list[int]:
    """Extend and advance one row; its block ids."""
    manager.extend(rows(row), n)
    manager.advance(rows(row), n)
    return ids_of(manager, row)


def ids_of(manager: ManagerV2, row: int) -> list[int]:
    return manager.block_table[row, : manager.blocks_held[row]].tolist()


def snapshot(manager: ManagerV2) -> tuple[Any, ...]:
    arrays = (manager.block_table, manager.length, manager.blocks_held, manager.serial, manager.is_open)
    return (*(array.tobytes() for array in arrays), manager.blocks.refs.tobytes(), manager.stats())


def refused(manager: ManagerV2, error: type[Exception], match: str | None, verb: str, *args: Any) -> Exception:
    """Call a verb that must raise `error` and change nothing."""
    before = snapshot(manager)
    with pytest.raises(error, match=match) as info:
        getattr(manager, verb)(*args)
    assert snapshot(manager) == before
    manager.check()
    return info.value


def test_extend_reserves_and_advance_moves() -> None:
    manager = make()
    a, b = manager.open(), manager.open(num_tokens_hint=24)
    assert manager.extend(rows(b, a), np.array([9, 0])) == 3
    assert (manager.blocks_held[[a, b]].tolist(), manager.length[[a, b]].tolist()) == ([0, 3], [0, 0])
    manager.advance(rows(b), 9)
    assert manager.extend(rows(b), 3) == 0  # 12 tokens still fit
    assert manager.extend(rows(b), 4) == 1
    manager.advance(rows(b), 7)
    assert (manager.length[b], manager.blocks_held[b]) == (16, 4)
    refused(manager, InvalidValue, f"row {b} cannot advance to 17 tokens with room for 16", "advance", rows(b, a), 1)
    assert manager.extend(rows(), 5) == 0
    stats = manager.stats()
    assert (stats.blocks_total, stats.blocks_free, stats.blocks_held, stats.blocks_peak_held) == (11, 7, 4, 4)
    assert (stats.rows_open, stats.rows_free, stats.rows_retiring, stats.edits_pending) == (2, 2, 0, 4)
    manager.check()


@pytest.mark.parametrize(
    ("verb", "bad_rows", "n", "match"),
    [
        ("extend", rows(0, 1, 0), 1, "row 0 is named more than once in a batch of 3 rows"),
        ("extend", rows(0, 4), 1, r"row 4 is out of range 0 \.\. 3"),
        ("extend", rows(-1), 1, r"row -1 is out of range"),
        ("extend", rows(0, 2), 1, "row 2 is closed"),
        ("extend", np.array([[0, 1]]), 1, r"one-dimensional array of integers, got int64 \(1, 2\)"),
        ("extend", np.array([0.0, 1.0]), 1, "float64"),
        ("extend", np.array([2**64 - 1], np.uint64), 1, "out of range"),
        ("extend", rows(0, 1), -1, r"n must be within 0 \.\. 24 tokens, as a row is; got -1"),
        ("extend", rows(0, 1), 25, r"got 25"),
        ("extend", rows(0, 1), np.array([1, 2, 3]), "one for each of 2 rows"),
        ("extend", rows(0, 1), np.array([1, 2**32]), "got 1 .. 4294967296"),
        ("extend", rows(0, 1), 1.5, "integer"),
        ("extend", rows(0, 1), True, "integer"),
        ("extend", rows(1, 0), 21, "row 0 of length 5 would need 7 blocks, but a row has 6"),
        ("advance", rows(1, 0), 4, "row 1 cannot advance to 4 tokens with room for 0"),
        ("settle", rows(1, 0), np.array([0, 6]), "surplus 6 is more than the 5 tokens of row 0"),
        ("settle", rows(2), 0, "row 2 is closed"),
        ("settle", rows(0, 0), 0, "more than once"),
        ("rewind", rows(1, 0), np.array([0, 6]), "n 6 is more than the 5 tokens of row 0"),
        ("rewind", rows(3), 0, "row 3 is closed"),
    ],
)
def test_bad_input_is_refused_before_anything_changed(verb: str, bad_rows: np.ndarray, n: Any, match: str) -> None:
    manager = make()
    assert (manager.open(), manager.open()) == (0, 1)
    grow(manager, 0, 5)
    refused(manager, InvalidValue, match, verb, bad_rows, n, *([0] if verb == "rewind" else []))
    assert manager.extend(rows(0, 1), 1) == 1


def test_other_bad_input() -> None:
    manager = make()
    row = manager.open()
    refused(manager, InvalidValue, "25 tokens does not fit a row of 24", "open", 25)
    refused(manager, InvalidValue, "-1 tokens", "open", -1)
    refused(manager, InvalidValue, "n 1 is more than the 0 tokens", "rewind", rows(row), 1, 0)
    refused(manager, InvalidValue, "row 9 was never opened with serial 1", "close", 9, 0, 1)
    refused(manager, InvalidValue, "row 0 was never opened with serial 2", "close", row, 0, 2)
    refused(manager, InvalidValue, "one for each of 1 rows", "settle", rows(row), 0, np.array([1, 1]))
    for changes in ({"block_size": 3}, {"block_size": 0}, {"max_rows": 0}, {"max_blocks": 0}, {"max_blocks": 1 << 29}):
        with pytest.raises(InvalidValue):
            make(**changes)
    with pytest.raises(InvalidValue, match="max_edits 5 is below max_blocks 6"):
        make(max_edits=5)


def test_an_array_changed_in_place_is_validated_again() -> None:
    manager = make()
    batch = rows(manager.open(), manager.open())
    manager.extend(batch, 1)
    batch[1] = batch[0]
    refused(manager, InvalidValue, "more than once", "extend", batch, 1)
    batch[1] = 3
    refused(manager, InvalidValue, "row 3 is closed", "advance", batch, 1)
    batch[1] = 1
    manager.advance(batch, 1)
    manager.close(1, 0, 1)
    refused(manager, InvalidValue, "row 1 is closed", "extend", batch, 1)


def test_the_same_bytes_in_another_shape_or_type_are_another_batch() -> None:
    manager = make()
    batch = rows(manager.open() + 1, manager.open() - 1)  # rows 1, 0: as one int64 it reads 1 on this byte order
    manager.extend(batch, 1)
    refused(manager, InvalidValue, "one-dimensional", "extend", batch.reshape(1, 2), 1)
    assert manager.extend(np.array([1], np.int64), 5) == 1
    assert manager.blocks_held[:2].tolist() == [1, 2]


def test_rows_run_out_and_come_back_when_their_step_retired() -> None:
    manager = make(max_rows=2)
    first, second = manager.open(), manager.open()
    assert manager.close(first, 3, 1)
    error = refused(manager, OutOfRows, r"all 2 rows are taken \(1 of them", "open")
    assert (error.max_rows, error.retiring) == (2, 1)  # type: ignore[attr-defined]
    manager.retire(2)
    refused(manager, OutOfRows, "all 2 rows", "open")
    manager.retire(3)
    assert manager.open() == first
    assert manager.serial.tolist() == [2, 1]
    assert manager.close(second, 3, 1)  # step 3 retired already
    assert manager.open() == second


def test_case_E1_a_second_close_releases_nothing_and_spares_the_next_owner() -> None:
    manager = make(num_blocks=9, max_rows=2, max_edits=20)
    row = manager.open()
    grow(manager, row, 10)
    assert manager.close(row, 1, 1)
    assert not manager.close(row, 1, 1)  # free twice, while retiring
    assert not manager.close(row, 2, 1)
    manager.retire(2)
    assert not manager.close(row, 2, 1)  # and while free
    a, b = manager.open(), manager.open()
    assert row in (a, b)
    assert not manager.close(row, 3, 1)  # abort, then finish, of a row that belongs to another now
    manager.extend(rows(a, b), 16)
    assert sorted(ids_of(manager, a) + ids_of(manager, b)) == list(range(1, 9))
    manager.check()


def test_case_E2_a_refused_extend_changes_nothing_and_succeeds_after_a_free() -> None:
    manager = make(num_blocks=9, max_edits=20)
    a, b, c = (manager.open() for _ in range(3))
    manager.extend(rows(a, b, c), np.array([8, 8, 4]))  # 5 of 8 blocks; 3 are free
    wanted = np.array([20, 12])  # 3 more for a and 2 more for c: 5, while each alone would fit
    error = refused(manager, OutOfBlocks, "5 more blocks needed, 3 free", "extend", rows(a, c), wanted)
    assert (error.needed, error.free, error.retiring) == (5, 3, 0)  # type: ignore[attr-defined]
    manager.close(b, 4, 1)
    refused(manager, OutOfBlocks, "3 free and 2 freed once", "extend", rows(a, c), wanted)
    manager.retire(4)
    assert manager.extend(rows(a, c), wanted) == 5
    assert manager.stats().blocks_free == 0
    manager.check()


def test_the_journal_refuses_what_it_has_no_room_for() -> None:
    manager = make(max_edits=8)
    a, b = manager.open(), manager.open()
    manager.extend(rows(a), 16)
    manager.advance(rows(a), 16)
    manager.extend(rows(b), 8)
    assert (manager.edits_pending, manager.edits_room) == (6, 2)
    refused(manager, InvalidValue, "3 table edits do not fit the journal: 6 of 8 are pending", "extend", rows(b), 20)
    refused(manager, InvalidValue, "3 table edits do not fit", "rewind", rows(a), 12, 0)
    assert manager.close(b, 0, 1)  # needs no room
    assert manager.rewind(rows(a), 8, 0) == 2
    refused(manager, InvalidValue, "2 table edits do not fit the journal: 8 of 8", "open")  # b's two cells
    out = np.zeros((8, 3), np.int32)
    assert manager.take_edits(out) == 8
    assert sorted(out[out[:, 0] == b, 2].tolist()) == [0, 0]
    assert manager.open() == b
    assert manager.edits_pending == 2
    manager.check()


def test_case_G3_a_block_freed_by_a_rewind_waits_for_the_step_that_wrote_it() -> None:
    manager = make(num_blocks=3, block_size=16, max_blocks=2)
    heard: list[tuple[int, int, list[int]]] = []
    manager.on_rewind.append(lambda row, length, ids: heard.append((row, length, ids.tolist())))
    a, b = manager.open(), manager.open()
    grow(manager, a, 15)
    kept, freed = grow(manager, a, 4)  # step 1 writes 19 tokens into 2 blocks
    out = np.zeros((8, 3), np.int32)
    manager.take_edits(out)
    assert manager.rewind(rows(a), 4, step=1) == 1
    assert heard == [(a, 15, [freed])]
    assert manager.block_table[a].tolist() == [kept, 0]
    assert manager.take_edits(out) == 1
    assert out[0].tolist() == [a, 1, 0]
    refused(manager, OutOfBlocks, "1 more blocks needed, 0 free and 1 freed once", "extend", rows(b), 1)
    manager.retire(1)
    assert grow(manager, b, 1) == [freed]
    assert manager.rewind(rows(a), 3, step=2) == 0
    assert len(heard) == 1  # no block went: nothing to tell
    manager.check()


def test_a_rewind_gives_up_the_reserve_too_and_a_listener_that_raises_comes_too_late_to_harm() -> None:
    manager = make(max_edits=20)
    a, b = manager.open(), manager.open()
    grow(manager, a, 6)
    manager.extend(rows(a, b), np.array([12, 4]))
    heard: list[tuple[int, int, int]] = []

    def listen(row: int, length: int, ids: np.ndarray) -> None:
        heard.append((row, length, ids.size))
        raise RuntimeError(f"row {row}")

    manager.on_rewind.append(listen)
    with pytest.raises(RuntimeError, match=f"row {a}"):
        manager.rewind(rows(b, a), np.array([0, 3]), 0)
    assert heard == [(a, 3, 4)]
    assert (manager.blocks_held.tolist(), manager.length.tolist()) == ([1, 0, 0, 0], [3, 0, 0, 0])
    assert manager.stats().blocks_free == 10
    manager.check()


def test_case_I3_growth_for_a_skipped_step_does_not_creep() -> None:
    manager = make()
    row = manager.open()
    grow(manager, row, 8)
    for _ in range(100):
        manager.extend(rows(row), 1)  # the step is then skipped
        assert manager.blocks_held[row] == 3
    assert manager.rewind(rows(row), 0, 0) == 1  # and it can be undone
    assert (manager.blocks_held[row], manager.length[row]) == (2, 8)
    assert manager.stats().blocks_free == 9


def test_settle_keeps_lengths_true_while_the_next_step_is_in_flight() -> None:
    manager = make()
    a, b = manager.open(), manager.open()
    batch, next_n = rows(b, a), 3
    grow(manager, a, 5)
    for step in (1, 2):  # step 2 is submitted before step 1 has told what it accepted
        manager.extend(batch, next_n)
        manager.advance(batch, next_n)
        assert manager.length[batch].tolist() == [3 * step, 5 + 3 * step]
    serials = manager.serial[batch]
    manager.settle(batch, next_n - np.array([1, 3]), serials)
    assert manager.length[batch].tolist() == [4, 11]  # 1 accepted + 3 at most; 5 + 3 + 3
    assert manager.blocks_held[batch].tolist() == [2, 3]
    manager.close(b, 2, serials[0])
    manager.settle(batch, np.array([2, 2]), serials)
    assert manager.length[batch].tolist() == [0, 9]
    manager.retire(2)
    assert manager.open() == b
    grow(manager, b, 3)
    manager.settle(batch, 1, serials)  # b has another owner now
    assert manager.length[batch].tolist() == [3, 8]
    manager.settle(rows(b), 1)
    assert manager.length[b] == 2
    manager.check()


@pytest.mark.parametrize("damage", ["id twice", "past the end", "beyond", "length", "closed", "row lost", "reference"])
def test_check_finds_planted_damage(damage: str) -> None:
    manager = make()
    a, b = manager.open(), manager.open()
    grow(manager, a, 9)
    grow(manager, b, 4)
    manager.check()
    if damage == "id twice":
        manager.block_table[b, 0] = manager.block_table[a, 0]
    elif damage == "past the end":
        manager.block_table[a, 1] = 12
    elif damage == "beyond":
        manager.block_table[a, 3] = 11
    elif damage == "length":
        manager.length[a] = 13
    elif damage == "closed":
        manager.length[3] = 1
    elif damage == "row lost":
        manager._free_rows.pop()
    else:
        manager.blocks.release(np.array(ids_of(manager, a)[:1]), 0)
    with pytest.raises(AssertionError):
        manager.check()


class ManagerMachine(RuleBasedStateMachine):
    """`ManagerV2` against lists and dictionaries, with a device table that learns only from `take_edits`.

    Steps are submitted with whatever the device table says then; an id may be handed out only if no unretired step
    saw it.
    """

    NUM_BLOCKS, BLOCK_SIZE, MAX_ROWS, MAX_BLOCKS, MAX_EDITS = 14, 4, 4, 5, 9

    def __init__(self) -> None:
        super().__init__()
        self.manager = ManagerV2(
            num_blocks=self.NUM_BLOCKS,
            block_size=self.BLOCK_SIZE,
            max_rows=self.MAX_ROWS,
            max_blocks=self.MAX_BLOCKS,
            max_edits=self.MAX_EDITS,
        )
        self.length: dict[int, int] = {}
        self.ids: dict[int, list[int]] = {}
        self.serial = [0] * self.MAX_ROWS
        self.closed: list[tuple[int, int]] = []  # (row, serial)
        self.waiting: list[tuple[int, list[int]]] = []  # (step, ids)
        self.waiting_rows: list[tuple[int, int]] = []  # (step, row)
        self.seen: dict[int, set[int]] = {}  # unretired step -> ids that it may touch
        self.credited: list[tuple[list[int], list[int], int]] = []  # (rows, serials, next_n) of submitted steps
        self.step = self.retired = 0
        self.device = np.full((self.MAX_ROWS, self.MAX_BLOCKS), 0, np.int32)
        self.heard: list[tuple[int, int, list[int]]] = []
        self.manager.on_rewind.append(lambda row, length, ids: self.heard.append((row, length, ids.tolist())))

    @initialize(count=st.integers(0, 3))
    def start(self, count: int) -> None:
        for _ in range(count):
            self.open()

    def free(self) -> set[int]:
        taken = [block for ids in self.ids.values() for block in ids]
        taken += [block for _, ids in self.waiting for block in ids]
        assert len(set(taken)) == len(taken)
        return set(range(1, self.NUM_BLOCKS)) - set(taken)

    def batch(self, data: st.DataObject, low: int, high: int) -> tuple[np.ndarray, Any, dict[int, int]]:
        """Some open rows in any order, a count for all or one each, and the same as a dictionary."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.ids)), unique=True)) if self.ids else []
        if data.draw(st.booleans()):
            n = data.draw(st.integers(low, high))
            return rows(*chosen), n, dict.fromkeys(chosen, n)
        each = [data.draw(st.integers(low, high)) for _ in chosen]
        return (
            rows(*chosen),
            np.array(each, data.draw(st.sampled_from([np.int32, np.int64]))),
            dict(zip(chosen, each, strict=True)),
        )

    def refuses(self, error: type[Exception], verb: str, *args: Any) -> Exception:
        return refused(self.manager, error, None, verb, *args)

    @rule()
    def open(self) -> None:
        waiting = {row for _, row in self.waiting_rows}
        idle = set(range(self.MAX_ROWS)) - set(self.ids) - waiting
        if not idle:
            error = self.refuses(OutOfRows, "open")
            assert error.retiring == len(waiting)  # type: ignore[attr-defined]
            return
        try:
            row = self.manager.open()
        except InvalidValue:  # the journal cannot clear the row's old cells now; it can once it is empty
            assert self.manager.edits_pending
            self.take_edits()
            row = self.manager.open()
        assert row in idle
        self.serial[row] += 1
        self.length[row], self.ids[row] = 0, []

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        batch, n, each = self.batch(data, 0, 9)
        want = {row: -(-(self.length[row] + k) // self.BLOCK_SIZE) for row, k in each.items()}
        needed = sum(max(0, want[row] - len(self.ids[row])) for row in want)
        free = self.free()
        if any(count > self.MAX_BLOCKS for count in want.values()) or needed > self.manager.edits_room:
            self.refuses(InvalidValue, "extend", batch, n)
            return
        if needed > len(free):
            error = self.refuses(OutOfBlocks, "extend", batch, n)
            retiring = sum(len(ids) for _, ids in self.waiting)
            assert (error.needed, error.free, error.retiring) == (needed, len(free), retiring)  # type: ignore[attr-defined]
            return
        assert self.manager.extend(batch, n) == needed
        in_flight = set().union(*self.seen.values()) if self.seen else set()
        for row, count in want.items():
            had, now = self.ids[row], ids_of(self.manager, row)
            assert now[: len(had)] == had
            assert len(now) == max(count, len(had))
            new = set(now[len(had) :])
            assert new <= free
            assert not new & in_flight
            free -= new
            self.ids[row] = now

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        batch, n, each = self.batch(data, 0, 4)
        if any(self.length[row] + k > len(self.ids[row]) * self.BLOCK_SIZE for row, k in each.items()):
            self.refuses(InvalidValue, "advance", batch, n)
            return
        self.manager.advance(batch, n)
        for row, k in each.items():
            self.length[row] += k

    @precondition(lambda self: self.ids)
    @rule(next_n=st.integers(1, 3))
    def submit(self, next_n: int) -> None:
        """A whole step: every open row that has the room takes part."""
        chosen = [r for r, ids in self.ids.items() if self.length[r] + next_n <= len(ids) * self.BLOCK_SIZE]
        self.take_edits()
        self.manager.advance(rows(*chosen), next_n)
        for row in chosen:
            self.length[row] += next_n
        self.step += 1
        self.seen[self.step] = {int(block) for row in chosen for block in self.device[row] if block}
        self.credited.append((chosen, [self.serial[row] for row in chosen], next_n))

    @precondition(lambda self: self.credited)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Results of the oldest step whose tokens are still credited; rows that ended meanwhile are skipped."""
        chosen, serials, next_n = self.credited.pop(0)
        surplus = [data.draw(st.integers(0, next_n)) for _ in chosen]
        live = {r: k for r, s, k in zip(chosen, serials, surplus, strict=True) if r in self.ids and self.serial[r] == s}
        args = (rows(*chosen), np.array(surplus, np.int32), np.array(serials))
        if any(k > self.length[row] for row, k in live.items()):  # rewound in between
            self.refuses(InvalidValue, "settle", *args)
            return
        self.manager.settle(*args)
        for row, k in live.items():
            self.length[row] -= k

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        batch, n, each = self.batch(data, 0, 6)
        keep = {r: min(len(self.ids[r]), -(-(self.length[r] - k) // self.BLOCK_SIZE)) for r, k in each.items()}
        dropped = {row: self.ids[row][count:] for row, count in keep.items()}
        needed = sum(map(len, dropped.values()))
        if any(k > self.length[row] for row, k in each.items()) or needed > self.manager.edits_room:
            self.refuses(InvalidValue, "rewind", batch, n, self.step)
            return
        self.heard.clear()
        assert self.manager.rewind(batch, n, self.step) == needed
        for row, k in each.items():
            self.length[row] -= k
            self.ids[row] = self.ids[row][: keep[row]]
        told = {row: (length, ids) for row, length, ids in self.heard}
        assert told == {row: (self.length[row], ids) for row, ids in dropped.items() if ids}
        assert len(told) == len(self.heard)
        self.give_back([block for ids in dropped.values() for block in ids])

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.ids)))
        assert self.manager.close(row, self.step, self.serial[row])
        del self.length[row]
        self.give_back(self.ids.pop(row))
        self.closed.append((row, self.serial[row]))
        if self.step > self.retired:
            self.waiting_rows.append((self.step, row))

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def close_again(self, data: st.DataObject) -> None:
        row, serial = data.draw(st.sampled_from(self.closed))
        before = snapshot(self.manager)
        assert not self.manager.close(row, self.step, serial)
        assert snapshot(self.manager) == before

    @rule()
    def take_edits(self) -> None:
        out = np.full((self.MAX_EDITS, 3), -1, np.int32)
        for row, column, block in out[: self.manager.take_edits(out)].tolist():
            self.device[row, column] = block
        assert self.manager.edits_pending == 0
        for row in self.ids:
            assert self.device[row].tolist() == self.manager.block_table[row].tolist()

    @rule(lag=st.integers(0, 4))
    def retire(self, lag: int) -> None:
        step = max(0, self.step - lag)
        self.manager.retire(step)
        self.retired = max(self.retired, step)
        self.waiting = [(s, ids) for s, ids in self.waiting if s > self.retired]
        self.waiting_rows = [(s, row) for s, row in self.waiting_rows if s > self.retired]
        self.seen = {s: ids for s, ids in self.seen.items() if s > self.retired}

    def give_back(self, ids: list[int]) -> None:
        if self.step > self.retired and ids:
            self.waiting.append((self.step, ids))

    @invariant()
    def agrees(self) -> None:
        self.manager.check()
        for row in range(self.MAX_ROWS):
            ids = self.ids.get(row, [])
            assert self.manager.block_table[row].tolist() == ids + [0] * (self.MAX_BLOCKS - len(ids))
            assert self.manager.length[row] == self.length.get(row, 0)
            assert (self.manager.blocks_held[row], self.manager.serial[row]) == (len(ids), self.serial[row])
            assert self.manager.is_open[row] == (row in self.ids)
        stats = self.manager.stats()
        held, retiring = sum(map(len, self.ids.values())), sum(len(ids) for _, ids in self.waiting)
        assert (stats.blocks_free, stats.blocks_held, stats.blocks_retiring) == (len(self.free()), held, retiring)
        assert (stats.rows_open, stats.rows_retiring) == (len(self.ids), len(self.waiting_rows))
        assert stats.rows_open + stats.rows_free + stats.rows_retiring == self.MAX_ROWS
        assert stats.blocks_peak_held >= held


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
