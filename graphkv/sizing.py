"""What a cache costs in bytes: per token and per block, by side, role and layer; and how many blocks a budget holds.

Every number here equals what `graphkv.pool` allocates: one pool per (group, side, role) of
`num_blocks * page_scale * page_bytes` bytes, the null block included. Nothing is measured and no memory is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphkv.config import CacheConfig
from graphkv.errors import InvalidValue
from graphkv.layout import Role, Side


@dataclass(frozen=True, slots=True)
class PageSize:
    """Bytes that one layer of one side owns for one role.

    Attributes:
        token_bytes: bytes a token (values and scales).
        page_bytes: bytes a block, this layer's share.
        group: the layer's group, see `CacheConfig.groups`.
    """

    side: Side
    role: Role
    layer: int
    token_bytes: int
    page_bytes: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes of the cache that `CacheConfig` describes, itemised.

    Attributes:
        block_size: tokens a block.
        pages: one entry for each page of a block, in the order side, role, layer.
    """

    block_size: int
    pages: tuple[PageSize, ...]

    @classmethod
    def of(cls, config: CacheConfig) -> CacheSize:
        """The size of the cache of `config`."""
        return cls(config.block_size, tuple(_pages(config)))

    def token_bytes(
        self, side: Side | None = None, role: Role | None = None, layer: int | None = None, group: int | None = None
    ) -> int:
        """Bytes of one token, over all pages or over those of one side, role, layer and group."""
        return sum(page.token_bytes for page in self._select(side, role, layer, group))

    def block_bytes(
        self, side: Side | None = None, role: Role | None = None, layer: int | None = None, group: int | None = None
    ) -> int:
        """Bytes of one block, over all pages or over those of one side, role, layer and group."""
        return sum(page.page_bytes for page in self._select(side, role, layer, group))

    def pool_bytes(
        self, num_blocks: int, side: Side | None = None, role: Role | None = None, group: int | None = None
    ) -> int:
        """Bytes of pools of `num_blocks` blocks (the null block included), of all or of one side, role and group."""
        if num_blocks < 2:
            raise InvalidValue(f"num_blocks must be at least 2 (the null block and one to hand out), got {num_blocks}")
        return num_blocks * self.block_bytes(side, role, group=group)

    def blocks_for(self, memory_bytes: int) -> int:
        """The most blocks (the null block included) whose pools fit in `memory_bytes`; `InvalidValue` below 2.

        With layers of several windows there is no one number: see `graphkv.window_sizing.split`.
        """
        if any(page.group for page in self.pages):
            raise InvalidValue(
                "layers with a window have a number of blocks of their own, so memory_bytes alone gives none; use "
                "graphkv.window_sizing.split"
            )
        num_blocks = memory_bytes // self.block_bytes()
        if num_blocks < 2:
            raise InvalidValue(
                f"memory_bytes {memory_bytes} holds {max(num_blocks, 0)} blocks of {self.block_bytes()} bytes, but a "
                f"cache needs 2 (the null block and one to hand out): give at least {2 * self.block_bytes()} bytes, or "
                "choose narrower formats or a smaller block_size"
            )
        return num_blocks

    def num_blocks(self, num_blocks: int | None, memory_bytes: int | None) -> int:
        """The pools' blocks from either of two options of which one must be given, as in `DecodeRuntime`."""
        if num_blocks is not None and memory_bytes is None:
            return num_blocks
        if memory_bytes is not None and num_blocks is None:
            return self.blocks_for(memory_bytes)
        raise InvalidValue(f"give num_blocks or memory_bytes, not both or none; got {num_blocks} and {memory_bytes}")

    def blocks_for_tokens(self, tokens: int) -> int:
        """The fewest blocks (the null block included) that hold one sequence of `tokens` tokens."""
        if tokens < 1:
            raise InvalidValue(f"tokens must be at least 1, got {tokens}")
        return 1 + -(-tokens // self.block_size)

    def _select(self, side: Side | None, role: Role | None, layer: int | None, group: int | None) -> Iterator[PageSize]:
        for page in self.pages:
            where = side in (None, page.side) and group in (None, page.group)
            if where and role in (None, page.role) and layer in (None, page.layer):
                yield page


def _pages(config: CacheConfig) -> Iterator[PageSize]:
    for side in config.sides:
        for role in Role:
            layout = config.page_layout(role)
            for layer, spec in enumerate(config.side_layers(side)):
                if spec.owns(role):
                    group = config.group_of(side, layer)
                    yield PageSize(side, role, layer, layout.token_bytes, layout.page_bytes, group)
