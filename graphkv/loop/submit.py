"""How a step is put together: room for its tokens, the packet that describes it, the copies it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

import numpy as np
import numpy.typing as npt

from graphkv import packet as pk
from graphkv.device import Device
from graphkv.engine import EngineShape, StepEngine
from graphkv.errors import OutOfBlocks
from graphkv.frames import Frame
from graphkv.loop.flight import IDLE, Flight, Job
from graphkv.manager.v2 import ManagerV2
from graphkv.rows import RowTokens
from graphkv.sequence import Batch, Chunk
from graphkv.tiers.copies import BlockCopies, independent_moves
from graphkv.transfer import CopyJob

_INDEXED_A_STEP = 64
"""Rows, at most, whose full blocks become findable behind one launch: all rows of a batch may fill one at once."""
_PATIENCE_S = 1.0  # for copies to host memory, which take milliseconds
_NAP = 0.0001


class Submitter:
    """Submits steps of batches that were found fit.

    Args:
        tokens: what the host knows of each row's tokens.
        flight: where submitted steps go.
        copies: carries out copies within the device.
    """

    def __init__(
        self,
        engine: StepEngine,
        manager: ManagerV2,
        tokens: RowTokens,
        flight: Flight,
        copies: BlockCopies,
        shape: EngineShape,
        device: Device,
    ) -> None:
        self._engine, self._manager, self._tokens, self._flight = engine, manager, tokens, flight
        self._copies, self._device = copies, device
        self._next_n, self._block_size = shape.next_n, copies.block_size
        # What the steps in flight may add to the journal when they retire, in each layer group.
        self._edits_apart = 2 * manager.max_rows + 2 * shape.chunk_blocks
        self._groups = manager.num_groups

    def decode(self, batch: Batch) -> int:
        """Submit a decode step; its number. `OutOfBlocks` with nothing changed."""
        bucket = self._engine.graphs.bucket_for(len(batch))
        frame = self._make_room(batch, self._next_n, 2 * len(batch))
        records = frame.writer.records(batch.rows, self._next_n)
        supplied = None
        if self._tokens.marked:
            supplied = self._tokens.take_marks(batch.rows, records, self._next_n)
            frame.writer.amended()
        packet = self._seal(frame, bucket, len(batch), len(batch) * self._next_n, supplied)
        return self._note(self._engine.submit_decode(packet, bucket), Job(batch, self._next_n, None), begin=True)

    def prefill(self, chunk: Chunk) -> int:
        """Submit a step of prompt tokens; its number. `OutOfBlocks` with nothing changed."""
        batch, rows, counts = chunk.batch, chunk.batch.rows, chunk.counts
        total, ends = int(counts.sum()), chunk.begins + counts
        frame = self._make_room(batch, counts, total // self._block_size + 2 * len(batch))
        records = frame.writer.records(rows, 0)
        records[:, pk.QUERY_START] = records[:, pk.TOKEN_OFFSET] = np.cumsum(counts) - counts
        self._tokens.take_length_edits(rows, records)
        frame.writer.amended()
        spans = zip(rows.tolist(), chunk.begins.tolist(), ends.tolist(), strict=True)
        supplied = np.concatenate([self._tokens.span(*span) for span in spans])
        emits = ends == self._tokens.known[rows]
        packet = self._seal(frame, len(batch), len(batch), total, supplied)
        max_context = -(-int(ends.max()) // self._block_size) * self._block_size
        step = self._engine.submit_prefill(packet, len(batch), total, max_context)
        self._tokens.ready[rows] = emits
        self._flight.changed()
        return self._note(step, Job(batch, counts, emits, ends))

    def reserve_edits(self, edits: int) -> None:
        """See that the journal takes `edits` more, whatever the steps in flight bring when they retire.

        A full one is brought to the device by a step of padded rows.
        """
        if self._manager.edits_room < self._groups * (edits + self._edits_apart):
            frame, bucket = self.acquire(), self._engine.graphs.buckets[0]
            self._note(self._engine.submit_decode(self._seal(frame, bucket, 0, 0, None), bucket), IDLE)

    def acquire(self) -> Frame:
        """The next step's frame, once the step that last used it has retired: the one wait of a step."""
        frame = self._engine.next_frame
        if frame.step > self._engine.retired:
            self._flight.retire(frame.step)
        return frame

    def copy(self, jobs: AbstractSequence[CopyJob]) -> None:
        """Put copies on the steps' stream, before the next step."""
        with self._device.running_on(self._engine.stream):
            for group in sorted({job.group for job in jobs}):
                for moves in independent_moves([job for job in jobs if job.group == group]):
                    self._copies.within(moves, group)

    def copy_now(self) -> None:
        """Put what copies are pending on the steps' stream, without a step.

        Their blocks are in nobody's way from here on: steps, copies and transfers that touch them come later on that
        stream, or wait for it.
        """
        if self._manager.copies_pending:
            self.copy(self._manager.take_copies(0))

    def _make_room(self, batch: Batch, n: int | npt.NDArray[np.int32], edits: int) -> Frame:
        """Claim n more tokens of every row of the batch, or of none; the frame to describe the step in."""
        self.reserve_edits(edits)
        frame = self.acquire()
        try:
            self._manager.claim(batch.rows, n)
        except OutOfBlocks as short:
            if short.group:  # what is stale in its window is free once the steps in flight have retired
                self._flight.retire()
            self.find_room(lambda: self._manager.claim(batch.rows, n))
        return frame

    def find_room(self, take: Callable[[], object]) -> None:
        """`take` was short of blocks: call it again, since transfers that ended may have freed some.

        Those that only give cached blocks a copy elsewhere, and hold them until then, are waited for: they are no
        reason to refuse what would have fitted without them.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self._manager.poll(begin=False)
            try:
                take()
                return
            except OutOfBlocks:
                if not self._manager.is_clearing or time.monotonic() > deadline:
                    raise
            time.sleep(_NAP)

    def end_clearing(self) -> None:
        """Wait for transfers that nobody asked for and that hold blocks of the device, but not for long."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._manager.is_clearing and time.monotonic() <= deadline:
            self._manager.poll(begin=False)
            time.sleep(_NAP)

    def _seal(self, frame: Frame, bucket: int, rows: int, tokens: int, supplied: pk.Int32Array | None) -> int:
        """Put edits and supplied tokens behind the frame's records and close the packet; its bytes."""
        edits = self._manager.edits_pending
        if edits:
            self._manager.take_edits(frame.writer.edits(rows, edits))
        token_words = 0
        if supplied is not None:
            token_words = supplied.shape[0]
            frame.writer.tokens(rows, edits, token_words)[:] = supplied
        step = self._engine.submitted + 1
        if self._manager.copies_pending:
            self.copy(self._manager.take_copies(step))
        return frame.writer.seal(step, rows=rows, tokens=tokens, edits=edits, token_words=token_words, bucket=bucket)

    def _note(self, step: int, job: Job, begin: bool = False) -> int:
        """Keep what a step was asked to do. While it runs, there is time for what need not be done before it.

        Args:
            begin: whether transfers that nobody asked for may begin: not between the chunks of a prefill, which has
                been promised the blocks that they would hold.
        """
        self._flight.note(step, job)
        self._manager.submitted = step
        self._manager.index_commits(_INDEXED_A_STEP)
        if self._manager.has_colder_tiers:
            self._manager.poll(begin=begin)
        return step
