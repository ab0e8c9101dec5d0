"""Rows: which blocks each holds, how long it is, and which table cells the device must still be told.

All state is NumPy arrays indexed by row; a step costs a handful of array operations over its batch and creates no
object per block. The device never reads these arrays: it learns of changes through the journal (`take_edits`).

Lengths run ahead of the results. When step n+1 is submitted before step n retired, nobody knows yet how many tokens
step n accepted, so `length` counts what the submitted steps make valid at most (`advance`), and `settle` takes the
surplus back once a step's results are known. Capacity covers that worst case, so no submitted step ever writes past
the blocks of its row:

    extend (capacity >= length + n) -> submit -> advance (length += n) -> results -> settle (length -= n - accepted)

`extend` alone moves no length, so repeating it for a step that was then skipped reserves nothing more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from graphkv.errors import InvalidValue, OutOfRows
from graphkv.manager.blocks import BlockAllocator, BlockTable, Index, Int32s
from graphkv.manager.row_batch import Batch, BatchReader, cells

RewindListener = Callable[[int, int, Int32s], None]
_ZERO = np.array(0, np.int32)
_MAX_TOKENS = 1 << 30  # of a row, so that length + n stays within int32


class Capacity:
    """Rows, lengths, capacity and the journal of table edits, over one `BlockAllocator`.

    Verbs take `rows` as an array of distinct open rows (int32 is fastest) and `n` as one count for all or an array of
    one each. A call that raises has changed nothing: `InvalidValue` is the caller's mistake, `OutOfBlocks` and
    `OutOfRows` may be retried. The arrays are for reading; only the verbs write them.

    Attributes:
        block_table: int32 [max_rows, max_blocks], block ids; 0 (null block) past a row's blocks and in closed rows.
        length: int32 [max_rows], tokens that are valid, or will be at most, once the submitted steps ran. Suspension
            does not change it.
        blocks_held: int32 [max_rows]; a row's capacity is `blocks_held * block_size` tokens, never below its length.
        serial: int64 [max_rows], how often the row was opened: tells the sequences of a row apart.
        is_open: bool [max_rows], rows of a sequence.
        num_groups: layer groups; the device has a table for each.
        is_ready: bool [max_rows], open rows that a step may name: neither suspended nor on their way back.
        on_rewind: called as `listener(row, new_length, ids)` after a rewind, for each row that gave up blocks.

    Args:
        blocks: whose blocks they are.
        block_size: tokens a block, a power of two.
        max_rows, max_blocks: lines and columns of the block table.
        max_edits: room of the journal in table cells, at least `max_blocks`; by default a whole row and a cell of each.
        groups: layer groups, see `graphkv.manager.windowed`; rows here are those of group 0.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        max_edits: int | None = None,
        groups: int = 1,
    ) -> None:
        if block_size < 1 or block_size & (block_size - 1):
            raise InvalidValue(f"block_size must be a power of two, got {block_size}")
        if max_rows < 1 or max_blocks < 1 or max_blocks * block_size > _MAX_TOKENS:
            raise InvalidValue(
                f"max_rows and max_blocks must be positive and a row at most {_MAX_TOKENS} tokens, "
                f"got {max_rows} rows of {max_blocks} blocks of {block_size} tokens"
            )
        self.blocks = blocks
        edits = groups * (max_rows + max_blocks) if max_edits is None else max_edits
        self.table = BlockTable(groups * max_rows, max_blocks, edits)
        self.block_table = self.table.ids[:max_rows]
        self.block_size, self.max_rows, self.max_blocks = block_size, max_rows, max_blocks
        self.num_groups = groups
        self.max_tokens = max_blocks * block_size
        self.length = np.zeros(max_rows, np.int32)
        self.blocks_held = np.zeros(max_rows, np.int32)
        self.serial = np.zeros(max_rows, np.int64)
        self.is_open, self.is_ready = np.zeros((2, max_rows), np.bool_)
        self.on_rewind: list[RewindListener] = []
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._retiring_rows: dict[int, list[int]] = {}
        self._reader = BatchReader(self.is_open, self.is_ready, self.max_tokens)
        # Zero-dimensional arrays: a Python int as an operand costs NumPy half a microsecond more.
        self._shift = np.array(block_size.bit_length() - 1, np.int32)
        self._round_up = np.array(block_size - 1, np.int32)
        self._columns = np.array(max_blocks, np.int32)

    @property
    def edits_pending(self) -> int:
        """Table cells noted in the journal since the last `take_edits`."""
        return self.table.edits_pending

    @property
    def edits_room(self) -> int:
        """Table cells that the journal can still note before `take_edits`."""
        return self.table.max_edits - self.table.edits_pending

    def _open_row(self, num_tokens_hint: int, num_cells: int) -> int:
        """A free row, now with length and capacity 0, and room in the journal for `num_cells` cells of it.

        Cells that the row's last sequence left on the device are journalled, so that they become the null block.

        Args:
            num_tokens_hint: tokens the sequence is known to need; refused now if no row could ever hold them.
        """
        if not 0 <= num_tokens_hint <= self.max_tokens:
            raise InvalidValue(
                f"a sequence of {num_tokens_hint} tokens does not fit a row of {self.max_tokens}; build with more "
                "max_blocks"
            )
        if not self._free_rows:
            raise OutOfRows(self.max_rows, sum(map(len, self._retiring_rows.values())))
        row = self._free_rows[-1]
        self.table.reopen(row, num_cells)
        self._free_rows.pop()
        self.serial[row] += 1
        self.is_open[row] = self.is_ready[row] = True
        return row

    def extend(self, rows: ArrayLike, n: ArrayLike) -> int:
        """Make room for `n` more tokens in every row, or in none: capacity becomes at least length + n.

        Returns:
            The blocks that were added.

        Raises:
            OutOfBlocks: the pool is short.
            InvalidValue: a bad row or n, a row past its `max_tokens`, or a journal without room.
        """
        return self._extend(self._reader.of(rows), n)

    def claim(self, rows: ArrayLike, n: ArrayLike) -> int:
        """`extend` and `advance` at once, which is what a step does: room for `n` more tokens, and lengths that count
        them, in every row or in none. Returns and raises what `extend` does."""
        batch = self._reader.of(rows)
        added = self._extend(batch, n)
        self.length[batch.rows] = batch.tokens
        return added

    def advance(self, rows: ArrayLike, n: ArrayLike) -> None:
        """Move lengths up by `n`, when a step is submitted; `InvalidValue` where capacity does not cover it."""
        batch = self._reader.of(rows)
        tokens, capacity, mask = batch.tokens, batch.held, batch.mask
        self.length.take(batch.rows, None, tokens, "clip")
        np.add(tokens, self._reader.counts(n, batch.rows.size, "n"), tokens)
        self.blocks_held.take(batch.rows, None, capacity, "clip")
        np.left_shift(capacity, self._shift, capacity)
        np.greater(tokens, capacity, mask)
        if np.count_nonzero(mask):
            at = int(mask.argmax())
            raise InvalidValue(
                f"row {batch.rows[at]} cannot advance to {tokens[at]} tokens with room for {capacity[at]}; extend first"
            )
        self.length[batch.rows] = tokens

    def settle(self, rows: ArrayLike, surplus: ArrayLike, serial: ArrayLike | None = None) -> None:
        """Take back what a retired step was credited beyond what it accepted: lengths go down, blocks stay.

        Args:
            rows: the rows of that step.
            surplus: tokens to take off each length, next_n - accepted.
            serial: the rows' serials when the step was submitted; rows closed since, or given to another sequence,
                are then skipped. Without it every row must be open.
        """
        if serial is not None:
            index, then = self._reader.index(rows), np.asarray(serial)
            if then.shape != index.shape:
                raise InvalidValue(f"serial must be one for each of {index.size} rows, got shape {then.shape}")
            same = self.is_open[index] & (self.serial[index] == then)
            if np.count_nonzero(same) < index.size:
                counts = self._reader.counts(surplus, index.size, "surplus")
                rows, surplus = index[same], counts[same] if counts.ndim else counts
        batch = self._reader.of(rows)
        self._shorten(batch, surplus, "surplus")
        self.length[batch.rows] = batch.tokens

    def rewind(self, rows: ArrayLike, n: ArrayLike, step: int) -> int:
        """Lengths go back by `n`; blocks wholly past the new length, reserved ones included, are given up.

        Their cells become the null block and are journalled; their ids are handed out again once `step` retired. With
        n = 0 a row gives back what it reserved and did not use. Listeners run last: what one raises passes on, but the
        rewind is done.

        Args:
            step: the last submitted step that may touch these rows; 0 if there is none.

        Returns:
            The blocks that were given up.
        """
        step = operator.index(step)
        batch = self._reader.of(rows)
        self._shorten(batch, n, "n")
        held = self.blocks_held[batch.rows]
        keep = (batch.tokens + self._round_up) >> self._shift
        cell_rows, cell_columns = cells(batch.rows, keep, held)
        self._prepare_rewind(batch, cell_rows.size, step)
        ids = self.block_table[cell_rows, cell_columns]
        self.table.write(cell_rows, cell_columns, 0)
        self.blocks_held[batch.rows] = keep
        self.length[batch.rows] = batch.tokens
        self.blocks.release(ids, step)
        if self.on_rewind:
            notices = [(row, int(self.length[row]), ids[cell_rows == row]) for row in np.unique(cell_rows).tolist()]
            for listener in self.on_rewind:
                for notice in notices:
                    listener(*notice)
        return ids.size

    def _prepare_rewind(self, batch: Batch, num_cells: int, step: int) -> None:
        """The last that may refuse a rewind of `batch.rows` to lengths `batch.tokens`, which empties `num_cells`."""
        self.table.need_edits(num_cells)

    def close(self, row: int, step: int, serial: int) -> bool:
        """End the sequence that opened `row` as its `serial`-th; False, and nothing done, if it ended before.

        Needs no room in the journal: what it leaves on the device is journalled when the row is opened again.

        Args:
            step: the last submitted step that may touch the row; its blocks and the row are reused once it retired.
        """
        row, step = operator.index(row), operator.index(step)
        if not 0 <= row < self.max_rows or not 1 <= serial <= self.serial[row]:
            raise InvalidValue(f"row {row} was never opened with serial {serial}; rows are 0 .. {self.max_rows - 1}")
        if serial != self.serial[row] or not self.is_open[row]:
            return False
        held = int(self.blocks_held[row])
        self.blocks.release(self.block_table[row, :held], step)
        self.table.drop(row, np.arange(held))
        self.blocks_held[row] = self.length[row] = 0
        self.is_open[row] = self.is_ready[row] = False
        self._reader.forget()
        if step <= self.blocks.retired:
            self._free_rows.append(row)
        else:
            self._retiring_rows.setdefault(step, []).append(row)
        return True

    def retire(self, step: int) -> None:
        """Every step up to `step` has retired: blocks and rows that waited for them become free."""
        self.blocks.retire(operator.index(step))
        for done in sorted(s for s in self._retiring_rows if s <= step):
            self._free_rows += self._retiring_rows.pop(done)

    def take_edits(self, out: Int32s) -> int:
        """Move the journal into `out` as (row, column, block id) and return the number of edits.

        Args:
            out: int32 [at least edits_pending, 3]; lines past the returned number are left as they were.
        """
        return self.table.take_edits(out)

    @property
    def rows_by_state(self) -> tuple[int, int, int]:
        """(open, free, retiring) rows."""
        free, retiring = len(self._free_rows), sum(map(len, self._retiring_rows.values()))
        return self.max_rows - free - retiring, free, retiring

    def check(self) -> None:
        """`AssertionError` with the facts if an invariant is broken. For tests and debug modes: it reads everything."""
        self.blocks.check()
        open_rows = np.flatnonzero(self.is_open).tolist()
        idle = self._free_rows + [row for rows in self._retiring_rows.values() for row in rows]
        if sorted(open_rows + idle) != list(range(self.max_rows)):
            raise AssertionError(f"open rows {open_rows} and idle rows {idle} are not each of {self.max_rows} once")
        held, table = self.blocks_held, self.block_table
        capacity = np.where(self.is_ready, held * self.block_size, np.where(self.is_open, self.max_tokens, 0))
        if (bad := (self.length < 0) | (self.length > capacity) | (held > self.max_blocks)).any():
            row = int(bad.argmax())
            raise AssertionError(f"row {row} has length {self.length[row]} and {held[row]} blocks, not open or too few")
        in_row = np.arange(self.max_blocks) < (held * self.is_open)[:, None]
        if (bad := np.where(in_row, (table < 1) | (table >= self.blocks.num_blocks), table != 0)).any():
            row, column = np.argwhere(bad)[0].tolist()
            raise AssertionError(f"row {row} of {held[row]} blocks has id {table[row, column]} in column {column}")
        uses = np.bincount(table[in_row], minlength=self.blocks.num_blocks) + self._other_uses()
        if (differs := uses != self.blocks.refs).any():
            block = int(differs.argmax())
            raise AssertionError(f"block {block} is used {uses[block]} times with {self.blocks.refs[block]} references")

    def _other_uses(self) -> Int32s:
        """int32 [num_blocks], references to blocks that do not stand for a table cell."""
        return np.zeros(self.blocks.num_blocks, np.int32)

    def _extend(self, batch: Batch, n: ArrayLike) -> int:
        """`extend`; leaves length + n in `batch.tokens`."""
        tokens, want, held, mask = batch.tokens, batch.want, batch.held, batch.mask
        self.length.take(batch.rows, None, tokens, "clip")
        np.add(tokens, self._reader.counts(n, batch.rows.size, "n"), tokens)
        np.add(tokens, self._round_up, want)
        np.right_shift(want, self._shift, want)
        self.blocks_held.take(batch.rows, None, held, "clip")
        np.greater(want, held, mask)
        short = mask.nonzero()[0]
        if not short.size:
            return 0
        one_each = type(n) is int and n <= self.block_size  # since capacity is never below length
        return self._grow(batch.rows[short], held[short], want[short], one_each)

    def _grow(self, rows: Index, held: Int32s, want: Int32s, one_each: bool) -> int:
        """Give `rows`, all short of blocks, the columns held .. want-1; every check comes before the first change."""
        if np.count_nonzero(want > self._columns):
            at = int(want.argmax())
            raise InvalidValue(
                f"row {rows[at]} of length {self.length[rows[at]]} would need {want[at]} blocks, but a row has "
                f"{self.max_blocks} ({self.max_tokens} tokens); close it or build with more max_blocks"
            )
        cell_rows, cell_columns = (rows, held.astype(np.intp)) if one_each else cells(rows, held, want)
        self.table.need_edits(cell_rows.size)
        ids = self.blocks.take(cell_rows.size)
        self.table.write(cell_rows, cell_columns, ids.astype(np.int32))
        self.blocks_held[rows] = want
        return cell_rows.size

    def _shorten(self, batch: Batch, n: ArrayLike, name: str) -> None:
        """Puts length - n into `batch.tokens`, refused where that is negative."""
        counts, tokens, mask = self._reader.counts(n, batch.rows.size, name), batch.tokens, batch.mask
        self.length.take(batch.rows, None, tokens, "clip")
        np.subtract(tokens, counts, tokens)
        np.less(tokens, _ZERO, mask)
        if np.count_nonzero(mask):
            row = int(batch.rows[mask.argmax()])
            over = self.length[row] - tokens[mask.argmax()]
            raise InvalidValue(f"{name} {over} is more than the {self.length[row]} tokens of row {row}")
