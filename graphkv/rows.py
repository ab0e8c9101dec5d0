"""What the host knows of each row's tokens, and what the next packet must tell the device about the row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphkv import packet as pk

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class RowTokens:
    """Known tokens by row, and pending row edits.

    A row is *ready* for decode when all its known tokens but the last have been fed: the last is its next query token,
    which the device holds as well, unless the row is marked to be supplied.

    Attributes:
        known: int64 [rows], tokens of each row that the host knows.
        ready: bool [rows].

    Args:
        tokens: int32 [rows, most tokens of a row], where they are written.
    """

    def __init__(self, tokens: Int32Array) -> None:
        rows = tokens.shape[0]
        self.known = np.zeros(rows, np.int64)
        self.ready = np.zeros(rows, np.bool_)
        self._tokens = tokens
        self._length_edit = np.full(rows, pk.KEEP_LENGTH, np.int32)
        self._supply = np.zeros(rows, np.bool_)
        self.marked = 0
        """Rows with something to tell; 0 in steady decode, which then skips them all."""

    def start(self, row: int, prompt: Int32Array, length: int) -> None:
        """A sequence of `prompt` begins in `row`, the first `length` tokens of which need not be fed."""
        self._tokens[row, : prompt.size] = prompt
        self.known[row] = prompt.size
        self.ready[row] = False
        self.mark(row, length_edit=length)

    def fork(self, row: int, child: int, length: int) -> None:
        """`child` begins with what is known of `row`, all of which but the last token has been fed."""
        self._tokens[child, : length + 1] = self._tokens[row, : length + 1]
        self.known[child] = length + 1
        self.ready[child] = True
        self.mark(child, length_edit=length, supply=True)

    def append(self, row: int, tokens: Int32Array) -> None:
        """Tokens of the caller's behind the known ones, to be prefilled."""
        known = int(self.known[row])
        self._tokens[row, known : known + tokens.size] = tokens
        self.known[row] = known + tokens.size
        self.ready[row] = False

    def rewound(self, row: int, length: int) -> None:
        """The row's length went back to `length`; the known token at that position is fed next."""
        self.known[row] = length + 1
        self.mark(row, length_edit=length, supply=True)

    def of(self, row: int) -> Int32Array:
        """int32 [known], a copy."""
        return self._tokens[row, : self.known[row]].copy()

    def span(self, row: int, begin: int, end: int) -> Int32Array:
        return self._tokens[row, begin:end]

    def mark(self, row: int, *, length_edit: int = pk.KEEP_LENGTH, supply: bool = False) -> None:
        """Set what the next packet tells about the row; the defaults mean nothing."""
        before = self._length_edit[row] != pk.KEEP_LENGTH or self._supply[row]
        self._length_edit[row], self._supply[row] = length_edit, supply
        self.marked += int(length_edit != pk.KEEP_LENGTH or supply) - int(before)

    def take_length_edits(self, rows: Int32Array, records: pk.Int32Array) -> None:
        """Move the rows' length edits into their records; nothing remains marked for these rows."""
        records[:, pk.LENGTH_EDIT] = self._length_edit[rows]
        for row in rows.tolist():
            self.mark(row)

    def take_marks(self, rows: Int32Array, records: pk.Int32Array, next_n: int) -> Int32Array | None:
        """Like `take_length_edits`; returns the query tokens to supply, next_n for each row that needs them."""
        named = np.flatnonzero(self._supply[rows])
        records[named, pk.TOKEN_OFFSET] = np.arange(named.size) * next_n
        self.take_length_edits(rows, records)
        if not named.size:
            return None
        # The row's next token, then itself as its own draft: any token is a lawful draft.
        return np.repeat(self._tokens[rows[named], self.known[rows[named]] - 1], next_n)

    def learn(self, rows: Int32Array, tokens: Int32Array, counts: Int32Array) -> None:
        """Results came: tokens [B, n] of which the first counts[i] of row i are new."""
        known = self.known[rows]
        if tokens.shape[1] == 1:
            self._tokens[rows, known] = tokens[:, 0]
        else:
            for column in range(tokens.shape[1]):
                more = counts > column
                self._tokens[rows[more], known[more] + column] = tokens[more, column]
        self.known[rows] = known + counts

    def check(self) -> None:
        """`AssertionError` if the count of marked rows is off."""
        marked = int(((self._length_edit != pk.KEEP_LENGTH) | self._supply).sum())
        if marked != self.marked:
            raise AssertionError(f"{marked} rows have something to tell the device, {self.marked} are counted")
