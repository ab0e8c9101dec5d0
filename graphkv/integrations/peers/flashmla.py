"""FlashMLA's sparse decode as the attention over selected latents (`latent_attention="flashmla"`).

It reads `fp8_ds_mla` pages of any size as they are, at token slots of the layer's view; -1 is skipped. It takes 64 or
128 heads and multiplies in bf16. Its schedule depends on shapes alone while every token has the same number of slots,
so one a shape serves all layers and steps; it is made by the first call, which has to come before a capture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from graphkv.errors import InvalidValue, UnsupportedCombination
from graphkv.integrations.peers.library import Library
from graphkv.step import StepContext

LIBRARY = Library(
    module="flash_mla",
    option='latent_attention="flashmla"',
    source="https://github.com/deepseek-ai/FlashMLA (PyPI's flash-mla is a placeholder)",
    instead='latent_attention="graphkv"',
    functions={"get_mla_metadata": (), "flash_mla_with_kvcache": ("indices", "is_fp8_kvcache")},
)
HEADS = (64, 128)
_SLOT_MULTIPLE = 64  # slots that a CTA takes at a time

Handle = Any
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the tokens of a step are laid out for FlashMLA, and the schedules that may serve it.

    Attributes:
        rows, per_row: its batch and query tokens a row; a ragged prefill is one row.
        handles: schedules by shape: those of all decode steps, or of one prefill step.
    """

    rows: int
    per_row: int
    handles: dict[Shape, Handle]
    step: StepContext = field(repr=False)


class FlashMlaAttention:
    """Attends in decode steps, captured or not, and in prefill.

    Raises:
        LibraryMissing: FlashMLA is not there.
    """

    def __init__(self) -> None:
        functions = LIBRARY.load()
        self._attend, self._new_handle = functions["flash_mla_with_kvcache"], functions["get_mla_metadata"]
        self._handles: dict[Shape, Handle] = {}

    def plan(self, step: StepContext) -> AttentionPlan:
        """What all layers of a pass over the step's current side share."""
        metadata = step.metadata
        if step.kind == "prefill":
            return AttentionPlan(1, metadata.tokens, {}, step)
        return AttentionPlan(metadata.rows, metadata.tokens // metadata.rows, self._handles, step)

    def __call__(
        self,
        plan: AttentionPlan,
        query: torch.Tensor,
        pages: torch.Tensor,
        slot: torch.Tensor,
        softmax_scale: float,
        kv_lora_rank: int,
    ) -> torch.Tensor:
        """The attention's output in query's type, [T, H, kv_lora_rank]; zeros for a token without slots.

        Args:
            query: f32 or bf16 [T, H, kv_lora_rank + rope], absorbed.
            pages: u8 [pages, page_size, 1, 656], a layer's.
            slot: i32 [T, k], -1 padded, k a multiple of 64.

        Raises:
            UnsupportedCombination: more heads than it takes, or another k.
            InvalidValue: the first call of a shape while a graph is captured.
        """
        tokens, heads, width = query.shape
        padded = next((count for count in HEADS if heads <= count), None)
        if padded is None or slot.shape[1] % _SLOT_MULTIPLE:
            raise UnsupportedCombination(
                f"{LIBRARY.option} takes up to {HEADS[-1]} heads and an index_topk in multiples of {_SLOT_MULTIPLE}, "
                f"and there are {heads} and {slot.shape[1]}; use {LIBRARY.instead}"
            )
        if heads != padded or query.dtype != torch.bfloat16 or not query.is_contiguous():
            wide = plan.step.workspace("flashmla_query", (tokens, padded, width), torch.bfloat16)
            wide[:, :heads].copy_(query)
            wide[:, heads:].zero_()
        else:
            wide = query
        shape = plan.rows, plan.per_row
        out, _ = self._attend(
            q=wide.view(*shape, padded, width),
            k_cache=pages,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=kv_lora_rank,
            tile_scheduler_metadata=self._handle(plan, (*shape, padded, pages.shape[1], slot.shape[1])),
            softmax_scale=softmax_scale,
            is_fp8_kvcache=True,
            indices=slot.view(*shape, -1),
        )
        attended: torch.Tensor = out.view(tokens, padded, kv_lora_rank)[:, :heads].to(query.dtype)
        return attended

    def _handle(self, plan: AttentionPlan, shape: Shape) -> Handle:
        """The schedule of a shape, empty until its first call."""
        if shape not in plan.handles:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise InvalidValue(
                    f"FlashMLA's schedule of shape {list(shape)} does not exist and cannot be made while a graph is "
                    "captured; run the step once before"
                )
            plan.handles[shape] = self._new_handle()[0]
        return plan.handles[shape]
