"""Whose kernels a decode step's layers call: graphkv's own, or those of a library that reads the same pools.

    KernelChoice(index_scorer="deepgemm", latent_attention="flashmla", token_selector="flashinfer").kernels(own)

The libraries are imported here and only when they are asked for. What they read are the live tensors and the page views
as they are; nothing is copied but where a comment says so. Their calls are captured, so what they allocate comes from
the graph's own memory and is made once.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from graphkv import ops
from graphkv.errors import UnsupportedCombination
from graphkv.selection.consumers import IndexScorer, LatentAttention, TokenSelector
from graphkv.step import StepContext


class Score(Protocol):
    """Scores of a layer's tokens."""

    def __call__(self, step: StepContext, query: Tensor, weights: Tensor, pages: Tensor) -> Tensor:
        """query [T, H, D], weights f32 [T, H], pages u8 of index K -> f32 [T, at least max_context]; what is past a
        token's context_len is undefined."""


class Select(Protocol):
    """The best tokens of each row of scores."""

    def __call__(self, step: StepContext, scores: Tensor, slot: Tensor, position: Tensor) -> None:
        """Fill slot and position, i32 [T, k], -1 padded: token slots in latent pages, and positions."""


class Attend(Protocol):
    """Attention over the selected tokens."""

    def __call__(
        self, step: StepContext, query: Tensor, pages: Tensor, slot: Tensor, softmax_scale: float, out: Tensor
    ) -> None:
        """query [T, Hq, R + P], pages u8 of latents, slot i32 [T, k] -> out [T, Hq, R]."""


@dataclass(frozen=True, slots=True)
class OwnKernels:
    """graphkv's, which take every format and shape.

    Attributes:
        index_k, latent, latent_scale, kv_lora_rank, block_size: of the cache's config.
    """

    index_k: str
    latent: str
    latent_scale: float
    kv_lora_rank: int
    block_size: int

    def score(self, step: StepContext, query: Tensor, weights: Tensor, pages: Tensor) -> Tensor:
        metadata = step.metadata
        scores = step.workspace("index_logits", (step.tokens, step.max_context), torch.float32)
        table = metadata.index_page_table
        ops.paged_index_logits(
            query, weights, pages, table, metadata.token_row, metadata.context_len, scores, self.index_k
        )
        return scores

    def select(self, step: StepContext, scores: Tensor, slot: Tensor, position: Tensor) -> None:
        metadata = step.metadata
        table = metadata.latent_page_table
        ops.topk(scores, metadata.context_len, table, metadata.token_row, self.block_size, slot, position)

    def attend(
        self, step: StepContext, query: Tensor, pages: Tensor, slot: Tensor, softmax_scale: float, out: Tensor
    ) -> None:
        scale, rank = self.latent_scale, self.kv_lora_rank
        ops.sparse_mla_decode(query, pages, slot, softmax_scale, self.latent, scale, rank, out)


class DeepGemmScores:
    """DeepGEMM's `fp8_paged_mqa_logits` on FP8 index K.

    It takes one or two query tokens a row on every device that it runs on; more are flattened to rows of one token,
    each with the row's table. Its schedule is made in the graph from this step's lengths, once a step for all layers:
    up to two tokens a row the step's own, which is the same, else by DeepGEMM's kernel for the flattened rows.
    """

    NATIVE = (1, 2)
    PAGE = 64

    def __init__(self, library: Any) -> None:
        self._library = library
        self._step: StepContext | None = None
        self._layout: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, step: StepContext, query: Tensor, weights: Tensor, pages: Tensor) -> Tensor:
        if step is not self._step or self._layout is None:
            self._step, self._layout = step, self._lay_out(step)
        lengths, table, schedule = self._layout
        _, heads, width = query.shape
        result: Tensor = self._library.fp8_paged_mqa_logits(
            query.view(*lengths.shape, heads, width),
            pages,
            weights,
            lengths,
            table,
            schedule,
            step.max_context,
            clean_logits=False,
        )
        return result

    def _lay_out(self, step: StepContext) -> tuple[Tensor, Tensor, Tensor]:
        """context_lens [rows, n], block table and schedule."""
        metadata, next_n = step.metadata, step.tokens // step.rows
        workers = self._library.get_num_sms()
        if next_n in self.NATIVE:
            lengths, table = metadata.context_len.view(step.rows, next_n), metadata.index_page_table
            if len(metadata.schedule) == workers + 1:
                return lengths, table, metadata.schedule
        else:
            lengths = metadata.context_len.view(step.tokens, 1)
            table = step.workspace("deepgemm_table", (step.tokens, metadata.index_page_table.shape[1]), torch.int32)
            torch.index_select(metadata.index_page_table, 0, metadata.token_row, out=table)
        least_one = step.workspace("deepgemm_lengths", tuple(lengths.shape), torch.int32)
        torch.clamp(lengths, min=1, out=least_one)  # its scheduler reads outside for a batch of zeros
        return lengths, table, self._library.get_paged_mqa_logits_metadata(least_one, self.PAGE, workers)


class FlashInferSelection:
    """FlashInfer's top-k with page transform; ties go to the lowest position, as graphkv's own do, in any order."""

    def __init__(self, library: Any, block_size: int) -> None:
        self._library, self._block_size = library, block_size

    def __call__(self, step: StepContext, scores: Tensor, slot: Tensor, position: Tensor) -> None:
        metadata = step.metadata
        self._library.top_k_page_table_transform(
            scores,
            metadata.latent_page_table,
            metadata.context_len,
            slot.shape[1],
            row_to_batch=metadata.token_row,
            deterministic=True,
            tie_break=self._library.TopKTieBreak.SMALL,
            dsa_graph_safe=True,
            page_size=self._block_size,
            out=slot,
            out_raw_indices=position,
        )


class FlashMlaAttention:
    """FlashMLA's sparse decode on fp8_ds_mla latents, for up to 128 heads.

    It takes 64 or 128 heads: fewer are padded by a copy of the query. A schedule handle lives for one shape, made when
    a step of that shape warms up: with a fixed k it depends on nothing else, so all layers and steps share it.
    """

    HEADS = (64, 128)

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[tuple[int, ...], Any] = {}

    def __call__(
        self, step: StepContext, query: Tensor, pages: Tensor, slot: Tensor, softmax_scale: float, out: Tensor
    ) -> None:
        tokens, heads, width = query.shape
        padded = next((size for size in self.HEADS if heads <= size), None)
        if padded is None:
            raise UnsupportedCombination(
                f'latent_attention="flashmla" takes up to {self.HEADS[-1]} heads a rank, and the model has {heads}; '
                'spread them over ranks, or use latent_attention="graphkv"'
            )
        if padded != heads:
            wide = step.workspace("flashmla_query", (tokens, padded, width), query.dtype)
            wide[:, :heads], wide[:, heads:] = query, 0
            query = wide
        rows, next_n, k = step.rows, tokens // step.rows, slot.shape[1]
        shape = rows, next_n, padded, pages.shape[1], k
        if shape not in self._handles:
            self._handles[shape] = self._library.get_mla_metadata()[0]
        result, _ = self._library.flash_mla_with_kvcache(
            query.view(rows, next_n, padded, width),
            pages,
            None,
            None,
            out.shape[2],
            self._handles[shape],
            softmax_scale=softmax_scale,
            is_fp8_kvcache=True,
            indices=slot.view(rows, next_n, k),
        )
        out.copy_(result.view(tokens, padded, -1)[:, :heads])  # it has no way to be given an output


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    """One of each kind for a cache."""

    score: Score
    select: Select
    attend: Attend


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What the caller names.

    Attributes:
        index_scorer, token_selector, latent_attention: whose kernels score, select and attend in decode.
    """

    index_scorer: IndexScorer | str = IndexScorer.GRAPHKV
    token_selector: TokenSelector | str = TokenSelector.GRAPHKV
    latent_attention: LatentAttention | str = LatentAttention.GRAPHKV
    _libraries: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _made: dict[OwnKernels, DecodeKernels] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for option, kind in _KINDS.items():
            try:
                chosen = kind(getattr(self, option))
            except ValueError:
                raise UnsupportedCombination(
                    f"{option} must be one of {[str(each) for each in kind]}, got {getattr(self, option)!r}"
                ) from None
            object.__setattr__(self, option, chosen)
            if chosen != "graphkv":
                self._libraries[option] = _library(option, str(chosen))

    def kernels(self, own: OwnKernels) -> DecodeKernels:
        """The kernels for a cache, the same ones every time; graphkv's own where no others are named."""
        if own not in self._made:
            self._made[own] = self._make(own)
        return self._made[own]

    def _make(self, own: OwnKernels) -> DecodeKernels:
        score: Score = own.score
        select: Select = own.select
        attend: Attend = own.attend
        if self.index_scorer == IndexScorer.DEEPGEMM:
            score = DeepGemmScores(self._libraries["index_scorer"])
        if self.token_selector == TokenSelector.FLASHINFER:
            select = FlashInferSelection(self._libraries["token_selector"], own.block_size)
        if self.latent_attention == LatentAttention.FLASHMLA:
            attend = FlashMlaAttention(self._libraries["latent_attention"])
        return DecodeKernels(score, select, attend)


_KINDS = {"index_scorer": IndexScorer, "token_selector": TokenSelector, "latent_attention": LatentAttention}
_NEEDED = {
    "deepgemm": ("deep_gemm", ("fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms")),
    "flashinfer": ("flashinfer", ("top_k_page_table_transform", "TopKTieBreak")),
    "flashmla": ("flash_mla", ("flash_mla_with_kvcache", "get_mla_metadata")),
}


def _library(option: str, chosen: str) -> Any:
    """The library, with the functions that are called; `UnsupportedCombination` if it is not here or lacks them."""
    name, wanted = _NEEDED[chosen]
    way_out = f'build it from its repository, or use {option}="graphkv"'
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedCombination(
            f'{option}="{chosen}" needs the package {name}, which cannot be imported here ({error}); {way_out}'
        ) from error
    if missing := [function for function in wanted if not hasattr(library, function)]:
        raise UnsupportedCombination(
            f'{option}="{chosen}" needs {name} with {", ".join(missing)}, which the one installed here lacks (some '
            f"packages of that name hold nothing); {way_out}"
        )
    return library
