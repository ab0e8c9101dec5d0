"""The whole manager against a plain model: whatever is done in whatever order, each row reads its own bytes.

The machines let hypothesis look for a short history that breaks something; the soak makes thousands of operations with
weights that lead to crowded states.
"""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manager_world import World

from graphkv.manager.v2 import RowState

RNG = st.randoms(use_true_random=False)


class ManagerMachine(RuleBasedStateMachine):
    TIERS: tuple[int, ...] = ()
    WORLD: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.TIERS, **self.WORLD)

    @rule(rng=RNG)
    def open(self, rng: Random) -> None:
        self.world.open(rng)

    @precondition(lambda self: self.world.rows())
    @rule(rng=RNG, operation=st.sampled_from(["guess", "answer", "rewind", "fork", "suspend"]))
    def with_a_ready_row(self, rng: Random, operation: str) -> None:
        getattr(self.world, operation)(rng)

    @precondition(lambda self: self.world.flight)
    @rule(rng=RNG)
    def retire(self, rng: Random) -> None:
        self.world.retire(rng)

    @precondition(lambda self: self.world.sequences)
    @rule(rng=RNG)
    def close(self, rng: Random) -> None:
        self.world.close(rng)

    @precondition(lambda self: self.world.rows(RowState.SUSPENDED))
    @rule(rng=RNG)
    def resume(self, rng: Random) -> None:
        self.world.resume(rng)

    @rule(rng=RNG, operation=st.sampled_from(["evict", "resize", "prefetch", "poll", "idle_step"]))
    def whenever(self, rng: Random, operation: str) -> None:
        getattr(self.world, operation)(rng)

    @precondition(lambda self: self.world.mover.running)
    @rule(rng=RNG)
    def transfer_ends(self, rng: Random) -> None:
        self.world.transfer_ends(rng)

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.end()


class OneTierMachine(ManagerMachine):
    TIERS = (5,)


class TwoTierMachine(ManagerMachine):
    TIERS = (9, 6)


QUICK = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestManagerAlone = ManagerMachine.TestCase
TestManagerWithHost = OneTierMachine.TestCase
TestManagerWithHostAndDisk = TwoTierMachine.TestCase
for case in (TestManagerAlone, TestManagerWithHost, TestManagerWithHostAndDisk):
    case.settings = QUICK


@pytest.mark.parametrize("tiers", [(), (5,), (6, 12), (16, 20)], ids=str)
def test_soak(tiers: tuple[int, ...]) -> None:
    """Thousands of operations, `check` and every byte after each; and they did reach what they were made for."""
    reached: dict[str, int] = {}
    for seed in range(40):
        world = World(tiers)
        for _ in world.soak(Random(seed), 300):
            pass
        world.end()
        for what, count in world.counts.items():
            reached[what] = reached.get(what, 0) + count
    wanted = {
        "resize: in the way",
        "shrink",
        "match",
        "copy",
        "extend: OutOfBlocks",
        "fork",
        "rewind",
        "rewind: OutOfBlocks",
    }
    if tiers:
        wanted |= {"resume", "match in a colder tier", "prefetch", "transfer 0 to 1 failed", "close a suspending row"}
        wanted |= {"close a loading row", "close a suspended row", "transfer 1 to 0"}
    if len(tiers) > 1:
        wanted |= {"transfer 1 to 2", "transfer 2 to 1"}
    assert wanted <= reached.keys(), wanted - reached.keys()
