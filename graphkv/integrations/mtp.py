"""Multi-token prediction as a draft side: the extra decoder layers that DeepSeek-V3 and its kin are trained with.

transformers leaves these layers of a checkpoint out, so the caller brings them as modules:

    layer = DeepseekV32DecoderLayer(hf_model.config, layer_idx=61)         # with the checkpoint's layer 61 loaded
    draft = MtpDraft(hf_model, [layer], project=eh_proj, token_norm=enorm, state_norm=hnorm, head_norm=shared_head.norm)
    model = TransformersModel(hf_model, max_rows=32, draft=draft)
    runtime = DecodeRuntime(model.cache_config(), model, next_n=3, max_rows=32, max_seq_len=4096, memory_bytes=8 << 30)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphkv.config import LayerSpec
from graphkv.errors import InvalidValue
from graphkv.integrations._dsa_kernels import DsaKernels
from graphkv.integrations._dsa_layer import LayerStack
from graphkv.integrations.speculation import Proposal
from graphkv.integrations.transformers import INDEX_ROPE, check_layer
from graphkv.step import StepContext


class MtpDraft:
    """Embeds the next token, joins it with the state, runs the layers, and reads the target's head.

    Args:
        model: the target, whose embedding, rotary embedding and head are shared.
        layers: decoder layers of the target's family.
        project: [.., 2 * hidden_size] -> [.., hidden_size], of the normed embedding and the normed state.
        token_norm, state_norm: norms of the two.
        head_norm: norm before the head.

    Raises:
        InvalidValue: no layers.
        UnsupportedCombination: a layer that cannot be captured.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        *,
        project: nn.Module,
        token_norm: nn.Module,
        state_norm: nn.Module,
        head_norm: nn.Module,
    ) -> None:
        if not layers:
            raise InvalidValue("a draft needs at least one decoder layer, got none")
        for number, layer in enumerate(layers):
            check_layer(layer, number)
        self._stack = LayerStack(layers, model.model.rotary_emb, INDEX_ROPE[model.config.model_type])
        self._embed, self._head = model.model.embed_tokens, model.lm_head
        self._project, self._head_norm = project, head_norm
        self._token_norm, self._state_norm = token_norm, state_norm

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._stack.specs

    def __call__(
        self, step: StepContext, kernels: DsaKernels, token: torch.Tensor, state: torch.Tensor, at: torch.Tensor
    ) -> Proposal:
        """The likeliest tokens, see `DraftModel`."""
        joined = torch.cat([self._token_norm(self._embed(token)), self._state_norm(state)], dim=-1)
        state = self._stack(self._project(joined), kernels, step)[at]
        return Proposal(self._head(self._head_norm(state)).argmax(dim=-1), state)
