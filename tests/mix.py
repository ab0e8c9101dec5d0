"""A small sparse-attention model and a workload that run on V1 and on V2 alike, in every byte format.

What it writes follows from (token, position, layer), and the token it samples from the positions that the indexer
selected, so one wrong byte of index K sends the two ends apart.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Any

import numpy as np
import torch

from graphkv import ops
from graphkv.baseline.runner import V1Runner
from graphkv.config import CacheConfig, LayerSpec
from graphkv.layout import Role, Side
from graphkv.metadata import StepMetadata
from graphkv.runtime import DecodeRuntime
from graphkv.selection.subpages import split_page_table, split_pages
from graphkv.sequence import Sequence
from graphkv.step import StepContext, StepOutput

POSITIONS = 192  # more than a row can hold
VOCABULARY, RANK, ROPE, HEAD_DIM, HEADS, SELECTED = 97, 128, 16, 128, 2, 5
Runner = DecodeRuntime | V1Runner


def mix_config(latent: str, index_k: str, *, draft: bool = False, **options: Any) -> CacheConfig:
    """Three layers, of which one shares another's top-k; two draft layers where asked."""
    layers = (LayerSpec("full"), LayerSpec("shared"), LayerSpec("full"))
    return CacheConfig(
        layers=layers,
        draft_layers=layers[:2] if draft else (),
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        index_head_dim=HEAD_DIM,
        index_heads=HEADS,
        latent=latent,
        index_k=index_k,
        block_size=16,
        **options,
    )


class MixModel:
    """Stores in every layer, selects in the last full one, samples by what was selected.

    Args:
        index_page_size: tokens of a page of index K as this model writes and reads it, block_size by default.
    """

    def __init__(self, config: CacheConfig, device: torch.device, index_page_size: int | None = None) -> None:
        self.config = config
        self.page_size = config.block_size if index_page_size is None else index_page_size
        random = torch.Generator().manual_seed(1)
        widths = (HEAD_DIM, RANK, ROPE, HEADS * HEAD_DIM, HEADS)
        self.tables = [torch.randn(VOCABULARY, width, generator=random).to(device) for width in widths]
        self.places = [torch.randn(POSITIONS, width, generator=random).to(device) for width in widths[:3]]
        self.primes = torch.tensor([31, 37, 41, 43, 47], device=device)

    def __call__(self, step: StepContext) -> StepOutput:
        target = step.metadata
        ids = target.token_ids
        self._store(step, target, ids)
        if Side.DRAFT in self.config.sides:
            draft = step.derive(Side.DRAFT)
            with step.side(Side.DRAFT):
                self._store(step, draft, ids)
        sampled = (self._select(step, target, ids) + ids) % VOCABULARY
        later = torch.arange(step.next_n, device=ids.device)
        if step.kind == "prefill" or step.next_n == 1:
            last = target.query_start[1:].long() - 1
            return StepOutput((sampled[last.clamp_min(0)][:, None] + later) % VOCABULARY)
        accepted = 1 + ids.view(step.rows, step.next_n)[:, 0] % step.next_n
        following = sampled.view(step.rows, step.next_n).gather(1, (accepted - 1)[:, None])
        return StepOutput((following + later) % VOCABULARY, accepted.int())

    def _store(self, step: StepContext, live: StepMetadata, ids: torch.Tensor) -> None:
        config = self.config
        for layer, spec in enumerate(config.side_layers(live.side)):
            # No two positions have equal keys, so no top-k hangs on how a tie was rounded.
            of_token = zip(self.tables[:3], self.places, strict=True)
            k, c, rope = ((table[ids] + place[live.position]) * (1 + layer) for table, place in of_token)
            pages = step.pools.view(live.side, Role.LATENT, layer)
            ops.store_latent(c, rope, pages, live.latent_slot, config.latent, config.latent_scale)
            if spec.owns(Role.INDEX_K):
                pages = split_pages(step.pools.view(live.side, Role.INDEX_K, layer), self.page_size)
                mode, floor = config.index_k_scale, config.index_k_amax_floor
                ops.store_index_k(k, pages, live.index_slot, config.index_k, mode, floor)

    def _select(self, step: StepContext, live: StepMetadata, ids: torch.Tensor) -> torch.Tensor:
        """i64 [T], a number that follows from the positions selected in layer 2."""
        scores = step.workspace("scores", (live.tokens, step.max_context), torch.float32)
        slot = step.workspace("slot", (live.tokens, SELECTED), torch.int32)
        position = step.workspace("position", (live.tokens, SELECTED), torch.int32)
        pages = split_pages(step.pools.view(Side.TARGET, Role.INDEX_K, 2), self.page_size)
        rows, columns = live.index_page_table.shape
        wide = columns * (self.config.block_size // self.page_size)
        table = step.workspace("split table", (rows, wide), torch.int32)
        split_page_table(live.index_page_table, self.config.block_size, self.page_size, table)
        q, weights = self.tables[3][ids].view(-1, HEADS, HEAD_DIM), self.tables[4][ids]
        context = (live.token_row, live.context_len)
        ops.paged_index_logits(q, weights, pages, table, *context, scores, self.config.index_k)
        lookup = (live.context_len, live.latent_page_table, live.token_row, self.config.block_size)
        ops.topk(scores, *lookup, slot, position)
        return ((position + 2) * self.primes).sum(1)


def run_workload(runner: Runner) -> tuple[list[Sequence], list[list[list[int]]]]:
    """Ragged prefills, joins, leaves, rewinds, appends, and a prompt that begins as another's does.

    Returns:
        The open sequences, and the tokens of each step. V2 finds the common beginning cached, V1 computes it again.
    """
    steps: list[int] = []
    rng = np.random.default_rng(5)

    def start(*sizes: int, begin: AbstractSequence[int] = ()) -> list[Sequence]:
        made = [runner.open([*begin, *rng.integers(0, VOCABULARY, size)]) for size in sizes]
        steps.append(runner.prefill(made))
        return made

    a, b = start(5, 70)
    steps += [runner.step([b, a]) for _ in range(6)]
    (c,) = start(16)
    steps += [runner.step([c, a, b]) for _ in range(4)]
    runner.rewind(b, 9)
    runner.close(a)
    (d,) = start(20, begin=b.tokens[:43].tolist())
    steps += [runner.step([d, b, c]) for _ in range(9)]
    runner.retire()
    runner.append(c, rng.integers(0, VOCABULARY, 20))
    steps.append(runner.prefill([c]))
    steps += [runner.step([c, d, b]) for _ in range(3)]
    results = [runner.results(step).tokens.tolist() for step in steps]
    return [b, c, d], results


def gathered(
    runner: Runner, sequences: list[Sequence], index_page_size: int | None = None
) -> dict[tuple[Side, Role, int], np.ndarray]:
    """All index K and latents of the sequences' valid tokens, as bytes, read through each end's own tables."""
    runner.device.synchronize()
    config, device = runner.config, runner.device.torch
    lengths = [sequence.length for sequence in sequences]
    table = np.zeros((len(sequences), runner.manager.max_blocks), np.int32)
    if isinstance(runner, V1Runner):
        runner.manager.block_tables([sequence.row for sequence in sequences], table)
    else:
        table[:] = runner.manager.block_table[[sequence.row for sequence in sequences]]
    start = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    found = {}
    for side in config.sides:
        for role in Role:
            for layer, spec in enumerate(config.side_layers(side)):
                if spec.owns(role):
                    pages = runner.pools.view(side, role, layer)
                    page_table = torch.from_numpy(table * runner.pools.page_scale(side, role)).to(device)
                    if role is Role.INDEX_K and index_page_size is not None:
                        page_table = split_page_table(page_table, config.block_size, index_page_size)
                        pages = split_pages(pages, index_page_size)
                    gather = _index_k if role is Role.INDEX_K else _latent
                    found[side, role, layer] = gather(config, pages, page_table, start, lengths)
    return found


def _index_k(config: CacheConfig, pages: Any, table: Any, start: Any, lengths: list[int]) -> np.ndarray:
    layout = config.page_layout(Role.INDEX_K)
    values = pages.new_full((sum(lengths), layout.value_bytes), 0xA5)
    scales = pages.new_full((sum(lengths), layout.scale_bytes), 0xA5)
    ops.gather_index_k(pages, table, start, values, scales, config.index_k)
    return torch.cat([values, scales], dim=1).cpu().numpy()


def _latent(config: CacheConfig, pages: Any, table: Any, start: Any, lengths: list[int]) -> np.ndarray:
    rows = []
    for row, length in enumerate(lengths):
        position = torch.arange(length, device=pages.device)
        page = table[row, position // config.block_size].long()
        rows.append(pages[page, position % config.block_size, 0])
    return torch.cat(rows).cpu().numpy()
