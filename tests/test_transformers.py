"""Hugging Face DSA models on graphkv: logits and choices are the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from dsa_runs import FP32_ERROR, decode, free_error, outcome

from graphkv.demo.model import FAMILIES, build_model
from graphkv.demo.session import single_thread
from graphkv.errors import InvalidValue, UnsupportedCombination
from graphkv.integrations import _experts, oracle
from graphkv.integrations.transformers import TransformersModel
from graphkv.layout import Role, Side
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch

family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with single_thread():
        yield


# --- the model's own forward is reproduced ---------------------------------------------------------------------------


@family
def test_logits_are_the_models_own_to_1e_4(family: str, device: torch.device) -> None:
    run = outcome(family, device)
    topk = run.config.index_topk
    assert run.steps >= 64
    assert min(request.prompt.tokens.size for request in run.finished) < topk / 2
    assert max(request.sequence.tokens.size for request in run.finished) > 3 * topk
    assert run.found.answers == sum(request.prompt.new_tokens for request in run.finished)
    assert run.found.error <= FP32_ERROR
    assert run.found.unexplained == 0
    assert run.found.overlap >= 0.999
    if run.found.ties == 0:
        assert run.found.error == run.found.free_error == free_error(run.model, run.finished)
    assert run.held


@family
@pytest.mark.parametrize("index_k", ["bf16", "fp8", "fp4"])
def test_a_coarse_index_changes_choices_only_as_far_as_its_format_explains(
    family: str, index_k: str, device: torch.device
) -> None:
    """With fp32 latents and the index's choices followed, logits are still the model's own to 1e-4."""
    run = outcome(family, device, index_k=index_k, new_tokens=24)
    assert run.found.error <= FP32_ERROR
    assert run.held
    assert run.found.ties > 0, "no choice differed, so this format was not really used"
    assert run.found.overlap <= 1 - 1e-4
    assert run.found.overlap >= {"bf16": 0.995, "fp8": 0.96, "fp4": 0.9}[index_k]


@family
@pytest.mark.parametrize("latent", ["bf16", "fp8", "fp8_ds_mla"])
def test_a_coarse_latent_is_off_by_what_its_format_explains(family: str, latent: str, device: torch.device) -> None:
    run = outcome(family, device, latent=latent, index_k="fp8", new_tokens=24)
    assert run.held, run.found
    rounding = oracle.EPSILON[run.config.latent] * run.found.scale
    assert rounding / 50 < run.found.error <= 2 * rounding


@family
def test_a_bf16_model(family: str, device: torch.device) -> None:
    run = outcome(family, device, latent="bf16", index_k="fp8", dtype=torch.bfloat16, new_tokens=24)
    assert run.held, run.found
    assert run.found.overlap > 0.95


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_group": 2, "topk_group": 1, "n_routed_experts": 8},
        {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                             "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}},
        {"qk_nope_head_dim": 48, "v_head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"norm_topk_prob": False, "first_k_dense_replace": 0},
    ],
    ids=["groups", "bias", "yarn", "widths", "unnormalised"],
)  # fmt: skip
def test_options_of_the_family(sizes: dict[str, Any]) -> None:
    model = build_model("deepseek_v32", seed=1, device=torch.device("cpu"), **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias") or "mqa.bias" in name:
                parameter.normal_(0, 0.1)
    _, finished, _ = decode(model, torch.device("cpu"), batch=2, new_tokens=20)
    assert free_error(model, finished) <= FP32_ERROR


def test_shared_layers_own_no_index_bytes_and_reuse_the_selection(device: torch.device) -> None:
    run = outcome("glm_moe_dsa", device, batch=2, new_tokens=16, sizes={"indexer_types": ["full"] + ["shared"] * 3})
    assert run.config.page_scale(Side.TARGET, Role.INDEX_K) == 1
    assert run.config.page_scale(Side.TARGET, Role.LATENT) == 4
    assert run.held
    assert run.found.error <= FP32_ERROR


# --- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batched_experts_are_the_experts(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Below four tokens of two experts each, weights are gathered; from there on all eight experts run."""
    model = build_model("deepseek_v32", seed=0, device=device, dtype=dtype)
    block = model.model.layers[1].mlp
    hidden = torch.randn(tokens, model.config.hidden_size).to(device, dtype)
    chosen: list[torch.Tensor] = []
    with torch.no_grad():
        own = block(hidden.unsqueeze(0)).squeeze(0)
        batched = _experts.mixture(block, hidden, capturable=True, routed=chosen.append)
        eager = _experts.mixture(block, hidden, capturable=False)
    assert [tuple(c.shape) for c in chosen] == [(tokens, 2)]
    scale = own.abs().max().item()
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype] * scale
    torch.testing.assert_close(batched, own, atol=tolerance, rtol=0)
    torch.testing.assert_close(eager, own, atol=tolerance, rtol=0)
    assert batched.dtype == dtype


def test_logits_stay_at_one_address_and_hold_the_last_step(device: torch.device) -> None:
    model = build_model("glm_moe_dsa", seed=0, device=device)
    adapter = TransformersModel(model, max_rows=4)
    address = adapter.logits.data_ptr()
    config = adapter.cache_config(latent="fp32", index_k="fp32")
    with DecodeRuntime(config, adapter, device=device, max_rows=4, max_seq_len=128, num_blocks=16) as runtime:
        batch = Batch([runtime.open(np.arange(5) + 10 * i) for i in range(3)])
        runtime.prefill(batch.sequences)
        tokens = runtime.results(runtime.step(batch)).tokens[:, 0]
        assert adapter.logits.data_ptr() == address
        for i, sequence in enumerate(batch):
            fed = torch.from_numpy(sequence.tokens[:-1].astype(np.int64)).to(device).unsqueeze(0)
            with torch.no_grad():
                own = model(fed, use_cache=False).logits[0, -1]
            torch.testing.assert_close(adapter.logits[i], own, atol=FP32_ERROR, rtol=0)
            assert adapter.logits[i].argmax().item() == tokens[i]


# --- refusals --------------------------------------------------------------------------------------------------------


def _tiny(**sizes: Any) -> Any:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    return build_model("deepseek_v32", seed=0, device=torch.device("cpu"), **small, **sizes)


def _other_family(model: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type="llama"))


def _base_model(model: Any) -> Any:
    return model.model


def _no_query_latent(model: Any) -> Any:
    vars(model.config)["q_lora_rank"] = None  # the configuration's own check would refuse it in some releases
    return model


def _dynamic_rope(model: Any) -> Any:
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return model


def _half(model: Any) -> Any:
    return model.half()


def _expert_parallel(model: Any) -> Any:
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    return model


def _two_devices(model: Any) -> Any:
    model.lm_head.to("meta")
    return model


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_other_family, UnsupportedCombination, "'llama' is not a DSA family"),
        (_base_model, InvalidValue, "ForCausalLM"),
        (_no_query_latent, UnsupportedCombination, "q_lora_rank None"),
        (_dynamic_rope, UnsupportedCombination, "rope_type 'dynamic'"),
        (_half, UnsupportedCombination, "kv_b_proj is torch.float16"),
        (_expert_parallel, UnsupportedCombination, "layer 1: its experts"),
        (_two_devices, UnsupportedCombination, r"\['cpu', 'meta'\]"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_at_construction(
    change: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        TransformersModel(change(_tiny()), max_rows=1)


def test_sizes_that_do_not_fit_are_refused_before_the_first_step() -> None:
    model = _tiny()
    with pytest.raises(InvalidValue, match="max_rows must be at least 1, got 0"):
        TransformersModel(model, max_rows=0)
    small = TransformersModel(model, max_rows=1)
    sizes = {"device": "cpu", "max_seq_len": 64, "num_blocks": 4}
    with pytest.raises(InvalidValue, match="2 rows exceeds max_rows=1"):
        DecodeRuntime(small.cache_config(), small, max_rows=2, **sizes)
    with pytest.raises(UnsupportedCombination, match="next_n=2 with TransformersModel"):
        DecodeRuntime(small.cache_config(), small, max_rows=1, next_n=2, **sizes)
