"""The baseline: a step's metadata prepared the way serving engines do it around their graphs today.

Each step the host grows block lists, makes fresh (pinned) tensors of the lengths and the whole block table, uploads
them, and a chain of torch ops derives every tensor that the model's kernels read. NumPy is used wherever it can be, so
this is a kind baseline: Python runs only for rows that get a block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphkv.layout import PageLayout, Role, Side
from graphkv.runtime import DecodeRuntime

SCHEDULE_SPLIT = 256


class EngineMetadata:
    """Lengths and block lists on the host, metadata made afresh for every step.

    Args:
        block_table: int32 [rows, columns] as it stands, copied.
        length: int32 [rows], copied.
        free_blocks: ids to hand out.
        latent_scale, index_scale: pages a block.
        index_layout: bytes of an index_k page.
        parts: workers of the schedule.
    """

    def __init__(
        self,
        block_table: npt.NDArray[np.int32],
        length: npt.NDArray[np.int32],
        free_blocks: list[int],
        *,
        block_size: int,
        latent_scale: int,
        index_scale: int,
        index_layout: PageLayout,
        parts: int,
        device: str,
    ) -> None:
        self.block_table, self.length = block_table.copy(), length.copy()
        self.free_blocks = free_blocks
        self.block_size, self.latent_scale, self.index_scale = block_size, latent_scale, index_scale
        self.index_layout, self.parts, self.device = index_layout, parts, device
        self.pin = device == "cuda"

    def upload(self) -> tuple[Tensor, Tensor]:
        """Grow by one token a row; fresh device tensors of lengths i32 [rows] and of the table i32 [rows, columns]."""
        for row in np.flatnonzero(self.length % self.block_size == 0).tolist():
            self.block_table[row, self.length[row] // self.block_size] = self.free_blocks.pop()
        self.length += 1
        return self._fresh(self.length), self._fresh(self.block_table)

    def _fresh(self, array: npt.NDArray[np.int32]) -> Tensor:
        staged = torch.empty(array.shape, dtype=torch.int32, pin_memory=self.pin)
        staged.numpy()[...] = array
        return staged.to(self.device, non_blocking=True) if self.pin else staged

    def derive(self, seq_len: Tensor, table: Tensor) -> dict[str, Tensor]:
        """Every field of `StepMetadata` for one query token a row, but the token ids, which the device has."""
        rows, size, layout = seq_len.shape[0], self.block_size, self.index_layout
        position = seq_len.long() - 1
        column, offset = position // size, position % size
        block = table.gather(1, column[:, None]).squeeze(1).long()
        filled = torch.arange(table.shape[1], device=self.device) < ((seq_len + size - 1) // size)[:, None]
        pages = torch.where(filled, table, 0)
        page = block * self.index_scale
        base = page * layout.page_bytes
        return {
            "position": position,
            "token_row": torch.arange(rows, dtype=torch.int32, device=self.device),
            "query_start": torch.arange(rows + 1, dtype=torch.int32, device=self.device),
            "seq_len": seq_len,
            "context_len": seq_len,
            "latent_slot": block * (self.latent_scale * size) + offset,
            "index_slot": page * size + offset,
            "index_value_offset": base + offset * layout.value_bytes,
            "index_scale_offset": self._scale_offset(base, offset),
            "latent_page_table": pages * self.latent_scale,
            "index_page_table": pages * self.index_scale,
            "schedule": self._schedule(seq_len),
        }

    def _scale_offset(self, base: Tensor, offset: Tensor) -> Tensor:
        layout = self.index_layout
        if not layout.scale_bytes:
            return torch.full_like(base, -1)
        return base + layout.block_size * layout.value_bytes + offset * layout.scale_bytes

    def _schedule(self, seq_len: Tensor) -> Tensor:
        prefix = ((seq_len.clamp(min=1) + SCHEDULE_SPLIT - 1) // SCHEDULE_SPLIT).cumsum(0)
        quota, rest = prefix[-1] // self.parts, prefix[-1] % self.parts
        part = torch.arange(self.parts + 1, device=self.device)
        start = part * quota + (part - (self.parts - rest)).clamp(min=0)
        row = torch.searchsorted(prefix, start, right=True)
        before = torch.nn.functional.pad(prefix, (1, 0))[row]
        return torch.stack([row, torch.where(row < seq_len.shape[0], start - before, 0)], dim=1).int()


def beside(runtime: DecodeRuntime) -> EngineMetadata:
    """The baseline in the state that the runtime's host side is in now, on the same device."""
    manager, config, device = runtime.manager, runtime.config, runtime.device
    free = np.setdiff1d(np.arange(1, runtime.pools.num_blocks), manager.block_table)
    return EngineMetadata(
        manager.block_table,
        manager.length,
        free.tolist(),
        block_size=config.block_size,
        latent_scale=config.page_scale(Side.TARGET, Role.LATENT),
        index_scale=config.page_scale(Side.TARGET, Role.INDEX_K),
        index_layout=config.page_layout(Role.INDEX_K),
        parts=device.sm_count,
        device=device.kind,
    )


def check_agreement(runtime: DecodeRuntime) -> None:
    """`AssertionError` unless the baseline makes of the last step's lengths and tables what the device has made."""
    runtime.retire()
    runtime.device.synchronize()
    baseline = beside(runtime)
    table, length = (torch.from_numpy(a).to(baseline.device) for a in (baseline.block_table, baseline.length))
    live = runtime.metadata(len(length)).tensors()
    for name, tensor in baseline.derive(length, table).items():
        if not torch.equal(live[name].long(), tensor.long()):
            raise AssertionError(f"the baseline's {name} differs from the runtime's")
