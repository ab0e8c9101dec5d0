"""A Hugging Face DSA model runs on V1 through the same adapter, and leaves V2's bytes and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from mix import gathered

from graphkv.baseline.runner import V1Runner
from graphkv.demo.model import FAMILIES, build_model
from graphkv.demo.session import single_thread
from graphkv.integrations.transformers import TransformersModel
from graphkv.runtime import DecodeRuntime


@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapter_leaves_equal_bytes_on_v1_and_v2(family: str) -> None:
    """On the CPU: there V1 and V2 run the same torch operations on the same shapes."""
    model = build_model(family, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    prompts = [np.random.default_rng(size).integers(0, model.config.vocab_size, size) for size in (20, 100, 64)]
    ends = []
    with single_thread():
        for kind, options in ((V1Runner, {}), (DecodeRuntime, {"buckets": [3]})):
            adapter = TransformersModel(model, max_rows=3)
            config = adapter.cache_config(latent="fp32", index_k="fp8")
            sizes = {"max_rows": 3, "max_seq_len": 200, "num_blocks": 20, "prefill_chunk": 96}
            runner = kind(config, adapter, device="cpu", **sizes, **options)
            sequences = [runner.open(prompt) for prompt in prompts]
            runner.prefill(sequences)
            for _ in range(20):
                runner.step(sequences)
            runner.retire()
            ends.append(([s.tokens.tolist() for s in sequences], gathered(runner, sequences)))
    (tokens1, bytes1), (tokens2, bytes2) = ends
    assert tokens1 == tokens2
    for key, want in bytes2.items():
        np.testing.assert_array_equal(bytes1[key], want, err_msg=str(key))
