"""Content and private blocks on their way between tiers: transfers, what they hold, and when to start one unasked.

Every slot that a transfer names is referenced by it until the mover has told its end, whoever else lost interest
meanwhile. So nothing is handed out while bytes may still arrive in it, an abort needs no care, and a transfer that
never ends costs its own slots and no more: it is reported as overdue, and its slots come back if it does end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphkv.errors import InvalidValue, OutOfBlocks, TransferTimeout
from graphkv.manager.blocks import Int32s
from graphkv.manager.content import ContentCache
from graphkv.manager.prefix import ABSENT, Node
from graphkv.transfer import DEVICE, BlockMover, CopyJob

HOST = 1
AHEAD = 64
"""So many of the next blocks to be evicted are given a copy in the colder tier before their room is needed."""
PAUSE_S = 1.0
"""Where such a copy failed, no other is begun for that long: a full disk is not asked again and again."""


class Move(NamedTuple):
    """One block's way: slots as the tiers number them here, from 1."""

    source_tier: int
    source: int
    target_tier: int
    target: int

    def job(self, tokens: int) -> CopyJob:
        source = self.source if self.source_tier == DEVICE else self.source - 1
        target = self.target if self.target_tier == DEVICE else self.target - 1
        return CopyJob(self.source_tier, source, self.target_tier, target, tokens)


@dataclass(slots=True)
class _Transfer:
    moves: list[Move]
    on_end: Callable[[Sequence[bool]], None]
    since: float
    owns_targets: bool  # nobody else references these yet


@dataclass(slots=True)
class Item:
    """A block that is wanted on the device: findable content (`node`), or a private block in a colder tier.

    `tier` and `slot` say where it is referenced on behalf of who wants it; `target` is the device block that was taken
    for it, 0 if somebody else is bringing it.
    """

    node: Node | None
    tier: int
    slot: int
    target: int = 0


@dataclass(slots=True)
class Load:
    """Items being brought to the device, in the order of their chain.

    Attributes:
        underway: indices of items that a transfer is carrying.
        lost: indices of items that will not come; their `tier` and `slot` are as before.
    """

    items: list[Item]
    underway: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


class Tiering:
    """Transfers over the tiers of a `ContentCache`.

    Attributes:
        moved, failed: blocks whose transfers ended well, and not.
        clearing: running transfers that give cached blocks of the device a copy, so that these can be evicted.

    Args:
        mover: who carries them out; with None nothing moves and nothing may be asked to.
        block_size: tokens a block.
        clock: seconds.
        limit_s: age at which a transfer is overdue.
        max_blocks_underway: blocks that transfers nobody asked for may name at a time.
    """

    def __init__(
        self,
        cache: ContentCache,
        mover: BlockMover | None,
        block_size: int,
        clock: Callable[[], float],
        limit_s: float,
        max_blocks_underway: int,
    ) -> None:
        self._cache, self._mover, self._block_size = cache, mover, block_size
        self._clock, self._limit, self._max_underway = clock, limit_s, max_blocks_underway
        self._running: dict[int, _Transfer] = {}
        self._offloading: set[Node] = set()
        self._seen: list[object] = [None] * len(cache.tiers)
        self._paused_until = [-math.inf] * len(cache.tiers)
        self.clearing = 0
        self.moved, self.failed = 0, 0

    @property
    def blocks_underway(self) -> int:
        """Blocks that running transfers name."""
        return sum(len(transfer.moves) for transfer in self._running.values())

    @property
    def is_running(self) -> bool:
        """Whether any transfer runs."""
        return bool(self._running)

    def overdue(self) -> list[TransferTimeout]:
        """Transfers that have run for longer than the limit, as errors to log or raise."""
        now = self._clock()
        return [
            TransferTimeout(ticket, now - transfer.since, f"{len(transfer.moves)} blocks")
            for ticket, transfer in self._running.items()
            if now - transfer.since > self._limit
        ]

    def start(self, moves: list[Move], on_end: Callable[[Sequence[bool]], None], *, owns_targets: bool = False) -> None:
        """Begin a transfer from one tier to one other; `on_end` hears which moves succeeded, once it ended.

        If it raises, nothing changed; with `owns_targets` the targets are then given up.
        """
        if self._mover is None:
            raise InvalidValue("this manager has no colder tier; build it with tiers and a mover")
        for move in moves:
            for tier, slot in _both(move):
                self._cache.tiers[tier].hold(slot)
        try:
            ticket = self._mover.submit([move.job(self._block_size) for move in moves])
        except BaseException:
            self._let_go(moves)
            for move in moves if owns_targets else ():
                self._cache.tiers[move.target_tier].drop(move.target)
            raise
        self._running[ticket] = _Transfer(moves, on_end, self._clock(), owns_targets)

    def poll(self) -> None:
        """Take note of transfers that ended. Never waits."""
        for ticket in list(self._running):
            assert self._mover is not None, "a transfer runs only with a mover"
            ended = self._mover.poll(ticket)
            if ended is None:
                continue
            transfer = self._running.pop(ticket)
            self.moved += sum(ended)
            self.failed += len(ended) - sum(ended)
            transfer.on_end(ended)
            self._let_go(transfer.moves)

    def references(self, tier: int, items: Iterable[Item] = ()) -> Int32s:
        """int32 [slots of the tier], references that running transfers and these items have."""
        named = [(item.tier, item.slot) for item in items] + [(DEVICE, item.target) for item in items if item.target]
        for transfer in self._running.values():
            for move in transfer.moves:
                named += _both(move)
                named += [(move.target_tier, move.target)] * transfer.owns_targets
        slots = np.array([slot for where, slot in named if where == tier], np.intp)
        return np.bincount(slots, minlength=self._cache.tiers[tier].num_blocks).astype(np.int32)

    # offload ahead --------------------------------------------------------------------------------------------------

    def offload_ahead(self) -> None:
        """Where a tier runs short of free slots, give the next ones to be evicted a copy in the colder tier."""
        for tier in range(len(self._cache.tiers) - 1):
            slots = self._cache.tiers[tier]
            state = slots.uses, self._cache.stored[tier], self._cache.evicted[tier], len(self._running)
            if slots.free >= AHEAD or state == self._seen[tier] or self.blocks_underway >= self._max_underway:
                continue
            if self._clock() < self._paused_until[tier]:
                continue
            self._seen[tier] = state
            victims = slots.choose(AHEAD)
            slots.put_back(victims)
            nodes = [node for slot in victims if (node := slots.node_at[slot]) is not None]
            colder = tier + 1
            self._offload([n for n in nodes if not any(n.slots[colder:]) and n not in self._offloading], tier)

    def _offload(self, nodes: list[Node], tier: int) -> None:
        colder, target = self._cache.tiers[tier + 1], tier + 1
        taken: list[tuple[Node, int]] = []
        for node in nodes:
            if not self._worth_room(node, tier):
                break
            taken.append((node, int(colder.take(1)[0])))
        if not taken:
            return

        def ended(ok: Sequence[bool]) -> None:
            self.clearing -= tier == DEVICE
            if not all(ok):
                self._paused_until[tier] = self._clock() + PAUSE_S
            for (node, slot), fine in zip(taken, ok, strict=True):
                self._offloading.discard(node)
                self.settle(node, target, slot, fine)

        self.start([Move(tier, node.slots[tier], target, slot) for node, slot in taken], ended, owns_targets=True)
        self._offloading.update(node for node, _ in taken)
        self.clearing += tier == DEVICE

    def _worth_room(self, node: Node, tier: int) -> bool:
        """Whether the colder tier has room for a copy: a free slot, or one with content that is worth no more.

        A copy of what is in this tier as well makes no room for another such: they would take turns for ever.
        """
        colder = self._cache.tiers[tier + 1]
        if colder.free:
            return True
        victims = colder.choose(1)
        colder.put_back(victims)
        there = colder.node_at[victims[0]] if victims else None
        return there is not None and not there.slots[tier] and there.worth.priority <= node.worth.priority

    def settle(self, node: Node, tier: int, slot: int, fine: bool) -> bool:
        """A slot taken for content has its bytes, or not: attach it if it is still wanted, and give it up."""
        wanted = fine and self._cache.index.knows(node) and node.slots[tier] == ABSENT
        if wanted:
            self._cache.attach(node, tier, slot)
        self._cache.tiers[tier].drop(slot)
        return wanted

    # loads ----------------------------------------------------------------------------------------------------------

    def load(self, items: list[Item]) -> Load:
        """Begin to bring items to the device; `OutOfBlocks` with nothing changed if there is no room for them.

        Items own a reference to where they are now, and later to the device block that they are in.
        """
        device = self._cache.device
        missing = [i for i, item in enumerate(items) if item.tier != DEVICE and not _comes_anyway(item.node)]
        targets = device.take(len(missing)).tolist()
        for i, target in zip(missing, targets, strict=True):
            items[i].target = target
            if (node := items[i].node) is not None:
                node.loading = True
        load = Load(items)
        self.advance(load)
        return load

    def advance(self, load: Load) -> bool:
        """Do what can be done for a load now; True once every item is on the device or lost."""
        to_host: list[int] = []
        to_device: dict[int, list[int]] = {}  # by source tier
        clear = True  # all before are on the device, or go there with this transfer: a chain arrives in order
        for i, item in enumerate(load.items):
            if item.tier == DEVICE:
                continue
            node = item.node
            if i not in load.underway and i not in load.lost:
                if node is not None and node.slots[DEVICE] != ABSENT:
                    self._arrived(item)
                    continue
                if not item.target and not (node is not None and node.loading):  # who was bringing it has failed
                    load.lost.add(i)
                elif item.target and item.tier > HOST:
                    to_host.append(i)
                elif item.target and (clear or node is None):
                    to_device.setdefault(item.tier, []).append(i)
                    continue
            clear = False
        if to_host:
            self._carry(load, to_host, HOST)
        for indices in to_device.values():
            self._carry(load, indices, DEVICE)
        if load.lost and not load.underway:  # what comes after a lost block is of no use without it
            for i in range(min(load.lost), len(load.items)):
                if load.items[i].tier != DEVICE and i not in load.lost:
                    self._lose(load, i)
        return all(item.tier == DEVICE or i in load.lost for i, item in enumerate(load.items))

    def _carry(self, load: Load, indices: list[int], target: int) -> None:
        """One hop of some items of one tier: from disk they go through host memory."""
        moves: list[Move] = []
        for i in indices:
            item = load.items[i]
            try:
                slot = item.target if target == DEVICE else int(self._cache.tiers[target].take(1)[0])
            except OutOfBlocks:
                self._lose(load, i)
                continue
            load.underway.add(i)
            moves.append(Move(item.tier, item.slot, target, slot))
        carried = [i for i in indices if i in load.underway]

        def ended(ok: Sequence[bool]) -> None:
            for i, move, fine in zip(carried, moves, ok, strict=True):
                load.underway.discard(i)
                self._hop_ended(load, i, move, fine)

        if not moves:
            return
        try:
            self.start(moves, ended, owns_targets=target != DEVICE)
        except BaseException:
            load.underway.difference_update(carried)
            raise

    def _hop_ended(self, load: Load, index: int, move: Move, fine: bool) -> None:
        item, node = load.items[index], load.items[index].node
        if not fine:
            if move.target_tier != DEVICE:
                self._cache.tiers[move.target_tier].drop(move.target)
            if node is not None and self._cache.index.knows(node) and node.slots[move.source_tier] == move.source:
                self._cache.spoil(node, move.source_tier)
            self._lose(load, index)
        elif node is None:
            self._cache.tiers[item.tier].drop(item.slot)
            item.tier, item.slot, item.target = DEVICE, item.target, 0
        elif move.target_tier == DEVICE:
            node.loading = False
            parent = node.parent
            reachable = parent is not None and (not parent.depth or parent.slots[DEVICE] != ABSENT)
            item.target = 0
            self.settle(node, DEVICE, move.target, reachable)
            if self._cache.index.knows(node) and node.slots[DEVICE] != ABSENT:
                self._arrived(item)
            else:
                load.lost.add(index)
        else:
            self._cache.tiers[move.target_tier].hold(move.target)
            self._cache.tiers[item.tier].drop(item.slot)
            item.tier, item.slot = move.target_tier, move.target
            self.settle(node, move.target_tier, move.target, True)

    def _arrived(self, item: Item) -> None:
        """An item's content is on the device: reference it there instead."""
        assert item.node is not None, "a private block does not arrive by itself"
        self._cache.device.hold(item.node.slots[DEVICE])
        self._cache.tiers[item.tier].drop(item.slot)
        if item.target:
            self._cache.device.drop(item.target)
            item.node.loading = False
        item.tier, item.slot, item.target = DEVICE, item.node.slots[DEVICE], 0

    def _lose(self, load: Load, index: int) -> None:
        item = load.items[index]
        load.lost.add(index)
        if item.target:
            self._cache.device.drop(item.target)
            item.target = 0
            if item.node is not None:
                item.node.loading = False

    def release(self, items: Sequence[Item]) -> None:
        """Give up what items reference."""
        for item in items:
            self._cache.tiers[item.tier].drop(item.slot)

    def _let_go(self, moves: list[Move]) -> None:
        for move in moves:
            for tier, slot in _both(move):
                self._cache.tiers[tier].drop(slot)


def _comes_anyway(node: Node | None) -> bool:
    """Whether content is on the device, or somebody is bringing it."""
    return node is not None and (node.loading or node.slots[DEVICE] != ABSENT)


def _both(move: Move) -> tuple[tuple[int, int], tuple[int, int]]:
    return (move.source_tier, move.source), (move.target_tier, move.target)
