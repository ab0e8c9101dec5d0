"""The bytes of a transfer: whole blocks across the bus, and tokens of blocks within the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from graphkv import ops
from graphkv.device import Device
from graphkv.kernels import load
from graphkv.pool import Pools
from graphkv.tiers.host import HOST, HostTier, UnitLayout
from graphkv.transfer import DEVICE, CopyJob


class BlockCopies:
    """Queues copies on torch's current stream; on the CPU device they are done on return.

    Blocks cross the bus by copy engines, which take no SM from the steps; within the device a kernel copies them.

    Attributes:
        unit: how a block stands in a colder tier.
        block_size: tokens a block.
    """

    def __init__(self, pools: Pools, host: HostTier | None, device: Device) -> None:
        groups = range(len(pools.config.groups))
        self.block_size = pools.config.block_size
        self.unit = UnitLayout.of(pools.of_group(0))
        self._device = device
        self._layouts = [[pool.layout for pool in pools.of_group(group)] for group in groups]
        self._device_parts = [[pool.blocks for pool in pools.of_group(group)] for group in groups]
        self._parts = {DEVICE: self._device_parts[0], HOST: host.parts if host else []}
        if device.is_cuda:
            with device.guard():
                load("copy_blocks.cu", "copy_blocks", "S")  # compiled now, not in the middle of steps
        self.within(np.empty((0, 4), np.int32))  # and what torch does at an op's first call is done

    def cross(self, source_tier: int, target_tier: int, pairs: NDArray[np.intp]) -> None:
        """Copy whole blocks between device and host: pairs [N, 2] of source and target slots, targets distinct."""
        source, target = self._parts[source_tier], self._parts[target_tier]
        if not self._device.is_cuda:
            moves = np.zeros((len(pairs), 4), np.int32)
            moves[:, :2], moves[:, 3] = pairs, self.block_size
            ops.copy_blocks(source, target, torch.from_numpy(moves), self._layouts[0])
            return
        sources, targets, sizes = list[int](), list[int](), list[int]()
        for one, other in zip(source, target, strict=True):
            sources += (pairs[:, 0] * one.stride(0) + one.data_ptr()).tolist()
            targets += (pairs[:, 1] * other.stride(0) + other.data_ptr()).tolist()
            sizes += [one.shape[1] * one.shape[2]] * len(pairs)
        self._device.copy_all(targets, sources, sizes, torch.cuda.current_stream(self._device.torch).cuda_stream)

    def within(self, moves: NDArray[np.int32], group: int = 0) -> None:
        """Copy tokens of blocks of the device: moves [N, 4] as of `ops.copy_blocks`, independent of each other.

        The blocks are those of one layer group; nothing is copied where no layer is in it.
        """
        if parts := self._device_parts[group]:
            ops.copy_blocks(parts, parts, torch.from_numpy(moves), self._layouts[group])


def independent_moves(jobs: Sequence[CopyJob]) -> list[NDArray[np.int32]]:
    """The jobs, all of one layer group, as moves [N, 4], cut so that no target is in another move of its stretch."""
    batches: list[NDArray[np.int32]] = []
    moves = np.array([(job.source, job.target, 0, job.tokens) for job in jobs], np.int32).reshape(-1, 4)
    first, sources, targets = 0, set[int](), set[int]()
    for number, (source, target) in enumerate(moves[:, :2].tolist()):
        if source in targets or target in targets or target in sources:
            batches.append(moves[first:number])
            first, sources, targets = number, set(), set()
        sources.add(source)
        targets.add(target)
    return [*batches, moves[first:]]
