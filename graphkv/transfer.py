"""What the manager says when bytes must move: jobs over whole blocks, and who carries them out.

The manager never touches a byte. Two kinds of work leave it:

- *copies* inside the device tier (partial reuse, fork): an ordered list, `ManagerV2.take_copies`, which its caller puts
  on the stream that steps run on, before the next step;
- *transfers* between tiers: given to a `BlockMover`, which runs them beside the steps and tells when they ended.

Tier 0 is the device: its slots are block ids (1 and up; the null block 0 never moves). The colder tiers 1, 2, ... have
slots 0 .. num_slots-1. A slot holds one block whole: latent, index and draft bytes of all layers are one unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

DEVICE = 0
"""The tier that steps read."""


class CopyJob(NamedTuple):
    """Copy one block.

    Attributes:
        source_tier, source: where its bytes are.
        target_tier, target: where they go; nothing else reads or writes that slot until the job ended.
        tokens: how many of its leading tokens matter, block_size for all; copying more is allowed.
        group: the layer group whose block it is.
    """

    source_tier: int
    source: int
    target_tier: int
    target: int
    tokens: int
    group: int = 0


class BlockMover(Protocol):
    """Carries blocks between tiers, off the step path.

    The manager keeps every slot that a running transfer names out of other hands until `poll` has told its end, also
    when the sequence that wanted it is gone. So a mover needs no knowledge of owners, and there is no way to cancel.
    """

    def submit(self, jobs: Sequence[CopyJob]) -> int:
        """Queue one transfer, all of whose jobs go from one tier to one other; returns its ticket, a new number.

        The copies start after all that was submitted to the steps' stream before this call, and after every transfer
        submitted earlier. Steps submitted later do not wait for them: the manager lets no step read or write a slot
        before `poll` has told its end. Returns without waiting; what cannot be queued is told by `poll` as failed.
        """
        ...

    def poll(self, ticket: int) -> Sequence[bool] | None:
        """None while the transfer runs; once it ended, whether each of its jobs brought the right bytes, in order.

        A job that failed (torn or missing file, full disk) leaves its target's bytes undefined. Never waits. Asked for
        a ticket once after its end; the mover may then forget it.
        """
        ...
