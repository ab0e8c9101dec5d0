"""The manager's verbs are transactions, its lengths stay true ahead of results, a freed block waits for its step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from manager_calls import grow, ids_of, refused, rows

from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows
from graphkv.manager.v2 import ManagerV2


def make(**changes: Any) -> ManagerV2:
    return ManagerV2(**{"num_blocks": 12, "block_size": 4, "max_rows": 4, "max_blocks": 6} | changes)


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
