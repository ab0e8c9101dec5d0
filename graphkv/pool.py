"""Pools own bytes and decide nothing: one allocation a (group, side, role), the pages of all its layers coalesced.

Inside a block the layers' pages stand side by side, so one block id, scaled by the pool's page scale, serves every
layer: seen from its own base a layer's page is `block_id * page_scale`. Addresses are fixed for the pool's life, also
where the pool grows and shrinks: it then reserves the addresses of its largest size, and views cover all of them.

Layers of different windows are different groups (`CacheConfig.groups`), with block ids of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfMemory
from graphkv.growth import ReservedMemory
from graphkv.layout import PageLayout, Role, Side

NULL_BLOCK = 0
NULL_PATTERN = 0xA5
"""Every byte of the null block. As fp32, bf16 and e4m3 it reads as a tiny finite number, so a masked read is harmless
and a stray write shows."""

INT32_MAX = 2**31 - 1


class Pool:
    """The bytes of one role of one side: `num_blocks` blocks of `page_scale` equal pages.

    Attributes:
        data: u8, all blocks, those reserved included; only the first `num_blocks` have memory.
        reserved_blocks: the most blocks it can have.
        num_bytes: memory taken; more than its blocks need where it is mapped in chunks.

    Args:
        layout: bytes of one page.
        page_scale: pages a block, i.e. layers that own the role.
        num_blocks: blocks, the null block included.
        max_blocks_reserved: blocks to reserve addresses for; None fixes the number of blocks.
    """

    def __init__(
        self,
        layout: PageLayout,
        page_scale: int,
        num_blocks: int,
        device: Device,
        max_blocks_reserved: int | None = None,
    ) -> None:
        reserved = num_blocks if max_blocks_reserved is None else max_blocks_reserved
        _check_size(layout, page_scale, num_blocks, reserved)
        self.layout = layout
        self.page_scale = page_scale
        self.num_blocks = num_blocks
        self.reserved_blocks = reserved
        self._memory: ReservedMemory | None = None
        if max_blocks_reserved is None:
            self.data = device.empty(num_blocks * self.block_bytes, torch.uint8)
        else:
            self._memory = ReservedMemory(reserved * self.block_bytes, num_blocks * self.block_bytes, device)
            self.data = self._memory.data
        self.block(NULL_BLOCK).fill_(NULL_PATTERN)

    def resize(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks, at the same addresses. The bytes of new blocks are undefined.

        When it shrinks, nothing may touch the blocks that go, steps and transfers under way included.

        Raises:
            InvalidValue: more blocks than reserved, fewer than 2, or a pool that reserved nothing.
            OutOfMemory: nothing changed.
        """
        if self._memory is None:
            raise InvalidValue(
                f"this pool has {self.num_blocks} blocks for good; build it with max_blocks_reserved to resize it"
            )
        _check_size(self.layout, self.page_scale, num_blocks, self.reserved_blocks)
        self._memory.resize(num_blocks * self.block_bytes)
        self.num_blocks = num_blocks

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes if self._memory is None else self._memory.mapped_bytes

    @property
    def block_bytes(self) -> int:
        return self.page_scale * self.layout.page_bytes

    def block(self, block_id: int) -> torch.Tensor:
        """uint8 [page_scale, page_bytes]: all layers' pages of one block."""
        start = block_id * self.block_bytes
        return self.data[start : start + self.block_bytes].view(self.page_scale, self.layout.page_bytes)

    @property
    def blocks(self) -> torch.Tensor:
        """uint8 [reserved_blocks, page_scale, page_bytes]; blocks past num_blocks have no memory."""
        return self.data.view(self.reserved_blocks, self.page_scale, self.layout.page_bytes)

    def layer_view(self, layer_offset: int) -> torch.Tensor:
        """uint8 [pages, block_size, 1, token_bytes], contiguous, based at one layer's first page.

        Index it with `block_id * page_scale`; pages in between belong to the layers behind this one. It reaches over
        all reserved blocks; pages past `num_blocks * page_scale` have no memory yet.
        """
        layout = self.layout
        pages = self.reserved_blocks * self.page_scale - layer_offset
        base = self.data[layer_offset * layout.page_bytes :]
        return base.view(pages, layout.block_size, 1, layout.token_bytes)


class Pools:
    """All pools of a cache, target and draft sides. A block id means the same block in each pool of its group.

    Attributes:
        num_blocks: blocks of group 0, the null block included.
        window_blocks: blocks of group 1 and those that follow, likewise.

    Args:
        config: the cache's layers and formats.
        num_blocks: blocks in each pool, the null block included.
        max_blocks_reserved: blocks to reserve addresses for, so that `resize` can grow the pools; None for fixed pools.
        window_blocks: blocks in each pool of group 1 and those that follow, likewise; their number stays as it is.
    """

    def __init__(
        self,
        config: CacheConfig,
        num_blocks: int,
        device: Device,
        max_blocks_reserved: int | None = None,
        *,
        window_blocks: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.num_blocks, self.window_blocks = num_blocks, tuple(window_blocks)
        check_window_blocks(config, window_blocks)
        self._pools: dict[tuple[int, Side, Role], Pool] = {}
        self._views: dict[tuple[Side, Role, int], torch.Tensor] = {}
        for group, blocks in enumerate((num_blocks, *window_blocks)):
            reserved = None if group else max_blocks_reserved
            for side in config.sides:
                for role in Role:
                    if scale := config.page_scale(side, role, group):
                        pool = Pool(config.page_layout(role), scale, blocks, device, reserved)
                        self._pools[group, side, role] = pool
        for side in config.sides:
            for layer, spec in enumerate(config.side_layers(side)):
                for role in Role:
                    if spec.owns(role):
                        pool = self._pools[config.group_of(side, layer), side, role]
                        self._views[side, role, layer] = pool.layer_view(config.layer_offset(side, role, layer))

    def pool(self, side: Side, role: Role, group: int = 0) -> Pool:
        if side not in self.config.sides:
            raise InvalidValue(f"this cache has no {side} side; give CacheConfig draft_layers to have one")
        if (group, side, role) not in self._pools:
            raise InvalidValue(f"no {side} layer of group {group} owns {role} bytes, so there is no pool of them")
        return self._pools[group, side, role]

    def of_group(self, group: int) -> list[Pool]:
        """The pools of one group, in which a block id means the same block."""
        return [pool for (owner, _, _), pool in self._pools.items() if owner == group]

    def view(self, side: Side, role: Role, layer: int) -> torch.Tensor:
        """The page view of one layer, see `Pool.layer_view`; the same tensor on every call."""
        view = self._views.get((side, role, layer))
        if view is None:
            if side not in self.config.sides:
                self.pool(side, role)  # raises
            self.config.layer_offset(side, role, layer)  # raises, saying whether the layer or the role is missing
            raise AssertionError(f"no view of {side} {role} layer {layer}")
        return view

    def page_scale(self, side: Side, role: Role, group: int = 0) -> int:
        return self.pool(side, role, group).page_scale

    @property
    def reserved_blocks(self) -> int:
        """The most blocks that `resize` can give; `num_blocks` for fixed pools."""
        return next((pool.reserved_blocks for pool in self.of_group(0)), self.num_blocks)

    def resize(self, num_blocks: int, in_use: Callable[[int], int]) -> None:
        """Have `num_blocks` blocks in every pool of group 0, at the same addresses: captured graphs stay valid.

        The bytes of new blocks are undefined.

        Args:
            in_use: how many block ids from a given one on are not free: owned, cached, retiring, or in a transfer.
                Asked before the pools shrink.

        Raises:
            InvalidValue: blocks that would go are in use; or see `Pool.resize`. Nothing changed.
            OutOfMemory: a pool could not grow. Nothing changed.
        """
        before = self.num_blocks
        if num_blocks < before and (count := in_use(num_blocks)):
            raise InvalidValue(
                f"{count} blocks with ids from {num_blocks} to {before - 1} are in use, so the pools cannot go from "
                f"{before} to {num_blocks} blocks; evict or close what holds them, and retire the steps in flight"
            )
        grown: list[Pool] = []
        try:
            for pool in self.of_group(0):
                pool.resize(num_blocks)
                grown.append(pool)
        except OutOfMemory:
            for pool in grown:
                pool.resize(before)
            raise
        self.num_blocks = num_blocks

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes allocated in all pools."""
        return sum(pool.num_bytes for pool in self._pools.values())


def check_window_blocks(config: CacheConfig, window_blocks: Sequence[int]) -> None:
    """`InvalidValue` unless there is a number of blocks for each group with a window."""
    windows = config.windows
    if len(window_blocks) != len(windows):
        raise InvalidValue(
            f"window_blocks must have one number of blocks for each of {len(windows)} groups with a window, got "
            f"{list(window_blocks)}; see graphkv.window_sizing.split"
        )


def _check_size(layout: PageLayout, page_scale: int, num_blocks: int, reserved: int) -> None:
    if num_blocks < 2:
        raise InvalidValue(f"a pool needs 2 blocks (one is the null block), got num_blocks={num_blocks}")
    if num_blocks > reserved:
        raise InvalidValue(
            f"num_blocks={num_blocks} exceeds the {reserved} blocks reserved; build the pools with a larger "
            "max_blocks_reserved"
        )
    page_slots = reserved * page_scale * layout.block_size
    if page_slots > INT32_MAX:
        raise InvalidValue(
            f"{reserved} blocks of {page_scale} {layout.role} pages make {page_slots} token slots, but page "
            f"indices and top-k slots are 32-bit (limit {INT32_MAX}); use at most "
            f"{INT32_MAX // (page_scale * layout.block_size)} blocks"
        )
