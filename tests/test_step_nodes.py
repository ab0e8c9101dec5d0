"""Latch, derive and advance: every field against plain loops, on each of the executors that must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_world import World, assert_live

from graphkv import packet as pk
from graphkv.layout import IndexKFormat, Side
from graphkv.metadata import DerivePlan
from graphkv.window import Window

EXECUTORS = (
    "numpy",
    pytest.param("kernels", marks=pytest.mark.host),
    pytest.param("cuda", marks=pytest.mark.gpu),
)


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cells(row: int, blocks: list[int]) -> dict[tuple[int, int], int]:
    return {(row, column): block for column, block in enumerate(blocks)}


@pytest.mark.parametrize("index_k", list(IndexKFormat))
def test_latch_fills_every_field_of_live_and_padded_rows(executor: str, index_k: IndexKFormat) -> None:
    world = World(executor, index_k=index_k)
    world.poison()
    world.publish(
        [4, 1],
        edits=cells(4, [7, 8, 9]) | cells(1, [5]),
        length_edits={4: 40, 1: 3},
        supplied={4: [1234]},
    )
    world.state.next_tokens[1] = 77
    live = world.latch()
    assert_live(live, world.expected([(4, 40, 1), (1, 3, 1)], 4, 4))
    assert live.token_ids.tolist() == [1234, 77, 0, 0]
    assert world.state.length.tolist() == [0, 3, 0, 0, 40, 0]
    assert world.state.healthy.tolist() == [1]
    assert world.state.step.tolist() == [1]


def test_a_shorter_row_shows_the_null_page_past_its_tokens(executor: str) -> None:
    """Case A1's second half: nothing of a longer row, or of the batch row's last tenant, is left in the tables."""
    world = World(executor)
    world.publish([0, 1], edits=cells(0, list(range(1, 9))) | cells(1, [9, 10]), length_edits={0: 126, 1: 17})
    assert_live(world.latch(), world.expected([(0, 126, 1), (1, 17, 1)], 4, 4))
    world.step = 1
    world.publish([1])
    assert_live(world.latch(), world.expected([(1, 17, 1)], 4, 4))
    world.step = 2
    world.publish([])
    assert_live(world.latch(), world.expected([], 4, 4))


def test_edits_of_rows_outside_the_batch_are_applied(executor: str) -> None:
    world = World(executor)
    world.publish([2], edits=cells(2, [3]) | cells(5, [4, 6]), length_edits={2: 1})
    world.latch()
    assert world.state.block_table.cpu().numpy().tolist() == world.table.tolist()


def test_length_edits_set_take_off_and_keep(executor: str) -> None:
    world = World(executor)
    world.publish([0, 1, 2, 3], edits={(r, 0): r + 1 for r in range(4)}, length_edits=dict.fromkeys(range(4), 10))
    world.latch()
    world.step = 1
    world.publish([0, 1, 2, 3], length_edits={0: 4, 1: -1 - 3, 2: -1 - 30})
    assert_live(world.latch(), world.expected([(0, 4, 1), (1, 7, 1), (2, 0, 1), (3, 10, 1)], 4, 4))


def test_ragged_prefill_batch(executor: str) -> None:
    world = World(executor)
    world.publish(
        [3, 0],
        query=[20, 5],
        edits=cells(3, [1, 2]) | cells(0, [9, 8, 7]),
        length_edits={3: 0, 0: 30},
        supplied={3: list(range(100, 120)), 0: list(range(5))},
        bucket=2,
    )
    live = world.latch(2, 25)
    assert_live(live, world.expected([(3, 0, 20), (0, 30, 5)], 2, 25))
    assert live.token_ids.tolist() == [*range(100, 120), *range(5)]


@pytest.mark.parametrize("next_n", [1, 3, 4])
def test_advance_moves_lengths_tokens_and_results(executor: str, next_n: int) -> None:
    world = World(executor, next_n=next_n)
    world.publish([5, 2], edits=cells(5, [1, 2]) | cells(2, [3, 4]), length_edits={5: 14, 2: 9})
    fed = torch.arange(6 * next_n, dtype=torch.int32).view(6, next_n) + 500
    world.state.next_tokens.copy_(fed)
    world.latch()
    for line in world.ring.lines:
        line.fill_(-7)
    output = np.arange(4 * next_n).reshape(4, next_n) + 900
    accepted = np.array([next_n, 1, 99, 99])
    world.advance(output, accepted)
    assert world.state.length.tolist() == [0, 0, 10, 0, 0, 14 + next_n]
    want = fed.numpy().copy()
    want[5], want[2] = output[0], output[1]
    np.testing.assert_array_equal(world.state.next_tokens.cpu().numpy(), want)
    assert world.ring.header[1][0] == 1
    assert world.ring.accepted[1].tolist() == [next_n, 1, 0, 0]
    first = [*fed[5, 1:].tolist(), 900]
    second = [900 + next_n] + [-1] * (next_n - 1)
    assert world.ring.emitted[1].tolist() == [first, second, [-1] * next_n, [-1] * next_n]
    assert (world.ring.lines[0] == -7).all(), "the other step's line was written"


def test_advance_after_prefill_emits_the_new_token_alone(executor: str) -> None:
    world = World(executor, next_n=2)
    world.publish([1], query=[20], edits=cells(1, [3, 4]), length_edits={1: 0}, supplied={1: list(range(20))}, bucket=1)
    world.latch(1, 20)
    world.advance(np.array([[42, 43]]), prefill=True)
    assert world.state.length[1] == 20
    assert world.ring.accepted[1][:1].tolist() == [20]
    assert world.ring.emitted[1][:1].tolist() == [[42, -1]]
    assert world.state.next_tokens[1].tolist() == [42, 43]


@pytest.mark.parametrize(("query_len", "shift", "accepted"), [(0, 0, None), (1, 0, [2, 1, 0, 0]), (3, 1, None)])
def test_derive_fills_another_side_and_leaves_the_target_alone(
    executor: str, query_len: int, shift: int, accepted: list[int] | None
) -> None:
    """The draft side has its own tensors; G1's kind: its token map is that of its own query length."""
    world = World(executor, next_n=4)
    world.publish([5, 2], edits=cells(5, [1, 2, 6]) | cells(2, [3, 4]), length_edits={5: 14, 2: 9})
    target = world.latch()
    before = {name: tensor.clone() for name, tensor in target.tensors().items()}
    world.poison(Side.DRAFT)
    taken = None if accepted is None else torch.tensor(accepted, dtype=torch.int32, device=world.device.torch)
    plan = DerivePlan(query_len=query_len, shift=shift, accepted=taken)
    draft = world.nodes.derive(world.live[Side.DRAFT][0], target, plan, world.stream())
    world.device.synchronize()
    count = query_len or 4
    starts = [14 + shift + (accepted or [0, 0])[0], 9 + shift + (accepted or [0, 0])[1]]
    expected = world.expected([(5, starts[0], count), (2, starts[1], count)], 4, 4 * count, Side.DRAFT)
    if query_len:  # padded rows keep their place in a batch of equal rows
        expected["query_start"] = np.arange(5, dtype=np.int32) * query_len
        expected["token_row"] = np.repeat(np.arange(4, dtype=np.int32), query_len)
    assert_live(draft, expected)
    for name, tensor in target.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("side", list(Side))
def test_a_group_has_its_own_table_lines_and_scales(executor: str, side: Side) -> None:
    """Stale columns of the window are null, its positions are those of every group, and it owns no index K."""
    world = World(executor, next_n=2)
    line = world.max_rows
    edits = cells(5, [1, 2, 6]) | cells(2, [3, 4]) | cells(line + 5, [0, 9, 7]) | cells(line + 2, [8, 0])
    world.publish([5, 2], edits=edits, length_edits={5: 40, 2: 15})
    target = world.latch()
    world.poison(side, 1)
    windowed = world.nodes.derive(world.live[side][1], target, DerivePlan(), world.stream())
    world.device.synchronize()
    assert_live(target, world.expected([(5, 40, 2), (2, 15, 2)], 4, 8))
    assert_live(windowed, world.expected([(5, 40, 2), (2, 15, 2)], 4, 8, side, 1))
    assert windowed.latent_page_table[0].tolist()[:3] == [0, 9 * world.scales[side][1][0], 7 * world.scales[side][1][0]]
    assert windowed.latent_slot.tolist()[3] == -1, "position 16 of row 2 has no block"
    assert windowed.index_slot.tolist() == [-1] * 8
    assert (windowed.group, windowed.window) == (1, Window(20))


def test_the_latch_fills_the_first_group_that_the_target_has(executor: str) -> None:
    world = World(executor, windowed_only=True)
    world.poison()
    line = world.max_rows
    edits = cells(4, [7, 8, 9]) | cells(line + 4, [0, 5, 6]) | cells(line + 1, [3])
    world.publish([4, 1], edits=edits, length_edits={4: 40, 1: 3})
    assert_live(world.latch(), world.expected([(4, 40, 1), (1, 3, 1)], 4, 4))
    assert world.state.block_table.cpu().numpy().tolist() == world.table.tolist()


def tear(words: np.ndarray, how: str) -> None:
    if how == "old half":
        words[words.size // 2 :] = 0
    elif how == "one bit":
        words[17] ^= 1
    elif how == "sizes":
        words[pk.EDITS] = 2**30
    elif how == "negative sizes":
        words[pk.ROWS] = -1
    elif how == "swapped records":
        words[16:24] = np.concatenate([words[20:24], words[16:20]])


@pytest.mark.parametrize(
    "how", ["skip", "repeat", "bucket", "old half", "one bit", "sizes", "negative sizes", "swapped records"]
)
def test_a_packet_that_is_not_the_next_whole_one_writes_nothing(executor: str, how: str) -> None:
    world = World(executor)
    world.publish([0, 1], edits=cells(0, [1, 2]) | cells(1, [3]), length_edits={0: 20, 1: 5})
    world.latch()
    world.advance(np.full((4, 1), 7))
    world.step, found = 1, 2
    if how == "skip":
        world.publish([0, 1], step=4)
        found = 4
    elif how == "repeat":
        found = 0  # the frame of step 2 was never written
    else:
        words = world.publish([0, 1], edits={(0, 2): 8}, bucket=3 if how == "bucket" else None)
        tear(words, how)
    state = {name: getattr(world.state, name).clone() for name in ("length", "block_table", "next_tokens", "step")}
    world.ring.lines[0].fill_(-7)
    world.table[0, 2] = 0
    world.poison()
    live = world.latch()
    world.advance(np.full((4, 1), 9))
    assert_live(live, world.expected([], 4, 4))
    assert live.token_ids.tolist() == [0] * 4
    for name, before in state.items():
        assert torch.equal(getattr(world.state, name), before), name
    assert world.state.fault[:3].tolist() == [1, 2, found]
    assert world.state.healthy.tolist() == [0]
    assert (world.ring.lines[0] == -7).all()


def test_step_numbers_go_around(executor: str) -> None:
    world = World(executor)
    world.state.step.fill_(pk.STEP_MASK - 1)
    for step in (pk.STEP_MASK - 1, pk.STEP_MASK):
        world.step = step
        world.publish([1], edits={(1, 0): 3}, length_edits={1: 5})
        assert_live(world.latch(), world.expected([(1, 5, 1)], 4, 4))
    assert world.state.step.tolist() == [0]


BATCH = st.lists(st.integers(0, 5), min_size=0, max_size=4, unique=True)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), next_n=st.integers(1, 4))
@pytest.mark.parametrize("executor", EXECUTORS)
def test_any_run_of_steps_leaves_what_plain_loops_say(executor: str, data: st.DataObject, next_n: int) -> None:
    """Batches that shrink, grow and change order; rows that grow, restart and rewind; tokens from host or device."""
    world = World(executor, next_n=next_n)
    next_tokens = np.zeros((6, next_n), np.int32)
    for step in range(1, data.draw(st.integers(1, 6)) + 1):
        rows = data.draw(BATCH)
        edits = data.draw(
            st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 7)), st.integers(1, 1000), max_size=12)
        )
        length_edits = {
            row: data.draw(st.one_of(st.integers(0, 128 - next_n), st.integers(-20, -2)))
            for row in rows
            if world.length[row] + next_n > 128 or data.draw(st.booleans())
        }
        length_edits = {
            r: e if e >= 0 or world.length[r] + e + 1 + next_n <= 128 else 0 for r, e in length_edits.items()
        }
        supplied = {
            row: data.draw(st.lists(st.integers(0, 999), min_size=next_n, max_size=next_n))
            for row in rows
            if data.draw(st.booleans())
        }
        world.publish(rows, edits=edits, length_edits=length_edits, supplied=supplied)
        world.poison()
        live = world.latch()
        batch = [(row, int(world.length[row]), next_n) for row in rows]
        assert_live(live, world.expected(batch, 4, 4 * next_n))
        tokens = [t for row in rows for t in supplied.get(row, next_tokens[row].tolist())]
        assert live.token_ids.tolist() == tokens + [0] * (4 * next_n - len(tokens))
        accepted = np.array([data.draw(st.integers(1, next_n)) for _ in range(4)])
        output = np.arange(4 * next_n).reshape(4, next_n) + 1000 * step
        world.advance(output, accepted)
        for r, row in enumerate(rows):
            world.length[row] += accepted[r]
            next_tokens[row] = output[r]
        np.testing.assert_array_equal(world.state.length.cpu().numpy(), world.length)
        np.testing.assert_array_equal(world.state.block_table.cpu().numpy(), world.table)
        np.testing.assert_array_equal(world.state.next_tokens.cpu().numpy(), next_tokens)
        world.step = step
