"""A step function that reads the cache by other libraries' kernels and by graphkv's own, side by side, in one graph.

What it stores and asks follows from tokens and positions alone, so two runs that feed the same tokens can be compared.
"""

from __future__ import annotations

import pytest
import torch

from graphkv import ops
from graphkv.config import CacheConfig, LayerSpec
from graphkv.integrations._dsa_kernels import DsaKernels, KernelPass
from graphkv.integrations.peers.deepgemm import DeepGemmScorer
from graphkv.kernel_choice import OWN_KERNELS, KernelChoice, LatentAttention
from graphkv.layout import Role
from graphkv.runtime import DecodeRuntime
from graphkv.selection.consumers import DeviceFacts
from graphkv.selection.requirements import Requirements
from graphkv.step import StepContext, StepOutput

HOPPER, BLACKWELL = DeviceFacts("a Hopper device", 90), DeviceFacts("a Blackwell device", 100)
VOCABULARY, LAYERS = 97, 2


def pretend(monkeypatch: pytest.MonkeyPatch, facts: DeviceFacts) -> None:
    """Whatever the device, selection and adapters take it for that one."""
    monkeypatch.setattr(DeviceFacts, "of", classmethod(lambda cls, device: facts))


def peer_config(**options: object) -> CacheConfig:
    """The widths that all three libraries take, and a small top-k."""
    sizes = {"index_heads": 32, "index_topk": 64, "latent": "fp8_ds_mla", "index_k": "fp8"}
    return CacheConfig(layers=(LayerSpec(),) * LAYERS, **(sizes | options))


class PeerModel:
    """Stores random keys, then scores, selects and attends twice. The runtime's choice is one of the two.

    Attributes:
        scores, slots, positions, attended: by name ("peer", "own") and layer, of the last step's tokens.
        context_len: int32 [T] of that step.
    """

    def __init__(self, config: CacheConfig, max_tokens: int, device: torch.device, heads: int = 64) -> None:
        self.config, self.device, self.heads = config, device, heads
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.keys = random(LAYERS, VOCABULARY, config.index_head_dim)
        self.latents = random(LAYERS, VOCABULARY, config.latent_dim)
        self.queries = random(LAYERS, VOCABULARY, config.index_heads, config.index_head_dim)
        self.weights = random(LAYERS, VOCABULARY, config.index_heads)
        self.attention_queries = random(LAYERS, VOCABULARY, heads, config.latent_dim).bfloat16()
        self.kernels: dict[str, DsaKernels] = {}
        who = [(name, layer) for name in ("peer", "own") for layer in range(LAYERS)]
        topk, rank = config.index_topk, config.kv_lora_rank

        def room(width: tuple[int, ...], dtype: torch.dtype) -> dict[tuple[str, int], torch.Tensor]:
            return {key: torch.zeros(max_tokens, *width, dtype=dtype, device=device) for key in who}

        self.scores = room((1024,), torch.float32)
        self.slots, self.positions = (room((topk,), torch.int32) for _ in range(2))
        self.attended = room((heads, rank), torch.bfloat16)
        self.context_len = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def __call__(self, step: StepContext) -> StepOutput:
        metadata = step.metadata
        token = metadata.token_ids % VOCABULARY
        passes = {name: self._pass(name, choice, step) for name, choice in self._choices(step).items()}
        for layer in range(LAYERS):
            self._store(passes["peer"], layer, token, metadata.position)
            for name, kernels in passes.items():
                if step.kind == "decode":
                    self._read(name, kernels, layer, token)
        self.context_len[: metadata.tokens] = metadata.context_len
        following = metadata.token_ids[(metadata.query_start[1:].long() - 1).clamp(min=0)] + 1
        return StepOutput(following[:, None] + torch.arange(step.next_n, device=self.device))

    def _choices(self, step: StepContext) -> dict[str, KernelChoice]:
        own = KernelChoice(index_page_size=step.kernels.index_page_size)  # the size decides the bytes
        return {"own": own if step.kernels != OWN_KERNELS else OWN_KERNELS, "peer": step.kernels}

    def _pass(self, name: str, choice: KernelChoice, step: StepContext) -> KernelPass:
        if name not in self.kernels:
            self.kernels[name] = DsaKernels(choice, self.config, self.device)
        return KernelPass(self.kernels[name], step)

    def _store(self, kernels: KernelPass, layer: int, token: torch.Tensor, position: torch.Tensor) -> None:
        config, metadata = self.config, kernels.metadata
        turn = 1 + 0.3 * torch.cos(position.float() * 0.7 + layer)[:, None]
        latent = self.latents[layer][token] * turn
        key = self.keys[layer][token] * turn
        rope = latent[:, config.kv_lora_rank :].contiguous()
        pages = kernels.step.pools.view(metadata.side, Role.LATENT, layer)
        ops.store_latent(latent[:, : config.kv_lora_rank], rope, pages, metadata.latent_slot, config.latent)
        scales = (config.index_k_scale, config.index_k_amax_floor)
        ops.store_index_k(key, kernels.index_pages(layer), metadata.index_slot, config.index_k, *scales)

    def _read(self, name: str, kernels: KernelPass, layer: int, token: torch.Tensor) -> None:
        """What differs from graphkv's own is read by both, the rest by neither."""
        asked = kernels.step.kernels
        query, weights = self.queries[layer][token], self.weights[layer][token]
        pages, tokens = kernels.index_pages(layer), token.shape[0]
        chosen = self.kernels[name]
        if isinstance(chosen.scorer, DeepGemmScorer):
            scores = chosen.scorer(kernels._score_plan, query, weights, pages)
        else:
            scores = kernels._score(query, weights, pages)
        self.scores[name, layer][:tokens, : scores.shape[1]] = scores
        if asked == OWN_KERNELS:
            return
        if name == "peer":  # selection is compared on equal scores, attention on equal slots
            scores = kernels.step.workspace("equal_scores", tuple(scores.shape), torch.float32)
            scores.copy_(self.scores["own", layer][:tokens, : scores.shape[1]])
        found = [self.slots[name, layer][:tokens], self.positions[name, layer][:tokens]]
        lengths = kernels.metadata.context_len
        rows = (kernels.metadata.latent_page_table, kernels.metadata.token_row)
        chosen.select(scores, lengths, *rows, self.config.block_size, *found)
        if asked.latent_attention is LatentAttention.GRAPHKV:
            return
        slot = self.slots["own", layer][:tokens]
        out = kernels.attend(self.attention_queries[layer][token], kernels.latent_pages(layer), slot, 0.07)
        self.attended[name, layer][:tokens] = out


def peer_runtime(
    device: torch.device, config: CacheConfig, *, heads: int = 64, next_n: int = 1, **required: object
) -> tuple[DecodeRuntime, PeerModel]:
    """A small runtime that requires the given kernels; one graph for 4 rows, one for 2."""
    model = PeerModel(config, 256, device, heads)
    sizes = {"max_rows": 4, "max_seq_len": 640, "num_blocks": 40, "buckets": [2, 4], "prefill_chunk": 256}
    needs = Requirements(**required)
    return DecodeRuntime(config, model, device=device, next_n=next_n, requirements=needs, **sizes), model
