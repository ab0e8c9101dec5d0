"""One attention layer of a Hugging Face DSA model, run on graphkv's pools and metadata.

The layer's own modules do the projections and norms, and the functions of its own module do the rotation, so that a
layer says what its family says. Only where keys and values live, how tokens are scored and chosen, and the absorbed
form of the attention are graphkv's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from graphkv import codecs, ops
from graphkv.config import CacheConfig
from graphkv.integrations.decode_kernels import DecodeKernels, KernelChoice, OwnKernels
from graphkv.layout import IndexKFormat, Role, Side
from graphkv.step import StepContext

PREFILL_SCORE_BYTES = 64 << 20
"""Upper bound of the fp32 per-head scores that prefill holds at a time; more query tokens are scored in turns."""

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Selection(NamedTuple):
    """The tokens that each query token attends to: int32 [T, k], ascending by position, -1 padded."""

    slot: torch.Tensor
    position: torch.Tensor


class RowSpan(NamedTuple):
    """A row of a prefill batch: its query tokens `[first, last)` and, in the gathered keys, `[start, stop)`."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What every layer of a step reads.

    Attributes:
        cos, sin: rotation of each token, [T, qk_rope_head_dim] in the model's type.
        spans: the rows of a prefill batch on the host, None in decode (which reads nothing on the host).
        start: int32 [rows + 1], first gathered key of each row; None in decode.
        kernels: whose kernels score, select and attend.
    """

    step: StepContext
    config: CacheConfig
    cos: torch.Tensor
    sin: torch.Tensor
    spans: tuple[RowSpan, ...] | None
    start: torch.Tensor | None
    kernels: DecodeKernels

    @classmethod
    def of(
        cls, step: StepContext, config: CacheConfig, cos: torch.Tensor, sin: torch.Tensor, choice: KernelChoice
    ) -> LayerInputs:
        """Reads a prefill batch's row bounds to the host, once a step. A prefill runs on graphkv's own kernels."""
        own = OwnKernels(config.index_k, config.latent, config.latent_scale, config.kv_lora_rank, config.block_size)
        if step.kind == "decode":
            return cls(step, config, cos, sin, None, None, choice.kernels(own))
        metadata = step.metadata
        start = torch.zeros(step.rows + 1, dtype=torch.int32, device=cos.device)
        torch.cumsum(metadata.seq_len, 0, dtype=torch.int32, out=start[1:])
        queries, keys = torch.stack([metadata.query_start, start]).tolist()
        spans = tuple(RowSpan(*q, *k) for q, k in zip(pairwise(queries), pairwise(keys), strict=True))
        return cls(step, config, cos, sin, spans, start, DecodeKernels(own.score, own.select, own.attend))


class SparseAttention:
    """MLA attention over the tokens that an indexer chose, in the absorbed form.

    Args:
        attention: the model's attention module, with an `indexer` or, on a layer that shares its predecessor's, None.
        layer: its number on the target side.
        index_rope: name of the rotation that the family's indexer uses, in the attention's own module.
    """

    def __init__(self, attention: Any, layer: int, index_rope: str) -> None:
        family = sys.modules[type(attention).__module__]
        self.attention = attention
        self.layer = layer
        self.rotate: Rotate = family.apply_rotary_pos_emb_interleave
        self.indexer = (
            None if attention.indexer is None else SparseIndexer(attention.indexer, getattr(family, index_rope))
        )

    def __call__(
        self, hidden: torch.Tensor, inputs: LayerInputs, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        """hidden [T, hidden_size] -> the attention's output, same shape, and the selection it used."""
        attention, config, metadata = self.attention, inputs.config, inputs.step.metadata
        nope, rope, rank = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank
        pages = inputs.step.pools.view(Side.TARGET, Role.LATENT, self.layer)

        query_latent = attention.q_a_layernorm(attention.q_a_proj(hidden))
        query = attention.q_b_proj(query_latent).view(hidden.shape[0], -1, nope + rope)
        query_nope, query_rope = query.split([nope, rope], dim=-1)
        latent, key_rope = attention.kv_a_proj_with_mqa(hidden).split([rank, rope], dim=-1)
        latent = attention.kv_a_layernorm(latent)
        query_rope, key_rope = self.rotate(query_rope, key_rope.unsqueeze(1), inputs.cos, inputs.sin, unsqueeze_dim=1)
        to_pages = (latent, key_rope.squeeze(1), pages, metadata.latent_slot)
        if self.indexer is None:
            ops.store_latent(*to_pages, config.latent, config.latent_scale)
        else:
            index_query, key, weights = self.indexer.project(hidden, query_latent, inputs)
            index_pages = inputs.step.pools.view(Side.TARGET, Role.INDEX_K, self.layer)
            ops.store_layer(
                *to_pages,
                key,
                index_pages,
                metadata.index_slot,
                config.latent,
                config.index_k,
                latent_scale=config.latent_scale,
                scale_mode=config.index_k_scale,
                amax_floor=config.index_k_amax_floor,
            )
            selection = self.indexer.select(index_query, weights, index_pages, inputs)
        assert selection is not None  # CacheConfig has made sure that layer 0 is a full indexer

        # kv_b_proj maps a latent to every head's nope key and value; applied to the query and to the output instead,
        # it leaves one shared key per token: the latent itself.
        up = attention.kv_b_proj.weight.view(query.shape[1], nope + attention.v_head_dim, rank)
        absorbed = torch.bmm(query_nope.transpose(0, 1), up[:, :nope]).transpose(0, 1)
        query = torch.cat([absorbed, query_rope], dim=-1)
        attended = torch.empty(*query.shape[:2], rank, dtype=query.dtype, device=query.device)
        inputs.kernels.attend(inputs.step, query, pages, selection.slot, attention.scaling, attended)
        values = torch.bmm(attended.transpose(0, 1), up[:, nope:].transpose(1, 2)).transpose(0, 1)
        return attention.o_proj(values.reshape(hidden.shape[0], -1)), selection


class SparseIndexer:
    """Scores the row's tokens against each query token and selects the best."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        self.indexer = indexer
        self.rotate = rotate

    def project(
        self, hidden: torch.Tensor, query_latent: torch.Tensor, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a layer's tokens are scored with: rotated query and key, and weights with all constants in them.

        hidden [T, hidden_size], query_latent [T, q_lora_rank] -> [T, heads, D], [T, D], fp32 [T, heads].
        """
        indexer = self.indexer
        rope, width = indexer.qk_rope_head_dim, indexer.head_dim
        query = indexer.wq_b(query_latent).view(hidden.shape[0], indexer.n_heads, width)
        key = indexer.k_norm(indexer.wk(hidden)).unsqueeze(1)
        query_rope, query_rest = query.split([rope, width - rope], dim=-1)
        key_rope, key_rest = key.split([rope, width - rope], dim=-1)
        query_rope, key_rope = self.rotate(query_rope, key_rope, inputs.cos, inputs.sin, unsqueeze_dim=1)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        return (
            torch.cat([query_rope, query_rest], dim=-1),
            torch.cat([key_rope, key_rest], dim=-1).squeeze(1),
            weights * (indexer.n_heads**-0.5 * indexer.softmax_scale),
        )

    def select(self, query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, inputs: LayerInputs) -> Selection:
        """The layer's selection, by what `project` gave and the keys that are in `pages`."""
        step, config = inputs.step, inputs.config
        if config.index_k is IndexKFormat.FP8:
            query, query_scale = codecs.quantise_query(query, config.index_k_scale, config.index_k_amax_floor)
            weights = weights * query_scale
        if inputs.spans is None:
            logits = inputs.kernels.score(step, query, weights, pages)
        else:
            logits = step.workspace("index_logits", (step.tokens, step.max_context), torch.float32)
            self._score_rows(query.float(), weights, pages, inputs, logits)
        shape = (step.tokens, config.index_topk)
        selection = Selection(*(step.workspace(f"topk_{part}", shape, torch.int32) for part in Selection._fields))
        inputs.kernels.select(step, logits, *selection)
        return selection

    def _score_rows(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        pages: torch.Tensor,
        inputs: LayerInputs,
        logits: torch.Tensor,
    ) -> None:
        """Prefill: gathers each row's keys into one contiguous range and scores them in dense products.

        Scores past a token's context are written too; top-k takes lengths and never reads them.
        """
        assert inputs.spans is not None
        assert inputs.start is not None
        config = inputs.config
        layout = config.page_layout(Role.INDEX_K)
        count = inputs.spans[-1].stop
        values = torch.empty(count, layout.value_bytes, dtype=torch.uint8, device=query.device)
        scales = torch.empty(count, layout.scale_bytes, dtype=torch.uint8, device=query.device)
        ops.gather_index_k(pages, inputs.step.metadata.index_page_table, inputs.start, values, scales, config.index_k)
        keys = codecs.decode_index_k(values, scales, config.index_k)
        for span in inputs.spans:
            row_keys = keys[span.start : span.stop].T
            turn = max(1, PREFILL_SCORE_BYTES // (4 * query.shape[1] * max(1, row_keys.shape[1])))
            for first in range(span.first, span.last, turn):
                tokens = slice(first, min(first + turn, span.last))
                scores = torch.matmul(query[tokens], row_keys).relu_()
                torch.matmul(weights[tokens].unsqueeze(1), scores, out=logits[tokens, : row_keys.shape[1]].unsqueeze(1))
