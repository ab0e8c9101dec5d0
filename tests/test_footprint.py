"""What a runtime takes is foretold byte for byte: what its device's ledger counted once it was built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.device import Device
from graphkv.engine import EngineShape
from graphkv.footprint import Footprint
from graphkv.runtime import DecodeRuntime
from graphkv.step import StepContext, StepOutput
from graphkv.tiers.hierarchy import TierOptions

FULL, SHARED = LayerSpec(Indexer.FULL), LayerSpec(Indexer.SHARED)
CONFIGS = {
    "plain": CacheConfig(layers=(FULL,) * 2, kv_lora_rank=32, qk_rope_head_dim=16, block_size=16),
    "draft": CacheConfig(layers=(FULL, SHARED), draft_layers=(FULL,), latent="fp8", index_k="fp4", block_size=32),  # type: ignore[arg-type]
    "windows": CacheConfig(layers=(FULL, LayerSpec(window=64), LayerSpec(window=32, sinks=16)), block_size=16),
}


def model(step: StepContext) -> StepOutput:
    step.workspace("scratch", (step.rows, 100), torch.float32)
    return StepOutput(torch.zeros((step.rows, step.next_n), dtype=torch.int64, device=step.metadata.token_ids.device))


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 1, "max_seq_len": 40},
        {"max_rows": 6, "max_seq_len": 200, "next_n": 3, "buckets": [2, 5], "prefill_chunk": 33},
    ],
)
def test_estimate_instance_and_allocations_are_equal(name: str, options: dict[str, Any], device: torch.device) -> None:
    config, where = CONFIGS[name], Device.of(device)
    with DecodeRuntime(config, model, device=where, num_blocks=40, **options) as runtime:
        shape = {"buckets": None, "next_n": 1, "prefill_chunk": 512} | options
        rows = max(options.get("buckets", [options["max_rows"]]))
        blocks = (40, *runtime.pools.window_blocks)
        estimate = Footprint.estimate(
            config, EngineShape.of(config, **shape), blocks, where, workspace_bytes=rows * 400
        )
        assert runtime.footprint() == estimate
        assert (estimate.device_bytes, estimate.pinned_bytes) == (where.ledger.device_bytes, where.ledger.pinned_bytes)
        pools = [item for item in estimate.items if item.name.startswith("pool")]
        assert sum(item.device_bytes for item in pools) == runtime.pools.num_bytes
        assert estimate.of("workspace").device_bytes == rows * 400
        assert f"{estimate.device_bytes:,}" in str(estimate).splitlines()[-1]


def test_a_host_tier_is_counted_as_pinned(device: torch.device) -> None:
    where = Device.of(device)
    tiers = TierOptions(host_blocks=7)
    with DecodeRuntime(
        CONFIGS["plain"], model, device=where, num_blocks=40, max_rows=2, max_seq_len=100, tiers=tiers
    ) as runtime:
        found = runtime.footprint()
        assert runtime.tiers is not None
        assert found.of("host tier") == ("host tier", 0, runtime.tiers.host.num_bytes)
        assert (found.device_bytes, found.pinned_bytes) == (where.ledger.device_bytes, where.ledger.pinned_bytes)
