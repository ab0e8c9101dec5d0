"""Inputs of the kernels at the sizes of the tables: rotating sets, so that a call finds nothing of its own in the L2.

Every function gives calls to capture, each over another set, and the bytes that one call must move at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphkv import ops

READ_CEILING = 4.556e12  # bytes a second that an H200 reads, measured
COLD_BYTES = 160e6  # what rotating sets must exceed: the L2 is 60 MB
PAGE = 64  # tokens a page
INDEX_DIM, INDEX_HEADS, INDEX_BYTES = 128, 64, 132
RANK, ROPE, LATENT_BYTES = 512, 64, 656
TOPK = 2048

Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Calls over rotating sets, and the bytes of one: each input once and each output once."""

    calls: list[Call]
    num_bytes: int

    @property
    def floor_us(self) -> float:
        return self.num_bytes / READ_CEILING * 1e6


def sets_for(num_bytes: int, device: str, most: int = 200) -> int:
    """How many sets make cold calls, at least two; a CPU gets no more than these."""
    if device == "cpu":
        return 2
    return max(2, min(most, -(-int(COLD_BYTES) // num_bytes)))


def random_slots(pool_slots: int, shape: tuple[int, ...], device: str) -> Tensor:
    """int64, all distinct."""
    return torch.randperm(pool_slots, device=device)[: math.prod(shape)].view(shape)


def page_tables(pool_pages: int, sets: int, rows: int, columns: int, device: str) -> Tensor:
    """int32 [sets, rows, columns]: random pages, none in two places while the pool is large enough."""
    wanted = sets * rows * columns
    order = torch.randperm(pool_pages, device=device, dtype=torch.int32)
    return order.repeat(-(-wanted // pool_pages))[:wanted].view(sets, rows, columns)


def index_pages(pages: int, device: str) -> Tensor:
    """FP8 index K pages full of real keys."""
    pool = torch.empty((pages, PAGE, 1, INDEX_BYTES), dtype=torch.uint8, device=device)
    keys = torch.randn((min(1024, pages) * PAGE, INDEX_DIM), device=device, dtype=torch.bfloat16)
    for first in range(0, pages * PAGE, len(keys)):
        some = min(len(keys), pages * PAGE - first)
        slot = torch.arange(first, first + some, device=device)
        ops.store_index_k(keys[:some], pool, slot, "fp8")
    return pool


def latent_pages(pages: int, device: str) -> Tensor:
    """fp8_ds_mla pages full of real latents."""
    pool = torch.empty((pages, PAGE, 1, LATENT_BYTES), dtype=torch.uint8, device=device)
    latents = torch.randn((min(1024, pages) * PAGE, RANK + ROPE), device=device, dtype=torch.bfloat16)
    for first in range(0, pages * PAGE, len(latents)):
        some = min(len(latents), pages * PAGE - first)
        slot = torch.arange(first, first + some, device=device)
        ops.store_latent(latents[:some, :RANK], latents[:some, RANK:], pool, slot, "fp8_ds_mla")
    return pool


def store_index_k(tokens: int, device: str, pool_pages: int = 131072) -> Inputs:
    num_bytes = tokens * (2 * INDEX_DIM + INDEX_BYTES + 8)
    sets = sets_for(num_bytes, device)
    pool = torch.empty((pool_pages, PAGE, 1, INDEX_BYTES), dtype=torch.uint8, device=device)
    keys = torch.randn((sets, tokens, INDEX_DIM), device=device, dtype=torch.bfloat16)
    slot = random_slots(pool_pages * PAGE, (sets, tokens), device)
    return Inputs([lambda i=i: ops.store_index_k(keys[i], pool, slot[i], "fp8") for i in range(sets)], num_bytes)


def store_latent(tokens: int, device: str, pool_pages: int = 32768) -> Inputs:
    num_bytes = tokens * (2 * (RANK + ROPE) + LATENT_BYTES + 8)
    sets = sets_for(num_bytes, device)
    pool = torch.empty((pool_pages, PAGE, 1, LATENT_BYTES), dtype=torch.uint8, device=device)
    latents = torch.randn((sets, tokens, RANK + ROPE), device=device, dtype=torch.bfloat16)
    c, rope = latents[..., :RANK], latents[..., RANK:]
    slot = random_slots(pool_pages * PAGE, (sets, tokens), device)
    return Inputs(
        [lambda i=i: ops.store_latent(c[i], rope[i], pool, slot[i], "fp8_ds_mla") for i in range(sets)], num_bytes
    )


def store_layer(tokens: int, device: str, pool_pages: int = 32768) -> Inputs:
    num_bytes = tokens * (2 * (INDEX_DIM + RANK + ROPE) + INDEX_BYTES + LATENT_BYTES + 16)
    sets = sets_for(num_bytes, device)
    latent = torch.empty((pool_pages, PAGE, 1, LATENT_BYTES), dtype=torch.uint8, device=device)
    index = torch.empty((pool_pages, PAGE, 1, INDEX_BYTES), dtype=torch.uint8, device=device)
    latents = torch.randn((sets, tokens, RANK + ROPE), device=device, dtype=torch.bfloat16)
    keys = torch.randn((sets, tokens, INDEX_DIM), device=device, dtype=torch.bfloat16)
    c, rope = latents[..., :RANK], latents[..., RANK:]
    slot = random_slots(pool_pages * PAGE, (sets, tokens), device)

    def call(i: int) -> None:
        ops.store_layer(c[i], rope[i], latent, slot[i], keys[i], index, slot[i], "fp8_ds_mla", "fp8")

    return Inputs([lambda i=i: call(i) for i in range(sets)], num_bytes)


def gather_index_k(tokens: int, requests: int, device: str) -> Inputs:
    num_bytes = 2 * tokens * INDEX_BYTES
    sets, columns = sets_for(num_bytes, device), tokens // requests // PAGE
    pool = index_pages(sets * tokens // PAGE, device)
    tables = page_tables(len(pool), sets, requests, columns, device)
    start = torch.arange(requests + 1, dtype=torch.int32, device=device) * (columns * PAGE)
    values = torch.empty((sets, tokens, INDEX_DIM), dtype=torch.uint8, device=device)
    scales = torch.empty((sets, tokens, INDEX_BYTES - INDEX_DIM), dtype=torch.uint8, device=device)
    calls = [lambda i=i: ops.gather_index_k(pool, tables[i], start, values[i], scales[i], "fp8") for i in range(sets)]
    return Inputs(calls, num_bytes)


def paged_index_logits(rows: int, context: int, device: str, next_n: int = 1) -> Inputs:
    """The last of a row's `next_n` query tokens sees `context` tokens, each one before it one less."""
    tokens = rows * next_n
    num_bytes = rows * context * INDEX_BYTES + tokens * (4 * context + INDEX_HEADS * (INDEX_DIM + 4))
    sets, columns = sets_for(num_bytes, device), context // PAGE
    pool = index_pages(sets * rows * columns, device)
    tables = page_tables(len(pool), sets, rows, columns, device)
    q = torch.randn((sets, tokens, INDEX_HEADS, INDEX_DIM), device=device).to(torch.float8_e4m3fn)
    weights = torch.rand((sets, tokens, INDEX_HEADS), device=device)
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    token_row, context_len = token // next_n, context - next_n + 1 + token % next_n
    out = torch.empty((sets, tokens, context), device=device)
    calls = [
        lambda i=i: ops.paged_index_logits(q[i], weights[i], pool, tables[i], token_row, context_len, out[i], "fp8")
        for i in range(sets)
    ]
    return Inputs(calls, num_bytes)


def topk(rows: int, context: int, device: str, narrow: bool = False) -> Inputs:
    """`narrow`: all values share their leading bits, so that only the last digits of a radix tell them apart."""
    k = min(TOPK, context)
    num_bytes = rows * (4 * context + 8 * k)
    sets = sets_for(num_bytes, device, 400)
    logits = torch.randn((sets, rows, context), device=device)
    if narrow:
        logits = 1 + logits.mul_(2**-12).clamp_(-0.01, 0.01)
    tables = page_tables(65536, 1, rows, context // PAGE, device)[0]
    token_row = torch.arange(rows, dtype=torch.int32, device=device)
    context_len = torch.full((rows,), context, dtype=torch.int32, device=device)
    slot, position = torch.empty((2, sets, rows, k), dtype=torch.int32, device=device)
    calls = [
        lambda i=i: ops.topk(logits[i], context_len, tables, token_row, PAGE, slot[i], position[i]) for i in range(sets)
    ]
    return Inputs(calls, num_bytes)


def window_slots(rows: int, window: int, device: str) -> Inputs:
    """The window's slots of rows of twice as many tokens."""
    context = 2 * window
    num_bytes = rows * (4 * window + 4 * window // PAGE)
    sets = sets_for(num_bytes, device, 400)
    tables = page_tables(65536, 1, rows, context // PAGE, device)[0]
    token_row = torch.arange(rows, dtype=torch.int32, device=device)
    context_len = torch.full((rows,), context, dtype=torch.int32, device=device)
    slot = torch.empty((sets, rows, window), dtype=torch.int32, device=device)
    calls = [
        lambda i=i: ops.window_slots(context_len, tables, token_row, PAGE, window, 0, slot[i]) for i in range(sets)
    ]
    return Inputs(calls, num_bytes)


def sparse_mla_decode(rows: int, heads: int, device: str, pool_pages: int = 16384) -> Inputs:
    num_bytes = rows * (TOPK * (LATENT_BYTES + 4) + heads * 2 * (RANK + ROPE + RANK))
    sets = sets_for(num_bytes, device)
    pool = latent_pages(pool_pages, device)
    slot = torch.randint(pool_pages * PAGE, (sets, rows, TOPK), device=device, dtype=torch.int32)
    q = torch.randn((sets, rows, heads, RANK + ROPE), device=device, dtype=torch.bfloat16)
    out = torch.empty((sets, rows, heads, RANK), device=device, dtype=torch.bfloat16)
    scale = (128 + ROPE) ** -0.5
    calls = [
        lambda i=i: ops.sparse_mla_decode(q[i], pool, slot[i], scale, "fp8_ds_mla", 1.0, RANK, out[i])
        for i in range(sets)
    ]
    return Inputs(calls, num_bytes)
