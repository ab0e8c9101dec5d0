"""Rows whose blocks are elsewhere: suspended to a colder tier, on their way back, or matched where it is cold.

Only rows that are ready can be stepped. All else happens beside the steps: a transfer is begun, `poll` notices its end,
and a row that has become ready gets its table cells then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from graphkv.errors import InvalidValue, OutOfBlocks, TransferTimeout
from graphkv.manager.blocks import Int32s
from graphkv.manager.content import ContentCache
from graphkv.manager.content_rows import ContentRows, token_array
from graphkv.manager.prefix import ABSENT, EVERYONE, Content, Match, Node, Scope
from graphkv.manager.tiering import HOST, Item, Load, Move, Tiering
from graphkv.transfer import DEVICE


class RowState(StrEnum):
    """Where a row's sequence is. Only a ready one may be stepped, extended, rewound, forked or suspended."""

    CLOSED = "closed"
    READY = "ready"
    LOADING = "loading"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"


@dataclass(slots=True)
class _Bring:
    """A load, and what becomes of it: `done(load)` once it ended and the journal has room for its cells."""

    load: Load
    done: Callable[[Load], None]


class MovingRows(ContentRows):
    """Rows over all tiers of a `ContentCache`.

    Attributes:
        resume_limit: share of the device's blocks that may be in use after a resume.
        on_ready: called with a row that has become ready, be it that it came, or that it could not leave.
        cached_in_colder: int32 [max_rows, colder tiers], tokens of `cached_tokens` that came from each of them.
        tokens_missed: int32 [max_rows], tokens that were found cached when the row was opened, and are not used: there
            was no room for them, their copy was bad, or they are still on their way.
        blocks_moved: int32 [max_rows], blocks that transfers brought to another tier on behalf of the row.
    """

    def __init__(
        self,
        cache: ContentCache,
        tiering: Tiering,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        max_edits: int | None,
        prefix_caching: bool,
        clock: Callable[[], float],
        resume_limit: float,
        groups: int,
    ) -> None:
        super().__init__(cache, block_size, max_rows, max_blocks, max_edits, prefix_caching, clock, groups)
        self.resume_limit = resume_limit
        self.on_ready: list[Callable[[int], None]] = []
        self.cached_in_colder = np.zeros((max_rows, len(cache.tiers) - 1), np.int32)
        self.tokens_missed, self.blocks_moved = np.zeros((2, max_rows), np.int32)
        self.missed = 0
        self._tiering = tiering
        self._brings: list[_Bring] = []
        self._leaving: list[list[Item]] = []  # copies of rows that are being suspended
        self._state: dict[int, RowState] = {}  # of rows that are open and not ready
        self._suspended: dict[int, list[Item]] = {}  # where their blocks are

    def state(self, row: int) -> RowState:
        return self._state.get(row, RowState.READY if self.is_open[row] else RowState.CLOSED)

    @property
    def has_colder_tiers(self) -> bool:
        return len(self._cache.tiers) > 1

    @property
    def is_moving(self) -> bool:
        """Whether transfers run, or rows wait to come in."""
        return bool(self._brings) or self._tiering.is_running

    @property
    def is_clearing(self) -> bool:
        """Whether transfers that nobody asked for hold cached blocks of the device, which can be evicted afterwards."""
        return self._tiering.clearing > 0

    def _open_row(self, num_tokens_hint: int, num_cells: int) -> int:
        row = super()._open_row(num_tokens_hint, num_cells)
        self.cached_in_colder[row] = self.tokens_missed[row] = self.blocks_moved[row] = 0
        return row

    def suspend(self, row: int, step: int | None = None) -> None:
        """Begin to move a row's blocks to the host tier; they leave the device once all are there (`poll`).

        Shared blocks need one copy there, however many rows use them. If a copy fails, the row is ready again.

        Args:
            step: the last submitted step that may touch the row; the last of all by default.

        Raises:
            OutOfBlocks: the host tier has no room. Nothing changed.
            InvalidValue: the row is not ready, or steps or copies are in flight that may touch it.
        """
        row = int(self._reader.of(np.array([row])).rows[0])
        self._require_settled(row, self.submitted if step is None else step)
        if self._copies:
            raise InvalidValue(f"{len(self._copies)} copies are pending; take_copies and make them before suspending")
        self.index_commits()
        items, moves = self._copies_to_host(row)
        serial = int(self.serial[row])
        self._leaving.append(items)

        def ended(ok: Sequence[bool]) -> None:
            self._leaving.remove(items)
            for move, fine in zip(moves, ok, strict=True):
                self._note_copy(next(item for item in items if (item.tier, item.slot) == move[2:]), fine)
            self._left(row, serial, items, ok)

        self._put_aside(row, RowState.SUSPENDING)
        if not moves:
            ended(())
            return
        try:
            self._tiering.start(moves, ended)
        except BaseException:
            self._leaving.remove(items)
            self._tiering.release(items)
            self._make_ready(row)
            raise

    def _copies_to_host(self, row: int) -> tuple[list[Item], list[Move]]:
        """Where each block of a row will be while it is suspended, referenced there, and what must move for that."""
        held, tail = int(self.blocks_held[row]), self._tail[row]
        nodes: list[Node | None] = [*(tail.chain() if tail else ()), *[None] * held][:held]
        there = [self._colder_copy(node) for node in nodes]
        missing = there.count(None)
        try:
            if missing and len(self._cache.tiers) == 1:
                raise InvalidValue("there is no colder tier to suspend to; build the manager with tier_slots and mover")
            slots = iter(self._cache.tiers[HOST].take(missing).tolist() if missing else ())
        except (OutOfBlocks, InvalidValue):
            self._tiering.release([item for item in there if item is not None])
            raise
        items: list[Item] = []
        moves: list[Move] = []
        for column, (node, item) in enumerate(zip(nodes, there, strict=True)):
            if item is None:
                item = Item(node, HOST, next(slots))
                moves.append(Move(DEVICE, int(self.block_table[row, column]), HOST, item.slot))
            items.append(item)
        return items, moves

    def _colder_copy(self, node: Node | None) -> Item | None:
        """Where a block is besides the device, referenced there; None if nowhere."""
        for tier in range(HOST, len(self._cache.tiers)):
            if node is not None and (slot := node.slots[tier]) != ABSENT:
                self._cache.tiers[tier].hold(slot)
                return Item(node, tier, slot)
        return None

    def _note_copy(self, item: Item, fine: bool) -> None:
        """A host slot has the bytes of a block, or not."""
        node = item.node
        if fine and node is not None and self._cache.index.knows(node) and node.slots[HOST] == ABSENT:
            self._cache.attach(node, HOST, item.slot)

    def _left(self, row: int, serial: int, items: list[Item], ok: Sequence[bool]) -> None:
        """The copies of a row that is to be suspended have ended."""
        if self.serial[row] != serial or not self.is_open[row]:
            self._tiering.release(items)
            return
        self.blocks_moved[row] += sum(ok)
        if not all(ok):
            self._tiering.release(items)
            self._make_ready(row)
        else:
            held = int(self.blocks_held[row])
            self.blocks.release(self.block_table[row, :held], 0)
            self.table.drop(row, np.arange(held))
            self.blocks_held[row] = 0
            self._suspended[row] = items
            self._state[row] = RowState.SUSPENDED

    def resume(self, row: int) -> None:
        """Begin to bring a suspended row back; it is ready once all its blocks are on the device (`poll`).

        If a block does not come, the row stays suspended, and `resume` may be tried again.

        Raises:
            OutOfBlocks: the device has no room below `resume_limit`. Nothing changed.
            InvalidValue: the row is not suspended.
        """
        if self.state(row) != RowState.SUSPENDED:
            raise InvalidValue(f"row {row} is {self.state(row)}; only a suspended row can be resumed")
        items, counts = self._suspended[row], self.blocks.counts()
        needed = sum(item.tier != DEVICE for item in items)
        room = int(self.resume_limit * counts.total) - counts.held - counts.retiring
        if needed > room:
            raise OutOfBlocks(needed, max(room, 0), counts.retiring)
        load = self._tiering.load(items)
        del self._suspended[row]
        self._state[row] = RowState.LOADING
        serial = int(self.serial[row])
        self._brings.append(_Bring(load, lambda load: self._came_back(row, serial, load, needed)))
        self.poll()

    def _came_back(self, row: int, serial: int, load: Load, asked: int) -> None:
        if self.serial[row] != serial or not self.is_open[row]:
            self._tiering.release(load.items)
            return
        self.blocks_moved[row] += asked - sum(item.tier != DEVICE for item in load.items)
        if load.lost:
            self._suspended[row] = load.items
            self._state[row] = RowState.SUSPENDED
        else:
            ids = np.array([item.slot for item in load.items], np.int32)
            self.table.write(np.full(ids.size, row, np.intp), np.arange(ids.size), ids)
            self.blocks_held[row] = ids.size
            self._make_ready(row)

    # content elsewhere ----------------------------------------------------------------------------------------------

    def _share(self, row: int, found: Match) -> None:
        super()._share(row, found)
        self._miss(row, len(found.nodes) * self.block_size + found.partial_tokens - int(self.length[row]))

    def _miss(self, row: int, tokens: int) -> None:
        self.tokens_missed[row] += tokens
        self.missed += tokens

    def _bring(self, row: int, nodes: Sequence[Node]) -> None:
        items = [item for node in nodes if (item := self._colder_copy(node)) is not None]
        serial, origins = int(self.serial[row]), [item.tier for item in items]
        if self._start_load(items, lambda load: self._matched_came(row, serial, load, origins)):
            self._put_aside(row, RowState.LOADING)

    def _start_load(self, items: list[Item], done: Callable[[Load], None]) -> bool:
        """Begin a load unless there is no room for it; the items are then given up."""
        try:
            load = self._tiering.load(items)
        except OutOfBlocks:
            self._tiering.release(items)
            return False
        self._brings.append(_Bring(load, done))
        return True

    def _matched_came(self, row: int, serial: int, load: Load, origins: Sequence[int]) -> None:
        """What was matched in colder tiers is here, up to the first block that was lost."""
        if self.serial[row] == serial and self.is_open[row]:
            count = min(load.lost, default=len(load.items))
            here = [item.node for item in load.items[:count] if item.node is not None]
            self.blocks.share(np.array([node.slots[DEVICE] for node in here], np.intp))
            self._adopt(row, here)
            self.cached_tokens[row] = self.length[row]
            np.add.at(self.cached_in_colder[row], np.array(origins[:count], np.intp) - HOST, self.block_size)
            self.blocks_moved[row] += count
            self._miss(row, -count * self.block_size)
            self._make_ready(row)
        self._tiering.release(load.items)

    def prefetch(self, tokens: ArrayLike, scope: Scope = EVERYONE, contents: Sequence[Content] = ()) -> int:
        """Begin to bring what is cached of a prompt to the device, for an `open` to come; blocks that are on the way.

        A hint: without room nothing happens, and what came is as evictable as other cached blocks.
        """
        self.index_commits()
        root = self._cache.index.root(scope)
        if root is None:
            return 0
        nodes = self._cache.index.match(root, token_array(tokens), contents).nodes
        first = next((i for i, node in enumerate(nodes) if node.slots[DEVICE] == ABSENT), len(nodes))
        if first == len(nodes):
            return 0
        items = [Item(node, DEVICE, node.slots[DEVICE]) for node in nodes[:first]]
        for item in items:
            self.blocks.hold(item.slot)
        items += [copy for node in nodes[first:] if (copy := self._colder_copy(node)) is not None]
        begun = self._start_load(items, lambda load: self._tiering.release(load.items))
        return len(nodes) - first if begun else 0

    def poll(self, *, begin: bool = True) -> None:
        """Take note of transfers that ended, and begin those that are due. Never waits; call it off the step path.

        Args:
            begin: whether to give cached blocks a copy in a colder tier, too, before their room is needed.
        """
        self.index_commits()
        self._tiering.poll()
        for bring in list(self._brings):
            if self._tiering.advance(bring.load) and self.edits_room >= len(bring.load.items):
                self._brings.remove(bring)
                bring.done(bring.load)
        if begin:
            self._tiering.offload_ahead()

    def overdue(self) -> list[TransferTimeout]:
        """Transfers that have run for too long, to log or raise. Their slots stay out of use until they end."""
        return self._tiering.overdue()

    def _put_aside(self, row: int, state: RowState) -> None:
        self._state[row] = state
        self.is_ready[row] = False
        self._reader.forget()

    def _make_ready(self, row: int) -> None:
        self._state.pop(row, None)
        self.is_ready[row] = True
        for listener in self.on_ready:
            listener(row)

    def close(self, row: int, step: int, serial: int) -> bool:
        """End a sequence in any state, see `Capacity.close`; its findable blocks become cached.

        Of a row that is being moved, what transfers name comes free when they have ended.
        """
        if not super().close(row, step, serial):
            return False
        self._state.pop(row, None)
        self._tiering.release(self._suspended.pop(row, []))
        return True

    def _references(self, tier: int) -> Int32s:
        items = [item for bring in self._brings for item in bring.load.items]
        items += [item for group in (*self._leaving, *self._suspended.values()) for item in group]
        return self._tiering.references(tier, items)

    def passing_references(self) -> Int32s:
        """int32 [num_blocks], references to device blocks that copies, transfers and loads have, and no row."""
        return self.copy_references() + self._references(DEVICE)

    def _other_uses(self) -> Int32s:
        return self.passing_references()
