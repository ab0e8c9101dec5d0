"""The blocks of one layer group with a window: which columns of each row are still there.

A row holds the columns of its sinks and those from `first` on, up to as many as it holds in group 0. Columns before
`first` are stale: no query that is in flight or still to come can read them, for all of these stand at or behind the
row's final length, which no rejected draft takes back. A stale block is given up like any other: it is handed out again
once the steps submitted by then have retired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphkv.manager.blocks import BlockTable, Index, Int32s
from graphkv.manager.prefix import Node
from graphkv.manager.row_batch import cells
from graphkv.manager.window_blocks import WindowBlocks
from graphkv.transfer import DEVICE, CopyJob
from graphkv.window import Window

NEVER = np.iinfo(np.int32).max
ReleaseListener = Callable[[int, int, Int32s], None]


class RowCut(NamedTuple):
    """What a rewind does to rows of a group.

    Attributes:
        rows: the rows; `first` is their new first column.
        cell_rows, cell_columns: cells that are given up.
        edge_rows, edge_columns, edge_tokens: cells that will be written within, though their blocks are others' too,
            and the tokens that stay in them.
    """

    rows: Index
    first: Int32s
    cell_rows: Index
    cell_columns: Index
    edge_rows: Index
    edge_columns: Index
    edge_tokens: Int32s


class WindowGroup:
    """Rows of one group. Verbs are called by `WindowedManager`, which has seen to it that they can be done.

    Attributes:
        number: the group's number, from 1.
        window: what its layers read.
        blocks: whose blocks they are.
        ids: int32 [max_rows, max_blocks], its lines of the block table.
        first: int32 [max_rows], the first column behind the sinks that the row still holds.
        due_at: int32 [max_rows], the final length at which the row has another stale column.
        on_release: called as `listener(group, row, ids)` when an open row gave up blocks.

    Args:
        table: the block table of all groups.
        room: tokens behind the window that are kept, so that a row can be rewound by as many.
    """

    def __init__(
        self,
        number: int,
        window: Window,
        blocks: WindowBlocks,
        table: BlockTable,
        max_rows: int,
        block_size: int,
        room: int,
    ) -> None:
        self.number, self.window, self.blocks = number, window, blocks
        self.on_release: list[ReleaseListener] = []
        self._table, self._size = table, block_size
        self._line = number * max_rows
        self.ids = table.ids[self._line : self._line + max_rows]
        self._sinks = window.sink_columns(block_size)
        self._kept_tokens = window.tokens - 1 + room  # behind the final length
        self.first = np.full(max_rows, self._sinks, np.int32)
        self.due_at = np.full(max_rows, NEVER, np.int32)

    def line(self, row: int) -> int:
        """The row's line in the block table of all groups."""
        return self._line + row

    def held_columns(self, row: int, end: int) -> Index:
        """The columns below `end` that a row has blocks in, `end` being at most what it holds in group 0."""
        return np.concatenate([np.arange(min(self._sinks, end)), np.arange(self.first[row], max(end, self.first[row]))])

    def num_held(self, end: Int32s) -> Int32s:
        """int32 [max_rows], blocks of each row that has `end` columns in group 0."""
        num: Int32s = np.minimum(self._sinks, end) + np.maximum(end - self.first, 0)
        return num

    def most_held(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        """Blocks that rows of so many tokens need when nothing is in flight, at most."""
        whole = -(-tokens.astype(np.int64) // self._size)
        return np.minimum(whole, self._sinks + 1 - (-self._kept_tokens // self._size))

    # growing and shrinking ------------------------------------------------------------------------------------------

    def open(self, row: int) -> None:
        """A sequence begins in the row, with no block."""
        self._table.reopen(self.line(row))
        self._hold_from(np.array([row]), np.array([self._sinks], np.int32))

    def grow(self, rows: Index, columns: Index) -> None:
        """Give the cells (rows[i], columns[i]) a block each."""
        self._write(rows, columns, self.blocks.take(rows.size).astype(np.int32))

    def release_stale(self, rows: Index, final: Int32s, step: int) -> Index:
        """Give up what no query at or behind the rows' final lengths reads, in half of the journal's room at most.

        Args:
            step: the last submitted step, which may still read it.

        Returns:
            The rows that have more to give up.
        """
        first = self.first[rows]
        stale = np.maximum((final - self._kept_tokens) // self._size - first, 0)
        room = (self._table.max_edits - self._table.edits_pending) // 2
        if rows.size <= room and not np.count_nonzero(stale != 1):  # as it is while rows decode
            self._hold_from(rows, first + stale)
            self._give_up(rows, first.astype(np.intp), step)
            return rows[:0]
        count = np.clip(room - (np.cumsum(stale) - stale), 0, stale).astype(np.int32)
        self._hold_from(rows, first + count)
        self._give_up(*cells(rows, first, first + count), step)
        left: Index = rows[count < stale]
        return left

    def least_length(self, rows: Index, tokens: Int32s) -> NDArray[np.int64]:
        """Of rows that shall be rewound to `tokens` tokens, 0 if that can be done, else the least that could be."""
        keep, first = -(-tokens // self._size), self.first[rows].astype(np.int64)
        needed = np.maximum(self._sinks, (tokens - self.window.tokens + 1) // self._size)
        return np.where((first > needed) & (keep > needed), first * self._size + self.window.tokens - 1, 0)

    def cut(self, rows: Index, tokens: Int32s, held: Int32s, forgotten: NDArray[np.bool_]) -> RowCut:
        """What it takes to rewind rows to `tokens` tokens, which can be done.

        Args:
            held: columns that the rows have in group 0.
            forgotten: rows for which the content of the block that they end in will not be findable any more.
        """
        keep, first = -(-tokens // self._size), self.first[rows]
        tail = cells(rows, np.minimum(np.maximum(keep, first), held), held)
        stop = np.minimum(held, self._sinks)
        sinks = cells(rows, np.minimum(keep, stop), stop)
        column, part = np.minimum(tokens // self._size, self.ids.shape[1] - 1), tokens % self._size
        ids = self.ids[rows, column]
        edge = np.flatnonzero((part > 0) & ((self.blocks.refs[ids] > 1) | (self.blocks.kept[ids] & ~forgotten)))
        return RowCut(
            rows,
            np.minimum(first, np.maximum(keep, self._sinks)),
            np.concatenate([sinks[0], tail[0]]),
            np.concatenate([sinks[1], tail[1]]),
            rows[edge],
            column[edge].astype(np.intp),
            part[edge],
        )

    def rewind(self, cut: RowCut, step: int) -> list[CopyJob]:
        """Do what `cut` found out; the copies that it takes."""
        jobs = self._own_edges(cut, step)
        self._hold_from(cut.rows, cut.first)
        self._give_up(cut.cell_rows, cut.cell_columns, step)
        return jobs

    def fork(self, row: int, child: int, full: int, part: int) -> list[CopyJob]:
        """`child` shares the first `full` columns of `row`, and gets a copy of `part` tokens of the one behind them."""
        columns = self.held_columns(row, full)
        ids = self.ids[row, columns]
        self.blocks.share(ids)
        self._write(np.full(columns.size, child), columns, ids)
        self._hold_from(np.array([child]), self.first[row : row + 1])
        if not part:
            return []
        return [self.begin_with(child, full, int(self.ids[row, full]), part)]

    # content --------------------------------------------------------------------------------------------------------

    def usable(self, nodes: Sequence[Node]) -> int:
        """How many of these blocks, the first ones of a chain, a sequence can begin with.

        That is as many as leave it with all that a query behind them reads in this group.
        """
        count = len(nodes)
        while True:
            columns = self.window.columns(count * self._size, self._size)
            missing = next((c for c in columns if not self.blocks.block_of(nodes[c])), None)
            if missing is None:
                return count
            count = missing  # every longer beginning reads it

    def adopt(self, row: int, nodes: Sequence[Node]) -> None:
        """Begin a row with what is findable of these blocks, and read behind them."""
        tokens = len(nodes) * self._size
        columns = np.array(self.window.columns(tokens, self._size), np.intp)
        ids = np.array([self.blocks.block_of(nodes[column]) for column in columns.tolist()], np.int32)
        self.blocks.share(ids)
        self._write(np.full(columns.size, row), columns, ids)
        self._hold_from(np.array([row]), np.array([self.window.first_column(tokens, self._size)], np.int32))

    def begin_with(self, row: int, column: int, source: int, tokens: int) -> CopyJob:
        """Give the row a block of its own with the first `tokens` tokens of another; the copy that it takes."""
        own = self.blocks.take(1).astype(np.int32)
        self._write(np.array([row]), np.array([column]), own)
        return self.copy(source, int(own[0]), tokens)

    def attach(self, row: int, node: Node) -> None:
        """The row's block of this content, if it still has one, becomes findable."""
        column = node.depth - 1
        if column < self._sinks or column >= self.first[row]:
            self.blocks.attach(node, int(self.ids[row, column]))

    # leaving --------------------------------------------------------------------------------------------------------

    def close(self, row: int, held: int, step: int) -> None:
        """The row's sequence ended."""
        columns = self.held_columns(row, held)
        self.blocks.release(self.ids[row, columns], step)
        self._table.drop(self.line(row), columns)
        self.due_at[row] = NEVER

    def copy(self, source: int, target: int, tokens: int) -> CopyJob:
        """A copy between two blocks, which it references until it is taken."""
        self.blocks.share(np.array([source, target]))
        return CopyJob(DEVICE, source, DEVICE, target, tokens, self.number)

    def _own_edges(self, cut: RowCut, step: int) -> list[CopyJob]:
        if not cut.edge_rows.size:
            return []
        others = self.ids[cut.edge_rows, cut.edge_columns]
        own = self.blocks.take(others.size).astype(np.int32)
        pairs = zip(others.tolist(), own.tolist(), cut.edge_tokens.tolist(), strict=True)
        jobs = [self.copy(source, target, tokens) for source, target, tokens in pairs]
        self._write(cut.edge_rows, cut.edge_columns, own)
        self.blocks.release(others, step)
        return jobs

    def _hold_from(self, rows: Index, first: Int32s) -> None:
        self.first[rows] = first
        self.due_at[rows] = (first + 1) * self._size + self._kept_tokens

    def _write(self, rows: Index, columns: Index, ids: Int32s | int) -> None:
        self._table.write(self._line + rows, columns, ids)

    def _give_up(self, rows: Index, columns: Index, step: int) -> None:
        if not rows.size:
            return
        ids = self.ids[rows, columns]
        self._write(rows, columns, 0)
        self.blocks.release(ids, step)
        for listener in self.on_release:
            for row in np.unique(rows).tolist():
                listener(self.number, row, ids[rows == row])

    # looking --------------------------------------------------------------------------------------------------------

    def check(self, is_open: NDArray[np.bool_], held: Int32s, length: Int32s, final: Int32s, copies: Int32s) -> None:
        """`AssertionError` with the facts unless each open row has exactly the columns it must have, and no more.

        Args:
            held, length, final: of each row, columns in group 0, tokens at most, and tokens at least.
            copies: int32 [num_blocks], references of copies that nobody has taken yet.
        """
        self.blocks.check()
        column = np.arange(self.ids.shape[1])
        behind = (column >= self.first[:, None]) | (column < self._sinks)
        has = behind & (column < held[:, None]) & is_open[:, None]
        wrong = np.where(has, (self.ids < 1) | (self.ids >= self.blocks.num_blocks), self.ids != 0)
        if wrong.any():
            row, at = np.argwhere(wrong)[0].tolist()
            raise AssertionError(
                f"group {self.number}: row {row} of {held[row]} columns from {self.first[row]} on has id "
                f"{self.ids[row, at]} in column {at}"
            )
        needed = np.maximum(self._sinks, (final - self.window.tokens + 1) // self._size)
        if (early := is_open & (self.first > needed) & (final > 0)).any():
            row = int(early.argmax())
            raise AssertionError(
                f"group {self.number}: row {row} is final up to {final[row]} and holds no column before "
                f"{self.first[row]}, but a query there reads from column {needed[row]} on"
            )
        uses = np.bincount(self.ids[has], minlength=self.blocks.num_blocks)
        if (differs := uses + copies != self.blocks.refs).any():
            block = int(differs.argmax())
            raise AssertionError(
                f"group {self.number}: block {block} is used {uses[block]} times, copied {copies[block]} times, with "
                f"{self.blocks.refs[block]} references"
            )
        writable = has & (column >= (length // self._size)[:, None])
        if (shared := writable & ((uses[self.ids] != 1) | self.blocks.kept[self.ids])).any():
            row, at = np.argwhere(shared)[0].tolist()
            raise AssertionError(
                f"group {self.number}: row {row} may write block {self.ids[row, at]} in column {at}, which has "
                f"{uses[self.ids[row, at]]} owners, or is findable"
            )
