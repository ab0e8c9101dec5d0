"""Ops on index K pages: store, gather, and the indexer's scores."""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.codecs import decode_index_k, encode_index_k
from graphkv.errors import InvalidValue
from graphkv.layout import MIN_AMAX_FLOOR, IndexKFormat, PageLayout, ScaleMode, index_k_layout
from graphkv.ops.check import FLOAT32, FLOATS, INT32, INT64, UINT8, ArgumentCheck, check_contexts, member
from graphkv.ops.launch import INDEX_K_FORMATS, SOURCES, has_wgmma, launch, no_result, sm_count
from graphkv.page_io import read_rows, table_slots, write_rows
from graphkv.tile_map import ROW_BYTES, TileMap, tile_map

_CPU_SCORE_ELEMENTS = 1 << 24  # bound on the scores [tokens, heads, positions] held at once by the CPU side
_SCORE_TILE = 64  # positions a CTA of paged_index_logits scores at once
_FP8_THREADS = 512  # of a CTA of paged_index_logits_fp8
_FP8_SHARED_BYTES = 231_424  # nearly all that a CTA can have: what is left of it becomes buffers for pages
_FP8_MAX_TOKENS = 1 << 15
_FP8_MAX_GROUP = 8  # query tokens that share the reading of a page


def store_index_k(
    k: Tensor, pages: Tensor, slot: Tensor, format: str, scale_mode: str = "pow2", amax_floor: float = 1e-4
) -> None:
    """Quantise index K rows and scatter them into pages.

    Args:
        k: f32 or bf16 [T, D]; rows may be strided.
        pages: u8 [pages, block_size, 1, token_bytes], written.
        slot: i64 [T]; -1 writes nothing. A slot past the pages is refused on the CPU and skipped on CUDA.
        format: one of `IndexKFormat`.
        scale_mode, amax_floor: see `codecs.quantise_fp8`; FP4 takes the floor, unquantised formats neither.
    """
    op = "store_index_k"
    check = ArgumentCheck(op, pages.device)
    fmt = member(op, "format", IndexKFormat, format)
    mode = member(op, "scale_mode", ScaleMode, scale_mode)
    check.tensor("k", k, FLOATS, "T D", free_rows=True)
    check.tensor("slot", slot, INT64, "T")
    check.at_least("amax_floor", amax_floor, MIN_AMAX_FLOOR)
    check.pages(pages, index_k_layout(fmt, k.shape[1], pages.shape[1]))
    _store_index_k(k, pages, slot, fmt.value, mode.value, amax_floor)


@torch.library.custom_op(
    "graphkv::store_index_k",
    mutates_args=("pages",),
    schema="(Tensor k, Tensor(a!) pages, Tensor slot, str format, str scale_mode, float amax_floor) -> ()",
    device_types="cpu",
)
def _store_index_k(k: Tensor, pages: Tensor, slot: Tensor, format: str, scale_mode: str, amax_floor: float) -> None:
    if not len(k):
        return
    fmt = IndexKFormat(format)
    values, scales = encode_index_k(k, fmt, ScaleMode(scale_mode), amax_floor)
    write_rows(pages, index_k_layout(fmt, k.shape[1], pages.shape[1]), slot, values, scales)


@_store_index_k.register_kernel("cuda")
def _store_index_k_cuda(
    k: Tensor, pages: Tensor, slot: Tensor, format: str, scale_mode: str, amax_floor: float
) -> None:
    tokens, head_dim = k.shape
    if not tokens:
        return
    defines = {
        "INDEX_K_FORMAT": INDEX_K_FORMATS[IndexKFormat(format)],
        "SOURCE": SOURCES[k.dtype],
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": pages.shape[1],
        "LINEAR_SCALE": int(scale_mode == ScaleMode.LINEAR),
    }
    num_slots = pages.shape[0] * pages.shape[1]
    args = (k, k.stride(0), pages, pages.stride(0), slot, num_slots, tokens, amax_floor)
    launch("store_index_k", "PqPqPqif", -(-tokens // 8), 64, args, device=pages.device, defines=defines)


def gather_index_k(
    pages: Tensor, page_table: Tensor, start: Tensor, out_values: Tensor, out_scales: Tensor, format: str
) -> None:
    """Copy index K of whole rows out of the pages into contiguous, still quantised, values and scales.

    Args:
        pages: u8 [pages, block_size, 1, token_bytes].
        page_table: i32 [B, M] for that view; rows may be strided.
        start: i32 [B + 1], rising; output tokens start[b] .. start[b+1] - 1 are positions 0, 1, .. of row b.
        out_values: u8 [N, value_bytes], written up to start[B].
        out_scales: u8 [N, scale_bytes] ([N, 0] for unquantised formats), written likewise.
        format: one of `IndexKFormat`.
    """
    op = "gather_index_k"
    check = ArgumentCheck(op, pages.device)
    fmt = member(op, "format", IndexKFormat, format)
    check.tensor("page_table", page_table, INT32, "B M", free_rows=True)
    check.tensor("start", start, INT32, str(page_table.shape[0] + 1))
    check.tensor("out_values", out_values, UINT8, "N value_bytes")
    layout = _layout_of_values(fmt, out_values, pages)
    check.tensor("out_scales", out_scales, UINT8, f"N {layout.scale_bytes}")
    check.pages(pages, layout)
    _gather_index_k(pages, page_table, start, out_values, out_scales, fmt.value)


def _layout_of_values(fmt: IndexKFormat, values: Tensor, pages: Tensor) -> PageLayout:
    halves = {IndexKFormat.FP32: 8, IndexKFormat.BF16: 4, IndexKFormat.FP8: 2, IndexKFormat.FP4: 1}[fmt]
    return index_k_layout(fmt, values.shape[1] * 2 // halves, pages.shape[1])


@torch.library.custom_op(
    "graphkv::gather_index_k",
    mutates_args=("out_values", "out_scales"),
    schema="(Tensor pages, Tensor page_table, Tensor start, Tensor(a!) out_values, Tensor(b!) out_scales, "
    "str format) -> ()",
    device_types="cpu",
)
def _gather_index_k(
    pages: Tensor, page_table: Tensor, start: Tensor, out_values: Tensor, out_scales: Tensor, format: str
) -> None:
    layout = _layout_of_values(IndexKFormat(format), out_values, pages)
    lengths = start.diff()
    if not len(lengths):
        return
    first, end = int(start[0]), int(start[-1])
    room = page_table.shape[1] * layout.block_size
    if not (first >= 0 and end <= len(out_values) and bool((lengths >= 0).all()) and int(lengths.max()) <= room):
        raise InvalidValue(
            f"gather_index_k: start must rise from 0 or more to at most {len(out_values)} output tokens, by at most "
            f"{room} positions a row, got {start.tolist()}"
        )
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(first, end) - start[row]
    slot = table_slots(page_table, row, position, layout.block_size)
    out_values[first:end], out_scales[first:end] = read_rows(pages, layout, slot)


@_gather_index_k.register_kernel("cuda")
def _gather_index_k_cuda(
    pages: Tensor, page_table: Tensor, start: Tensor, out_values: Tensor, out_scales: Tensor, format: str
) -> None:
    tokens, rows = len(out_values), len(page_table)
    if not tokens or not rows:
        return
    layout = _layout_of_values(IndexKFormat(format), out_values, pages)
    defines = {
        "VALUE_BYTES": layout.value_bytes,
        "SCALE_BYTES": layout.scale_bytes,
        "BLOCK_SIZE": layout.block_size,
    }
    table = (page_table, page_table.stride(0), page_table.shape[1], rows)
    args = (pages, pages.stride(0), len(pages), *table, start, out_values, out_scales, tokens)
    launch("gather_index_k", "PqiPqiiPPPi", -(-tokens // 128), 128, args, device=pages.device, defines=defines)


def paged_index_logits(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    context_len: Tensor,
    out: Tensor,
    format: str,
) -> None:
    """The indexer's scores: out[t, p] = sum over heads h of relu(q[t, h] . k[p]) * weights[t, h], p < context_len[t].

    Args:
        q: f32, bf16 or float8_e4m3fn [T, H, D]; the scale of an FP8 query belongs into the weights.
        weights: f32 [T, H].
        pages: u8 [pages, block_size, 1, token_bytes].
        page_table: i32 [B, M] for that view; rows may be strided.
        token_row: i32 [T], the row of each token; not read where context_len is 0.
        context_len: i32 [T], positions to score; 0 (a padded token) leaves its row of `out` untouched.
        out: f32 or bf16 [T, W], W at least the longest context; columns past a context are untouched; rows may be
            strided.
        format: one of `IndexKFormat`.
    """
    op = "paged_index_logits"
    check = ArgumentCheck(op, pages.device)
    fmt = member(op, "format", IndexKFormat, format)
    check.tensor("q", q, (*FLOATS, torch.float8_e4m3fn), "T H D")
    check.tensor("weights", weights, FLOAT32, "T H")
    check.pages(pages, index_k_layout(fmt, q.shape[2], pages.shape[1]))
    check.tensor("page_table", page_table, INT32, "B M", free_rows=True)
    check.tensor("token_row", token_row, INT32, "T")
    check.tensor("context_len", context_len, INT32, "T")
    check.tensor("out", out, FLOATS, "T W", free_rows=True)
    _paged_index_logits(q, weights, pages, page_table, token_row, context_len, out, fmt.value)


@torch.library.custom_op(
    "graphkv::paged_index_logits",
    mutates_args=("out",),
    schema="(Tensor q, Tensor weights, Tensor pages, Tensor page_table, Tensor token_row, Tensor context_len, "
    "Tensor(a!) out, str format) -> ()",
    device_types="cpu",
)
def _paged_index_logits(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    context_len: Tensor,
    out: Tensor,
    format: str,
) -> None:
    layout = index_k_layout(IndexKFormat(format), q.shape[2], pages.shape[1])
    check_contexts("paged_index_logits", context_len, token_row, out.shape[1], page_table, layout.block_size)
    live = context_len > 0
    for row in torch.unique(token_row[live]).tolist():  # one read of a row's keys serves all of its tokens
        tokens = (live & (token_row == row)).nonzero().squeeze(1)
        longest = int(context_len[tokens].max())
        position = torch.arange(longest)
        slot = table_slots(page_table, torch.full_like(position, row), position, layout.block_size)
        k = decode_index_k(*read_rows(pages, layout, slot), IndexKFormat(format))
        for some in torch.split(tokens, max(1, _CPU_SCORE_ELEMENTS // (q.shape[1] * longest))):
            scores = (q[some].float() @ k.T).relu_()  # [t, H, longest]
            logits = torch.bmm(weights[some].unsqueeze(1), scores).squeeze(1).to(out.dtype)
            past = position >= context_len[some].unsqueeze(1)
            out[some, :longest] = torch.where(past, out[some, :longest], logits)


@_paged_index_logits.register_kernel("cuda")
def _paged_index_logits_cuda(
    q: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    token_row: Tensor,
    context_len: Tensor,
    out: Tensor,
    format: str,
) -> None:
    tokens, heads, head_dim = q.shape
    tiles = -(-out.shape[1] // _SCORE_TILE)
    if not tokens or not tiles:
        return
    defines = {"HEADS": heads, "OUTPUT": SOURCES[out.dtype]}
    keys = (q, weights, pages, pages.stride(0), len(pages), page_table, page_table.stride(0))
    scores = (page_table.shape[1], token_row, context_len, out, out.stride(0))
    if _scores_by_wgmma(q, pages, IndexKFormat(format), tokens * tiles):
        # Rows have that many tokens on average; room for larger groups is room that pages on their way could use.
        group = min(_FP8_MAX_GROUP, 1 << (-(-tokens // len(page_table)) - 1).bit_length())
        defines |= {"GROUP": group, "SHARED_BYTES": _FP8_SHARED_BYTES}
        launch(
            "paged_index_logits_fp8",
            "PPPqiPqiiPPPqiiS",
            sm_count(q.device),
            _FP8_THREADS,
            (*keys, len(page_table), *scores, tokens, out.shape[1], _page_tiles(pages)),
            device=q.device,
            defines=defines,
            shared_bytes=_FP8_SHARED_BYTES,
        )
        return
    defines |= {"FORMAT": INDEX_K_FORMATS[IndexKFormat(format)], "SOURCE": SOURCES[q.dtype]}
    defines |= {"HEAD_DIM": head_dim, "BLOCK_SIZE": pages.shape[1]}
    # A CTA scores every `splits`-th tile of its token: enough CTAs to fill the device, and each loads its query once.
    splits = min(tiles, max(1, -(-8 * sm_count(q.device) // tokens)))
    head_tile = 8 * min(8, -(-heads // 8))
    shared_floats = (head_tile + _SCORE_TILE) * (-(-head_dim // 4) * 4 + 4) + head_tile + 8 * _SCORE_TILE
    launch(
        "paged_index_logits",
        "PPPqiPqiPPPqii",
        tokens * splits,
        128,
        (*keys, *scores, splits, out.shape[1]),
        device=q.device,
        defines=defines,
        shared_bytes=4 * shared_floats,
    )


def _page_tiles(pages: Tensor) -> TileMap:
    """Each page as one tile, keys and scales."""
    with torch.cuda.device(pages.device):
        return tile_map(pages.data_ptr(), pages[0].numel() // ROW_BYTES, len(pages), pages.stride(0))


def _scores_by_wgmma(q: Tensor, pages: Tensor, fmt: IndexKFormat, visits: int) -> bool:
    """The rule that chooses paged_index_logits_fp8.cu over paged_index_logits.cu: the device multiplies by warpgroups,
    the shape is the indexer's, copies of whole pages are aligned, and pages visited (an upper bound) count in 32 bits.
    """
    shape = q.dtype, q.shape[1] in (32, 64), q.shape[2], fmt, pages.shape[1]
    aligned = (q.data_ptr() | pages.data_ptr() | pages.stride(0)) % 16 == 0
    countable = visits < 2**31 and len(q) <= _FP8_MAX_TOKENS
    fits = shape == (torch.float8_e4m3fn, True, 128, IndexKFormat.FP8, 64) and aligned and countable
    return fits and has_wgmma(q.device)


for _op in (_store_index_k, _gather_index_k, _paged_index_logits):
    _op.register_fake(no_result)
