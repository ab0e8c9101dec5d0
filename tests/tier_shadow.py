"""The image that pools and colder tiers of a runtime must have, whatever moved: the oracle of its tests with tiers.

Sequences are told by their tokens alone: each goes on by the last token plus one, as `ProbeModel` continues it, so a
sequence's whole future is known when it is opened. Bytes are followed from where a step wrote them through every copy
and transfer, failed ones included. `check` compares all bytes of all pools, and what each sequence reads through its
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from probe import WIDTH, ProbeModel, probe_config
from watched_mover import WatchedMover

from graphkv.layout import Role, Side
from graphkv.manager.prefix import EVERYONE, Scope
from graphkv.runtime import DecodeRuntime
from graphkv.sequence import Batch, Chunk
from graphkv.sequence import Sequence as Running
from graphkv.tiers.hierarchy import TierOptions
from graphkv.transfer import DEVICE, CopyJob

CANARY = 0xA5
Image = list[np.ndarray[Any, Any]]  # of a block, one array a pool


@dataclass
class Known:
    """What is known of an open sequence: its tokens, those that the submitted steps will have sampled included.

    `fed` is None until its prompt was prefilled.
    """

    tokens: list[int]
    fed: int | None


class TierShadow:
    """Drives a runtime of one query token a step, and knows its bytes.

    Args:
        late: whether transfers wait until the test releases them.
    """

    def __init__(self, runtime: DecodeRuntime, *, late: bool = False) -> None:
        self.runtime, self.config = runtime, runtime.config
        self.size = self.config.block_size
        self.sequences: dict[Running, Known] = {}
        self.images = [np.full(tuple(pool.blocks.shape), CANARY, np.uint8) for pool in runtime.pools]
        self.colder: dict[tuple[int, int], Image] = {}
        for pool in runtime.pools:
            pool.blocks[: pool.num_blocks].fill_(CANARY)
        runtime.device.synchronize()  # steps and transfers run on other streams
        self.mover: WatchedMover | None = None
        if runtime.tiers is not None:
            self.mover = WatchedMover(runtime.tiers.mover, self._began, self._failed, late)
            runtime.manager._tiering._mover = self.mover
        self._copy, runtime._submitter.copy = runtime._submitter.copy, self._copied
        self._feed, runtime._submitter.prefill = runtime._submitter.prefill, self._fed

    # bytes ----------------------------------------------------------------------------------------------------------

    def _began(self, jobs: Sequence[CopyJob]) -> None:
        for job in jobs:
            if job.source_tier == DEVICE:
                image = [pool[job.source].copy() for pool in self.images]
            else:
                image = self.colder[job.source_tier, job.source]
            self._put(job, image)

    def _failed(self, job: CopyJob) -> None:
        """The target means nothing now: believe what is there."""
        self.runtime.device.synchronize()
        if job.target_tier == DEVICE:
            self._put(job, [pool.block(job.target).cpu().numpy() for pool in self.runtime.pools])
        else:
            self.colder.pop((job.target_tier, job.target), None)

    def _put(self, job: CopyJob, image: Image) -> None:
        if job.target_tier == DEVICE:
            for pool, part in zip(self.images, image, strict=True):
                pool[job.target] = part
        else:
            self.colder[job.target_tier, job.target] = image

    def _copied(self, jobs: Sequence[CopyJob]) -> None:
        self._copy(jobs)
        for job in jobs:
            for pool in self.images:
                count = pool.shape[2] // self.size * job.tokens
                pool[job.target, :, :count] = pool[job.source, :, :count]

    def _fed(self, chunk: Chunk) -> int:
        """Noted chunk by chunk: by the next one, a block may have been given up for an equal one."""
        step = self._feed(chunk)
        for sequence, begin, count in zip(chunk.batch, chunk.begins.tolist(), chunk.counts.tolist(), strict=True):
            self._wrote(sequence, begin, begin + count, (Side.TARGET,))
        return step

    def _records(self, tokens: np.ndarray[Any, Any], begin: int, layer: int, role: Role) -> np.ndarray[Any, Any]:
        """u8 [n, bytes]: what a step writes for tokens from position `begin` on."""
        position = np.arange(begin, begin + tokens.size)
        pair = np.stack([tokens, position + 1000.0 * layer], axis=1).astype(np.float32)
        return np.tile(pair, WIDTH if role is Role.LATENT else WIDTH // 2).view(np.uint8)

    def _places(self, sequence: Running, begin: int, end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        position = np.arange(begin, end)
        blocks = self.runtime.manager.block_table[sequence.row][position // self.size]
        assert (blocks > 0).all(), sequence
        return blocks, position % self.size

    def _wrote(self, sequence: Running, begin: int, end: int, sides: Iterable[Side]) -> None:
        tokens = np.array(self.sequences[sequence].tokens[begin:end])
        blocks, offsets = self._places(sequence, begin, end)
        for side in sides:
            for layer, role, pool in self._layers(side):
                page = self.config.layer_offset(side, role, layer)
                records = self._records(tokens, begin, layer, role)
                pool.reshape(*pool.shape[:2], self.size, -1)[blocks, page, offsets] = records

    def _layers(self, side: Side) -> Iterable[tuple[int, Role, np.ndarray[Any, Any]]]:
        keys = [(s, role) for s in self.config.sides for role in Role]
        for layer, spec in enumerate(self.config.side_layers(side)):
            for role in Role:
                if spec.owns(role):
                    yield layer, role, self.images[keys.index((side, role))]

    # verbs ----------------------------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], scope: Scope = EVERYONE) -> Running:
        sequence = self.runtime.open(tokens, scope=scope)
        self.sequences[sequence] = Known(list(tokens), None)
        return sequence

    def prefill(self, sequences: Iterable[Running]) -> int:
        batch = list(sequences)
        step = self.runtime.prefill(batch)
        for sequence in batch:
            known = self.sequences[sequence]
            known.fed = len(known.tokens)
            known.tokens.append(known.tokens[-1] + 1)
        return step

    def step(self, sequences: Iterable[Running] | Batch) -> int:
        batch = sequences if isinstance(sequences, Batch) else list(sequences)
        step = self.runtime.step(batch)
        for sequence in batch:
            known = self.sequences[sequence]
            self._wrote(sequence, known.fed, known.fed + 1, self.config.sides)
            known.fed += 1
            known.tokens.append(known.tokens[-1] + 1)
        return step

    def fork(self, sequence: Running) -> Running:
        child, known = self.runtime.fork(sequence), self.sequences[sequence]
        self.sequences[child] = Known(list(known.tokens), known.fed)
        return child

    def append(self, sequence: Running, tokens: Sequence[int]) -> None:
        self.runtime.append(sequence, tokens)
        self.sequences[sequence].tokens += tokens

    def rewind(self, sequence: Running, count: int) -> None:
        self.runtime.rewind(sequence, count)
        known = self.sequences[sequence]
        known.fed -= count
        del known.tokens[known.fed + 1 :]

    def grow(self, num_blocks: int) -> None:
        """Grow, and make the new blocks' bytes known."""
        before = self.runtime.pools.num_blocks
        self.runtime.grow(num_blocks)
        for pool, image in zip(self.runtime.pools, self.images, strict=True):
            pool.blocks[before:num_blocks].fill_(CANARY)
            image[before:num_blocks] = CANARY
        self.runtime.device.synchronize()

    def close(self, sequence: Running) -> None:
        self.runtime.close(sequence)
        del self.sequences[sequence]

    # what must hold -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every byte of every pool, every token of every sequence, and what each reads through its table."""
        self.runtime.retire()
        self.check_bytes()
        for sequence, known in self.sequences.items():
            assert sequence.tokens.tolist() == known.tokens, sequence
            if sequence.is_ready and known.fed is not None:
                assert sequence.length == known.fed, sequence
                self.check_reads(sequence)
        self.runtime.check()

    def check_bytes(self) -> None:
        """Steps and the transfers that have begun are done by the time of the call."""
        self.runtime.device.synchronize()
        for pool, image in zip(self.runtime.pools, self.images, strict=True):
            data = pool.blocks[: pool.num_blocks].cpu().numpy()
            bad = np.argwhere(data != image[: pool.num_blocks])
            assert not bad.size, f"{len(bad)} bytes differ, first at block, page, byte {bad[0].tolist()}"

    def check_reads(self, sequence: Running) -> None:
        """A sequence reads its own tokens, once the copies that its next step waits for were made."""
        if self.runtime.manager.copies_pending:
            return
        known = self.sequences[sequence]
        blocks, offsets = self._places(sequence, 0, known.fed)
        for layer, role, pool in self._layers(Side.TARGET):
            page = self.config.layer_offset(Side.TARGET, role, layer)
            found = pool.reshape(*pool.shape[:2], self.size, -1)[blocks, page, offsets]
            want = self._records(np.array(known.tokens[: known.fed]), 0, layer, role)
            bad = np.flatnonzero((found != want).any(1))
            assert not bad.size, f"{sequence} {role} layer {layer}: {bad.size} positions differ, first {bad[0]}"


def tier_runtime(
    device: Any, tiers: TierOptions | None = None, *, late: bool = False, draft: str = "F", **options: Any
) -> tuple[DecodeRuntime, TierShadow]:
    """A small runtime around a ProbeModel, with its shadow."""
    config = probe_config(draft=draft)
    sizes = {"max_rows": 4, "max_seq_len": 112, "num_blocks": 24, "prefill_chunk": 48} | options
    runtime = DecodeRuntime(config, ProbeModel(config, 512, device), device=device, tiers=tiers, **sizes)
    return runtime, TierShadow(runtime, late=late)
