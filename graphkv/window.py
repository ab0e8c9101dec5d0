"""Sliding windows: which tokens a position reads, and which table columns hold them.

A layer with a window of W tokens and S sinks reads, at position p, the positions p - W + 1 .. p and 0 .. S - 1. Columns
are those of the block table: column c holds the positions c * block_size .. (c + 1) * block_size - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphkv.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Window:
    """What a windowed layer can read.

    Attributes:
        tokens: tokens readable at a position, itself included.
        sinks: first tokens of the sequence, which stay readable behind the window.
    """

    tokens: int
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("window", self.tokens, 1), ("sinks", self.sinks, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidValue(f"{name} must be an integer of at least {least}, got {value!r}")

    def start(self, position: int) -> int:
        """The first position, sinks aside, that a query at `position` reads."""
        return max(0, position - self.tokens + 1)

    def sink_columns(self, block_size: int) -> int:
        """Columns that hold sinks; they are kept for the life of a sequence."""
        return -(-self.sinks // block_size)

    def first_column(self, position: int, block_size: int) -> int:
        """The first column behind those of the sinks that a query at `position` reads."""
        return max(self.sink_columns(block_size), self.start(position) // block_size)

    def columns(self, position: int, block_size: int) -> list[int]:
        """Columns that a query at `position` reads of what is before it: all it needs to begin there."""
        end, sinks = -(-position // block_size), self.sink_columns(block_size)
        first = self.first_column(position, block_size) if self.start(position) < position else end
        return [*range(min(sinks, end)), *range(first, end)]

    def most_blocks(self, tokens: int, block_size: int) -> int:
        """Most blocks that a row holds while `tokens` tokens are kept besides those that its next query reads.

        These are the tokens of steps that have not retired, and those that are kept to be rewound to.
        """
        return self.sink_columns(block_size) + 1 + -(-(self.tokens - 1 + tokens) // block_size)
