"""The decode runtime: sequences in, captured steps out, results back. The one module that knows all the parts."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from types import TracebackType

import torch

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.engine import EngineShape, Mode, StepEngine
from graphkv.errors import InvalidValue, TransferTimeout
from graphkv.footprint import Footprint
from graphkv.frames import Upload
from graphkv.layout import Side
from graphkv.loop.demands import check_demands
from graphkv.loop.guard import FreeBlockGuard
from graphkv.loop.moving import MovingVerbs
from graphkv.loop.report import runtime_stats
from graphkv.manager.events import Event
from graphkv.manager.v2 import V2Options
from graphkv.manager.windowed import build_manager
from graphkv.metadata import StepMetadata
from graphkv.pool import NULL_BLOCK, Pools
from graphkv.selection.requirements import Requirements
from graphkv.stats import RuntimeStats
from graphkv.step import StepModel
from graphkv.tiers.copies import BlockCopies
from graphkv.tiers.hierarchy import ColdTiers, TierOptions
from graphkv.transfer import DEVICE, CopyJob
from graphkv.window_sizing import GroupLoad, choose_blocks


class DecodeRuntime(MovingVerbs):
    """Decodes batches of sequences through graphs captured once a bucket.

    Args:
        config: what the cache holds.
        model: the model's part of a step, see `StepModel`.
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:N".
        max_rows: sequences open at once.
        max_seq_len: tokens of the longest sequence; the block table also reserves the columns that next_n can reach.
        num_blocks, memory_bytes: size of the pools, by blocks (null block included) or by a budget for their bytes;
            give one of them. With windows num_blocks is that of the layers without one.
        window_blocks: blocks of each layer group with a window (null block included), for num_blocks; by default so
            many that no step lacks any.
        rewind_room: tokens behind the windows that stay readable, see `WindowedManager`.
        max_num_blocks: blocks that `grow` can reach: addresses for them are reserved. None fixes the pools' size.
        buckets: batch sizes to capture; by default powers of two up to max_rows, and max_rows.
        next_n: query tokens a row and decode step (1 + draft tokens).
        prefill_chunk: most prompt tokens a prefill step.
        mode: "graph" captures the decode step; "eager" runs the same function for every step, for comparison.
        upload: how packets reach the device, see `graphkv.frames.Upload`.
        prefix_caching: whether sequences that begin alike share blocks. The blocks of closed sequences then stay
            cached until their room is needed.
        match_back_off: see `ManagerV2`; the tokens that a draft side reads ahead, if it does.
        requirements: what else the cache will be used for; what cannot work is refused here.
        tiers: where blocks go that the device has no room for; none by default.
        event_capacity: events kept until `take_events`; 0 records none.
        self_check: check the host's state after each retired step, and fill free blocks with bytes that are no numbers.
            For debugging: it is slow.
    """

    def __init__(
        self,
        config: CacheConfig,
        model: StepModel,
        *,
        device: Device | torch.device | str = "auto",
        max_rows: int,
        max_seq_len: int,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        window_blocks: AbstractSequence[int] | None = None,
        rewind_room: int = 0,
        max_num_blocks: int | None = None,
        buckets: AbstractSequence[int] | None = None,
        next_n: int = 1,
        prefill_chunk: int = 512,
        mode: Mode = "graph",
        upload: Upload = "copy",
        prefix_caching: bool = True,
        match_back_off: int = 0,
        tiers: TierOptions | None = None,
        requirements: Requirements | None = None,
        event_capacity: int = 0,
        self_check: bool = False,
    ) -> None:
        shape = EngineShape.of(
            config,
            max_rows=max_rows,
            max_seq_len=max_seq_len,
            buckets=buckets,
            next_n=next_n,
            prefill_chunk=prefill_chunk,
        )
        load = GroupLoad(
            rows=max_rows,
            longest=max_seq_len,
            next_n=next_n,
            prefill_chunk=prefill_chunk,
            rewind_room=rewind_room,
        )
        num_blocks, *window_blocks = choose_blocks(config, num_blocks, memory_bytes, window_blocks, load)
        device = Device.of(device)
        setting = check_demands(
            config,
            requirements,
            device,
            next_n,
            graph=mode == "graph",
            prefix_caching=prefix_caching,
            tiers=tiers is not None,
            growth=max_num_blocks is not None,
        )
        options: V2Options = {
            "max_edits": shape.max_edits,
            "prefix_caching": prefix_caching,
            "match_back_off": match_back_off,
            "whole_copies": setting.splits_scales,
            "event_capacity": event_capacity,
            "self_check": self_check,
        }
        self._can_grow, self._shape = max_num_blocks is not None, shape
        with device.guard():
            self.pools = Pools(config, num_blocks, device, max_num_blocks, window_blocks=window_blocks)
            engine = StepEngine(config, self.pools, model, shape, device, mode, upload)
            cold = None if tiers is None else ColdTiers(tiers, self.pools, device, engine.stream)
            options.update(_tier_options(cold))
            manager = build_manager(
                config.windows,
                window_blocks,
                rewind_room,
                num_blocks=num_blocks,
                block_size=config.block_size,
                max_rows=max_rows,
                max_blocks=shape.max_blocks,
                **options,
            )
            engine.warm_up()
            copies = BlockCopies(self.pools, None, device)
            super().__init__(config, device, manager, engine, shape, copies, max_seq_len, cold)
            warm = CopyJob(DEVICE, NULL_BLOCK, DEVICE, NULL_BLOCK + 1, config.block_size)
            groups = range(len(config.groups))
            self._submitter.copy([warm._replace(group=group) for group in groups])  # what it needs is compiled now
        self._guard: FreeBlockGuard | None = None
        if self_check:
            self._guard = FreeBlockGuard(manager, self.pools, device, engine.stream)
            self._flight.on_retired = self._guard.poison

    # growth ---------------------------------------------------------------------------------------------------------

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks in all, the null block included. Captured graphs stay valid; no step is waited for.

        Raises:
            InvalidValue: not more than there are, or more than max_num_blocks.
            OutOfMemory: the device has no room; nothing changed.
        """
        if num_blocks <= self.pools.num_blocks:
            raise InvalidValue(
                f"{num_blocks} blocks are no more than the {self.pools.num_blocks} there are; see shrink"
            )
        self._resize(num_blocks)

    def shrink(self, num_blocks: int) -> None:
        """Have `num_blocks` blocks in all, the null block included, and give back the memory of those at the end.

        What is cached in these is evicted. Captured graphs stay valid. Waits for all work of the device.

        Raises:
            InvalidValue: not fewer than there are, fewer than 2, or blocks at the end are held. Nothing changed.
        """
        if not 2 <= num_blocks < self.pools.num_blocks:
            raise InvalidValue(
                f"{num_blocks} blocks are not within 2 (the null block and one to hand out) and less than the "
                f"{self.pools.num_blocks} there are; see grow"
            )
        self.retire()
        self._submitter.copy_now()
        self._submitter.end_clearing()
        self.device.synchronize()
        self._resize(num_blocks)

    def _resize(self, num_blocks: int) -> None:
        if not self._can_grow:
            raise InvalidValue(
                f"the pools have {self.pools.num_blocks} blocks for good; build the runtime with max_num_blocks to "
                "resize them"
            )
        self.pools.resize(num_blocks, self.manager.vacate)
        self.manager.resize(num_blocks)

    # looking and leaving ------------------------------------------------------------------------------------------

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that steps run on, None on the CPU device."""
        return self._engine.stream

    @property
    def graph_nodes(self) -> dict[int, int]:
        """Nodes of the captured graph of each bucket, 0 on the CPU device."""
        return self._engine.graphs.nodes

    def metadata(self, rows: int, side: Side = Side.TARGET, group: int | None = None) -> StepMetadata:
        """The live tensors that a decode step of bucket `rows` reads, by default those of the side's first layer group.

        For looking; the device writes them.
        """
        return self._engine.metadata(side, rows, rows * self.next_n, group)

    def check(self) -> None:
        """`AssertionError` with the facts if an invariant of the host's state is broken; it reads everything."""
        self.manager.check()
        self._tokens.check()
        if self._guard is not None:
            self._guard.check()
        submitted, retired = self._engine.submitted, self._engine.retired
        if not retired <= submitted <= retired + 2:
            raise AssertionError(f"{submitted} steps submitted and {retired} retired with two frames")

    def footprint(self) -> Footprint:
        """The memory that the runtime has taken, by kind. All but the workspaces follow from its arguments alone, see
        `Footprint.estimate`; pools that can grow take whole chunks of the device's."""
        return Footprint.estimate(
            self.config,
            self._shape,
            (self.pools.num_blocks, *self.pools.window_blocks),
            self.device,
            host_bytes=0 if self.tiers is None else self.tiers.host.num_bytes,
            workspace_bytes=self._engine.workspace_bytes,
        )

    def stats(self) -> RuntimeStats:
        """Counts since construction, and the state now, by tier and role."""
        return runtime_stats(self._engine, self.manager, self.pools, self.tiers, self.device)

    def take_events(self) -> list[Event]:
        """What became findable, moved, went or was rewound since the last call, oldest first, if `event_capacity` is
        given. A jump of their numbers tells of dropped ones."""
        return self.manager.take_events()

    def __enter__(self) -> DecodeRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all that is under way, steps and transfers, and give the colder tiers back.

        `TransferTimeout` if a transfer does not end; its memory and files then stay. It does not hide an error that is
        on its way already, but is added to its notes.
        """
        self.device.synchronize()
        try:
            if self.tiers is not None:
                self.drain()
                self.tiers.close()
        except TransferTimeout as timeout:
            if error is None:
                raise
            error.add_note(str(timeout))


def _tier_options(tiers: ColdTiers | None) -> V2Options:
    if tiers is None:
        return {}
    return {
        "tier_slots": tiers.slots,
        "mover": tiers.mover,
        "resume_limit": tiers.options.resume_limit,
        "transfer_limit_s": tiers.options.transfer_limit_s,
        "max_blocks_underway": tiers.options.max_blocks_underway,
    }
