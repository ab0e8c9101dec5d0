"""A mover whose transfers a test can hold back, fail and follow, around the real one that carries the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphkv.tiers.mover import TierMover
from graphkv.transfer import DEVICE, BlockMover, CopyJob

GARBAGE = 0x5A


class WatchedMover(BlockMover):
    """Begins a transfer when it is told to, or at once.

    Args:
        inner: carries the bytes.
        began: told each transfer as it begins.
        failed: told each job that failed, once its target has the bytes that it will be left with.
        late: whether transfers wait for `release`.
    """

    def __init__(
        self,
        inner: TierMover,
        began: Callable[[Sequence[CopyJob]], None],
        failed: Callable[[CopyJob], None],
        late: bool = False,
    ) -> None:
        self.inner, self.late = inner, late
        self._began, self._failed = began, failed
        self.held: dict[int, list[CopyJob]] = {}  # not begun
        self._inside: dict[int, tuple[int, list[CopyJob]]] = {}  # ticket -> that of the real mover
        self._ended: dict[int, list[bool]] = {}
        self._tickets = 0

    def submit(self, jobs: Sequence[CopyJob]) -> int:
        self._tickets += 1
        self.held[self._tickets] = list(jobs)
        if not self.late:
            self._begin(self._tickets)
        return self._tickets

    def release(self, ticket: int, failed: Sequence[int] = ()) -> None:
        """Carry out a transfer that is held back, wait for its end, and spoil the jobs `failed`."""
        self._begin(ticket)
        inside, jobs = self._inside.pop(ticket)
        ok = list(self.inner.wait(inside))
        for i in failed:
            self._spoil(jobs[i])
            ok[i] = False
        self._ended[ticket] = self._told(jobs, ok)

    def release_all(self) -> None:
        for ticket in list(self.held):
            self.release(ticket)

    def poll(self, ticket: int) -> Sequence[bool] | None:
        if ticket in self.held:
            return None
        if ticket in self._ended:
            return self._ended.pop(ticket)
        inside, jobs = self._inside[ticket]
        if (result := self.inner.poll(inside)) is None:
            return None
        del self._inside[ticket]
        return self._told(jobs, list(result))

    def _told(self, jobs: list[CopyJob], ok: list[bool]) -> list[bool]:
        for job, fine in zip(jobs, ok, strict=True):
            if not fine:
                self._failed(job)
        return ok

    def _begin(self, ticket: int) -> None:
        jobs = self.held.pop(ticket)
        self._inside[ticket] = self.inner.submit(jobs), jobs
        self._began(jobs)

    def _spoil(self, job: CopyJob) -> None:
        """Leave something else in a target, as a copy that broke off would."""
        if job.target_tier == DEVICE:
            for pool in self.inner._pools:
                pool.block(job.target).fill_(GARBAGE)
                if pool.data.is_cuda:
                    torch.cuda.synchronize(pool.data.device)  # steps and transfers run on other streams
        elif job.target_tier == 1:
            self.inner._host.data[job.target].fill_(GARBAGE)
        else:
            self.inner._disk.drop(job.target)
