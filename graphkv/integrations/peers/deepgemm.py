"""DeepGEMM's paged MQA logits as the indexer's scorer (`index_scorer="deepgemm"`).

It reads index K pages as they are: u8 [pages, 64, 1, 132] with any page stride, values before scales. The lengths and
tables are the live set's; its work split is its own, made in the step from the step's lengths (at least 1 each: its
split of nothing but zeros reads past its arrays). What it allocates comes from torch, so in a captured step from the
graph's own pool: a replay allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphkv import codecs
from graphkv.config import CacheConfig
from graphkv.errors import InvalidValue
from graphkv.integrations.peers.library import Library
from graphkv.layout import IndexKFormat
from graphkv.selection.consumers import DEEPGEMM, DeviceFacts
from graphkv.step import StepContext

_METADATA = "get_paged_mqa_logits_metadata"
_KERNELS = {IndexKFormat.FP8: "fp8_paged_mqa_logits", IndexKFormat.FP4: "fp8_fp4_paged_mqa_logits"}


def library(fmt: IndexKFormat) -> Library:
    """What is needed of DeepGEMM to score keys of a format."""
    return Library(
        module="deep_gemm",
        option='index_scorer="deepgemm"',
        source="https://github.com/deepseek-ai/DeepGEMM (PyPI's deep-gemm is a placeholder)",
        instead='index_scorer="graphkv"',
        functions={_KERNELS[fmt]: (), _METADATA: (), "get_num_sms": ()},
    )


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """What the calls of all layers share: R rows of N query tokens as DeepGEMM sees them, R * N = T.

    Attributes:
        context_len: i32 [R, N], 0 padded.
        page_table: i32 [R, M].
        schedule: i32 [workers + 1, 2], DeepGEMM's split of this step's lengths.
        width: columns of the scores.
    """

    context_len: torch.Tensor
    page_table: torch.Tensor
    schedule: torch.Tensor
    width: int


class DeepGemmScorer:
    """Scores decode steps of any next_n: what one call does not take is served with each query token as its own row.

    Args:
        config: formats of the cache; index K must be quantised.
        facts: the device, which decides how many query tokens a row a call takes.

    Raises:
        LibraryMissing: DeepGEMM is not there.
    """

    def __init__(self, config: CacheConfig, facts: DeviceFacts) -> None:
        functions = library(config.index_k).load()
        self._format = config.index_k
        self._scale, self._floor = config.index_k_scale, config.index_k_amax_floor
        self._logits = functions[_KERNELS[config.index_k]]
        self._split, self._num_sms = functions[_METADATA], functions["get_num_sms"]
        takes = DEEPGEMM.on(facts)
        self._native = None if takes is None else takes.next_n

    def plan(self, step: StepContext, page_table: torch.Tensor, page_size: int) -> ScorePlan:
        """What all layers of a decode step's current side share; runs in the graph.

        Args:
            page_table: i32 [rows, M] of index K pages of `page_size` tokens.
        """
        metadata = step.metadata
        rows, per_row = metadata.rows, metadata.tokens // metadata.rows
        if self._native is not None and per_row not in self._native:
            rows, per_row, page_table = flattened(step, page_table)
        context_len = metadata.context_len.view(rows, per_row)
        lengths = step.workspace("deepgemm_lengths", (rows, per_row), torch.int32)
        torch.clamp(context_len, min=1, out=lengths)
        schedule = self._split(lengths, page_size, self._num_sms())
        return ScorePlan(context_len, page_table, schedule, step.max_context)

    def __call__(
        self, plan: ScorePlan, query: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        """Scores f32 [T, width] at DeepGEMM's own address; columns past a context hold anything.

        Args:
            query: f32 or bf16 [T, H, D], not yet quantised.
            weights: f32 [T, H], with all constants in them.
            pages: u8 [pages, page_size, 1, token_bytes], a layer's.
        """
        shape = (*plan.context_len.shape, *query.shape[1:])
        if self._format is IndexKFormat.FP8:
            codes, scale = codecs.quantise_query(query, self._scale, self._floor)
            given: object = codes.view(shape)
            weights = weights * scale
        else:
            packed, exponents = codecs.quantise_fp4(query, self._floor)
            values = packed.view(torch.int8).view(*shape[:3], -1)
            given = values, exponents.view(torch.int32).view(shape[:3])
        scores: torch.Tensor = self._logits(
            given,
            pages,
            weights,
            plan.context_len,
            plan.page_table,
            plan.schedule,
            plan.width,
            clean_logits=False,
        )
        return scores


def flattened(step: StepContext, page_table: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    """Each query token as a row of its own: (T rows, 1 token a row, page table i32 [T, M]).

    The j-th of n query tokens of a row of L tokens reads L - n + 1 + j, which is its `context_len`; its table is its
    row's. Keys are then read once a query token. For kernels that take fewer draft tokens than the step has.
    """
    metadata = step.metadata
    if page_table.shape[0] != metadata.rows:
        raise InvalidValue(f"a page table of {page_table.shape[0]} rows is not that of a step of {metadata.rows}")
    repeated = step.workspace("flattened_table", (metadata.tokens, page_table.shape[1]), torch.int32)
    torch.index_select(page_table, 0, metadata.token_row, out=repeated)
    return metadata.tokens, 1, repeated
