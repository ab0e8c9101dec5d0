"""Block ids: who may hand one out, when it is free again, in which table cell it stands. No byte is touched here.

`BlockAllocator` owns the ids. An id is free, held (referenced once or more), cached (nobody references it, but its
content is findable and kept), or retiring: given up by everybody, but steps in flight may still touch its bytes. One
clock decides when retiring ends: the step number. Id 0 is the null block, in none of these states.

`BlockTable` owns the cells. Every cell that changes is noted in its journal, from which the device's copy is brought up
to date.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from graphkv.errors import InvalidValue, OutOfBlocks

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
_ONE = np.array(1, np.int32)
_T = TypeVar("_T", bound=np.generic)


class BlockCounts(NamedTuple):
    """Blocks by state; `free + held + cached + retiring == total`. The null block is not counted.

    Of the held ones, `shared` have findable content and are never written again; the others are private.
    """

    total: int
    free: int
    held: int
    retiring: int
    peak_held: int
    cached: int = 0
    shared: int = 0


class BlockAllocator:
    """Owner of the ids `1 .. num_blocks-1`; the null block 0 is never handed out.

    Misuse of an id (released more often than referenced, out of range) is a bug of the caller inside graphkv, not of
    its user: it raises `AssertionError` before anything changed.

    Args:
        num_blocks: blocks in the pools, the null block included; at least 2.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise InvalidValue(f"num_blocks must be at least 2 (the null block and one to hand out), got {num_blocks}")
        self.num_blocks = num_blocks
        self.retired = 0
        # intp throughout: NumPy indexes with it as it stands, any other type is converted on each use.
        self._stack: Index = np.zeros(num_blocks, np.intp)
        self._stack[:-1] = np.arange(num_blocks - 1, 0, -1)
        self._free = num_blocks - 1
        self._refs = np.zeros(num_blocks, np.int32)
        self._last_step = np.zeros(num_blocks, np.int64)  # latest step that a release of the id has named
        self._retiring: dict[int, list[Index]] = {}  # step -> ids that become free once it retired
        self._num_retiring = 0
        self._peak_held = 0
        self._kept = np.zeros(num_blocks, np.bool_)  # content is findable
        self._num_kept = self._num_cached = 0

    @property
    def free(self) -> int:
        """Ids that can be handed out now."""
        return self._free

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Whether the content of each block id is findable, bool [num_blocks]; read only."""
        view = self._kept.view()
        view.flags.writeable = False
        return view

    @property
    def last_step(self) -> NDArray[np.int64]:
        """The latest step that a release of each id has named, int64 [num_blocks]; read only."""
        view = self._last_step.view()
        view.flags.writeable = False
        return view

    @property
    def refs(self) -> Int32s:
        """References of each block id, int32 [num_blocks]; read only."""
        view = self._refs.view()
        view.flags.writeable = False
        return view

    def take(self, n: int) -> Index:
        """`n` free ids, intp [n], each with one reference. `OutOfBlocks` with nothing changed if fewer are free."""
        if n < 0:
            raise InvalidValue(f"cannot take {n} blocks; ask for 0 or more")
        free = self._free
        if n > free:
            raise OutOfBlocks(n, free, self._num_retiring)
        self._free = free - n
        ids = self._stack[free - n : free].copy()
        self._refs[ids] = _ONE
        self._note_peak()
        return ids

    def share(self, ids: NDArray[np.integer]) -> None:
        """One more reference to each of `ids`, which must be held or cached."""
        ids = self._checked(ids)
        idle = ids[self._refs[ids] < 1]
        if idle.size:
            if not self._kept[idle].all():
                raise AssertionError(f"block {int(idle[~self._kept[idle]][0])} is not held, so it cannot be shared")
            self._num_cached -= np.unique(idle).size
        np.add.at(self._refs, ids, 1)
        self._note_peak()

    def keep(self, block: int) -> None:
        """The content of a held block became findable: without references it will be cached instead of free."""
        if self._refs[block] < 1 or self._kept[block]:
            raise AssertionError(f"block {block} with {self._refs[block]} references cannot be kept (again)")
        self._kept[block] = True
        self._num_kept += 1

    def forget(self, block: int) -> None:
        """The content of a kept block is no longer findable; if it was cached, it becomes free or retiring."""
        if not self._kept[block]:
            raise AssertionError(f"block {block} has no findable content to forget")
        self._kept[block] = False
        self._num_kept -= 1
        if not self._refs[block]:
            self._num_cached -= 1
            self._give_up(np.array([block], np.intp))

    def release(self, ids: NDArray[np.integer], step: int) -> Index:
        """Give up one reference to each of `ids` (an id given twice loses two).

        An id without references becomes free when every step named by one of its releases has retired, unless its
        content is findable: then it is cached.

        Args:
            ids: held block ids, any integer type, [n].
            step: the last step that may touch the blocks on behalf of this owner; 0 if there is none.

        Returns:
            The ids that are now cached, ascending.
        """
        ids = self._checked(ids)
        np.subtract.at(self._refs, ids, 1)
        if (self._refs[ids] < 0).any():
            bad = int(ids[self._refs[ids] < 0][0])
            np.add.at(self._refs, ids, 1)
            raise AssertionError(f"block {bad} released more often than it is referenced ({self._refs[bad]} times)")
        np.maximum.at(self._last_step, ids, step)
        gone = np.unique(ids[self._refs[ids] == 0])
        kept: Index = gone[self._kept[gone]]
        if kept.size:
            self._num_cached += kept.size
            gone = gone[~self._kept[gone]]
        self._give_up(gone)
        return kept

    def _give_up(self, gone: Index) -> None:
        """Distinct ids without references or findable content: free once the steps that may touch them retired."""
        steps = self._last_step[gone]
        for last in np.unique(steps).tolist():
            batch = gone[steps == last]
            if last <= self.retired:
                self._push(batch)
            else:
                self._retiring.setdefault(last, []).append(batch)
                self._num_retiring += batch.size

    def retire(self, step: int) -> None:
        """Every step up to `step` has retired: what they held back becomes free. An older step changes nothing."""
        if step <= self.retired:
            return
        self.retired = step
        for done in sorted(s for s in self._retiring if s <= step):
            for ids in self._retiring.pop(done):
                self._num_retiring -= ids.size
                self._push(ids)

    def busy_from(self, first: int) -> Index:
        """The ids from `first` on that are not free, ascending."""
        idle = np.zeros(self.num_blocks, np.bool_)
        idle[self._stack[: self._free]] = True
        busy: Index = first + np.flatnonzero(~idle[first:])
        return busy

    def resize(self, num_blocks: int) -> None:
        """Own the ids `1 .. num_blocks-1`; those that go must be free. New ones are handed out after the free ones."""
        if num_blocks < 2 or self.busy_from(num_blocks).size:
            raise AssertionError(f"{self.busy_from(num_blocks).size} ids from {num_blocks} on are not free")
        before, free = self.num_blocks, self._stack[: self._free]
        more = np.arange(num_blocks - 1, before - 1, -1)
        stack = np.concatenate([more, free[free < num_blocks]])
        self._free = stack.size
        self._stack = resized(stack, num_blocks)
        self._refs, self._last_step = resized(self._refs, num_blocks), resized(self._last_step, num_blocks)
        self._kept = resized(self._kept, num_blocks)
        self.num_blocks = num_blocks

    def counts(self) -> BlockCounts:
        """Blocks by state, now."""
        total = self.num_blocks - 1
        cached, shared = self._num_cached, self._num_kept - self._num_cached
        held = total - self._free - self._num_retiring - cached
        return BlockCounts(total, self._free, held, self._num_retiring, self._peak_held, cached, shared)

    def check(self) -> None:
        """`AssertionError` unless each id is in exactly one state and the counts say so."""
        retiring = [ids for batches in self._retiring.values() for ids in batches]
        idle = np.concatenate([self._stack[: self._free], *retiring])
        if idle.size and not 1 <= idle.min() <= idle.max() < self.num_blocks:
            raise AssertionError(f"idle ids span {idle.min()} .. {idle.max()}, outside 1 .. {self.num_blocks - 1}")
        listed = np.bincount(idle, minlength=self.num_blocks)
        if (listed > 1).any():
            raise AssertionError(f"block {int(listed.argmax())} is free or retiring {int(listed.max())} times")
        if self._refs[0] != 0 or (self._refs < 0).any():
            raise AssertionError(f"the null block has {self._refs[0]} references, the least has {self._refs.min()}")
        in_use = self._refs > 0
        owned = in_use | self._kept
        if not np.array_equal(owned[1:], listed[1:] == 0):
            bad = 1 + int((owned[1:] == (listed[1:] > 0)).argmax())
            raise AssertionError(
                f"block {bad} has {self._refs[bad]} references, is {'' if self._kept[bad] else 'not '}kept and "
                f"idle {listed[bad]} times"
            )
        counts = self.counts()
        if counts.cached != (self._kept & ~in_use).sum() or counts.shared != (self._kept & in_use).sum():
            raise AssertionError(f"{counts} disagrees with {int(self._kept.sum())} blocks of findable content")
        if counts.held != in_use.sum() or counts.retiring != sum(ids.size for ids in retiring):
            raise AssertionError(f"{counts} disagrees with {int(in_use.sum())} referenced blocks")
        if any(step <= self.retired for step in self._retiring):
            raise AssertionError(f"blocks wait for steps {sorted(self._retiring)}, but {self.retired} has retired")

    def _note_peak(self) -> None:
        held = self.num_blocks - 1 - self._free - self._num_retiring - self._num_cached
        if held > self._peak_held:
            self._peak_held = held

    def _push(self, ids: Index) -> None:
        self._stack[self._free : self._free + ids.size] = ids
        self._free += ids.size

    def _checked(self, ids: NDArray[np.integer]) -> Index:
        checked: Index = np.asarray(ids).astype(np.intp)
        if checked.size and not 1 <= checked.min() <= checked.max() < self.num_blocks:
            raise AssertionError(f"block ids {checked.min()} .. {checked.max()} leave 1 .. {self.num_blocks - 1}")
        return checked


def resized(array: NDArray[_T], size: int) -> NDArray[_T]:
    """The first `size` entries, zeros where there were fewer."""
    return np.concatenate([array[:size], np.zeros(max(0, size - array.size), array.dtype)])


class BlockTable:
    """The block tables of all rows, and the journal of cells that the device has not been told of.

    It has a line for each row, and as many more for each further layer group.

    The journal holds places, not ids: an edit carries the id that its cell has when it is taken. So a cell noted twice,
    or noted for a sequence that ended since, does no harm, and the order of edits does not matter.

    Attributes:
        ids: int32 [lines, max_blocks], block ids, 0 where a line has no block.
        edits_pending: cells noted since the last `take_edits`.

    Args:
        max_edits: room of the journal in cells, at least `max_blocks`, so that one whole row fits.
    """

    def __init__(self, lines: int, max_blocks: int, max_edits: int) -> None:
        if max_edits < max_blocks:
            raise InvalidValue(f"max_edits {max_edits} is below max_blocks {max_blocks}: one whole row must fit")
        self.max_edits = max_edits
        self.ids = np.zeros((lines, max_blocks), np.int32)
        self.edits_pending = 0
        self._row, self._column = np.zeros((2, max_edits), np.int32)
        self._stale: dict[int, Index] = {}  # of dropped lines: columns whose old ids the device still has

    def need_edits(self, count: int) -> None:
        """`InvalidValue` unless the journal has room for `count` more cells."""
        if count > self.max_edits - self.edits_pending:
            raise InvalidValue(
                f"{count} table edits do not fit the journal: {self.edits_pending} of {self.max_edits} are pending; "
                "take_edits first, extend in smaller portions, or build with more max_edits"
            )

    def write(self, rows: Index, columns: Index, ids: Int32s | int) -> None:
        """Put `ids` into the cells (rows[i], columns[i]); `need_edits` has been asked for their number."""
        self.ids[rows, columns] = ids
        self._note(rows, columns)

    def drop(self, line: int, columns: Index) -> None:
        """Empty cells of a line that no step may name now. Needs no room: they are noted by `reopen`."""
        self.ids[line, columns] = 0
        before = self._stale.get(line)
        self._stale[line] = columns if before is None else np.union1d(before, columns)

    def stale(self, line: int) -> int:
        """Cells of a line that `reopen` will note."""
        return self._stale[line].size if line in self._stale else 0

    def reopen(self, line: int, more: int = 0) -> None:
        """Note the cells that `drop` left behind; `InvalidValue` if the journal lacks room for them and `more`."""
        self.need_edits(self.stale(line) + more)
        if line in self._stale:
            self._note(line, self._stale.pop(line))

    def take_edits(self, out: Int32s) -> int:
        """Write the noted cells into `out` as (row, column, current id), forget them, and return their number.

        Args:
            out: int32 [at least edits_pending, 3]; lines past the returned number are left as they were.
        """
        count = self.edits_pending
        if out.ndim != 2 or out.shape[1] != 3 or out.dtype != self.ids.dtype or out.shape[0] < count:
            raise InvalidValue(f"out must be int32 [{count} or more, 3] for {count} edits, got {out.dtype} {out.shape}")
        if count:
            rows, columns = self._row[:count], self._column[:count]
            out[:count, 0] = rows
            out[:count, 1] = columns
            out[:count, 2] = self.ids[rows, columns]
            self.edits_pending = 0
        return count

    def _note(self, rows: Index | int, columns: Index) -> None:
        start = self.edits_pending
        self.edits_pending = end = start + columns.size
        self._row[start:end] = rows
        self._column[start:end] = columns
