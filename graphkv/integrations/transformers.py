"""Runs Hugging Face's `deepseek_v32` and `glm_moe_dsa` models (transformers 5.17 and newer) on graphkv.

    model = TransformersModel(hf_model, max_rows=32)
    config = model.cache_config(latent="bf16", index_k="fp8")
    runtime = DecodeRuntime(config, model, max_rows=32, max_seq_len=4096, memory_bytes=8 << 30)

The model's own `forward` cannot be captured: its cache grows by concatenation and its experts are looked up on the
host. So its layers are driven one by one: prefill and decode write keys to the pools at the slots in the metadata, and
decode reads nothing on the host. transformers itself is never imported here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from graphkv.config import CacheConfig
from graphkv.errors import InvalidValue, UnsupportedCombination
from graphkv.integrations._dsa_layer import LayerInputs, Selection, SparseAttention
from graphkv.integrations._experts import mixture
from graphkv.integrations.decode_kernels import KernelChoice
from graphkv.selection.consumers import IndexScorer, LatentAttention, TokenSelector
from graphkv.selection.requirements import Requirements
from graphkv.step import StepContext, StepOutput

INDEX_ROPE = {
    "deepseek_v32": "apply_rotary_pos_emb",  # halves
    "glm_moe_dsa": "apply_rotary_pos_emb_interleave",
}
"""Which rotation each family's indexer uses. Its attention always rotates interleaved pairs."""

HOST_ROPE = ("dynamic", "longrope")
"""Rope types that look at the longest position on the host to choose their frequencies."""

DTYPES = (torch.float32, torch.bfloat16)


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
        """The step's logits [N, vocab], of the tokens int64 [N] of the batch."""


class TransformersModel:
    """A Hugging Face DSA model as a step function for `graphkv.runtime.DecodeRuntime`.

    Args:
        model: a `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM` in fp32 or bf16, on the device that it is to run
            on. It is read, never changed.
        max_rows: most rows a step.
        observer: told what the model decides, see `Observer`.
        index_scorer, token_selector, latent_attention: whose kernels a decode step calls, see `KernelChoice`; by
            default graphkv's own. Pass `model.requirements` to the runtime, which then checks formats and device.

    Attributes:
        logits: [max_rows, vocab] in the type of lm_head, at a fixed address: the last step's, of each row's last token.

    Raises:
        UnsupportedCombination: another model family or type, or an option of it that cannot be captured.
        InvalidValue: not a model with layers and lm_head, or max_rows below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_rows: int,
        observer: Observer | None = None,
        index_scorer: IndexScorer | str = IndexScorer.GRAPHKV,
        token_selector: TokenSelector | str = TokenSelector.GRAPHKV,
        latent_attention: LatentAttention | str = LatentAttention.GRAPHKV,
    ) -> None:
        if max_rows < 1:
            raise InvalidValue(f"max_rows must be at least 1, got {max_rows}")
        check_supported(model)
        hf: Any = model
        self.model = hf
        self.observer = observer
        self.choice = KernelChoice(index_scorer, token_selector, latent_attention)
        index_rope = INDEX_ROPE[hf.config.model_type]
        self.attentions = [
            SparseAttention(layer.self_attn, number, index_rope) for number, layer in enumerate(hf.model.layers)
        ]
        head = hf.lm_head.weight
        self.logits = torch.zeros(max_rows, head.shape[0], dtype=head.dtype, device=head.device)

    def cache_config(self, **options: Any) -> CacheConfig:
        """The cache that this model needs, with formats and other options of `CacheConfig` replaced."""
        return CacheConfig.from_hf(self.model.config, **options)

    @property
    def requirements(self) -> Requirements:
        """What the chosen kernels ask of a cache, for `DecodeRuntime`'s argument of that name."""
        scorer, attention = IndexScorer(self.choice.index_scorer), LatentAttention(self.choice.latent_attention)
        return Requirements(index_scorer=scorer, latent_attention=attention)

    @torch.no_grad()
    def __call__(self, step: StepContext) -> StepOutput:
        """One step; its tokens are the likeliest ones.

        Raises:
            InvalidValue: more rows than `max_rows`; nothing was written.
            UnsupportedCombination: next_n above 1; these models come without a draft model to fill the other tokens.
        """
        if step.rows > self.logits.shape[0]:
            raise InvalidValue(
                f"a step of {step.rows} rows exceeds max_rows={self.logits.shape[0]} of this TransformersModel; build "
                "it with the runtime's max_rows"
            )
        if step.next_n != 1:
            raise UnsupportedCombination(
                f"next_n={step.next_n} with TransformersModel: the model has no draft side to propose the other "
                f"{step.next_n - 1} tokens; use next_n=1"
            )
        if self.observer is not None:
            self.observer.begin(step)
        hidden = self._layers(step)
        last = (step.metadata.query_start[1:].long() - 1).clamp_(min=0)
        logits = self.logits[: step.rows]
        logits.copy_(self.model.lm_head(self.model.model.norm(hidden[last])))
        if self.observer is not None:
            self.observer.answered(last, logits)
        return StepOutput(tokens=logits.argmax(dim=-1, keepdim=True))

    def _layers(self, step: StepContext) -> torch.Tensor:
        """The hidden state of every token after the last layer: [T, hidden_size]."""
        body, metadata, observer = self.model.model, step.metadata, self.observer
        hidden: torch.Tensor = body.embed_tokens(metadata.token_ids)
        cos, sin = body.rotary_emb(hidden, position_ids=metadata.position.unsqueeze(0))
        inputs = LayerInputs.of(step, step.pools.config, cos.squeeze(0), sin.squeeze(0), self.choice)
        selection: Selection | None = None
        for attention, layer in zip(self.attentions, body.layers, strict=True):
            attended, selection = attention(layer.input_layernorm(hidden), inputs, selection)
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


def check_supported(model: Any) -> None:
    """Raises if the adapter cannot run `model`; see `TransformersModel`."""
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in INDEX_ROPE:
        raise UnsupportedCombination(
            f"model_type {family!r} is not a DSA family that graphkv attaches to; known are {sorted(INDEX_ROPE)}"
        )
    if not (hasattr(model, "lm_head") and hasattr(getattr(model, "model", None), "layers")):
        raise InvalidValue(
            f"{type(model).__name__} has no lm_head over a stack of layers; pass the family's ...ForCausalLM model"
        )
    if config.q_lora_rank is None:
        raise UnsupportedCombination(
            "q_lora_rank None: the indexer reads the query latent, which a model without q_a_proj lacks; use a model "
            "with a q_lora_rank"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope in HOST_ROPE:
        raise UnsupportedCombination(
            f"rope_type {rope!r} picks its frequencies on the host by the longest position, so a captured step would "
            "keep those of the capture; use default, linear, llama3 or yarn"
        )
    for number, layer in enumerate(model.model.layers):
        _check_layer(layer, number)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedCombination(
            f"the model's parameters lie on {sorted(map(str, devices))}; a step runs on one device, move them together"
        )


def _check_layer(layer: Any, number: int) -> None:
    experts = getattr(layer.mlp, "experts", None)
    plain = {"self_attn.kv_b_proj": layer.self_attn.kv_b_proj.weight}
    if experts is not None:
        plain |= {f"mlp.experts.{name}": getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")}
    for name, weight in plain.items():
        dtype = getattr(weight, "dtype", None)
        if dtype not in DTYPES:
            raise UnsupportedCombination(
                f"layer {number}: {name} is {dtype}; its weight is read directly, so it must be float32 or bfloat16: "
                "load the model unquantised"
            )
    if getattr(experts, "_is_expert_parallel", False):
        raise UnsupportedCombination(
            f"layer {number}: its experts are spread over processes (expert parallel), whose exchange cannot be "
            "captured; load the model without expert parallelism"
        )
