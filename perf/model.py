"""A step's model reduced to its cache writes, and the same model behind metadata prepared the engines' way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphkv import ops
from graphkv.config import CacheConfig, LayerSpec
from graphkv.graph import GraphSet
from graphkv.layout import Role, Side
from graphkv.pool import Pools
from graphkv.runtime import DecodeRuntime
from graphkv.step import StepContext, StepOutput
from perf.engine_way import EngineMetadata, beside

NUM_LAYERS = 8
STORES = CacheConfig(layers=(LayerSpec(),) * NUM_LAYERS, latent="fp8_ds_mla", index_k="fp8")
VOCABULARY = 100_000


class StoreModel:
    """Stores one latent and one index key a token and layer, in the formats of DeepSeek V3.2; no matrix, no attention.

    What is left of a step is what a cache runtime is responsible for, so its cost is not hidden behind a model's.
    """

    def __init__(self, config: CacheConfig, tokens: int, device: str) -> None:
        self.config = config
        self.latent = torch.randn((tokens, config.latent_dim), device=device, dtype=torch.bfloat16)
        self.key = torch.randn((tokens, config.index_head_dim), device=device, dtype=torch.bfloat16)

    def __call__(self, step: StepContext) -> StepOutput:
        live = step.metadata
        following = self.run(step.pools, live.token_ids, live.latent_slot, live.index_slot)
        return StepOutput(following.view(step.rows, step.next_n))

    def run(self, pools: Pools, token_ids: Tensor, latent_slot: Tensor, index_slot: Tensor) -> Tensor:
        """int64 [T]: the token after each one."""
        tokens, rank = token_ids.shape[0], self.config.kv_lora_rank
        latent, key = self.latent[:tokens], self.key[:tokens]
        for layer in range(len(self.config.layers)):
            pages = pools.view(Side.TARGET, Role.LATENT, layer)
            ops.store_latent(latent[:, :rank], latent[:, rank:], pages, latent_slot, self.config.latent)
            pages = pools.view(Side.TARGET, Role.INDEX_K, layer)
            ops.store_index_k(key, pages, index_slot, self.config.index_k)
        return (token_ids + 1) % VOCABULARY


class EngineLoop:
    """Decode the engines' way: metadata by a chain of torch ops, copied to static tensors, then the model's graph.

    As kind as ours: the graph holds the whole model, tokens stay on the device, and results are read one step late.
    """

    def __init__(self, runtime: DecodeRuntime, model: StoreModel) -> None:
        self.metadata: EngineMetadata = beside(runtime)
        self.model, self.pools, self.device = model, runtime.pools, runtime.device
        rows = len(self.metadata.length)
        self.stream = self.device.stream()
        with self.device.running_on(self.stream):
            length, table = (self.metadata._fresh(a) for a in (self.metadata.length, self.metadata.block_table))
            self.static: Mapping[str, Tensor] = {k: v.clone() for k, v in self.metadata.derive(length, table).items()}
            self.token_ids = torch.zeros(rows, dtype=torch.int64, device=self.device.torch)
            self._run(rows)
        self.device.synchronize()
        self.graph = GraphSet((rows,), self.device, self.stream)
        self.graph.capture(self._run)
        self.rows = rows
        self._late: tuple[Tensor, torch.cuda.Event | None] | None = None

    def _run(self, rows: int) -> None:
        following = self.model.run(self.pools, self.token_ids, self.static["latent_slot"], self.static["index_slot"])
        self.token_ids.copy_(following)

    def step(self) -> None:
        """Prepare, launch, queue the results' way back, and read those of the step before."""
        with self.device.running_on(self.stream):
            for name, tensor in self.metadata.derive(*self.metadata.upload()).items():
                self.static[name].copy_(tensor)
            self.graph.launch(self.rows)
            tokens = torch.empty(self.rows, dtype=torch.int64, pin_memory=self.device.is_cuda)
            tokens.copy_(self.token_ids, non_blocking=True)
            event = None
            if self.device.is_cuda:
                event = torch.cuda.Event()
                event.record()
        self.read()
        self._late = tokens, event

    def read(self) -> list[int]:
        """The tokens of the step whose results are still out."""
        if self._late is None:
            return []
        (tokens, event), self._late = self._late, None
        if event is not None:
            event.synchronize()
        return tokens.tolist()
