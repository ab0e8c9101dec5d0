"""Stand-ins for libraries that read the pools: they check every argument as the library's contract has it, and compute
what it documents, by the oracles. They run on the CPU."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
import oracles
import torch
from torch import Tensor


def _is(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == shape


class DeepGemm:
    """`deep_gemm` on Hopper: one or two query tokens a row, whole pages of 64."""

    def __init__(self, workers: int = 3) -> None:
        self.workers = workers
        self.schedules: list[Tensor] = []
        self.calls: list[tuple[int, int]] = []

    def get_num_sms(self) -> int:
        return self.workers

    def get_paged_mqa_logits_metadata(self, context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
        assert context_lens.is_contiguous()
        _is(context_lens, torch.int32, *context_lens.shape)
        assert (context_lens >= 1).all(), "a batch of zeros makes it read outside"
        assert block_kv == 64
        schedule = torch.from_numpy(self.split(context_lens[:, -1].tolist(), num_sms))
        self.schedules.append(schedule)
        return schedule

    @staticmethod
    def split(lengths: list[int], workers: int) -> np.ndarray:
        """(row, segment) at which each worker begins, and the end; 256 positions a segment, the rest to the last."""
        segments = [(row, i) for row, length in enumerate(lengths) for i in range(math.ceil(max(length, 1) / 256))]
        quota, more = divmod(len(segments), workers)
        sizes = [quota + (worker >= workers - more) for worker in range(workers)]
        starts = [sum(sizes[:worker]) for worker in range(workers + 1)]
        return np.array([*segments, (len(lengths), 0)], np.int32)[starts]

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        schedule_meta: Tensor,
        max_context_len: int,
        clean_logits: bool = False,
    ) -> Tensor:
        rows, next_n, heads, width = q.shape
        self.calls.append((rows, next_n))
        assert next_n in (1, 2), "next_n == 1 or next_n == 2"
        assert heads in (32, 64)
        _is(q, torch.float8_e4m3fn, rows, next_n, heads, 128)
        _is(kv_cache, torch.uint8, len(kv_cache), 64, 1, 132)
        assert kv_cache.stride()[1:] == (132, 132, 1)
        assert kv_cache.stride(0) % 4 == 0
        _is(weights, torch.float32, rows * next_n, heads)
        _is(context_lens, torch.int32, rows, next_n)
        _is(block_table, torch.int32, rows, block_table.shape[1])
        _is(schedule_meta, torch.int32, self.workers + 1, 2)
        assert all(each.is_contiguous() for each in (q, weights, context_lens, schedule_meta))
        assert block_table.stride(1) == 1
        assert (context_lens >= 0).all()
        assert clean_logits is False
        assert np.array_equal(schedule_meta.numpy(), self.split(context_lens[:, -1].tolist(), self.workers))
        stride = -(-max_context_len // 256) * 256  # rows begin at multiples of 1,024 bytes
        out = torch.full((rows * next_n, stride), torch.nan)[:, :max_context_len]
        image = kv_cache.numpy().reshape(-1)
        values = q.float().numpy().reshape(rows * next_n, heads, width)
        for token, length in enumerate(context_lens.reshape(-1).tolist()):
            row = token // next_n
            assert length <= max_context_len
            if not length:
                continue
            slots = oracles.row_slots(block_table[row].numpy(), length, 64)
            found = oracles.take_rows(image, 64 * 132, 64, slots, 128, 4)
            keys = oracles.decode_index_k(*found, "fp8")
            scores = oracles.index_logits(values[token], weights[token].numpy(), keys)
            out[token, :length] = torch.from_numpy(scores).float()
        return out


class TieBreak(IntEnum):
    NONE, SMALL, LARGE = 0, 1, 2


class FlashInfer:
    """`flashinfer`'s top-k with page transform; the order of its output is its own."""

    TopKTieBreak = TieBreak

    def top_k_page_table_transform(
        self,
        input: Tensor,
        src_page_table: Tensor,
        lengths: Tensor,
        k: int,
        *,
        row_to_batch: Tensor,
        deterministic: bool,
        tie_break: TieBreak,
        dsa_graph_safe: bool,
        page_size: int,
        out: Tensor,
        out_raw_indices: Tensor,
    ) -> Tensor:
        rows = len(input)
        assert input.dtype == torch.float32
        assert input.stride(1) == 1
        _is(lengths, torch.int32, rows)
        _is(row_to_batch, torch.int32, rows)
        _is(out, torch.int32, rows, k)
        _is(out_raw_indices, torch.int32, rows, k)
        assert src_page_table.dtype == torch.int32
        assert deterministic
        assert dsa_graph_safe
        assert tie_break is TieBreak.SMALL
        assert page_size & (page_size - 1) == 0
        out.fill_(-1)
        out_raw_indices.fill_(-1)
        for row, length in enumerate(lengths.tolist()):
            chosen = oracles.select(input[row, :length].numpy(), k)[::-1]
            table = src_page_table[row_to_batch[row]].numpy()
            slots = [int(table[p // page_size]) * page_size + p % page_size for p in chosen]
            out[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
            out_raw_indices[row, : len(slots)] = torch.tensor(chosen, dtype=torch.int32)
        return out


class FlashMla:
    """`flash_mla`'s sparse decode: 64 or 128 heads; a handle belongs to one shape."""

    def __init__(self) -> None:
        self.handles = 0

    def get_mla_metadata(self) -> tuple[dict[str, Any], None]:
        self.handles += 1
        return {}, None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: None,
        cache_seqlens: None,
        head_dim_v: int,
        tile_scheduler_metadata: dict[str, Any],
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, next_n, heads, width = q.shape
        assert indices is not None
        shape = (rows, next_n, heads, k_cache.shape[1], indices.shape[2])
        assert tile_scheduler_metadata.setdefault("shape", shape) == shape, "a handle was used for another shape"
        assert heads in (64, 128)
        assert (width, head_dim_v, causal, is_fp8_kvcache) == (576, 512, False, True)
        assert block_table is cache_seqlens is num_splits is None
        assert softmax_scale is not None, "its default is not the model's"
        _is(q, torch.bfloat16, *q.shape)
        _is(k_cache, torch.uint8, len(k_cache), k_cache.shape[1], 1, 656)
        assert k_cache.stride()[1:] == (656, 656, 1)
        _is(indices, torch.int32, rows, next_n, indices.shape[2])
        assert q.stride(3) == indices.stride(2) == 1
        records = k_cache.numpy().reshape(-1, 656)
        out = torch.full((rows, next_n, heads, 512), torch.nan, dtype=torch.bfloat16)
        for row in range(rows):
            for n in range(next_n):
                chosen = indices[row, n][indices[row, n] >= 0].numpy()
                latents = oracles.decode_latent(records[chosen], "fp8_ds_mla", 1.0, 512)
                result = oracles.attend(q[row, n].float().numpy(), latents, softmax_scale, 512)
                out[row, n] = torch.from_numpy(result).to(torch.bfloat16)
        return out, torch.zeros(rows, heads, next_n)
