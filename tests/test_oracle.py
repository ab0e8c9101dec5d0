"""The judge of a run: real ties are told from real faults."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("transformers")

from dsa_runs import FP32_ERROR, Sabotage, decode, outcome

from graphkv.demo.model import FAMILIES, build_model
from graphkv.demo.session import judge, single_thread
from graphkv.integrations import oracle
from graphkv.integrations import transformers as adapter_module
from graphkv.layout import Role, Side
from graphkv.runtime import DecodeRuntime


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with single_thread():
        yield


def test_an_exact_tie_is_followed_and_counted() -> None:
    """Without its rotated part an index key is the same wherever its letter stands, so layer 0 is full of ties."""
    cpu = torch.device("cpu")
    model = build_model("deepseek_v32", seed=0, device=cpu)
    with torch.no_grad():
        norm = model.model.layers[0].self_attn.indexer.k_norm
        norm.weight[: model.config.qk_rope_head_dim] = 0
    config, finished, _ = decode(model, cpu, batch=2, new_tokens=16)
    _, found = judge(model, config, finished)
    assert found.ties > 10
    assert found.error <= FP32_ERROR < found.free_error
    assert found.unexplained == 0


def _overwrite(role: Role, layer: int, byte: int) -> Sabotage:
    """Sixteen tokens of the longest open row, in one layer of one pool."""

    def overwrite(runtime: DecodeRuntime) -> None:
        row = int(runtime.manager.length.argmax())
        page = int(runtime.manager.block_table[row, 1]) * runtime.pools.page_scale(Side.TARGET, role)
        runtime.pools.view(Side.TARGET, role, layer)[page, :16].fill_(byte)

    return overwrite


@pytest.mark.parametrize(
    ("role", "formats"),
    [
        (Role.LATENT, {}),
        (Role.LATENT, {"latent": "bf16", "index_k": "fp8"}),
        (Role.LATENT, {"latent": "fp8_ds_mla", "index_k": "fp8"}),
        (Role.INDEX_K, {}),
        (Role.INDEX_K, {"latent": "bf16", "index_k": "fp8"}),
    ],
)
def test_sixteen_wrong_tokens_in_one_layer_fail_the_check(
    role: Role, formats: dict[str, str], device: torch.device
) -> None:
    value = 0x3F  # as fp32, bf16 and e4m3 a number between 0.7 and 2
    run = outcome("glm_moe_dsa", device, new_tokens=40, batch=2, sabotage=_overwrite(role, 2, value), **formats)
    assert not run.held
    assert run.found.unexplained > 0 or run.found.error > run.reference.error_bound(run.found)
    if role is Role.INDEX_K:
        assert run.found.unexplained > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_other_familys_rotation_fails_the_check(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "glm_moe_dsa":  # its module lacks the half-split rotation
        deepseek = build_model("deepseek_v32", seed=0, device=torch.device("cpu"))
        half_split = sys.modules[type(deepseek).__module__].apply_rotary_pos_emb
        glm = build_model(family, seed=0, device=torch.device("cpu"))
        monkeypatch.setattr(f"{type(glm).__module__}.apply_rotary_pos_emb", half_split, raising=False)
    names = adapter_module.INDEX_ROPE
    other = next(name for key, name in names.items() if key != family)
    monkeypatch.setitem(names, family, other)
    run = outcome(family, torch.device("cpu"), batch=2, new_tokens=8, index_k="fp8", latent="bf16")
    assert run.found.unexplained > 0
    assert not run.held


def test_what_was_never_recorded_fails_the_check() -> None:
    run = outcome("glm_moe_dsa", torch.device("cpu"), batch=1, new_tokens=4)
    request = run.finished[0]
    assert request.record is not None
    assert run.held
    request.record.logits[-1] = torch.nan
    _, found = judge(run.model, run.config, run.finished)
    assert math.isnan(found.error)
    assert not run.reference.held(found)

    request.record.logits[-1] = 0.0
    request.record.selected[2][5] = -2
    _, found = judge(run.model, run.config, run.finished)
    assert found.unexplained == 1
    assert not run.reference.held(oracle.Comparison()), "nothing compared is nothing held"


def test_a_selection_with_a_token_too_many_or_from_the_future_is_unexplained() -> None:
    run = outcome("glm_moe_dsa", torch.device("cpu"), batch=1, new_tokens=4)
    record = max((request.record for request in run.finished if request.record), key=lambda r: len(r.logits))
    for position, wrong in ((10, 11), (70, 71)):  # one context shorter and one longer than top-k
        before = record.selected[0][position].clone()
        record.selected[0][position, min(position + 1, 63)] = wrong
        _, found = judge(run.model, run.config, run.finished)
        assert found.unexplained == 1, position
        record.selected[0][position] = before
