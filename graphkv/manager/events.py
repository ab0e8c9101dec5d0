"""What became findable, moved or went, as a numbered record that outside caches and routers can follow."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from graphkv.errors import InvalidValue


class EventKind(StrEnum):
    """What happened.

    CREATED: a tier of `block` slots began. RESIZED: it has `block` slots from now on. STORED: content became findable
    in a tier. REMOVED: it is no longer there, nor in a colder tier. MOVED: it left `tier`, but is still in `to_tier`.
    REWOUND: `row` went back to `length`.
    """

    CREATED = "created"
    RESIZED = "resized"
    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"
    REWOUND = "rewound"


class Event(NamedTuple):
    """One event. Fields that do not concern its kind are 0, -1 or empty.

    Attributes:
        number: 1 for the first, rising by 1; a jump means that events in between were dropped.
        kind: what happened.
        tier: 0 for the device, colder tiers from 1.
        block: its slot in that tier.
        key: content key of the block, 32 bytes; `parent` that of the block before it, or of its scope.
        scope: key of its scope.
        priority: its retention priority then.
        to_tier: where moved content still is.
        row, length: of a rewind.
        group: the layer group whose share of the content it is about.
    """

    number: int
    kind: EventKind
    tier: int = 0
    block: int = 0
    key: bytes = b""
    parent: bytes = b""
    scope: bytes = b""
    priority: int = 0
    to_tier: int = -1
    row: int = -1
    length: int = -1
    group: int = 0


class EventLog:
    """The last `capacity` events that nobody has taken; 0 records none.

    Attributes:
        dropped: events that were pushed out by later ones before anyone took them.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise InvalidValue(f"the event buffer must hold 0 or more events, got {capacity}")
        self.capacity = capacity
        self.dropped = 0
        self._number = 0
        self._events: deque[Event] = deque(maxlen=capacity)

    def add(self, kind: EventKind, tier: int = 0, block: int = 0, **facts: object) -> None:
        """Record an event; see `Event` for the facts."""
        if not self.capacity:
            return
        self._number += 1
        self.dropped += len(self._events) == self.capacity
        self._events.append(Event(self._number, kind, tier, block, **facts))  # type: ignore[arg-type]

    def take(self) -> list[Event]:
        """All events recorded since the last call that are still there, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events
