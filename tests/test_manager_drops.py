"""Plans to forget what a sequence leaves behind: nothing goes that another needs, and a plan is dropped once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from manager_model import Bytes, FakeMover
from test_manager_content import blocks, close, fill, ids, make
from test_runtime_tiers import HOST, run
from tier_shadow import tier_runtime

from graphkv.errors import InvalidValue
from graphkv.manager.v2 import ManagerV2


def test_a_plan_forgets_what_nobody_needs_and_can_be_dropped_once() -> None:
    manager = make(event_capacity=100)
    a, b = fill(manager, ids(0, 56)), fill(manager, ids(500, 540))
    plan = manager.plan_drop(a)
    assert len(plan) == 3
    held = blocks(manager, a)[:3]
    close(manager, a, step=2)
    manager.take_events()
    assert plan.drop() == 3
    assert [event.block for event in manager.take_events()] == held[::-1]
    assert manager.probe_match(ids(0, 57)) == 0
    assert manager.stats().blocks_retiring == 4, "step 2 may still read them"
    manager.retire(2)
    assert manager.stats().blocks_free == 19 - manager.blocks_held[b]
    with pytest.raises(InvalidValue, match="this plan of 3 blocks has been dropped already"):
        plan.drop()
    assert len(manager.plan_drop(manager.open())) == 0
    with pytest.raises(InvalidValue, match="row 5 is closed"):
        manager.plan_drop(5)
    manager.check()


def test_what_another_plan_names_survives() -> None:
    """Two turns of one conversation: the second goes on where the first ended."""
    manager = make()
    a = fill(manager, ids(0, 32))
    first = manager.plan_drop(a)
    close(manager, a)
    b = fill(manager, ids(0, 64))
    second = manager.plan_drop(b)
    close(manager, b)
    assert (len(first), len(second)) == (2, 4)
    assert first.drop() == 0
    assert manager.probe_match(ids(0, 65)) == 64
    assert second.drop() == 4
    assert manager.stats().blocks_free == manager.stats().blocks_total
    again = [fill(manager, ids(0, 64)) for _ in range(2)]  # two conversations of the same content
    plans = [manager.plan_drop(row) for row in again]
    for row in again:
        close(manager, row)
    assert [plan.drop() for plan in plans] == [0, 4]
    manager.check()


def test_what_is_used_or_built_upon_stays() -> None:
    manager = make()
    a = fill(manager, ids(0, 64))
    plan = manager.plan_drop(a)
    other = manager.open(tokens=ids(0, 33))  # has two of them
    close(manager, a)
    assert plan.drop() == 2
    assert manager.probe_match(ids(0, 65)) == 32
    manager.check()
    branch = fill(manager, np.append(ids(0, 32), ids(700, 732)))
    again = manager.plan_drop(other)
    close(manager, other)
    close(manager, branch)
    assert again.drop() == 0, "the branch is built on them"
    assert manager.plan_drop(fill(manager, np.append(ids(0, 32), ids(700, 732)))).drop() == 0, "its row is open"
    manager.check()


def test_copies_in_colder_tiers_go_too_but_for_those_on_their_way() -> None:
    mover = FakeMover(Bytes(16))
    manager = ManagerV2(
        num_blocks=8, block_size=16, max_rows=4, max_blocks=4, max_edits=50, tier_slots=(8,), mover=mover
    )
    plans = []
    for start in (0, 500):
        row = fill(manager, ids(start, start + 48))
        plans.append(manager.plan_drop(row))
        close(manager, row)
        manager.poll()
        if not start:
            mover.end_all()
            manager.poll()
    assert manager.stats().tiers[0].cached == 3
    assert plans[0].drop() == 3
    assert manager.stats().tiers[0].cached == 0
    assert plans[1].drop() == 0, "a transfer reads them"
    mover.end_all()
    manager.poll()
    assert manager.probe_match(ids(500, 549)) == 48
    manager.evict()
    manager.check()


def test_what_was_evicted_is_passed_over_and_what_came_back_is_not_the_plans() -> None:
    manager = make()
    gone = fill(manager, ids(500, 548))
    shorter = manager.plan_drop(gone)
    close(manager, gone)
    manager.evict(1)
    assert shorter.drop() == 2
    a = fill(manager, ids(0, 48))
    plan = manager.plan_drop(a)
    close(manager, a)
    manager.evict(1)
    b = fill(manager, ids(0, 48))
    close(manager, b)
    assert plan.drop() == 0, "the last block was made anew, and builds on the others"
    assert manager.probe_match(ids(0, 49)) == 48
    manager.check()


def test_a_runtime_forgets_a_conversation_and_no_other(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    a, b = run(shadow, 1, 40), run(shadow, 2, 40)
    plan = runtime.plan_drop(a)
    runtime.suspend(a)
    runtime.drain()
    shadow.close(a)
    assert plan.drop() == 2
    assert runtime.stats().tiers[1].cached == 0
    c = shadow.open([10_000 + i for i in range(40)])
    assert c.cached_tokens == 0
    shadow.prefill([c])
    shadow.step([b, c])
    shadow.check()
    with pytest.raises(InvalidValue, match="is closed"):
        runtime.plan_drop(a)
