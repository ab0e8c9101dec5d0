"""What a runtime has done and holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RuntimeStats:
    """Counts since construction, and the state now. Blocks exclude the null block."""

    steps_submitted: int
    steps_retired: int
    graph_launches: int
    blocks_total: int
    blocks_held: int
    blocks_free: int
    blocks_retiring: int
    blocks_peak: int
    rows_open: int
    pool_bytes: int
    device_bytes: int
    pinned_bytes: int
    allocations: int
