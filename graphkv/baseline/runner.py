"""The decode loop over V1: the surface of `DecodeRuntime`, every step run eagerly from tables uploaded for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graphkv.baseline.metadata import MetadataBuilder, UploadedBatch, Uploader
from graphkv.config import CacheConfig
from graphkv.device import Device, stream_handle
from graphkv.errors import DeviceFault, InvalidValue, OutOfBlocks
from graphkv.kernel_choice import OWN_KERNELS
from graphkv.layout import Side
from graphkv.manager.moving_rows import RowState
from graphkv.manager.v1 import LayerPools, ManagerV1
from graphkv.metadata import DerivePlan, SideBinding, StepMetadata
from graphkv.selection.create import create_cache_manager
from graphkv.selection.requirements import Requirements
from graphkv.sequence import Batch, Sequence, SequenceCounts, StepResult, cut_into_chunks
from graphkv.step import StepContext, StepKind, StepModel, StepOutput, Workspace

RESULTS_KEPT = 64
"""Results of that many last steps stay readable."""

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Flight:
    """A submitted step, until its results are taken."""

    batch: Batch
    counts: Int32s  # [B], query tokens
    emits: npt.NDArray[np.bool_] | None  # rows whose sampled token counts; None: a decode step, all of them
    fed: torch.Tensor  # i64 [T], pinned as the next two are
    sampled: torch.Tensor  # i64 [B, next_n]
    accepted: torch.Tensor | None  # i32 [B]


class _ResultLine:
    """Pinned memory that a step's results are copied to, and the event after those copies."""

    def __init__(self, rows: int, tokens: int, next_n: int, device: Device) -> None:
        self.fed = device.pinned(tokens, torch.int64)
        self.sampled = device.pinned((rows, next_n), torch.int64)
        self.accepted = device.pinned(rows, torch.int32)
        self.done = device.event()


class V1Runner:
    """Prefills and decodes sequences over one pool a layer. No graph, no buckets, no padded rows.

    Args:
        config: what the cache holds.
        model: the model's part of a step, see `StepModel`; the same object runs on `DecodeRuntime`.
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:N".
        max_rows: sequences open at once.
        max_seq_len: tokens of the longest sequence.
        num_blocks: blocks of each pool, the null block included.
        next_n: query tokens a row and decode step (1 + draft tokens).
        prefill_chunk: most prompt tokens a prefill step.
        requirements: what else the cache will be used for; refused here if V1 cannot do it.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: StepModel,
        *,
        device: Device | torch.device | str = "auto",
        max_rows: int,
        max_seq_len: int,
        num_blocks: int,
        next_n: int = 1,
        prefill_chunk: int = 512,
        requirements: Requirements | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise InvalidValue(f"prefill_chunk must be positive, got {prefill_chunk}")
        self.config, self.next_n, self.max_seq_len = config, next_n, max_seq_len
        self._lookahead = config.draft_lookahead(next_n)
        self._kernels = OWN_KERNELS if requirements is None else requirements.kernels
        self.device = Device.of(device)
        manager = create_cache_manager(
            config,
            use_kv_cache_manager_v2=False,
            num_blocks=num_blocks,
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            next_n=next_n,
            requirements=requirements,
            device=self.device,
        )
        assert isinstance(manager, ManagerV1)
        self.manager = manager
        self._model, self._prefill_chunk = model, prefill_chunk
        self._known: list[list[int]] = [[] for _ in range(max_rows)]
        self._ready = np.zeros(max_rows, np.bool_)
        self.submitted = self.retired = 0
        self._flights: dict[int, _Flight] = {}
        self._results: OrderedDict[int, StepResult] = OrderedDict()
        most = max(max_rows * next_n, prefill_chunk)
        table = max_rows * manager.max_blocks
        i32, i64 = torch.int32, torch.int64
        sizes = {"table": (table, i32), "batch_row": (max_rows, i32), "length": (max_rows, i32)}
        with self.device.guard():
            self.stream = self.device.stream()
            self.pools = LayerPools(config, num_blocks, self.device)
            more = {"query_start": (max_rows + 1, i32), "token_ids": (most, i64)}
            self._uploader = Uploader({**sizes, **more}, self.device)
            self._builder = MetadataBuilder(config, self.device)
            self._workspaces = {kind: Workspace(self.device) for kind in ("decode", "prefill")}
            self._next_tokens = self.device.zeros((max_rows, next_n), i64)
            self._lines = [_ResultLine(max_rows, most, next_n, self.device) for _ in range(2)]
            self.device.synchronize()  # what was filled on the caller's stream is seen by ours

    # sequences ----------------------------------------------------------------------------------------------------

    def open(self, tokens: npt.ArrayLike) -> Sequence:
        """Take a row for a sequence that begins with `tokens` (int [n], n >= 1). Nothing is computed yet."""
        prompt = _token_list(tokens)
        if not 1 <= len(prompt) <= self.max_seq_len:
            raise InvalidValue(f"a prompt of {len(prompt)} tokens is not within 1 .. max_seq_len {self.max_seq_len}")
        row = self.manager.open(len(prompt))
        self._known[row] = prompt
        self._ready[row] = False
        return Sequence(self, row, int(self.manager.serial[row]))

    def append(self, sequence: Sequence, tokens: npt.ArrayLike) -> None:
        """Add tokens of the caller's to an open sequence; `prefill` feeds them. Waits for the steps in flight."""
        self._owned(sequence)
        more = _token_list(tokens)
        self.retire()
        known = self._known[sequence.row]
        if not more or len(known) + len(more) > self.max_seq_len:
            raise InvalidValue(
                f"appending {len(more)} tokens to {len(known)} is not within 1 .. max_seq_len {self.max_seq_len} in all"
            )
        known += more
        self._ready[sequence.row] = False

    def rewind(self, sequence: Sequence, tokens: int) -> None:
        """Forget the last `tokens` tokens that were fed: the one at the new length is fed next."""
        self._owned(sequence)
        row = sequence.row
        if not self._ready[row]:
            raise InvalidValue(f"{sequence} has tokens that no step has fed yet; prefill it before rewinding")
        self.retire()
        self.manager.rewind([row], tokens, self.submitted)
        del self._known[row][int(self.manager.length[row]) + 1 :]
        with self.device.running_on(self.stream):
            self._next_tokens[row].fill_(self._known[row][-1])

    def close(self, sequence: Sequence) -> None:
        """End a sequence, once the steps in flight are done. Idempotent."""
        if not sequence.is_open:
            return
        self._owned(sequence)
        self.retire()
        sequence.keep(self.known_tokens(sequence), SequenceCounts())
        sequence.is_open = False
        self.manager.close(sequence.row, self.submitted, sequence.serial)

    def state_of(self, sequence: Sequence) -> RowState:
        """Ready while it is open: V1's blocks are always on the device."""
        return RowState.READY if sequence.is_open else RowState.CLOSED

    def counts_of(self, sequence: Sequence) -> SequenceCounts:
        """Nothing: V1 caches and moves no block."""
        return SequenceCounts()

    def known_tokens(self, sequence: Sequence) -> Int32s:
        """int32 [n], the tokens that the host knows of an open sequence."""
        return np.array(self._known[sequence.row], np.int32)

    def _owned(self, sequence: Sequence) -> None:
        if not sequence.is_open:
            raise InvalidValue(f"{sequence} is closed; open a new one")
        if not sequence.belongs_to(self):
            raise InvalidValue(f"{sequence} belongs to another runtime")

    # steps --------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | AbstractSequence[Sequence]) -> int:
        """Submit one decode step of a batch and return its number.

        With next_n = 1 the step before may still be in flight. Otherwise it is waited for: how far it got each row
        decides the lengths that this step uploads.

        Raises:
            OutOfBlocks: the pools cannot hold next_n more tokens of every row; nothing changed.
            InvalidValue: a sequence is closed or not prefilled.
        """
        batch = self._checked(batch)
        if not self._ready[batch.rows].all():
            waiting = batch.sequences[int((~self._ready[batch.rows]).argmax())]
            raise InvalidValue(f"{waiting} has tokens that no step has fed yet; prefill it first")
        self.retire(self.submitted if self.next_n > 1 else self.submitted - 1)
        self.manager.extend(batch.rows, self.next_n + self._lookahead)
        return self._submit("decode", batch, np.full(len(batch), self.next_n, np.int32), None, None)

    def prefill(self, sequences: AbstractSequence[Sequence]) -> int:
        """Feed what the sequences hold and no step has fed yet, in ragged chunks of at most prefill_chunk tokens.

        Returns:
            The number of the last chunk's step.

        Raises:
            OutOfBlocks: the pools cannot hold them all; nothing was fed.
            InvalidValue: a sequence is closed, or has nothing to feed.
        """
        batch = self._checked(sequences)
        if self._ready[batch.rows].any():
            raise InvalidValue(f"{batch.sequences[int(self._ready[batch.rows].argmax())]} has nothing to prefill")
        self.retire()
        begins = self.manager.length[batch.rows].astype(np.int64)
        ends = np.array([len(self._known[row]) for row in batch.rows], np.int64)
        held = np.array([len(self.manager.blocks(row)) for row in batch.rows])
        missing = int((-(-ends // self.config.block_size) - held).clip(0).sum())
        if missing > (free := self.manager.stats().blocks_free):
            raise OutOfBlocks(missing, free)
        for chunk in cut_into_chunks(batch, begins, ends, self._prefill_chunk, self.manager.max_rows):
            self.retire(self.submitted - 1)
            rows = chunk.batch.rows
            self.manager.extend(rows, chunk.counts)
            spans = zip(rows.tolist(), chunk.begins.tolist(), chunk.counts.tolist(), strict=True)
            fed = [token for row, begin, count in spans for token in self._known[row][begin : begin + count]]
            emits = chunk.begins + chunk.counts == [len(self._known[row]) for row in rows]
            self._submit("prefill", chunk.batch, chunk.counts, emits, fed)
            self._ready[rows] = emits
        return self.submitted

    def _checked(self, batch: Batch | AbstractSequence[Sequence]) -> Batch:
        if not isinstance(batch, Batch):
            batch = Batch(batch)
        if not len(batch):
            raise InvalidValue("a step needs at least one sequence, got none")
        for sequence in batch:
            self._owned(sequence)
        if len(set(batch.rows.tolist())) < len(batch):
            raise InvalidValue(f"a sequence is named more than once in {list(batch.sequences)}")
        return batch

    def _submit(
        self,
        kind: StepKind,
        batch: Batch,
        counts: Int32s,
        emits: npt.NDArray[np.bool_] | None,
        fed: list[int] | None,
    ) -> int:
        """Upload the batch, run the model on it and queue the copies of its results.

        Args:
            fed: the query tokens; None if they are on the device.
        """
        line = self._lines[(self.submitted + 1) & 1]
        with self.device.running_on(self.stream):
            uploaded, token_ids = self._upload(batch.rows, counts, fed)
            longest = max(len(self.manager.blocks(row)) for row in batch.rows.tolist())
            output = self._run(kind, uploaded, token_ids, longest * self.config.block_size)
            self._next_tokens[uploaded.batch_row.long()] = output.tokens
            fed_back = line.fed[: uploaded.tokens].copy_(token_ids, non_blocking=True)
            sampled = line.sampled[: len(batch)].copy_(output.tokens, non_blocking=True)
            accepted = None
            if output.accepted is not None and kind == "decode":
                accepted = line.accepted[: len(batch)].copy_(output.accepted, non_blocking=True)
            line.done.record(stream_handle(self.stream))
        self.manager.advance(batch.rows, counts)
        self.submitted += 1
        self._flights[self.submitted] = _Flight(batch, counts, emits, fed_back, sampled, accepted)
        return self.submitted

    def _upload(self, rows: Int32s, counts: Int32s, fed: list[int] | None) -> tuple[UploadedBatch, torch.Tensor]:
        """Everything that the device must know of this step, one copy an array."""
        count, tokens = rows.size, int(counts.sum())
        shapes = {"table": (count, self.manager.max_blocks), "batch_row": (count,), "length": (count,)}
        shapes["query_start"] = (count + 1,)
        self._uploader.begin()
        arrays = {name: self._uploader.array(name, shape) for name, shape in shapes.items()}
        self.manager.block_tables(rows, arrays["table"].view(np.int32))
        arrays["batch_row"][:] = rows
        arrays["length"][:] = self.manager.length[rows]
        arrays["query_start"][:] = np.concatenate(([0], np.cumsum(counts)))
        sent = {name: self._uploader.upload(name, shape) for name, shape in shapes.items()}
        uploaded = UploadedBatch(**sent, tokens=tokens)
        if fed is None:
            token_ids = self._next_tokens[uploaded.batch_row.long()].flatten()
        else:
            self._uploader.array("token_ids", (tokens,))[:] = fed
            token_ids = self._uploader.upload("token_ids", (tokens,))
        self._uploader.end(stream_handle(self.stream))
        return uploaded, token_ids

    def _run(self, kind: StepKind, uploaded: UploadedBatch, token_ids: torch.Tensor, max_context: int) -> StepOutput:
        target = self._builder.live(Side.TARGET, uploaded, token_ids)
        binding = SideBinding(target)

        def derive(side: Side, _: StepMetadata, plan: DerivePlan) -> tuple[StepMetadata, ...]:
            if side not in self.config.sides:
                raise InvalidValue(f"this cache has no {side} side; give CacheConfig draft_layers to have one")
            return (self._builder.derive(side, uploaded, plan),)

        workspace = self._workspaces[kind]
        context = StepContext(kind, binding, self.pools, workspace, self.next_n, max_context, derive, self._kernels)
        with binding.stepping(), torch.no_grad():
            output = self._model(context)
        output.check(target.rows, self.next_n, self.device.torch)
        return output

    # results ------------------------------------------------------------------------------------------------------

    def results(self, step: int) -> StepResult:
        """Wait for a step and return what it brought; `DeviceFault` if the model accepted a wrong number of tokens."""
        if not 1 <= step <= self.submitted:
            raise InvalidValue(f"step {step} was never submitted; steps 1 .. {self.submitted} were")
        self.retire(step)
        if step not in self._results:
            raise InvalidValue(f"the results of step {step} are no longer kept; read Sequence.tokens")
        return self._results[step]

    def retire(self, step: int | None = None) -> None:
        """Wait until `step` (all submitted, by default) and those before are done, and take their results."""
        last = self.submitted if step is None else min(step, self.submitted)
        while self.retired < last:
            self._lines[(self.retired + 1) & 1].done.synchronize()
            self.retired += 1
            self.manager.retire(self.retired)
            self._take(self.retired, self._flights.pop(self.retired))

    def _take(self, step: int, flight: _Flight) -> None:
        batch, rows = flight.batch, flight.batch.rows
        sampled = flight.sampled.numpy()
        accepted = flight.counts if flight.accepted is None else flight.accepted.numpy().copy()
        tokens = np.full((len(batch), self.next_n), -1, np.int32)
        new = accepted
        if flight.emits is not None:
            new = flight.emits.astype(np.int32)
            tokens[flight.emits, 0] = sampled[flight.emits, 0]
        else:
            if ((accepted < 1) | (accepted > self.next_n)).any():
                raise DeviceFault(
                    f"the model accepted {accepted.tolist()} of {self.next_n} query tokens; StepOutput.accepted must "
                    f"be within 1 .. {self.next_n}"
                )
            fed = flight.fed.numpy().reshape(len(batch), self.next_n)
            for at, count in enumerate(accepted.tolist()):
                tokens[at, : count - 1] = fed[at, 1:count]
                tokens[at, count - 1] = sampled[at, 0]
            self.manager.settle(rows, self.next_n - accepted)
        for at, row in enumerate(rows.tolist()):
            self._known[row] += tokens[at, : new[at]].tolist()
        self._results[step] = StepResult(step, batch.sequences, accepted, tokens)
        if len(self._results) > RESULTS_KEPT:
            self._results.popitem(last=False)

    def check(self) -> None:
        """`AssertionError` with the facts if an invariant of the host's state is broken."""
        self.manager.check()


def _token_list(tokens: npt.ArrayLike) -> list[int]:
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidValue(f"tokens must be a one-dimensional array of integers, got {given.dtype} {given.shape}")
    return [int(token) for token in given]
