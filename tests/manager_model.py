"""A plain model of what the manager's callers see: bytes in slots, tokens in sequences. It shares no code with it.

Every byte of a block is a tag: what a step computed there depends on the scope and on all tokens up to that position,
so the tag is these. If any row ever reads a slot that somebody else wrote, or that was handed out too early, its tag is
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphkv.transfer import CopyJob

Tag = tuple[object, ...]
GARBAGE: Tag = ("garbage",)


@dataclass
class Bytes:
    """Slots of all tiers, by (tier, slot); colder tiers are numbered as the mover sees them."""

    block_size: int
    slots: dict[tuple[int, int], list[Tag]] = field(default_factory=dict)

    def of(self, tier: int, slot: int) -> list[Tag]:
        return self.slots.setdefault((tier, slot), [GARBAGE] * self.block_size)

    def copy(self, job: CopyJob) -> None:
        source = self.of(job.source_tier, job.source)
        self.slots[job.target_tier, job.target] = source[: job.tokens] + [GARBAGE] * (self.block_size - job.tokens)


class FakeMover:
    """A mover whose transfers end when the test says so, and read and write at that moment and no earlier."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.running: dict[int, list[CopyJob]] = {}
        self.ended: dict[int, list[bool]] = {}
        self.tickets = 0

    def submit(self, jobs: Sequence[CopyJob]) -> int:
        assert jobs
        assert len({(job.source_tier, job.target_tier) for job in jobs}) == 1
        assert all(abs(job.source_tier - job.target_tier) == 1 for job in jobs)
        assert len({job.target for job in jobs}) == len(jobs)
        busy = {(j.target_tier, j.target) for jobs_ in self.running.values() for j in jobs_}
        assert not busy & {(j.target_tier, j.target) for j in jobs}, "a slot is the target of two transfers"
        self.tickets += 1
        self.running[self.tickets] = list(jobs)
        return self.tickets

    def end(self, ticket: int, failed: Sequence[int] = ()) -> None:
        """End a transfer; the jobs `failed` leave garbage."""
        ok: list[bool] = []
        for i, job in enumerate(self.running.pop(ticket)):
            ok.append(i not in failed)
            if ok[-1]:
                self.memory.copy(job)
            else:
                self.memory.slots[job.target_tier, job.target] = [GARBAGE] * self.memory.block_size
        self.ended[ticket] = ok

    def end_all(self) -> None:
        for ticket in list(self.running):
            self.end(ticket)

    def poll(self, ticket: int) -> Sequence[bool] | None:
        if ticket in self.running:
            return None
        return self.ended.pop(ticket)


@dataclass
class ModelSequence:
    """Tokens of a sequence. `known` beyond `fed` are yet to be fed."""

    row: int
    serial: int
    scope: object
    tokens: list[int]
    fed: int

    def tag(self, position: int) -> Tag:
        return (self.scope, *self.tokens[: position + 1])
