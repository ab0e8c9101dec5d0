"""Calls to a manager that several test files make, and the check that a refused one changed nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphkv.manager.v2 import ManagerV2


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def grow(manager: ManagerV2, row: int, n: int) -> list[int]:
    """Extend and advance one row; its block ids."""
    manager.extend(rows(row), n)
    manager.advance(rows(row), n)
    return ids_of(manager, row)


def ids_of(manager: ManagerV2, row: int) -> list[int]:
    return manager.block_table[row, : manager.blocks_held[row]].tolist()


def snapshot(manager: ManagerV2) -> tuple[Any, ...]:
    arrays = (manager.block_table, manager.length, manager.blocks_held, manager.serial, manager.is_open)
    return (*(array.tobytes() for array in arrays), manager.blocks.refs.tobytes(), manager.stats())


def refused(manager: ManagerV2, error: type[Exception], match: str | None, verb: str, *args: Any) -> Exception:
    """Call a verb that must raise `error` and change nothing."""
    before = snapshot(manager)
    with pytest.raises(error, match=match) as info:
        getattr(manager, verb)(*args)
    assert snapshot(manager) == before
    manager.check()
    return info.value
