"""Runs of small DSA models through graphkv, with what the oracle says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphkv.config import CacheConfig
from graphkv.demo.model import build_model, cut_prompts, read_text
from graphkv.demo.session import Request, Session, judge
from graphkv.integrations import oracle
from graphkv.integrations.trace import Trace
from graphkv.integrations.transformers import TransformersModel
from graphkv.pool import NULL_PATTERN
from graphkv.runtime import DecodeRuntime

FP32_ERROR = 1e-4
Sabotage = Callable[[DecodeRuntime], None]


@dataclass
class Outcome:
    """A finished run and what the oracle says of it."""

    model: Any
    config: CacheConfig
    finished: list[Request]
    steps: int
    reference: oracle.Reference
    found: oracle.Comparison

    @property
    def held(self) -> bool:
        return self.reference.held(self.found)


def decode(
    model: Any,
    device: torch.device,
    *,
    batch: int = 4,
    new_tokens: int = 70,
    sabotage: Sabotage | None = None,
    sabotage_step: int = 12,
    **formats: str,
) -> tuple[CacheConfig, list[Request], int]:
    """Requests of 20 to 200 tokens join, are continued and leave; prompts go in by chunks shorter than most of them."""
    prompts = cut_prompts(read_text(None), batch + 2, new_tokens, seed=3)
    longest = max(prompt.tokens.size + prompt.new_tokens for prompt in prompts)
    trace = Trace(model, max_rows=batch, max_positions=longest)
    adapter = TransformersModel(model, max_rows=batch, observer=trace)
    config = adapter.cache_config(**({"latent": "fp32", "index_k": "fp32"} | formats))
    sizes = {"max_rows": batch, "max_seq_len": longest, "num_blocks": 10 * batch, "prefill_chunk": 96}
    # The choices of every token are judged, so every token is computed.
    runtime = DecodeRuntime(config, adapter, device=device, prefix_caching=False, **sizes)
    session = Session(runtime, trace, prompts, batch)

    def tick(done: int, wanted: int) -> None:
        if sabotage is not None and session.steps == sabotage_step:
            runtime.retire()
            sabotage(runtime)
            runtime.device.synchronize()

    with runtime:
        session.run(tick)
        runtime.check()
        for pool in runtime.pools:
            assert (pool.block(0) == NULL_PATTERN).all(), "something wrote to the null block"
    assert all(request.samples_match() for request in session.finished)
    return config, session.finished, session.steps


def outcome(family: str, device: torch.device, *, sizes: dict[str, Any] | None = None, **options: Any) -> Outcome:
    dtype = options.pop("dtype", torch.float32)
    model = build_model(family, seed=options.pop("seed", 0), device=device, dtype=dtype, **(sizes or {}))
    config, finished, steps = decode(model, device, **options)
    return Outcome(model, config, finished, steps, *judge(model, config, finished))


def free_error(model: Any, finished: list[Request]) -> float:
    """Largest difference to the model's own forward, on which nothing is hooked."""
    worst = 0.0
    for request in finished:
        tokens = request.fed.to(model.lm_head.weight.device).unsqueeze(0)
        with torch.no_grad():
            own = model(tokens, use_cache=False).logits[0, request.first_answer :].float().cpu()
        assert request.record is not None
        worst = max(worst, (request.record.logits[request.first_answer :] - own).abs().max().item())
    return worst
