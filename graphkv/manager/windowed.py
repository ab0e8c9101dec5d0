"""The manager of a model with sliding windows: layer groups with blocks and table lines of their own beside group 0.

Group 0 is what `ManagerV2` is about: all tokens, by whose blocks content is known. A group with a window goes with it,
column for column, but gives up what has become stale. One verb is one transaction over all groups, one journal tells
the device of them all, and lengths are common to them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphkv.errors import InvalidValue, OutOfBlocks, UnsupportedCombination
from graphkv.manager.blocks import Index, Int32s
from graphkv.manager.content_rows import token_array
from graphkv.manager.prefix import EVERYONE, Content, Match, Scope
from graphkv.manager.row_batch import Batch, cells
from graphkv.manager.v2 import ManagerStats, ManagerV2
from graphkv.manager.window_blocks import WindowBlocks
from graphkv.manager.windows import NEVER, WindowGroup
from graphkv.transfer import CopyJob
from graphkv.window import Window

_Finals = tuple[Index, Int32s, NDArray[np.int64]]  # rows, final lengths, epochs


def build_manager(
    windows: Sequence[Window] = (), window_blocks: Sequence[int] = (), rewind_room: int = 0, **options: Any
) -> ManagerV2:
    """`WindowedManager` where there are windows, `ManagerV2` where there are none; options are those of `ManagerV2`."""
    if not windows:
        return ManagerV2(**options)
    return WindowedManager(windows=windows, window_blocks=window_blocks, rewind_room=rewind_room, **options)


class WindowedManager(ManagerV2):
    """`ManagerV2` with layer groups. A row's commits tell what is final in it, and so which of its blocks are stale.

    Attributes:
        windows: the groups behind group 0.
        final: int32 [max_rows], tokens that no rejected draft takes back, as the commits told them.

    Args:
        windows: what the layers of group 1 and those that follow read.
        window_blocks: blocks of each of their pools, the null block included.
        rewind_room: tokens behind the window that stay readable, for `rewind` and for queries of the draft side that
            begin before the row's length.
        options: of `ManagerV2`.
    """

    def __init__(
        self, *, windows: Sequence[Window], window_blocks: Sequence[int], rewind_room: int = 0, **options: Any
    ) -> None:
        if not windows or len(windows) != len(window_blocks):
            raise InvalidValue(
                f"{len(windows)} windows and {len(window_blocks)} numbers of window_blocks: give one number for each "
                "window, or build a ManagerV2 where there is none"
            )
        if rewind_room < 0:
            raise InvalidValue(f"rewind_room must be 0 or more tokens, got {rewind_room}")
        if options.get("tier_slots"):
            raise UnsupportedCombination(
                f"layers with a window ({len(windows)} groups) and colder tiers (tier_slots) cannot go together: what "
                "a window still holds is not moved; build without colder tiers, and close sequences instead of "
                "suspending them"
            )
        super().__init__(**options, groups=1 + len(windows))
        common = self.table, self.max_rows, self.block_size, rewind_room
        self.windows = tuple(
            WindowGroup(number, window, WindowBlocks(number, blocks, self.events), *common)
            for number, (window, blocks) in enumerate(zip(windows, window_blocks, strict=True), 1)
        )
        self._cache.on_lost += [group.blocks.lose for group in self.windows]
        self.final = np.zeros(self.max_rows, np.int32)
        self._attach_at = np.full(self.max_rows, NEVER, np.int32)  # final length at which a block becomes findable
        self._due: list[Index] = []  # rows that had stale or findable blocks when they were committed
        self._unfinal: dict[int, list[_Finals]] = {}  # commits that wait for a step

    # growing and shrinking ------------------------------------------------------------------------------------------

    def _open_row(self, num_tokens_hint: int, num_cells: int) -> int:
        if self._free_rows:
            row = self._free_rows[-1]
            stale = sum(self.table.stale(group.line(row)) for group in self.windows)
            self.table.need_edits(self.table.stale(row) + stale + (1 + len(self.windows)) * num_cells)
        row = super()._open_row(num_tokens_hint, num_cells)
        for group in self.windows:
            group.open(row)
        self.final[row] = 0
        self._attach_at[row] = self.block_size if self.prefix_caching else NEVER
        return row

    def _grow(self, rows: Index, held: Int32s, want: Int32s, one_each: bool) -> int:
        cell_rows, cell_columns = (rows, held.astype(np.intp)) if one_each else cells(rows, held, want)
        if int(want.max()) <= self.max_blocks:  # a row of more is refused below
            if any(group.blocks.free < cell_rows.size for group in self.windows):
                self.index_commits()  # stale blocks may be waiting
            self.table.need_edits((1 + len(self.windows)) * cell_rows.size)
            for group in self.windows:
                group.blocks.require(cell_rows.size)
        added = super()._grow(rows, held, want, one_each)
        for group in self.windows:
            group.grow(cell_rows, cell_columns)
        return added

    def _prepare_rewind(self, batch: Batch, num_cells: int, step: int) -> None:
        least = np.max([group.least_length(batch.rows, batch.tokens) for group in self.windows], axis=0)
        if least.any():
            at = int(least.argmax())
            raise InvalidValue(
                f"row {batch.rows[at]} cannot go back to {batch.tokens[at]} tokens, since blocks that a query there "
                f"reads behind its window are given up; {least[at]} is the least. Build with a larger rewind_room to "
                "keep more, or close the sequence and prefill it again"
            )
        column = np.minimum(batch.tokens >> self._shift, self.max_blocks - 1)
        ends = self.block_table[batch.rows, column].tolist()
        forgotten = np.array([self.blocks.kept[block] and self._is_sole(block) for block in ends], np.bool_)
        held = self.blocks_held[batch.rows]
        cuts = [group.cut(batch.rows, batch.tokens, held, forgotten) for group in self.windows]
        for group, cut in zip(self.windows, cuts, strict=True):
            group.blocks.require(cut.edge_rows.size)
        edits = sum(cut.cell_rows.size + cut.edge_rows.size for cut in cuts)
        super()._prepare_rewind(batch, num_cells + edits, step)
        for group, cut in zip(self.windows, cuts, strict=True):
            self._copies += group.rewind(cut, step)
        self.final[batch.rows] = np.minimum(self.final[batch.rows], batch.tokens)
        whole = batch.tokens & ~self._round_up
        self._attach_at[batch.rows] = np.minimum(self._attach_at[batch.rows], whole + self.block_size)

    def fork(self, row: int) -> int:
        """See `ContentRows.fork`; the child shares what the windows of `row` hold, too."""
        row = int(self._reader.of(np.array([row])).rows[0])
        self._require_settled(row, self.submitted)
        self.index_commits()
        full, part = divmod(int(self.length[row]), self.block_size)
        for group in self.windows:
            group.blocks.require(int(part > 0))
        child = super().fork(row)
        for group in self.windows:
            self._copies += group.fork(row, child, full, part)
        self.final[child], self._attach_at[child] = self.final[row], self._attach_at[row]
        return child

    def close(self, row: int, step: int, serial: int) -> bool:
        """End a sequence, see `Capacity.close`; in every group."""
        row = operator.index(row)
        held = int(self.blocks_held[row]) if 0 <= row < self.max_rows else 0
        if not super().close(row, step, serial):
            return False
        for group in self.windows:
            group.close(row, held, step)
        self._attach_at[row] = NEVER
        return True

    def require_prefill(self, rows: ArrayLike, target: ArrayLike, chunk: int) -> None:
        """`OutOfBlocks` unless each group with a window can take its rows to `target` tokens, chunk after chunk.

        It counts a block a row too many where chunks end within blocks.

        Args:
            target: int, one for all or one each.
            chunk: most tokens that are fed between two retirements of all steps.
        """
        index = self._reader.of(rows).rows
        others = self.is_open.copy()
        others[index] = False
        targets = np.broadcast_to(np.asarray(target), index.shape)
        whole = int((-(-targets // self.block_size)).sum())
        for group in self.windows:
            moving = -(-chunk // self.block_size) + index.size  # what the chunk under way may hold besides
            needed = min(whole, int(group.most_held(targets).sum()) + moving)
            counts = group.blocks.counts()
            others_have = min(int(group.num_held(self.blocks_held)[others].sum()), counts.held)
            if needed > counts.total - others_have:
                raise OutOfBlocks(needed, counts.total - others_have, counts.retiring, group=group.number)

    # content --------------------------------------------------------------------------------------------------------

    def probe_match(self, tokens: ArrayLike, scope: Scope = EVERYONE, contents: Sequence[Content] = ()) -> int:
        """See `ContentRows.probe_match`; a beginning of which a window lacks something is not found."""
        self.index_commits()
        prompt, root = token_array(tokens), self._cache.index.root(scope)
        if root is None or not prompt.size:
            return 0
        found = self._usable(self._cache.index.match(root, prompt[:-1], contents))
        return len(found.nodes) * self.block_size + found.partial_tokens

    def _usable(self, found: Match) -> Match:
        """What of a match a sequence can begin with: so many blocks that each window has all it reads behind them, and
        a part of the next one if every group has that."""
        count = len(found.nodes)
        while (fewer := min(group.usable(found.nodes[:count]) for group in self.windows)) < count:
            count = fewer
        partial = found.partial
        if count == len(found.nodes) and partial and all(group.blocks.block_of(partial) for group in self.windows):
            return found
        return Match(found.nodes[:count], None, 0)

    def _share(self, row: int, found: Match) -> None:
        """Reference what was matched in every group first of all, then copy the partial block if each has room."""
        found = self._usable(found)
        parts = []
        for group in self.windows:
            group.adopt(row, found.nodes)
            if found.partial is not None:
                parts.append((group, group.blocks.block_of(found.partial)))
                group.blocks.share(np.array([parts[-1][1]]))
        fits = all(group.blocks.available(1) for group, _ in parts)
        super()._share(row, found if fits else Match(found.nodes, None, 0))
        whole = len(found.nodes) * self.block_size
        copied = int(self.length[row]) - whole
        for group, source in parts:
            if copied:
                self._copies.append(group.begin_with(row, len(found.nodes), source, copied))
            group.blocks.release(np.array([source]), 0)
        self.final[row], self._attach_at[row] = self.length[row], whole + self.block_size

    # what is final --------------------------------------------------------------------------------------------------

    def commit(self, rows: ArrayLike, length: ArrayLike, *, step: int = 0, serial: ArrayLike | None = None) -> None:
        """See `ContentRows.commit`. Blocks that no query from `length` on reads go with the next `index_commits`."""
        index = self._reader.index(rows)
        same = self.is_open[index]
        if serial is not None:
            same &= self.serial[index] == np.asarray(serial)
        final = np.broadcast_to(np.asarray(length, np.int32), index.shape)[same]
        if (over := final > self.length[index[same]]).any():
            row, tokens = int(index[same][over][0]), int(final[over][0])
            raise InvalidValue(f"row {row} has {self.length[row]} tokens, {tokens} cannot be committed")
        super().commit(rows, length, step=step, serial=serial)
        index = index[same]
        if step > self.blocks.retired:
            self._unfinal.setdefault(operator.index(step), []).append((index, final, self._epoch[index]))
        else:
            self._note_final(index, final)

    def _note_final(self, rows: Index, final: Int32s) -> None:
        self.final[rows] = np.maximum(self.final[rows], final)
        due = final >= self._attach_at[rows]
        for group in self.windows:
            due |= final >= group.due_at[rows]
        if due.any():
            self._due.append(rows[due])

    def index_commits(self, most: int | None = None) -> None:
        """See `ContentRows.index_commits`; then stale blocks are given up, as far as the journal has room.

        Rows that are left for a later call keep their stale blocks until then, so that these become findable first.
        """
        super().index_commits(most)
        if not self._due:
            return
        rows = self._due[0] if len(self._due) == 1 else np.unique(np.concatenate(self._due))
        rows = rows[self.is_open[rows]]
        self._due = []
        if self._unindexed:
            later = np.isin(rows, np.concatenate([commits[0] for commits in self._unindexed]))
            self._due.append(rows[later])
            rows = rows[~later]
        if self.prefix_caching:
            for row in rows[self.final[rows] >= self._attach_at[rows]].tolist():
                self._attach(row)
        for group in self.windows:
            due = rows[self.final[rows] >= group.due_at[rows]]
            if due.size and (left := group.release_stale(due, self.final[due], self.submitted)).size:
                self._due.append(left)

    def _attach(self, row: int) -> None:
        """What the row's groups hold of its findable blocks becomes findable."""
        node = self.row_tail(row)[0]
        done = int(self._attach_at[row]) // self.block_size - 1
        while node is not None and node.depth > done:
            for group in self.windows:
                group.attach(row, node)
            node = node.parent
        self._attach_at[row] = (int(self.final[row]) // self.block_size + 1) * self.block_size

    def retire(self, step: int) -> None:
        """Every step up to `step` has retired: what waited for them is free, findable, or final."""
        for done in sorted(s for s in self._unfinal if s <= step):
            for rows, final, epoch in self._unfinal.pop(done):
                same = self._epoch[rows] == epoch
                self._note_final(rows[same], final[same])
        for group in self.windows:
            group.blocks.retire(operator.index(step))
        super().retire(step)

    # copies and looking ---------------------------------------------------------------------------------------------

    def take_copies(self, step: int = 0) -> list[CopyJob]:
        """See `ContentRows.take_copies`; a job's blocks are of its group, and the order is that within each group."""
        theirs = [job for job in self._copies if job.group]
        self._copies = [job for job in self._copies if not job.group]
        jobs = super().take_copies(step)
        for group in self.windows:
            ids = [slot for job in theirs if job.group == group.number for slot in (job.source, job.target)]
            group.blocks.release(np.array(ids, np.intp), step)
        return jobs + theirs

    def copy_references(self, group: int = 0) -> Int32s:
        """int32 [num_blocks], references that copies not yet taken have to blocks of a group."""
        size = self.windows[group - 1].blocks.num_blocks if group else self.blocks.num_blocks
        ids = [slot for job in self._copies if job.group == group for slot in (job.source, job.target)]
        return np.bincount(np.array(ids, np.intp), minlength=size).astype(np.int32)

    def stats(self) -> ManagerStats:
        """Counts of blocks, rows and edits, now; `windows` has those of the other groups."""
        return replace(super().stats(), windows=tuple(group.blocks.counts() for group in self.windows))

    def check(self) -> None:
        """`AssertionError` with the facts if an invariant is broken, in any group."""
        super().check()
        if (over := self.is_open & (self.final > self.length)).any():
            row = int(over.argmax())
            raise AssertionError(f"row {row} of length {self.length[row]} is final up to {self.final[row]}")
        for group in self.windows:
            copies = self.copy_references(group.number)
            group.check(self.is_open, self.blocks_held, self.length, self.final, copies)
        for row in np.flatnonzero(self.is_open).tolist():
            self._check_content(row)

    def _check_content(self, row: int) -> None:
        """What a row holds of findable content is that of its own tokens."""
        tail = self.row_tail(row)[0]
        chain = tail.chain() if tail is not None else []
        for group in self.windows:
            for column in group.held_columns(row, int(self.blocks_held[row])).tolist():
                node = group.blocks.node_of(int(group.ids[row, column]))
                if node is not None and not (column < len(chain) and chain[column] is node):
                    raise AssertionError(
                        f"group {group.number}: row {row} reads other content in column {column} than in group 0"
                    )
