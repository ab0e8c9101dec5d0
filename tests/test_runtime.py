"""The runtime as its caller sees it: right bytes, right tokens, clear refusals, on both devices."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe import PER_REQUEST, ProbeModel, probe_config, probe_runtime

from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows, StaleFrame
from graphkv.layout import Side
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch
from graphkv.step import StepContext, StepOutput

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIDES = {"target": "", "draft": "FS"}


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("draft", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("upload", ["copy", "pull"])
def test_sequences_that_join_and_leave_write_their_own_bytes_and_no_others(
    device: torch.device, next_n: int, draft: str, upload: str
) -> None:
    runtime, model, shadow = probe_runtime(device, probe_config(draft=draft), next_n=next_n, upload=upload)
    a, b = shadow.open(1, 3), shadow.open(2, 70)
    shadow.prefill([a, b])
    for _ in range(4):
        shadow.step([b, a])
    c = shadow.open(3, 16)
    shadow.prefill([c])
    for _ in range(3):
        shadow.step([c, a, b])
    shadow.check()
    runtime.close(b)
    d = shadow.open(4, 1)
    shadow.prefill([d])
    for _ in range(5):
        shadow.step([a, d, c])
    shadow.check()
    # Tags are counted up to the last query token, which reads the row's length before the step and next_n more.
    assert all(count > 0 for count in shadow.counted(model, [a, d, c]))
    if draft:
        assert shadow.counted(model, [a, d, c], Side.DRAFT)[1] > 0


def test_results_name_the_tokens_of_each_step(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device)
    a, b = shadow.open(1, 5), shadow.open(2, 60)
    last = shadow.prefill([a, b])
    result = runtime.results(last)
    assert result.sequences == (b,), "the first chunk of 48 holds all of a and a part of b"
    assert result.tokens.tolist() == [[2 * PER_REQUEST + 60]]
    first = runtime.results(last - 1)
    assert first.sequences == (a, b)
    assert first.tokens.tolist() == [[PER_REQUEST + 5], [-1]]
    step = shadow.step([b, a])
    later = shadow.step([b, a])  # submitted before the first one's tokens are known
    assert runtime.results(step).tokens.tolist() == [[2 * PER_REQUEST + 61], [PER_REQUEST + 6]]
    assert runtime.results(later).accepted.tolist() == [1, 1]
    assert a.tokens.tolist() == [PER_REQUEST + i for i in range(8)]
    assert (a.length, b.length) == (7, 62)


@pytest.mark.parametrize("next_n", [1, 4])
def test_rewind_feeds_the_token_at_the_new_length_again(device: torch.device, next_n: int) -> None:
    runtime, _, shadow = probe_runtime(device, next_n=next_n)
    a, b = shadow.open(1, 40), shadow.open(2, 7)
    shadow.prefill([a, b])
    for _ in range(3):
        shadow.step([a, b])
    runtime.retire()
    held = runtime.stats().blocks_held
    shadow.length[a] = runtime.manager.length[a.row] - 20
    runtime.rewind(a, 20)
    runtime.retire()
    assert runtime.stats().blocks_held < held
    assert a.tokens.size == a.length + 1 == shadow.length[a] + 1
    if next_n == 1:
        for _ in range(30):
            shadow.step([b, a])
        shadow.check()
    else:  # the drafts that follow a rewind are the token itself, so only their first is foretold
        step = runtime.step([b, a])
        assert runtime.results(step).accepted.min() >= 1
        runtime.check()


def test_append_continues_a_sequence_with_tokens_of_the_callers(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device)
    a = shadow.open(1, 5)
    shadow.prefill([a])
    shadow.step([a])
    runtime.append(a, np.arange(7, 30) + PER_REQUEST)
    with pytest.raises(InvalidValue, match="prefill it first"):
        runtime.step([a])
    shadow.prefill([a])
    for _ in range(4):
        shadow.step([a])
    shadow.check()


def test_a_refused_batch_changes_nothing(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device, num_blocks=8)  # 7 blocks of 16 tokens
    a, b = shadow.open(1, 48), shadow.open(2, 62)
    shadow.prefill([a, b])  # 3 and 4 blocks: none is left, and a is at a block edge
    runtime.retire()
    before = runtime.stats()
    for batch in ([a], [b, a], [a, b]):
        with pytest.raises(OutOfBlocks, match="1 more blocks needed, 0 free"):
            runtime.step(batch)
        assert runtime.stats() == before
    shadow.step([b])
    shadow.step([b])
    with pytest.raises(OutOfBlocks):
        runtime.step([b])
    runtime.close(b)
    runtime.retire()
    for _ in range(20):
        shadow.step([a])
    shadow.check()
    c = shadow.open(3, 100)
    with pytest.raises(OutOfBlocks, match="7 more blocks needed, 0 free, 2 evictable"):
        runtime.prefill([c])
    assert c.length == 0
    runtime.close(a)
    shadow.prefill([c])  # waits for the step in flight, then a's blocks are free
    shadow.step([c])
    shadow.check()


def test_rows_run_out_and_come_back(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device)
    opened = [shadow.open(i + 1, 3) for i in range(4)]
    with pytest.raises(OutOfRows, match="all 4 rows are taken"):
        runtime.open([1])
    shadow.prefill(opened)
    shadow.step(opened)
    runtime.close(opened[1])
    runtime.close(opened[1])
    again = shadow.open(7, 4)  # the step in flight is waited for
    assert again.row == opened[1].row
    shadow.prefill([again])
    shadow.step([again, opened[3]])
    shadow.check()
    assert opened[1].tokens.tolist() == [2 * PER_REQUEST + i for i in range(5)], "results in flight at close are kept"
    assert opened[1].length == 0


def test_rows_come_back_where_no_step_was_ever_made() -> None:
    runtime, _, _ = probe_runtime("cpu")
    for _ in range(3):
        opened = [runtime.open([1]) for _ in range(4)]
        for sequence in opened:
            runtime.close(sequence)
    assert runtime.stats().rows_open == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, a, b: r.step([]), "at least one sequence"),
        (lambda r, a, b: r.step([b]), "prefill it first"),
        (lambda r, a, b: r.step([a, a]), "named more than once"),
        (lambda r, a, b: r.prefill([a]), "nothing to prefill"),
        (lambda r, a, b: r.prefill([b, b]), "named more than once"),
        (lambda r, a, b: r.prefill([]), "at least one sequence"),
        (lambda r, a, b: r.open([]), "0 tokens is not within 1 .. max_seq_len 112"),
        (lambda r, a, b: r.open(np.zeros(113, int)), "113 tokens is not within"),
        (lambda r, a, b: r.open([0.5]), "one-dimensional array of integers"),
        (lambda r, a, b: r.append(a, np.zeros(110, int)), "appending 110 tokens to 5"),
        (lambda r, a, b: r.rewind(b, 1), "prefill it before rewinding"),
        (lambda r, a, b: r.rewind(a, 5), "5 is more than the 4 tokens"),
        (lambda r, a, b: r.results(99), "never submitted"),
        (lambda r, a, b: r.metadata(2, Side.DRAFT), "no draft side"),
    ],
)
def test_a_careless_caller_is_told_and_nothing_changed(call: object, message: str) -> None:
    runtime, _, shadow = probe_runtime("cpu")
    a, b = shadow.open(1, 4), shadow.open(2, 4)
    shadow.prefill([a])
    runtime.retire()
    before = runtime.stats()
    with pytest.raises(InvalidValue, match=message):
        call(runtime, a, b)  # type: ignore[operator]
    assert runtime.stats() == before
    shadow.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0}, "max_rows must be positive"),
        ({"next_n": 17}, "next_n must be within 1 .. block_size 16"),
        ({"buckets": [8]}, "within 1 .. max_rows 4"),
        ({"num_blocks": None}, "give num_blocks or memory_bytes"),
        ({"num_blocks": 5, "memory_bytes": 1 << 20}, "give num_blocks or memory_bytes"),
        ({"num_blocks": None, "memory_bytes": 100}, "memory_bytes 100 holds 0 blocks"),
        ({"num_blocks": 1}, "a pool needs 2 blocks"),
        ({"mode": "fast"}, "mode must be 'graph' or 'eager'"),
        ({"upload": "push"}, "upload must be 'copy' or 'pull'"),
    ],
)
def test_construction_refuses_what_cannot_work(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        probe_runtime("cpu", **options)


def test_a_model_that_returns_the_wrong_thing_is_refused_at_construction() -> None:
    def model(step: StepContext) -> StepOutput:
        return StepOutput(torch.zeros(step.rows, dtype=torch.int64))

    with pytest.raises(InvalidValue, match=r"StepOutput.tokens must be torch.int64 \[4, 1\]"):
        DecodeRuntime(probe_config(), model, device="cpu", max_rows=4, max_seq_len=32, num_blocks=8)


def test_a_list_and_a_batch_are_the_same_and_a_batch_notices_changes(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device)
    a, b = shadow.open(1, 4), shadow.open(2, 4)
    shadow.prefill([a, b])
    batch = Batch([a, b])
    for _ in range(3):
        shadow.step(batch)
    shadow.step([a, b])
    runtime.close(b)
    with pytest.raises(InvalidValue, match="closed"):
        runtime.step(batch)
    shadow.check()


def test_a_batch_found_fit_by_one_runtime_is_checked_by_another() -> None:
    runtimes = [probe_runtime("cpu") for _ in range(2)]
    batches = []
    for runtime, _, shadow in runtimes:
        sequence = shadow.open(1, 4)
        shadow.prefill([sequence])
        batches.append(Batch([sequence]))
        runtime.step(batches[-1])
    with pytest.raises(InvalidValue, match="belongs to another runtime"):
        runtimes[0][0].step(batches[1])


def test_step_numbers_go_around_on_the_device(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device)
    a = shadow.open(1, 14)
    shadow.prefill([a])
    runtime.retire()
    engine = runtime._engine
    first = 2**31 - 4 + (engine.submitted & 1)  # the frames' turn stays
    engine.submitted = engine.retired = first
    engine.reset(runtime.manager.length, runtime.manager.block_table)
    for _ in range(8):
        last = shadow.step([a])
    assert last == first + 8 > 2**31
    assert runtime.results(last).tokens.tolist() == [[PER_REQUEST + 22]]
    shadow.check()


def test_a_runtime_can_be_used_from_another_thread(device: torch.device) -> None:
    shadow = probe_runtime(device)[2]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            a, b = shadow.open(1, 14), shadow.open(2, 50)
            shadow.prefill([a, b])
            for _ in range(5):
                shadow.step([b, a])
            shadow.check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


class Tamper:
    """Spoils the next packet between host and device, as a fault in between would."""

    def __init__(self, runtime: DecodeRuntime, how: str) -> None:
        self.frames = runtime._engine._frames
        self.how = how
        self.publish = self.frames.publish

    def __call__(self, num_bytes: int) -> None:
        words = self.frames.back.host.numpy()
        if self.how == "skip":
            words[0] += 2
        elif self.how == "repeat":
            words[0] -= 2
        else:
            words[num_bytes // 8 :] ^= 0x55
        self.publish(num_bytes)


@pytest.mark.parametrize("how", ["skip", "repeat", "tear"])
@pytest.mark.parametrize("upload", ["copy", "pull"])
@pytest.mark.parametrize("next_n", [1, 3])
def test_a_stale_frame_is_seen_and_nothing_is_written(
    device: torch.device, how: str, upload: str, next_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, _, shadow = probe_runtime(device, upload=upload, next_n=next_n)
    a, b = shadow.open(1, 14), shadow.open(2, 30)
    shadow.prefill([a, b])
    for _ in range(3):
        shadow.step([a, b])
    shadow.check()
    good = runtime.stats().steps_submitted
    monkeypatch.setattr(runtime._engine._frames, "publish", Tamper(runtime, how))
    bad = runtime.step([b, a])
    monkeypatch.undo()
    after = runtime.step([a, b])  # submitted before anyone knows; a no-op as well
    with pytest.raises(StaleFrame) as caught:
        runtime.results(bad)
    found = {"skip": bad + 2, "repeat": bad - 2, "tear": bad}[how]
    assert (caught.value.expected, caught.value.found) == (bad, found)
    for call in (lambda: runtime.results(after), lambda: runtime.step([a]), lambda: runtime.results(bad)):
        with pytest.raises(StaleFrame):
            call()
    runtime.resync()
    assert runtime.results(good).step == good
    shadow.check()
    if next_n == 1:
        for _ in range(20):
            shadow.step([a, b])
        shadow.check()
    else:
        assert (runtime.results(runtime.step([a, b])).accepted >= 1).all()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["open", "close", "step", "step", "step", "check"]), st.integers(0, 99))
)


def _drive(runtime: DecodeRuntime, model: ProbeModel, shadow: object, operations: list[tuple[str, int]]) -> list[bytes]:
    """Run operations; what every live tensor held after each step."""
    sequences, seen = [], []
    for request, (what, number) in enumerate(operations, 1):
        if what == "open" and len(sequences) < 4:
            sequence = shadow.open(request, 1 + number)
            if shadow.runtime.manager.stats().blocks_free * 16 < 2 * (number + 32):
                runtime.close(sequence)
                continue
            shadow.prefill([sequence])
            sequences.insert(number % (len(sequences) + 1), sequence)
        elif what == "close" and sequences:
            runtime.close(sequences.pop(number % len(sequences)))
        elif what == "step" and sequences:
            order = np.random.default_rng(number).permutation(len(sequences))[: 1 + number % len(sequences)]
            batch = [sequences[i] for i in order if sequences[i].length + 2 * runtime.next_n <= 112]
            if not batch:
                continue
            try:
                step = shadow.step(batch)
            except OutOfBlocks:
                continue
            runtime.retire(step)
            runtime.device.synchronize()
            bucket = next(b for b in (1, 2, 4) if b >= len(batch))
            for side in runtime.config.sides:
                live = runtime.metadata(bucket, side).tensors().values()
                seen += [tensor.cpu().numpy().tobytes() for tensor in live]
            seen.append(model.counts[Side.TARGET][: bucket * runtime.next_n].cpu().numpy().tobytes())
        elif what == "check":
            shadow.check()
    shadow.check()
    return seen


@pytest.mark.parametrize("where", DEVICES)
@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS, next_n=st.sampled_from([1, 3]))
def test_replay_equals_eager_byte_for_byte(where: str, operations: list[tuple[str, int]], next_n: int) -> None:
    """Batches that shrink, grow and change order under padding: pools, live tensors and canaries are the same."""
    runs = []
    for mode in ("graph", "eager"):
        options = {"mode": mode, "next_n": next_n, "num_blocks": 30}
        runtime, model, shadow = probe_runtime(where, probe_config(draft="F"), **options)
        seen = _drive(runtime, model, shadow, operations)
        pools = [pool.data.cpu().numpy().tobytes() for pool in runtime.pools]
        runs.append((seen, pools))
    assert runs[0] == runs[1]
