"""The layers of a Hugging Face DSA model, run on graphkv's pools and metadata.

A layer's own modules do the projections and norms, and the functions of its own module do the rotation, so that a
layer says what its family says. Only where keys and values live, how tokens are scored and chosen, and the absorbed
form of the attention are graphkv's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from graphkv import ops
from graphkv.config import CacheConfig, Indexer, LayerSpec
from graphkv.integrations._dsa_kernels import DsaKernels, KernelPass, Selection
from graphkv.integrations._experts import mixture
from graphkv.metadata import StepMetadata
from graphkv.step import StepContext

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Observer(Protocol):
    """Watches what a model decides, e.g. to compare it with another run. Called in decode and prefill; in decode the
    calls are captured, so they may only move bytes between tensors of fixed address."""

    def begin(self, step: StepContext) -> None:
        """A step begins."""

    def selected(self, layer: int, position: torch.Tensor) -> None:
        """A full indexer chose: int32 [T, k] positions, -1 padded."""

    def routed(self, layer: int, experts: torch.Tensor) -> None:
        """A layer's router chose: int64 [T, experts a token]."""

    def answered(self, token: torch.Tensor, logits: torch.Tensor) -> None:
        """The logits [N, vocab] that the step computed, of the tokens int64 [N] of the batch."""


class LayerInputs(NamedTuple):
    """What every layer of a pass reads: rotation of each token, [T, qk_rope_head_dim], and the pass's kernels."""

    cos: torch.Tensor
    sin: torch.Tensor
    kernels: KernelPass


class LayerStack:
    """Decoder layers over the layers of a side: the model's own over the target's, a draft model's over the draft's.

    Args:
        layers: the model's decoder layers.
        rotary: the model's rotary embedding.
        index_rope: name of the rotation that the family's indexer uses, in the attention's own module.
    """

    def __init__(self, layers: Iterable[Any], rotary: Any, index_rope: str) -> None:
        self.layers = list(layers)
        self.rotary = rotary
        self.attentions = [
            SparseAttention(layer.self_attn, number, index_rope) for number, layer in enumerate(self.layers)
        ]

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """What each layer owns of a cache."""
        return tuple(LayerSpec(Indexer.SHARED if each.indexer is None else Indexer.FULL) for each in self.attentions)

    def __call__(
        self, hidden: torch.Tensor, kernels: DsaKernels, step: StepContext, observer: Observer | None = None
    ) -> torch.Tensor:
        """The hidden state [T, hidden_size] of the tokens of the step's current side, before and after all layers."""
        cos, sin = self.rotary(hidden, position_ids=step.metadata.position.unsqueeze(0))
        inputs = LayerInputs(cos.squeeze(0), sin.squeeze(0), KernelPass(kernels, step))
        selection: Selection | None = None
        for attention, layer in zip(self.attentions, self.layers, strict=True):
            attended, selection = attention(layer.input_layernorm(hidden), inputs, kernels.config, selection)
            if observer is not None and attention.indexer is not None:
                observer.selected(attention.layer, selection.position)
            hidden = hidden + attended
            normed = layer.post_attention_layernorm(hidden)
            if not hasattr(layer.mlp, "experts"):
                hidden = hidden + layer.mlp(normed)
                continue
            routed = None if observer is None else partial(observer.routed, attention.layer)
            hidden = hidden + mixture(layer.mlp, normed, capturable=step.kind == "decode", routed=routed)
        return hidden


class SparseAttention:
    """MLA attention over the tokens that an indexer chose, in the absorbed form.

    Args:
        attention: the model's attention module, with an `indexer` or, on a layer that shares its predecessor's, None.
        layer: its number on its side.
        index_rope: see `LayerStack`.
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
        self, hidden: torch.Tensor, inputs: LayerInputs, config: CacheConfig, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        """hidden [T, hidden_size] -> the attention's output, same shape, and the selection it used."""
        attention, kernels, metadata = self.attention, inputs.kernels, inputs.kernels.metadata
        nope, rope, rank = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.kv_lora_rank
        pages = kernels.latent_pages(self.layer)

        query_latent = attention.q_a_layernorm(attention.q_a_proj(hidden))
        query = attention.q_b_proj(query_latent).view(hidden.shape[0], -1, nope + rope)
        query_nope, query_rope = query.split([nope, rope], dim=-1)
        latent, key_rope = attention.kv_a_proj_with_mqa(hidden).split([rank, rope], dim=-1)
        latent = attention.kv_a_layernorm(latent)
        query_rope, key_rope = self.rotate(query_rope, key_rope.unsqueeze(1), inputs.cos, inputs.sin, unsqueeze_dim=1)
        key_rope = key_rope.squeeze(1)
        if self.indexer is None:
            ops.store_latent(latent, key_rope, pages, metadata.latent_slot, config.latent, config.latent_scale)
        else:
            index_query, key, weights = self.indexer.project(hidden, query_latent, inputs)
            index_pages = kernels.index_pages(self.layer)
            _store(latent, key_rope, pages, key, index_pages, metadata, config)
            selection = kernels.select(index_query, weights, index_pages)
        assert selection is not None  # CacheConfig has made sure that layer 0 is a full indexer

        # kv_b_proj maps a latent to every head's nope key and value; applied to the query and to the output instead,
        # it leaves one shared key per token: the latent itself.
        up = attention.kv_b_proj.weight.view(query.shape[1], nope + attention.v_head_dim, rank)
        absorbed = torch.bmm(query_nope.transpose(0, 1), up[:, :nope]).transpose(0, 1)
        query = torch.cat([absorbed, query_rope], dim=-1)
        attended = kernels.attend(query, pages, selection.slot, attention.scaling)
        values = torch.bmm(attended.transpose(0, 1), up[:, nope:].transpose(1, 2)).transpose(0, 1)
        return attention.o_proj(values.reshape(hidden.shape[0], -1)), selection


def _store(
    latent: torch.Tensor,
    rope: torch.Tensor,
    pages: torch.Tensor,
    key: torch.Tensor,
    index_pages: torch.Tensor,
    metadata: StepMetadata,
    config: CacheConfig,
) -> None:
    """Stores the tokens' latents and index keys: in one kernel where pages of both roles hold equally many tokens."""
    scales: dict[str, Any] = {"scale_mode": config.index_k_scale, "amax_floor": config.index_k_amax_floor}
    to_latents = (latent, rope, pages, metadata.latent_slot)
    to_keys = (key, index_pages, metadata.index_slot)
    if pages.shape[1] == index_pages.shape[1]:
        formats = (config.latent, config.index_k)
        ops.store_layer(*to_latents, *to_keys, *formats, latent_scale=config.latent_scale, **scales)
    else:
        ops.store_latent(*to_latents, config.latent, config.latent_scale)
        ops.store_index_k(*to_keys, config.index_k, **scales)


class SparseIndexer:
    """What a layer's tokens are scored with."""

    def __init__(self, indexer: Any, rotate: Rotate) -> None:
        self.indexer = indexer
        self.rotate = rotate

    def project(
        self, hidden: torch.Tensor, query_latent: torch.Tensor, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated query and key, and weights with all constants in them.

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
