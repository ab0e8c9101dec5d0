"""Each pair that the table calls working is put to work: a line that nothing exercises is no promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from mix import MixModel, gathered, mix_config, run_workload
from peer_fakes import DeepGemm, FlashInfer
from peer_world import peer_config, peer_runtime, pretend
from tier_shadow import CANARY, TierShadow, tier_runtime
from window_world import Shadow, config_of

from graphkv import ops
from graphkv.baseline.runner import V1Runner
from graphkv.device import Device
from graphkv.layout import IndexKFormat, Role, Side
from graphkv.manager.windowed import WindowedManager
from graphkv.pool import Pools
from graphkv.runtime import DecodeRuntime
from graphkv.selection.create import COMBINATIONS, Combination, create_cache_manager
from graphkv.selection.requirements import Setting
from graphkv.selection.subpages import split_page_table, split_pages
from graphkv.sequence import Sequence
from graphkv.tiers.hierarchy import TierOptions

Exercise = Callable[[Setting, torch.device], None]
WORKS = [line for line in COMBINATIONS if line.works]
V1, V2 = "use_kv_cache_manager_v2=False", "use_kv_cache_manager_v2=True"
DRAFTS = "drafts (next_n above 1 or draft_layers)"


def name_of(line: Combination) -> str:
    return f"{line.first} + {line.second}".replace("`", "")


def asked_of(setting: Setting, device: torch.device, **options: object) -> tuple[DecodeRuntime, TierShadow]:
    """A small runtime that is required to do what the setting asks for."""
    return tier_runtime(device, requirements=setting.requirements, **options)


def opened(shadow: TierShadow, tokens: list[int], steps: int = 2) -> Sequence:
    sequence = shadow.open(tokens)
    shadow.runtime.wait_ready(sequence)
    shadow.prefill([sequence])
    for _ in range(steps):
        shadow.step([sequence])
    shadow.runtime.retire()
    return sequence


def graph(setting: Setting, device: torch.device) -> None:
    runtime, shadow = asked_of(setting, device)
    before = runtime.stats().graph_launches
    opened(shadow, list(range(20)), steps=5)
    shadow.check()
    assert runtime.stats().graph_launches == before + 5


def prefix_hit(setting: Setting, device: torch.device) -> None:
    runtime, shadow = asked_of(setting, device)
    first = opened(shadow, list(range(40)))
    second = opened(shadow, [*range(32), 7, 8, 9])
    assert second.cached_tokens == 32
    table = runtime.manager.block_table
    assert table[second.row, :2].tolist() == table[first.row, :2].tolist()
    shadow.check()


def partial_hit(setting: Setting, device: torch.device) -> None:
    _, shadow = asked_of(setting, device)
    opened(shadow, list(range(40)))
    assert opened(shadow, [*range(25), 7, 8, 9]).cached_tokens == 25
    shadow.check()


def fork(setting: Setting, device: torch.device) -> None:
    _, shadow = asked_of(setting, device)
    parent = opened(shadow, list(range(40)))
    child = shadow.fork(parent)
    for _ in range(10):
        shadow.step([parent, child])
    shadow.check()


def offload(setting: Setting, device: torch.device) -> None:
    runtime, shadow = asked_of(setting, device, tiers=TierOptions(host_blocks=8))
    first = opened(shadow, list(range(40)))
    runtime.suspend(first)
    runtime.drain()
    assert first.state == "suspended"
    runtime.evict()
    second = opened(shadow, [*range(32), 7, 8, 9])
    assert second.counts.cached == (0, 32)
    runtime.resume(first)
    runtime.wait_ready(first)
    shadow.step([first, second])
    shadow.check()


def growth(setting: Setting, device: torch.device) -> None:
    runtime, shadow = asked_of(setting, device, num_blocks=4, max_num_blocks=64)
    first = opened(shadow, list(range(40)))
    before = runtime.stats().graph_launches
    runtime.grow(64)
    for pool, image in zip(runtime.pools, shadow.images, strict=True):
        pool.blocks[4:].fill_(CANARY)
        image[4:] = CANARY
    for _ in range(20):
        shadow.step([first])
    shadow.check()
    runtime.shrink(5)
    shadow.step([first])
    shadow.check()
    assert runtime.stats().graph_launches == before + 21


def copied_whole(setting: Setting, device: torch.device) -> None:
    """A model that writes index K in pages of half a block, with parts of blocks shared and copied for forks."""
    config = mix_config("bf16", "fp8")
    sizes = {"max_rows": 4, "max_seq_len": 144, "num_blocks": 40, "prefill_chunk": 48}
    found = []
    for page_size, needs in ((16, None), (8, replace(setting.requirements, index_page_size=8))):
        model = MixModel(config, device, index_page_size=page_size)
        runtime = DecodeRuntime(config, model, device=device, requirements=needs, **sizes)
        sequences, tokens = run_workload(runtime)
        assert runtime.manager.stats().tokens_matched == 43, "two blocks and a part of the third"
        child = runtime.fork(sequences[0])
        tokens += [runtime.results(runtime.step([child])).tokens.tolist() for _ in range(8)]
        found.append((tokens, gathered(runtime, [*sequences, child], page_size)))
    assert found[0][0] == found[1][0]
    for key, want in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][key], want, err_msg=str(key))


def drafts(kind: type[V1Runner] | type[DecodeRuntime]) -> Exercise:
    def exercise(setting: Setting, device: torch.device) -> None:
        assert setting.use_v2 == (kind is DecodeRuntime)
        config = mix_config("bf16", "fp8", draft=True)
        sizes = {"max_rows": 4, "max_seq_len": 144, "num_blocks": 40, "next_n": setting.next_n, "prefill_chunk": 48}
        runner = kind(config, MixModel(config, device), device=device, **sizes)
        _, results = run_workload(runner)
        accepted = {sum(token >= 0 for token in row) for step in results for row in step}
        assert accepted >= {1, 2, 3}, "all numbers of accepted tokens"
        runner.check()

    return exercise


def software_fp4(setting: Setting, device: torch.device) -> None:
    assert setting.config.index_k is IndexKFormat.FP4
    heads, width, size = setting.config.index_heads, setting.config.index_head_dim, setting.config.block_size
    pages = Pools(setting.config, 3, Device.of(device)).view(Side.TARGET, Role.INDEX_K, 0)
    k = torch.ones(10, width, device=device) * torch.arange(1, 11, device=device)[:, None]
    ops.store_index_k(k, pages, torch.arange(2 * size, 2 * size + 10, device=device), "fp4")
    q, weights = torch.ones(1, heads, width, device=device), torch.ones(1, heads, device=device)
    table, row, context = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2]], [0], [10]))
    scores = torch.full((1, 10), torch.nan, device=device)
    ops.paged_index_logits(q, weights, pages, table, row, context, scores, "fp4")
    values = torch.tensor([1, 2, 3, 4, 4, 6, 8, 8, 8, 8], dtype=torch.float32)  # of e2m1 by scale, ties downward
    assert scores[0, :4].cpu().tolist() == (values[:4] * heads * width).tolist()
    assert bool(scores.isfinite().all())


def connector(setting: Setting, device: torch.device) -> None:
    config, heard = mix_config("bf16", "fp8", draft=True), []
    options = {"next_n": setting.next_n, "requirements": setting.requirements, "num_blocks": 40, "max_rows": 4}
    runtime = DecodeRuntime(config, MixModel(config, device), device=device, max_seq_len=144, **options)
    runtime.manager.on_rewind.append(lambda row, length, ids: heard.append((row, length, ids.tolist())))
    sequence = runtime.open(list(range(33)))
    runtime.prefill([sequence])
    runtime.retire()
    ids = runtime.manager.block_table[sequence.row, :3].tolist()
    runtime.rewind(sequence, 3)
    assert heard == [(sequence.row, 30, ids[2:])]
    runtime.check()


def split_index_k(setting: Setting, device: torch.device) -> None:
    """The view is what DeepGEMM documents: u8 [blocks, page, 1, bytes], inner strides those of one page, aligned."""
    size = setting.page_size(Role.INDEX_K)
    pools = Pools(setting.config, 5, Device.of(device))
    layout = setting.config.page_layout(Role.INDEX_K)
    for layer in range(2):
        whole = pools.view(Side.TARGET, Role.INDEX_K, layer)
        pages = split_pages(whole, size)
        assert list(pages.shape) == [2 * len(whole), size, 1, layout.token_bytes]
        assert pages.stride()[1:] == (layout.token_bytes, layout.token_bytes, 1)
        assert pages.stride(0) == size * layout.token_bytes
        assert pages.stride(0) % 4 == pages.data_ptr() % 16 == 0
    table = torch.tensor([[6, 2, 0, 0]], dtype=torch.int32, device=device)
    assert split_page_table(table, setting.config.block_size, size).tolist() == [[12, 13, 4, 5, 0, 1, 0, 1]]


def split_latents(setting: Setting, device: torch.device) -> None:
    """The view is what FlashMLA documents: [blocks, page, 1, 656], contiguous, base aligned."""
    whole = Pools(setting.config, 5, Device.of(device)).view(Side.TARGET, Role.LATENT, 1)
    pages = split_pages(whole, 16)
    assert list(pages.shape) == [4 * len(whole), 16, 1, 656]
    assert pages.is_contiguous()
    assert pages.data_ptr() == whole.data_ptr()
    assert pages.data_ptr() % 16 == 0


def windowed(setting: Setting, device: torch.device) -> Shadow:
    """A runtime of the example's windows, in the middle of things."""
    windows = [replace(spec, window=spec.window and spec.window // 4) for spec in setting.config.layers]
    draft = [replace(spec, window=spec.window and spec.window // 4) for spec in setting.config.draft_layers]
    shadow = Shadow(device, config_of(tuple(windows), tuple(draft)), next_n=setting.next_n)
    sequences = [shadow.open(1, 130), shadow.open(2, 20)]
    shadow.prefill(sequences)
    for _ in range(20):
        shadow.step(sequences)
    shadow.check_reads(sequences)
    shadow.check()
    return shadow


def windows_in_a_graph(setting: Setting, device: torch.device) -> None:
    launches = windowed(setting, device).runtime.stats().graph_launches
    assert launches >= 20


def windows_with_drafts(setting: Setting, device: torch.device) -> None:
    shadow = windowed(setting, device)
    assert shadow.next_n == 3
    assert Side.DRAFT in shadow.config.sides


def windows_with_prefixes(setting: Setting, device: torch.device) -> None:
    tokens = np.arange(450)
    manager = create_cache_manager(
        setting.config, num_blocks=20, max_rows=4, max_seq_len=500, requirements=setting.requirements, device="cpu"
    )
    assert isinstance(manager, WindowedManager)
    first = manager.open(tokens=tokens)
    manager.claim([first], tokens.size)
    manager.commit([first], tokens.size)
    manager.index_commits()
    manager.take_edits(np.zeros((100, 3), np.int32))
    assert np.flatnonzero(manager.windows[0].ids[first]).tolist() == [0, 5, 6, 7]
    second = manager.open(tokens=np.append(tokens[:440], [-7] * 3))
    assert manager.cached_tokens[second] == 440
    manager.take_edits(np.zeros((100, 3), np.int32))
    third = manager.fork(first)
    assert [copy.tokens for copy in manager.take_copies()] == [56, 2, 56, 2], "of group 0, then of the window"
    assert manager.windows[0].ids[third, 5] == manager.windows[0].ids[first, 5]
    manager.check()


def windows_with_growth(setting: Setting, device: torch.device) -> None:
    pools = Pools(setting.config, 4, Device.of(device), max_blocks_reserved=64, window_blocks=[9])
    view, window = (pools.view(Side.TARGET, Role.LATENT, layer) for layer in range(2))
    window.fill_(7)
    view[3].fill_(7)
    pools.resize(60, lambda first: 0)
    view[59].fill_(9)
    assert bool((window == 7).all())
    assert bool((view[3] == 7).all())
    assert [pool.num_blocks for pool in pools] == [60, 60, 9]


def peer_step(setting: Setting, device: torch.device) -> None:
    """Steps of a model that reads by the library's stand-in and by our own kernels, which must agree."""
    asked = setting.requirements
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, setting.device)
        fakes = [kind(device).install(patch) for kind in (DeepGemm, FlashInfer)]
        needs = {"index_scorer": asked.index_scorer, "token_selector": asked.token_selector}
        runtime, model = peer_runtime(device, peer_config(), next_n=setting.next_n, **needs)
        batch = [runtime.open(np.arange(n)) for n in (62, 130, 3)]
        runtime.prefill(batch)
        for _ in range(2):
            runtime.step(batch)
        runtime.retire()
    assert any(fake.calls for fake in fakes)
    assert not any(fake.violations.item() for fake in fakes)
    for at, length in enumerate(model.context_len[: 3 * setting.next_n].tolist()):
        got, own = (model.scores[name, 1][at, :length].cpu() for name in ("peer", "own"))
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-3)
        chosen = [model.positions[name, 1][at].sort().values.tolist() for name in ("peer", "own")]
        assert chosen[0] == chosen[1]


EXERCISES: dict[str, Exercise] = {
    f"{V2} + graph=True": graph,
    f"{V2} + prefix_hit=True": prefix_hit,
    f"{V2} + partial_hit=True": partial_hit,
    f"{V2} + fork=True": fork,
    f"{V2} + offload=True": offload,
    f"{V2} + growth=True": growth,
    f"{V1} + {DRAFTS}": drafts(V1Runner),
    f"{V2} + {DRAFTS}": drafts(DecodeRuntime),
    "a layer with a window + graph=True": windows_in_a_graph,
    "a layer with a window + prefix_hit=True, partial_hit=True or fork=True": windows_with_prefixes,
    f"a layer with a window + {DRAFTS}": windows_with_drafts,
    "a layer with a window + growth=True": windows_with_growth,
    'index_k="fp4" + index_scorer="graphkv", any device': software_fp4,
    f"connector of both roles and sides + {DRAFTS}": connector,
    "index_page_size below block_size, quantised index_k + partial_hit=True or fork=True": copied_whole,
    'index_scorer="deepgemm" on Hopper + block_size=128, index_page_size=64': split_index_k,
    'index_scorer="deepgemm" on Blackwell + index_k="fp4", index_page_size=32': split_index_k,
    'index_scorer="deepgemm" on Hopper + next_n above 2': peer_step,
    'token_selector="flashinfer" on Ampere, Hopper and Blackwell + any latent': peer_step,
    'latent_attention="flashmla" on Hopper + latent="fp8_ds_mla", latent_page_size=16': split_latents,
}


@pytest.mark.parametrize("line", WORKS, ids=name_of)
def test_a_pair_that_works_does(line: Combination, device: torch.device) -> None:
    EXERCISES[name_of(line)](line.example, device)


def test_each_exercise_has_its_line() -> None:
    assert EXERCISES.keys() == {name_of(line) for line in WORKS}
