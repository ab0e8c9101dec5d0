"""The packet: all that the host tells the device about one step, as int32 words in one contiguous piece.

    header [16] | records [rows, 4] | edits [edits, 3] | tokens [token_words]

The sections follow each other without gaps, so a packet costs the bytes it uses. The checksum is a position-weighted
sum: the weights are odd, hence invertible modulo 2**32, so any single changed word changes it, and a packet that is
part old, part new is found out before the latch writes a byte. `cuda/latch.cu` and `graphkv.latch` read this layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphkv.errors import InvalidValue

Int32Array = npt.NDArray[np.int32]

HEADER_WORDS = 16
RECORD_WORDS = 4
EDIT_WORDS = 3

# header words
STEP, CHECKSUM, ROWS, TOKENS, EDITS, TOKEN_WORDS, BUCKET = range(7)
# record words: the row, its first token in the step, what becomes of its length first, its first supplied token
ROW, QUERY_START, LENGTH_EDIT, TOKEN_OFFSET = range(RECORD_WORDS)
# edit words
EDIT_ROW, EDIT_COLUMN, EDIT_BLOCK = range(EDIT_WORDS)

KEEP_LENGTH = -1
"""Length edit "none". A value >= 0 sets the row's length; a value v < -1 takes off -v - 1 tokens (a rewind)."""

STEP_MASK = 2**31 - 1
"""Step numbers rise without end on the host; packets, the device and the ring carry them modulo 2**31."""

DEVICE_TOKENS = -1
"""Token offset "none": the row's query tokens are the ones the last step left on the device."""


@dataclass(frozen=True, slots=True)
class PacketSize:
    """Capacity of a packet.

    Attributes:
        rows: most batch rows a step.
        edits: most block-table cells a step can change.
        tokens: most tokens a step can be given by the host.
    """

    rows: int
    edits: int
    tokens: int

    @property
    def words(self) -> int:
        """int32 words of a full packet, rounded up to 16 bytes so that it can be moved in 16-byte pieces."""
        used = HEADER_WORDS + RECORD_WORDS * self.rows + EDIT_WORDS * self.edits + self.tokens
        return -(-used // 4) * 4


def checksum_weights(words: int) -> npt.NDArray[np.uint32]:
    """Weight of each word in the checksum: 2i + 1."""
    return (2 * np.arange(words, dtype=np.uint32) + 1).astype(np.uint32)


@dataclass(slots=True)
class PacketWriter:
    """Writes packets into one frame's host arena, `words` (int32 [PacketSize.words]).

    The records of a batch that only decodes change little from step to step, so their constant columns are written
    once for each batch size and kept while the size stays.
    """

    words: Int32Array
    size: PacketSize
    _records: Int32Array = field(init=False)
    _plain_rows: int = field(init=False, default=-1)
    _plain_query: int = field(init=False, default=-1)
    _weights: npt.NDArray[np.uint32] = field(init=False)
    _unsigned: npt.NDArray[np.uint32] = field(init=False)
    _used: int = field(init=False, default=HEADER_WORDS)

    def __post_init__(self) -> None:
        if self.words.dtype != np.int32 or self.words.shape != (self.size.words,):
            raise InvalidValue(f"a packet needs int32 [{self.size.words}], got {self.words.dtype} {self.words.shape}")
        end = HEADER_WORDS + RECORD_WORDS * self.size.rows
        self._records = self.words[HEADER_WORDS:end].reshape(self.size.rows, RECORD_WORDS)
        self._weights = checksum_weights(self.size.words)
        self._unsigned = self.words.view(np.uint32)

    def records(self, rows: Int32Array, query_len: int) -> Int32Array:
        """Write the records of a batch whose rows each feed `query_len` device tokens; int32 [rows, 4] to amend."""
        count = rows.shape[0]
        records = self._records[:count]
        if self._plain_rows != count or self._plain_query != query_len:
            records[:, QUERY_START] = np.arange(count, dtype=np.int32) * query_len
            records[:, LENGTH_EDIT] = KEEP_LENGTH
            records[:, TOKEN_OFFSET] = DEVICE_TOKENS
            self._plain_rows, self._plain_query = count, query_len
        records[:, ROW] = rows
        return records

    def amended(self) -> None:
        """The records returned last were changed in more than their rows; write them whole next time."""
        self._plain_rows = -1

    def edits(self, rows: int, count: int) -> Int32Array:
        """int32 [count, 3] (row, column, block id) behind the records of `rows` rows, to be filled."""
        start = HEADER_WORDS + RECORD_WORDS * rows
        if rows < self.size.rows:
            self._plain_rows = min(self._plain_rows, rows)  # the edits overwrite constant columns of further records
        return self.words[start : start + EDIT_WORDS * count].reshape(count, EDIT_WORDS)

    def tokens(self, rows: int, edits: int, count: int) -> Int32Array:
        """int32 [count] supplied tokens behind the edits, to be filled."""
        start = HEADER_WORDS + RECORD_WORDS * rows + EDIT_WORDS * edits
        self._plain_rows = min(self._plain_rows, rows)
        return self.words[start : start + count]

    def seal(self, step: int, *, rows: int, tokens: int, edits: int, token_words: int, bucket: int) -> int:
        """Write header and checksum; returns the bytes used, rounded up to 16."""
        words = self.words
        words[STEP] = step & STEP_MASK
        words[CHECKSUM] = 0
        words[ROWS] = rows
        words[TOKENS] = tokens
        words[EDITS] = edits
        words[TOKEN_WORDS] = token_words
        words[BUCKET] = bucket
        used = HEADER_WORDS + RECORD_WORDS * rows + EDIT_WORDS * edits + token_words
        self._unsigned[CHECKSUM] = np.dot(self._unsigned[:used], self._weights[:used])
        return -(-used // 4) * 16
