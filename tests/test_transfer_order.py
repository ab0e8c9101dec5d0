"""Who waits for whom when blocks move (cases H2, H3, H5): stalled streams on CUDA, simulated lanes on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_world import TierWorld, load, offload, onload, same, store, within

from graphkv.errors import InvalidValue, TransferTimeout


def test_case_H2a_two_blocks_to_one_host_slot_in_a_step(device: torch.device) -> None:
    """In the order of submission, with the bytes of the first gone out before the second overwrites them."""
    world = TierWorld(device, simulate=True)
    first, second = world.get(1), world.get(2)
    world.stall("offload")
    world.stall("onload", 2)
    tickets = [world.mover.submit(job) for job in (offload((1, 0)), onload((0, 7)), offload((2, 0)), onload((0, 8)))]
    assert world.mover.poll(tickets[0]) is None
    for lane in ("onload", "steps", "offload"):
        world.hurry(lane)
    world.finish()
    assert [world.mover.poll(ticket) for ticket in tickets] == [(True,)] * 4
    assert same(world.get(7), first)
    assert same(world.get(8), second)
    assert same(world.get_slot(0), second)


def test_case_H2b_partial_copy_from_a_block_that_is_brought_in(device: torch.device) -> None:
    world = TierWorld(device, simulate=True)
    wanted, old = world.get(1), world.get(5)
    world.mover.submit(offload((1, 2)))
    world.finish()
    world.stall("onload")
    world.mover.submit(onload((2, 4)))
    world.mover.copy(within((4, 5, 7)))
    world.hurry("steps")
    world.finish()
    assert same(world.get(4), wanted)
    for part, got, before, source in zip(world.unit.parts, world.get(5), old, wanted, strict=True):
        layout = part.layout
        for place, width in ((0, layout.value_bytes), (layout.block_size * layout.value_bytes, layout.scale_bytes)):
            end = place + layout.block_size * width
            middle = place + 7 * width
            np.testing.assert_array_equal(got[:, place:middle], source[:, place:middle])
            np.testing.assert_array_equal(got[:, middle:end], before[:, middle:end])


def test_case_H2c_bring_in_then_replay(device: torch.device) -> None:
    """A step submitted right behind the transfer reads the block through the steps' lane, into another block."""
    world = TierWorld(device, simulate=True)
    wanted = world.get(1)
    world.mover.submit(offload((1, 2)))
    world.finish()
    world.stall("onload")
    ticket = world.mover.submit(onload((2, 4)))
    world.mover.order_steps([[0, 4, 9 - 1]])
    read: list[Any] = []
    world.lanes["steps"].run(lambda: read.extend(pool.block(4).clone() for pool in world.pools))
    world.hurry("steps")
    world.finish()
    assert world.mover.poll(ticket) == (True,)
    assert same([one.cpu().numpy() for one in read], wanted)


def test_case_H3_offload_at_once_behind_the_step_that_writes_the_block(device: torch.device) -> None:
    world = TierWorld(device, simulate=True)
    new = world.random_block()
    world.stall("steps")
    world.step_writes(3, new)
    ticket = world.mover.submit(offload((3, 1)))
    world.hurry("offload")
    assert world.mover.poll(ticket) is None
    world.finish()
    assert world.mover.poll(ticket) == (True,)
    assert same(world.get_slot(1), new)


def test_a_restore_does_not_hold_up_the_steps(device: torch.device) -> None:
    """A step that does not need the block ends while the transfer still hangs."""
    world = TierWorld(device, simulate=True)
    world.stall("onload", 10)
    ticket = world.mover.submit(onload((2, 4)))
    world.step_writes(5, world.random_block())
    event = world.lanes["steps"].record()
    if world.device.is_cuda:
        event.synchronize()
    else:
        while world.lanes["steps"].step():
            pass
    assert event.done()
    assert world.mover.poll(ticket) is None
    world.finish()


def test_case_H5_slots_of_a_transfer_are_its_own_until_its_end(device: torch.device) -> None:
    """There is no way to take a running transfer back; its end is told once, and an endless one is reported."""
    world = TierWorld(device, simulate=True, limit_s=0.02)
    wanted = [world.get(block) for block in (1, 2)]
    world.mover.submit(offload((1, 0), (2, 1)))
    world.finish()
    world.stall("onload", 4)
    ticket = world.mover.submit(onload((0, 5), (1, 6)))
    time.sleep(0.03)
    (error,) = world.mover.overdue()
    assert (error.ticket, error.seconds > 0.02) == (ticket, True)
    with pytest.raises(TransferTimeout, match=rf"transfer {ticket} \(tier 1 to 0, slots 0 to 5, 1 to 6\)"):
        world.mover.wait(ticket, 0.01)
    with pytest.raises(TransferTimeout):
        world.mover.close(0.01)
    assert world.mover.stats().running == 1
    world.finish()
    assert world.mover.poll(ticket) == (True, True)
    assert world.mover.overdue() == []
    assert same(world.get(5), wanted[0])
    assert same(world.get(6), wanted[1])
    with pytest.raises(InvalidValue, match="its end has been told"):
        world.mover.poll(ticket)
    world.mover.close()


class Model:
    """What sequential execution in the order of submission gives."""

    def __init__(self, world: TierWorld) -> None:
        self.device = {block: world.get(block) for block in range(1, world.pools.num_blocks)}
        self.host = {slot: world.get_slot(slot) for slot in range(world.host.num_slots)}
        self.disk: dict[int, Any] = {}


BLOCKS, SLOTS, FILES = st.integers(1, 8), st.integers(0, 4), st.integers(0, 3)
ACTION = st.one_of(
    st.tuples(st.just("write"), BLOCKS, st.just(0)),
    st.tuples(st.just("offload"), BLOCKS, SLOTS),
    st.tuples(st.just("onload"), SLOTS, BLOCKS),
    st.tuples(st.just("store"), SLOTS, FILES),
    st.tuples(st.just("load"), FILES, SLOTS),
    st.tuples(st.just("copy"), BLOCKS, BLOCKS),
    st.tuples(st.sampled_from(["steps", "offload", "onload"]).map(lambda lane: f"go {lane}"), st.just(0), st.just(0)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("disk")


@settings(max_examples=150)
@given(actions=st.lists(ACTION, max_size=40), seed=st.integers(0, 2**32 - 1))
def test_any_order_that_events_allow_gives_what_sequence_gives(
    folder: Path, actions: list[tuple[str, int, int]], seed: int
) -> None:
    order = Random(seed)  # not drawn one by one: how many choices there are depends on when files are written
    world = TierWorld(simulate=True, disk=folder)
    world.host.data.copy_(torch.randint(0, 256, world.host.data.shape, dtype=torch.uint8))
    model, mover = Model(world), world.mover
    for kind, a, b in actions:
        if kind.startswith("go "):
            world.lanes[kind[3:]].step()
        elif kind == "offload":
            mover.submit(offload((a, b)))
            model.host[b] = model.device[a]
        elif kind == "onload":
            mover.submit(onload((a, b)))
            model.device[b] = model.host[a]
        elif kind == "store":
            mover.submit(store((a, b)))
            model.disk[b] = model.host[a]
        elif kind == "load" and a in model.disk:
            mover.submit(load((a, b)))
            model.host[b] = model.disk[a]
        elif kind in ("write", "copy"):
            try:
                _step(world, model, kind, a, b)
            except InvalidValue as error:
                assert "waits for a file" in str(error)  # noqa: PT017
    lanes = list(world.lanes.values())
    while any(lane.queue for lane in lanes):  # in a random order, polling as a manager would
        lane = order.choice([lane for lane in lanes if lane.queue])
        if not lane.step():
            assert any(other.step() for other in lanes), "the lanes wait for each other"
        mover.overdue()
    world.finish()
    assert mover.stats().failed == {} or not any(mover.stats().failed.values())
    for block, wanted in model.device.items():
        assert same(world.get(block), wanted), f"block {block}"
    for slot, wanted in model.host.items():
        assert same(world.get_slot(slot), wanted), f"host slot {slot}"
    world.mover.close()
    assert world.disk is not None
    world.disk.close()


def _step(world: TierWorld, model: Model, kind: str, a: int, b: int) -> None:
    if kind == "write":
        new = world.random_block()
        world.mover.order_steps([a])
        world.step_writes(a, new)
        model.device[a] = new
    elif a != b:
        world.mover.copy(within((a, b, 16)))
        model.device[b] = model.device[a]


def test_chains_of_copies_keep_their_order(device: torch.device) -> None:
    """A fork of a fork before either was copied, and a block that is rewritten behind its reader."""
    world = TierWorld(device, simulate=True)
    one, two, three = (world.get(block) for block in (1, 2, 3))
    world.mover.copy(within((1, 4, 16), (4, 5, 16), (2, 1, 16), (3, 4, 16), (3, 6, 16)))
    world.mover.copy([])
    world.finish()
    for block, wanted in ((5, one), (1, two), (4, three), (6, three), (2, two)):
        assert same(world.get(block), wanted), block
