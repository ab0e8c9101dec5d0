"""Stand-ins for DeepGEMM, FlashMLA and FlashInfer: they refuse what the libraries document to refuse, and compute what
they document to compute, from the bytes that they are given. No code is shared with graphkv.

Facts about values (a schedule that fits the lengths, ids in range) cannot be asserted while a graph is captured, so
they are counted on the device: `violations`, which also counts in each replay. Sources: the documented interfaces of
deep_gemm 2.x (`csrc/apis/attention.hpp`), flash_mla (`flash_mla_interface.py`) and flashinfer 0.7.4 (`topk.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

I32, F32, U8 = torch.int32, torch.float32, torch.uint8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Seen:
    """A tensor argument as it was passed."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    address: int


@dataclass
class Fake:
    """A library's stand-in: what was called with which tensors, and how often values broke a rule."""

    device: torch.device
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.violations = torch.zeros((), dtype=torch.int64, device=self.device)

    def note(self, name: str, **arguments: Any) -> None:
        def seen(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            assert value.device.type == self.device.type
            return Seen(tuple(value.shape), tuple(value.stride()), value.dtype, value.data_ptr())

        self.calls.append((name, {key: seen(value) for key, value in arguments.items()}))

    def count(self, broken: torch.Tensor) -> None:
        self.violations += broken.any()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [arguments for called, arguments in self.calls if called == name]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


# DeepGEMM -------------------------------------------------------------------------------------------------------------


class DeepGemm(Fake):
    """Paged MQA logits of Hopper (`sm=90`) or Blackwell (`sm=100`)."""

    sms = 5
    sm = 90

    def install(self, monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
        names = ("fp8_paged_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms")
        install(monkeypatch, "deep_gemm", **{name: getattr(self, name) for name in names})
        return self

    def get_num_sms(self) -> int:
        return self.sms

    def get_paged_mqa_logits_metadata(
        self, context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.note("metadata", context_lens=context_lens, block_kv=block_kv, num_sms=num_sms)
        assert context_lens.dim() == 2
        assert context_lens.dtype == I32
        assert context_lens.is_contiguous()
        assert indices is None
        assert block_kv in ((64,) if self.sm == 90 else (32, 64))
        self.count(context_lens < 1)  # nothing but zeros, in a multiple of 32 rows, reads out of bounds
        return self._split(context_lens, num_sms)

    def _split(self, context_lens: torch.Tensor, workers: int) -> torch.Tensor:
        """Segments of 256 tokens of each row's last length, dealt out in order; the last workers get one more."""
        ends = ((context_lens[:, -1].long() + 255) // 256).cumsum(0)
        worker = torch.arange(workers + 1, device=ends.device)
        quota, rest = ends[-1] // workers, ends[-1] % workers
        first = worker * quota + (worker - workers + rest).clamp(min=0)
        row = (first[:, None] >= ends[None, :]).sum(1)
        before = torch.cat([ends.new_zeros(1), ends])[row]
        return torch.stack([row, torch.where(row < len(ends), first - before, 0)], 1).to(I32)

    def fp8_paged_mqa_logits(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        schedule_meta: torch.Tensor,
        max_context_len: int,
        clean_logits: bool = True,
    ) -> torch.Tensor:
        assert q.dtype == torch.float8_e4m3fn
        width = q.shape[3]
        self._check(q, q.shape, kv_cache, width + 4, weights, context_lens, block_table, schedule_meta, clean_logits)
        blocks, size = kv_cache.shape[:2]
        values = kv_cache.as_strided((blocks, size, width), (kv_cache.stride(0), width, 1)).view(torch.float8_e4m3fn)
        scales = self._tail(kv_cache, size * width).view(F32)
        keys = values.float() * scales
        return self._score(q.float(), keys, weights, context_lens, block_table, max_context_len)

    def fp8_fp4_paged_mqa_logits(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        schedule_meta: torch.Tensor,
        max_context_len: int,
        clean_logits: bool = True,
    ) -> torch.Tensor:
        packed, scale = q
        assert self.sm == 100
        assert packed.dtype == torch.int8
        assert scale.dtype == I32
        assert scale.is_contiguous()
        assert scale.shape == packed.shape[:3]
        shape = (*packed.shape[:3], 2 * packed.shape[3])
        half = packed.shape[3]
        self._check(packed, shape, kv_cache, half + 4, weights, context_lens, block_table, schedule_meta, clean_logits)
        blocks, size = kv_cache.shape[:2]
        values = kv_cache.as_strided((blocks, size, half), (kv_cache.stride(0), half, 1))
        keys = _fp4(values, self._tail(kv_cache, size * half))
        query = _fp4(packed.view(U8), scale.view(U8).view(*scale.shape, 4))
        return self._score(query, keys, weights, context_lens, block_table, max_context_len)

    def _tail(self, kv_cache: torch.Tensor, start: int) -> torch.Tensor:
        """The four scale bytes of each token, behind all values of its block: u8 [blocks, size, 4]."""
        shape, strides = (*kv_cache.shape[:2], 4), (kv_cache.stride(0), 4, 1)
        return kv_cache.as_strided(shape, strides, kv_cache.storage_offset() + start).contiguous()

    def _check(
        self,
        q: torch.Tensor,
        shape: tuple[int, ...],
        kv_cache: torch.Tensor,
        token_bytes: int,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        schedule_meta: torch.Tensor,
        clean_logits: bool,
    ) -> None:
        self.note(
            "logits",
            q=q,
            kv_cache=kv_cache,
            weights=weights,
            context_lens=context_lens,
            block_table=block_table,
            schedule_meta=schedule_meta,
        )
        rows, next_n, heads, width = shape
        assert q.is_contiguous()
        assert heads in ((32, 64) if self.sm == 90 else (8, 16, 32, 64))
        assert width in (32, 64, 128)
        assert next_n in (1, 2) or self.sm != 90
        assert kv_cache.dtype == U8
        assert kv_cache.shape[1:] == (kv_cache.shape[1], 1, token_bytes)
        assert kv_cache.shape[1] in ((64,) if self.sm == 90 else (32, 64))
        assert kv_cache.stride(1) == token_bytes
        assert kv_cache.stride(3) == 1
        assert kv_cache.stride(0) % 4 == 0
        assert kv_cache.data_ptr() % 16 == 0
        assert (weights.shape, weights.dtype) == ((rows * next_n, heads), F32)
        assert weights.is_contiguous()
        assert (context_lens.shape, context_lens.dtype) == ((rows, next_n), I32)
        assert context_lens.is_contiguous()
        assert (block_table.shape[0], block_table.stride(1), block_table.dtype) == (rows, 1, I32)
        assert (schedule_meta.shape, schedule_meta.dtype) == ((self.sms + 1, 2), I32)
        assert schedule_meta.is_contiguous()
        assert not clean_logits
        self.count(context_lens < 0)
        self.count((block_table < 0) | (block_table >= kv_cache.shape[0]))
        self.count(schedule_meta != self._split(context_lens.clamp(min=1), self.sms))  # a stale one may hang

    def _score(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        rows, next_n, heads, _ = query.shape
        size = keys.shape[1]
        position = torch.arange(width, device=query.device)
        page = block_table[:, (position // size).clamp(max=block_table.shape[1] - 1)].long()
        of_row = keys[page, position % size]  # [rows, width, D]
        scores = torch.einsum("bnhd,bpd->bnhp", query, of_row).relu()
        logits = torch.einsum("bnhp,bnh->bnp", scores, weights.view(rows, next_n, heads))
        logits = logits.masked_fill(position >= context_lens[:, :, None], float("nan"))  # whatever was there
        out = torch.empty(rows * next_n, -(-width // 256) * 256, device=query.device)[:, :width]
        return out.copy_(logits.view(rows * next_n, width))


def _fp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """f32 [..., D] of two elements a byte, the even one low, and an exponent byte for every 32 elements."""
    table = torch.empty(16, device=packed.device)
    for code in range(16):
        table[code] = E2M1[code & 7] * (-1 if code & 8 else 1)
    pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=-1, output_size=pairs.shape[-1])
    return table[pairs.long()] * scale


# FlashMLA -------------------------------------------------------------------------------------------------------------


@dataclass
class Handle:
    """The schedule of one shape, made by its first call."""

    shape: tuple[int, ...] | None = None


class FlashMla(Fake):
    """Sparse decode of 656-byte records."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FlashMla:
        names = ("get_mla_metadata", "flash_mla_with_kvcache")
        install(monkeypatch, "flash_mla", **{name: getattr(self, name) for name in names})
        return self

    def get_mla_metadata(self) -> tuple[Handle, None]:
        self.note("metadata")
        return Handle(), None

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: Handle,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = False,
        indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert indices is not None
        assert softmax_scale is not None  # its own is not the model's
        assert block_table is None
        assert cache_seqlens is None
        assert num_splits is None
        assert not causal
        assert is_fp8_kvcache
        self.note("attend", q=q, k_cache=k_cache, indices=indices, handle=id(tile_scheduler_metadata))
        batch, queries, heads, width = q.shape
        assert (q.dtype, width, head_dim_v) == (torch.bfloat16, 576, 512)
        assert heads in (64, 128)
        assert q.stride(3) == 1
        assert k_cache.dtype in (U8, torch.int8, torch.float8_e4m3fn)
        assert k_cache.shape[2:] == (1, 656)
        assert k_cache.stride(1) == 656
        assert k_cache.stride(3) == 1
        assert (indices.shape[:2], indices.dtype, indices.stride(2)) == ((batch, queries), I32, 1)
        shape = (batch, queries, heads, k_cache.shape[1], indices.shape[2])
        if tile_scheduler_metadata.shape is None:
            assert not (q.is_cuda and torch.cuda.is_current_stream_capturing())
            tile_scheduler_metadata.shape = shape
        assert tile_scheduler_metadata.shape == shape
        slots = k_cache.shape[0] * k_cache.shape[1]
        self.count((indices < -1) | (indices >= slots))
        return self._attend(q, k_cache, indices, softmax_scale), torch.empty(0)

    def _attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, indices: torch.Tensor, softmax_scale: float
    ) -> torch.Tensor:
        size = k_cache.shape[1]
        at = indices.clamp(min=0).long()
        records = k_cache[at // size, at % size, 0]  # [b, s, k, 656]
        scales = records[..., 512:528].contiguous().view(F32)
        nope = records[..., :512].contiguous().view(torch.float8_e4m3fn).float()
        nope = nope * scales.repeat_interleave(128, dim=-1, output_size=512)
        keys = torch.cat([nope, records[..., 528:].contiguous().view(torch.bfloat16).float()], -1)
        gone = (indices < 0)[:, :, None, :]
        scores = torch.einsum("bshd,bskd->bshk", q.float(), keys) * softmax_scale
        shares = scores.masked_fill(gone, float("-inf")).softmax(-1).nan_to_num(0.0)  # none at all: zeros
        return torch.einsum("bshk,bskd->bshd", shares, keys[..., :512]).to(torch.bfloat16)


# FlashInfer -----------------------------------------------------------------------------------------------------------


class FlashInfer(Fake):
    """Top-k with page-table transform, best first where there is a choice."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
        install(monkeypatch, "flashinfer", top_k_page_table_transform=self.top_k_page_table_transform)
        return self

    def top_k_page_table_transform(
        self,
        input: torch.Tensor,
        src_page_table: torch.Tensor,
        lengths: torch.Tensor,
        k: int,
        row_to_batch: torch.Tensor | None = None,
        deterministic: bool = False,
        tie_break: int = 0,
        dsa_graph_safe: bool = False,
        *,
        page_size: int = 1,
        out: torch.Tensor | None = None,
        out_raw_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.note("topk", input=input, src_page_table=src_page_table, lengths=lengths, out=out, raw=out_raw_indices)
        assert row_to_batch is not None
        assert out is not None
        assert out_raw_indices is not None
        tokens = input.shape[0]
        assert input.dtype == F32
        assert input.stride(1) == 1
        assert deterministic
        assert tie_break == 1  # equal values at the boundary: smaller indices
        assert dsa_graph_safe
        assert k <= 2048
        assert page_size & (page_size - 1) == 0
        for name, each in (("lengths", lengths), ("row_to_batch", row_to_batch)):
            assert (each.shape, each.dtype, each.is_contiguous()) == ((tokens,), I32, True), name
        assert (src_page_table.dtype, src_page_table.stride(1)) == (I32, 1)
        for each in (out, out_raw_indices):
            assert (each.shape, each.dtype, each.is_contiguous()) == ((tokens, k), I32, True)
        self.count(src_page_table < 0)
        self.count((row_to_batch < 0) | (row_to_batch >= src_page_table.shape[0]))
        self._select(input, src_page_table, lengths, k, row_to_batch, page_size, out, out_raw_indices)
        return out

    def _select(
        self,
        scores: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        k: int,
        row: torch.Tensor,
        page_size: int,
        out: torch.Tensor,
        raw: torch.Tensor,
    ) -> None:
        position = torch.arange(scores.shape[1], device=scores.device)
        past = position >= lengths[:, None]
        best = scores.masked_fill(past, float("-inf")).sort(dim=1, descending=True, stable=True).indices
        chosen = torch.where((lengths > k)[:, None], best, position)[:, :k]
        taken = torch.arange(chosen.shape[1], device=scores.device) < lengths[:, None]
        page = table[row.long()[:, None], (chosen // page_size).clamp(max=table.shape[1] - 1)]
        for buffer, values in ((out, page * page_size + chosen % page_size), (raw, chosen)):
            buffer.fill_(-1)
            buffer[:, : chosen.shape[1]] = torch.where(taken, values, -1).to(I32)
