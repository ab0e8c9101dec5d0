"""The runtime with layer groups: every byte of every pool, every read of every query, in graphs and on both devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from probe import ProbeModel
from test_cases_runtime import allocations, stall
from window_world import FULL, W20, W32, Shadow, config_of

from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfBlocks, StaleFrame, UnsupportedCombination
from graphkv.manager.windowed import WindowedManager
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch
from graphkv.step import StepContext, StepOutput
from graphkv.tiers.hierarchy import TierOptions
from graphkv.tiers.mover import TierMover


@pytest.mark.parametrize("upload", ["copy", "pull"])
def test_case_E4_drafts_are_rejected_and_the_window_is_still_there(device: torch.device, upload: str) -> None:
    """Window 32, blocks of 16, next_n 4, a drafter with a window: every query reads its own window, step after step.

    Prompts end around 61; steps accept 1 .. 4 of their tokens and overlap, the stream is stalled, blocks are reused.
    """
    shadow = Shadow(device, config_of(), upload=upload, window_blocks=[20, 24], self_check=True)
    sequences = [shadow.open(i + 1, n) for i, n in enumerate((61, 45, 60, 62))]
    shadow.prefill(sequences)
    for i in range(40):
        batch = sequences[i % 3 :]
        if i % 20 == 0:
            stall(shadow.runtime)
        shadow.step(batch)
        if i % 4 == 3:
            shadow.check_reads(batch)
    shadow.check()
    windows = shadow.runtime.manager.stats().windows
    assert [counts.held <= 4 * 6 for counts in windows] == [True, True]
    assert all(counts.peak_held < counts.total for counts in windows)


def test_case_E4_position_61_sees_30_to_61_after_a_rewind_from_65(device: torch.device) -> None:
    shadow = Shadow(device, config_of(draft=()), prefix_caching=False)
    a = shadow.open(1, 61)
    shadow.prefill([a])
    shadow.runtime.retire()
    manager = shadow.runtime.manager
    assert isinstance(manager, WindowedManager)
    manager.index_commits()
    assert np.flatnonzero(manager.windows[0].ids[a.row]).tolist() == [1, 2, 3]
    length = shadow.length[a.row]
    while shadow.length[a.row] == length:
        shadow.step([a])
    assert manager.length[a.row] == 65
    assert manager.windows[0].ids[a.row, 1] > 0
    shadow.check_reads([a])
    shadow.check()


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_long_sequences_hold_no_more_than_their_windows(device: torch.device, mode: str) -> None:
    """Prompts of many chunks through pools that hold a few blocks a row; then prefixes, forks and rewinds of them."""
    shadow = Shadow(device, config_of(), mode=mode, window_blocks=[24, 26], next_n=1, rewind_room=8)
    a, b = shadow.open(1, 200), shadow.open(2, 150)
    shadow.prefill([a, b])
    for _ in range(25):
        shadow.step([a, b])
    shadow.check_reads([a, b])
    shadow.check()
    c = shadow.fork(a)
    shadow.step([c, a])
    shadow.rewind(b, 8)
    with pytest.raises(InvalidValue, match="is the least"):
        shadow.runtime.rewind(b, 30)
    shadow.step([c, b, a])
    shadow.check_reads([c, b, a])
    shadow.check()
    shadow.runtime.close(b)
    d = shadow.open(2, 150)  # begins with what b left
    assert d.cached_tokens >= 16
    shadow.prefill([d])
    shadow.step([d, a])
    shadow.check_reads([d, a])
    shadow.check()
    for sequence in (a, c, d):
        shadow.runtime.close(sequence)
    shadow.runtime.retire()
    assert [counts.held for counts in shadow.runtime.manager.stats().windows] == [0, 0]
    null = [pool.block(0) for pool in shadow.runtime.pools]
    assert all((block == 0xA5).all() for block in null)


def test_a_group_that_is_short_waits_for_the_steps_in_flight(device: torch.device) -> None:
    """A window's pool below what its load needs: a prompt of many chunks ends all the same, as blocks come back."""
    shadow = Shadow(device, config_of((FULL, W32), ()), window_blocks=[8], max_rows=1, next_n=1)
    a = shadow.open(1, 280)
    shadow.prefill([a])
    for _ in range(15):
        shadow.step([a])
    shadow.check_reads([a])
    shadow.check()
    shadow.runtime.close(a)
    small = Shadow(device, config_of((FULL, W32), ()), window_blocks=[6], max_rows=1, next_n=1)
    b = small.open(1, 280)
    with pytest.raises(OutOfBlocks, match="more blocks needed in layer group 1"):
        small.prefill([b])
    assert small.runtime.manager.length[b.row] == 0, "nothing was fed"


def test_a_model_of_windows_alone(device: torch.device) -> None:
    """No layer reads everything: group 0 has no bytes, and the latch fills the first window's live set."""
    shadow = Shadow(device, config_of((W32, W20), (W20,)))
    assert [pool.page_scale for pool in shadow.runtime.pools] == [1, 1, 1]
    a, b = shadow.open(1, 100), shadow.open(2, 7)
    shadow.prefill([a, b])
    for _ in range(12):
        shadow.step([b, a])
        shadow.check_reads([b, a])
    shadow.check()


def test_padded_rows_and_stale_columns_are_null_pages(device: torch.device) -> None:
    shadow = Shadow(device, config_of())
    a = shadow.open(1, 130)
    shadow.prefill([a])
    shadow.runtime.retire()
    b, c = shadow.open(2, 10), shadow.open(3, 20)
    shadow.prefill([b, c])
    shadow.step([c, a, b])
    shadow.runtime.retire()
    shadow.runtime.device.synchronize()
    full = shadow.runtime.metadata(4)
    for group, scale in ((1, 2), (2, 1)):
        live = shadow.runtime.metadata(4, group=group)
        line = shadow.runtime.manager.windows[group - 1].ids[a.row]  # type: ignore[attr-defined]
        table = live.latent_page_table.cpu().numpy()
        np.testing.assert_array_equal(table[1], line * scale)
        assert not table[3].any()
        assert live.latent_slot.tolist()[12:] == [-1] * 4
        assert live.index_slot.tolist() == [-1] * 16
        assert not live.index_page_table.any()
        for name in ("position", "token_row", "query_start", "batch_row", "seq_len", "context_len"):
            assert torch.equal(getattr(live, name), getattr(full, name)), name
    assert not shadow.runtime.metadata(4, group=2).latent_page_table[1, 1:6].any()


def test_case_B2_steady_steps_with_windows_allocate_nothing(device: torch.device) -> None:
    shadow = Shadow(device, config_of(), max_seq_len=900, num_blocks=300)
    batch = Batch([shadow.open(i + 1, 5 + i) for i in range(4)])
    shadow.prefill(list(batch))
    for _ in range(4):
        shadow.step(batch)
    shadow.runtime.retire()
    before = allocations(shadow.runtime)
    for _ in range(60):
        shadow.step(batch)
    shadow.runtime.retire()
    assert allocations(shadow.runtime) == before
    shadow.runtime.check()


def test_resync_brings_every_groups_table(device: torch.device) -> None:
    shadow = Shadow(device, config_of())
    a, b = shadow.open(1, 100), shadow.open(2, 30)
    shadow.prefill([a, b])
    shadow.step([a, b])
    shadow.check()
    runtime = shadow.runtime
    runtime._engine._state.block_table.fill_(7)
    runtime._engine._state.step.fill_(99)
    runtime.device.synchronize()
    runtime.step([a, b])
    with pytest.raises(StaleFrame):
        runtime.retire()
    runtime.resync()
    np.testing.assert_array_equal(runtime._engine._state.block_table.cpu().numpy(), runtime.manager.table.ids)


def test_a_model_without_windows_has_no_more_nodes_than_before(device: torch.device) -> None:
    seen: list[int] = []

    def model(step: StepContext) -> StepOutput:
        seen.append(step.metadata_for(0) is step.metadata)
        return StepOutput(step.metadata.token_ids.view(step.rows, step.next_n))

    nodes = {}
    for layers in ((FULL,), (FULL, W32), (FULL, W32, W20)):
        config = config_of(layers, ())
        runtime = DecodeRuntime(config, model, device=device, max_rows=2, max_seq_len=60, num_blocks=10)
        nodes[len(layers)] = runtime.graph_nodes[2]
        assert isinstance(runtime.manager, WindowedManager) == (len(layers) > 1)
    assert all(seen)
    added = 1 if device.type == "cuda" else 0
    assert nodes[2] - nodes[1] == nodes[3] - nodes[2] == added


def test_memory_is_split_and_stays_in_the_budget(device: torch.device) -> None:
    for budget in (400_000, 1_000_000, 3_000_000):
        runtime = DecodeRuntime(
            config_of(), ProbeModel(config_of(), 64, device), device=device, max_rows=2, max_seq_len=100,
            memory_bytes=budget, next_n=2, prefill_chunk=32,
        )  # fmt: skip
        assert 0.8 * budget < runtime.pools.num_bytes <= budget


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window_blocks": [9]}, "one number of blocks for each of 2 groups"),
        (
            {"num_blocks": None, "memory_bytes": 1 << 20, "window_blocks": [9, 9]},
            "give window_blocks .* with num_blocks",
        ),
        ({"num_blocks": None}, "give num_blocks or memory_bytes"),
        ({"num_blocks": None, "memory_bytes": 9000}, "memory_bytes 9000 does not hold the groups"),
        ({"rewind_room": -1}, "rewind_room must be"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        Shadow("cpu", config_of(), **options)


def test_window_blocks_without_windows_are_refused() -> None:
    with pytest.raises(InvalidValue, match="for layers with a window, and there is none"):
        Shadow("cpu", config_of((FULL,), ()), window_blocks=[5])


def echo(step: StepContext) -> StepOutput:
    return StepOutput(step.metadata.token_ids[step.metadata.query_start[1:].long() - 1].view(step.rows, 1))


def test_colder_tiers_are_refused_before_anything_is_built() -> None:
    device = Device.of("cpu")
    options: Any = {"max_rows": 2, "max_seq_len": 60, "num_blocks": 10, "tiers": TierOptions(host_blocks=4)}
    with pytest.raises(UnsupportedCombination, match=r"a layer with a `window` and `offload=True` cannot go together"):
        DecodeRuntime(config_of(draft=()), echo, device=device, **options)
    assert device.ledger.allocations == 0


def test_what_grows_is_the_group_without_a_window(device: torch.device) -> None:
    options: Any = {"max_rows": 2, "max_seq_len": 200, "num_blocks": 5, "max_num_blocks": 30, "window_blocks": [12, 14]}
    runtime = DecodeRuntime(config_of(draft=()), echo, device=device, self_check=True, **options)
    a = runtime.open(np.arange(150))
    with pytest.raises(OutOfBlocks, match=r"^10 more blocks needed, 4 free"):
        runtime.prefill([a])
    runtime.grow(12)
    runtime.prefill([a])
    for _ in range(12):
        runtime.step([a])
    runtime.retire()
    assert [pool.num_blocks for pool in runtime.pools] == [12, 12, 12, 14]
    runtime.close(a)
    runtime.shrink(5)
    runtime.check()


def test_a_mover_of_pools_with_windows_is_refused() -> None:
    shadow = Shadow("cpu", config_of())
    with pytest.raises(UnsupportedCombination, match=r"layers with a window .* and a TierMover cannot go together"):
        TierMover(shadow.runtime.pools, shadow.runtime.device)
