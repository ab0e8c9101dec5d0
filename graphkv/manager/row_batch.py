"""Batches of rows as callers give them: checked once, then recognised by their bytes while the same rows come again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphkv.errors import InvalidValue
from graphkv.manager.blocks import Index, Int32s

_I32 = np.dtype(np.int32)


class Batch(NamedTuple):
    """A validated batch of distinct usable rows, with scratch of its size; kept while the same rows come again."""

    rows: Index
    tokens: Int32s
    want: Int32s
    held: Int32s
    mask: NDArray[np.bool_]

    @classmethod
    def empty(cls, size: int) -> Batch:
        tokens, want, held = np.empty((3, size), np.int32)
        return cls(np.empty(size, np.intp), tokens, want, held, np.empty(size, np.bool_))

    def of(self, rows: Index) -> Batch:
        """The front part of this scratch, with a copy of `rows`."""
        self.rows[: rows.size] = rows
        return Batch._make(array[: rows.size] for array in self)


class BatchReader:
    """Checks batches of rows and counts for them.

    Args:
        is_open, usable: bool [max_rows] each, of the manager: rows of a sequence, and rows that a step may name.
        max_tokens: of a row.
    """

    def __init__(self, is_open: NDArray[np.bool_], usable: NDArray[np.bool_], max_tokens: int) -> None:
        self._is_open, self._usable, self.max_tokens = is_open, usable, max_tokens
        self.max_rows = is_open.size
        self._scratch = self._batch = Batch.empty(self.max_rows)
        self._key: bytes | None = None  # the batch's rows as int32 bytes, since callers reuse their arrays
        self._position = np.empty(self.max_rows, np.intp)
        self._n = np.array(0, np.int32)  # an array, since a Python int as an operand costs NumPy half a microsecond

    def forget(self) -> None:
        """A row became unusable: the batch that was checked last may name it."""
        self._key = None

    def of(self, rows: ArrayLike) -> Batch:
        """The validated batch of `rows`; only a comparison of bytes when they are those of the last call."""
        if self._is_last(rows):
            return self._batch
        index = self.index(rows)
        order = np.arange(index.size)
        self._position[index] = order
        if (repeated := self._position[index] != order).any():
            raise InvalidValue(f"row {index[repeated][0]} is named more than once in a batch of {index.size} rows")
        if not self._usable[index].all():
            row = int(index[~self._usable[index]][0])
            raise InvalidValue(
                f"row {row} is suspended or being brought in; resume it and poll until it is ready"
                if self._is_open[row]
                else f"row {row} is closed; only open rows can be named"
            )
        self._batch, self._key = self._scratch.of(index), index.astype(np.int32).tobytes()
        return self._batch

    def _is_last(self, rows: ArrayLike) -> bool:
        return isinstance(rows, np.ndarray) and rows.dtype == _I32 and rows.ndim == 1 and rows.tobytes() == self._key

    def index(self, rows: ArrayLike) -> Index:
        """`rows` as indices within range; they may repeat or be closed. For reading, until the next call."""
        if self._is_last(rows):
            return self._batch.rows
        given = np.asarray(rows)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidValue(f"rows must be a one-dimensional array of integers, got {given.dtype} {given.shape}")
        index: Index = given.astype(np.intp)
        if index.size and index.view(np.uintp).max() >= self.max_rows:  # one pass: a negative row is a huge one
            bad = index[(index < 0) | (index >= self.max_rows)][0]
            raise InvalidValue(f"row {bad} is out of range 0 .. {self.max_rows - 1}")
        return index

    def counts(self, n: ArrayLike, size: int, name: str) -> Int32s:
        """`n` as int32 [] or [size], within 0 .. max_tokens."""
        if type(n) is int and 0 <= n <= self.max_tokens:
            self._n[...] = n
            return self._n
        given = np.asarray(n)
        if given.dtype.kind not in "iu" or given.shape not in ((), (size,)):
            raise InvalidValue(
                f"{name} must be an integer or one for each of {size} rows, got {given.dtype} {given.shape}"
            )
        if given.size and given.astype(np.uint64).max() > self.max_tokens:  # one pass: a negative count is a huge one
            raise InvalidValue(
                f"{name} must be within 0 .. {self.max_tokens} tokens, as a row is; got {given.min()} .. {given.max()}"
            )
        return given.astype(np.int32)


def cells(rows: Index, start: Int32s, stop: Int32s) -> tuple[Index, Index]:
    """(row, column) of the cells in columns start .. stop-1 of each row, row after row."""
    counts = stop - start
    first = np.cumsum(counts) - counts
    columns = np.arange(int(counts.sum())) - np.repeat(first - start, counts)
    return np.repeat(rows, counts), columns
