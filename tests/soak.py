"""Many operations on many worlds: as many as a test asks for, or for as long as $GRAPHKV_SOAK_SECONDS says.

A long soak of one kind of world is `GRAPHKV_SOAK_SECONDS=900 python -m pytest tests -k "soak and ..."`; what it did is
shown at the end of the run. A failure names its seed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import ClassVar, Protocol

SECONDS = float(os.environ.get("GRAPHKV_SOAK_SECONDS", "0"))
DONE: list[str] = []
"""A line for each soak that was given its time."""


class World(Protocol):
    """What can be soaked: its operations are methods that take a `Random`.

    Attributes:
        OPERATIONS: their names, and how often a soak makes each.
        counts: how often what happened.
    """

    OPERATIONS: ClassVar[dict[str, int]]
    counts: dict[str, int]

    def check(self) -> None: ...

    def end(self) -> None: ...


def play(world: World, rng: Random, operations: int) -> Iterator[str]:
    """Make that many operations of a world, checked after each; yields their names."""
    names, weights = list(world.OPERATIONS), list(world.OPERATIONS.values())
    for _ in range(operations):
        name = rng.choices(names, weights)[0]
        getattr(world, name)(rng)
        world.check()
        yield name


def soak(make: Callable[[], World], *, seeds: int, operations: int) -> Counter[str]:
    """Worlds of at least `seeds` seeds, each driven through that many operations and ended; how often what happened."""
    reached: Counter[str] = Counter()
    begun = time.monotonic()
    seed = 0
    while seed < seeds or time.monotonic() < begun + SECONDS:
        world = make()
        made = 0
        try:
            for _ in play(world, Random(seed), operations):
                made += 1
            world.end()
        except BaseException as error:
            error.add_note(f"soak: seed {seed}, after {made} of {operations} operations")
            raise
        reached.update(world.counts)
        seed += 1
    if SECONDS:
        name = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        minutes = (time.monotonic() - begun) / 60
        DONE.append(f"{name}: {seed * operations:,} operations of {seed:,} seeds in {minutes:.1f} minutes")
    return reached
