"""Findable content: when it is found, who may write where, what goes first. Cases E3, F1, F2, F3, G3 and their kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphkv.errors import InvalidValue, OutOfBlocks
from graphkv.manager.prefix import Content, Scope
from graphkv.manager.retention import Keep, Retention
from graphkv.manager.v2 import ManagerV2
from graphkv.transfer import CopyJob

B = 16


def make(**changes: Any) -> ManagerV2:
    return ManagerV2(**{"num_blocks": 20, "block_size": B, "max_rows": 6, "max_blocks": 8, "max_edits": 200} | changes)


def ids(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def blocks(manager: ManagerV2, row: int) -> list[int]:
    return manager.block_table[row, : manager.blocks_held[row]].tolist()


def fill(manager: ManagerV2, tokens: np.ndarray, *, commit: bool = True, **options: Any) -> int:
    """Open a row for `tokens`, feed them all in a step that retires at once, commit."""
    row = manager.open(tokens=tokens, **options)
    n = tokens.size - int(manager.length[row])
    manager.extend(rows(row), n)
    manager.advance(rows(row), n)
    if commit:
        manager.commit(rows(row), tokens.size)
    manager.take_copies()
    return row


def close(manager: ManagerV2, row: int, step: int = 0) -> None:
    assert manager.close(row, step, int(manager.serial[row]))


@pytest.mark.parametrize(("length", "cached"), [(16, 15), (17, 16), (31, 30), (32, 31), (33, 32), (1, 0)])
def test_case_F3_at_most_all_but_the_last_token_is_reused(length: int, cached: int) -> None:
    manager = make()
    first = fill(manager, ids(0, 48))
    row = manager.open(tokens=ids(0, length))
    assert manager.length[row] == manager.cached_tokens[row] == cached
    assert manager.probe_match(ids(0, length)) == cached
    shared = cached // B
    assert blocks(manager, row)[:shared] == blocks(manager, first)[:shared]
    assert not set(blocks(manager, row)[shared:]) & set(blocks(manager, first)), "the rest is written: it is private"
    manager.check()
    assert manager.stats().tokens_matched == cached


def test_case_F1_a_hit_needs_every_field_and_the_tokens_themselves() -> None:
    fields = [Scope(lora="X"), Scope(salt="X"), Scope(), Scope(salt=""), Scope(lora=""), Scope(lora=0), Scope("X", "X")]
    for digest in (None, lambda data: b"\1" * 32):
        manager = make(**({} if digest is None else {"digest": digest}))
        fill(manager, ids(0, 32), scope=fields[0])
        assert manager.probe_match(ids(0, 33), fields[0]) == (32 if digest is None else 16), "of one key, one block"
        assert [manager.probe_match(ids(0, 33), scope) for scope in fields[1:]] == [0] * 6
        assert manager.probe_match(ids(1, 34), fields[0]) == 0
        manager.check()


def test_case_F2_a_partial_hit_is_a_copy_and_the_shared_block_keeps_its_bytes() -> None:
    manager = make()
    a = fill(manager, ids(0, 16))
    (source,) = blocks(manager, a)
    b = manager.open(tokens=np.append(ids(0, 10), ids(100, 110)))
    assert manager.cached_tokens[b] == 10
    own = blocks(manager, b)[0]
    assert own != source
    assert manager.take_copies(7) == [CopyJob(0, source, 0, own, 10)]
    close(manager, a)
    assert manager.evict() == 0, "the source stays until the step behind the copy has retired"
    c = manager.open(tokens=ids(0, 17))
    assert blocks(manager, c)[:1] == [source]
    close(manager, c)
    manager.retire(7)
    assert manager.evict() == 1
    manager.check()


def test_case_F2_what_its_owner_is_still_writing_is_not_found() -> None:
    manager = make()
    row = fill(manager, ids(0, 10))
    assert manager.probe_match(ids(0, 16)) == 0
    manager.extend(rows(row), 6)
    manager.advance(rows(row), 6)
    manager.token_ids[row, 10:16] = ids(10, 16)
    manager.commit(rows(row), 16, step=3)
    assert manager.probe_match(ids(0, 17)) == 0
    manager.retire(2)
    assert manager.probe_match(ids(0, 17)) == 0
    manager.retire(3)
    assert manager.probe_match(ids(0, 17)) == 16


def test_case_F2_the_same_ids_with_other_content_never_match() -> None:
    manager = make()
    image = (Content(4, 20, b"cat"),)
    fill(manager, ids(0, 40), contents=image)
    for contents, tokens in {(): 0, (Content(4, 20, b"dog"),): 0, (Content(4, 21, b"cat"),): 0, image: 32}.items():
        assert manager.probe_match(ids(0, 33), contents=contents) == tokens, contents
    assert manager.probe_match(ids(0, 10), contents=image) == 0, "no partial reuse where ids do not tell all"


def test_partial_reuse_finds_the_best_of_many_siblings() -> None:
    manager = make(num_blocks=80)
    for i in range(50):
        close(manager, fill(manager, np.append(ids(0, i % 12), ids(1000 * (i + 1), 1000 * (i + 1) + 16))[:16]))
    row = manager.open(tokens=np.append(ids(0, 11), [7, 7, 7]))
    assert manager.cached_tokens[row] == 11
    manager.check()


def test_equal_blocks_are_merged_once_both_are_full() -> None:
    manager = make()
    a, b = fill(manager, ids(0, 40), commit=False), fill(manager, ids(0, 40), commit=False)
    manager.submitted = 2
    out = np.zeros((200, 3), np.int32)
    manager.take_edits(out)
    own = blocks(manager, b)
    manager.commit(rows(a, b), 40)
    manager.index_commits()
    assert blocks(manager, b)[:2] == blocks(manager, a)[:2]
    assert blocks(manager, b)[2] != blocks(manager, a)[2]
    count = manager.take_edits(out)
    assert sorted(map(tuple, out[:count].tolist())) == [(b, i, blocks(manager, a)[i]) for i in range(2)]
    assert manager.stats().blocks_merged == 2
    assert manager.stats().blocks_retiring == 2, "a step in flight may read them through the old table"
    manager.retire(2)
    assert set(own[:2]) <= set(manager.blocks.take(manager.blocks.free).tolist())


def test_a_merge_waits_for_room_in_the_journal() -> None:
    manager = make(max_edits=8)
    a, b = fill(manager, ids(0, 32), commit=False), fill(manager, ids(0, 32), commit=False)
    manager.extend(rows(a, b), 32)  # 8 edits
    manager.commit(rows(a, b), 32)
    assert blocks(manager, b)[:2] != blocks(manager, a)[:2]
    manager.take_edits(np.zeros((8, 3), np.int32))
    manager.commit(rows(b), 32)
    assert manager.stats().blocks_merged == 2
    assert blocks(manager, b)[:2] == blocks(manager, a)[:2]
    manager.check()


def test_a_match_is_safe_from_the_allocation_that_follows_and_gives_back_what_it_took() -> None:
    manager = make(num_blocks=5)
    close(manager, fill(manager, ids(0, 64)))
    a = manager.open(tokens=ids(0, 33))
    assert manager.length[a] == 32
    with pytest.raises(OutOfBlocks, match="3 more blocks needed, 0 free, 2 evictable"):
        manager.extend(rows(a), 48)
    assert manager.probe_match(ids(0, 65)) == 64, "the refused call evicted nothing"
    assert manager.extend(rows(a), 32) == 2
    assert manager.probe_match(ids(0, 65)) == 32, "the two that nobody used made room"
    b = manager.open(tokens=ids(0, 17))
    assert manager.length[b] == 16
    c = manager.open(tokens=ids(0, 10))  # no block is left to copy the partial hit into
    assert manager.length[c] == 0
    for row in (a, b, c):
        close(manager, row)
    assert manager.stats().blocks_held == 0
    manager.check()


def test_eviction_goes_by_priority_then_age_then_depth_and_never_cuts_a_chain() -> None:
    now = [0.0]
    manager = make(num_blocks=10, clock=lambda: now[0], event_capacity=100)
    keep = Retention((Keep(0, 16, 90, seconds=10), Keep(16, None, 20)))
    a = fill(manager, ids(0, 48), retention=keep)
    b = fill(manager, ids(100, 132))
    c = fill(manager, ids(200, 232))
    order = blocks(manager, a)[:0:-1] + blocks(manager, c)[::-1] + blocks(manager, b)[::-1] + blocks(manager, a)[:1]
    close(manager, a)
    close(manager, c)
    close(manager, b)
    manager.take_events()
    went = []
    for _ in order:
        assert manager.evict(1) == 1
        went += [event.block for event in manager.take_events()]
    assert went == order
    d = fill(manager, ids(0, 48), retention=keep)
    e = fill(manager, ids(100, 132))
    first = blocks(manager, d)
    close(manager, d)
    close(manager, e)
    now[0] = 10.0  # the time of d's first block is over: it is as any other, and older than e's
    manager.evict(3)
    assert sorted(event.block for event in manager.take_events() if event.kind == "removed") == sorted(first)
    assert manager.probe_match(ids(100, 133)) == 32


def test_a_cached_block_that_a_step_may_touch_is_not_evicted() -> None:
    manager = make()
    row = fill(manager, ids(0, 32))
    close(manager, row, step=4)
    assert manager.evict() == 0
    assert manager.stats().blocks_cached == 2
    assert manager.probe_match(ids(0, 33)) == 32, "it can be shared meanwhile"
    manager.retire(4)
    assert manager.evict() == 2


def test_case_E3_counts_stay_true_while_cached_blocks_make_room() -> None:
    manager = make(num_blocks=5)
    close(manager, fill(manager, ids(0, 64)))
    rng = np.random.default_rng(0)
    held: list[int] = []
    for i in range(20):
        if len(held) == 4 or (held and rng.random() < 0.4):
            close(manager, held.pop(int(rng.integers(len(held)))))
        held.append(fill(manager, ids(1000 * i, 1000 * i + 16)))
        stats = manager.stats()
        assert stats.blocks_free + stats.blocks_held + stats.blocks_cached == 4
        manager.check()


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    manager = make()
    a = fill(manager, ids(0, 40), commit=False)  # full blocks that are not findable yet are shared as well
    b = manager.fork(a)
    assert blocks(manager, b)[:2] == blocks(manager, a)[:2]
    assert manager.take_copies() == [CopyJob(0, blocks(manager, a)[2], 0, blocks(manager, b)[2], 8)]
    manager.check()
    assert manager.rewind(rows(b), 20, 0) == 1, "back into a block of two owners: it is copied before it is written"
    (job,) = manager.take_copies()
    assert job == CopyJob(0, blocks(manager, a)[1], 0, blocks(manager, b)[1], 4)
    manager.commit(rows(a), 40)
    manager.check()
    manager.submitted = 3
    with pytest.raises(InvalidValue, match="may be in step 3"):
        manager.fork(a)


def test_case_G3_a_rewind_into_shared_content_leaves_it_to_the_others_and_waits_for_its_step() -> None:
    manager = make(num_blocks=6)
    a = fill(manager, ids(0, 33))
    b = fill(manager, ids(0, 33))
    heard: list[tuple[int, int, list[int]]] = []
    manager.on_rewind.append(lambda row, length, gone: heard.append((row, length, gone.tolist())))
    old = blocks(manager, b)
    assert manager.rewind(rows(b), 12, step=5) == 1
    assert heard == [(b, 21, [old[2]])]
    assert blocks(manager, b)[0] == old[0]
    assert blocks(manager, b)[1] not in old
    close(manager, a)
    manager.take_copies()
    assert manager.evict() == 0, "step 5 may still read the block that b left"
    manager.retire(5)
    assert manager.evict() == 1
    manager.check()


def test_a_rewind_into_a_block_of_its_own_takes_it_back() -> None:
    manager = make(num_blocks=3)
    row = fill(manager, ids(0, 32))
    before = blocks(manager, row)
    assert manager.rewind(rows(row), 5, 0) == 0
    assert blocks(manager, row) == before
    assert manager.copies_pending == 0
    assert manager.probe_match(ids(0, 33)) == 16
    manager.token_ids[row, 27:32] = 9
    manager.advance(rows(row), 5)
    manager.commit(rows(row), 32)
    assert manager.probe_match(np.append(ids(0, 27), [9] * 6)) == 32
    manager.check()


@pytest.mark.parametrize("how", ["rewind", "close"])
def test_a_commit_that_waits_for_its_step_is_void_once_the_row_went_back(how: str) -> None:
    manager = make()
    row = fill(manager, ids(0, 32), commit=False)
    manager.commit(rows(row), 32, step=2, serial=manager.serial[[row]])
    if how == "rewind":
        manager.rewind(rows(row), 20, 2)
        manager.token_ids[row, 12:32] = 5
    else:
        close(manager, row, 2)
    manager.retire(2)
    assert manager.probe_match(ids(0, 33)) == 0
    assert manager.probe_match(np.append(ids(0, 12), [5] * 21)) == 0
    manager.check()


def test_indexing_can_be_cut_into_portions_and_nothing_is_found_too_early_or_lost() -> None:
    manager = make()
    opened = [manager.open(tokens=ids(100 * i, 100 * i + 33)) for i in range(4)]
    manager.claim(rows(*opened), 33)
    manager.commit(rows(*opened), 32)
    index, found = manager._cache.index, [0]
    while len(index) < 8:
        manager.index_commits(most=1)
        found.append(len(index))
    assert found == [0, 2, 4, 6, 8], "a row at a time, both of its blocks"
    assert [manager.probe_match(ids(100 * i, 100 * i + 33)) for i in range(4)] == [32] * 4
    manager.commit(rows(*opened), 32)
    manager.index_commits(most=1)
    manager.check()


def test_a_commit_beyond_the_row_is_refused_and_another_owners_is_skipped() -> None:
    manager = make()
    row = fill(manager, ids(0, 20), commit=False)
    with pytest.raises(InvalidValue, match="row 0 has 2 blocks, 3 cannot be committed"):
        manager.commit(rows(row), 48)
    serial = manager.serial[[row]].copy()
    close(manager, row)
    again = fill(manager, ids(50, 70), commit=False)
    assert again == row
    manager.commit(rows(row), 16, serial=serial)
    assert manager.stats().blocks_stored == 0


def test_caching_can_be_off() -> None:
    manager = make(prefix_caching=False)
    close(manager, fill(manager, ids(0, 40)))
    assert manager.open(tokens=ids(0, 40)) == 0
    assert manager.stats().tokens_matched == 0
    assert manager.stats().blocks_free == 19


def test_events_are_numbered_bounded_and_tell_of_gaps() -> None:
    manager = make(event_capacity=3)
    assert [(event.number, event.kind, event.block) for event in manager.take_events()] == [(1, "created", 19)]
    row = fill(manager, ids(0, 80), retention=Retention(default=70), scope=Scope(salt="t"))
    events = manager.take_events()
    assert [event.number for event in events] == [4, 5, 6], "2 and 3 were dropped"
    assert manager.events.dropped == 2
    assert [event.block for event in events] == blocks(manager, row)[2:]
    assert events[1].parent == events[0].key
    assert {(event.priority, event.tier, event.kind) for event in events} == {(70, 0, "stored")}
    manager.rewind(rows(row), 17, 0)
    (rewound,) = manager.take_events()
    assert (rewound.kind, rewound.row, rewound.length) == ("rewound", row, 63)
    assert make().take_events() == []


def test_self_check_runs_after_each_retired_step() -> None:
    manager = make(self_check=True)
    a, b = fill(manager, ids(0, 33)), fill(manager, ids(0, 33))
    manager.retire(1)
    manager.token_ids[b, 3] = 77  # as if another tenant's block were in the row
    with pytest.raises(AssertionError, match="is known for other tokens"):
        manager.retire(2)
    manager.token_ids[b, 3] = 3
    manager.blocks_held[a] = 2
    with pytest.raises(AssertionError):
        manager.retire(3)


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        (lambda: Retention(default=101), "priority 101"),
        (lambda: Retention((Keep(0, 5, -1),)), "priority -1"),
        (lambda: Retention((Keep(5, 5, 1),)), "token range 5 .. 5"),
        (lambda: Retention((Keep(0, 5, 1, 0.0),)), "positive seconds, got 0.0"),
    ],
)
def test_bad_retention_is_refused(retention: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        retention()


def test_the_highest_priority_that_touches_a_block_counts() -> None:
    retention = Retention((Keep(0, 4, 10), Keep(20, 40, 80, 2.0), Keep(30, None, 60)))
    blocks_of = {(0, 16): (10, np.inf), (4, 16): (35, np.inf), (16, 32): (80, 7.0), (48, 64): (60, np.inf)}
    for (start, stop), worth in blocks_of.items():
        assert retention.of(start, stop, 5.0) == (*worth, 35)
