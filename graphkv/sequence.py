"""What the caller holds: a sequence, a batch of them, a step's results. The state is in the runtime's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from graphkv.errors import InvalidValue

if TYPE_CHECKING:
    from graphkv.manager.moving_rows import RowState

Int32Array = npt.NDArray[np.int32]


class RowLengths(Protocol):
    """A manager, as far as a sequence asks it."""

    length: Int32Array  # [max_rows]


class SequenceCounts(NamedTuple):
    """What became of one request's tokens and blocks.

    Attributes:
        cached: tokens that were found cached when it was opened (or shared when it was forked), by the tier in which
            they were: the device, then the colder ones.
        recomputed: tokens of its prompt that were found as well and had to be computed all the same: there was no room
            for them, their copy was bad, or they are a part of a block in a colder tier, which is brought whole or not.
            The last token of a prompt is always computed and never among them.
        blocks_moved: blocks that transfers brought to another tier on its behalf.
    """

    cached: tuple[int, ...] = (0,)
    recomputed: int = 0
    blocks_moved: int = 0


class SequenceOwner(Protocol):
    """What makes sequences and knows their state: the runtime, or the V1 runner."""

    @property
    def manager(self) -> RowLengths: ...

    def known_tokens(self, sequence: Sequence) -> Int32Array:
        """int32 [n], the tokens that the host knows of an open sequence."""

    def state_of(self, sequence: Sequence) -> RowState:
        """Whether a sequence can be stepped, and if not, why."""

    def counts_of(self, sequence: Sequence) -> SequenceCounts:
        """What became of the tokens and blocks of a sequence whose row is still its own."""


class Sequence:
    """Token ids and blocks of one request, in one row for its whole life. Made by `DecodeRuntime.open`."""

    __slots__ = ("_final", "_runtime", "is_open", "row", "serial")

    def __init__(self, runtime: SequenceOwner, row: int, serial: int) -> None:
        self._runtime = runtime
        self.row = row
        self.serial = serial
        self.is_open = True
        self._final: tuple[Int32Array, SequenceCounts] | None = None

    @property
    def tokens(self) -> Int32Array:
        """int32 [n], a copy of the prompt and of all tokens sampled in steps that have retired.

        Of a closed sequence too, the steps that were in flight when it was closed included.
        """
        return self._runtime.known_tokens(self) if self._final is None else self._final[0].copy()

    @property
    def counts(self) -> SequenceCounts:
        """What became of its tokens and blocks so far; still readable when it is closed."""
        return self._runtime.counts_of(self) if self._final is None else self._final[1]

    @property
    def cached_tokens(self) -> int:
        """Tokens that were found cached when the sequence was opened, or shared when it was forked.

        Of one that is loading, those that were on the device; the others count once they are there.
        """
        return sum(self.counts.cached)

    @property
    def state(self) -> RowState:
        """Where its blocks are. Only what is ready can be stepped, prefilled, forked, rewound or suspended."""
        return self._runtime.state_of(self)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def length(self) -> int:
        """Tokens whose KV is valid once the submitted steps ran (at most, where a step may accept fewer)."""
        return int(self._runtime.manager.length[self.row]) if self.is_open else 0

    def belongs_to(self, runtime: SequenceOwner) -> bool:
        return self._runtime is runtime

    def keep(self, tokens: Int32Array, counts: SequenceCounts) -> None:
        """The runtime is about to give the row to another sequence; these stay readable."""
        self._final = tokens, counts

    def __repr__(self) -> str:
        state = "" if self.is_ready else f", {self.state}"
        return f"Sequence(row={self.row}, length={self.length}{state})"


class Batch:
    """Sequences to step together, as the arrays a step needs. Make it once and step it while the batch stays.

    Attributes:
        sequences: distinct open sequences of one runtime, in batch order.
        rows: int32 [B], their rows.
        serials: int64 [B], their rows' serials.
    """

    __slots__ = ("era", "rows", "sequences", "serials")

    def __init__(self, sequences: AbstractSequence[Sequence]) -> None:
        self.sequences = tuple(sequences)
        self.rows = np.fromiter((sequence.row for sequence in self.sequences), np.int32, len(self.sequences))
        self.serials = np.fromiter((sequence.serial for sequence in self.sequences), np.int64, len(self.sequences))
        self.era: object = None  # the runtime's era in which this batch was last found fit to step

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one retired step brought.

    Attributes:
        step: its number.
        sequences: its batch.
        accepted: int32 [B], query tokens each sequence kept.
        tokens: int32 [B, next_n], new tokens of each sequence (accepted drafts, then the sampled one), -1 padded. All
            -1 for a sequence whose prompt the step did not finish.
    """

    step: int
    sequences: tuple[Sequence, ...]
    accepted: Int32Array
    tokens: Int32Array


def token_array(tokens: npt.ArrayLike) -> Int32Array:
    """int32 [n] of the caller's token ids; `InvalidValue` for anything that is no list of integers."""
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidValue(f"tokens must be a one-dimensional array of integers, got {given.dtype} {given.shape}")
    return given.astype(np.int32)


class Chunk(NamedTuple):
    """One prefill step: of each sequence, the tokens begins[i] .. begins[i] + counts[i] - 1."""

    batch: Batch
    begins: npt.NDArray[np.int64]
    counts: Int32Array


def cut_into_chunks(
    batch: Batch,
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    most_tokens: int,
    most_rows: int,
) -> list[Chunk]:
    """Cut tokens begins[i] .. ends[i] - 1 of each sequence into steps, in order, as full as they can be."""
    steps: list[list[tuple[Sequence, int, int]]] = [[]]
    room = most_tokens
    for sequence, begin, end in zip(batch, begins.tolist(), ends.tolist(), strict=True):
        while begin < end:
            if not room or len(steps[-1]) == most_rows:
                steps.append([])
                room = most_tokens
            count = min(room, end - begin)
            steps[-1].append((sequence, begin, count))
            begin += count
            room -= count
    return [
        Chunk(
            Batch([sequence for sequence, _, _ in step]),
            np.array([begin for _, begin, _ in step], np.int64),
            np.array([count for _, _, count in step], np.int32),
        )
        for step in steps
    ]
