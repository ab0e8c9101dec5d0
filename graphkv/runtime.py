"""The decode runtime: sequences in, captured steps out, results back. The one module that knows all the parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from graphkv import packet as pk
from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.engine import EngineShape, Mode, RawResult, StepEngine
from graphkv.errors import DeviceFault, InvalidValue, OutOfBlocks, StaleFrame
from graphkv.frames import Frame, Upload
from graphkv.layout import Side
from graphkv.manager.prefix import EVERYONE, Content, Scope
from graphkv.manager.retention import Retention
from graphkv.manager.windowed import WindowedManager, build_manager
from graphkv.metadata import StepMetadata
from graphkv.pool import NULL_BLOCK, Pools
from graphkv.rows import RowTokens
from graphkv.sequence import Batch, Chunk, Sequence, StepResult, cut_into_chunks, token_array
from graphkv.stats import RuntimeStats
from graphkv.step import StepModel
from graphkv.tiers.copies import BlockCopies, independent_moves
from graphkv.transfer import DEVICE, CopyJob
from graphkv.window_sizing import GroupLoad, choose_blocks

RESULTS_KEPT = 64
"""Results of that many last steps stay readable; tokens of older ones are in their sequences."""


@dataclass(slots=True)
class _Job:
    """What a submitted step was asked to do, kept until it retires."""

    batch: Batch
    credited: int | npt.NDArray[np.int32]  # tokens that submission added to each length
    emits: npt.NDArray[np.bool_] | None  # rows whose sampled token counts; None: a decode step, all of them
    ends: npt.NDArray[np.int64] | None = None  # tokens of each sequence that were fed by then; None: all known but one


_IDLE = _Job(Batch(()), 0, None)


class DecodeRuntime:
    """Decodes batches of sequences through graphs captured once a bucket.

    Args:
        config: what the cache holds.
        model: the model's part of a step, see `StepModel`.
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:N".
        max_rows: sequences open at once.
        max_seq_len: tokens of the longest sequence; the block table also reserves the columns that next_n can reach.
        num_blocks, memory_bytes: size of the pools, by blocks (null block included) or by a budget for their bytes;
            give one of them. With windows num_blocks is that of the layers without one.
        window_blocks: blocks of each layer group with a window (null block included), for num_blocks; by default so
            many that no step lacks any.
        rewind_room: tokens behind the windows that stay readable, see `WindowedManager`.
        buckets: batch sizes to capture; by default powers of two up to max_rows, and max_rows.
        next_n: query tokens a row and decode step (1 + draft tokens).
        prefill_chunk: most prompt tokens a prefill step.
        mode: "graph" captures the decode step; "eager" runs the same function for every step, for comparison.
        upload: how packets reach the device, see `graphkv.frames.Upload`.
        prefix_caching: whether sequences that begin alike share blocks. The blocks of closed sequences then stay
            cached until their room is needed.
        event_capacity, self_check: see `ManagerV2`.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: StepModel,
        *,
        device: Device | torch.device | str = "auto",
        max_rows: int,
        max_seq_len: int,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        window_blocks: AbstractSequence[int] | None = None,
        rewind_room: int = 0,
        buckets: AbstractSequence[int] | None = None,
        next_n: int = 1,
        prefill_chunk: int = 512,
        mode: Mode = "graph",
        upload: Upload = "copy",
        prefix_caching: bool = True,
        event_capacity: int = 0,
        self_check: bool = False,
    ) -> None:
        shape = EngineShape.of(
            config,
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            buckets=buckets,
            next_n=next_n,
            prefill_chunk=prefill_chunk,
        )
        load = GroupLoad(
            rows=max_rows,
            longest=max_seq_len,
            next_n=next_n,
            prefill_chunk=prefill_chunk,
            rewind_room=rewind_room,
        )
        num_blocks, *window_blocks = choose_blocks(config, num_blocks, memory_bytes, window_blocks, load)
        self.config, self.next_n, self.max_seq_len = config, next_n, max_seq_len
        self.device = Device.of(device)
        self.manager = build_manager(
            [window for window in config.groups if window is not None],
            window_blocks,
            rewind_room,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_rows=max_rows,
            max_blocks=shape.max_blocks,
            max_edits=shape.max_edits,
            prefix_caching=prefix_caching,
            event_capacity=event_capacity,
            self_check=self_check,
        )
        self._prefill_chunk = prefill_chunk
        self._chunk_blocks = shape.chunk_blocks
        self._groups = len(config.groups)
        self._tokens = RowTokens(self.manager.token_ids)
        self._jobs: dict[int, _Job] = {}
        self._closing: dict[int, list[Sequence]] = {}  # closed with steps in flight, by the last of these
        self._results: OrderedDict[int, StepResult] = OrderedDict()
        self._stale: StaleFrame | None = None
        self._era = object()  # another one after each change that can make a batch unfit to step
        with self.device.guard():
            self.pools = Pools(config, num_blocks, self.device, window_blocks=window_blocks)
            self._engine = StepEngine(config, self.pools, model, shape, self.device, mode, upload)
            self._engine.warm_up()
            self._copies = BlockCopies(self.pools, None, self.device, "kernel", 0)
            one = (DEVICE, NULL_BLOCK, DEVICE, NULL_BLOCK + 1, config.block_size)
            self._copy([CopyJob(*one, group) for group in range(self._groups)])  # what it needs is compiled now

    # sequences ----------------------------------------------------------------------------------------------------

    def open(
        self,
        tokens: npt.ArrayLike,
        *,
        scope: Scope = EVERYONE,
        contents: AbstractSequence[Content] = (),
        retention: Retention = Retention(),  # noqa: B008 it is immutable
    ) -> Sequence:
        """Take a row for a sequence that begins with `tokens` (int [n], n >= 1). Nothing is computed yet.

        Blocks of other sequences that began alike are shared; `prefill` feeds only the rest.

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
        self._reserve_edits(self.manager.max_blocks + prompt.size // self.config.block_size + 1)
        row = self.manager.open(tokens=prompt, scope=scope, contents=contents, retention=retention)
        cached = int(self.manager.length[row])
        self._tokens.start(row, prompt, cached)
        self._era = object()
        return Sequence(self, row, int(self.manager.serial[row]), cached)

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with all tokens of `sequence`: full blocks are shared, the partial one is copied.

        Both go on on their own. Waits for the steps in flight.

        Raises:
            OutOfRows, OutOfBlocks: nothing changed.
            InvalidValue: the sequence has tokens that no step has fed yet.
        """
        self._owned(sequence)
        row = sequence.row
        if not self._tokens.ready[row]:
            raise InvalidValue(f"{sequence} has tokens that no step has fed yet; prefill it before forking")
        self._reserve_edits(2 * self.manager.max_blocks)
        self.retire()
        child, length = self.manager.fork(row), int(self.manager.length[row])
        self._tokens.fork(row, child, length)
        self._era = object()
        return Sequence(self, child, int(self.manager.serial[child]), length)

    def append(self, sequence: Sequence, tokens: npt.ArrayLike) -> None:
        """Add tokens of the caller's to an open sequence; `prefill` feeds them. Waits for the steps in flight."""
        self._owned(sequence)
        more = token_array(tokens)
        self.retire()
        known = int(self._tokens.known[sequence.row])
        if more.size < 1 or known + more.size > self.max_seq_len:
            raise InvalidValue(
                f"appending {more.size} tokens to {known} is not within 1 .. max_seq_len {self.max_seq_len} in all"
            )
        self._tokens.append(sequence.row, more)
        self._era = object()

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Forget the last `tokens` tokens that were fed: the one at the new length is fed next.

        Blocks wholly past the new length are given up. Waits for the steps in flight.
        """
        self._owned(sequence)
        row = sequence.row
        if not self._tokens.ready[row]:
            raise InvalidValue(f"{sequence} has tokens that no step has fed yet; prefill it before rewinding")
        self._reserve_edits(self.manager.max_blocks + 1)
        self.retire()
        self.manager.rewind(np.array([row], np.int32), tokens, self._engine.submitted)
        self._tokens.rewound(row, int(self.manager.length[row]))
        self._era = object()

    def close(self, sequence: Sequence) -> None:
        """End a sequence; its blocks and row are reused once the steps that may touch them retired. Idempotent."""
        if not sequence.is_open:
            return
        self._owned(sequence)
        sequence.is_open = False
        last = self._engine.submitted
        if last > self._engine.retired:  # its last results are still to come, and its row is its own until then
            self._closing.setdefault(last, []).append(sequence)
        else:
            sequence.keep(self._tokens.of(sequence.row))
        self.manager.close(sequence.row, last, sequence.serial)
        self._tokens.mark(sequence.row)
        self._era = object()

    def known_tokens(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """int32 [n], the tokens that the host knows of a sequence whose row is still its own."""
        return self._tokens.of(sequence.row)

    def _owned(self, sequence: Sequence) -> None:
        if not sequence.is_open:
            raise InvalidValue(f"{sequence} is closed; open a new one")
        if not sequence.belongs_to(self):
            raise InvalidValue(f"{sequence} belongs to another runtime")

    # steps --------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | AbstractSequence[Sequence]) -> int:
        """Submit one decode step of a batch and return its number at once; the step before may still be in flight.

        Pass the same `Batch` while the batch stays: a list is made into one every time.

        Raises:
            OutOfBlocks: the pools cannot hold next_n more tokens of every row; nothing changed.
            StaleFrame: an earlier step was refused by the device, see `resync`.
            InvalidValue: a sequence is closed, not prefilled or at its greatest length, or the batch is too large.
        """
        if not isinstance(batch, Batch):
            batch = Batch(batch)
        if batch.era is not self._era:
            self._check_batch(batch)
        bucket = self._engine.graphs.bucket_for(len(batch))
        frame = self._make_room(batch, self.next_n, 2 * len(batch))
        records = frame.writer.records(batch.rows, self.next_n)
        supplied = None
        if self._tokens.marked:
            supplied = self._tokens.take_marks(batch.rows, records, self.next_n)
            frame.writer.amended()
        packet = self._seal(frame, bucket, len(batch), len(batch) * self.next_n, supplied)
        return self._note(self._engine.submit_decode(packet, bucket), _Job(batch, self.next_n, None))

    def prefill(self, sequences: AbstractSequence[Sequence]) -> int:
        """Feed what the sequences hold and no step has fed yet, in ragged chunks of at most prefill_chunk tokens.

        Each sequence's next token is sampled by the chunk that ends it. Runs eagerly, asynchronously to the host.

        Returns:
            The number of the last chunk's step.

        Raises:
            OutOfBlocks: the pools cannot hold them all; nothing was fed.
            InvalidValue: a sequence is closed, or has nothing to feed.
        """
        batch = Batch(sequences)
        self._raise_if_stale()
        if not len(batch):
            raise InvalidValue("prefill needs at least one sequence, got none")
        for sequence in batch:
            self._owned(sequence)
        if len(set(batch.rows.tolist())) < len(batch):
            raise InvalidValue(f"a sequence is named more than once in {list(batch.sequences)}")
        if self._tokens.ready[batch.rows].any():
            idle = batch.sequences[int(self._tokens.ready[batch.rows].argmax())]
            raise InvalidValue(f"{idle} has nothing to prefill; step it")
        start, target = self.manager.length[batch.rows].astype(np.int64), self._tokens.known[batch.rows]
        self._require_blocks(batch, target)
        step = 0
        for chunk in cut_into_chunks(batch, start, target, self._prefill_chunk, self._engine.graphs.buckets[-1]):
            step = self._prefill_step(chunk)
        return step

    def _prefill_step(self, chunk: Chunk) -> int:
        batch, rows, counts = chunk.batch, chunk.batch.rows, chunk.counts
        total, ends = int(counts.sum()), chunk.begins + counts
        frame = self._make_room(batch, counts, total // self.config.block_size + 2 * len(batch))
        records = frame.writer.records(rows, 0)
        records[:, pk.QUERY_START] = records[:, pk.TOKEN_OFFSET] = np.cumsum(counts) - counts
        self._tokens.take_length_edits(rows, records)
        frame.writer.amended()
        spans = zip(rows.tolist(), chunk.begins.tolist(), ends.tolist(), strict=True)
        supplied = np.concatenate([self._tokens.span(*span) for span in spans])
        emits = ends == self._tokens.known[rows]
        packet = self._seal(frame, len(batch), len(batch), total, supplied)
        max_context = -(-int(ends.max()) // self.config.block_size) * self.config.block_size
        step = self._engine.submit_prefill(packet, len(batch), total, max_context)
        self._tokens.ready[rows] = emits
        self._era = object()
        return self._note(step, _Job(batch, counts, emits, ends))

    def _check_batch(self, batch: Batch) -> None:
        self._raise_if_stale()
        if not len(batch):
            raise InvalidValue("a step needs at least one sequence, got none")
        for sequence in batch:
            self._owned(sequence)
        ready = self._tokens.ready[batch.rows]
        if not ready.all():
            raise InvalidValue(
                f"{batch.sequences[int((~ready).argmax())]} has tokens that no step has fed yet; prefill it first"
            )
        batch.era = self._era

    def _require_blocks(self, batch: Batch, target: npt.NDArray[np.int64]) -> None:
        """Refuse a prefill that cannot end, before its first chunk."""
        missing = int((-(-target // self.config.block_size) - self.manager.blocks_held[batch.rows]).clip(0).sum())
        if not self.manager.blocks.available(missing):
            self.retire()
            self.manager.blocks.require(missing)
        if isinstance(self.manager, WindowedManager):
            self.manager.require_prefill(batch.rows, target, self._prefill_chunk)

    def _acquire(self) -> Frame:
        """The next step's frame, once the step that last used it has retired: the one wait of a step."""
        frame = self._engine.next_frame
        if frame.step > self._engine.retired:
            self.retire(frame.step)
        return frame

    def _make_room(self, batch: Batch, n: int | npt.NDArray[np.int32], edits: int) -> Frame:
        """Claim n more tokens of every row of the batch, or of none; the frame to describe the step in.

        A group with a window that is short of blocks gets some once the steps in flight retired, so these are waited
        for; it never happens where the group has what its load needs.
        """
        self._reserve_edits(edits)
        frame = self._acquire()
        try:
            self.manager.claim(batch.rows, n)
        except OutOfBlocks as short:
            if not short.group or self._engine.retired == self._engine.submitted:
                raise
            self.retire()
            self.manager.claim(batch.rows, n)
        return frame

    def _reserve_edits(self, edits: int) -> None:
        """See that the journal takes `edits` more, whatever the steps in flight bring when they retire.

        A full one is brought to the device by a step of padded rows.
        """
        if self.manager.edits_room < self._groups * (edits + 2 * self.manager.max_rows + 2 * self._chunk_blocks):
            frame, bucket = self._acquire(), self._engine.graphs.buckets[0]
            self._note(self._engine.submit_decode(self._seal(frame, bucket, 0, 0, None), bucket), _IDLE)

    def _seal(self, frame: Frame, bucket: int, rows: int, tokens: int, supplied: pk.Int32Array | None) -> int:
        """Put edits and supplied tokens behind the frame's records and close the packet; its bytes."""
        edits = self.manager.edits_pending
        if edits:
            self.manager.take_edits(frame.writer.edits(rows, edits))
        token_words = 0
        if supplied is not None:
            token_words = supplied.shape[0]
            frame.writer.tokens(rows, edits, token_words)[:] = supplied
        step = self._engine.submitted + 1
        if self.manager.copies_pending:
            self._copy(self.manager.take_copies(step))
        return frame.writer.seal(step, rows=rows, tokens=tokens, edits=edits, token_words=token_words, bucket=bucket)

    def _copy(self, jobs: AbstractSequence[CopyJob]) -> None:
        """Put copies on the steps' stream, before the next step."""
        with self.device.running_on(self.stream):
            for group in sorted({job.group for job in jobs}):
                for moves in independent_moves([job for job in jobs if job.group == group]):
                    self._copies.within(moves, group)

    def _note(self, step: int, job: _Job) -> int:
        """Keep what a step was asked to do. While it runs, there is time to make the last steps' blocks findable."""
        self._jobs[step] = job
        self.manager.submitted = step
        self.manager.index_commits()
        return step

    # results ------------------------------------------------------------------------------------------------------

    def results(self, step: int) -> StepResult:
        """Wait for a step and return what it brought.

        Raises:
            StaleFrame: the device refused the step's packet.
            DeviceFault: the model accepted more or fewer tokens than it was given.
            InvalidValue: the step was never submitted, or its results are older than the last `RESULTS_KEPT` steps.
        """
        if not 1 <= step <= self._engine.submitted:
            raise InvalidValue(f"step {step} was never submitted; steps 1 .. {self._engine.submitted} were")
        self.retire(step)
        if step not in self._results:
            self._raise_if_stale()
            raise InvalidValue(
                f"step {step} fed no sequence, or its results are no longer kept (the last {RESULTS_KEPT} steps' are); "
                "read Sequence.tokens"
            )
        return self._results[step]

    def retire(self, step: int | None = None) -> None:
        """Wait until `step` (all submitted, by default) and those before are done: results are read, blocks freed."""
        last = self._engine.submitted if step is None else min(step, self._engine.submitted)
        while self._engine.retired < last:
            raw = self._engine.wait_next()
            done = self._engine.retired
            job = self._jobs.pop(done, _IDLE)
            if raw is None:
                self._undo(job)
            elif len(job.batch):
                self._take(done, job, raw)
            for sequence in self._closing.pop(done, ()):
                sequence.keep(self._tokens.of(sequence.row))
            self.manager.retire(done)
            self._raise_if_stale()

    def _take(self, step: int, job: _Job, raw: RawResult) -> None:
        batch, count = job.batch, len(job.batch)
        accepted, tokens = raw.accepted[:count].copy(), raw.emitted[:count].copy()
        alive = self.manager.serial[batch.rows] == batch.serials
        new = accepted
        if job.emits is not None:
            tokens[~job.emits] = -1
            alive &= job.emits
            new = np.ones(count, np.int32)
        elif self.next_n > 1:
            self._settle(job, accepted)
        if alive.all():
            self._tokens.learn(batch.rows, tokens, new)
        else:
            self._tokens.learn(batch.rows[alive], tokens[alive], new[alive])
        fed = self._tokens.known[batch.rows] - 1 if job.ends is None else job.ends
        self.manager.commit(batch.rows, fed, serial=batch.serials)
        self._results[step] = StepResult(step, batch.sequences, accepted, tokens)
        if len(self._results) > RESULTS_KEPT:
            self._results.popitem(last=False)

    def _settle(self, job: _Job, accepted: npt.NDArray[np.int32]) -> None:
        if (bad := (accepted < 1) | (accepted > self.next_n)).any():
            at = int(bad.argmax())
            raise DeviceFault(
                f"the model accepted {accepted[at]} of {self.next_n} query tokens of {job.batch.sequences[at]}; "
                f"StepOutput.accepted must be within 1 .. {self.next_n}"
            )
        surplus = self.next_n - accepted
        if surplus.any():
            self.manager.settle(job.batch.rows, surplus, job.batch.serials)

    # faults -------------------------------------------------------------------------------------------------------

    def _undo(self, job: _Job) -> None:
        """A step that the device refused wrote nothing: its credit goes back, and the first such fault is kept."""
        if len(job.batch):
            self.manager.settle(job.batch.rows, job.credited, job.batch.serials)
        if self._stale is None:
            self._stale = StaleFrame(*self._engine.first_fault)
            self._era = object()

    def _raise_if_stale(self) -> None:
        if self._stale is not None:
            raise self._stale

    def resync(self) -> None:
        """After a StaleFrame: wait for everything, then give the device the host's step, tables, lengths and tokens.

        Steps that the device refused count as never submitted: their sequences are as before them.
        """
        while self._engine.retired < self._engine.submitted:
            try:
                self.retire()
            except StaleFrame:
                continue
        manager, tokens = self.manager, self._tokens
        self._engine.reset(manager.length, manager.table.ids)
        manager.take_edits(np.empty((manager.edits_pending, pk.EDIT_WORDS), np.int32))
        for row in np.flatnonzero(manager.is_open).tolist():
            tokens.ready[row] = tokens.known[row] == manager.length[row] + 1 and manager.length[row] > 0
            tokens.mark(row, supply=bool(tokens.ready[row]))
        self._stale = None
        self._era = object()

    # looking and leaving ------------------------------------------------------------------------------------------

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that steps run on, None on the CPU device."""
        return self._engine.stream

    @property
    def graph_nodes(self) -> dict[int, int]:
        """Nodes of the captured graph of each bucket, 0 on the CPU device."""
        return self._engine.graphs.nodes

    def metadata(self, rows: int, side: Side = Side.TARGET, group: int | None = None) -> StepMetadata:
        """The live tensors that a decode step of bucket `rows` reads, by default those of the side's first layer group.

        For looking; the device writes them.
        """
        return self._engine.metadata(side, rows, rows * self.next_n, group)

    def check(self) -> None:
        """`AssertionError` with the facts if an invariant of the host's state is broken; it reads everything."""
        self.manager.check()
        self._tokens.check()
        submitted, retired = self._engine.submitted, self._engine.retired
        if not retired <= submitted <= retired + 2:
            raise AssertionError(f"{submitted} steps submitted and {retired} retired with two frames")

    def stats(self) -> RuntimeStats:
        manager, ledger = self.manager.stats(), self.device.ledger
        return RuntimeStats(
            steps_submitted=self._engine.submitted,
            steps_retired=self._engine.retired,
            graph_launches=self._engine.graphs.launches,
            blocks_total=manager.blocks_total,
            blocks_held=manager.blocks_held,
            blocks_free=manager.blocks_free,
            blocks_retiring=manager.blocks_retiring,
            blocks_peak=manager.blocks_peak_held,
            rows_open=manager.rows_open,
            pool_bytes=self.pools.num_bytes,
            device_bytes=ledger.device_bytes,
            pinned_bytes=ledger.pinned_bytes,
            allocations=ledger.allocations,
        )

    def __enter__(self) -> DecodeRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.device.synchronize()
