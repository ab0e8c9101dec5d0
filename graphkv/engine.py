"""The device half of the runtime: packets in, captured steps run, raw results out. It knows rows, not sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graphkv.config import CacheConfig
from graphkv.device import Device, stream_handle
from graphkv.errors import InvalidValue
from graphkv.frames import Frame, Frames, Upload
from graphkv.graph import GraphSet
from graphkv.kernel_choice import KernelChoice
from graphkv.latch import CudaNodes, HostNodes, Ring, StepNodes
from graphkv.layout import Role, Side
from graphkv.metadata import TABLE_COLUMN_MULTIPLE, DerivePlan, LiveSet, LiveShape, SideBinding, StepMetadata, StepState
from graphkv.packet import STEP_MASK, PacketSize
from graphkv.pool import Pools
from graphkv.step import StepContext, StepKind, StepModel, StepOutput, Workspace

Mode = Literal["graph", "eager"]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes that everything is preallocated for.

    Attributes:
        max_rows: rows of the per-sequence tables.
        max_blocks: columns of the block table, a multiple of 4.
        buckets: batch sizes to capture.
        next_n: query tokens a row and decode step.
        lookahead: tokens past these that draft steps write, see `CacheConfig.draft_lookahead`.
        max_edits: most table cells a step can change.
        prefill_chunk: most tokens a prefill step.
        chunk_blocks: blocks that a step's tokens can fill.
    """

    max_rows: int
    max_blocks: int
    buckets: tuple[int, ...]
    next_n: int
    lookahead: int
    max_edits: int
    prefill_chunk: int
    chunk_blocks: int

    @classmethod
    def of(
        cls,
        config: CacheConfig,
        *,
        max_rows: int,
        max_seq_len: int,
        buckets: Sequence[int] | None,
        next_n: int,
        prefill_chunk: int,
    ) -> EngineShape:
        """The shape that sequences of up to `max_seq_len` tokens need; `InvalidValue` for sizes that cannot work.

        The table reserves the columns that next_n tokens and draft steps past max_seq_len reach. Buckets are powers of
        two up to max_rows, and max_rows, where none are given.
        """
        for name, value in (("max_rows", max_rows), ("max_seq_len", max_seq_len), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise InvalidValue(f"{name} must be positive, got {value}")
        if not 1 <= next_n <= config.block_size:
            raise InvalidValue(f"next_n must be within 1 .. block_size {config.block_size}, got {next_n}")
        if buckets is None:
            buckets = sorted({max_rows, *(1 << i for i in range(max_rows.bit_length()))})
        if not buckets or min(buckets) < 1 or max(buckets) > max_rows:
            raise InvalidValue(f"buckets must be within 1 .. max_rows {max_rows}, got {list(buckets)}")
        lookahead = config.draft_lookahead(next_n)
        columns = -(-(max_seq_len + next_n + lookahead) // config.block_size)
        max_blocks = -(-columns // TABLE_COLUMN_MULTIPLE) * TABLE_COLUMN_MULTIPLE
        # Room for the edits of a whole step of either kind, of a long row that is opened where a long one ended, and of
        # the blocks that become shared when two steps retire meanwhile.
        chunk_blocks = max(max_rows * (next_n + lookahead), prefill_chunk) // config.block_size + 1
        max_edits = len(config.groups) * (2 * max_blocks + 4 * max_rows + 3 * chunk_blocks)
        return cls(max_rows, max_blocks, tuple(buckets), next_n, lookahead, max_edits, prefill_chunk, chunk_blocks)

    @property
    def widest(self) -> int:
        return max(self.buckets)

    @property
    def max_tokens(self) -> int:
        return max(self.widest * self.next_n, self.prefill_chunk)


class RawResult(NamedTuple):
    """Views of a result ring line, good until the step after next is submitted."""

    accepted: npt.NDArray[np.int32]  # [rows]
    emitted: npt.NDArray[np.int32]  # [rows, next_n]


class StepEngine:
    """Frames, live sets, graphs and the step clock of one runtime.

    Attributes:
        stream: the stream that steps run on, None on the CPU device.
        submitted, retired: numbers of the last submitted and the last retired step.
    """

    def __init__(
        self,
        config: CacheConfig,
        pools: Pools,
        model: StepModel,
        shape: EngineShape,
        device: Device,
        mode: Mode,
        upload: Upload,
        kernels: KernelChoice,
    ) -> None:
        if mode not in ("graph", "eager"):
            raise InvalidValue(f"mode must be 'graph' or 'eager', got {mode!r}")
        self._pools, self._model, self._shape, self._device, self._mode = pools, model, shape, device, mode
        self._max_context = shape.max_blocks * config.block_size
        self._kernels = kernels
        self.stream = device.stream()
        self._handle = stream_handle(self.stream)
        self._live = {
            side: tuple(LiveSet(side, _live_shape(config, side, g, shape, device), device) for g in groups)
            for side, groups in ((side, config.side_groups(side)) for side in config.sides)
        }
        self._state = StepState(shape.max_rows, shape.max_blocks, shape.next_n, device, len(config.groups))
        self._ring = Ring(shape.widest, shape.next_n, device)
        size = PacketSize(rows=shape.widest, edits=shape.max_edits, tokens=shape.max_tokens)
        self._frames = Frames(size, device, upload, self.stream)
        self._nodes: StepNodes
        if device.is_cuda:
            arenas = self._frames.device_arenas, self._frames.host_arenas
            self._nodes = CudaNodes(self._live, self._state, self._ring, *arenas)
        else:
            self._nodes = HostNodes(self._live, self._state, self._ring, self._frames.device_arenas)
        self._workspaces = {kind: Workspace(device) for kind in ("decode", "prefill")}
        self.graphs = GraphSet(shape.buckets, device, self.stream)
        self.submitted = self.retired = 0

    def metadata(self, side: Side, rows: int, tokens: int, group: int | None = None) -> StepMetadata:
        """The live tensors of a side and group (its first), as a step of that shape sees them. For looking; the device
        writes them."""
        live = self._side_live(side)
        chosen = live[0] if group is None else next((each for each in live if each.shape.group == group), None)
        if chosen is None:
            raise InvalidValue(f"no {side} layer is in group {group}; groups {[x.shape.group for x in live]} have some")
        return chosen.views(rows, tokens)

    def _side_live(self, side: Side) -> tuple[LiveSet, ...]:
        live = self._live.get(side)
        if live is None:
            raise InvalidValue(f"this cache has no {side} side; give CacheConfig draft_layers to have one")
        return live

    # construction -------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run every bucket on padded rows alone, then capture: what a step allocates or compiles exists by then."""
        self._device.synchronize()  # buffers, weights and pools were filled on other streams than this engine's
        for bucket in reversed(self.graphs.buckets):
            self.submit_idle(bucket, eager=True)
            self.wait_all()
        self._device.synchronize()
        self._workspaces["decode"].freeze()
        if self._mode == "graph":
            self.graphs.capture(self._decode)
            for bucket in self.graphs.buckets:
                self.submit_idle(bucket)
                self.wait_all()

    def wait_all(self) -> None:
        """Wait for every submitted step, of which none may be of interest any more."""
        while self.retired < self.submitted:
            self.wait_next()

    def _decode(self, bucket: int) -> StepOutput:
        """The captured function: everything between a packet and its results."""
        return self._run("decode", bucket, bucket * self._shape.next_n, self._max_context)

    def _run(self, kind: StepKind, rows: int, tokens: int, max_context: int) -> StepOutput:
        next_n, workspace = self._shape.next_n, self._workspaces[kind]
        with self._device.running_on(self.stream):
            self._nodes.latch(rows, tokens, self._handle)
            first, *others = (live.views(rows, tokens) for live in self._live[Side.TARGET])
            for live in self._live[Side.TARGET][1:]:  # groups that the latch did not fill
                self._nodes.derive(live, first, DerivePlan(), self._handle)
            binding = SideBinding(first, *others)
            context = StepContext(
                kind, binding, self._pools, workspace, next_n, max_context, self._derive, self._kernels
            )
            with binding.stepping(), torch.no_grad():
                output = self._model(context)
            output.check(rows, next_n, self._device.torch)
            self._nodes.advance(rows, output.tokens, output.accepted, kind == "prefill", self._handle)
        return output

    def _derive(self, side: Side, batch: StepMetadata, plan: DerivePlan) -> tuple[StepMetadata, ...]:
        self.metadata(side, batch.rows, plan.tokens(batch))  # refuses a side without layers, and a shape too large
        return tuple(self._nodes.derive(live, batch, plan, self._handle) for live in self._side_live(side))

    # steps --------------------------------------------------------------------------------------------------------

    @property
    def next_frame(self) -> Frame:
        """The frame of the next step; its packet may be written once `next_frame.step` has retired."""
        return self._frames.back

    def submit_decode(self, packet_bytes: int, bucket: int, *, eager: bool = False) -> int:
        """Publish the packet of `next_frame` and launch the decode step of `bucket`; returns the step's number."""
        self._frames.publish(packet_bytes)
        if eager or self._mode == "eager":
            self._decode(bucket)
        else:
            self.graphs.launch(bucket)
        return self._submitted()

    def submit_prefill(self, packet_bytes: int, rows: int, tokens: int, max_context: int) -> int:
        """Publish the packet of `next_frame` and run a ragged step eagerly; returns the step's number."""
        self._frames.publish(packet_bytes)
        self._run("prefill", rows, tokens, max_context)
        return self._submitted()

    def submit_idle(self, bucket: int, *, eager: bool = False) -> int:
        """A decode step of padded rows alone: it writes nowhere."""
        packet = self.next_frame.writer.seal(
            self.submitted + 1, rows=0, tokens=0, edits=0, token_words=0, bucket=bucket
        )
        return self.submit_decode(packet, bucket, eager=eager)

    def _submitted(self) -> int:
        self.submitted += 1
        self._frames.submitted(self.submitted)
        return self.submitted

    def wait_next(self) -> RawResult | None:
        """Wait for the first step that has not retired, and retire it; None where the device refused its packet."""
        step = self.retired + 1
        self._frames.of(step).done.synchronize()
        self.retired = step
        line = step & 1
        if self._ring.header[line][0] != step & STEP_MASK:
            return None
        return RawResult(self._ring.accepted[line], self._ring.emitted[line])

    # faults -------------------------------------------------------------------------------------------------------

    @property
    def first_fault(self) -> tuple[int, int]:
        """(expected step, found step) of the first packet that the device refused."""
        count, expected, found = self._state.fault[:3].tolist()
        if not count:
            raise AssertionError("a step brought no results and the device recorded no fault")
        return expected, found

    def reset(self, length: npt.NDArray[np.int32], block_table: npt.NDArray[np.int32]) -> None:
        """Give the device these lengths [max_rows] and tables [groups * max_rows, max_blocks]; it then expects the next
        step.

        Every submitted step must have retired.
        """
        with self._device.guard():
            self._device.synchronize()
            self._frames.forget()
            self._state.fault.zero_()
            self._state.step.fill_(self.submitted & STEP_MASK)
            self._state.length.copy_(torch.from_numpy(length))
            self._state.block_table.copy_(torch.from_numpy(block_table))
            self._device.synchronize()


def _live_shape(config: CacheConfig, side: Side, group: int, shape: EngineShape, device: Device) -> LiveShape:
    return LiveShape(
        max_rows=shape.widest,
        max_tokens=shape.max_tokens,
        max_blocks=shape.max_blocks,
        block_size=config.block_size,
        latent_scale=config.page_scale(side, Role.LATENT, group),
        index_scale=config.page_scale(side, Role.INDEX_K, group),
        index_layout=config.page_layout(Role.INDEX_K),
        parts=device.sm_count,
        group=group,
        window=config.groups[group],
        first_line=group * shape.max_rows,
    )
