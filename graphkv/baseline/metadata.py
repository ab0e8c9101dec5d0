"""V1's step metadata: whole tables uploaded each step, everything else derived by a chain of torch operations.

This is how decode loops without device-resident tables do it, and it is the baseline that the latch is measured
against. Nothing is kept from step to step, so nothing here can be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.layout import Role, Side
from graphkv.metadata import DerivePlan, StepMetadata

SCHEDULE_SPLIT = 256
"""Tokens a piece of the schedule."""


class UploadedBatch(NamedTuple):
    """A step's batch on the device."""

    table: torch.Tensor  # i32 [B, max_blocks], all blocks of each row, then 0
    batch_row: torch.Tensor  # i32 [B]
    length: torch.Tensor  # i32 [B], tokens before this step
    query_start: torch.Tensor  # i32 [B + 1]
    tokens: int


class Uploader:
    """Pinned staging for the host arrays of a step: two sets by turns, each rewritten once its copies are done.

    Args:
        sizes: most elements of each array, by name, and its dtype.
    """

    def __init__(self, sizes: dict[str, tuple[int, torch.dtype]], device: Device) -> None:
        self._device = device
        self._sets = [{name: device.pinned(*size) for name, size in sizes.items()} for _ in range(2)]
        self._copied = [device.event() for _ in range(2)]
        self._turn = 0

    def begin(self) -> None:
        """Take the other set, once the copies out of it are done."""
        self._turn ^= 1
        self._copied[self._turn].synchronize()

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The host array `name` of this step, cut to `shape`, to be written before `upload`."""
        flat = self._sets[self._turn][name].numpy()
        return flat[: int(np.prod(shape))].reshape(shape)

    def upload(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Queue the copy of that array to the device on the current stream."""
        staged = self._sets[self._turn][name][: int(np.prod(shape))].view(shape)
        return staged.to(self._device.torch, non_blocking=True, copy=True)

    def end(self, stream: int) -> None:
        """All copies of this step are queued on `stream` (a raw handle)."""
        self._copied[self._turn].record(stream)


class MetadataBuilder:
    """Makes live tensors of either side from an uploaded batch.

    Args:
        config: formats and block size; every pool has one page a block.
        device: where the tensors are made.
    """

    def __init__(self, config: CacheConfig, device: Device) -> None:
        self._block_size = config.block_size
        self._layout = config.page_layout(Role.INDEX_K)
        self._parts = device.sm_count
        self._device = device.torch

    def live(self, side: Side, batch: UploadedBatch, token_ids: torch.Tensor) -> StepMetadata:
        """The side's metadata for query tokens at positions length .. of each row; see `StepMetadata`.

        Args:
            token_ids: i64 [batch.tokens].
        """
        size, columns, rows = self._block_size, batch.table.shape[1], batch.table.shape[0]
        query_len = batch.query_start.diff()
        seq_len = batch.length + query_len
        row = torch.repeat_interleave(self._arange(rows), query_len, output_size=batch.tokens)
        position = (batch.length[row] + self._arange(batch.tokens) - batch.query_start[row]).long()
        column = position // size
        block = batch.table[row, column.clamp_max(columns - 1)].long()
        held = (column < columns) & (block > 0)
        offset = position % size
        slot = torch.where(held, block * size + offset, -1)
        base = block * self._layout.page_bytes
        value_at = torch.where(held, base + offset * self._layout.value_bytes, -1)
        scale_at = base + size * self._layout.value_bytes + offset * self._layout.scale_bytes
        filled = self._arange(columns) < ((seq_len + size - 1) // size)[:, None]
        page_table = torch.where(filled, batch.table, 0)
        return StepMetadata(
            group=0,
            window=None,
            side=side,
            rows=rows,
            tokens=batch.tokens,
            token_ids=token_ids,
            position=torch.where(held, position, 0),
            token_row=row.int(),
            query_start=batch.query_start,
            batch_row=batch.batch_row,
            seq_len=seq_len,
            context_len=torch.where(held, position + 1, 0).int(),
            latent_slot=slot,
            index_slot=slot,
            index_value_offset=value_at,
            index_scale_offset=torch.where(held & (self._layout.scale_bytes > 0), scale_at, -1),
            latent_page_table=page_table,
            index_page_table=page_table,
            schedule=self._schedule(seq_len),
        )

    def derive(self, side: Side, batch: UploadedBatch, plan: DerivePlan) -> StepMetadata:
        """The side's metadata for the query tokens that `plan` sets behind the batch's lengths; token ids are 0."""
        length = batch.length + plan.shift
        if plan.accepted is not None:
            length = length + plan.accepted
        rows = batch.table.shape[0]
        start, tokens = batch.query_start, batch.tokens
        if plan.query_len:
            start, tokens = self._arange(rows + 1) * plan.query_len, rows * plan.query_len
        moved = batch._replace(length=length, query_start=start, tokens=tokens)
        return self.live(side, moved, torch.zeros(tokens, dtype=torch.int64, device=self._device))

    def _arange(self, end: int) -> torch.Tensor:
        return torch.arange(end, dtype=torch.int32, device=self._device)

    def _schedule(self, seq_len: torch.Tensor) -> torch.Tensor:
        """i32 [parts + 1, 2]: pieces of 256 tokens in order of rows; the last workers take one piece more."""
        prefix = ((seq_len.clamp_min(1) + SCHEDULE_SPLIT - 1) // SCHEDULE_SPLIT).cumsum(0)
        part = torch.arange(self._parts + 1, device=self._device)
        quota, rest = prefix[-1] // self._parts, prefix[-1] % self._parts
        start = part * quota + (part - (self._parts - rest)).clamp_min(0)
        row = torch.searchsorted(prefix, start, right=True)
        before = torch.nn.functional.pad(prefix, (1, 0))[row]
        return torch.stack([row, torch.where(row < len(prefix), start - before, 0)], dim=1).int()
