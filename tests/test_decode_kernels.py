"""Kernels of other libraries on graphkv's pools and live tensors: called as their contracts say, with equal results."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import outside_libraries as outside
import pytest
import torch

from graphkv import ops
from graphkv.config import CacheConfig, LayerSpec
from graphkv.errors import UnsupportedCombination
from graphkv.integrations.decode_kernels import DecodeKernels, KernelChoice, OwnKernels
from graphkv.layout import Role, Side
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch
from graphkv.step import StepContext, StepOutput

HEADS, VOCABULARY, TOPK, LAYERS = 64, 50, 48, 2
CONFIG = CacheConfig(layers=(LayerSpec(),) * LAYERS, latent="fp8_ds_mla", index_k="fp8", index_topk=TOPK)  # type: ignore[arg-type]
OWN = OwnKernels("fp8", "fp8_ds_mla", 1.0, 512, 64)
LIBRARIES = {"deep_gemm": outside.DeepGemm, "flashinfer": outside.FlashInfer, "flash_mla": outside.FlashMla}
CHOICES = {
    "index_scorer": ("deepgemm", "deep_gemm"),
    "token_selector": ("flashinfer", "flashinfer"),
    "latent_attention": ("flashmla", "flash_mla"),
}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stand-ins, found by whoever imports the libraries."""
    made = {name: kind() for name, kind in LIBRARIES.items()}
    for name, library in made.items():
        monkeypatch.setitem(sys.modules, name, library)
    return made


class Compared:
    """A model that stores what its token ids say, and has both sides' kernels read it in every decode step."""

    def __init__(self, kernels: DecodeKernels, heads: int = 8) -> None:
        made = torch.Generator().manual_seed(5)

        def table(*shape: int) -> torch.Tensor:
            return torch.randn(VOCABULARY, *shape, generator=made)

        self.c, self.rope, self.k = (table(width).bfloat16() for width in (512, 64, 128))
        self.q, self.weights = table(HEADS, 128).to(torch.float8_e4m3fn), table(HEADS)
        self.latent_q = table(heads, 576).bfloat16()
        self.other = kernels
        self.steps = 0

    def __call__(self, step: StepContext) -> StepOutput:
        metadata, ids = step.metadata, step.metadata.token_ids
        for layer in range(LAYERS):
            latent, index = (step.pools.view(Side.TARGET, role, layer) for role in (Role.LATENT, Role.INDEX_K))
            slots = (metadata.latent_slot, metadata.index_slot)
            ops.store_layer(
                self.c[ids], self.rope[ids], latent, slots[0], self.k[ids], index, slots[1], "fp8_ds_mla", "fp8"
            )
            if step.kind == "decode":
                self.compare(step, latent, index)
        self.steps += step.kind == "decode" and bool((metadata.batch_row >= 0).any())
        last = metadata.token_ids[(metadata.query_start[1:].long() - 1).clamp(min=0)]
        return StepOutput(((last[:, None] + torch.arange(1, step.next_n + 1)) % VOCABULARY).contiguous())

    def compare(self, step: StepContext, latent: torch.Tensor, index: torch.Tensor) -> None:
        ids, lengths = step.metadata.token_ids, step.metadata.context_len.tolist()
        query, weights = self.q[ids], self.weights[ids]
        mine, theirs = OWN.score(step, query, weights, index), self.other.score(step, query, weights, index)
        for token, length in enumerate(lengths):
            torch.testing.assert_close(theirs[token, :length], mine[token, :length], rtol=1e-5, atol=1e-4)
        chosen = [torch.full((step.tokens, TOPK), 77, dtype=torch.int32) for _ in range(4)]
        OWN.select(step, mine, *chosen[:2])
        self.other.select(step, mine, *chosen[2:])
        for ours, others in zip(chosen[:2], chosen[2:], strict=True):
            assert torch.equal(ours.sort(1).values, others.sort(1).values)
        attended = [torch.full((step.tokens, self.latent_q.shape[1], 512), torch.nan).bfloat16() for _ in range(2)]
        for attend, out in zip((OWN.attend, self.other.attend), attended, strict=True):
            attend(step, self.latent_q[ids], latent, chosen[0], 0.1, out)
        live = step.metadata.context_len > 0
        torch.testing.assert_close(attended[1][live], attended[0][live], rtol=2e-2, atol=2e-2)


def run(kernels: DecodeKernels, next_n: int, heads: int = 8, steps: int = 6) -> Compared:
    """Rows that cross a block's edge within a group of query tokens, one long row and a padded one."""
    model = Compared(kernels, heads)
    runtime = DecodeRuntime(
        CONFIG, model, device="cpu", max_rows=4, buckets=[4], max_seq_len=640, num_blocks=40, next_n=next_n
    )
    with runtime:
        batch = Batch([runtime.open(np.arange(length) % VOCABULARY) for length in (62, 126, 520)])
        runtime.prefill(batch.sequences)
        for _ in range(steps):
            runtime.results(runtime.step(batch))
    return model


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 6])
def test_case_G4_any_number_of_drafts_reaches_a_kernel_of_one_or_two(libraries: dict[str, Any], next_n: int) -> None:
    """More than two query tokens a row are flattened: each a row of one token, its own length, the row's table."""
    model = run(KernelChoice(index_scorer="deepgemm").kernels(OWN), next_n)
    calls = set(libraries["deep_gemm"].calls)
    assert calls == {(4, next_n) if next_n <= 2 else (4 * next_n, 1)}
    assert model.steps == 6


@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_a_schedule_is_made_once_a_step_and_not_at_all_where_the_steps_own_is_the_same(
    libraries: dict[str, Any], next_n: int
) -> None:
    """The live schedule has one worker on the CPU device; a library that has as many takes it as it is."""
    library = libraries["deep_gemm"]
    library.workers = 1
    run(KernelChoice(index_scorer="deepgemm").kernels(OWN), next_n, steps=3)
    steps = len(library.calls) // LAYERS
    assert len(library.schedules) == (steps if next_n == 3 else 0)


@pytest.mark.parametrize("option", list(CHOICES))
@pytest.mark.parametrize("next_n", [1, 4])
def test_each_library_alone_agrees(libraries: dict[str, Any], option: str, next_n: int) -> None:
    kernels = KernelChoice(**{option: CHOICES[option][0]}).kernels(OWN)
    assert run(kernels, next_n).steps == 6


@pytest.mark.parametrize("heads", [16, 64, 100, 128])
def test_all_of_them_together_for_any_number_of_heads(libraries: dict[str, Any], heads: int) -> None:
    choice = KernelChoice(**{option: chosen for option, (chosen, _) in CHOICES.items()})
    run(choice.kernels(OWN), 2, heads, steps=2)
    assert libraries["flash_mla"].handles == 1, "one shape, one handle, for all layers and steps"
    assert choice.kernels(OWN) is choice.kernels(OWN)


def test_more_heads_than_it_takes_are_refused(libraries: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCombination, match=r'up to 128 heads a rank, and the model has 130; .*"graphkv"'):
        run(KernelChoice(latent_attention="flashmla").kernels(OWN), 1, heads=130)


@pytest.mark.parametrize("option", list(CHOICES))
def test_a_library_that_is_not_here_is_named_with_a_way_out(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, name = CHOICES[option]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UnsupportedCombination, match=f'{option}="{chosen}" needs the package {name}, .*{option}="graphkv"'
    ):
        KernelChoice(**{option: chosen})
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(UnsupportedCombination, match=f"needs {name} with .*, which the one installed here lacks"):
        KernelChoice(**{option: chosen})


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedCombination, match=r"index_scorer must be one of \['graphkv', 'deepgemm'\], got 'x'"):
        KernelChoice(index_scorer="x")
