"""Pools own bytes and decide nothing: one allocation a (side, role), with the pages of all its layers coalesced.

Inside a block the layers' pages stand side by side, so one block id, scaled by the pool's page scale, serves every
layer: seen from its own base a layer's page is `block_id * page_scale`. Addresses are fixed for the pool's life.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.layout import PageLayout, Role, Side

NULL_BLOCK = 0
NULL_PATTERN = 0xA5
"""Every byte of the null block. As fp32, bf16 and e4m3 it reads as a tiny finite number, so a masked read is harmless
and a stray write shows."""

INT32_MAX = 2**31 - 1


class Pool:
    """The bytes of one role of one side: `num_blocks` blocks of `page_scale` equal pages.

    Args:
        layout: bytes of one page.
        page_scale: pages a block, i.e. layers that own the role.
        num_blocks: blocks, the null block included.
    """

    def __init__(self, layout: PageLayout, page_scale: int, num_blocks: int, device: Device) -> None:
        if num_blocks < 2:
            raise InvalidValue(f"a pool needs 2 blocks (one is the null block), got num_blocks={num_blocks}")
        page_slots = num_blocks * page_scale * layout.block_size
        if page_slots > INT32_MAX:
            raise InvalidValue(
                f"{num_blocks} blocks of {page_scale} {layout.role} pages make {page_slots} token slots, but page "
                f"indices and top-k slots are 32-bit (limit {INT32_MAX}); use at most "
                f"{INT32_MAX // (page_scale * layout.block_size)} blocks"
            )
        self.layout = layout
        self.page_scale = page_scale
        self.num_blocks = num_blocks
        self.data = device.empty(num_blocks * page_scale * layout.page_bytes, torch.uint8)
        self.block(NULL_BLOCK).fill_(NULL_PATTERN)

    @property
    def block_bytes(self) -> int:
        return self.page_scale * self.layout.page_bytes

    def block(self, block_id: int) -> torch.Tensor:
        """uint8 [page_scale, page_bytes]: all layers' pages of one block."""
        start = block_id * self.block_bytes
        return self.data[start : start + self.block_bytes].view(self.page_scale, self.layout.page_bytes)

    def layer_view(self, layer_offset: int) -> torch.Tensor:
        """uint8 [pages, block_size, 1, token_bytes], contiguous, based at one layer's first page.

        Index it with `block_id * page_scale`; pages in between belong to the layers behind this one.
        """
        layout = self.layout
        pages = self.num_blocks * self.page_scale - layer_offset
        base = self.data[layer_offset * layout.page_bytes :]
        return base.view(pages, layout.block_size, 1, layout.token_bytes)


class Pools:
    """All pools of a cache, target and draft sides. A block id means the same block in each of them.

    Args:
        config: the cache's layers and formats.
        num_blocks: blocks in each pool, the null block included.
    """

    def __init__(self, config: CacheConfig, num_blocks: int, device: Device) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self._pools: dict[tuple[Side, Role], Pool] = {}
        self._views: dict[tuple[Side, Role, int], torch.Tensor] = {}
        for side in config.sides:
            for role in Role:
                layout, scale = config.page_layout(role), config.page_scale(side, role)
                self._pools[side, role] = Pool(layout, scale, num_blocks, device)
                for layer, spec in enumerate(config.side_layers(side)):
                    if spec.owns(role):
                        offset = config.layer_offset(side, role, layer)
                        self._views[side, role, layer] = self._pools[side, role].layer_view(offset)

    def pool(self, side: Side, role: Role) -> Pool:
        if (side, role) not in self._pools:
            raise InvalidValue(f"this cache has no {side} side; give CacheConfig draft_layers to have one")
        return self._pools[side, role]

    def view(self, side: Side, role: Role, layer: int) -> torch.Tensor:
        """The page view of one layer, see `Pool.layer_view`; the same tensor on every call."""
        view = self._views.get((side, role, layer))
        if view is None:
            self.pool(side, role)
            self.config.layer_offset(side, role, layer)  # raises, saying whether the layer or the role is missing
            raise AssertionError(f"no view of {side} {role} layer {layer}")
        return view

    def page_scale(self, side: Side, role: Role) -> int:
        return self.pool(side, role).page_scale

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes allocated in all pools."""
        return sum(pool.data.nbytes for pool in self._pools.values())
