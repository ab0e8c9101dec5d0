"""Steps in flight: what each was asked to do, what it brought when it retired, and what is done about a refused one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkv import packet as pk
from graphkv.engine import RawResult, StepEngine
from graphkv.errors import DeviceFault, InvalidValue, StaleFrame
from graphkv.manager.v2 import ManagerV2
from graphkv.rows import RowTokens
from graphkv.sequence import Batch, Sequence, SequenceCounts, StepResult

RESULTS_KEPT = 64
"""Results of that many last steps stay readable; tokens of older ones are in their sequences."""


@dataclass(slots=True)
class Job:
    """What a submitted step was asked to do, kept until it retires."""

    batch: Batch
    credited: int | npt.NDArray[np.int32]  # tokens that submission added to each length
    emits: npt.NDArray[np.bool_] | None  # rows whose sampled token counts; None: a decode step, all of them
    ends: npt.NDArray[np.int64] | None = None  # tokens of each sequence that were fed by then; None: all known but one


IDLE = Job(Batch(()), 0, None)
"""A step of padded rows alone."""


class Flight:
    """Submitted steps until they retire, and the results of those that did.

    Attributes:
        era: another object after each change that can make a batch unfit to step.
    """

    def __init__(self, engine: StepEngine, manager: ManagerV2, tokens: RowTokens, next_n: int) -> None:
        self._engine, self._manager, self._tokens, self._next_n = engine, manager, tokens, next_n
        self._jobs: dict[int, Job] = {}
        self._closing: dict[int, list[Sequence]] = {}  # closed with steps in flight, by the last of these
        self._results: OrderedDict[int, StepResult] = OrderedDict()
        self._stale: StaleFrame | None = None
        self.era = object()

    def changed(self) -> None:
        """A batch that was fit to step may be so no more."""
        self.era = object()

    def note(self, step: int, job: Job) -> None:
        """A step was submitted."""
        self._jobs[step] = job

    def close(self, sequence: Sequence) -> int:
        """A sequence ends: its last results are still to come. Returns the last step that may touch its row."""
        last = self._engine.submitted
        if last > self._engine.retired:  # the row is its own until then
            self._closing.setdefault(last, []).append(sequence)
        else:
            self._keep(sequence)
        return last

    def last_step_of(self, row: int) -> int:
        """The last step in flight that names a row, 0 if none does."""
        return max((step for step, job in self._jobs.items() if row in job.batch.rows), default=0)

    def counts_of(self, sequence: Sequence) -> SequenceCounts:
        """What became of the tokens and blocks of a sequence whose row is still its own."""
        row, manager = sequence.row, self._manager
        colder = manager.cached_in_colder[row].tolist()
        cached = int(manager.cached_tokens[row]) - sum(colder), *colder
        return SequenceCounts(cached, int(manager.tokens_missed[row]), int(manager.blocks_moved[row]))

    def _keep(self, sequence: Sequence) -> None:
        sequence.keep(self._tokens.of(sequence.row), self.counts_of(sequence))

    # results --------------------------------------------------------------------------------------------------------

    def results(self, step: int) -> StepResult:
        """Wait for a step and return what it brought, see `DecodeRuntime.results`."""
        if not 1 <= step <= self._engine.submitted:
            raise InvalidValue(f"step {step} was never submitted; steps 1 .. {self._engine.submitted} were")
        self.retire(step)
        if step not in self._results:
            self.raise_if_stale()
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
            job = self._jobs.pop(done, IDLE)
            if raw is None:
                self._undo(job)
            elif len(job.batch):
                self._take(done, job, raw)
            for sequence in self._closing.pop(done, ()):
                self._keep(sequence)
            self._manager.retire(done)
            self.raise_if_stale()

    def _take(self, step: int, job: Job, raw: RawResult) -> None:
        batch, count = job.batch, len(job.batch)
        accepted, tokens = raw.accepted[:count].copy(), raw.emitted[:count].copy()
        alive = self._manager.serial[batch.rows] == batch.serials
        new = accepted
        if job.emits is not None:
            tokens[~job.emits] = -1
            alive &= job.emits
            new = np.ones(count, np.int32)
        elif self._next_n > 1:
            self._settle(job, accepted)
        if alive.all():
            self._tokens.learn(batch.rows, tokens, new)
        else:
            self._tokens.learn(batch.rows[alive], tokens[alive], new[alive])
        fed = self._tokens.known[batch.rows] - 1 if job.ends is None else job.ends
        self._manager.commit(batch.rows, fed, serial=batch.serials)
        self._results[step] = StepResult(step, batch.sequences, accepted, tokens)
        if len(self._results) > RESULTS_KEPT:
            self._results.popitem(last=False)

    def _settle(self, job: Job, accepted: npt.NDArray[np.int32]) -> None:
        if (bad := (accepted < 1) | (accepted > self._next_n)).any():
            at = int(bad.argmax())
            raise DeviceFault(
                f"the model accepted {accepted[at]} of {self._next_n} query tokens of {job.batch.sequences[at]}; "
                f"StepOutput.accepted must be within 1 .. {self._next_n}"
            )
        surplus = self._next_n - accepted
        if surplus.any():
            self._manager.settle(job.batch.rows, surplus, job.batch.serials)

    # faults ---------------------------------------------------------------------------------------------------------

    def _undo(self, job: Job) -> None:
        """A step that the device refused wrote nothing: its credit goes back, and the first such fault is kept."""
        if len(job.batch):
            self._manager.settle(job.batch.rows, job.credited, job.batch.serials)
        if self._stale is None:
            self._stale = StaleFrame(*self._engine.first_fault)
            self.changed()

    def raise_if_stale(self) -> None:
        """`StaleFrame` if the device refused a step and nobody has called `resync` since."""
        if self._stale is not None:
            raise self._stale

    def resync(self) -> None:
        """Wait for everything and give the device the host's state, see `DecodeRuntime.resync`."""
        while self._engine.retired < self._engine.submitted:
            try:
                self.retire()
            except StaleFrame:
                continue
        manager, tokens = self._manager, self._tokens
        self._engine.reset(manager.length, manager.table.ids)
        manager.take_edits(np.empty((manager.edits_pending, pk.EDIT_WORDS), np.int32))
        for row in np.flatnonzero(manager.is_open).tolist():
            tokens.ready[row] = tokens.known[row] == manager.length[row] + 1 and manager.length[row] > 0
            tokens.mark(row, supply=bool(tokens.ready[row]))
        self._stale = None
        self.changed()
