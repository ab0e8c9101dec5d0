"""What a decode loop does with sequences whose blocks need not be on the device all the time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence

import numpy.typing as npt

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.engine import EngineShape, StepEngine
from graphkv.errors import NotReady, TransferTimeout
from graphkv.loop.verbs import SequenceVerbs
from graphkv.manager.drops import DropPlan
from graphkv.manager.prefix import EVERYONE, Content, Scope
from graphkv.manager.v2 import ManagerV2, RowState
from graphkv.sequence import Sequence
from graphkv.tiers.copies import BlockCopies
from graphkv.tiers.hierarchy import ColdTiers

_NAP = 0.0002  # seconds between looks of those who wait


class MovingVerbs(SequenceVerbs):
    """Sequences over all tiers. What moves, moves beside the steps; only who says so waits.

    Attributes:
        tiers: the colder tiers, None without them.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: Device,
        manager: ManagerV2,
        engine: StepEngine,
        shape: EngineShape,
        copies: BlockCopies,
        max_seq_len: int,
        tiers: ColdTiers | None,
    ) -> None:
        super().__init__(config, device, manager, engine, shape, copies, max_seq_len)
        self.tiers = tiers
        self._transfer_limit_s = 0.0 if tiers is None else tiers.options.transfer_limit_s
        manager.on_ready.append(self._came)

    def _came(self, row: int) -> None:
        """A row can be used from here on: what no step has fed of it begins at the length that it has by now."""
        if not self._tokens.ready[row]:
            self._tokens.mark(row, length_edit=int(self.manager.length[row]))

    def suspend(self, sequence: Sequence) -> None:
        """Begin to move a sequence's blocks to the host tier; it keeps its row.

        It is *suspending* until its blocks are there (`poll`), then *suspended*; its blocks on the device are free by
        then. If a copy fails, it is ready again. Waits for those steps in flight that it is in, and for no others.

        Raises:
            OutOfBlocks: the host tier has no room; nothing changed.
            NotReady: it is suspended, or on its way.
            InvalidValue: there is no host tier, or the sequence is closed.
        """
        self._usable(sequence)
        last = self._flight.last_step_of(sequence.row)
        self.retire(last)
        self._submitter.copy_now()
        self.manager.suspend(sequence.row, last)
        self._flight.changed()

    def resume(self, sequence: Sequence) -> None:
        """Begin to bring a suspended sequence back: it is *loading* until all its blocks are there (`poll`).

        Steps go on meanwhile. If a block does not come, it is suspended again, and `resume` may be tried again.

        Raises:
            OutOfBlocks: the device has no room below `resume_limit`; nothing changed.
            InvalidValue: it is closed, or not suspended.
        """
        self._owned(sequence)
        self.manager.resume(sequence.row)

    def prefetch(
        self, tokens: npt.ArrayLike, *, scope: Scope = EVERYONE, contents: AbstractSequence[Content] = ()
    ) -> int:
        """Begin to bring what colder tiers have of a prompt to the device, for an `open` to come.

        A hint: without room nothing happens, and what came may be evicted again as other cached blocks.

        Returns:
            The blocks that are on their way.
        """
        return self.manager.prefetch(tokens, scope, contents)

    def evict(self, count: int | None = None) -> int:
        """Free up to `count` cached blocks of the device now (all that can be, by default); how many.

        What has no copy in a colder tier is forgotten.
        """
        return self.manager.evict(count)

    def plan_drop(self, sequence: Sequence) -> DropPlan:
        """What is findable of a sequence by now, to be forgotten by the plan's `drop`, before or after its `close`.

        Blocks that others need by then stay. Waits for the steps in flight.
        """
        self._owned(sequence)
        self.retire()
        return self.manager.plan_drop(sequence.row)

    def poll(self) -> None:
        """Take note of transfers that ended, and begin those that are due.

        Waits for no transfer. `step` looks by itself behind each launch; call this where no steps are made.
        """
        if self.tiers is not None:
            self._submitter.reserve_edits(self.manager.max_blocks)  # for the table cells of who comes back
            self.manager.poll()

    def wait_ready(self, sequences: Sequence | Iterable[Sequence], timeout_s: float | None = None) -> None:
        """Wait until sequences that are loading are ready.

        Args:
            timeout_s: how long at most, `transfer_limit_s` by default.

        Raises:
            NotReady: the time is over; or one of them is suspended, which no waiting changes.
            InvalidValue: one of them is closed.
        """
        waited = [sequences] if isinstance(sequences, Sequence) else list(sequences)
        deadline = time.monotonic() + (self._transfer_limit_s if timeout_s is None else timeout_s)
        while late := [sequence for sequence in waited if not self._is_ready(sequence)]:
            if time.monotonic() >= deadline or late[0].state == RowState.SUSPENDED:
                raise NotReady(str(late[0]), late[0].state)
            time.sleep(_NAP)
            self.poll()

    def _is_ready(self, sequence: Sequence) -> bool:
        self._owned(sequence)
        return bool(self.manager.is_ready[sequence.row])

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing moves between tiers; `TransferTimeout` if that takes longer than `transfer_limit_s`."""
        begun = time.monotonic()
        limit = self._transfer_limit_s if timeout_s is None else timeout_s
        self.poll()
        while self.manager.is_moving:
            if (waited := time.monotonic() - begun) >= limit:
                raise next(iter(self.overdue()), None) or TransferTimeout(0, waited, "of several, begun meanwhile")
            time.sleep(_NAP)
            self.poll()

    def overdue(self) -> list[TransferTimeout]:
        """Transfers that run for longer than `transfer_limit_s`, to log or raise. They own their slots to the end."""
        return self.manager.overdue()
