"""A whole Transformers model on other libraries' kernels, by what the runtime requires: stand-ins, both devices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from drafting import CopyDraft
from peer_fakes import DeepGemm, FlashInfer, FlashMla
from peer_world import HOPPER, pretend

from graphkv.demo.model import build_model
from graphkv.demo.session import single_thread
from graphkv.integrations.transformers import TransformersModel
from graphkv.runtime import DecodeRuntime
from graphkv.selection.requirements import Requirements

# Without experts, and of glm_moe_dsa with one selection, made before any attention: rounding has nothing to flip.
SIZES = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_n_heads": 32,
}
CHOSEN: list[dict[str, str]] = [
    {"index_scorer": "deepgemm", "token_selector": "flashinfer"},
    {"index_scorer": "deepgemm", "token_selector": "flashinfer", "latent_attention": "flashmla"},
]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with single_thread():
        yield


def decoded(
    model: Any, device: torch.device, needs: Requirements, next_n: int, latent: str
) -> tuple[list[list[int]], list[list[int]], torch.Tensor, TransformersModel]:
    """Tokens of three sequences, two below and one above top-k; what the first step had fed, and its logits."""
    draft = CopyDraft(model) if next_n > 1 else None
    adapter = TransformersModel(model, max_rows=4, draft=draft)
    config = adapter.cache_config(latent=latent, index_k="fp8")
    sizes = {"max_rows": 4, "max_seq_len": 192, "num_blocks": 24, "prefill_chunk": 96, "buckets": [4]}
    runtime = DecodeRuntime(config, adapter, device=device, next_n=next_n, requirements=needs, **sizes)
    rng = np.random.default_rng(2)
    batch = [runtime.open(rng.integers(0, 256, n)) for n in (10, 62, 130)]
    runtime.prefill(batch)
    runtime.retire()
    runtime.step(batch)
    runtime.retire()
    logits, fed = adapter.logits[:3].cpu().clone(), [sequence.tokens[:-1].tolist() for sequence in batch]
    for _ in range(11):
        runtime.step(batch)
    runtime.retire()
    runtime.check()
    return [sequence.tokens.tolist() for sequence in batch], fed, logits, adapter


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("chosen", CHOSEN, ids=["scores and selection", "all"])
def test_a_model_calls_the_kernels_that_the_runtime_requires(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], next_n: int
) -> None:
    pretend(monkeypatch, HOPPER)
    fakes = {kind: kind(device).install(monkeypatch) for kind in (DeepGemm, FlashInfer, FlashMla)}
    model = build_model("glm_moe_dsa", seed=0, device=device, **SIZES)
    # In fp32 latents the order in which attention sums its tokens has no code to flip.
    latent = "fp8_ds_mla" if "latent_attention" in chosen else "fp32"
    own, own_fed, own_logits, _ = decoded(model, device, Requirements(), next_n, latent)
    assert not any(fake.calls for fake in fakes.values()), "nobody asked for them"
    got, fed, logits, adapter = decoded(model, device, Requirements(**chosen), next_n, latent)
    assert not any(fake.violations.item() for fake in fakes.values())
    assert fakes[DeepGemm].named("logits")
    assert fakes[FlashInfer].named("topk")
    if "latent_attention" not in chosen:
        assert got == own
        torch.testing.assert_close(logits, own_logits, atol=1e-4, rtol=0)
        return
    # FlashMLA multiplies in bf16, so a draft may come out otherwise; what was fed the same is answered the same.
    alike = [row for row in range(3) if fed[row] == own_fed[row]]
    assert len(alike) >= (3 if next_n == 1 else 1)
    error = (logits - own_logits)[alike].abs().max()
    assert 0 < error < 0.01 * own_logits.abs().max()
    attention = adapter._kernels.attention  # type: ignore[union-attr]
    shapes = {(4, next_n, 64, 64, 64), (4, 1, 64, 64, 64)}
    assert set(attention._handles) <= shapes, "prefill keeps no schedule"  # type: ignore[union-attr]
    assert {call["q"].shape[:2] for call in fakes[FlashMla].named("attend")} >= {(1, 96), (4, next_n)}


def test_two_runtimes_of_one_model_choose_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, HOPPER)
    fake = FlashInfer(device).install(monkeypatch)
    model = build_model("deepseek_v32", seed=0, device=device, **SIZES)
    adapter = TransformersModel(model, max_rows=2)
    config = adapter.cache_config(latent="bf16", index_k="bf16")
    sizes = {"device": device, "max_rows": 2, "max_seq_len": 128, "num_blocks": 9, "buckets": [2]}
    tokens = []
    runtimes = [
        DecodeRuntime(config, adapter, requirements=Requirements(token_selector=which), **copy.copy(sizes))
        for which in ("flashinfer", "graphkv")
    ]
    for runtime in runtimes:
        batch = [runtime.open(np.arange(80) % 50)]
        before = len(fake.calls)
        runtime.prefill(batch)
        for _ in range(4):
            runtime.step(batch)
        runtime.retire()
        tokens.append((batch[0].tokens.tolist(), len(fake.calls) > before))
    assert tokens[0][0] == tokens[1][0]
    assert [called for _, called in tokens] == [True, False]
