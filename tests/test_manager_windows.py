"""Layer groups with a window in the manager: what goes stale when, what a rewind may ask, what a match must find."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from manager_calls import refused
from manager_world import World
from test_manager_machine import ManagerMachine

from graphkv.errors import InvalidValue, OutOfBlocks, UnsupportedCombination
from graphkv.manager.prefix import Scope
from graphkv.manager.windowed import WindowedManager, build_manager
from graphkv.transfer import CopyJob
from graphkv.window import Window

B = 16
WINDOW = Window(32)


def make(window: Window = WINDOW, **changes: Any) -> WindowedManager:
    options = {"num_blocks": 40, "block_size": B, "max_rows": 4, "max_blocks": 12, "max_edits": 400} | changes
    options = {"windows": [window], "window_blocks": [20], "prefix_caching": False} | options
    return WindowedManager(**options)


def held(manager: WindowedManager, row: int, group: int = 1) -> list[int]:
    """Columns in which the row has a block."""
    return np.flatnonzero(manager.windows[group - 1].ids[row]).tolist()


def at(row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([row], np.int32)


def feed(manager: WindowedManager, row: int, n: int, *, accepted: int | None = None, retire: bool = True) -> None:
    """A step of one row, whose results come at once unless `retire` is false."""
    manager.claim(at(row), n)
    manager.submitted += 1
    if retire:
        finish(manager, row, n - (n if accepted is None else accepted))


def finish(manager: WindowedManager, row: int, surplus: int = 0) -> None:
    """The results of the last submitted step come."""
    manager.settle(at(row), surplus)
    manager.commit(at(row), int(manager.length[row]))
    manager.retire(manager.submitted)
    manager.index_commits()
    manager.check()


def test_case_E4_a_block_stays_while_the_lowest_position_that_may_be_read_needs_it() -> None:
    """Window 32, blocks of 16, next_n 4: committed 61, drafted to 65, back by 4. Position 61 sees 30 .. 61."""
    manager = make()
    row = manager.open()
    feed(manager, row, 61, retire=False)
    feed(manager, row, 4, retire=False)
    assert manager.length[row] == 65
    manager.commit(at(row), 61)  # what the first step brought
    manager.retire(1)
    manager.index_commits()
    assert held(manager, row) == [1, 2, 3, 4], (
        "position 61 reads from 30 on, in column 1; column 0 is stale, and from 64 on column 1 were"
    )
    finish(manager, row, 3)  # one accepted
    assert held(manager, row) == [1, 2, 3, 4]
    feed(manager, row, 4, accepted=2)
    assert manager.length[row] == 64
    assert held(manager, row) == [2, 3, 4], "position 64 reads from 33 on"


def test_case_E4_drafts_given_back_by_a_rewind_find_their_window() -> None:
    manager = make()
    row = manager.open()
    feed(manager, row, 61)
    manager.extend(at(row), 4)
    manager.advance(at(row), 4)
    manager.rewind(at(row), 4, manager.submitted)
    assert manager.length[row] == 61
    assert held(manager, row) == [1, 2, 3]
    manager.check()


def test_case_E4_a_stale_block_is_handed_out_once_the_replay_that_reads_it_retired() -> None:
    manager = make(window_blocks=[6])  # 5 to hand out
    row = manager.open()
    feed(manager, row, 48)
    assert held(manager, row) == [1, 2]
    stale = set(range(1, 6)) - set(manager.windows[0].ids[row, 1:3].tolist())
    feed(manager, row, 16, retire=False)  # its replay reads column 1
    column_1 = int(manager.windows[0].ids[row, 1])
    manager.commit(at(row), 64)  # its results are known, but it has not retired
    manager.index_commits()
    assert held(manager, row) == [2, 3]
    counts = manager.windows[0].blocks.counts()
    assert (counts.free, counts.retiring) == (2, 1)
    other = manager.open()
    error = refused_claim(manager, other, 48)
    assert (error.needed, error.free, error.retiring, error.group) == (3, 2, 1, 1)
    manager.retire(manager.submitted)
    manager.claim(at(other), 48)
    assert set(manager.windows[0].ids[other, :3].tolist()) == (stale | {column_1}) - set(
        manager.windows[0].ids[row].tolist()
    )
    manager.check()


def refused_claim(manager: WindowedManager, row: int, n: int) -> OutOfBlocks:
    error = refused(manager, OutOfBlocks, "layer group 1", "claim", at(row), n)
    assert isinstance(error, OutOfBlocks)
    return error


@pytest.mark.parametrize(
    ("group", "blocks"), [(0, {"num_blocks": 4}), (1, {"window_blocks": [4, 9]}), (2, {"window_blocks": [9, 4]})]
)
def test_case_E2_all_groups_of_all_rows_grow_or_none(group: int, blocks: dict[str, Any]) -> None:
    manager = make(windows=[Window(32), Window(5, 3)], **({"window_blocks": [9, 9]} | blocks))
    a, b = manager.open(), manager.open()
    manager.claim(at(a), 2 * B)
    rows = np.array([b, a], np.int32)
    error = refused(manager, OutOfBlocks, None, "claim", rows, B)
    assert isinstance(error, OutOfBlocks)
    assert (error.needed, error.free, error.group) == (2, 1, group)
    manager.close(a, 0, 1)
    assert manager.claim(at(b), B) == 1
    manager.check()


def test_a_rewind_behind_what_the_window_holds_is_refused_with_the_limit() -> None:
    manager = make(windows=[Window(32), Window(50, 3)], window_blocks=[20, 20])
    row = manager.open()
    feed(manager, row, 150)
    assert held(manager, row, 1) == [7, 8, 9]
    assert held(manager, row, 2) == [0, *range(6, 10)]
    assert [group.least_length(at(row), at(0) + 100).tolist() for group in manager.windows] == [[143], [145]]
    refused(manager, InvalidValue, "row 0 cannot go back to 100 tokens.* 145 is the least", "rewind", at(row), 50, 1)
    manager.rewind(at(row), 5, 1)
    assert manager.length[row] == 145
    manager.check()
    feed(manager, row, 40)
    least = int(manager.windows[0].first[row]) * B + 31
    refused(manager, InvalidValue, "is the least", "rewind", at(row), 185 - least + 1, 2)


def test_rewind_room_keeps_what_a_rewind_by_so_many_tokens_reads() -> None:
    manager = make(rewind_room=40)
    row = manager.open()
    feed(manager, row, 150)
    assert held(manager, row) == [4, 5, 6, 7, 8, 9], "position 110 reads from 79 on"
    manager.rewind(at(row), 40, 1)
    manager.check()
    assert held(manager, row) == [4, 5, 6]


def test_a_rewind_to_the_sinks_or_to_nothing_is_no_matter_of_the_window() -> None:
    manager = make(Window(4, 20))
    row = manager.open()
    feed(manager, row, 100)
    assert held(manager, row) == [0, 1, 6]
    manager.rewind(at(row), 70, 1)  # 30 tokens: a query there reads 27 .. 29 and the sinks
    assert held(manager, row) == [0, 1]
    feed(manager, row, 20)
    assert held(manager, row) == [0, 1, 2, 3][: len(held(manager, row))]
    manager.rewind(at(row), 50, manager.submitted)
    assert held(manager, row) == []
    manager.check()


def test_a_window_of_one_token_holds_only_what_is_being_written() -> None:
    manager = make(Window(1))
    row = manager.open()
    feed(manager, row, 2 * B)
    assert held(manager, row) == []
    feed(manager, row, 1)
    assert held(manager, row) == [2]
    manager.rewind(at(row), 1, 2)
    feed(manager, row, 1)
    manager.check()


def test_a_long_sequence_takes_the_memory_that_it_must_and_no_more() -> None:
    """Window 128 with 1 sink, blocks of 32: one block of sinks and five more will do, however long it gets."""
    manager = make(Window(128, 1), block_size=32, num_blocks=23, window_blocks=[7], max_blocks=24)
    row = manager.open()
    for _ in range(704):
        feed(manager, row, 1)
        manager.take_edits(np.zeros((400, 3), np.int32))
    assert manager.windows[0].blocks.counts().peak_held == 6
    error = refused(manager, OutOfBlocks, "1 more blocks needed, 0 free", "claim", at(row), 1)
    assert isinstance(error, OutOfBlocks)
    assert error.group == 0


def test_a_closed_row_leaves_nothing_on_the_device() -> None:
    """Of a row of which the window holds little, little is told: as many edits as cells that held something."""
    manager = make(Window(20, 1))
    row = manager.open()
    feed(manager, row, 170)
    device = np.zeros_like(manager.table.ids)
    edits = np.zeros((400, 3), np.int32)

    def bring() -> int:
        count = manager.take_edits(edits)
        for line, column, block in edits[:count].tolist():
            device[line, column] = block
        return count

    bring()
    columns = len(held(manager, row))
    manager.close(row, manager.submitted, 1)
    assert manager.open() == row
    assert bring() == 11 + columns
    assert not device.any()


def test_stale_blocks_wait_while_the_journal_is_full() -> None:
    manager = make(max_edits=24, max_rows=1)
    row = manager.open()
    manager.claim(at(row), 160)  # 20 of 24 edits
    manager.submitted = 1
    manager.commit(at(row), 160)
    manager.retire(1)
    manager.index_commits()
    assert held(manager, row) == list(range(2, 10)), "half of the journal's room is for stale cells"
    manager.check()
    manager.index_commits()
    assert held(manager, row) == list(range(3, 10))
    manager.take_edits(np.zeros((24, 3), np.int32))
    manager.index_commits()
    assert held(manager, row) == [8, 9]
    manager.check()


def test_rows_that_are_indexed_later_keep_their_stale_blocks_until_then() -> None:
    """So that these become findable before they are given up, in whatever portions the commits are entered."""
    manager = make(prefix_caching=True)
    rows = np.array([manager.open(tokens=prompt(100) + start) for start in (0, 1000)], np.int32)
    manager.claim(rows, 100)
    manager.submitted = 1
    manager.commit(rows, 100)
    manager.retire(1)
    manager.index_commits(1)
    assert [held(manager, row) for row in rows.tolist()] == [[4, 5, 6], list(range(7))]
    manager.index_commits(1)
    assert [held(manager, row) for row in rows.tolist()] == [[4, 5, 6]] * 2
    assert manager.windows[0].blocks.counts().cached == 8, "4 of each"
    manager.check()


def test_commits_of_steps_that_have_not_retired_wait_for_them() -> None:
    manager = make()
    row = manager.open()
    feed(manager, row, 40, retire=False)
    manager.commit(at(row), 40, step=1)
    manager.rewind(at(row), 30, 1)  # what the commit says is void now
    manager.claim(at(row), 90)
    manager.submitted = 2
    manager.retire(1)
    manager.index_commits()
    assert manager.final[row] == 0
    assert held(manager, row) == list(range(7))
    manager.commit(at(row), 100, step=2)
    assert manager.final[row] == 0
    manager.retire(2)
    manager.index_commits()
    assert manager.final[row] == 100
    manager.check()


def test_more_than_a_row_has_cannot_be_committed() -> None:
    manager = make()
    row = manager.open()
    manager.claim(at(row), 10)
    refused(manager, InvalidValue, "row 0 has 10 tokens, 11 cannot be committed", "commit", at(row), 11)


def test_listeners_hear_of_blocks_that_are_given_up() -> None:
    manager = make()
    heard: list[tuple[int, int, list[int]]] = []
    manager.windows[0].on_release.append(lambda group, row, ids: heard.append((group, row, ids.tolist())))
    row = manager.open()
    manager.claim(at(row), 61)
    before = manager.windows[0].ids[row].tolist()
    manager.submitted = 1
    finish(manager, row)
    assert heard == [(1, row, before[:1])]
    manager.rewind(at(row), 14, 1)
    assert heard[1:] == [(1, row, before[3:4])]


def test_a_fork_shares_what_the_window_holds_and_copies_its_partial_block() -> None:
    manager = make()
    row = manager.open()
    feed(manager, row, 90)
    ids = manager.windows[0].ids[row].tolist()
    child = manager.fork(row)
    assert held(manager, child) == [3, 4, 5]
    theirs = manager.windows[0].ids[child].tolist()
    assert theirs[:5] == ids[:5]
    assert theirs[5] != ids[5]
    jobs = [job for job in manager.take_copies(1) if job.group]
    assert jobs == [CopyJob(0, ids[5], 0, theirs[5], 10, 1)]
    manager.check()
    manager.rewind(at(child), 11, 1)  # into column 4, which is the parent's as well
    assert manager.windows[0].ids[child, 4] not in ids
    assert [job[1:] for job in manager.take_copies(1) if job.group] == [
        (ids[4], 0, int(manager.windows[0].ids[child, 4]), 15, 1)
    ]
    manager.check()
    feed(manager, row, 60)
    manager.close(row, manager.submitted, 1)
    manager.check()


# content --------------------------------------------------------------------------------------------------------------


def prompt(n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(n, dtype=np.int32) + 7


def answered(manager: WindowedManager, tokens: np.ndarray[Any, np.dtype[np.int32]], chunk: int = 1000) -> int:
    row = manager.open(tokens=tokens)
    while manager.length[row] < tokens.size:
        feed(manager, row, min(chunk, tokens.size - int(manager.length[row])))
    return row


def test_a_match_needs_what_each_window_reads_behind_it() -> None:
    manager = make(prefix_caching=True)
    row = answered(manager, prompt(160))
    manager.close(row, manager.submitted, 1)
    assert manager.windows[0].blocks.counts().cached == 10
    assert manager.probe_match(prompt(160)) == 159
    blocks = manager.windows[0].blocks
    chain = manager._cache.index.match(manager._cache.index.root(Scope()), prompt(160), ()).nodes
    assert len(chain) == 10
    for lost, found in ((8, 128), (6, 96), (0, 96)):  # a query at 128 reads 97 .. 127, in columns 6 and 7
        blocks.lose(chain[lost])
        assert manager.probe_match(prompt(160)) == found, lost
    manager.check()
    again = manager.open(tokens=prompt(160))
    assert manager.length[again] == manager.cached_tokens[again] == 96
    assert held(manager, again) == [4, 5]
    assert manager.windows[0].ids[again, 4:6].tolist() == [blocks.block_of(node) for node in chain[4:6]]
    manager.check()


def test_the_last_blocks_alone_serve_who_continues_behind_them() -> None:
    """Window 64, blocks of 32, 128 tokens of which only blocks 2 and 3 are left: 128 are found, of 96 none."""
    manager = make(Window(64), block_size=32, prefix_caching=True)
    row = answered(manager, prompt(128))
    manager.close(row, manager.submitted, 1)
    chain = manager._cache.index.match(manager._cache.index.root(Scope()), prompt(128), ()).nodes
    for node in chain[:2]:
        manager.windows[0].blocks.lose(node)
    assert manager.probe_match(prompt(129)) == 128
    assert manager.probe_match(prompt(97)) == 0
    manager.check()


def test_sinks_must_be_there_as_well() -> None:
    manager = make(Window(20, 17), prefix_caching=True)
    row = answered(manager, prompt(160))
    manager.close(row, manager.submitted, 1)
    chain = manager._cache.index.match(manager._cache.index.root(Scope()), prompt(160), ()).nodes
    again = manager.open(tokens=prompt(160))
    assert held(manager, again) == [0, 1, 7, 8, 9], "what a query at 144 reads, and a copy of the block behind"
    manager.take_copies()
    manager.close(again, manager.submitted, int(manager.serial[again]))
    manager.windows[0].blocks.lose(chain[1])
    assert manager.probe_match(prompt(160)) == 16, "behind 16 tokens no window and no sink needs column 1"
    manager.check()


def test_blocks_that_went_stale_are_found_by_a_sequence_that_ends_there() -> None:
    """A long sequence gave the beginning's blocks up; they are cached, and a shorter one begins with them."""
    manager = make(prefix_caching=True)
    row = answered(manager, prompt(160), chunk=16)
    assert held(manager, row) == [8, 9]
    short = manager.open(tokens=np.append(prompt(64), 3))
    assert manager.length[short] == 64
    assert held(manager, short) == [2, 3]
    manager.check()


def test_cached_blocks_of_a_window_go_least_recently_used_first() -> None:
    manager = make(prefix_caching=True, window_blocks=[11])
    a = answered(manager, prompt(60))
    manager.close(a, manager.submitted, 1)
    b = answered(manager, prompt(60)[::-1].copy())
    manager.close(b, manager.submitted, int(manager.serial[b]))
    assert manager.windows[0].blocks.counts().cached == 6
    manager.close(manager.open(tokens=prompt(60)), manager.submitted, 3)  # a is used again
    manager.take_copies()
    c = manager.open()
    manager.claim(at(c), 7 * B)
    assert manager.probe_match(prompt(60)) == 59 - 59 % B
    assert manager.probe_match(prompt(60)[::-1].copy()) < 48
    assert manager.stats().blocks_evicted == 0, "group 0 had room"
    manager.check()


def test_a_partial_hit_copies_the_block_in_every_group() -> None:
    manager = make(prefix_caching=True)
    a = answered(manager, prompt(64))
    b = manager.open(tokens=np.append(prompt(58), 3))
    assert manager.length[b] == 58
    assert held(manager, b) == [1, 2, 3]
    jobs = manager.take_copies(1)
    assert [(job.group, job.tokens) for job in jobs] == [(0, 10), (1, 10)]
    assert jobs[1].source == manager.windows[0].ids[a, 3]
    assert jobs[1].target == manager.windows[0].ids[b, 3]
    manager.check()


def test_a_match_without_room_for_its_partial_block_ends_before_it() -> None:
    manager = make(prefix_caching=True, window_blocks=[5])
    answered(manager, prompt(64))
    manager.claim(at(manager.open()), 1)  # in place of column 0, which is stale
    b = manager.open(tokens=np.append(prompt(58), 3))
    assert manager.length[b] == 48, "all 4 blocks of the window are taken"
    assert not manager.take_copies()
    manager.check()


def test_content_lost_in_group_0_is_lost_in_its_windows() -> None:
    manager = make(prefix_caching=True)
    a = answered(manager, prompt(64))
    manager.close(a, manager.submitted, 1)
    assert manager.evict() == 4
    assert manager.stats().windows[0].free == 19
    assert manager.probe_match(prompt(64)) == 0
    manager.check()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"windows": [], "window_blocks": []}, InvalidValue, "0 windows and 0 numbers"),
        ({"window_blocks": [3, 4]}, InvalidValue, "1 windows and 2 numbers of window_blocks"),
        ({"window_blocks": [1]}, InvalidValue, "got 1"),
        ({"rewind_room": -1}, InvalidValue, "rewind_room must be 0 or more tokens, got -1"),
        ({"tier_slots": [4], "mover": object()}, UnsupportedCombination, "window .* and colder tiers .* cannot go"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make(**options)


@pytest.mark.parametrize(("tokens", "sinks", "says"), [(0, 0, "window must be"), (4, -1, "sinks must be")])
def test_a_window_is_checked(tokens: int, sinks: int, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        Window(tokens, sinks)


def test_without_windows_it_is_the_manager_of_all_tokens() -> None:
    assert not isinstance(build_manager(num_blocks=3, block_size=4, max_rows=1, max_blocks=2), WindowedManager)


# any order of verbs ---------------------------------------------------------------------------------------------------

WORLD = {"num_blocks": 17, "max_edits": 60, "windows": (Window(3), Window(5, 3)), "window_blocks": (9, 11)}


class WindowMachine(ManagerMachine):
    WORLD = WORLD


class WindowsAlone(ManagerMachine):
    WORLD = WORLD | {"prefix_caching": False, "rewind_room": 2}


TestWindows = WindowMachine.TestCase
TestWindowsWithoutPrefixes = WindowsAlone.TestCase
for case in (TestWindows, TestWindowsWithoutPrefixes):
    case.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_caching": False},
        {"window_blocks": (7, 9), "max_edits": 30},
        {"rewind_room": 2},
        {"block_size": 4, "windows": (Window(1), Window(6, 1)), "num_blocks": 10},
    ],
    ids=str,
)
def test_soak(options: dict[str, Any]) -> None:
    """Thousands of operations, `check` and every byte after each; and they did reach what they were made for."""
    reached: dict[str, int] = {}
    for seed in range(40):
        world = World((), **(WORLD | options))
        for _ in world.soak(Random(seed), 300):
            pass
        world.end()
        for what, count in world.counts.items():
            reached[what] = reached.get(what, 0) + count
    wanted = {"copy", "copy in group 1", "extend: OutOfBlocks", "fork", "rewind", "rewind: InvalidValue"}
    if options.get("prefix_caching", True):
        wanted |= {"match"}
    assert wanted <= reached.keys(), wanted - reached.keys()
