"""A model whose every written byte and every read can be foretold: the oracle of the runtime's tests.

Request r's token at position p has the id `r * 10_000 + p`, so each token names its request and its place. The model
writes that tag into each slot it is given, in every layer, role and side, and counts through the page tables how many
positions of its row hold the right tag; in a layer with a window, how many of the tokens that it reads. `Shadow` keeps
the image that the pools must then have, byte for byte: tags where a request wrote, the canary 0xA5 everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from graphkv import ops
from graphkv.config import CacheConfig, LayerSpec
from graphkv.layout import Role, Side
from graphkv.metadata import StepMetadata
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch, Sequence
from graphkv.step import StepContext, StepOutput

PER_REQUEST = 10_000
WIDTH = 8  # values of a latent's lora part, of its rope part, and of an index key


def probe_config(*, block_size: int = 16, layers: str = "FSF", draft: str = "", **options: object) -> CacheConfig:
    """A small fp32 cache; F is a full indexer, S a shared one."""
    spec = {"F": LayerSpec("full"), "S": LayerSpec("shared")}
    return CacheConfig(
        layers=tuple(spec[c] for c in layers),
        draft_layers=tuple(spec[c] for c in draft),
        kv_lora_rank=WIDTH,
        qk_rope_head_dim=WIDTH,
        index_head_dim=WIDTH,
        latent="fp32",
        index_k="fp32",
        block_size=block_size,
        **options,
    )


def accepted_of(token: int, next_n: int) -> int:
    """How many query tokens the probe keeps of a row whose first one is `token`."""
    return 1 + (token * 7 + token // 3) % next_n


class ProbeModel:
    """Writes tags, counts tags, continues each request by its next token.

    Args:
        draft_prompts: whether prompts are written on the draft side, too.
    """

    def __init__(
        self, config: CacheConfig, max_tokens: int, device: torch.device, *, draft_prompts: bool = False
    ) -> None:
        self.config, self.draft_prompts = config, draft_prompts
        self.counts = {side: torch.zeros(max_tokens, dtype=torch.int32, device=device) for side in config.sides}
        self.window_counts = {
            (side, layer): torch.zeros(max_tokens, dtype=torch.int32, device=device)
            for side in config.sides
            for layer, spec in enumerate(config.side_layers(side))
            if spec.window is not None
        }
        self.workspace_addresses: set[int] = set()

    def __call__(self, step: StepContext) -> StepOutput:
        target = step.metadata
        self._visit(step, target, target.token_ids)
        last = target.query_start[1:].long() - 1
        if Side.DRAFT in self.config.sides and (step.kind == "decode" or self.draft_prompts):
            draft = step.derive(Side.DRAFT)
            with step.side(Side.DRAFT):
                self._visit(step, draft, target.token_ids)
        if step.kind == "prefill":
            following = target.token_ids[last] + 1
            return StepOutput(following[:, None] + torch.arange(step.next_n, device=following.device))
        ids = target.token_ids.view(step.rows, step.next_n)
        accepted = 1 + (ids[:, 0] * 7 + ids[:, 0] // 3) % step.next_n
        following = ids.gather(1, (accepted - 1)[:, None]) + 1
        tokens = following + torch.arange(step.next_n, device=ids.device)
        return StepOutput(tokens, None if step.next_n == 1 else accepted.to(torch.int32))

    def _visit(self, step: StepContext, live: StepMetadata, token_ids: torch.Tensor) -> None:
        scratch = step.workspace(f"tag {live.side}", (live.tokens, 2 * WIDTH), torch.float32)
        self.workspace_addresses.add(scratch.data_ptr())
        for layer, spec in enumerate(self.config.side_layers(live.side)):
            live = step.metadata_for(layer)
            scratch[:, 0::2] = token_ids[:, None].float()
            scratch[:, 1::2] = live.position[:, None].float() + 1000.0 * layer
            pages = step.pools.view(live.side, Role.LATENT, layer)
            ops.store_latent(scratch[:, :WIDTH], scratch[:, WIDTH:], pages, live.latent_slot, "fp32")
            if spec.owns(Role.INDEX_K):
                pages = step.pools.view(live.side, Role.INDEX_K, layer)
                ops.store_index_k(scratch[:, :WIDTH].contiguous(), pages, live.index_slot, "fp32", "pow2", 1e-4)
            if spec.window is not None:
                self.window_counts[live.side, layer][: live.tokens] = self._count_window(step, live, layer, token_ids)
        if live.window is None:
            self.counts[live.side][: live.tokens] = self._count(step, live, token_ids)

    def _count_window(self, step: StepContext, live: StepMetadata, layer: int, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 [T]: how many of the tokens that the layer reads hold their tag, less 1000 for each that does not."""
        assert live.window is not None
        window, sinks = live.window.tokens, live.window.sinks
        pages = step.pools.view(live.side, Role.LATENT, layer)
        slot = step.workspace(f"window {live.side} {layer}", (live.tokens, window + sinks), torch.int32)
        lookup = live.context_len, live.latent_page_table, live.token_row
        ops.window_slots(*lookup, pages.shape[1], window, sinks, slot)
        tags = pages.view(torch.float32).view(-1, 2 * WIDTH)[slot.clamp_min(0).long(), 0]
        entry = torch.arange(window + sinks, device=slot.device)
        start = (live.context_len - window).clamp_min(0)[:, None]
        first = start.clamp_max(sinks)
        position = torch.where(entry < first, entry, start + entry - first)
        right = (slot >= 0) & (tags == (token_ids - live.position)[:, None].float() + position)
        wrong = (slot >= 0) & ~right | (slot < 0) & (position < live.context_len[:, None])
        return (right.sum(1) - 1000 * wrong.sum(1)).to(torch.int32)

    def _count(self, step: StepContext, live: StepMetadata, token_ids: torch.Tensor) -> torch.Tensor:
        """int32 [T]: how many of the token's context positions hold their tag in the last layer, through the table."""
        pages = step.pools.view(live.side, Role.LATENT, len(self.config.side_layers(live.side)) - 1)
        size, columns = pages.shape[1], live.latent_page_table.shape[1]
        records = pages.view(torch.float32).view(-1, 2 * WIDTH)
        offset = torch.arange(size, device=records.device)
        slots = (live.latent_page_table[:, :, None].long() * size + offset).view(live.rows, columns * size)
        tags = records[slots, 0][live.token_row.long()]
        position = torch.arange(columns * size, device=records.device)
        right = tags == (token_ids - live.position)[:, None].float() + position
        return (right & (position < live.context_len[:, None])).sum(1).to(torch.int32)


class Shadow:
    """Drives a runtime and keeps the image that its pools must have."""

    def __init__(self, runtime: DecodeRuntime) -> None:
        self.runtime, self.config, self.next_n = runtime, runtime.config, runtime.next_n
        self.images: dict[tuple[Side, Role], np.ndarray] = {}
        for side in self.config.sides:
            for role in Role:
                pool = runtime.pools.pool(side, role)
                pool.data.fill_(0xA5)
                self.images[side, role] = np.full(pool.data.numel(), 0xA5, np.uint8)
        self.request: dict[Sequence, int] = {}
        self.length: dict[Sequence, int] = {}

    def open(self, request: int, tokens: int) -> Sequence:
        sequence = self.runtime.open(np.arange(tokens) + request * PER_REQUEST)
        self.request[sequence], self.length[sequence] = request, 0
        return sequence

    def prefill(self, sequences: Iterable[Sequence]) -> int:
        sequences = list(sequences)
        ends = [int(self.runtime.known_tokens(s).size) for s in sequences]
        step = self.runtime.prefill(sequences)
        for sequence, end in zip(sequences, ends, strict=True):
            self._wrote(sequence, self.length[sequence], end, (Side.TARGET,))
            self.length[sequence] = end
        return step

    def step(self, sequences: Iterable[Sequence] | Batch) -> int:
        batch = sequences if isinstance(sequences, Batch) else Batch(list(sequences))
        step = self.runtime.step(batch)
        for sequence in batch:
            length = self.length[sequence]
            self._wrote(sequence, length, length + self.next_n, self.config.sides)
            token = self.request[sequence] * PER_REQUEST + length
            self.length[sequence] = length + accepted_of(token, self.next_n)
        return step

    def _wrote(self, sequence: Sequence, begin: int, end: int, sides: Iterable[Side]) -> None:
        table = self.runtime.manager.block_table[sequence.row]
        size = self.config.block_size
        for position in range(begin, end):
            block, offset = int(table[position // size]), position % size
            assert block > 0
            token = self.request[sequence] * PER_REQUEST + position
            for side in sides:
                for layer, spec in enumerate(self.config.side_layers(side)):
                    tag = np.array([token, position + 1000.0 * layer] * WIDTH, np.float32).view(np.uint8)
                    for role, record in ((Role.LATENT, tag), (Role.INDEX_K, tag[: tag.size // 2])):
                        if spec.owns(role):
                            pages = self.config.page_scale(side, role)
                            page = block * pages + self.config.layer_offset(side, role, layer)
                            start = (page * size + offset) * record.size
                            self.images[side, role][start : start + record.size] = record

    def check(self) -> None:
        """Every byte of every pool is as foretold, every sequence's tokens too, and the host's state is sound."""
        self.runtime.retire()
        self.runtime.device.synchronize()
        for (side, role), image in self.images.items():
            data = self.runtime.pools.pool(side, role).data.cpu().numpy()
            bad = np.flatnonzero(data != image)
            assert not bad.size, f"{side} {role}: {bad.size} bytes differ, first at {bad[0]}"
        for sequence, length in self.length.items():
            if sequence.is_open:
                known = sequence.tokens
                want = np.arange(known.size) + self.request[sequence] * PER_REQUEST
                np.testing.assert_array_equal(known, want)
                assert sequence.length == length, sequence
        self.runtime.check()

    def counted(self, model: ProbeModel, sequences: Iterable[Sequence], side: Side = Side.TARGET) -> list[int]:
        """Tags that each sequence's last query token of the last decode step found."""
        counts = model.counts[side].cpu().numpy()
        return [int(counts[(i + 1) * self.next_n - 1]) for i, _ in enumerate(sequences)]


def probe_runtime(
    device: torch.device | str, config: CacheConfig | None = None, **options: object
) -> tuple[DecodeRuntime, ProbeModel, Shadow]:
    """A runtime around a ProbeModel, its pools all canary."""
    config = probe_config() if config is None else config
    settings: dict[str, object] = {"max_rows": 4, "max_seq_len": 112, "num_blocks": 40, "prefill_chunk": 48} | options
    model = ProbeModel(config, 512, torch.device(device))
    runtime = DecodeRuntime(config, model, device=device, **settings)
    return runtime, model, Shadow(runtime)
