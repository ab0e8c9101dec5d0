"""Blocks on their way between tiers: queued beside the steps, ordered by events, never waited for on the step path.

Device and host exchange blocks on two streams of the mover's own, one a direction, all pools of all blocks of a
transfer in one launch. Files are written and read by threads. A transfer is queued as soon as all earlier ones that
touch its slots are queued (stream after stream, which events then order) or have ended (where a file is involved).
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from graphkv.device import Device
from graphkv.errors import InvalidValue, TransferTimeout, UnsupportedCombination
from graphkv.pool import Pools
from graphkv.tiers.copies import BlockCopies, independent_moves
from graphkv.tiers.disk import DiskTier
from graphkv.tiers.host import DISK, HOST, HostTier
from graphkv.tiers.lanes import FileWorkers, Lane, Places, State, StreamLane, Transfer
from graphkv.transfer import DEVICE, BlockMover, CopyJob

_NAP = 0.0002  # seconds between looks in `wait`


class MoverStats(NamedTuple):
    """Numbers of a mover, now.

    Attributes:
        waiting, running: transfers not yet queued, and queued or at work.
        moved: blocks brought so far, by (source tier, target tier).
        failed: blocks that could not be brought, likewise.
    """

    waiting: int
    running: int
    moved: dict[tuple[int, int], int]
    failed: dict[tuple[int, int], int]


class TierMover(BlockMover):
    """Moves blocks between the pools (tier 0), host memory (1) and disk (2).

    All calls come from one thread, the one that submits steps. Nothing waits but `wait` and `close`.

    Args:
        pools: the device tier.
        host, disk: the colder tiers; a disk tier needs a host tier, through which its blocks go.
        steps: the stream that steps run on.
        limit_s: age at which a transfer counts as overdue.
        file_workers: threads for the disk tier.
        lane_of: makes the lanes "steps", "offload" and "onload"; streams of the device by default.
    """

    def __init__(
        self,
        pools: Pools,
        device: Device,
        *,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        steps: torch.cuda.Stream | None = None,
        limit_s: float = 30.0,
        file_workers: int = 2,
        lane_of: Callable[[str], Lane] | None = None,
    ) -> None:
        self._copies = BlockCopies(pools, host, device)
        self._pools, self._host, self._disk, self._limit = pools, host, disk, limit_s
        self._check_tiers(host, disk, file_workers)
        make = lane_of or (lambda name: StreamLane(device, steps if name == "steps" else device.stream()))
        self._steps = make("steps")
        self._lanes = {(DEVICE, HOST): make("offload"), (HOST, DEVICE): make("onload")} if host else {}
        self._workers = FileWorkers(file_workers) if disk else None
        slots = [pools.reserved_blocks, host.num_slots if host else 0, disk.num_slots if disk else 0]
        self._first_place = [0, slots[0], slots[0] + slots[1]]
        self._marked = np.zeros(sum(slots), bool)
        self._undefined: set[int] = set()  # host places that a failed job has left without meaning
        self._tickets = 0
        self._open: dict[int, Transfer] = {}
        self._results: dict[int, tuple[bool, ...]] = {}
        self._moved: Counter[tuple[int, int]] = Counter()
        self._failed: Counter[tuple[int, int]] = Counter()

    def _check_tiers(self, host: HostTier | None, disk: DiskTier | None, file_workers: int) -> None:
        if disk is not None and host is None:
            raise InvalidValue("a disk tier needs a host tier, through which its blocks go; give one of a few blocks")
        if windows := len(self._pools.config.windows):
            raise UnsupportedCombination(
                f"layers with a window ({windows} groups) and a TierMover cannot go together: what a window still "
                "holds is not moved; build without colder tiers, and close sequences instead of suspending them"
            )
        unit = self._copies.unit
        for name, tier in (("host", host), ("disk", disk)):
            if tier is not None and tier.unit != unit:
                raise InvalidValue(
                    f"the {name} tier was built for blocks of {tier.unit.num_bytes} bytes in {len(tier.unit.parts)} "
                    f"parts, these pools have {unit.num_bytes} in {len(unit.parts)}; build it with UnitLayout.of(pools)"
                )
        if file_workers < 1:
            raise InvalidValue(f"file_workers must be at least 1, got {file_workers}")

    # transfers ------------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[CopyJob]) -> int:
        """Queue one transfer, all of whose jobs go from one tier to one other; returns its ticket.

        Copies from or to the device start after all that was submitted to the steps' stream before this call, and every
        copy after those of earlier transfers that touch one of its slots. Returns without waiting.

        Raises:
            InvalidValue: jobs of several kinds, slots out of range or twice a target, tiers that are not neighbours, or
                a capture under way on the steps' stream. Nothing changed.
        """
        tiers, pairs = self._checked(jobs)
        lane = self._lanes.get(tiers)
        if lane is not None:
            self._refuse_capture()
        first = self._first_place
        transfer = Transfer(
            self._tickets + 1,
            tiers,
            pairs,
            reads=pairs[:, 0] + first[tiers[0]],
            writes=pairs[:, 1] + first[tiers[1]],
            lane=lane,
            since=time.monotonic(),
            fence=None if lane is None else self._steps.record(),
            ok=[True] * len(pairs),
        )
        transfer.after = self._touching(transfer.reads, transfer.writes)
        self._tickets += 1
        self._open[transfer.ticket] = transfer
        self._advance()
        return transfer.ticket

    def poll(self, ticket: int) -> Sequence[bool] | None:
        """None while the transfer runs; once it ended, whether each job brought the right bytes, and it is forgotten.

        A failed job leaves its target's bytes undefined. Never waits.
        """
        self._advance()
        if ticket in self._open:
            return None
        if ticket not in self._results:
            raise InvalidValue(f"there is no transfer {ticket}: it was never submitted, or its end has been told")
        return self._results.pop(ticket)

    def wait(self, ticket: int, timeout_s: float | None = None) -> Sequence[bool]:
        """As `poll`, once the transfer has ended; `TransferTimeout` if that takes longer than `timeout_s` (limit_s)."""
        limit = self._limit if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while (result := self.poll(ticket)) is None:
            if time.monotonic() >= deadline:
                raise self._timeout(self._open[ticket])
            time.sleep(_NAP)
        return result

    def overdue(self) -> list[TransferTimeout]:
        """An error, not raised, for every transfer older than `limit_s`, the oldest first. Never waits."""
        self._advance()
        before = time.monotonic() - self._limit
        return [self._timeout(transfer) for transfer in self._open.values() if transfer.since < before]

    def failures(self) -> list[str]:
        """Why files could not be written or trusted, the last hundred."""
        return [] if self._workers is None else list(self._workers.reasons)

    def stats(self) -> MoverStats:
        """Numbers, now."""
        waiting = sum(transfer.state is State.WAITING for transfer in self._open.values())
        return MoverStats(waiting, len(self._open) - waiting, dict(self._moved), dict(self._failed))

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for every transfer, then end the threads. `TransferTimeout` if one does not end; then nothing is closed.

        The tiers are the caller's to close, after this.
        """
        deadline = time.monotonic() + (self._limit if timeout_s is None else timeout_s)
        self._advance()
        while self._open:
            if time.monotonic() >= deadline:
                raise self._timeout(next(iter(self._open.values())))
            time.sleep(_NAP)
            self._advance()
        if self._workers is not None:
            self._workers.close()

    # the steps' stream ------------------------------------------------------------------------------------------------

    def copy(self, jobs: Sequence[CopyJob]) -> None:
        """Copy tokens 0 .. `tokens` - 1 of blocks to other blocks of the device, in the order of the jobs.

        The copies go onto the steps' stream: after the steps submitted before, before those submitted later.

        Raises:
            InvalidValue: see `submit`; or a block waits for a transfer that has not been queued yet. Nothing changed.
        """
        if not jobs:
            return
        self._check_slots(jobs, DEVICE, DEVICE)
        block_size = self._copies.block_size
        if wrong := [job.tokens for job in jobs if not 0 <= job.tokens <= block_size]:
            raise InvalidValue(f"tokens must be in 0..{block_size}, got {wrong[0]}")
        self._refuse_capture()
        self._let_steps_wait(_slots(job.source for job in jobs), _slots(job.target for job in jobs))
        for batch in independent_moves(jobs):
            self._steps.run(functools.partial(self._copies.within, batch))

    def order_steps(self, blocks: ArrayLike) -> None:
        """Let steps submitted from here on start after every transfer under way that touches one of these block ids.

        For a caller that submits a step before `poll` has told the end of a transfer that brings its blocks in.

        Raises:
            InvalidValue: such a transfer has not been queued yet; it waits for a file. Poll it first.
        """
        ids: Places = np.asarray(blocks, np.intp).reshape(-1)
        self._let_steps_wait(ids, ids)

    def _let_steps_wait(self, reads: Places, writes: Places) -> None:
        if not self._open:
            return
        self._advance()
        touching = self._touching(reads, writes)
        for transfer in touching:
            if transfer.state is State.WAITING:
                raise InvalidValue(
                    f"transfer {transfer.ticket} ({transfer}) is not queued yet, since it waits for a file; poll it "
                    "before a step or a copy touches its blocks"
                )
        for transfer in touching:
            if transfer.event is not None:
                self._steps.wait(transfer.event)

    # checks -----------------------------------------------------------------------------------------------------------

    def _checked(self, jobs: Sequence[CopyJob]) -> tuple[tuple[int, int], NDArray[np.intp]]:
        if not jobs:
            raise InvalidValue("a transfer needs at least one job, got none")
        tiers = jobs[0].source_tier, jobs[0].target_tier
        on_disk = {(HOST, DISK), (DISK, HOST)} if self._disk is not None else set()
        if tiers not in on_disk and tiers not in self._lanes:
            raise InvalidValue(
                f"blocks cannot go from tier {tiers[0]} to tier {tiers[1]}; here they go between "
                f"{sorted({*self._lanes, *on_disk})}"
            )
        self._check_slots(jobs, *tiers)
        pairs = np.array([(job.source, job.target) for job in jobs], np.intp)
        if len(np.unique(pairs[:, 1])) < len(pairs):
            raise InvalidValue(
                f"a target slot repeats in one transfer: {pairs[:, 1].tolist()}; submit one after the other"
            )
        return tiers, pairs

    def _check_slots(self, jobs: Sequence[CopyJob], source_tier: int, target_tier: int) -> None:
        ends = {
            DEVICE: (1, self._pools.num_blocks),  # the null block never moves
            HOST: (0, self._host.num_slots if self._host else 0),
            DISK: (0, self._disk.num_slots if self._disk else 0),
        }
        for job in jobs:
            if (job.source_tier, job.target_tier) != (source_tier, target_tier):
                raise InvalidValue(f"all jobs of a call go from one tier to one other, got {jobs[0]} and {job}")
            for name, slot, tier in (("source", job.source, source_tier), ("target", job.target, target_tier)):
                if not ends[tier][0] <= slot < ends[tier][1]:
                    raise InvalidValue(
                        f"{name} slot {slot} is outside {ends[tier][0]}..{ends[tier][1] - 1}, the slots of tier {tier}"
                    )

    def _refuse_capture(self) -> None:
        if self._steps.capturing():
            raise InvalidValue(
                "the steps' stream is being captured, and a transfer queued now would become part of the graph; "
                "submit it before or after the capture"
            )

    def _touching(self, reads: Places, writes: Places) -> list[Transfer]:
        """Open transfers that write what is read here, or touch what is written here."""
        marked, found = self._marked, []
        for transfer in self._open.values():
            marked[writes] = True
            clash = marked[transfer.reads].any() or marked[transfer.writes].any()
            marked[reads] = True
            clash = clash or marked[transfer.writes].any()
            marked[writes] = marked[reads] = False
            if clash:
                found.append(transfer)
        return found

    def _timeout(self, transfer: Transfer) -> TransferTimeout:
        return TransferTimeout(transfer.ticket, time.monotonic() - transfer.since, str(transfer))

    # progress ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take note of ends, and queue what was behind them, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for transfer in list(self._open.values()):
                if transfer.state is State.WAITING and transfer.can_start():
                    self._start(transfer)
                    changed = True
                if transfer.state is State.RUNNING and transfer.has_ended():
                    self._end(transfer)
                    changed = True

    def _start(self, transfer: Transfer) -> None:
        if transfer.tiers[0] == HOST:
            transfer.ok = [place not in self._undefined for place in transfer.reads.tolist()]
        if transfer.lane is None:
            self._start_files(transfer)
        else:
            self._start_copies(transfer, transfer.lane)
        transfer.after = []
        transfer.state = State.RUNNING

    def _start_copies(self, transfer: Transfer, lane: Lane) -> None:
        if transfer.fence is not None:
            lane.wait(transfer.fence)
        for other in transfer.after:
            if other.event is not None and other.state is not State.ENDED and other.lane is not lane:
                lane.wait(other.event)
        pairs = transfer.pairs[transfer.ok]
        if len(pairs):
            lane.run(functools.partial(self._copies.cross, *transfer.tiers, pairs))
        transfer.event = lane.record()
        self._note_targets(transfer)

    def _start_files(self, transfer: Transfer) -> None:
        host, disk, workers = self._host, self._disk, self._workers
        if host is None or disk is None or workers is None:
            raise AssertionError("a transfer of files without a disk tier")
        tasks: list[Callable[[], str]] = []
        for (source, target), ok in zip(transfer.pairs.tolist(), transfer.ok, strict=True):
            if transfer.tiers[0] == DISK:
                tasks.append(functools.partial(disk.load, source, host.slot(target)))
            elif ok:
                tasks.append(functools.partial(disk.store, target, host.slot(source)))
            else:
                tasks.append(functools.partial(_store_nothing, disk, source, target))
        workers.add(transfer, tasks)

    def _note_targets(self, transfer: Transfer) -> None:
        """Host slots without meaning: remembered, so that whatever is read from them later fails as well."""
        if transfer.tiers[1] == HOST:
            for place, ok in zip(transfer.writes.tolist(), transfer.ok, strict=True):
                (self._undefined.discard if ok else self._undefined.add)(place)

    def _end(self, transfer: Transfer) -> None:
        if transfer.lane is None:
            self._note_targets(transfer)
        transfer.state = State.ENDED
        del self._open[transfer.ticket]
        brought = sum(transfer.ok)
        self._moved[transfer.tiers] += brought
        self._failed[transfer.tiers] += len(transfer.ok) - brought
        self._results[transfer.ticket] = tuple(transfer.ok)


def _store_nothing(disk: DiskTier, source: int, target: int) -> str:
    disk.drop(target)
    return f"host slot {source} holds no block: the transfer into it failed"


def _slots(numbers: Iterable[int]) -> Places:
    return np.fromiter(numbers, np.intp)
