"""Free blocks filled with a pattern, so that reads and writes of what nobody owns show. For debug modes."""

from __future__ import annotations

import numpy as np
import torch

from graphkv.device import Device
from graphkv.manager.v2 import ManagerV2
from graphkv.pool import Pools

POISON = 0xFF
"""Every byte of a free block: not a number in each format that has such."""


class FreeBlockGuard:
    """Poisons blocks of group 0 that have become free, and finds those that somebody wrote since.

    Args:
        stream: the stream that steps run on: what touches a block afterwards comes later there, or waits for it.
    """

    def __init__(self, manager: ManagerV2, pools: Pools, device: Device, stream: torch.cuda.Stream | None) -> None:
        self._manager, self._pools, self._device, self._stream = manager, pools, device, stream
        self._poisoned = np.zeros(0, np.bool_)

    def poison(self) -> None:
        """Fill the blocks that are free and were not when this was called last."""
        free, before = self._free(), self._poisoned
        known = np.zeros(free.size, np.bool_)
        known[: min(before.size, free.size)] = before[: free.size]
        with self._device.running_on(self._stream):
            for block in np.flatnonzero(free & ~known).tolist():
                for pool in self._pools.of_group(0):
                    pool.block(block).fill_(POISON)
        self._poisoned = free

    def check(self) -> None:
        """`AssertionError` if a block that was poisoned and is still free has other bytes. Waits for the device."""
        free = self._free()
        self._device.synchronize()
        for block in np.flatnonzero(self._poisoned[: free.size] & free[: self._poisoned.size]).tolist():
            for number, pool in enumerate(self._pools.of_group(0)):
                if not bool((pool.block(block) == POISON).all()):
                    raise AssertionError(f"block {block} is free, and somebody wrote into it in pool {number}")

    def _free(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        blocks = self._manager.blocks
        free = np.ones(blocks.num_blocks, np.bool_)
        free[0] = False
        free[blocks.busy_from(1)] = False
        return free
