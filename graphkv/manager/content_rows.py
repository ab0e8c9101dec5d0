"""Rows whose content is findable: matched as they open, committed as they fill, shared by forks, copied to be written.

A block that is shared, or referenced twice, is never written again: whoever has to write at such a place gets a copy
first. Copies leave as an ordered list: whoever submits steps takes it (`take_copies`) and puts it on the stream before
the next step. A copy's two blocks stay out of other hands until that step retired.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphkv.errors import InvalidValue, OutOfBlocks
from graphkv.manager.blocks import Index, Int32s
from graphkv.manager.capacity import Capacity
from graphkv.manager.content import ContentCache
from graphkv.manager.events import EventKind
from graphkv.manager.eviction import ContentSlots
from graphkv.manager.prefix import ABSENT, EVERYONE, Content, Match, Node, Scope
from graphkv.manager.retention import Retention, Worth
from graphkv.manager.row_batch import Batch
from graphkv.transfer import DEVICE, CopyJob

_NEVER = np.iinfo(np.int32).max
_NO_MATCH = Match([], None, 0)
_PLAIN = Retention()


class ContentRows(Capacity):
    """Rows over the blocks of a `ContentCache`. See `Capacity` for the verbs that care for no content.

    Attributes:
        token_ids: int32 [max_rows, max_tokens + 1]: what a row's tokens are, as far as told by `open` and by the
            caller, who writes each position before it is committed.
        cached_tokens: int32 [max_rows], tokens that the row's sequence found cached when it was opened.
        submitted: the last step given to the device. Kept true by the caller, in whose hands steps are.
        prefix_caching: whether content is made findable at all.
    """

    def __init__(
        self,
        cache: ContentCache,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        max_edits: int | None,
        prefix_caching: bool,
        clock: Callable[[], float],
        groups: int,
    ) -> None:
        super().__init__(cache.device, block_size, max_rows, max_blocks, max_edits, groups)
        self.blocks: ContentSlots = cache.device
        self._cache, self._clock, self.prefix_caching = cache, clock, prefix_caching
        self.token_ids = np.zeros((max_rows, self.max_tokens + 1), np.int32)  # pages come into being as written
        self.cached_tokens = np.zeros(max_rows, np.int32)
        self.submitted = 0
        self._due_at = np.full(max_rows, _NEVER, np.int32)  # full blocks at which commit has work to do
        self._epoch = np.zeros(max_rows, np.int64)  # counts what makes a row's waiting commits void
        self._tail: list[Node | None] = [None] * max_rows  # last findable block of a row, or its scope's root
        self._contents: list[Sequence[Content]] = [()] * max_rows
        self._retention = [_PLAIN] * max_rows
        self._copies: list[CopyJob] = []
        # Commits (rows, full blocks, epochs) that wait for a step, and those that are due for the tree.
        self._waiting: dict[int, list[tuple[Index, Int32s, NDArray[np.int64]]]] = {}
        self._unindexed: deque[tuple[Index, Int32s, NDArray[np.int64]]] = deque()
        self._matched = self._asked = self._merged = 0

    # opening --------------------------------------------------------------------------------------------------------

    def open(
        self,
        num_tokens_hint: int = 0,
        *,
        tokens: ArrayLike | None = None,
        scope: Scope = EVERYONE,
        contents: Sequence[Content] = (),
        retention: Retention = _PLAIN,
        match: bool = True,
    ) -> int:
        """A free row for a sequence that begins with `tokens`; what of them is cached is shared, not computed again.

        On return `length` and `cached_tokens` of the row are the tokens matched, at most all but the last. A whole
        block is shared; of one that agrees in its first tokens only, these are copied into a private block.

        Args:
            num_tokens_hint: tokens the sequence is known to need; refused now if no row could ever hold them.
            tokens: int [n], the prompt; without it nothing is matched, and nothing found later either unless the
                caller writes `token_ids`.
            scope, contents: what must agree besides tokens.
            retention: how long the content that the sequence makes or uses is worth keeping.
            match: whether to look for cached content at all.

        Raises:
            OutOfRows: all rows are taken.
            InvalidValue: a sequence that fits no row, or a journal without room.
        """
        self.index_commits()
        prompt = np.zeros(0, np.int32) if tokens is None else token_array(tokens)
        root = self._cache.index.root(scope) if self.prefix_caching else None
        found = _NO_MATCH
        if root is not None and match and prompt.size:
            found = self._cache.index.match(root, prompt[:-1], contents)
        needed = num_tokens_hint if num_tokens_hint < 0 else max(num_tokens_hint, prompt.size)
        row = self._open_row(needed, len(found.nodes) + 1 if prompt.size else 0)
        self.token_ids[row, : prompt.size] = prompt
        self._tail[row], self._contents[row], self._retention[row] = root, contents, retention
        self._due_at[row] = _NEVER if root is None else 1
        self._asked += prompt.size if match else 0
        if found.nodes or found.partial:
            self._share(row, found)
        self.cached_tokens[row] = self.length[row]
        return row

    def probe_match(self, tokens: ArrayLike, scope: Scope = EVERYONE, contents: Sequence[Content] = ()) -> int:
        """How many of `tokens` a sequence would find cached if it were opened now. Takes and changes nothing."""
        self.index_commits()
        prompt, root = token_array(tokens), self._cache.index.root(scope)
        if root is None or not prompt.size:
            return 0
        found = self._cache.index.match(root, prompt[:-1], contents)
        return len(found.nodes) * self.block_size + found.partial_tokens

    def _share(self, row: int, found: Match) -> None:
        """Reference what was matched, first of all, then copy the partial block if there is one to copy it into."""
        cache, nodes = self._cache, found.nodes
        count = next((i for i, node in enumerate(nodes) if node.slots[DEVICE] == ABSENT), len(nodes))
        cache.device.share(np.array([node.slots[DEVICE] for node in nodes[:count]], np.intp))
        self._adopt(row, nodes[:count])
        if count < len(nodes):
            self._bring(row, nodes[count:])
        elif found.partial is not None and (source := found.partial.slots[DEVICE]) != ABSENT:
            self._copy_part(row, source, found.partial_tokens)

    def _adopt(self, row: int, nodes: Sequence[Node]) -> None:
        """Put findable blocks, referenced already, behind the row's blocks, of which all are full and findable."""
        first, count = int(self.blocks_held[row]), len(nodes)
        self.table.write(
            np.full(count, row, np.intp),
            np.arange(first, first + count),
            np.array([node.slots[DEVICE] for node in nodes], np.int32),
        )
        self.blocks_held[row] += count
        self.length[row] += count * self.block_size
        self._matched += count * self.block_size
        if count:
            self._tail[row], self._due_at[row] = nodes[-1], first + count + 1
        if self._retention[row].ranges:
            for column, node in enumerate(nodes, first):
                self._cache.retain(node, self._worth(row, column))

    def _copy_part(self, row: int, source: int, tokens: int) -> None:
        """Begin a private block with the first `tokens` of another, unless there is no room: a match never fails."""
        column = int(self.blocks_held[row])
        self.blocks.hold(source)
        try:
            target = int(self.blocks.take(1)[0])
        except OutOfBlocks:
            pass
        else:
            self._copy(source, target, tokens)
            self.table.write(np.array([row]), np.array([column]), target)
            self.blocks_held[row] += 1
            self.length[row] += tokens
            self._matched += tokens
        self.blocks.drop(source)

    def _bring(self, row: int, nodes: Sequence[Node]) -> None:
        """Have matched blocks that are in colder tiers brought to the device, for the row to go on with."""

    def _worth(self, row: int, column: int) -> Worth:
        retention = self._retention[row]
        if not retention.ranges:
            return retention.plain
        start = column * self.block_size
        return retention.of(start, start + self.block_size, self._clock())

    # content --------------------------------------------------------------------------------------------------------

    def commit(self, rows: ArrayLike, length: ArrayLike, *, step: int = 0, serial: ArrayLike | None = None) -> None:
        """The first `length` tokens of each row are final, and `token_ids` tells them: full blocks become findable.

        Costs one comparison for rows that completed no block. Where equal content is findable already, the row takes
        that block instead of its own, which is given up once the steps submitted by now retired.

        Args:
            rows: distinct rows, int [B].
            length: one for all or one each, never more than was written.
            step: the step that wrote them; if it has not retired, they become findable when it does, unless the row
                was rewound or closed by then.
            serial: the rows' serials when that step was submitted; other sequences' rows are skipped.
        """
        index = self._reader.index(rows)
        blocks = np.right_shift(np.asarray(length, np.int32), self._shift)
        due = (blocks >= self._due_at[index]).nonzero()[0]
        if not due.size:
            return
        full = blocks[due] if blocks.ndim else np.full(due.size, blocks)
        index = index[due]
        if serial is not None:
            same = self.serial[index] == np.asarray(serial)[due]
            index, full = index[same], full[same]
        if (over := full > self.blocks_held[index]).any():
            row = index[over][0]
            raise InvalidValue(f"row {row} has {self.blocks_held[row]} blocks, {full[over][0]} cannot be committed")
        commits = index, full, self._epoch[index]
        if step > self.blocks.retired:
            self._waiting.setdefault(operator.index(step), []).append(commits)
        else:
            self._due_at[index] = full + 1
            self._unindexed.append(commits)

    def index_commits(self, most: int | None = None) -> None:
        """Enter what was committed into the tree of content. Every verb that looks at content does so first.

        Call it where the host has time, such as after a step was launched, so that those verbs find little to do.
        `most` bounds the rows of such a call: all rows of a batch may have filled a block in the same step.
        """
        room = sys.maxsize if most is None else most
        while self._unindexed and room:
            rows, counts, epochs = self._unindexed.popleft()
            if rows.size > room:
                self._unindexed.appendleft((rows[room:], counts[room:], epochs[room:]))
                rows, counts, epochs = rows[:room], counts[:room], epochs[:room]
            room -= rows.size
            valid = self._epoch[rows] == epochs
            for row, count, is_valid in zip(rows.tolist(), counts.tolist(), valid.tolist(), strict=True):
                if is_valid:
                    self._commit_row(row, count)

    def _commit_row(self, row: int, count: int) -> None:
        """Make the row's blocks up to column count-1 findable, as far as the journal has room for merges."""
        tail, cache, size = self._tail[row], self._cache, self.block_size
        if tail is None:
            return
        first = tail.depth
        tokens = self.token_ids[row, first * size : count * size]
        contents = cache.index.contents(tokens, first, count - first, self._contents[row])
        due_at = count + 1
        for content, own in zip(contents, self.block_table[row, first:count].tolist(), strict=True):
            worth = self._worth(row, first)
            node = cache.index.insert(tail, content, worth)
            if node is None:
                due_at = _NEVER
                break
            if node.worth is not worth or worth.until < math.inf:
                cache.retain(node, worth)
            there = node.slots[DEVICE]
            if there == ABSENT:
                cache.attach(node, DEVICE, own)
            elif there != own and not self._merge(row, first, own, there):
                due_at = first + 1
                break
            self._tail[row] = tail = node
            first += 1
        self._due_at[row] = due_at

    def _merge(self, row: int, column: int, own: int, there: int) -> bool:
        """Let the row use the block `there` with equal content instead of its own; False if the journal is full."""
        if not self.edits_room:
            return False
        self._cache.device.hold(there)
        self.table.write(np.array([row]), np.array([column]), there)
        self._cache.device.drop(own, self.submitted)
        self._merged += 1
        return True

    # forks and copies -----------------------------------------------------------------------------------------------

    def fork(self, row: int) -> int:
        """A new row with the tokens of `row`: full blocks are shared, what a partial one holds is copied.

        Raises:
            InvalidValue: steps are in flight, so that the row's length is not settled; or a journal without room.
            OutOfRows, OutOfBlocks: nothing changed.
        """
        row = int(self._reader.of(np.array([row])).rows[0])
        self.index_commits()
        self._require_settled(row, self.submitted)
        length = int(self.length[row])
        full, part = divmod(length, self.block_size)
        self.blocks.require(int(part > 0))
        child = self._open_row(0, full + 1)
        ids = self.block_table[row, :full]
        self.blocks.share(ids)
        if part:
            own = int(self.blocks.take(1)[0])
            self._copy(int(self.block_table[row, full]), own, part)
            ids = np.append(ids, np.int32(own))
        self.table.write(np.full(ids.size, child, np.intp), np.arange(ids.size), ids)
        self.blocks_held[child], self.length[child] = ids.size, length
        self.cached_tokens[child] = length
        self.token_ids[child, : length + 1] = self.token_ids[row, : length + 1]
        self._tail[child], self._due_at[child] = self._tail[row], self._due_at[row]
        self._contents[child], self._retention[child] = self._contents[row], self._retention[row]
        return child

    def rewind(self, rows: ArrayLike, n: ArrayLike, step: int) -> int:
        """See `Capacity.rewind`. A row that goes back into a block of others gets a copy of it (`OutOfBlocks`)."""
        self.index_commits()
        return super().rewind(rows, n, step)

    def _prepare_rewind(self, batch: Batch, num_cells: int, step: int) -> None:
        """Rows that will write within a block of others get their own copy of it.

        A findable block that nobody else references and nothing builds on becomes private again instead.
        """
        keep = batch.tokens >> self._shift
        part = batch.tokens & self._round_up
        column = np.minimum(keep, self.max_blocks - 1)
        edge = self.block_table[batch.rows, column]
        at = np.flatnonzero((part > 0) & ((self.blocks.refs[edge] > 1) | self.blocks.kept[edge]))
        own_again = [i for i in at.tolist() if self._is_sole(int(edge[i]))]
        at = np.setdiff1d(at, own_again)
        self.table.need_edits(num_cells + at.size)
        if at.size:
            own = self.blocks.take(at.size).astype(np.int32)
            for source, target, tokens in zip(edge[at].tolist(), own.tolist(), part[at].tolist(), strict=True):
                self._copy(source, target, tokens)
            self.table.write(batch.rows[at], column[at].astype(np.intp), own)
            self.blocks.release(edge[at], step)
        for i in own_again:
            if (node := self.blocks.node_at[edge[i]]) is not None:
                self._cache.lose(node)
        self._epoch[batch.rows] += 1
        for i in np.flatnonzero(self._due_at[batch.rows] > keep + 1).tolist():
            row, tail = int(batch.rows[i]), self._tail[batch.rows[i]]
            while tail is not None and tail.depth > keep[i]:
                tail = tail.parent
            self._tail[row] = tail
            self._due_at[row] = _NEVER if tail is None else tail.depth + 1
        if self._cache.events.capacity:
            for row, length in zip(batch.rows.tolist(), batch.tokens.tolist(), strict=True):
                self._cache.events.add(EventKind.REWOUND, row=row, length=length)

    def _is_sole(self, block: int) -> bool:
        node = self.blocks.node_at[block]
        return node is not None and node.is_leaf and self.blocks.refs[block] == 1

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self.blocks.share(np.array([source, target]))
        self._copies.append(CopyJob(DEVICE, source, DEVICE, target, tokens))

    @property
    def copies_pending(self) -> int:
        """Copies that the next step needs and nobody has taken yet."""
        return len(self._copies)

    def take_copies(self, step: int = 0) -> list[CopyJob]:
        """The copies to make before step `step`, in this order; 0 if they are made before the call returns."""
        jobs, self._copies = self._copies, []
        if jobs:
            self.blocks.release(np.array([(job.source, job.target) for job in jobs]).ravel(), step)
        return jobs

    def close(self, row: int, step: int, serial: int) -> bool:
        """End a sequence, see `Capacity.close`; its findable blocks become cached."""
        self.index_commits()
        if not super().close(row, step, serial):
            return False
        self._tail[row], self._contents[row], self._retention[row] = None, (), _PLAIN
        self._due_at[row] = _NEVER
        self._epoch[row] += 1
        return True

    def retire(self, step: int) -> None:
        """Every step up to `step` has retired: what waited for them is free, or findable."""
        super().retire(step)
        for done in sorted(s for s in self._waiting if s <= step):
            self._unindexed += self._waiting.pop(done)

    def row_tail(self, row: int) -> tuple[Node | None, int]:
        """A row's last findable block (the root of its scope if there is none), and the block count of next commit."""
        return self._tail[row], int(self._due_at[row])

    def contents_of(self, row: int, tokens: Int32s, count: int) -> list[bytes]:
        """What the keys of a row's first `count` blocks are made of, if these are its tokens."""
        return self._cache.index.contents(tokens, 0, count, self._contents[row])

    def copy_references(self) -> Int32s:
        """int32 [num_blocks], references that copies not yet taken have to blocks."""
        ids = [slot for job in self._copies for slot in (job.source, job.target)]
        return np.bincount(np.array(ids, np.intp), minlength=self.blocks.num_blocks).astype(np.int32)

    def _other_uses(self) -> Int32s:
        return self.copy_references()

    def _require_settled(self, row: int, step: int) -> None:
        if step > self.blocks.retired:
            raise InvalidValue(
                f"row {row} may be in step {step}, and {self.blocks.retired} has retired; retire it first"
            )


def token_array(tokens: ArrayLike) -> Int32s:
    """Token ids as int32 [n]."""
    given = np.asarray(tokens)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidValue(f"tokens must be a one-dimensional array of integers, got {given.dtype} {given.shape}")
    return given.astype(np.int32)
