"""Rows, lengths and blocks against a plain model: any order of verbs, with steps that retire late."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manager_calls import ids_of, refused, rows, snapshot

from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows
from graphkv.manager.v2 import ManagerV2


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

    @rule(data=st.data(), verb=st.sampled_from(["extend", "claim"]))
    def extend(self, data: st.DataObject, verb: str) -> None:
        batch, n, each = self.batch(data, 0, 9)
        want = {row: -(-(self.length[row] + k) // self.BLOCK_SIZE) for row, k in each.items()}
        needed = sum(max(0, want[row] - len(self.ids[row])) for row in want)
        free = self.free()
        if any(count > self.MAX_BLOCKS for count in want.values()) or needed > self.manager.edits_room:
            self.refuses(InvalidValue, verb, batch, n)
            return
        if needed > len(free):
            error = self.refuses(OutOfBlocks, verb, batch, n)
            retiring = sum(len(ids) for _, ids in self.waiting)
            assert (error.needed, error.free, error.retiring) == (needed, len(free), retiring)  # type: ignore[attr-defined]
            return
        assert getattr(self.manager, verb)(batch, n) == needed
        if verb == "claim":
            for row, k in each.items():
                self.length[row] += k
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
