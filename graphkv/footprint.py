"""What a runtime takes in bytes, itemised, before it is built: pools, metadata, staging, results, colder tiers.

Workspaces belong to the model and are known once it has run: `DecodeRuntime.footprint` has them, an estimate has not.
Everything else follows from the configuration, and is what the constructors allocate, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.engine import EngineShape
from graphkv.latch import RING_HEADER_WORDS
from graphkv.packet import PacketSize
from graphkv.sizing import CacheSize

_WORD, _LONG = 4, 8


class Item(NamedTuple):
    """One kind of memory.

    Attributes:
        name: what it is.
        device_bytes: of device memory (of plain host memory on the CPU device).
        pinned_bytes: of page-locked host memory (plain on the CPU device).
    """

    name: str
    device_bytes: int = 0
    pinned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a runtime by kind."""

    items: tuple[Item, ...]

    @property
    def device_bytes(self) -> int:
        return sum(item.device_bytes for item in self.items)

    @property
    def pinned_bytes(self) -> int:
        return sum(item.pinned_bytes for item in self.items)

    def of(self, name: str) -> Item:
        """The sum of the items of that name; zeros if there is none."""
        items = [item for item in self.items if item.name == name]
        return Item(name, sum(i.device_bytes for i in items), sum(i.pinned_bytes for i in items))

    def __str__(self) -> str:
        lines = [f"{'':34} {'device bytes':>18} {'pinned bytes':>18}"]
        total = Item("in all", self.device_bytes, self.pinned_bytes)
        lines += [f"{name:34} {device:18,} {pinned:18,}" for name, device, pinned in (*self.items, total)]
        return "\n".join(lines)

    @classmethod
    def estimate(
        cls,
        config: CacheConfig,
        shape: EngineShape,
        num_blocks: Sequence[int],
        device: Device,
        *,
        host_bytes: int = 0,
        workspace_bytes: int = 0,
    ) -> Footprint:
        """The memory of a runtime of that shape.

        Warm-up and capture need no block and nothing besides: they run on padded rows, which write nowhere.

        Args:
            num_blocks: of each layer group, the null block included.
            device: where it will run; its multiprocessors are the workers of a schedule.
            host_bytes: of the host tier.
            workspace_bytes: what the model's steps ask for.
        """
        items = [
            *_pools(config, num_blocks),
            *_metadata(config, shape, device.sm_count),
            *_staging(shape, device.is_cuda),
            Item("host tier", 0, host_bytes),
            Item("workspace", workspace_bytes),
        ]
        return cls(tuple(item for item in items if item.device_bytes or item.pinned_bytes))


def _pools(config: CacheConfig, num_blocks: Sequence[int]) -> Iterator[Item]:
    size = CacheSize.of(config)
    for group, blocks in enumerate(num_blocks):
        for side in config.sides:
            for role in dict.fromkeys(page.role for page in size.pages):
                name = f"pool, {side} {role}" + (f", group {group}" if group else "")
                yield Item(name, blocks * size.block_bytes(side, role, group=group))


def _metadata(config: CacheConfig, shape: EngineShape, parts: int) -> Iterator[Item]:
    rows, tokens, columns = shape.widest, shape.max_tokens, shape.max_blocks
    per_token = 6 * _LONG + 2 * _WORD
    per_row = 3 * _WORD + 2 * _WORD * columns + _WORD  # batch_row, seq_len, live_columns, tables, query_start
    live = tokens * per_token + rows * per_row + _WORD + 2 * _WORD * (parts + 1) + _WORD
    for side in config.sides:
        yield Item(f"live set, {side}", live * len(config.side_groups(side)))
    lines = len(config.groups) * shape.max_rows
    tables = _WORD * (2 + shape.max_rows * (1 + shape.next_n) + lines * columns)
    yield Item("tables and lengths", tables, 4 * _WORD)


def _staging(shape: EngineShape, is_cuda: bool) -> Iterator[Item]:
    arena = _WORD * PacketSize(rows=shape.widest, edits=shape.max_edits, tokens=shape.max_tokens).words
    yield Item("frames", 2 * arena if is_cuda else 0, 2 * arena)
    line = RING_HEADER_WORDS + shape.widest * (1 + shape.next_n)
    yield Item("result ring", 0, 2 * _WORD * line)
