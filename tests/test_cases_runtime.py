"""Real faults of captured graphs and of the host memory they read, as conditions on the runtime."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from probe import PER_REQUEST, ProbeModel, Shadow, probe_config, probe_runtime
from step_oracle import schedule

from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.layout import Role, Side
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch

CANARIES = 512  # bytes on either side of a buffer
SPIN_CYCLES = 100_000_000  # about 50 ms of a GPU


def stall(runtime: DecodeRuntime) -> None:
    """Keep the compute stream busy, so that all that follows on it stays pending while the host runs on."""
    if runtime.device.is_cuda:
        with torch.cuda.stream(runtime.stream):
            torch.cuda._sleep(SPIN_CYCLES)


def allocations(runtime: DecodeRuntime) -> tuple[int, ...]:
    """Device, pinned and own allocations so far, as torch's allocators and the ledger count them."""
    if not runtime.device.is_cuda:
        return (runtime.device.ledger.allocations,)
    host = torch.cuda.host_memory_stats()
    return (
        torch.cuda.memory_stats()["allocation.all.allocated"],
        torch.cuda.memory_stats()["segment.all.allocated"],
        *(value for name, value in sorted(host.items()) if name.endswith(".allocated")),
        runtime.device.ledger.allocations,
    )


@pytest.mark.parametrize("next_n", [1, 4])
def test_case_A1_the_table_reaches_what_next_n_can_and_a_narrower_batch_sees_no_old_columns(
    device: torch.device, next_n: int
) -> None:
    runtime, _, shadow = probe_runtime(device, max_seq_len=64, next_n=next_n)
    p = shadow.open(1, 64)  # exactly 4 blocks of 16
    shadow.prefill([p])
    shadow.step([p])  # needs column 4
    shadow.check()
    old = runtime.manager.block_table[p.row].copy()
    assert (old[:5] > 0).all()
    runtime.close(p)
    q = shadow.open(2, 3)
    assert q.row == p.row
    shadow.prefill([q])
    for _ in range(3):
        shadow.step([q])
        runtime.retire()
        runtime.device.synchronize()
        live = runtime.metadata(1)
        blocks = -(-int(live.seq_len[0]) // 16)
        for table in (live.latent_page_table, live.index_page_table):
            assert (table[0, :blocks] > 0).all()
            assert not table[0, blocks:].any(), "a column past the row's blocks does not hold the null page"
    shadow.check()
    with pytest.raises(InvalidValue, match="batch of 5 rows does not fit the largest bucket of 4"):
        runtime.step([q] * 5)


def test_case_A1_a_row_at_its_last_column_is_refused_and_nothing_changed(device: torch.device) -> None:
    runtime, _, shadow = probe_runtime(device, max_seq_len=62, next_n=1)
    p = shadow.open(1, 62)
    shadow.prefill([p])
    for _ in range(64 - 62):
        shadow.step([p])
    runtime.retire()
    before = runtime.stats()
    with pytest.raises(InvalidValue, match="a row has 4"):
        runtime.step([p])
    assert runtime.stats() == before
    shadow.check()


def test_case_A2_every_address_in_a_graph_stays_the_buffers_for_the_graphs_life(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buckets share one workspace between canaries; odd allocations come and go between captures and replays."""
    guarded: list[torch.Tensor] = []
    empty = Device.empty

    def with_canaries(self: Device, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype != torch.uint8 or not isinstance(shape, int):
            return empty(self, shape, dtype)
        guarded.append(empty(self, shape + 2 * CANARIES, dtype).fill_(0x5A))
        return guarded[-1][CANARIES:-CANARIES]

    monkeypatch.setattr(Device, "empty", with_canaries)
    config = probe_config()
    model = ProbeModel(config, 512, device)
    junk = [torch.full((size,), 3.0, device=device) for size in (33, 1025, 70_001)]
    options = {"max_rows": 32, "max_seq_len": 1000, "num_blocks": 200, "buckets": [4, 32]}
    runtime = DecodeRuntime(config, model, device=device, **options)
    del junk
    decode = {address for address in model.workspace_addresses if address}
    assert len(decode) == 1, "the buckets' workspaces are at different addresses"
    shadow = Shadow(runtime)
    short, long = shadow.open(1, 3), shadow.open(2, 900)
    shadow.prefill([short, long])
    runtime.retire()
    for _ in range(3):
        noise = [torch.full((size,), float("nan"), device=device) for size in (33, 1025, 70_001, 1_000_003)]
        counted = allocations(runtime)
        shadow.step([short])
        shadow.step([short, long])
        runtime.retire()
        assert allocations(runtime) == counted
        del noise
    shadow.check()
    assert any(each[CANARIES:-CANARIES].ne(0x5A).any() for each in guarded), "no workspace was made this way"
    for each in guarded:
        assert each[:CANARIES].eq(0x5A).all()
        assert each[-CANARIES:].eq(0x5A).all()
    with pytest.raises(InvalidValue, match="asked for after capture, where it does not exist"):
        runtime._engine._workspaces["decode"]("another", (4,), torch.float32)
    with pytest.raises(InvalidValue, match="asked for after capture, where it has"):
        runtime._engine._workspaces["decode"]("tag target", (1 << 20,), torch.float32)


def test_case_A4_the_schedule_follows_this_steps_lengths(device: torch.device) -> None:
    """Equal batch size is no leave to reuse it: (256,100) (257,100) (10,10) (256,256), compared with plain loops."""
    runtime, _, shadow = probe_runtime(device, probe_config(block_size=64), max_seq_len=600, num_blocks=60)
    parts = runtime.device.sm_count
    for pair in ((256, 100), (257, 100), (10, 10), (256, 256), (1, 512)):
        a, b = shadow.open(1, pair[0] - 1 or 1), shadow.open(2, pair[1] - 1)
        shadow.prefill([a, b])
        shadow.step([a, b])
        runtime.retire()
        runtime.device.synchronize()
        lengths = [a.length, b.length]
        live = runtime.metadata(2)
        np.testing.assert_array_equal(live.seq_len.cpu().numpy(), lengths)
        np.testing.assert_array_equal(live.schedule.cpu().numpy(), schedule(lengths, parts))
        shadow.check()
        runtime.close(a)
        runtime.close(b)


def test_case_A6_no_host_number_of_the_capture_lives_on_in_the_graph(device: torch.device) -> None:
    """Captured on padded rows alone; replayed with one row at 1000, whose probe must count 1000 positions."""
    runtime, model, shadow = probe_runtime(device, max_seq_len=1100, num_blocks=100, prefill_chunk=300)
    rows = [shadow.open(i + 1, length) for i, length in enumerate((63, 999, 5, 20))]
    shadow.prefill(rows)
    shadow.step(rows)
    shadow.check()
    assert shadow.counted(model, rows) == [64, 1000, 6, 21]
    shadow.step(rows[1:2])
    runtime.retire()
    runtime.device.synchronize()
    assert shadow.counted(model, rows[1:2]) == [1001]


@pytest.mark.parametrize("upload", ["copy", "pull"])
def test_case_B1_a_stalled_stream_still_reads_each_steps_own_packet(device: torch.device, upload: str) -> None:
    """Step n+1 is prepared and submitted while step n has not begun to read; then 100 steps without a host wait."""
    runtime, _, shadow = probe_runtime(device, upload=upload, max_seq_len=200, num_blocks=60)
    a, b, c, d = (shadow.open(i + 1, n) for i, n in enumerate((15, 31, 16, 1)))
    shadow.prefill([a, b, c, d])
    runtime.retire()
    stall(runtime)
    first = shadow.step([a, b])
    second = shadow.step([c, d])
    assert runtime.results(first).tokens[:, 0].tolist() == [PER_REQUEST + 16, 2 * PER_REQUEST + 32]
    assert runtime.results(second).tokens[:, 0].tolist() == [3 * PER_REQUEST + 17, 4 * PER_REQUEST + 2]
    stall(runtime)
    for i in range(100):
        shadow.step([a, b, c, d][i % 3 :])
    shadow.check()


@pytest.mark.parametrize("draft", ["", "F"])
@pytest.mark.parametrize("upload", ["copy", "pull"])
def test_case_B2_two_hundred_steady_steps_allocate_nothing(device: torch.device, draft: str, upload: str) -> None:
    config = probe_config(draft=draft)
    runtime, _, shadow = probe_runtime(device, config, upload=upload, next_n=3, max_seq_len=700, num_blocks=200)
    batch = Batch([shadow.open(i + 1, 5 + i) for i in range(4)])
    shadow.prefill(batch)
    for _ in range(4):
        runtime.step(batch)
    runtime.retire()
    launches, before = runtime.stats().graph_launches, allocations(runtime)
    for _ in range(200):
        runtime.step(batch)
    runtime.retire()
    assert allocations(runtime) == before
    assert runtime.stats().graph_launches == launches + 200, "a decode step is one graph launch"
    runtime.check()


@pytest.mark.gpu
def test_case_B2_preparing_a_step_does_not_block_while_a_frame_is_free() -> None:
    runtime, _, shadow = probe_runtime("cuda")
    a = shadow.open(1, 5)
    shadow.prefill([a])
    runtime.retire()
    stall(runtime)
    first = shadow.step([a])
    second = shadow.step([a])
    frames = runtime._engine._frames
    assert not frames.of(first).done.done(), "the stall was too short to prove anything"
    assert not frames.of(second).done.done()
    shadow.check()


@pytest.mark.parametrize("upload", ["copy", "pull"])
def test_case_B3_no_other_pinned_memory_comes_between_a_graph_and_its_source(device: torch.device, upload: str) -> None:
    runtime, _, shadow = probe_runtime(device, upload=upload)
    a, b = shadow.open(1, 15), shadow.open(2, 40)
    shadow.prefill([a, b])
    sizes = {frame.host.numel() for frame in (runtime._engine._frames.even, runtime._engine._frames.odd)}
    for _ in range(10):
        shadow.step([a, b])
        for size in sizes:
            pinned = torch.empty(size, dtype=torch.int32, pin_memory=runtime.device.is_cuda).fill_(-1)
            del pinned
    c = shadow.open(3, 9)  # a differently shaped step in between
    shadow.prefill([c])
    for _ in range(10):
        shadow.step([b, c, a])
    shadow.check()


@pytest.mark.parametrize("next_n", [1, 4])
def test_case_C1_padded_rows_write_nowhere(device: torch.device, next_n: int) -> None:
    """A pool of 5 blocks whose last block is live up to its last slot; 3 rows padded to 4, after a row of length 70."""
    config = probe_config(draft="F")
    runtime, _, shadow = probe_runtime(device, config, num_blocks=6, max_seq_len=76, next_n=next_n)
    long = shadow.open(9, 70)
    others = []
    shadow.prefill([long])
    runtime.close(long)
    for i, tokens in enumerate((14, 3, 30 - next_n)):
        others.append(shadow.open(i + 1, tokens))
        shadow.prefill(others[-1:])
    runtime.retire()
    shadow.step(others[:1] if next_n == 4 else others)  # 4 rows are padded to the next bucket
    shadow.check()
    null = [pool.block(0) for pool in runtime.pools]
    for _ in range(10):
        runtime._engine.submit_idle(4)  # nothing but padded rows
        runtime.retire()
    shadow.check()
    assert all((block == 0xA5).all() for block in null)
    live = runtime.metadata(4)
    assert live.latent_slot.tolist() == [-1] * 4 * next_n
    assert live.index_slot.tolist() == [-1] * 4 * next_n
    assert runtime.manager.block_table.max() == 5, "the last block of the pool was in use"


def test_case_J2_a_graph_keeps_alive_what_it_points_to(device: torch.device) -> None:
    runtime, model, shadow = probe_runtime(device)
    a, b = shadow.open(1, 15), shadow.open(2, 40)
    shadow.prefill([a, b])
    runtime.retire()
    pools, counts = weakref.ref(runtime.pools), model.counts[Side.TARGET]
    sizes = [tensor.numel() * tensor.element_size() for tensor in runtime.metadata(4).tensors().values()]
    del model
    gc.collect()
    junk = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes for _ in range(3)]
    for _ in range(10):
        shadow.step([a, b])
    shadow.check()
    assert all((tensor == 0xFF).all() for tensor in junk), "a replay wrote into memory that is not its own"
    assert counts[:2].tolist() == [25, 50]
    view = runtime.pools.view(Side.TARGET, Role.LATENT, 0)
    del runtime.pools  # the caller may drop its reference: the graphs' owner keeps the bytes
    gc.collect()
    assert pools() is not None
    runtime.step([a])
    runtime.retire()
    assert view.numel() > 0
