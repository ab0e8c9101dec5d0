"""A runtime in the middle of a long decode: every row open, lengths random, tables full, and nothing to prefill.

These few functions reach into the runtime's parts, since its public surface has no way, and needs none, to be in the
middle of something or to leave the launch out of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphkv.config import CacheConfig, LayerSpec
from graphkv.packet import EDIT_WORDS
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch
from graphkv.step import StepContext, StepModel, StepOutput

BLOCK_SIZE = 64
COLUMNS = 2048  # of the block table: 131,072 tokens a row
ROOM = 8192  # tokens that every row can still grow by

TINY = CacheConfig(
    layers=(LayerSpec(),),
    kv_lora_rank=4,
    qk_rope_head_dim=4,
    index_head_dim=4,
    latent="fp8",
    index_k="bf16",
    block_size=BLOCK_SIZE,
)
"""A cache of 1 KiB a block: host work depends on the number of blocks, not on their bytes."""


def echo(step: StepContext) -> StepOutput:
    """A model that does nothing: the next tokens are the last ones."""
    return StepOutput(step.metadata.token_ids.view(step.rows, step.next_n))


def steady_runtime(
    rows: int,
    device: str,
    *,
    config: CacheConfig = TINY,
    model: StepModel = echo,
    columns: int = COLUMNS,
    room: int = ROOM,
    **options: Any,
) -> tuple[DecodeRuntime, Batch]:
    """A runtime with `rows` open sequences of random length, and the batch of them all.

    Lengths are uniform up to the table's width less `room`, so about rows / 64 rows need a block in each step.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, columns * BLOCK_SIZE - room, rows)
    blocks = int((lengths // BLOCK_SIZE + 2 + room // BLOCK_SIZE).sum()) + 1
    runtime = DecodeRuntime(
        config,
        model,
        device=device,
        max_rows=rows,
        buckets=(rows,),
        max_seq_len=columns * BLOCK_SIZE - options.get("next_n", 1),
        num_blocks=blocks,
        prefill_chunk=BLOCK_SIZE,
        **options,
    )
    sequences = [runtime.open([1]) for _ in range(rows)]
    for sequence, length in zip(sequences, lengths.tolist(), strict=True):
        _grow(runtime, sequence.row, length, rng)
    runtime.resync()  # the device gets lengths and tables as the host has them
    batch = Batch(sequences)
    for _ in range(3):  # the first step supplies tokens; after both frames were used, packets are steady
        runtime.results(runtime.step(batch))
    return runtime, batch


def _grow(runtime: DecodeRuntime, row: int, length: int, rng: np.random.Generator) -> None:
    manager, rows = runtime.manager, np.array([row], np.int32)
    manager.token_ids[row, : length + 1] = rng.integers(0, 1 << 30, length + 1)  # no two blocks are the same content
    manager.extend(rows, length)
    manager.advance(rows, length)
    manager.take_edits(np.empty((manager.edits_pending, EDIT_WORDS), np.int32))
    runtime._tokens.known[row] = length + 1
    runtime._tokens.ready[row] = True


class _NoGraph:
    nodes = 0

    def launch(self, stream: int) -> None:
        """Leave the step undone."""


def leave_out_launches(runtime: DecodeRuntime) -> None:
    """From now on steps are published and never run. The device's state falls behind for good."""
    runtime.retire()
    steps = runtime._engine.graphs._steps
    for bucket in steps:
        steps[bucket] = _NoGraph()


def write_results(runtime: DecodeRuntime) -> None:
    """What the replay of the last submitted step would have left in the ring."""
    engine = runtime._engine
    line = engine.submitted & 1
    engine._ring.header[line][0] = engine.submitted
    engine._ring.accepted[line][:] = 1


class StepParts:
    """The host side of `DecodeRuntime.step`, cut into the parts it consists of, to be run in order.

    `step` itself, timed whole, costs what the parts cost together and its own argument checks.
    """

    ORDER = ("acquire", "claim", "records", "edits", "seal", "publish", "submitted")

    def __init__(self, runtime: DecodeRuntime, batch: Batch) -> None:
        self.runtime, self.engine, self.manager = runtime, runtime._engine, runtime.manager
        self.rows, self.count = batch.rows, len(batch)
        self.num_edits = self.num_bytes = 0
        self.frame = self.engine.next_frame
        self._done = 0  # parts of the current step that ran
        self._calls: dict[str, Callable[[], None]] = {name: getattr(self, f"_{name}") for name in self.ORDER}

    def run(self, names: tuple[str, ...]) -> None:
        """Run the next parts of the step."""
        for name in names:
            self._calls[name]()
        self._done = (self._done + len(names)) % len(self.ORDER)

    def finish(self, launched: bool = False) -> None:
        """Run what is left of the step, and retire it as if, or because, it was launched."""
        if self._done:
            self.run(self.ORDER[self._done :])
        if not launched:
            write_results(self.runtime)
        self.runtime.retire()

    def _acquire(self) -> None:
        self.runtime._submitter.reserve_edits(2 * self.count)
        self.frame = self.runtime._submitter.acquire()

    def _claim(self) -> None:
        self.manager.claim(self.rows, 1)

    def _records(self) -> None:
        self.frame.writer.records(self.rows, 1)

    def _edits(self) -> None:
        self.num_edits = count = self.manager.edits_pending
        if count:
            self.manager.take_edits(self.frame.writer.edits(self.count, count))

    def _seal(self) -> None:
        self.num_bytes = self.frame.writer.seal(
            self.engine.submitted + 1,
            rows=self.count,
            tokens=self.count,
            edits=self.num_edits,
            token_words=0,
            bucket=self.count,
        )

    def _publish(self) -> None:
        self.engine._frames.publish(self.num_bytes)

    def _submitted(self) -> None:
        self.engine._submitted()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
