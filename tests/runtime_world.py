"""A runtime and its shadow, driven by operations that any source of choices can make.

Every transfer waits until an operation ends it, well or badly, and files go missing. After each operation all bytes of
all pools are compared with those foretold, and what every ready sequence reads through its table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from tier_shadow import tier_runtime

from graphkv.errors import GraphKVError, InvalidValue, NotReady, OutOfBlocks, OutOfRows
from graphkv.manager.drops import DropPlan
from graphkv.manager.prefix import Scope
from graphkv.manager.v2 import RowState
from graphkv.sequence import Sequence
from graphkv.tiers.hierarchy import TierOptions

SCOPES = [Scope(), Scope(), Scope(salt="tenant")]
LONGEST = 112
FEWEST, FIRST, MOST = 6, 12, 22  # blocks of the pools


class RuntimeWorld:
    """Operations take a `Random`, which hypothesis or a seed stands behind.

    Args:
        colder: how many colder tiers there are.
    """

    def __init__(self, device: Any, colder: int, mode: str = "graph") -> None:
        self.folder = tempfile.TemporaryDirectory()
        disk = {"disk_folder": self.folder.name, "disk_bytes": 16 * 16384} if colder > 1 else {}
        tiers = TierOptions(host_blocks=10 if colder == 1 else 6, **disk) if colder else None
        self.runtime, self.shadow = tier_runtime(
            device, tiers, late=True, num_blocks=FIRST, max_num_blocks=MOST, mode=mode, event_capacity=100
        )
        self.counts: dict[str, int] = {}
        self.plans: list[DropPlan] = []

    # what the operations need ---------------------------------------------------------------------------------------

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def attempt(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call what may be refused: the error is returned, and no sequence has changed."""
        before = self.facts()
        try:
            result = call(*args)
        except (OutOfBlocks, OutOfRows, NotReady, InvalidValue) as error:
            result = error
        if not isinstance(result, GraphKVError):
            self.count(name)
            return result
        self.runtime.retire()
        for (loading, length, tokens), (_, now, more) in zip(before, self.facts(), strict=True):
            assert now == length or loading, result
            assert more[: len(tokens)] == tokens, result
        self.count(f"{name}: {type(result).__name__}")
        return result

    def facts(self) -> list[tuple[bool, int, list[int]]]:
        return [(s.state == RowState.LOADING, s.length, s.tokens.tolist()) for s in self.shadow.sequences]

    def sequences(self, *, fed: bool | None = None, state: RowState = RowState.READY) -> list[Sequence]:
        """Those in a state; `fed` picks those that can be stepped, or that have something to prefill."""
        found = [sequence for sequence in self.shadow.sequences if sequence.state == state]
        return found if fed is None else [s for s in found if self.is_fed(s) == fed]

    def is_fed(self, sequence: Sequence) -> bool:
        known = self.shadow.sequences[sequence]
        return known.fed is not None and len(known.tokens) == known.fed + 1

    # operations -----------------------------------------------------------------------------------------------------

    def open(self, rng: Random) -> None:
        """Prompts that begin alike, and part at some point."""
        family, length, part = rng.choice([1, 1, 2]), rng.randint(1, 60), rng.randint(0, 60)
        tokens = [family * 10_000 + i for i in range(min(length, part))]
        tokens += [3 * 10_000 + i for i in range(len(tokens), length)]
        sequence = self.attempt("open", self.shadow.open, tokens, rng.choice(SCOPES))
        if not isinstance(sequence, GraphKVError):
            assert sequence.cached_tokens < length
            self.count(f"open: {sequence.state}{', cached' * bool(sequence.cached_tokens)}")

    def prefill(self, rng: Random) -> None:
        if waiting := self.sequences(fed=False):
            self.attempt("prefill", self.shadow.prefill, rng.sample(waiting, rng.randint(1, len(waiting))))

    def step(self, rng: Random) -> None:
        for _ in range(rng.randint(1, 6)):
            ready = [s for s in self.sequences(fed=True) if s.length < LONGEST]
            if ready:
                self.attempt("step", self.shadow.step, rng.sample(ready, rng.randint(1, len(ready))))

    def step_anyone(self, rng: Random) -> None:
        """Also of those that cannot be stepped, which is refused."""
        if self.shadow.sequences:
            sequence = rng.choice(list(self.shadow.sequences))
            if not self.is_fed(sequence):
                assert isinstance(self.attempt("step", self.runtime.step, [sequence]), GraphKVError)
            elif not sequence.is_ready:  # unless a look finds it there
                result = self.attempt("step", self.shadow.step, [sequence])
                assert sequence.is_ready != isinstance(result, GraphKVError)

    def fork(self, rng: Random) -> None:
        if fed := self.sequences(fed=True):
            self.attempt("fork", self.shadow.fork, rng.choice(fed))

    def rewind(self, rng: Random) -> None:
        if fed := self.sequences(fed=True):
            sequence = rng.choice(fed)
            self.attempt("rewind", self.shadow.rewind, sequence, rng.randint(0, sequence.length))

    def append(self, rng: Random) -> None:
        if ready := [s for s in self.sequences() if s.length < LONGEST - 20]:
            sequence = rng.choice(ready)
            count = rng.randint(1, LONGEST - len(self.shadow.sequences[sequence].tokens))
            self.attempt("append", self.shadow.append, sequence, [70_000 + i for i in range(min(count, 30))])

    def suspend(self, rng: Random) -> None:
        if ready := self.sequences():
            self.attempt("suspend", self.runtime.suspend, rng.choice(ready))

    def resume(self, rng: Random) -> None:
        if suspended := self.sequences(state=RowState.SUSPENDED):
            self.attempt("resume", self.runtime.resume, rng.choice(suspended))

    def prefetch(self, rng: Random) -> None:
        tokens = [rng.choice([1, 2]) * 10_000 + i for i in range(60)]
        if self.runtime.prefetch(tokens, scope=rng.choice(SCOPES)):
            self.count("prefetch")

    def evict(self, rng: Random) -> None:
        self.runtime.evict(rng.choice([None, 1, 3]))

    def plan_drop(self, rng: Random) -> None:
        if self.shadow.sequences:
            self.plans.append(self.runtime.plan_drop(rng.choice(list(self.shadow.sequences))))

    def drop(self, rng: Random) -> None:
        if self.plans:
            self.count("drop" if self.plans.pop(rng.randrange(len(self.plans))).drop() else "drop: all needed")

    def close(self, rng: Random) -> None:
        if self.shadow.sequences:
            sequence = rng.choice(list(self.shadow.sequences))
            self.count(f"close: {sequence.state}")
            self.shadow.close(sequence)

    def resize(self, rng: Random) -> None:
        target, before = rng.randint(FEWEST, MOST), self.runtime.pools.num_blocks
        if target > before:
            self.attempt("grow", self.shadow.grow, target)
        elif target < before:
            self.attempt("shrink", self.runtime.shrink, target)

    def retire(self, rng: Random) -> None:
        self.runtime.retire()

    def poll(self, rng: Random) -> None:
        self.runtime.poll()

    def transfer_ends(self, rng: Random) -> None:
        """Any of them, sometimes badly, and sometimes a file is gone before it is read."""
        if self.shadow.mover is None or not self.shadow.mover.held:
            return
        ticket = rng.choice(sorted(self.shadow.mover.held))
        jobs = self.shadow.mover.held[ticket]
        name = f"transfer {jobs[0].source_tier} to {jobs[0].target_tier}"
        files = sorted(Path(self.folder.name).glob("*/*.block"))
        if files and rng.random() < 0.1:
            rng.choice(files).unlink()
            self.count("file gone")
        failed = [rng.randrange(len(jobs))] if rng.random() < 0.1 else []
        self.shadow.mover.release(ticket, failed)
        self.count(name + " failed" * bool(failed))
        if rng.random() < 0.5:
            self.runtime.poll()

    # what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.shadow.check_bytes()
        self.runtime.check()
        for sequence, known in self.shadow.sequences.items():
            tokens = sequence.tokens.tolist()
            assert tokens == known.tokens[: len(tokens)], sequence
            if sequence.is_ready and known.fed is not None:
                assert sequence.length == known.fed
                self.shadow.check_reads(sequence)

    def end(self) -> None:
        """Everything is closed and every transfer ends: nothing is held by anybody, in any tier."""
        self.shadow.check()
        for sequence in list(self.shadow.sequences):
            self.shadow.close(sequence)
        self.runtime.retire()
        if self.shadow.mover is not None:
            self.shadow.mover.late = False
            self.shadow.mover.release_all()
        self.runtime.drain(60)
        self.runtime.shrink(2) if self.runtime.pools.num_blocks > 2 else None
        self.check()
        stats = self.runtime.manager.stats()
        assert [stats.blocks_held, *(tier.held for tier in stats.tiers)] == [0] * (1 + len(stats.tiers))
        assert stats.rows_free == 4
        with self.runtime:
            pass
        assert list(Path(self.folder.name).iterdir()) == []
        self.folder.cleanup()

    OPERATIONS: ClassVar[dict[str, int]] = {  # names of operations and how often a soak makes them
        "open": 7,
        "prefill": 8,
        "step": 9,
        "step_anyone": 1,
        "fork": 2,
        "rewind": 2,
        "append": 1,
        "suspend": 4,
        "resume": 5,
        "prefetch": 1,
        "evict": 4,
        "plan_drop": 1,
        "drop": 1,
        "close": 5,
        "resize": 2,
        "retire": 3,
        "poll": 3,
        "transfer_ends": 16,
    }
