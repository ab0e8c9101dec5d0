"""A manager and its plain model, driven by operations that any source of choices can make.

Steps write tags (see `manager_model`) through the table that the device has by then; copies and transfers move them.
Layer groups with a window have tables and bytes of their own; what their queries read is looked at in every step.
After each operation every ready row must read its own tags, and nothing that was refused may have changed anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import numpy as np
from manager_model import Bytes, FakeMover, ModelSequence

from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows
from graphkv.manager.drops import DropPlan
from graphkv.manager.prefix import Scope
from graphkv.manager.retention import Keep, Retention
from graphkv.manager.v2 import RowState
from graphkv.manager.windowed import WindowedManager, build_manager
from graphkv.window import Window

SCOPES = [Scope(), Scope(), Scope(), Scope(salt=""), Scope(lora="")]
RETENTIONS = [Retention(), Retention((Keep(0, 2, 90, 5.0), Keep(3, None, 10))), Retention(default=50)]
TOKENS = [0, 0, 0, 1]  # few and unequal, so that sequences begin alike and part


class World:
    """Operations take a `Random`, which hypothesis or a seed stands behind."""

    def __init__(
        self,
        tiers: tuple[int, ...],
        *,
        num_blocks: int = 13,
        block_size: int = 2,
        max_rows: int = 4,
        max_blocks: int = 6,
        max_edits: int = 20,
        windows: tuple[Window, ...] = (),
        window_blocks: tuple[int, ...] = (),
        rewind_room: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        self.memories = [Bytes(block_size) for _ in (None, *windows)]
        self.memory, self.windows, self.max_rows = self.memories[0], windows, max_rows
        self.mover = FakeMover(self.memory)
        self.now = 0.0
        self.manager = build_manager(
            windows,
            window_blocks,
            rewind_room,
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_blocks=max_blocks,
            max_edits=max_edits,
            tier_slots=tiers,
            mover=self.mover if tiers else None,
            clock=lambda: self.now,
            prefix_caching=prefix_caching,
            event_capacity=100_000,
        )
        self.tiers, self.block_size, self.num_blocks = tiers, block_size, num_blocks
        self.sequences: dict[int, ModelSequence] = {}
        self.step = 0
        # Of unretired steps: (sequence, tokens fed before, credited, accepted), and the owner of each (group, block)
        # that they touch.
        self.flight: dict[int, list[tuple[ModelSequence, int, int, int]]] = {}
        self.touched: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        self.device = np.zeros_like(self.manager.table.ids)  # the tables that steps see
        self.edits = np.zeros((max_edits, 3), np.int32)
        self.events = 0
        self.findable: dict[tuple[int, int, int], bytes] = {}  # by group, tier and slot
        self.counts: dict[str, int] = {}
        self.loading: set[int] = set()
        self.plans: list[DropPlan] = []

    # what the operations need ---------------------------------------------------------------------------------------

    def rows(self, state: RowState = RowState.READY) -> list[int]:
        return [row for row in sorted(self.sequences) if self.manager.state(row) == state]

    def flying(self, row: int) -> bool:
        return any(sequence is self.sequences.get(row) for jobs in self.flight.values() for sequence, *_ in jobs)

    def attempt(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a verb that may be refused; if it is, nothing may have changed, and the error is returned."""
        before = self.snapshot()
        try:
            result = getattr(self.manager, verb)(*args, **kwargs)
        except (OutOfBlocks, OutOfRows, InvalidValue) as error:
            result = error
        if isinstance(result, Exception):
            assert self.snapshot() == before, result
            self.count(f"{verb}: {type(result).__name__}")
        else:
            self.count(verb)
        return result

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def snapshot(self) -> tuple[object, ...]:
        m = self.manager
        arrays = [m.table.ids, m.length, m.blocks_held, m.serial, m.is_open, m.is_ready, m.blocks.refs]
        if isinstance(m, WindowedManager):
            arrays += [array for g in m.windows for array in (g.first, g.due_at, g.blocks.refs)]
        stats = m.stats()
        stats = replace(stats, tiers=tuple(tier._replace(peak_held=0) for tier in stats.tiers))  # a look in holds
        return (stats, *(array.tobytes() for array in arrays))

    def flush(self) -> None:
        """What a step does first: copies in order, then the edits of its packet."""
        for job in self.manager.take_copies(self.step + 1):
            self.must_be_unused(job.target, None, job.group)
            self.memories[job.group].copy(job)
            self.count(f"copy in group {job.group}" if job.group else "copy")
        for row, column, block in self.edits[: self.manager.take_edits(self.edits)].tolist():
            self.device[row, column] = block

    def must_be_unused(self, block: int, owner: tuple[int, int] | None, group: int = 0) -> None:
        """No unretired step of another sequence may touch a block that is about to be written."""
        for step, blocks in self.touched.items():
            place = group, block
            assert blocks.get(place, owner) == owner, f"block {place} is written while step {step} may touch it"

    def lines(self, row: int) -> Iterator[tuple[int, list[int], Bytes]]:
        """Of each group its number, the row's block ids on the device, and the bytes of its blocks."""
        for group, memory in enumerate(self.memories):
            yield group, self.device[group * self.max_rows + row].tolist(), memory

    def readable(self, group: int, position: int) -> list[int]:
        """Positions before `position` that a query there reads."""
        if not group:
            return list(range(position))
        window = self.windows[group - 1]
        return [p for p in range(position) if p < window.sinks or p > position - window.tokens]

    def pending(self, row: int) -> list[int]:
        """Prompt tokens that no step has fed."""
        sequence = self.sequences[row]
        return sequence.tokens[sequence.fed :]

    def feed(self, batch: dict[int, tuple[list[int], int]]) -> None:
        """A step, unless it is refused: each row feeds tokens, of which so many are accepted."""
        rows = np.array(list(batch), np.int32)
        n = np.array([len(tokens) for tokens, _ in batch.values()], np.int64)
        if len(self.flight) == 2 or isinstance(self.attempt("extend", rows, n), Exception):
            return
        self.manager.advance(rows, n)
        self.flush()
        self.step += 1
        self.manager.submitted = self.step
        jobs: list[tuple[ModelSequence, int, int, int]] = []
        touched: dict[tuple[int, int], tuple[int, int]] = {}
        for row, (tokens, accepted) in batch.items():
            sequence = self.sequences[row]
            start, rest = sequence.fed, self.pending(row)[len(tokens) :]
            owner = row, sequence.serial
            sequence.tokens[start:] = tokens
            for group, line, memory in self.lines(row):
                assert line == self.manager.table.ids[group * self.max_rows + row].tolist()
                touched.update({(group, block): owner for block in line if block})
                for position in range(start, start + len(tokens)):
                    block = line[position // self.block_size]
                    assert block, f"group {group}: row {row} has no block for position {position}"
                    self.must_be_unused(block, owner, group)
                    memory.of(0, block)[position % self.block_size] = sequence.tag(position)
                    self.check_reads(sequence, group, position, line)
            sequence.fed = start + accepted
            sequence.tokens[sequence.fed :] = rest
            jobs.append((sequence, start, len(tokens), accepted))
        self.flight[self.step], self.touched[self.step] = jobs, touched

    def retire_one(self, late: bool = False) -> None:
        """The oldest step's results come: lengths are settled, full blocks committed."""
        done = min(self.flight)
        for sequence, start, credited, accepted in self.flight.pop(done):
            rows, serial = np.array([sequence.row], np.int32), np.array([sequence.serial])
            self.manager.settle(rows, credited - accepted, serial)
            if self.sequences.get(sequence.row) is sequence:
                end = start + accepted
                self.manager.token_ids[sequence.row, start:end] = sequence.tokens[start:end]
                self.manager.commit(rows, end, step=done if late else 0, serial=serial)
        del self.touched[done]
        self.manager.retire(done)

    # operations -----------------------------------------------------------------------------------------------------

    def open(self, rng: Random) -> None:
        tokens = [0] * rng.randint(0, 9) + [rng.choice(TOKENS) for _ in range(rng.randint(1, 2))]
        scope, retention = rng.choice(SCOPES), rng.choice(RETENTIONS)
        probed = self.manager.probe_match(tokens, scope)
        row = self.attempt("open", tokens=tokens, scope=scope, retention=retention)
        if isinstance(row, Exception):
            return
        cached = int(self.manager.length[row])
        assert cached <= min(probed, len(tokens) - 1)
        self.sequences[row] = ModelSequence(row, int(self.manager.serial[row]), scope, tokens, cached)
        if cached:
            self.count("match")

    def guess(self, rng: Random) -> None:
        """A step of some rows: prompts in chunks and wholly accepted, the others with up to 3 tokens."""
        batch: dict[int, tuple[list[int], int]] = {}
        ready = self.rows()
        for row in rng.sample(ready, rng.randint(min(1, len(ready)), len(ready))):
            if prompt := self.pending(row):
                count = rng.randint(1, len(prompt))
                batch[row] = prompt[:count], count
            else:
                count = rng.randint(1, 3)
                batch[row] = [rng.choice(TOKENS) for _ in range(count)], rng.randint(1, count)
        if batch:
            self.feed(batch)

    def answer(self, rng: Random) -> None:
        """Some steps of all rows one after the other, as a quiet server has them."""
        for _ in range(rng.randint(1, 4)):
            while self.flight:
                self.retire_one()
            for row in self.rows():
                tokens = self.pending(row) or [0]
                self.feed({row: (tokens, len(tokens))})
        while self.flight:
            self.retire_one()

    def retire(self, rng: Random) -> None:
        if self.flight:
            self.retire_one(late=rng.random() < 0.5)

    def idle_step(self, rng: Random) -> None:
        """A step of no rows, which brings pending edits and copies to the device."""
        self.flush()

    def rewind(self, rng: Random) -> None:
        rows = [row for row in self.rows() if not self.flying(row)]
        if not rows:
            return
        sequence = self.sequences[rng.choice(rows)]
        n = rng.randint(0, sequence.fed)
        if not isinstance(self.attempt("rewind", np.array([sequence.row]), n, self.step), Exception):
            sequence.fed -= n
            del sequence.tokens[sequence.fed :]

    def fork(self, rng: Random) -> None:
        rows = self.rows()
        if not rows:
            return
        parent = self.sequences[rng.choice(rows)]
        child = self.attempt("fork", parent.row)
        if not isinstance(child, Exception):
            assert not self.flight
            tokens = parent.tokens[: parent.fed]
            self.sequences[child] = ModelSequence(
                child, int(self.manager.serial[child]), parent.scope, tokens, parent.fed
            )

    def suspend(self, rng: Random) -> None:
        if self.rows():
            self.flush()
            if not isinstance(self.attempt("suspend", rng.choice(self.rows())), Exception):
                assert not self.flight

    def resume(self, rng: Random) -> None:
        if rows := self.rows(RowState.SUSPENDED):
            self.attempt("resume", rng.choice(rows))

    def close(self, rng: Random) -> None:
        """In any state, in the middle of anything; a second time does nothing (case E1)."""
        if self.sequences:
            sequence = self.sequences.pop(rng.choice(sorted(self.sequences)))
            self.count(f"close a {self.manager.state(sequence.row)} row")
            assert self.manager.close(sequence.row, self.step, sequence.serial)
            assert not self.manager.close(sequence.row, self.step, sequence.serial)

    def evict(self, rng: Random) -> None:
        free = self.manager.stats().blocks_free
        evicted = self.manager.evict(rng.choice([None, 1, 2, 4, 8]))
        assert self.manager.stats().blocks_free == free + evicted

    def plan_drop(self, rng: Random) -> None:
        if self.sequences:
            self.plans.append(self.manager.plan_drop(rng.choice(sorted(self.sequences))))

    def drop(self, rng: Random) -> None:
        if self.plans:
            gone = self.plans.pop(rng.randrange(len(self.plans))).drop()
            self.count("drop" if gone else "drop: all needed")

    def resize(self, rng: Random) -> None:
        """The device gets more blocks, or fewer where nobody is in the way."""
        target, blocks = rng.randint(5, self.num_blocks + 6), self.manager.blocks
        before = self.snapshot()
        if in_the_way := self.manager.vacate(target):
            assert self.snapshot() == before
            self.count("resize: in the way")
            assert isinstance(self.attempt("resize", target), InvalidValue)
            return
        assert in_the_way == 0
        if target < blocks.num_blocks:
            self.count("shrink")
            for block in range(target, blocks.num_blocks):
                assert all(block not in touched for touched in self.touched.values())
                self.memory.slots.pop((0, block), None)
        self.manager.resize(target)
        assert self.manager.stats().blocks_total == target - 1

    def prefetch(self, rng: Random) -> None:
        if self.manager.prefetch([0] * rng.randint(2, 10), rng.choice(SCOPES)):
            self.count("prefetch")

    def transfer_ends(self, rng: Random) -> None:
        """Any of the running ones, sometimes badly."""
        if not self.mover.running:
            return
        ticket = rng.choice(sorted(self.mover.running))
        jobs = self.mover.running[ticket]
        for job in jobs:
            if job.target_tier == 0:
                self.must_be_unused(job.target, None)
        failed = [rng.randrange(len(jobs))] if rng.random() < 0.15 else []
        self.count(f"transfer {jobs[0].source_tier} to {jobs[0].target_tier}{' failed' if failed else ''}")
        self.mover.end(ticket, failed)
        if rng.random() < 0.5:
            self.poll(rng)

    def poll(self, rng: Random) -> None:
        self.now += rng.randint(0, 4)
        self.manager.poll()

    def note_loads(self) -> None:
        """Rows that have become ready may have more of their prompt than when they were opened."""
        for row in self.loading & set(self.sequences):
            if self.manager.state(row) == RowState.READY:
                sequence, length = self.sequences[row], int(self.manager.length[row])
                assert length >= sequence.fed
                if length > sequence.fed:
                    self.count("match in a colder tier")
                    assert length < len(sequence.tokens)
                sequence.fed = length

    # what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.note_loads()
        self.loading = set(self.rows(RowState.LOADING))
        self.manager.check()
        for row in self.rows():
            sequence = self.sequences[row]
            length = int(self.manager.length[row])
            assert length >= sequence.fed
            assert length == sequence.fed or self.flying(row)
            if not self.manager.copies_pending:
                self.check_bytes(sequence)
        self.check_events()

    def check_bytes(self, sequence: ModelSequence) -> None:
        for group in range(len(self.memories)):
            line = self.manager.table.ids[group * self.max_rows + sequence.row].tolist()
            self.check_reads(sequence, group, sequence.fed, line)

    def check_reads(self, sequence: ModelSequence, group: int, position: int, line: list[int]) -> None:
        """Whatever a query at `position` reads has the sequence's own bytes."""
        for p in self.readable(group, position):
            tag = self.memories[group].of(0, line[p // self.block_size])[p % self.block_size]
            assert tag == sequence.tag(p), f"group {group}: row {sequence.row}, position {p} as read from {position}"

    def check_events(self) -> None:
        """The events alone tell which slots hold which content, in every tier."""
        for event in self.manager.take_events():
            self.events += 1
            assert event.number == self.events
            place = event.group, event.tier, event.block
            if event.kind == "stored":
                assert place not in self.findable
                self.findable[place] = event.key
            elif event.kind in ("removed", "moved"):
                assert self.findable.pop(place) == event.key
                if event.kind == "moved":
                    assert (event.to_tier, event.key) in {(tier, key) for (_, tier, _), key in self.findable.items()}
        stats = self.manager.stats()
        kept = [stats.blocks_cached + stats.blocks_shared, *(tier.cached + tier.shared for tier in stats.tiers)]
        kept += [counts.cached + counts.shared for counts in stats.windows]
        places = [(0, tier) for tier in range(1 + len(stats.tiers))] + [(g, 0) for g in range(1, len(self.memories))]
        assert kept == [sum(where[:2] == place for where in self.findable) for place in places]
        owned = stats.blocks_held + stats.blocks_cached + stats.blocks_retiring
        assert stats.blocks_free + owned == stats.blocks_total
        for tier in (*stats.tiers, *stats.windows):
            assert tier.free + tier.held + tier.cached + tier.retiring == tier.total

    def end(self) -> None:
        """Everything is closed and every transfer ends: nothing is held by anybody, in any tier."""
        for row, sequence in list(self.sequences.items()):
            self.manager.close(row, self.step, sequence.serial)
        self.sequences.clear()
        while self.flight:
            self.retire_one()
        for _ in range(12):
            self.flush()
            self.mover.end_all()
            self.manager.poll()
        self.manager.retire(self.step + 1)
        self.check()
        stats = self.manager.stats()
        assert stats.blocks_underway == 0
        assert not any((stats.blocks_held, *(tier.held for tier in (*stats.tiers, *stats.windows))))
        assert stats.rows_free == self.manager.max_rows

    OPERATIONS: ClassVar[dict[str, int]] = {  # names of operations and how often a soak makes them
        "open": 8,
        "guess": 6,
        "answer": 4,
        "retire": 6,
        "idle_step": 5,
        "rewind": 2,
        "fork": 2,
        "suspend": 3,
        "resume": 3,
        "close": 5,
        "evict": 1,
        "plan_drop": 2,
        "drop": 2,
        "resize": 1,
        "prefetch": 2,
        "transfer_ends": 6,
        "poll": 5,
    }
