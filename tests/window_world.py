"""A runtime with layer groups and the image that its pools must have, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from probe import PER_REQUEST, WIDTH, ProbeModel, accepted_of

from graphkv.config import CacheConfig, LayerSpec
from graphkv.layout import Role
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch, Sequence

B = 16
FULL, SHARED, W32, W20 = LayerSpec(), LayerSpec("shared"), LayerSpec(window=32), LayerSpec(window=20, sinks=3)


LAYERS = (FULL, W32, SHARED, W20, W32)


def config_of(layers: tuple[LayerSpec, ...] = LAYERS, draft: tuple[LayerSpec, ...] = (W32,)) -> CacheConfig:
    sizes: Any = {"kv_lora_rank": WIDTH, "qk_rope_head_dim": WIDTH, "index_head_dim": WIDTH, "block_size": B}
    return CacheConfig(layers=layers, draft_layers=draft, **sizes, **{"latent": "fp32", "index_k": "fp32"})


class Shadow:
    """Drives a runtime and keeps the image that its pools must have.

    What a step writes is taken down when its room is claimed: later the window may have given the blocks up.
    """

    def __init__(self, device: torch.device | str, config: CacheConfig, **options: Any) -> None:
        sizes = {"max_rows": 4, "max_seq_len": 300, "num_blocks": 90, "prefill_chunk": 48, "next_n": 4} | options
        self.config, self.model = config, ProbeModel(config, 512, torch.device(device), draft_prompts=True)
        self.runtime = DecodeRuntime(config, self.model, device=device, **sizes)
        self.manager, self.next_n = self.runtime.manager, self.runtime.next_n
        self.groups = range(len(config.groups))
        self.images = {}
        for group in self.groups:
            for side in config.sides:
                for role in Role:
                    if config.page_scale(side, role, group):
                        pool = self.runtime.pools.pool(side, role, group)
                        pool.data.fill_(0xA5)
                        self.images[group, side, role] = np.full(pool.data.numel(), 0xA5, np.uint8)
        self.runtime.device.synchronize()  # steps run on another stream
        self.request: dict[int, int] = {}  # by row
        self.length: dict[int, int] = {}
        self.counted: dict[int, int] = {}  # context of a row's last query token of the last decode step
        self.decoding = False
        submitter = self.runtime._submitter
        self._claim, self._copy = self.manager.claim, submitter.copy
        self.manager.claim = self._claimed  # type: ignore[method-assign]
        submitter.copy = self._copied  # type: ignore[method-assign]

    def _claimed(self, rows: np.ndarray, n: Any) -> int:
        added = self._claim(rows, n)
        for row, count in zip(rows.tolist(), np.broadcast_to(n, rows.shape).tolist(), strict=True):
            begin = self.length[row]
            for position in range(begin, begin + count):
                self._write(row, position)
            if self.decoding:
                self.counted[row] = begin + count
                self.length[row] = begin + accepted_of(self.request[row] * PER_REQUEST + begin, self.next_n)
            else:
                self.length[row] = begin + count
        return added

    def _write(self, row: int, position: int) -> None:
        token = self.request[row] * PER_REQUEST + position
        for side in self.config.sides:
            for layer, spec in enumerate(self.config.side_layers(side)):
                group = self.config.group_of(side, layer)
                block = int(self.manager.table.ids[group * self.manager.max_rows + row, position // B])
                assert block > 0
                tag = np.array([token, position + 1000.0 * layer] * WIDTH, np.float32).view(np.uint8)
                for role, record in ((Role.LATENT, tag), (Role.INDEX_K, tag[: tag.size // 2])):
                    if spec.owns(role):
                        page = block * self.config.page_scale(side, role, group)
                        page += self.config.layer_offset(side, role, layer)
                        start = (page * B + position % B) * record.size
                        self.images[group, side, role][start : start + record.size] = record

    def _copied(self, jobs: Any) -> None:
        self._copy(jobs)
        for job in jobs:
            for (group, _, role), image in self.images.items():
                if group == job.group:
                    record = 4 * WIDTH * (2 if role is Role.LATENT else 1)
                    pages = image.reshape(-1, self.config.page_scale(_, role, group), B * record)
                    pages[job.target, :, : job.tokens * record] = pages[job.source, :, : job.tokens * record]

    def open(self, request: int, tokens: int) -> Sequence:
        sequence = self.runtime.open(np.arange(tokens) + request * PER_REQUEST)
        self.request[sequence.row], self.length[sequence.row] = request, sequence.cached_tokens
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        child = self.runtime.fork(sequence)
        self.request[child.row], self.length[child.row] = self.request[sequence.row], self.length[sequence.row]
        return child

    def prefill(self, sequences: list[Sequence]) -> int:
        self.decoding = False
        return self.runtime.prefill(sequences)

    def step(self, batch: list[Sequence] | Batch) -> int:
        self.decoding = True
        return self.runtime.step(batch)

    def rewind(self, sequence: Sequence, n: int) -> None:
        self.runtime.rewind(sequence, n)
        self.length[sequence.row] -= n

    def check(self) -> None:
        """Every byte of every pool is as foretold, and so are the tokens."""
        self.runtime.retire()
        self.runtime.device.synchronize()
        for (group, side, role), image in self.images.items():
            data = self.runtime.pools.pool(side, role, group).data.cpu().numpy()
            bad = np.flatnonzero(data != image)
            assert not bad.size, f"group {group} {side} {role}: {bad.size} bytes differ, first at {bad[0]}"
        for row in np.flatnonzero(self.manager.is_open).tolist():
            assert self.manager.length[row] == self.length[row]
        self.runtime.check()

    def check_reads(self, batch: list[Sequence]) -> None:
        """Each query token of the last decode step found every token that each layer reads, in every window."""
        self.runtime.retire()
        self.runtime.device.synchronize()
        for (side, layer), counts in self.model.window_counts.items():
            window = self.config.side_layers(side)[layer].reach
            assert window is not None
            got = counts.cpu().numpy()
            for i, sequence in enumerate(batch):
                for token in range(self.next_n):
                    context = self.counted[sequence.row] - self.next_n + token + 1
                    want = sum(p < window.sinks or p >= context - window.tokens for p in range(context))
                    assert got[i * self.next_n + token] == want, (side, layer, sequence, token)
