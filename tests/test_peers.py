"""DeepGEMM, FlashMLA and FlashInfer on graphkv's pools and metadata: their contracts held, their results graphkv's own.

With stand-ins of `peer_fakes`, which refuse what the libraries refuse, on both devices; with the libraries themselves
where they are installed on a GPU machine.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from peer_fakes import DeepGemm, Fake, FlashInfer, FlashMla
from peer_world import BLACKWELL, HOPPER, LAYERS, PeerModel, peer_config, peer_runtime, pretend
from test_cases_runtime import allocations

from graphkv.errors import InvalidValue, LibraryMissing, UnsupportedCombination
from graphkv.integrations.peers.deepgemm import library
from graphkv.integrations.peers.flashinfer import FlashInferSelector
from graphkv.integrations.peers.flashmla import AttentionPlan, FlashMlaAttention
from graphkv.layout import IndexKFormat, Role, Side
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Sequence

DEEPGEMM = {"index_scorer": "deepgemm"}
FLASHMLA = {"latent_attention": "flashmla"}
FLASHINFER = {"token_selector": "flashinfer"}
MODULES = {"deep_gemm": DeepGemm, "flash_mla": FlashMla, "flashinfer": FlashInfer}


@pytest.fixture(params=["stand-in", pytest.param("installed", marks=pytest.mark.gpu)])
def peer(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """peer(name): the library's stand-in, or None where the library itself is to be used."""

    def use(name: str) -> Fake | None:
        if request.param == "stand-in":
            pretend(monkeypatch, HOPPER)
            return MODULES[name](device).install(monkeypatch)
        if device.type != "cuda" or importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed on a CUDA machine")
        return None

    return use


def started(runtime: DecodeRuntime, *lengths: int) -> list[Sequence]:
    sequences = [runtime.open(np.arange(n) * 7 + 31 * i) for i, n in enumerate(lengths)]
    runtime.prefill(sequences)
    return sequences


def compare_scores(model: PeerModel, tokens: int) -> None:
    lengths = model.context_len[:tokens].tolist()
    assert any(lengths)
    for layer in range(LAYERS):
        for at, length in enumerate(lengths):
            got, own = (model.scores[name, layer][at, :length].cpu().double() for name in ("peer", "own"))
            assert torch.isfinite(own).all()
            if length:
                assert 1 - 2 * (got @ own) / (got @ got + own @ own) < 1e-6
                np.testing.assert_allclose(got.numpy(), own.numpy(), rtol=1e-4, atol=1e-3)


# --- DeepGEMM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 6])
def test_case_G4_any_number_of_draft_tokens_on_a_kernel_that_takes_two(
    device: torch.device, peer: Any, next_n: int
) -> None:
    """Lengths that cross a block's edge inside the group; padded rows; results equal a loop of next_n = 1."""
    fake = peer("deep_gemm")
    runtime, model = peer_runtime(device, peer_config(), next_n=next_n, **DEEPGEMM)
    batch = started(runtime, 62, 130, 3)  # 62 + 6 passes 64
    for _ in range(3):
        runtime.step(batch)
        runtime.retire()
        compare_scores(model, 4 * next_n)  # 3 rows and a padded one
    lengths = model.context_len[: 4 * next_n].view(4, next_n).tolist()
    for row, sequence in enumerate(batch):  # row j of length L: L - next_n + 1 + j
        assert lengths[row] == [sequence.length - next_n + 1 + j for j in range(next_n)]
    assert lengths[3] == [0] * next_n
    again, one = peer_runtime(device, peer_config())  # fed the same tokens, one a step
    sequences = started(again, 62, 130, 3)
    for step in range(3 * next_n):
        again.step(sequences)
        again.retire()
        j = step - 2 * next_n
        for row in range(3 if j >= 0 else 0):
            for layer in range(LAYERS):
                got, own = model.scores["peer", layer][row * next_n + j], one.scores["own", layer][row]
                length = lengths[row][j]
                np.testing.assert_allclose(got[:length].cpu(), own[:length].cpu(), rtol=1e-4, atol=1e-3)
    assert [s.tokens.tolist() for s in sequences] == [s.tokens.tolist() for s in batch]
    if fake is not None:
        check_calls(fake, runtime, next_n)


def check_calls(fake: DeepGemm, runtime: DecodeRuntime, next_n: int) -> None:
    """What DeepGEMM was given: its native form for 1 and 2, each query token as a row otherwise; once a layer."""
    assert fake.violations.item() == 0
    rows, per_row = (4, next_n) if next_n <= 2 else (4 * next_n, 1)
    calls = [call for call in fake.named("logits") if call["context_lens"].shape[0] == rows]
    assert calls
    for call in calls:
        assert call["q"].shape == (rows, per_row, 32, 128)
        assert call["context_lens"].shape == (rows, per_row)
        table = call["block_table"]
        assert table.shape == (rows, runtime.manager.max_blocks)
        pages = call["kv_cache"]
        assert pages.stride == (64 * 132, 132, 132, 1)
    own = {runtime.pools.view(Side.TARGET, Role.INDEX_K, layer).data_ptr() for layer in range(LAYERS)}
    assert {call["kv_cache"].address for call in calls} <= own, "pages are read where they are"
    assert len(fake.named("metadata")) * LAYERS == len(fake.named("logits")), "one split a step, shared by the layers"


def test_a_split_follows_each_steps_lengths(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A4 for DeepGEMM: 250 tokens pass 256, at one batch size and between two batches of it."""
    pretend(monkeypatch, HOPPER)
    fake = DeepGemm(device).install(monkeypatch)
    runtime, model = peer_runtime(device, peer_config(), **DEEPGEMM)
    batch = started(runtime, 250, 100)
    short = started(runtime, 10, 10)
    for each in [batch] * 10 + [short, batch]:
        runtime.step(each)
        runtime.retire()
        compare_scores(model, 2)
    assert fake.violations.item() == 0


@pytest.mark.parametrize("next_n", [1, 4])
def test_fp4_keys_and_queries_on_blackwell_in_pages_of_half_a_block(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, next_n: int
) -> None:
    """The page size is apart from the block's: keys are stored, gathered and scored in pages of 32."""
    pretend(monkeypatch, BLACKWELL)
    fake = DeepGemm(device).install(monkeypatch)
    fake.sm = 100
    config = peer_config(index_k="fp4", latent="bf16")
    runtime, model = peer_runtime(device, config, next_n=next_n, index_page_size=32, **DEEPGEMM)
    batch = started(runtime, 62, 130)
    for _ in range(3):
        runtime.step(batch)
        runtime.retire()
    assert fake.violations.item() == 0
    for call in fake.named("logits"):
        assert call["kv_cache"].shape[1:] == (32, 1, 68)
        assert call["q"].shape[1] == next_n, "Blackwell takes any number of query tokens"
    length = int(model.context_len[0])
    for layer in range(LAYERS):  # our own scorer leaves the query unquantised: FP4 keeps it to a tenth
        got, own = (model.scores[name, layer][0, :length].double().cpu() for name in ("peer", "own"))
        assert 1 - 2 * (got @ own) / (got @ got + own @ own) < 0.02


# --- FlashInfer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_n", [1, 3])
def test_flashinfer_selects_the_same_tokens(device: torch.device, peer: Any, next_n: int) -> None:
    fake = peer("flashinfer")
    runtime, model = peer_runtime(device, peer_config(), next_n=next_n, **FLASHINFER)
    batch = started(runtime, 40, 130, 400)
    for _ in range(3):
        runtime.step(batch)
        runtime.retire()
        for layer in range(LAYERS):
            for at in range(4 * next_n):
                compare_selection(model, layer, at)
    if fake is not None:
        assert fake.violations.item() == 0
        # The selection itself goes where the model wants it: nothing is copied and nothing is allocated for it.
        buffers = {slots.data_ptr() for slots in model.slots.values()}
        calls = [call for call in fake.named("topk") if call["out"].shape[0] == 4 * next_n]
        assert calls
        assert {call["out"].address for call in calls} <= buffers


def compare_selection(model: PeerModel, layer: int, at: int) -> None:
    """The same pairs of slot and position, in any order; -1 behind them."""
    found = {}
    for name in ("peer", "own"):
        slot, position = (each[name, layer][at].tolist() for each in (model.slots, model.positions))
        count = sum(s >= 0 for s in slot)
        assert count == min(int(model.context_len[at]), len(slot))
        assert slot[count:] == position[count:] == [-1] * (len(slot) - count)
        found[name] = sorted(zip(position[:count], slot[:count], strict=True))
    assert found["peer"] == found["own"]


def test_ties_go_to_the_lowest_position_in_both(device: torch.device, peer: Any) -> None:
    peer("flashinfer")
    scores = torch.tensor([[1.0, 5, 1, 1, 5, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2]], device=device)
    lengths = torch.tensor([8, 6], dtype=torch.int32, device=device)
    table = torch.tensor([[3, 1]], dtype=torch.int32, device=device)
    row = torch.zeros(2, dtype=torch.int32, device=device)
    slot, position = torch.zeros(2, 2, 4, dtype=torch.int32, device=device)
    FlashInferSelector()(scores, lengths, table, row, 4, slot, position)
    assert position.sort(1).values.tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]
    assert slot.sort(1).values.tolist() == [[4, 12, 13, 14], [12, 13, 14, 15]]


# --- FlashMLA ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("next_n", [1, 3])
def test_flashmla_attends_as_ours(device: torch.device, peer: Any, heads: int, next_n: int) -> None:
    """Few heads are padded; pages of 16 of a block of 64; rows without a token give zeros."""
    fake = peer("flash_mla")
    options = {"latent_page_size": 16} if heads == 8 else {}
    runtime, model = peer_runtime(device, peer_config(), heads=heads, next_n=next_n, **FLASHMLA, **options)
    batch = started(runtime, 40, 130, 400)
    for _ in range(2):
        runtime.step(batch)
        runtime.retire()
        for layer in range(LAYERS):
            got, own = (model.attended[name, layer][: 4 * next_n].float().cpu() for name in ("peer", "own"))
            assert own[: 3 * next_n].abs().sum() > 0
            torch.testing.assert_close(got, own, atol=1e-3, rtol=2.01 / 128)  # FlashMLA's own tolerances
            assert not got[3 * next_n :].any()
    if fake is not None:
        check_attention(fake, runtime, heads, next_n, options.get("latent_page_size", 64))


def check_attention(fake: FlashMla, runtime: DecodeRuntime, heads: int, next_n: int, page_size: int) -> None:
    assert fake.violations.item() == 0
    calls = fake.named("attend")
    padded = 64 if heads <= 64 else 128
    assert {call["q"].shape for call in calls} == {(rows, next_n, padded, 576) for rows in (2, 4)}
    assert {call["indices"].shape for call in calls} == {(rows, next_n, 64) for rows in (2, 4)}
    assert {call["k_cache"].shape[1:] for call in calls} == {(page_size, 1, 656)}
    assert len({call["handle"] for call in calls}) == 2, "one schedule a bucket, for all layers and steps"
    own = {runtime.pools.view(Side.TARGET, Role.LATENT, layer).data_ptr() for layer in range(LAYERS)}
    assert {call["k_cache"].address for call in calls} == own


def test_flashmla_refuses_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    FlashMla(torch.device("cpu")).install(monkeypatch)
    attention = FlashMlaAttention()
    plan = AttentionPlan(1, 1, {}, None)  # type: ignore[arg-type]
    pages = torch.zeros(2, 64, 1, 656, dtype=torch.uint8)
    for heads, k in ((129, 64), (64, 100)):
        query, slot = torch.zeros(1, heads, 576), torch.zeros(1, k, dtype=torch.int32)
        with pytest.raises(UnsupportedCombination, match=f"there are {heads} and {k}; use latent_attention="):
            attention(plan, query, pages, slot, 1.0, 512)


@pytest.mark.gpu
def test_a_schedule_is_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    FlashMla(device).install(monkeypatch)
    attention = FlashMlaAttention()
    plan = AttentionPlan(1, 1, {}, None)  # type: ignore[arg-type]
    query = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device=device)
    pages = torch.zeros(2, 64, 1, 656, dtype=torch.uint8, device=device)
    slot = torch.zeros(1, 64, dtype=torch.int32, device=device)
    with pytest.raises(InvalidValue, match="run the step once before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(plan, query, pages, slot, 1.0, 512)
    assert attention(plan, query, pages, slot, 1.0, 512).shape == (1, 64, 512)


# --- all of them ------------------------------------------------------------------------------------------------------


def test_steady_steps_allocate_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    fakes = [kind(device).install(monkeypatch) for kind in (DeepGemm, FlashMla, FlashInfer)]
    runtime, _ = peer_runtime(device, peer_config(), next_n=3, **DEEPGEMM, **FLASHMLA, **FLASHINFER)
    batch = started(runtime, 62, 130, 3)
    runtime.step(batch)
    runtime.retire()
    before, calls = allocations(runtime), [len(fake.calls) for fake in fakes]
    for _ in range(20):
        runtime.step(batch)
    runtime.retire()
    assert allocations(runtime) == before
    if device.type == "cuda":
        assert [len(fake.calls) for fake in fakes] == calls, "steps are launches; no library is called again"
    assert not any(fake.violations.item() for fake in fakes)


@pytest.mark.parametrize(
    ("required", "words"),
    [
        (DEEPGEMM, 'index_scorer="deepgemm" needs the package deep_gemm, .*github.*, or use index_scorer="graphkv"'),
        (FLASHMLA, 'latent_attention="flashmla" needs the package flash_mla, .*, or use latent_attention="graphkv"'),
        (FLASHINFER, 'token_selector="flashinfer" needs the package flashinfer, .*, or use token_selector="graphkv"'),
    ],
)
def test_a_library_that_is_not_installed_is_named_at_construction(
    monkeypatch: pytest.MonkeyPatch, required: dict[str, str], words: str
) -> None:
    pretend(monkeypatch, HOPPER)
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    with pytest.raises(LibraryMissing, match=words) as caught:
        peer_runtime(torch.device("cpu"), peer_config(), **required)
    assert isinstance(caught.value, ImportError)


def test_a_placeholder_and_an_old_release_are_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        placeholder = ModuleType("deep_gemm")
        placeholder.__version__ = "1.0.0"  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "deep_gemm", placeholder)
        with pytest.raises(
            LibraryMissing, match=r"1\.0\.0 has no function fp8_paged_mqa_logits; install it from .*PyPI"
        ):
            library(IndexKFormat.FP8).load()
        old = ModuleType("flashinfer")
        old.top_k_page_table_transform = lambda input, src_page_table, lengths, k, tie_break=0: None  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "flashinfer", old)
        with pytest.raises(LibraryMissing, match="lacks dsa_graph_safe, page_size, out, out_raw_indices"):
            FlashInferSelector()


def test_no_library_is_imported_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    runtime, _ = peer_runtime(torch.device("cpu"), peer_config())
    runtime.step(started(runtime, 10, 20))
    runtime.retire()
