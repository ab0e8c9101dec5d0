"""The demo: what it prints is what happened, and its exit code is 0 only if its check held."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import run_python
from probe import probe_runtime

pytest.importorskip("transformers")

from graphkv import cli
from graphkv.demo.meter import Meter
from graphkv.demo.model import FAMILIES, build_model, cut_prompts, read_text
from graphkv.demo.view import Progress, show_table
from graphkv.errors import InvalidValue
from graphkv.integrations import transformers as adapter_module

FACTS = {"device", "model", "steps", "tokens", "max_logit_error", "topk_overlap", "graph_launches_per_step"} | {
    "steady_allocations", "host_us_per_step", "blocks_total", "blocks_peak", "ok",
}  # fmt: skip
SMALL = ["demo", "--json", "--batch", "2", "--new-tokens", "12"]


def facts(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text.strip().splitlines()[-1])
    return found


def test_the_default_demo_holds_and_exits_with_0() -> None:
    """In a process of its own, as a user runs it."""
    code = "import sys; from graphkv.cli import main; sys.exit(main(['demo', '--json', '--device', 'cpu']))"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    report = facts(done.stdout)
    assert set(report) >= FACTS
    assert report["ok"] is True
    assert report["steps"] >= 64
    assert report["tokens"] > 3 * report["steps"], "requests were not decoded together"
    assert report["max_logit_error"] <= 1e-4
    assert report["topk_overlap"] >= 0.999
    assert (report["graph_launches_per_step"], report["steady_allocations"]) == (1, 0)
    assert 0 < report["blocks_peak"] <= report["blocks_total"]
    assert "max logit error" in done.stdout


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("formats", [("bf16", "fp8"), ("fp8_ds_mla", "fp4"), ("fp8", "bf16")])
def test_every_format(
    model: str, formats: tuple[str, str], device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model, "--latent", formats[0], "--index-k", formats[1], "--device", str(device)]
    assert cli.main([*SMALL, *options]) == 0
    report = facts(capsys.readouterr().out)
    assert (report["model"], report["latent"], report["index_k"], report["ok"]) == (model, *formats, True)
    assert report["topk_overlap_floor"] <= report["topk_overlap"] < 1
    assert 0 < report["max_logit_error"] <= report["logit_error_bound"]
    assert (report["gpu_us_per_step"] is None) == (device.type == "cpu")


def test_the_same_seed_decodes_the_same_tokens_and_another_one_others(capsys: pytest.CaptureFixture[str]) -> None:
    errors = []
    for seed in ("0", "0", "1"):
        assert cli.main([*SMALL, "--device", "cpu", "--seed", seed]) == 0
        errors.append(facts(capsys.readouterr().out)["max_logit_error"])
    assert errors[0] == errors[1] != errors[2]


def test_a_fault_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(adapter_module.INDEX_ROPE, "deepseek_v32", "apply_rotary_pos_emb_interleave")
    assert cli.main([*SMALL, "--device", "cpu", "--model", "deepseek_v32"]) == 1
    out = capsys.readouterr().out
    report = facts(out)
    assert report["ok"] is False
    assert report["unexplained"] > 0
    assert "FAILED" in out


def test_prompts_from_a_file_and_an_odd_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2)
    options = ["demo", "--json", "--batch", "1", "--new-tokens", "2", "--device", "cpu", "--prompt-file", str(text)]
    assert cli.main(options) == 0
    report = facts(capsys.readouterr().out)
    assert (report["steps"], report["tokens"]) == (2, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-file", "/nowhere/at/all"], "cannot read prompts from /nowhere/at/all"),
        (["--prompt-file", __file__ + "/.."], "cannot read prompts"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--new-tokens", "1"], "new_tokens at least 2"),
        (["--device", "tpu"], "device must be auto, cpu, cuda"),
    ],
)
def test_what_cannot_run_exits_with_2_and_says_why(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * 199)
    with pytest.raises(InvalidValue, match="199 bytes of text; prompts need at least 200"):
        read_text(short)


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["demo", "--device", "cpu"]) == 2
    assert "pip install 'graphkv[demo]'" in capsys.readouterr().err


def test_without_rich_it_is_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rich", "rich.console", "rich.progress", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    with Progress("tokens") as progress:
        for done in range(0, 101, 10):
            progress(done, 100)
    show_table("title", {"a_fact": 1.23456, "another": None})
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"tokens {n}/100" for n in (0, 30, 50, 80, 100)]
    assert captured.out == "title\n  a fact   1.235\n  another  -\n"


def test_prompts_are_unequal_pieces_of_the_text_and_depend_on_the_seed_only() -> None:
    text = read_text(None)
    assert 6_000 < len(text) < 12_000
    prompts = cut_prompts(text, 12, 60, seed=5)
    sizes = [prompt.tokens.size for prompt in prompts]
    assert sizes[:2] == [20, 200]
    assert min(sizes) >= 20
    assert max(sizes) <= 200
    assert len(set(sizes)) > 6
    assert prompts[0].new_tokens == 60
    assert len({prompt.new_tokens for prompt in prompts}) > 4
    assert all(40 <= prompt.new_tokens <= 60 for prompt in prompts)
    assert all(bytes(prompt.tokens.astype(np.uint8)) in text for prompt in prompts)
    again = cut_prompts(text, 12, 60, seed=5)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(prompts, again, strict=True))


def test_a_model_is_the_same_for_a_seed_and_leaves_the_callers_random_state() -> None:
    cpu = torch.device("cpu")
    state = torch.random.get_rng_state()
    first, second, other = (build_model("glm_moe_dsa", seed=seed, device=cpu).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    with pytest.raises(InvalidValue, match="model must be one of"):
        build_model("llama", seed=0, device=cpu)


def test_the_meter_counts_what_a_step_allocates(device: torch.device) -> None:
    runtime, _, _ = probe_runtime(device)
    own, meter, kept = runtime.device, Meter(runtime), []

    def allocating() -> int:
        kept.append(own.empty(16, torch.uint8))
        kept.append(own.pinned(16, torch.uint8))
        return 7

    assert meter.measure(lambda: 5) == 5
    assert meter.allocations == 0
    assert meter.measure(allocating) == 7
    assert meter.allocations >= (4 if own.is_cuda else 2)
    assert len(meter.host_us) == 2
    assert all(math.isfinite(us) and us > 0 for us in meter.host_us)
    assert (meter.gpu_us() is None) == (not own.is_cuda)


def test_info_names_versions_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "43,188" in out
