"""What a decode loop does with sequences: open, prefill, step, fork, append, rewind, close."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np
import numpy.typing as npt

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.engine import EngineShape, StepEngine
from graphkv.errors import InvalidValue, NotReady
from graphkv.loop.flight import Flight
from graphkv.loop.submit import Submitter
from graphkv.manager.prefix import EVERYONE, Content, Scope
from graphkv.manager.retention import Retention
from graphkv.manager.v2 import ManagerV2, RowState
from graphkv.manager.windowed import WindowedManager
from graphkv.rows import RowTokens
from graphkv.sequence import Batch, Sequence, SequenceCounts, StepResult, cut_into_chunks, token_array
from graphkv.tiers.copies import BlockCopies


class SequenceVerbs:
    """Sequences over a manager and an engine; the part of `DecodeRuntime` that every decode loop uses.

    Attributes:
        config: what the cache holds.
        next_n: query tokens a row and decode step.
        max_seq_len: tokens of the longest sequence.
        device: where all of it lives.
        manager: rows and blocks. For looking; the verbs here change them.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: Device,
        manager: ManagerV2,
        engine: StepEngine,
        shape: EngineShape,
        copies: BlockCopies,
        max_seq_len: int,
    ) -> None:
        self.config, self.device, self.manager = config, device, manager
        self.next_n, self.max_seq_len = shape.next_n, max_seq_len
        self._engine, self._prefill_chunk = engine, shape.prefill_chunk
        self._tokens = RowTokens(manager.token_ids)
        self._flight = Flight(engine, manager, self._tokens, shape.next_n)
        self._submitter = Submitter(engine, manager, self._tokens, self._flight, copies, shape, device)

    # sequences ------------------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: npt.ArrayLike,
        *,
        scope: Scope = EVERYONE,
        contents: AbstractSequence[Content] = (),
        retention: Retention = Retention(),  # noqa: B008 it is immutable
    ) -> Sequence:
        """Take a row for a sequence that begins with `tokens` (int [n], n >= 1). Nothing is computed yet.

        Blocks of other sequences that began alike are shared; `prefill` feeds only the rest. What of them is in colder
        tiers is being brought to the device: the sequence is *loading* then, and ready once `poll` saw it arrive.

        Args:
            scope, contents: what must agree besides tokens for blocks to be shared.
            retention: how long the sequence's blocks are worth keeping, see `Retention`.

        Raises:
            OutOfRows: all rows are open; close one.
            InvalidValue: no tokens, or more than max_seq_len.
        """
        prompt = token_array(tokens)
        if not 1 <= prompt.size <= self.max_seq_len:
            raise InvalidValue(
                f"a prompt of {prompt.size} tokens is not within 1 .. max_seq_len {self.max_seq_len}; shorten it or "
                "build the runtime with a larger max_seq_len"
            )
        rows = self.manager.stats()
        if not rows.rows_free and rows.rows_retiring:
            self.retire()
        self._submitter.reserve_edits(self.manager.max_blocks + prompt.size // self.config.block_size + 1)
        row = self.manager.open(tokens=prompt, scope=scope, contents=contents, retention=retention)
        self._tokens.start(row, prompt, int(self.manager.length[row]))
        self._flight.changed()
        return Sequence(self, row, int(self.manager.serial[row]))

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with all tokens of `sequence`: full blocks are shared, the partial one is copied.

        Both go on on their own. Waits for the steps in flight.

        Raises:
            OutOfRows, OutOfBlocks: nothing changed.
            NotReady: the sequence is not on the device.
            InvalidValue: it has tokens that no step has fed yet.
        """
        self._usable(sequence)
        row = sequence.row
        if not self._tokens.ready[row]:
            raise InvalidValue(f"{sequence} has tokens that no step has fed yet; prefill it before forking")
        self._submitter.reserve_edits(2 * self.manager.max_blocks)
        self.retire()
        child, length = self.manager.fork(row), int(self.manager.length[row])
        self._tokens.fork(row, child, length)
        self._flight.changed()
        return Sequence(self, child, int(self.manager.serial[child]))

    def append(self, sequence: Sequence, tokens: npt.ArrayLike) -> None:
        """Add tokens of the caller's to an open sequence; `prefill` feeds them. Waits for the steps in flight."""
        self._usable(sequence)
        more = token_array(tokens)
        self.retire()
        known = int(self._tokens.known[sequence.row])
        if more.size < 1 or known + more.size > self.max_seq_len:
            raise InvalidValue(
                f"appending {more.size} tokens to {known} is not within 1 .. max_seq_len {self.max_seq_len} in all"
            )
        self._tokens.append(sequence.row, more)
        self._flight.changed()

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Forget the last `tokens` tokens that were fed: the one at the new length is fed next.

        Blocks wholly past the new length are given up. Waits for the steps in flight.
        """
        self._usable(sequence)
        row = sequence.row
        if not self._tokens.ready[row]:
            raise InvalidValue(f"{sequence} has tokens that no step has fed yet; prefill it before rewinding")
        self._submitter.reserve_edits(self.manager.max_blocks + 1)
        self.retire()
        self.manager.rewind(np.array([row], np.int32), tokens, self._engine.submitted)
        self._tokens.rewound(row, int(self.manager.length[row]))
        self._flight.changed()

    def close(self, sequence: Sequence) -> None:
        """End a sequence in any state; its blocks and row are reused once what may touch them ended. Idempotent."""
        if not sequence.is_open:
            return
        self._owned(sequence)
        sequence.is_open = False
        self.manager.close(sequence.row, self._flight.close(sequence), sequence.serial)
        self._tokens.mark(sequence.row)
        self._flight.changed()

    def known_tokens(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """int32 [n], the tokens that the host knows of a sequence whose row is still its own."""
        return self._tokens.of(sequence.row)

    def state_of(self, sequence: Sequence) -> RowState:
        """Where a sequence's blocks are."""
        return self.manager.state(sequence.row) if sequence.is_open else RowState.CLOSED

    def counts_of(self, sequence: Sequence) -> SequenceCounts:
        """What became of the tokens and blocks of a sequence whose row is still its own."""
        return self._flight.counts_of(sequence)

    def _usable(self, sequence: Sequence) -> None:
        """`NotReady` or `InvalidValue` unless the sequence is one of this runtime's, and on the device."""
        self._owned(sequence)
        if not self.manager.is_ready[sequence.row]:
            self.manager.poll()
            if not self.manager.is_ready[sequence.row]:
                raise NotReady(str(sequence), sequence.state)

    def _owned(self, sequence: Sequence) -> None:
        if not sequence.is_open:
            raise InvalidValue(f"{sequence} is closed; open a new one")
        if not sequence.belongs_to(self):
            raise InvalidValue(f"{sequence} belongs to another runtime")

    # steps ----------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | AbstractSequence[Sequence]) -> int:
        """Submit one decode step of a batch and return its number at once; the step before may still be in flight.

        Pass the same `Batch` while the batch stays: a list is made into one every time.

        Raises:
            OutOfBlocks: the pools cannot hold next_n more tokens of every row; nothing changed.
            StaleFrame: an earlier step was refused by the device, see `resync`.
            NotReady: a sequence is not on the device.
            InvalidValue: a sequence is closed, not prefilled or at its greatest length, or the batch is too large.
        """
        if not isinstance(batch, Batch):
            batch = Batch(batch)
        if batch.era is not self._flight.era:
            self._check_batch(batch)
        return self._submitter.decode(batch)

    def _check_batch(self, batch: Batch) -> None:
        self._flight.raise_if_stale()
        if not len(batch):
            raise InvalidValue("a step needs at least one sequence, got none")
        for sequence in batch:
            self._usable(sequence)
        ready = self._tokens.ready[batch.rows]
        if not ready.all():
            raise InvalidValue(
                f"{batch.sequences[int((~ready).argmax())]} has tokens that no step has fed yet; prefill it first"
            )
        batch.era = self._flight.era

    def prefill(self, sequences: AbstractSequence[Sequence]) -> int:
        """Feed what the sequences hold and no step has fed yet, in ragged chunks of at most prefill_chunk tokens.

        Each sequence's next token is sampled by the chunk that ends it. Runs eagerly, asynchronously to the host.

        Returns:
            The number of the last chunk's step.

        Raises:
            OutOfBlocks: the pools cannot hold them all; nothing was fed.
            NotReady: a sequence is not on the device; nothing was fed.
            InvalidValue: a sequence is closed, or has nothing to feed.
        """
        batch = Batch(sequences)
        self._check_prompts(batch)
        start, target = self.manager.length[batch.rows].astype(np.int64), self._tokens.known[batch.rows]
        self._require_blocks(batch, target)
        step = 0
        for chunk in cut_into_chunks(batch, start, target, self._prefill_chunk, self._engine.graphs.buckets[-1]):
            step = self._submitter.prefill(chunk)
        return step

    def _check_prompts(self, batch: Batch) -> None:
        self._flight.raise_if_stale()
        if not len(batch):
            raise InvalidValue("prefill needs at least one sequence, got none")
        for sequence in batch:
            self._usable(sequence)
        if len(set(batch.rows.tolist())) < len(batch):
            raise InvalidValue(f"a sequence is named more than once in {list(batch.sequences)}")
        if self._tokens.ready[batch.rows].any():
            idle = batch.sequences[int(self._tokens.ready[batch.rows].argmax())]
            raise InvalidValue(f"{idle} has nothing to prefill; step it")

    def _require_blocks(self, batch: Batch, target: npt.NDArray[np.int64]) -> None:
        """Refuse a prefill that cannot end, before its first chunk."""
        missing = int((-(-target // self.config.block_size) - self.manager.blocks_held[batch.rows]).clip(0).sum())
        if not self.manager.blocks.available(missing):
            self.retire()
            self._submitter.find_room(lambda: self.manager.blocks.require(missing))
        if isinstance(self.manager, WindowedManager):
            self.manager.require_prefill(batch.rows, target, self._prefill_chunk)

    # results --------------------------------------------------------------------------------------------------------

    def results(self, step: int) -> StepResult:
        """Wait for a step and return what it brought.

        Raises:
            StaleFrame: the device refused the step's packet.
            DeviceFault: the model accepted more or fewer tokens than it was given.
            InvalidValue: the step was never submitted, or its results are older than the last `RESULTS_KEPT` steps.
        """
        return self._flight.results(step)

    def retire(self, step: int | None = None) -> None:
        """Wait until `step` (all submitted, by default) and those before are done: results are read, blocks freed."""
        self._flight.retire(step)

    def resync(self) -> None:
        """After a StaleFrame: wait for everything, then give the device the host's step, tables, lengths and tokens.

        Steps that the device refused count as never submitted: their sequences are as before them.
        """
        self._flight.resync()
