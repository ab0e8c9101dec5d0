"""Drafts within a step: the tokens are those of plain decoding, and target and draft never mix (class G)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drafting import CopyDraft, DraftingProbe, DraftShadow, ScriptedDraft
from probe import probe_config

from graphkv.baseline.runner import V1Runner
from graphkv.integrations.speculation import accept
from graphkv.layout import Role, Side
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Sequence

PROMPTS = (5, 63, 100)
NEW_TOKENS = 24


def drafting(
    device: torch.device, *, next_n: int = 4, draft: str = "FS", **options: Any
) -> tuple[DecodeRuntime, DraftingProbe, DraftShadow]:
    config = probe_config(draft=draft)
    model = DraftingProbe(config, 512, device, next_n)
    sizes = {"max_rows": 4, "max_seq_len": 112, "num_blocks": 40, "prefill_chunk": 48, "prefix_caching": False}
    runtime = DecodeRuntime(config, model, device=device, next_n=next_n, **(sizes | options))
    return runtime, model, DraftShadow(runtime)


# --- the cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3])
def test_case_G1_the_token_map_of_each_draft_step_is_its_own(device: torch.device, rows: int) -> None:
    """Verify: next_n tokens a row; draft steps: one. And no request writes another's bytes."""
    runtime, model, shadow = drafting(device, buckets=[rows])
    batch = [shadow.open(i + 1, tokens) for i, tokens in enumerate((14, 3, 30)[:rows])]
    shadow.prefill(batch)
    for _ in range(6):
        shadow.drafted(batch)
        runtime.retire()
        assert model.verified[: 4 * rows].tolist() == [row for row in range(rows) for _ in range(4)]
        for number in (2, 3):
            assert model.drafted[number][:rows].tolist() == list(range(rows))
        shadow.check()


@pytest.mark.parametrize("next_n", [3, 4, 8])
def test_case_G1_draft_steps_have_blocks_up_to_the_end_of_a_row(device: torch.device, next_n: int) -> None:
    """Drafts reach past what a step may accept: at a block's edge, at the longest length, with the pool nearly full."""
    runtime, _, shadow = drafting(device, next_n=next_n, max_seq_len=48, num_blocks=10, max_rows=2)
    batch = [shadow.open(1, 16 - next_n), shadow.open(2, 20)]
    shadow.prefill(batch)
    while max(shadow.length[sequence] for sequence in batch) + next_n <= 48:
        shadow.drafted(batch)
        runtime.retire()
        shadow.check()
    assert max(shadow.length.values()) > 48 - 2 * next_n
    null = [pool.block(0) for pool in runtime.pools]
    assert all((block == block.flatten()[0]).all() for block in null), "nothing was written to the null block"


def test_case_G2_the_target_side_is_untouched_by_the_draft_side(device: torch.device) -> None:
    """Byte-equal after the draft side's use, also when that fails; and no tensor of one is the other's."""
    runtime, model, shadow = drafting(device)
    batch = [shadow.open(1, 14), shadow.open(2, 40)]
    shadow.prefill(batch)
    for _ in range(4):
        shadow.drafted(batch)
        runtime.retire()
        for (rows, name), kept in model.before.items():
            if rows == 2:
                assert torch.equal(kept, model.after[rows, name]), name
    sides = [runtime.metadata(2, side).tensors() for side in Side]
    spans = [{(t.data_ptr(), t.data_ptr() + t.nbytes) for t in each.values()} for each in sides]
    assert all(end <= begin or other_end <= start for start, end in spans[0] for begin, other_end in spans[1])
    for role, name in ((Role.LATENT, "latent"), (Role.INDEX_K, "index")):
        ids = runtime.manager.block_table[[s.row for s in batch]]
        for side, found in ((Side.TARGET, model.after), (Side.DRAFT, model.inside)):
            table, scale = found[2, f"{name}_page_table"].cpu().numpy(), runtime.config.page_scale(side, role)
            assert np.array_equal(table, np.where(table > 0, ids * scale, 0)), "each side's pages are of its own pool"
            assert (table > 0).any(1).all()
    shadow.check()


def test_case_G5_the_draft_cache_has_no_gap_after_a_pause(device: torch.device) -> None:
    """Draft for 8 steps, keep nothing of the drafts for 10, resume: every position holds its tag, in every layer."""
    runtime, model, shadow = drafting(device, max_seq_len=200, num_blocks=60)
    batch = [shadow.open(1, 14), shadow.open(2, 40)]
    shadow.prefill(batch)
    for paused, steps in ((False, 8), (True, 10), (False, 6)):
        runtime.retire()
        runtime.device.synchronize()
        model.paused.fill_(paused)
        runtime.device.synchronize()
        shadow.paused = paused
        for _ in range(steps):
            shadow.drafted(batch)
        shadow.check()
    # The last draft step read every position before its own, and found the right tag there.
    counts, positions = model.counts[Side.DRAFT][:2].tolist(), model.inside[2, "position"][:2].tolist()
    assert counts == [position + 1 for position in positions]


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_accept_keeps_drafts_up_to_the_first_that_is_wrong(device: torch.device) -> None:
    drafted = torch.tensor([[9, 1, 2, 3], [9, 1, 7, 3], [9, 7, 2, 3], [9, 1, 2, 7]], device=device)
    sampled = torch.tensor([[1, 2, 3, 4]] * 4, device=device)
    taken = accept(drafted, sampled)
    assert taken.kept.tolist() == [4, 2, 1, 3]
    assert taken.token.tolist() == [4, 2, 1, 3]
    assert taken.last.tolist() == [3, 5, 8, 14]
    assert taken.kept.dtype == torch.int32


# --- a whole model ----------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")

from graphkv.demo.model import FAMILIES, build_model  # noqa: E402
from graphkv.demo.session import single_thread  # noqa: E402
from graphkv.errors import UnsupportedCombination  # noqa: E402
from graphkv.integrations.mtp import MtpDraft  # noqa: E402
from graphkv.integrations.transformers import TransformersModel  # noqa: E402

family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with single_thread():
        yield


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, n) for n in PROMPTS]


def decoded(
    model: Any, device: torch.device, draft: Any, next_n: int, kind: Any = DecodeRuntime, **formats: str
) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of three prompts that join one after another, and how many tokens each step of theirs kept."""
    adapter = TransformersModel(model, max_rows=4, draft=draft)
    config = adapter.cache_config(**({"latent": "fp32", "index_k": "fp32"} | formats))
    sizes = {"max_rows": 4, "max_seq_len": 160, "num_blocks": 24, "prefill_chunk": 128, "next_n": next_n}
    runtime = kind(config, adapter, device=device, **sizes)
    active: list[Sequence] = []
    kept: list[list[int]] = []

    def step() -> None:
        for each, count in zip(kept, runtime.results(runtime.step(active)).accepted.tolist(), strict=True):
            each.append(count)

    for prompt in prompts():
        active.append(runtime.open(prompt))
        kept.append([])
        runtime.prefill(active[-1:])
        for _ in range(3):
            step()
    while min(s.tokens.size - n for s, n in zip(active, PROMPTS, strict=True)) < NEW_TOKENS:
        step()
    runtime.check()
    return [s.tokens[n : n + NEW_TOKENS].tolist() for s, n in zip(active, PROMPTS, strict=True)], kept


def mtp(model: Any, seed: int = 3) -> MtpDraft:
    """An untrained head of one layer: its proposals are seldom right, its tokens always those of the target."""
    torch.manual_seed(seed)
    width, like = model.config.hidden_size, model.lm_head.weight
    layer = copy.deepcopy(model.model.layers[0])  # a full indexer in both families
    project = torch.nn.Linear(2 * width, width, bias=False).to(like.device, like.dtype)
    norms = {name: copy.deepcopy(model.model.norm) for name in ("token_norm", "state_norm", "head_norm")}
    return MtpDraft(model, [layer], project=project, **norms)


def kept_by_hand(model: Any, prompt: list[int], said: list[int], next_n: int) -> list[int]:
    """What each step keeps of `CopyDraft`'s drafts, by the model's own forward over all but the first token."""

    def after(tokens: list[int]) -> int:
        given = torch.tensor([tokens[1:]], device=model.lm_head.weight.device)
        with torch.no_grad():
            return int(model(given, use_cache=False).logits[0, -1].argmax())

    at, kept = 1, []  # tokens said and fed back; after prefill one draft fills all places
    drafts = [after([*prompt, *said[:1]])] * (next_n - 1)
    while at + next_n <= len(said):
        right = [draft == truth for draft, truth in zip(drafts, said[at:], strict=False)]
        kept.append(1 + [*right, False].index(False))
        at += kept[-1]
        tokens = [*prompt, *said[:at]]
        drafts = []
        for _ in range(next_n - 1):
            drafts.append(after([*tokens, *drafts]))
    return kept


@family
@pytest.mark.parametrize("next_n", [2, 4])
def test_tokens_are_those_of_plain_decoding(family: str, device: torch.device, next_n: int) -> None:
    """And each step keeps as many drafts as the draft model, run by hand, gets right: a draft cache that is misread
    would show as acceptance that falls, and as nothing else."""
    model = build_model(family, seed=0, device=device)
    plain, _ = decoded(model, device, None, 1)
    right, kept = decoded(model, device, CopyDraft(model), next_n)
    assert right == plain
    for prompt, said, each in zip(prompts(), plain, kept, strict=True):
        want = kept_by_hand(model, prompt.tolist(), said, next_n)
        assert each[: len(want)] == want
    assert {count for each in kept for count in each} == set(range(1, next_n + 1))
    untrained, _ = decoded(model, device, mtp(model), next_n)
    assert untrained == plain


def test_any_mix_of_right_and_wrong_drafts_changes_no_token(device: torch.device) -> None:
    model = build_model("deepseek_v32", seed=0, device=device)
    plain, _ = decoded(model, device, None, 1)
    rng = np.random.default_rng(1)
    script = torch.zeros(4, 200, dtype=torch.int64, device=device)
    for row, (tokens, start) in enumerate(zip(plain, PROMPTS, strict=True)):
        truth = np.array(tokens)
        wrong = rng.random(truth.size) < 0.3
        script[row, start : start + truth.size] = torch.from_numpy(np.where(wrong, (truth + 1) % 256, truth)).to(device)
    found, kept = decoded(model, device, ScriptedDraft(script), 4)
    assert found == plain
    assert {count for each in kept for count in each} == {1, 2, 3, 4}


@pytest.mark.parametrize("formats", [{"latent": "bf16", "index_k": "fp8"}, {"latent": "fp8_ds_mla", "index_k": "fp4"}])
def test_coarse_formats_hold_the_same_tokens(device: torch.device, formats: dict[str, str]) -> None:
    model = build_model("glm_moe_dsa", seed=0, device=device)
    assert decoded(model, device, CopyDraft(model), 3, **formats)[0] == decoded(model, device, None, 1, **formats)[0]


def test_the_v1_baseline_drafts_alike() -> None:
    device = torch.device("cpu")
    model = build_model("glm_moe_dsa", seed=0, device=device)
    found = [decoded(model, device, CopyDraft(model), 4, kind) for kind in (DecodeRuntime, V1Runner)]
    assert found[0] == found[1]


def test_a_draft_needs_its_layers_and_next_n_a_draft() -> None:
    device = torch.device("cpu")
    model = build_model("deepseek_v32", seed=0, device=device, num_hidden_layers=2)
    sizes = {"device": "cpu", "max_rows": 1, "max_seq_len": 64, "num_blocks": 4}
    alone = TransformersModel(model, max_rows=1)
    with pytest.raises(UnsupportedCombination, match=r"next_n=3 with TransformersModel\(draft=None\).*other 2 tokens"):
        DecodeRuntime(alone.cache_config(), alone, next_n=3, **sizes)
    both = TransformersModel(model, max_rows=1, draft=CopyDraft(model))
    with pytest.raises(UnsupportedCombination, match="without draft_layers"):
        DecodeRuntime(alone.cache_config(), both, next_n=3, **sizes)
