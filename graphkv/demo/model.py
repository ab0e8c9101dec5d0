"""What the demo decodes: a small seeded model of either family, and prompts cut from real text, a token a byte."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphkv.errors import InvalidValue

FAMILIES = ("glm_moe_dsa", "deepseek_v32")
VOCABULARY = 256
SHORTEST_PROMPT, LONGEST_PROMPT = 20, 200

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,  # a multiple of 128 suits every latent format
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # With this many index heads a token whose every relu is zero, and so an exact tie of scores, does not occur.
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 64,  # contexts start shorter and end longer
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,  # a layer about keeps the size of its input (0.06 * sqrt(256) = 1)
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build_model(
    family: str, *, seed: int, device: torch.device, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Any:
    """A Hugging Face model of `family` with random weights: the same ones for a seed on every device.

    Args:
        family: one of `FAMILIES`. In the GLM model every second layer shares its predecessor's top-k.
        sizes: fields of the model's configuration to replace.
    """
    if family not in FAMILIES:
        raise InvalidValue(f"model must be one of {list(FAMILIES)}, got {family!r}")
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = _SIZES | sizes
    if family == "glm_moe_dsa":
        layers = range(fields["num_hidden_layers"])
        fields = {"indexer_types": [("full", "shared")[i % 2] for i in layers]} | fields
    config = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        # As in trained models, the embedding is not drowned by the first layer, and attention has a say in the logits.
        model.model.embed_tokens.weight.normal_()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(3.0)
    model = model.to(dtype=dtype, device=device).eval()
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:  # as the families' checkpoints are loaded
            layer.self_attn.indexer.weights_proj.float()
    return model


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: int64 tokens to begin with, and how many to add."""

    tokens: npt.NDArray[np.int64]
    new_tokens: int


def read_text(path: Path | None) -> bytes:
    """The bytes of a text file; None: the text that comes with the package.

    Raises:
        InvalidValue: no such file, or too short to cut prompts from.
    """
    try:
        text = path.read_bytes() if path else resources.files("graphkv.demo").joinpath("text.txt").read_bytes()
    except OSError as error:
        raise InvalidValue(f"cannot read prompts from {path}: {error.strerror}; give the path of a text file") from None
    if len(text) < LONGEST_PROMPT:
        raise InvalidValue(f"{path} holds {len(text)} bytes of text; prompts need at least {LONGEST_PROMPT}")
    return text


def cut_prompts(text: bytes, count: int, new_tokens: int, seed: int) -> list[Prompt]:
    """`count` prompts of unequal lengths from random places of the text.

    The first two are the shortest and the longest. The first asks for all of `new_tokens`, others for up to a third
    less, so that they leave at different times.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SHORTEST_PROMPT, LONGEST_PROMPT, count, endpoint=True)
    lengths[:2] = (SHORTEST_PROMPT, LONGEST_PROMPT)[:count]
    fewer = rng.integers(0, new_tokens // 3, count, endpoint=True)
    fewer[:1] = 0
    codes = np.frombuffer(text, np.uint8).astype(np.int64)
    starts = [int(rng.integers(0, codes.size - length, endpoint=True)) for length in lengths]
    return [
        Prompt(codes[start : start + length], new_tokens - int(less))
        for start, length, less in zip(starts, lengths, fewer, strict=True)
    ]
