"""Proof that no row reads what is not its own, and that none can write what others read. Reads everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphkv.transfer import DEVICE

if TYPE_CHECKING:
    from graphkv.manager.blocks import Int32s
    from graphkv.manager.eviction import ContentSlots
    from graphkv.manager.v2 import ManagerV2

_NEVER = np.iinfo(np.int32).max


def check_content(manager: ManagerV2) -> None:
    """`AssertionError` with the facts unless every open row is sole owner of what it may write, and shares only blocks
    that are known, in its own scope, for the very tokens it has there."""
    size = manager.block_size
    uses = manager.blocks.refs - manager.passing_references()
    for row in np.flatnonzero(manager.is_ready).tolist():
        held, length = int(manager.blocks_held[row]), int(manager.length[row])
        for column in range(length // size, held):
            block = int(manager.block_table[row, column])
            if uses[block] != 1 or manager.blocks.kept[block]:
                raise AssertionError(
                    f"row {row} may write block {block} in column {column}, which has {uses[block]} owners and is "
                    f"{'' if manager.blocks.kept[block] else 'not '}findable"
                )
        _check_chain(manager, row, length // size)


def check_references(slots: ContentSlots, uses: Int32s) -> None:
    """`AssertionError` unless the slots of a colder tier are referenced as often as somebody uses them."""
    if (differs := uses != slots.refs).any():
        slot = int(differs.argmax())
        raise AssertionError(
            f"tier {slots.tier}: slot {slot} is used {uses[slot]} times with {slots.refs[slot]} references"
        )


def _check_chain(manager: ManagerV2, row: int, full: int) -> None:
    tail, due = manager.row_tail(row)
    if tail is None:
        return
    if tail.depth > full or due not in (tail.depth + 1, _NEVER):
        raise AssertionError(f"row {row} has {full} full blocks, {tail.depth} findable, and commits next at {due}")
    tokens = manager.token_ids[row, : tail.depth * manager.block_size]
    contents = manager.contents_of(row, tokens, tail.depth)
    for column, (node, content) in enumerate(zip(tail.chain(), contents, strict=True)):
        block = int(manager.block_table[row, column])
        if node.slots[DEVICE] != block or node.content != content:
            raise AssertionError(
                f"row {row} reads block {block} in column {column}, where block {node.slots[DEVICE]} is known for "
                f"{'these' if node.content == content else 'other'} tokens"
            )
