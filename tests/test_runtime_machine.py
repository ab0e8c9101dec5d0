"""The whole runtime against what its bytes and tokens must be, whatever is done in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runtime_world import RuntimeWorld
from soak import soak

from graphkv.loop import submit
from graphkv.manager.v2 import RowState

RNG = st.randoms(use_true_random=False)


@pytest.fixture(autouse=True, scope="module")
def _no_patience() -> Iterator[None]:
    """Transfers end here only when an operation says so, so a step that waits for one would wait in vain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "_PATIENCE_S", 0.0)
        yield


class RuntimeMachine(RuleBasedStateMachine):
    COLDER = 0

    def __init__(self) -> None:
        super().__init__()
        self.world = RuntimeWorld("cpu", self.COLDER)

    @rule(rng=RNG)
    def open(self, rng: Random) -> None:
        self.world.open(rng)

    @precondition(lambda self: self.world.sequences(fed=False))
    @rule(rng=RNG)
    def prefill(self, rng: Random) -> None:
        self.world.prefill(rng)

    @precondition(lambda self: self.world.sequences(fed=True))
    @rule(rng=RNG, operation=st.sampled_from(["step", "step", "fork", "rewind", "append", "suspend"]))
    def with_a_fed_one(self, rng: Random, operation: str) -> None:
        getattr(self.world, operation)(rng)

    @precondition(lambda self: self.world.shadow.sequences)
    @rule(rng=RNG, operation=st.sampled_from(["close", "step_anyone"]))
    def with_any(self, rng: Random, operation: str) -> None:
        getattr(self.world, operation)(rng)

    @precondition(lambda self: self.world.sequences(state=RowState.SUSPENDED))
    @rule(rng=RNG)
    def resume(self, rng: Random) -> None:
        self.world.resume(rng)

    @rule(rng=RNG, operation=st.sampled_from(["evict", "prefetch", "resize", "retire", "poll", "plan_drop", "drop"]))
    def whenever(self, rng: Random, operation: str) -> None:
        getattr(self.world, operation)(rng)

    @precondition(lambda self: self.world.shadow.mover is not None and self.world.shadow.mover.held)
    @rule(rng=RNG)
    def transfer_ends(self, rng: Random) -> None:
        self.world.transfer_ends(rng)

    @invariant()
    def all_is_well(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.end()


class OneTierMachine(RuntimeMachine):
    COLDER = 1


class TwoTierMachine(RuntimeMachine):
    COLDER = 2


TestRuntimeAlone = RuntimeMachine.TestCase
TestRuntimeWithHost = OneTierMachine.TestCase
TestRuntimeWithHostAndDisk = TwoTierMachine.TestCase
for case in (TestRuntimeAlone, TestRuntimeWithHost, TestRuntimeWithHostAndDisk):
    case.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
del case  # or pytest runs it once more by that name


@pytest.mark.parametrize("colder", [0, 1, 2])
def test_soak(device: torch.device, colder: int) -> None:
    """Three thousand operations, `check` and every byte after each; and they did reach what they were made for.

    A quarter of that on a GPU, where reading all bytes after each operation takes its time.
    """
    seeds = 12 if device.type == "cpu" else 3
    reached = soak(lambda: RuntimeWorld(device, colder), seeds=seeds, operations=250)
    if device.type != "cpu":
        return
    wanted = {"open: ready, cached", "fork", "rewind", "append", "grow", "shrink", "shrink: InvalidValue"}
    wanted |= {"prefill", "prefill: OutOfBlocks", "step", "step: OutOfBlocks", "drop"}
    if colder:
        wanted |= {"suspend", "suspend: OutOfBlocks", "resume", "step: NotReady", "transfer 1 to 0"}
        wanted |= {"open: loading", "close: suspending", "close: suspended", "close: loading", "transfer 0 to 1 failed"}
    if colder > 1:
        wanted |= {"transfer 1 to 2", "file gone"}
    assert wanted <= reached.keys(), wanted - reached.keys()
