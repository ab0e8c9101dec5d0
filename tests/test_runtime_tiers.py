"""The runtime with colder tiers: every byte and token right whatever was suspended, evicted, matched cold or lost."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mix import MixModel, gathered, mix_config, run_workload
from tier_shadow import TierShadow, tier_runtime

from graphkv.errors import InvalidValue, NotReady, OutOfBlocks, TransferTimeout
from graphkv.manager.prefix import Scope
from graphkv.manager.v2 import RowState
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch, Sequence
from graphkv.tiers.disk import FileOps
from graphkv.tiers.hierarchy import TierOptions

HOST = TierOptions(host_blocks=16)
BLOCK_BYTES = 16 * 1024  # more than a block of the small cache takes in a file


def prompt(request: int, length: int) -> list[int]:
    return [request * 10_000 + i for i in range(length)]


def on_disk(folder: Path, host_blocks: int = 8, disk_blocks: int = 12, **options: Any) -> TierOptions:
    return TierOptions(host_blocks=host_blocks, disk_folder=folder, disk_bytes=disk_blocks * BLOCK_BYTES, **options)


def run(shadow: TierShadow, request: int, length: int, steps: int = 3) -> Sequence:
    """A sequence that was prefilled and stepped."""
    sequence = shadow.open(prompt(request, length))
    shadow.prefill([sequence])
    for _ in range(steps):
        shadow.step([sequence])
    return sequence


def leave(runtime: DecodeRuntime, tier: int) -> None:
    """All that is cached leaves a tier, its copies in colder ones stay."""
    slots = runtime.manager._cache.tiers[tier]
    slots.evict(slots.choose(slots.num_blocks))


def cool(runtime: DecodeRuntime, shadow: TierShadow, sequence: Sequence, tier: int = 1) -> None:
    """Close a sequence and have what is cached of it in one colder tier alone."""
    shadow.close(sequence)
    runtime.retire()
    runtime.drain()
    for warmer in range(tier):
        leave(runtime, warmer)
    assert all(slots.counts().cached == 0 for slots in runtime.manager._cache.tiers[:tier])
    assert runtime.manager._cache.tiers[tier].counts().cached > 0


def settle(runtime: DecodeRuntime, *sequences: Sequence) -> None:
    """Poll until none of the sequences is on its way."""
    runtime.drain()
    assert {sequence.state for sequence in sequences} <= {RowState.READY, RowState.SUSPENDED, RowState.CLOSED}


# suspend and resume ---------------------------------------------------------------------------------------------------


def test_a_suspended_sequence_comes_back_and_goes_on_while_others_step(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, late=True)
    a, b = run(shadow, 1, 40), run(shadow, 2, 20)
    held = runtime.stats().blocks_held
    runtime.suspend(a)
    assert (a.state, a.is_ready, a.length) == (RowState.SUSPENDING, False, 43)
    shadow.step([b])
    assert runtime.stats().blocks_held == held, "they leave when their copies are there"
    shadow.mover.release_all()
    shadow.step([b])  # looks by itself
    assert a.state == RowState.SUSPENDED
    assert runtime.stats().blocks_held == held - 3
    runtime.evict()
    c = run(shadow, 3, 33)
    runtime.resume(a)
    assert a.state == RowState.LOADING
    for _ in range(5):
        shadow.step([c, b])
    assert a.state == RowState.LOADING, "steps do not wait for it"
    shadow.mover.release_all()
    runtime.wait_ready(a)
    assert a.counts.blocks_moved == 6
    for _ in range(20):
        shadow.step([a, c, b])
    shadow.check()


@pytest.mark.parametrize("fed", [False, True])
def test_a_sequence_may_leave_before_its_prompt_was_fed_and_between_turns(device: torch.device, fed: bool) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    other = run(shadow, 1, 50)
    a = shadow.open([*prompt(1, 35), 7, 8])  # shares two blocks and has a copy of a part of the third
    if fed:
        shadow.prefill([a])
    runtime.suspend(a)
    settle(runtime, a)
    assert a.state == RowState.SUSPENDED
    assert a.cached_tokens == 35
    runtime.resume(a)
    runtime.wait_ready([a, other])
    if fed:
        shadow.append(a, [9, 10])
    shadow.prefill([a])
    for _ in range(10):
        shadow.step([other, a])
    shadow.check()


def test_only_what_the_sequence_is_in_is_waited_for(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    a, b = run(shadow, 1, 40), run(shadow, 2, 20)
    runtime.retire()
    runtime.device.synchronize()
    if runtime.device.is_cuda:
        with torch.cuda.stream(runtime.stream):
            torch.cuda._sleep(100_000_000)
    step = shadow.step([b])
    runtime.suspend(a)
    assert runtime.stats().steps_retired == step - 1
    runtime.retire()
    settle(runtime, a)
    runtime.resume(a)
    runtime.wait_ready(a)
    shadow.step([a, b])
    runtime.suspend(a)
    assert runtime.stats().steps_retired == step + 1
    shadow.check()


@pytest.mark.parametrize("state", [RowState.SUSPENDING, RowState.SUSPENDED, RowState.LOADING])
def test_what_is_not_ready_is_refused_with_a_way_out(device: torch.device, state: RowState) -> None:
    runtime, shadow = tier_runtime(device, HOST, late=True)
    a, b = run(shadow, 1, 40), run(shadow, 2, 20)
    batch = Batch([b, a])
    shadow.step(batch)
    runtime.suspend(a)
    if state != RowState.SUSPENDING:
        shadow.mover.release_all()
        runtime.poll()
    if state == RowState.LOADING:
        runtime.resume(a)
    assert a.state == state
    way_out = "resume it first" if state == RowState.SUSPENDED else "leave it out until poll"
    calls: list[Callable[[], object]] = [
        lambda: runtime.step([b, a]),
        lambda: runtime.step(batch),
        lambda: runtime.prefill([a]),
        lambda: runtime.fork(a),
        lambda: runtime.rewind(a, 1),
        lambda: runtime.append(a, [1]),
        lambda: runtime.suspend(a),
        lambda: runtime.wait_ready(a, 0.001),
    ]
    before = runtime.stats()
    for call in calls:
        with pytest.raises(NotReady, match=f"is {state}, and only a ready sequence can be used; {way_out}") as caught:
            call()
        assert caught.value.state == state
    if state != RowState.SUSPENDED:
        with pytest.raises(InvalidValue, match=f"row {a.row} is {state}; only a suspended row can be resumed"):
            runtime.resume(a)
    assert runtime.stats() == before
    shadow.mover.release_all()
    settle(runtime, a)
    if a.state == RowState.SUSPENDED:
        runtime.resume(a)
        shadow.mover.release_all()
    runtime.wait_ready([a, b])
    shadow.step([a, b])
    shadow.check()


def test_who_is_named_is_looked_for(device: torch.device) -> None:
    """Nobody polled since the transfer ended: the step that needs the sequence does."""
    runtime, shadow = tier_runtime(device, HOST, late=True)
    a = run(shadow, 1, 40)
    runtime.suspend(a)
    shadow.mover.release_all()
    runtime.poll()
    runtime.resume(a)
    shadow.mover.release_all()
    assert a.state == RowState.LOADING
    shadow.step([a])
    shadow.check()


def test_rows_come_and_go_without_a_step_between_to_carry_their_table_cells(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    a, b = run(shadow, 1, 90), run(shadow, 2, 90)
    for _ in range(8):
        for sequence in (a, b):
            runtime.suspend(sequence)
            settle(runtime, sequence)
            runtime.resume(sequence)
        runtime.wait_ready([a, b])
    shadow.step([a, b])
    shadow.check()


@pytest.mark.parametrize("state", [RowState.SUSPENDING, RowState.SUSPENDED, RowState.LOADING])
def test_closing_in_any_state_gives_everything_back(device: torch.device, state: RowState) -> None:
    runtime, shadow = tier_runtime(device, HOST, late=True)
    a = run(shadow, 1, 40)
    runtime.suspend(a)
    if state != RowState.SUSPENDING:
        shadow.mover.release_all()
        runtime.poll()
    if state == RowState.LOADING:
        runtime.resume(a)
    shadow.close(a)
    assert (a.state, a.tokens.size, a.length) == (RowState.CLOSED, 44, 0)
    runtime.close(a)
    b = run(shadow, 2, 60)
    shadow.check()
    shadow.close(b)
    shadow.mover.late = False
    shadow.mover.release_all()
    runtime.drain()
    stats = runtime.manager.stats()
    assert (stats.blocks_held, stats.tiers[0].held, stats.rows_free) == (0, 0, 4)
    shadow.check()


def test_what_cannot_complete_is_refused_and_nothing_changed(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, TierOptions(host_blocks=2, resume_limit=0.3))
    a, b = run(shadow, 1, 40), run(shadow, 2, 20)
    runtime.retire()
    before = runtime.stats()
    with pytest.raises(OutOfBlocks, match="more blocks needed in tier 1, 2 free"):
        runtime.suspend(a)
    assert runtime.stats() == before
    runtime.suspend(b)
    settle(runtime, b)
    for _ in range(40):
        shadow.step([a])
    with pytest.raises(OutOfBlocks, match="2 more blocks needed, 0 free"):
        runtime.resume(b)  # 6 of 23 blocks are in use, and 6 may be
    assert b.state == RowState.SUSPENDED
    shadow.close(a)
    runtime.retire()
    runtime.resume(b)
    runtime.wait_ready(b)
    shadow.step([b])
    shadow.check()
    plain, other = tier_runtime(device)
    with pytest.raises(InvalidValue, match="no colder tier to suspend to"):
        plain.suspend(run(other, 1, 20))


# cold matches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [1, 2])
def test_a_prompt_that_is_known_in_a_colder_tier_is_brought_and_the_rest_fed(
    device: torch.device, tier: int, tmp_path: Path
) -> None:
    runtime, shadow = tier_runtime(device, on_disk(tmp_path), late=tier == 1)
    busy = run(shadow, 2, 20)
    if shadow.mover.late:
        shadow.mover.late = False
    cool(runtime, shadow, run(shadow, 1, 60), tier)
    shadow.mover.late = True
    a = shadow.open(prompt(1, 70))
    assert (a.state, a.cached_tokens) == (RowState.LOADING, 0)
    with pytest.raises(NotReady, match="is loading"):
        shadow.prefill([a])
    for _ in range(3):
        shadow.step([busy])
    while not a.is_ready:
        shadow.mover.release_all()
        runtime.poll()
    assert a.length == a.cached_tokens == 48
    assert a.counts.cached == ((0, 48, 0) if tier == 1 else (0, 0, 48))
    assert (a.counts.recomputed, a.counts.blocks_moved) == (0, 3)
    before = runtime.stats().steps_submitted
    shadow.prefill([a])
    assert runtime.stats().steps_submitted == before + 1
    for _ in range(10):
        shadow.step([a, busy])
    shadow.check()
    other = shadow.open(prompt(1, 70), Scope(salt="tenant"))
    assert (other.state, other.cached_tokens) == (RowState.READY, 0)


def test_prefetch_makes_an_open_find_it_on_the_device(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    cool(runtime, shadow, run(shadow, 1, 60))
    assert runtime.prefetch(prompt(1, 70)) == 3
    assert runtime.prefetch(prompt(5, 70)) == 0
    runtime.drain()
    a = shadow.open(prompt(1, 70))
    assert (a.state, a.cached_tokens, a.counts.cached) == (RowState.READY, 48, (48, 0))
    shadow.prefill([a])
    shadow.check()


def test_without_room_for_a_cold_match_its_tokens_are_computed_again_and_counted_so(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=9)
    cool(runtime, shadow, run(shadow, 1, 60))
    b = run(shadow, 2, 90)  # 6 of 8 blocks
    a = shadow.open(prompt(1, 70))
    assert (a.state, a.cached_tokens, a.counts.recomputed) == (RowState.READY, 0, 48)
    shadow.close(b)
    shadow.prefill([a])
    assert runtime.manager.stats().tokens_missed == 48
    shadow.check()


def fill_and_leave(runtime: DecodeRuntime, shadow: TierShadow, request: int, length: int) -> None:
    """The full blocks of a prompt are cached."""
    sequence = run(shadow, request, length, steps=0)
    runtime.retire()
    shadow.close(sequence)
    assert runtime.manager.stats().blocks_cached >= length // 16


def test_a_prefill_that_begins_also_ends(device: torch.device) -> None:
    """Between its chunks no cached block is held for a copy that nobody asked for."""
    runtime, shadow = tier_runtime(device, HOST, num_blocks=8, prefill_chunk=16)
    shadow.mover.late = True
    fill_and_leave(runtime, shadow, 1, 100)
    a = run(shadow, 2, 100, steps=0)
    assert not shadow.mover.held
    shadow.step([a])
    shadow.check()


def test_a_step_waits_for_copies_that_nobody_asked_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=8)
    shadow.mover.late = True
    fill_and_leave(runtime, shadow, 1, 64)
    a = run(shadow, 2, 48, steps=0)
    runtime.poll()
    assert sum(map(len, shadow.mover.held.values())) == 4
    monkeypatch.setattr(time, "sleep", lambda _: shadow.mover.release_all())
    shadow.step([a])  # needs a block
    assert not shadow.mover.held
    shadow.check()


def test_a_step_does_not_wait_for_a_suspension(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=8, prefix_caching=False)
    shadow.mover.late = True
    a, b = run(shadow, 2, 48, steps=0), run(shadow, 1, 64, steps=0)
    runtime.suspend(b)
    begun = time.monotonic()
    with pytest.raises(OutOfBlocks, match="1 more blocks needed, 0 free"):
        shadow.step([a])
    assert time.monotonic() - begun < 0.5
    shadow.mover.release_all()
    shadow.step([a])  # looks, and finds room
    assert b.state == RowState.SUSPENDED
    shadow.check()


def test_a_lost_copy_ends_a_match_before_it(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST)
    cool(runtime, shadow, run(shadow, 1, 60))
    shadow.mover.late = True
    a = shadow.open(prompt(1, 70))
    (ticket,) = shadow.mover.held
    shadow.mover.release(ticket, failed=[1])
    runtime.wait_ready(a)
    assert (a.cached_tokens, a.counts.recomputed, a.counts.blocks_moved) == (16, 32, 1)
    shadow.prefill([a])
    for _ in range(5):
        shadow.step([a])
    shadow.check()


def test_case_H1_after_swaps_the_table_names_device_blocks(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, TierOptions(host_blocks=4), num_blocks=5, max_seq_len=32)
    rng = np.random.default_rng(3)
    rows = [run(shadow, i + 1, 20, 1) for i in range(2)]
    for _ in range(12):
        for sequence in (rows[i] for i in rng.permutation(2)):
            runtime.suspend(sequence)
            settle(runtime, sequence)
            runtime.evict()
        for sequence in rows:
            runtime.resume(sequence)
            runtime.wait_ready(sequence)
        shadow.step(rows) if rows[0].length < 30 else None
        runtime.retire()
        runtime.device.synchronize()
        assert runtime.manager.block_table.max() < 5
        live = runtime.metadata(2)
        for role_table, scale in ((live.latent_page_table, 3), (live.index_page_table, 2)):
            assert int(role_table.max()) < 5 * scale
        shadow.check()


@pytest.mark.gpu
def test_case_H3_a_block_is_read_after_the_step_that_writes_it() -> None:
    """The steps' stream is stalled while a sequence that shares blocks with one in flight is suspended."""
    runtime, shadow = tier_runtime("cuda", HOST)
    a = run(shadow, 1, 40)
    b = shadow.fork(a)
    runtime.device.synchronize()
    with torch.cuda.stream(runtime.stream):
        torch.cuda._sleep(100_000_000)
    shadow.step([b])
    runtime.suspend(a)
    assert a.state == RowState.SUSPENDING
    runtime.poll()
    assert a.state == RowState.SUSPENDING, "the copy waits for what was submitted before"
    settle(runtime, a)
    runtime.evict()
    runtime.resume(a)
    runtime.wait_ready(a)
    shadow.step([a, b])
    shadow.check()


@pytest.mark.gpu
def test_a_restore_that_takes_long_stalls_no_step() -> None:
    runtime, shadow = tier_runtime("cuda", HOST)
    a, b = run(shadow, 1, 40), run(shadow, 2, 20)
    runtime.suspend(a)
    settle(runtime, a)
    runtime.device.synchronize()
    onload = runtime.tiers.mover._lanes[1, 0]
    with torch.cuda.stream(onload._stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
    runtime.resume(a)
    for _ in range(20):
        runtime.results(shadow.step([b]))
    assert a.state == RowState.LOADING
    runtime.wait_ready(a)
    shadow.step([a, b])
    shadow.check()


def test_case_H5_an_aborted_load_keeps_its_blocks_until_its_transfer_ended(device: torch.device) -> None:
    runtime, shadow = tier_runtime(device, HOST, num_blocks=9)
    cool(runtime, shadow, run(shadow, 1, 60))
    shadow.mover.late = True
    a = shadow.open(prompt(1, 70))
    targets = {job.target for jobs in shadow.mover.held.values() for job in jobs}
    assert len(targets) == 3
    shadow.close(a)
    b = run(shadow, 2, 70, steps=1)
    assert not targets & set(runtime.manager.block_table[b.row].tolist())
    with pytest.raises(OutOfBlocks):
        shadow.prefill([shadow.open(prompt(3, 20))])
    shadow.mover.release_all()
    c = next(sequence for sequence in shadow.sequences if sequence is not b)
    shadow.prefill([c])  # looks, and finds room
    assert targets & set(runtime.manager.block_table[c.row].tolist())
    shadow.step([b, c])
    shadow.check()


# the disk -------------------------------------------------------------------------------------------------------------


def spoil_nothing(file: Path) -> None:
    pass


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("spoil", [spoil_nothing, tear, corrupt, Path.unlink])
def test_a_bad_file_is_a_miss_and_never_data(
    device: torch.device, spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    runtime, shadow = tier_runtime(device, on_disk(tmp_path))
    cool(runtime, shadow, run(shadow, 1, 60), tier=2)
    files = sorted(tmp_path.glob("*/*.block"))
    assert len(files) == 3
    spoil(files[1])
    a = shadow.open(prompt(1, 70))
    runtime.wait_ready(a)
    assert a.cached_tokens + a.counts.recomputed == 48
    assert (a.cached_tokens == 48) == (spoil is spoil_nothing)
    shadow.prefill([a])
    for _ in range(5):
        shadow.step([a])
    shadow.check()


class FullDisk(FileOps):
    def write(self, path: str, parts: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")


class StuckDisk(FileOps):
    """Reads do not end until they may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def read(self, path: str, parts: Any) -> int:
        self.may.wait()
        return super().read(path, parts)


def test_a_full_disk_loses_what_has_no_other_place_and_nothing_else(device: torch.device, tmp_path: Path) -> None:
    runtime, shadow = tier_runtime(device, on_disk(tmp_path, host_blocks=4))
    runtime.tiers.disk._files = FullDisk()
    a = run(shadow, 1, 30)
    runtime.suspend(a)
    settle(runtime, a)
    for i in range(6):
        shadow.close(run(shadow, 10 + i, 40))
        runtime.drain()
    assert runtime.tiers.disk.failed_stores > 0
    runtime.resume(a)
    runtime.wait_ready(a)
    for _ in range(5):
        shadow.step([a])
    shadow.check()


def test_a_disk_that_hangs_is_reported_and_costs_its_blocks_only(device: torch.device, tmp_path: Path) -> None:
    runtime, shadow = tier_runtime(device, on_disk(tmp_path, transfer_limit_s=0.05))
    stuck = runtime.tiers.disk._files = StuckDisk()
    cool(runtime, shadow, run(shadow, 1, 60), tier=2)
    a = shadow.open(prompt(1, 70))
    with pytest.raises(NotReady, match="is loading"):
        runtime.wait_ready(a)
    (error,) = runtime.overdue()
    assert error.seconds >= 0.05
    with pytest.raises(TransferTimeout, match="3 blocks"):
        runtime.drain()
    b = run(shadow, 2, 60)
    shadow.close(a)
    shadow.step([b])
    with pytest.raises(TransferTimeout), runtime:
        pass
    with pytest.raises(KeyError) as caught, runtime:
        raise KeyError("the caller's own")
    assert "has not ended after" in caught.value.__notes__[0]
    stuck.may.set()
    runtime.drain(10)
    assert runtime.overdue() == []
    shadow.check()


# whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("latent", "index_k"), [("fp8", "fp8"), ("fp8_ds_mla", "fp4"), ("bf16", "bf16")])
@pytest.mark.parametrize("next_n", [1, 3])
def test_tokens_and_bytes_are_those_of_a_runtime_where_nothing_moves(
    device: torch.device, latent: str, index_k: str, next_n: int, tmp_path: Path
) -> None:
    """Between the steps of a workload every sequence is sent away and brought back, and cached blocks to the disk."""
    config = mix_config(latent, index_k, draft=True)
    sizes = {"max_rows": 4, "max_seq_len": 144, "num_blocks": 40, "next_n": next_n, "prefill_chunk": 48}
    plain = DecodeRuntime(config, MixModel(config, device), device=device, **sizes)
    options = TierOptions(host_blocks=24, disk_folder=tmp_path, disk_bytes=1 << 24)
    restless = DecodeRuntime(config, MixModel(config, device), device=device, tiers=options, **sizes)
    step, moves = restless.step, 0

    def step_after_moves(batch: list[Sequence]) -> int:
        nonlocal moves
        for sequence in batch:
            restless.suspend(sequence)
        restless.drain()
        restless.evict()
        for sequence in reversed(batch):
            restless.resume(sequence)
        restless.wait_ready(batch)
        moves += 1
        return step(batch)

    restless.step = step_after_moves
    expected, found = run_workload(plain), run_workload(restless)
    assert found[1] == expected[1]
    assert moves > 20
    plain.retire()
    restless.retire()
    want, got = gathered(plain, expected[0]), gathered(restless, found[0])
    for key in want:
        np.testing.assert_array_equal(got[key], want[key], err_msg=str(key))
    restless.check()


def test_leaving_drains_and_gives_back(device: torch.device, tmp_path: Path) -> None:
    runtime, shadow = tier_runtime(device, on_disk(tmp_path))
    with runtime:
        a = run(shadow, 1, 40)
        runtime.suspend(a)
        shadow.close(run(shadow, 2, 40))
    assert list(tmp_path.iterdir()) == []
    assert a.state == RowState.SUSPENDED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give host_bytes or host_blocks, not both or none; got None and None"),
        ({"host_bytes": 1, "host_blocks": 1}, "not both or none; got 1 and 1"),
        ({"host_blocks": 0}, "holds no block"),
        ({"host_bytes": 100}, "a host tier of 100 bytes holds no block"),
        ({"host_blocks": 2, "disk_bytes": 100}, "disk_folder and disk_bytes go together"),
        ({"host_blocks": 2, "disk_bytes": 100, "disk_folder": "x"}, "a disk tier of 100 bytes holds no block"),
        ({"host_blocks": 2, "resume_limit": 0.0}, "resume_limit must be a share"),
        ({"host_blocks": 2, "transfer_limit_s": 0.0}, "transfer_limit_s must be positive"),
    ],
)
def test_tiers_that_cannot_work_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidValue, match=message):
        tier_runtime("cpu", TierOptions(**options))


def test_the_host_tier_has_the_size_asked_for(device: torch.device) -> None:
    one = tier_runtime(device, TierOptions(host_blocks=1))[0].tiers.host.unit.num_bytes
    asked = 1000 * one + one // 2
    runtime, _ = tier_runtime(device, TierOptions(host_bytes=asked))
    host = runtime.tiers.host
    assert host.num_slots == 1000
    assert abs(host.num_bytes - asked) < asked // 100
    assert host.num_bytes <= runtime.stats().pinned_bytes
