"""The kernels that the layers of a DSA model call, by the runtime's choice, over one side's pools and metadata."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from graphkv import codecs, ops
from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.integrations.peers.deepgemm import DeepGemmScorer
from graphkv.integrations.peers.flashinfer import FlashInferSelector
from graphkv.integrations.peers.flashmla import FlashMlaAttention
from graphkv.kernel_choice import IndexScorer, KernelChoice, LatentAttention, TokenSelector
from graphkv.layout import IndexKFormat, Role
from graphkv.selection.consumers import DeviceFacts
from graphkv.selection.subpages import split_page_table, split_pages
from graphkv.step import StepContext

PREFILL_SCORE_BYTES = 64 << 20
"""Upper bound of the fp32 per-head scores that prefill holds at a time; more query tokens are scored in turns."""


class Selection(NamedTuple):
    """The tokens that each query token attends to: int32 [T, k], -1 padded. Our own top-k sorts them by position."""

    slot: torch.Tensor
    position: torch.Tensor


class RowSpan(NamedTuple):
    """A row of a prefill batch: its query tokens `[first, last)` and, in the gathered keys, `[start, stop)`."""

    first: int
    last: int
    start: int
    stop: int


class DsaKernels:
    """The chosen kernels for one cache. Other libraries are imported here.

    Raises:
        LibraryMissing: a chosen one is not there.
    """

    def __init__(self, choice: KernelChoice, config: CacheConfig, device: torch.device) -> None:
        self.choice, self.config = choice, config
        facts = DeviceFacts.of(Device.of(device))
        self.scorer = DeepGemmScorer(config, facts) if choice.index_scorer is IndexScorer.DEEPGEMM else None
        self.select = FlashInferSelector() if choice.token_selector is TokenSelector.FLASHINFER else ops.topk
        self.attention = FlashMlaAttention() if choice.latent_attention is LatentAttention.FLASHMLA else None


class KernelPass:
    """One pass over the layers of the step's current side: what they share is worked out once, here.

    In prefill the rows' bounds are read on the host, once a pass; in decode nothing is.
    """

    def __init__(self, kernels: DsaKernels, step: StepContext) -> None:
        self.step, self.metadata = step, step.metadata
        self._kernels, self._config = kernels, kernels.config
        size = kernels.config.block_size
        self._index_page_size = kernels.choice.page_size(Role.INDEX_K, size)
        self._latent_page_size = kernels.choice.page_size(Role.LATENT, size)
        self._index_table = self._split_table(self.metadata.index_page_table)
        self._spans: tuple[RowSpan, ...] | None = None
        if step.kind == "prefill":
            self._start, self._spans = self._bounds()
        elif kernels.scorer is not None:
            self._score_plan = kernels.scorer.plan(step, self._index_table, self._index_page_size)
        if kernels.attention is not None:
            self._attention_plan = kernels.attention.plan(step)

    def _split_table(self, table: torch.Tensor) -> torch.Tensor:
        size = self._config.block_size
        if self._index_page_size == size:
            return table
        shape = (table.shape[0], table.shape[1] * size // self._index_page_size)
        out = self.step.workspace("index_subpages", shape, torch.int32)
        return split_page_table(table, size, self._index_page_size, out)

    def _bounds(self) -> tuple[torch.Tensor, tuple[RowSpan, ...]]:
        metadata = self.metadata
        start = torch.zeros(metadata.rows + 1, dtype=torch.int32, device=metadata.seq_len.device)
        torch.cumsum(metadata.seq_len, 0, dtype=torch.int32, out=start[1:])
        queries, keys = torch.stack([metadata.query_start, start]).tolist()
        return start, tuple(RowSpan(*q, *k) for q, k in zip(pairwise(queries), pairwise(keys), strict=True))

    # a layer's pages ------------------------------------------------------------------------------------------------

    def latent_pages(self, layer: int) -> torch.Tensor:
        """u8 [pages, page_size, 1, token_bytes] of a layer of this side, pages of the size that attention takes."""
        return self._pages(Role.LATENT, layer, self._latent_page_size)

    def index_pages(self, layer: int) -> torch.Tensor:
        """The same for index K and its scorer."""
        return self._pages(Role.INDEX_K, layer, self._index_page_size)

    def _pages(self, role: Role, layer: int, page_size: int) -> torch.Tensor:
        pages = self.step.pools.view(self.metadata.side, role, layer)
        return pages if page_size == self._config.block_size else split_pages(pages, page_size)

    # scores, selection, attention ---------------------------------------------------------------------------------

    def select(self, query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor) -> Selection:
        """A layer's selection, by the keys that are in its index K `pages`.

        query f32 or bf16 [T, heads, D], weights f32 [T, heads] with all constants in them.
        """
        step, config, metadata = self.step, self._config, self.metadata
        if self._spans is None and self._kernels.scorer is not None:
            logits = self._kernels.scorer(self._score_plan, query, weights, pages)
        else:
            logits = self._score(query, weights, pages)
        shape = (metadata.tokens, config.index_topk)
        selection = Selection(*(step.workspace(f"topk_{part}", shape, torch.int32) for part in Selection._fields))
        self._kernels.select(
            logits, metadata.context_len, metadata.latent_page_table, metadata.token_row, config.block_size, *selection
        )
        return selection

    def _score(self, query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        step, config, metadata = self.step, self._config, self.metadata
        if config.index_k is IndexKFormat.FP8:
            query, query_scale = codecs.quantise_query(query, config.index_k_scale, config.index_k_amax_floor)
            weights = weights * query_scale
        logits = step.workspace("index_logits", (metadata.tokens, step.max_context), torch.float32)
        if self._spans is None:
            rows = (self._index_table, metadata.token_row, metadata.context_len)
            ops.paged_index_logits(query, weights, pages, *rows, logits, config.index_k)
        else:
            self._score_rows(query.float(), weights, pages, self._spans, logits)
        return logits

    def _score_rows(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        pages: torch.Tensor,
        spans: tuple[RowSpan, ...],
        logits: torch.Tensor,
    ) -> None:
        """Prefill: gathers each row's keys into one contiguous range and scores them in dense products.

        Scores past a token's context are written too; top-k takes lengths and never reads them.
        """
        config = self._config
        layout = config.page_layout(Role.INDEX_K)
        count = spans[-1].stop
        values = torch.empty(count, layout.value_bytes, dtype=torch.uint8, device=query.device)
        scales = torch.empty(count, layout.scale_bytes, dtype=torch.uint8, device=query.device)
        ops.gather_index_k(pages, self._index_table, self._start, values, scales, config.index_k)
        keys = codecs.decode_index_k(values, scales, config.index_k)
        for span in spans:
            row_keys = keys[span.start : span.stop].T
            turn = max(1, PREFILL_SCORE_BYTES // (4 * query.shape[1] * max(1, row_keys.shape[1])))
            for first in range(span.first, span.last, turn):
                tokens = slice(first, min(first + turn, span.last))
                scores = torch.matmul(query[tokens], row_keys).relu_()
                torch.matmul(weights[tokens].unsqueeze(1), scores, out=logits[tokens, : row_keys.shape[1]].unsqueeze(1))

    def attend(
        self, query: torch.Tensor, pages: torch.Tensor, slot: torch.Tensor, softmax_scale: float
    ) -> torch.Tensor:
        """Attention over the selected latents: query [T, H, rank + rope] (absorbed) -> [T, H, rank], of its type."""
        config, rank = self._config, self._config.kv_lora_rank
        if self._kernels.attention is not None:
            return self._kernels.attention(self._attention_plan, query, pages, slot, softmax_scale, rank)
        out = torch.empty(*query.shape[:2], rank, dtype=query.dtype, device=query.device)
        ops.sparse_mla_decode(query, pages, slot, softmax_scale, config.latent, config.latent_scale, rank, out)
        return out
