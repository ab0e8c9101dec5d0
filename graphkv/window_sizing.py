"""How many blocks the layer groups of a model with windows need, and how a budget is split between them.

Group 0 grows with the sequences; a group with a window needs a bounded number of blocks a row, however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphkv.config import CacheConfig
from graphkv.errors import InvalidValue
from graphkv.sizing import CacheSize
from graphkv.window import Window

_STEPS_HELD = 4  # a stale block is free again that many steps after the one whose tokens made it stale


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """What is to be held at once.

    Attributes:
        rows: sequences.
        longest: tokens of each of them, at most.
        next_n: query tokens a row and decode step.
        prefill_chunk: most tokens of a prefill step.
        rewind_room: tokens behind the window that stay readable.
    """

    rows: int
    longest: int
    next_n: int = 1
    prefill_chunk: int = 0
    rewind_room: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("longest", 1), ("next_n", 1), ("prefill_chunk", 0), ("rewind_room", 0)):
            if getattr(self, name) < least:
                raise InvalidValue(f"{name} must be at least {least}, got {getattr(self, name)}")

    def blocks(self, window: Window | None, block_size: int) -> int:
        """Blocks (the null block included) of a group of that window, with which no step ever waits for room."""
        columns = -(-(self.longest + self.next_n) // block_size)
        whole = 1 + self.rows * columns
        if window is None:
            return whole
        a_row = window.most_blocks(self.rewind_room + _STEPS_HELD * self.next_n, block_size) + 1
        chunks = -(-_STEPS_HELD * self.prefill_chunk // block_size)
        return min(whole, 1 + self.rows * a_row + chunks)


def group_blocks(config: CacheConfig, load: GroupLoad) -> tuple[int, ...]:
    """Blocks of each group's pools, the null block included, that hold the whole load."""
    return tuple(load.blocks(window, config.block_size) for window in config.groups)


def choose_blocks(
    config: CacheConfig,
    num_blocks: int | None,
    memory_bytes: int | None,
    window_blocks: Sequence[int] | None,
    load: GroupLoad,
) -> tuple[int, ...]:
    """Blocks of each group's pools from what a caller gives of them, as in `DecodeRuntime`.

    Args:
        num_blocks, memory_bytes: blocks of group 0, or a budget for the pools of all groups; one of the two.
        window_blocks: blocks of each group with a window, not with a budget; None for what the load needs.
    """
    if len(config.groups) == 1:
        if window_blocks:
            raise InvalidValue(f"window_blocks {list(window_blocks)} are for layers with a window, and there is none")
        return (CacheSize.of(config).num_blocks(num_blocks, memory_bytes),)
    if (num_blocks is None) == (memory_bytes is None):
        raise InvalidValue(f"give num_blocks or memory_bytes, not both or none; got {num_blocks} and {memory_bytes}")
    if window_blocks is not None and len(window_blocks) != len(config.windows):
        raise InvalidValue(
            f"window_blocks must have one number of blocks for each of {len(config.windows)} groups with a window, "
            f"got {list(window_blocks)}"
        )
    if num_blocks is not None:
        return (num_blocks, *(group_blocks(config, load)[1:] if window_blocks is None else window_blocks))
    if window_blocks is not None:
        raise InvalidValue(f"give window_blocks {list(window_blocks)} with num_blocks; memory_bytes is split by itself")
    return split(config, memory_bytes or 0, load)


def split(config: CacheConfig, memory_bytes: int, load: GroupLoad) -> tuple[int, ...]:
    """Blocks of each group's pools, the null block included, that fit in `memory_bytes` together.

    Groups with a window get what the load needs, and group 0 the rest; where that is less than what the load needs of
    group 0, all get the same share of their need. Without a layer in group 0 its blocks cost nothing.

    Raises:
        InvalidValue: not 2 blocks of each group fit.
    """
    size = CacheSize.of(config)
    need = group_blocks(config, load)
    cost = [size.block_bytes(group=group) for group in range(len(need))]
    whole = sum(blocks * bytes_ for blocks, bytes_ in zip(need, cost, strict=True))
    if memory_bytes >= whole:
        spare = (memory_bytes - whole) // cost[0] if cost[0] else 0
        return (need[0] + spare, *need[1:])
    blocks = [
        max(2, blocks * memory_bytes // whole) if bytes_ else blocks for blocks, bytes_ in zip(need, cost, strict=True)
    ]
    if sum(n * bytes_ for n, bytes_ in zip(blocks, cost, strict=True)) > memory_bytes:
        least = 2 * sum(cost)
        raise InvalidValue(
            f"memory_bytes {memory_bytes} does not hold the groups of {load}, which need {whole} bytes, nor a fair "
            f"share of them with 2 blocks each ({least} bytes at the least); give more, or state a smaller load"
        )
    return tuple(blocks)
