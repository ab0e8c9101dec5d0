"""V1: one pool a layer, and a manager that keeps a Python list of block ids for each request.

It is the manager that V2 replaced, kept as the baseline: for bytes (the same workload leaves the same index K and
latents) and in perf. It knows no journal, so every step builds whole tables from the lists; it shares nothing between
sequences, moves nothing between tiers, and its pools cannot grow. `ManagerV2` has the same verbs and more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.errors import InvalidValue, OutOfBlocks, OutOfRows
from graphkv.layout import Role, Side
from graphkv.pool import Pool

Int32s = NDArray[np.int32]
RewindListener = Callable[[int, int, Int32s], None]


class LayerPools:
    """One pool for each (side, role, layer), of one page a block: a block id is a page index everywhere.

    Args:
        config: the cache's layers and formats.
        num_blocks: blocks in each pool, the null block included.
    """

    def __init__(self, config: CacheConfig, num_blocks: int, device: Device) -> None:
        self.config = config
        self.num_blocks = num_blocks
        self._pools: dict[tuple[Side, Role, int], Pool] = {}
        for side in config.sides:
            for role in Role:
                for layer, spec in enumerate(config.side_layers(side)):
                    if spec.owns(role):
                        self._pools[side, role, layer] = Pool(config.page_layout(role), 1, num_blocks, device)
        self._views = {key: pool.layer_view(0) for key, pool in self._pools.items()}

    def pool(self, side: Side, role: Role, layer: int) -> Pool:
        if (side, role, layer) not in self._pools:
            self.config.layer_offset(side, role, layer)  # raises, saying whether the layer or the role is missing
        return self._pools[side, role, layer]

    def view(self, side: Side, role: Role, layer: int) -> torch.Tensor:
        """uint8 [num_blocks, block_size, 1, token_bytes], indexed by block id; the same tensor on every call."""
        self.pool(side, role, layer)
        return self._views[side, role, layer]

    def page_scale(self, side: Side, role: Role) -> int:
        """1: a pool holds one layer."""
        return 1

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    @property
    def num_bytes(self) -> int:
        """Bytes allocated in all pools."""
        return sum(pool.data.nbytes for pool in self)


@dataclass(frozen=True, slots=True)
class ManagerV1Stats:
    """Counts of a V1 manager at one moment. Blocks exclude the null block."""

    blocks_total: int
    blocks_free: int
    blocks_held: int
    blocks_retiring: int
    rows_open: int


class ManagerV1:
    """Rows, lengths and each row's list of block ids. A call that raises has changed nothing.

    Args:
        num_blocks: blocks in the pools, the null block (id 0, never handed out) included.
        block_size: tokens a block.
        max_rows: sequences open at once.
        max_blocks: most blocks of a row, the columns of a table.

    Attributes:
        length: int32 [max_rows], tokens whose KV is valid once the submitted steps ran.
        serial: int64 [max_rows], how many sequences each row has had.
        on_rewind: told (row, new length, ids given up) of each rewind that gives up blocks.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_rows: int, max_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidValue(f"num_blocks must be at least 2 (the null block and one to hand out), got {num_blocks}")
        for name, value in (("block_size", block_size), ("max_rows", max_rows), ("max_blocks", max_blocks)):
            if value < 1:
                raise InvalidValue(f"{name} must be positive, got {value}")
        self.num_blocks, self.block_size, self.max_rows, self.max_blocks = num_blocks, block_size, max_rows, max_blocks
        self.length = np.zeros(max_rows, np.int32)
        self.serial = np.zeros(max_rows, np.int64)
        self.on_rewind: list[RewindListener] = []
        self._blocks: list[list[int] | None] = [None] * max_rows
        self._free = list(range(num_blocks - 1, 0, -1))
        self._retiring: dict[int, list[int]] = {}  # ids by the step that may still touch them
        self._retired = 0

    @property
    def max_tokens(self) -> int:
        """Tokens that a row can hold."""
        return self.max_blocks * self.block_size

    def open(self, num_tokens_hint: int = 0) -> int:
        """A free row, with length 0 and no blocks; `OutOfRows` if there is none.

        Args:
            num_tokens_hint: tokens the sequence is known to need; refused now if no row could ever hold them.
        """
        if not 0 <= num_tokens_hint <= self.max_tokens:
            raise InvalidValue(
                f"a sequence of {num_tokens_hint} tokens does not fit a row of {self.max_tokens}; build with more "
                "max_blocks"
            )
        for row, blocks in enumerate(self._blocks):
            if blocks is None:
                self._blocks[row] = []
                self.length[row] = 0
                self.serial[row] += 1
                return row
        raise OutOfRows(self.max_rows)

    def blocks(self, row: int) -> list[int]:
        """The ids of an open row, in order. For reading."""
        blocks = self._blocks[row] if 0 <= row < self.max_rows else None
        if blocks is None:
            raise InvalidValue(f"row {row} is not open; only open rows among 0 .. {self.max_rows - 1} can be named")
        return blocks

    def extend(self, rows: ArrayLike, n: ArrayLike) -> int:
        """Make room for `n` more tokens (one count, or one a row) in every row, or in none; the blocks added.

        Raises:
            OutOfBlocks: the pools are short.
            InvalidValue: a bad row or n, or a row past `max_tokens`.
        """
        missing = []
        for row, more in self._batch(rows, n):
            tokens = int(self.length[row]) + more
            if tokens > self.max_tokens:
                raise InvalidValue(
                    f"row {row} of length {self.length[row]} would need {tokens} tokens, but a row has room for "
                    f"{self.max_tokens}; close it or build with more max_blocks"
                )
            missing.append((row, max(0, -(-tokens // self.block_size) - len(self.blocks(row)))))
        needed = sum(count for _, count in missing)
        if needed > len(self._free):
            raise OutOfBlocks(needed, len(self._free), sum(map(len, self._retiring.values())))
        for row, count in missing:
            self.blocks(row).extend(self._free.pop() for _ in range(count))
        return needed

    def advance(self, rows: ArrayLike, n: ArrayLike) -> None:
        """Move lengths up by `n`, when a step is submitted; `InvalidValue` where a row has no room for it."""
        batch = self._batch(rows, n)
        for row, more in batch:
            room = len(self.blocks(row)) * self.block_size
            if self.length[row] + more > room:
                raise InvalidValue(
                    f"row {row} cannot advance to {self.length[row] + more} tokens with room for {room}; extend first"
                )
        for row, more in batch:
            self.length[row] += more

    def settle(self, rows: ArrayLike, surplus: ArrayLike) -> None:
        """Take back what a retired step was credited beyond what it accepted: lengths go down, blocks stay."""
        for row, length in self._shortened(rows, surplus, "surplus"):
            self.length[row] = length

    def rewind(self, rows: ArrayLike, n: ArrayLike, step: int) -> int:
        """Lengths go back by `n`; blocks wholly past the new length are given up, and their number returned.

        Args:
            step: the last submitted step that may touch these rows; their ids are handed out again once it retired.
        """
        given_up = []
        for row, length in self._shortened(rows, n, "n"):
            blocks = self.blocks(row)
            keep = -(-length // self.block_size)
            ids = blocks[keep:]
            del blocks[keep:]
            self.length[row] = length
            self._release(ids, step)
            if ids:
                given_up.append((row, length, np.array(ids, np.int32)))
        for listener in self.on_rewind:
            for notice in given_up:
                listener(*notice)
        return sum(ids.size for _, _, ids in given_up)

    def close(self, row: int, step: int, serial: int) -> bool:
        """End the sequence that opened `row` as its `serial`-th; False, and nothing done, if it ended before."""
        row = operator.index(row)
        if not 0 <= row < self.max_rows or not 1 <= serial <= self.serial[row]:
            raise InvalidValue(f"row {row} was never opened with serial {serial}; rows are 0 .. {self.max_rows - 1}")
        blocks = self._blocks[row]
        if serial != self.serial[row] or blocks is None:
            return False
        self._release(blocks, step)
        self._blocks[row] = None
        self.length[row] = 0
        return True

    def retire(self, step: int) -> None:
        """Every step up to `step` has retired: blocks that waited for them become free."""
        self._retired = max(self._retired, step)
        for done in [waiting for waiting in self._retiring if waiting <= self._retired]:
            self._free += self._retiring.pop(done)

    def block_tables(self, rows: ArrayLike, out: Int32s) -> None:
        """Write the whole table line of each row into `out`, int32 [B, max_blocks], the null block past its blocks."""
        for line, (row, _) in zip(out, self._batch(rows, 0), strict=True):
            blocks = self.blocks(row)
            line[: len(blocks)] = blocks
            line[len(blocks) :] = 0

    def stats(self) -> ManagerV1Stats:
        """Counts, now."""
        retiring = sum(map(len, self._retiring.values()))
        held = sum(len(blocks) for blocks in self._blocks if blocks is not None)
        rows_open = sum(blocks is not None for blocks in self._blocks)
        return ManagerV1Stats(self.num_blocks - 1, len(self._free), held, retiring, rows_open)

    def check(self) -> None:
        """`AssertionError` with the facts if a block is lost or in two places, or a row is longer than its blocks."""
        ids = list(self._free)
        for waiting in self._retiring.values():
            ids += waiting
        for row, blocks in enumerate(self._blocks):
            ids += blocks or []
            if not 0 <= self.length[row] <= len(blocks or []) * self.block_size:
                raise AssertionError(f"row {row} has length {self.length[row]} and blocks {blocks}")
        if sorted(ids) != list(range(1, self.num_blocks)):
            raise AssertionError(f"blocks {sorted(ids)} are not each of 1 .. {self.num_blocks - 1} once")

    def _release(self, ids: list[int], step: int) -> None:
        if step <= self._retired:
            self._free += ids
        elif ids:
            self._retiring.setdefault(step, []).extend(ids)

    def _shortened(self, rows: ArrayLike, n: ArrayLike, name: str) -> list[tuple[int, int]]:
        batch = self._batch(rows, n)
        for row, count in batch:
            if count > self.length[row]:
                raise InvalidValue(f"{name} {count} is more than the {self.length[row]} tokens of row {row}")
        return [(row, int(self.length[row]) - count) for row, count in batch]

    def _batch(self, rows: ArrayLike, n: ArrayLike) -> list[tuple[int, int]]:
        """(row, count) of each row: open, named once, with a count within 0 .. max_tokens."""
        given = np.asarray(rows)
        counts = np.asarray(n)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise InvalidValue(f"rows must be a one-dimensional array of integers, got {given.dtype} {given.shape}")
        if counts.dtype.kind not in "iu" or counts.shape not in ((), given.shape):
            raise InvalidValue(
                f"counts must be an integer or one for each of {given.size} rows, got {counts.dtype} {counts.shape}"
            )
        batch = list(zip(given.tolist(), np.broadcast_to(counts, given.shape).tolist(), strict=True))
        if len({row for row, _ in batch}) < len(batch):
            raise InvalidValue(f"a row is named more than once in a batch of {len(batch)} rows: {given.tolist()}")
        for row, count in batch:
            self.blocks(row)
            if not 0 <= count <= self.max_tokens:
                raise InvalidValue(f"row {row} was given a count of {count}, not within 0 .. {self.max_tokens} tokens")
        return batch
