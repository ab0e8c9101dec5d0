"""Runs Hugging Face's `deepseek_v32` and `glm_moe_dsa` models (transformers 5.17 and newer) on graphkv.

    model = TransformersModel(hf_model, max_rows=32)
    config = model.cache_config(latent="bf16", index_k="fp8")
    runtime = DecodeRuntime(config, model, max_rows=32, max_seq_len=4096, memory_bytes=8 << 30)

The model's own `forward` cannot be captured: its cache grows by concatenation and its experts are looked up on the
host. So its layers are driven one by one: prefill and decode write keys to the pools at the slots in the metadata, and
decode reads nothing on the host. transformers itself is never imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphkv.config import CacheConfig
from graphkv.errors import InvalidValue, UnsupportedCombination
from graphkv.integrations._dsa_kernels import DsaKernels
from graphkv.integrations._dsa_layer import LayerStack, Observer
from graphkv.integrations.speculation import DraftModel, Taken, accept, propose
from graphkv.step import StepContext, StepOutput

INDEX_ROPE = {
    "deepseek_v32": "apply_rotary_pos_emb",  # halves
    "glm_moe_dsa": "apply_rotary_pos_emb_interleave",
}
"""Which rotation each family's indexer uses. Its attention always rotates interleaved pairs."""

HOST_ROPE = ("dynamic", "longrope")
"""Rope types that look at the longest position on the host to choose their frequencies."""

DTYPES = (torch.float32, torch.bfloat16)


class TransformersModel:
    """A Hugging Face DSA model as a step function for `graphkv.runtime.DecodeRuntime`.

    It calls the kernels that the runtime's `requirements` choose, see `graphkv.kernel_choice`. With next_n above 1 a
    step verifies the row's drafts, keeps those that the model would have said itself, and lets `draft` propose more.

    Args:
        model: a `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM` in fp32 or bf16, on the device that it is to run
            on. It is read, never changed.
        max_rows: most rows a step.
        observer: told what the model decides, see `Observer`.
        draft: proposes tokens; needed for next_n above 1. See `graphkv.integrations.mtp` for one.

    Attributes:
        logits: [max_rows, vocab] in the type of lm_head, at a fixed address: the last step's, of each row's last token
            that it kept.

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
        draft: DraftModel | None = None,
    ) -> None:
        if max_rows < 1:
            raise InvalidValue(f"max_rows must be at least 1, got {max_rows}")
        check_supported(model)
        hf: Any = model
        self.model, self.observer, self.draft = hf, observer, draft
        self._stack = LayerStack(hf.model.layers, hf.model.rotary_emb, INDEX_ROPE[hf.config.model_type])
        head = hf.lm_head.weight
        self.logits = torch.zeros(max_rows, head.shape[0], dtype=head.dtype, device=head.device)
        self._kernels: DsaKernels | None = None

    def cache_config(self, **options: Any) -> CacheConfig:
        """The cache that this model and its draft need, with formats and other options of `CacheConfig` replaced."""
        layers = {} if self.draft is None else {"draft_layers": self.draft.layers}
        return CacheConfig.from_hf(self.model.config, **(layers | options))

    @torch.no_grad()
    def __call__(self, step: StepContext) -> StepOutput:
        """One step; its tokens are the likeliest ones.

        Raises:
            InvalidValue: more rows than `max_rows`; nothing was written.
            UnsupportedCombination: next_n above 1 without a draft model to fill the other tokens.
            LibraryMissing: the runtime requires a library's kernels, and it is not installed.
        """
        self._check(step)
        kernels = self.kernels(step)
        if self.observer is not None:
            self.observer.begin(step)
        hidden = self._stack(self.model.model.embed_tokens(step.metadata.token_ids), kernels, step, self.observer)
        hidden = self.model.model.norm(hidden)
        if step.kind == "decode" and step.next_n > 1:
            taken, following = self._verify(step, hidden)
        else:
            taken, following = self._sample(step, hidden)
        if self.draft is None:
            return StepOutput(tokens=taken.token.unsqueeze(1))
        accepted = taken.kept if step.kind == "decode" and step.next_n > 1 else None
        return StepOutput(propose(step, kernels, self.draft, hidden, following, taken), accepted)

    def kernels(self, step: StepContext) -> DsaKernels:
        """The kernels that the step's runtime chose; libraries are imported by the first step, which is no graph's."""
        known, device = self._kernels, self.logits.device
        if known is None or (known.choice, known.config) != (step.kernels, step.pools.config):
            known = self._kernels = DsaKernels(step.kernels, step.pools.config, device)
        return known

    def _check(self, step: StepContext) -> None:
        if step.rows > self.logits.shape[0]:
            raise InvalidValue(
                f"a step of {step.rows} rows exceeds max_rows={self.logits.shape[0]} of this TransformersModel; build "
                "it with the runtime's max_rows"
            )
        if step.next_n != 1 and self.draft is None:
            raise UnsupportedCombination(
                f"next_n={step.next_n} with TransformersModel(draft=None): there is nothing to propose the other "
                f"{step.next_n - 1} tokens; give a draft model, or use next_n=1"
            )
        if self.draft is not None and not step.pools.config.draft_layers:
            raise UnsupportedCombination(
                "TransformersModel with a draft model on a cache without draft_layers: its keys have no place; use "
                "the model's own cache_config()"
            )

    def _sample(self, step: StepContext, hidden: torch.Tensor) -> tuple[Taken, torch.Tensor]:
        """The likeliest token after each row's last; and of each token, the one that follows it."""
        metadata = step.metadata
        last = (metadata.query_start[1:].long() - 1).clamp_(min=0)
        logits = self.logits[: step.rows]
        logits.copy_(self.model.lm_head(hidden[last]))
        if self.observer is not None:
            self.observer.answered(last, logits)
        token = logits.argmax(dim=-1)
        following = metadata.token_ids.roll(-1).index_copy_(0, last, token)
        return Taken(metadata.query_start.diff(), token, last), following

    def _verify(self, step: StepContext, hidden: torch.Tensor) -> tuple[Taken, torch.Tensor]:
        """The drafts that the model says itself, and its own token behind them; and what it says after each token."""
        head = self.model.lm_head.weight
        logits = step.workspace("verified_logits", (step.tokens, head.shape[0]), head.dtype)
        logits.copy_(self.model.lm_head(hidden))
        if self.observer is not None:
            self.observer.answered(torch.arange(step.tokens, device=head.device), logits)
        sampled = logits.argmax(dim=-1)
        taken = accept(step.metadata.token_ids.view(step.rows, step.next_n), sampled.view(step.rows, step.next_n))
        self.logits[: step.rows].copy_(logits[taken.last])
        return taken, sampled


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
        check_layer(layer, number)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedCombination(
            f"the model's parameters lie on {sorted(map(str, devices))}; a step runs on one device, move them together"
        )


def check_layer(layer: Any, number: int) -> None:
    """Raises if the adapter cannot run a decoder layer."""
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
