"""How long content is worth keeping: a priority from 0 to 100 by token range, for ever or for a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from graphkv.errors import InvalidValue

DEFAULT_PRIORITY = 35
MAX_PRIORITY = 100


class Keep(NamedTuple):
    """Tokens start .. stop-1 of a sequence (stop None: to its end) have `priority`, for `seconds` if given."""

    start: int
    stop: int | None
    priority: int
    seconds: float | None = None


class Worth(NamedTuple):
    """What a block is worth: `priority` until `until` (seconds of the manager's clock, or infinite), then `after`."""

    priority: int
    until: float
    after: int


_PLAIN = Worth(DEFAULT_PRIORITY, math.inf, DEFAULT_PRIORITY)


@dataclass(frozen=True, slots=True)
class Retention:
    """Priorities of a sequence's tokens; the lowest is evicted first.

    Attributes:
        ranges: token ranges. Of those that touch a block, the one of highest priority counts.
        default: priority of a block that no range touches, and once a range's time is over.
    """

    ranges: tuple[Keep, ...] = ()
    default: int = DEFAULT_PRIORITY

    def __post_init__(self) -> None:
        for priority in (self.default, *(keep.priority for keep in self.ranges)):
            if not 0 <= priority <= MAX_PRIORITY:
                raise InvalidValue(f"priority {priority} is not within 0 .. {MAX_PRIORITY}")
        for start, stop, _, seconds in self.ranges:
            if start < 0 or (stop is not None and stop <= start):
                raise InvalidValue(f"token range {start} .. {stop} is empty or negative")
            if seconds is not None and not 0 < seconds < math.inf:
                raise InvalidValue(f"a time limit must be positive seconds, got {seconds}; leave it out for none")

    @property
    def plain(self) -> Worth:
        """What a block that no range touches is worth."""
        return _PLAIN if self.default == DEFAULT_PRIORITY else Worth(self.default, math.inf, self.default)

    def of(self, start: int, stop: int, now: float) -> Worth:
        """What a block with tokens start .. stop-1 is worth from now on."""
        touching = [
            (priority, math.inf if seconds is None else now + seconds)
            for first, last, priority, seconds in self.ranges
            if first < stop and (last is None or last > start)
        ]
        return Worth(*max(touching), self.default) if touching else self.plain
