"""The in-graph nodes of the step protocol: pull, latch, derive and advance, on either device.

`CudaNodes` launches the kernels of `cuda/`, with arguments packed once a batch shape. `HostNodes` does the same to CPU
tensors in NumPy; it is what the CPU device runs, and it follows the kernels field by field.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from graphkv import packet as pk
from graphkv.device import Device
from graphkv.kernels import Kernel, PackedArgs, load
from graphkv.layout import Side
from graphkv.metadata import DerivePlan, LiveSet, LiveSets, StepMetadata, StepState

RING_HEADER_WORDS = 8
SCHEDULE_SPLIT = 256
_THREADS = 256


class StepNodes(Protocol):
    """What a step function's frame consists of, in order: latch, the model's work, (derive for a side,) advance."""

    def latch(self, rows: int, tokens: int, stream: int) -> None:
        """Accept the next packet and fill the target side's first live set for `rows` rows and `tokens` query tokens.

        Its first live set is that of its first layer group.
        """

    def derive(self, live: LiveSet, batch: StepMetadata, plan: DerivePlan, stream: int) -> StepMetadata:
        """Fill a live set for the batch of another one's metadata, see `DerivePlan`; its views."""

    def advance(
        self, rows: int, output: torch.Tensor, accepted: torch.Tensor | None, prefill: bool, stream: int
    ) -> None:
        """Lengths up, `output` (i64 [rows, next_n]) to the next step's query tokens, results to the ring."""


class Ring:
    """The result ring: two pinned lines by step number, int32 header [8] | accepted [rows] | emitted [rows, next_n]."""

    def __init__(self, rows: int, next_n: int, device: Device) -> None:
        self.rows = rows
        words = RING_HEADER_WORDS + rows * (1 + next_n)
        self.lines = tuple(device.pinned(words, torch.int32) for _ in range(2))
        arrays = [line.numpy() for line in self.lines]
        middle = RING_HEADER_WORDS + rows
        self.header = [array[:RING_HEADER_WORDS] for array in arrays]
        self.accepted = [array[RING_HEADER_WORDS:middle] for array in arrays]
        self.emitted = [array[middle:].reshape(rows, next_n) for array in arrays]


class CudaNodes:
    """The nodes as kernels. Launch arguments are packed once a shape and kept: graphs hold what they point to.

    Args:
        live: the live sets.
        device_arenas: packet arenas in device memory, even and odd frame.
        host_arenas: the frames' pinned arenas where the graph pulls the packet itself, None where the host copies it.
    """

    def __init__(
        self,
        live: LiveSets,
        state: StepState,
        ring: Ring,
        device_arenas: tuple[torch.Tensor, torch.Tensor],
        host_arenas: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        self._state, self._ring = state, ring
        self._device_arenas, self._host_arenas = device_arenas, host_arenas
        self._structs = {each: each.struct() for side in live.values() for each in side}
        self._target = self._structs[live[Side.TARGET][0]]
        self._state_struct = state.struct()
        self._words = device_arenas[0].shape[0]
        self._latch = load("latch.cu", "latch", "SSPPiii")
        self._pull = load("pull.cu", "pull", "PPPPSi")
        self._derive = load("derive.cu", "derive", "SSPPPiiii")
        self._advance = load("advance.cu", "advance", "SSPPPPiii")
        self._packed: dict[tuple[object, ...], PackedArgs] = {}

    def _args(self, kernel: Kernel, *args: object) -> PackedArgs:
        key = (kernel.entry, *(arg if isinstance(arg, int) else id(arg) for arg in args))  # packed keeps args alive
        if key not in self._packed:
            self._packed[key] = kernel.pack(*args)
        return self._packed[key]

    def latch(self, rows: int, tokens: int, stream: int) -> None:
        if self._host_arenas is not None:
            packed = self._args(self._pull, *self._host_arenas, *self._device_arenas, self._state_struct, self._words)
            self._pull.launch(1, 512, packed, stream)
        packed = self._args(
            self._latch, self._target, self._state_struct, *self._device_arenas, rows, tokens, self._words
        )
        self._latch.launch(rows + 1, _THREADS, packed, stream, shared_bytes=(rows + 32) * 4)

    def derive(self, live: LiveSet, batch: StepMetadata, plan: DerivePlan, stream: int) -> StepMetadata:
        rows, tokens = batch.rows, plan.tokens(batch)
        packed = self._derive.pack(
            self._structs[live],
            self._state_struct,
            batch.batch_row,
            batch.query_start,
            0 if plan.accepted is None else plan.accepted,
            plan.shift,
            plan.query_len,
            rows,
            tokens,
        )
        self._derive.launch(rows + 1, _THREADS, packed, stream, shared_bytes=(rows + 32) * 4)
        return live.views(rows, tokens)

    def advance(
        self, rows: int, output: torch.Tensor, accepted: torch.Tensor | None, prefill: bool, stream: int
    ) -> None:
        taken = 0 if accepted is None else accepted
        packed = self._advance.pack(
            self._target,
            self._state_struct,
            output,
            taken,
            *self._ring.lines,
            rows,
            self._ring.rows,
            int(prefill),
        )
        self._advance.launch(-(-rows // _THREADS), _THREADS, packed, stream)


class HostNodes:
    """The nodes on CPU tensors. Same arguments as `CudaNodes`; frames are read where the host wrote them."""

    def __init__(self, live: LiveSets, state: StepState, ring: Ring, arenas: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._target, self._state, self._ring = live[Side.TARGET][0], state, ring
        self._frames = [arena.numpy() for arena in arenas]
        self._weights = pk.checksum_weights(arenas[0].shape[0])

    def _accepted_packet(self, frame: pk.Int32Array, step: int, rows: int, tokens: int) -> bool:
        n, count, edits, supplied = (int(frame[i]) for i in (pk.ROWS, pk.TOKENS, pk.EDITS, pk.TOKEN_WORDS))
        used = pk.HEADER_WORDS + pk.RECORD_WORDS * n + pk.EDIT_WORDS * edits + supplied
        fits = 0 <= n <= rows and 0 <= count <= tokens and edits >= 0 and supplied >= 0 and used <= frame.shape[0]
        if not (fits and frame[pk.BUCKET] == rows and frame[pk.STEP] == step):
            return False
        words = frame[:used].view(np.uint32)
        own = int(words[pk.CHECKSUM]) * int(self._weights[pk.CHECKSUM])
        return (int(np.dot(words, self._weights[:used])) - own) % 2**32 == int(words[pk.CHECKSUM])

    def latch(self, rows: int, tokens: int, stream: int) -> None:
        state, target = self._state, self._target
        step = (int(state.step[0]) + 1) & pk.STEP_MASK
        frame = self._frames[step & 1]
        live = {name: tensor.numpy() for name, tensor in target.views(rows, tokens).tensors().items()}
        accepted = self._accepted_packet(frame, step, rows, tokens)
        count = int(frame[pk.ROWS]) if accepted else 0
        query_tokens = int(frame[pk.TOKENS]) if accepted else 0
        batch = np.full(rows, -1, np.int32)
        length, starts = np.zeros(rows, np.int64), np.full(rows + 1, query_tokens, np.int64)
        if accepted:
            records = frame[pk.HEADER_WORDS :][: pk.RECORD_WORDS * count].reshape(count, pk.RECORD_WORDS)
            self._apply(frame, records)
            batch[:count] = records[:, pk.ROW]
            length[:count] = state.length.numpy()[batch[:count]]
            starts[:count] = records[:, pk.QUERY_START]
        owner = np.minimum(np.arange(tokens) // state.next_n, rows - 1)
        _derive_live(target, live, state, batch, length, starts, owner)
        live["token_ids"][:] = 0
        if accepted:
            self._token_ids(live, frame, records, starts, query_tokens)
            state.step[0] = step
        elif state.fault[0] == 0:
            state.fault[:3] = torch.tensor([1, step, int(frame[pk.STEP])], dtype=torch.int32)
        state.healthy[0] = int(accepted)

    def _apply(self, frame: pk.Int32Array, records: pk.Int32Array) -> None:
        start, edits = pk.HEADER_WORDS + records.size, int(frame[pk.EDITS])
        cells = frame[start : start + pk.EDIT_WORDS * edits].reshape(edits, pk.EDIT_WORDS)
        table, lengths = self._state.block_table.numpy(), self._state.length.numpy()
        table[cells[:, pk.EDIT_ROW], cells[:, pk.EDIT_COLUMN]] = cells[:, pk.EDIT_BLOCK]
        rows, edit = records[:, pk.ROW], records[:, pk.LENGTH_EDIT]
        moved = lengths[rows] + np.where(edit < pk.KEEP_LENGTH, edit + 1, 0)
        lengths[rows] = np.where(edit >= 0, edit, np.maximum(moved, 0))

    def _token_ids(
        self,
        live: dict[str, np.ndarray],
        frame: pk.Int32Array,
        records: pk.Int32Array,
        starts: np.ndarray,
        query_tokens: int,
    ) -> None:
        owner = live["token_row"][:query_tokens]
        within = np.arange(query_tokens) - starts[owner]
        offset = records[owner, pk.TOKEN_OFFSET]
        first = pk.HEADER_WORDS + records.size + pk.EDIT_WORDS * int(frame[pk.EDITS])
        supplied = frame[np.minimum(first + np.maximum(offset, 0) + within, frame.shape[0] - 1)]
        left = self._state.next_tokens.numpy()[records[owner, pk.ROW], np.minimum(within, self._state.next_n - 1)]
        live["token_ids"][:query_tokens] = np.where(offset >= 0, supplied, left)

    def derive(self, live: LiveSet, batch: StepMetadata, plan: DerivePlan, stream: int) -> StepMetadata:
        rows, tokens = batch.rows, plan.tokens(batch)
        views = live.views(rows, tokens)
        arrays = {name: tensor.numpy() for name, tensor in views.tensors().items()}
        row = batch.batch_row.numpy().copy()
        taken = 0 if plan.accepted is None else plan.accepted.numpy()
        length = np.where(row >= 0, self._state.length.numpy()[row] + taken + plan.shift, 0).astype(np.int64)
        starts = batch.query_start.numpy().astype(np.int64)
        if plan.query_len:
            starts = np.arange(rows + 1, dtype=np.int64) * plan.query_len
        owner = np.minimum(np.arange(tokens) // self._state.next_n, rows - 1)
        _derive_live(live, arrays, self._state, row, length, starts, owner)
        return views

    def advance(
        self, rows: int, output: torch.Tensor, accepted: torch.Tensor | None, prefill: bool, stream: int
    ) -> None:
        state, ring = self._state, self._ring
        if not state.healthy[0]:
            return
        line = int(state.step[0]) & 1
        ring.header[line][0] = state.step[0]
        live = self._target.views(rows, self._target.shape.max_tokens)
        batch, starts = live.batch_row.numpy(), live.query_start.numpy()
        query_len = starts[1:] - starts[:-1]
        raw = query_len if accepted is None else accepted.numpy()
        alive = batch >= 0
        ring.accepted[line][:rows] = np.where(alive, raw, 0)
        taken = np.clip(raw, 1, np.maximum(query_len, 1))
        on = batch[alive]
        state.length.numpy()[on] += taken[alive].astype(np.int32)
        tokens = output.numpy()
        state.next_tokens.numpy()[on] = tokens[alive]
        emitted = ring.emitted[line][:rows]
        drafts = np.zeros(rows, np.int64) if prefill else taken - 1
        column = np.arange(state.next_n)
        ids = live.token_ids.numpy()
        fed = ids[np.minimum(starts[:-1, None] + 1 + column, ids.shape[0] - 1)]
        emitted[:] = np.where(column < drafts[:, None], fed, np.where(column == drafts[:, None], tokens[:, :1], -1))
        emitted[~alive] = -1


def _derive_live(
    target: LiveSet,
    live: dict[str, np.ndarray],
    state: StepState,
    batch: np.ndarray,
    length: np.ndarray,
    starts: np.ndarray,
    owner: np.ndarray,
) -> None:
    """`derive.cuh` in NumPy: fill `live` for rows `batch` whose query tokens begin at position `length`.

    `starts` [rows + 1] are the rows' first tokens, `owner` [tokens] the batch row that a padded token counts to.
    """
    shape = target.shape
    alive, query_len = batch >= 0, starts[1:] - starts[:-1]
    seq_len = np.where(alive, length + query_len, 0)
    live["batch_row"][:] = batch
    live["query_start"][:] = starts
    live["seq_len"][:] = seq_len
    table = state.block_table.numpy()[shape.first_line + np.where(alive, batch, 0)]
    filled = np.arange(shape.max_blocks) < -(-seq_len // shape.block_size)[:, None]
    ids = np.where(filled, table, 0)
    live["latent_page_table"][:] = ids * shape.latent_scale
    live["index_page_table"][:] = ids * shape.index_scale
    target.live_columns.numpy()[: batch.shape[0]] = np.minimum(-(-seq_len // shape.block_size), shape.max_blocks)

    token = np.arange(owner.shape[0])
    row = np.where(token < starts[-1], np.searchsorted(starts, token, side="right") - 1, owner)
    position = length[row] + token - starts[row]
    column = position // shape.block_size
    write = (token < starts[-1]) & alive[row] & (column < shape.max_blocks)
    block = table[row, np.clip(column, 0, shape.max_blocks - 1)].astype(np.int64)
    store = write & (block > 0)
    index = store & (shape.index_scale > 0)
    offset = position % shape.block_size
    page = block * shape.index_scale
    layout = shape.index_layout
    base = page * layout.page_bytes
    live["position"][:] = np.where(write, position, 0)
    live["token_row"][:] = row
    live["context_len"][:] = np.where(write, position + 1, 0)
    live["latent_slot"][:] = np.where(store, block * shape.latent_scale * shape.block_size + offset, -1)
    live["index_slot"][:] = np.where(index, page * shape.block_size + offset, -1)
    live["index_value_offset"][:] = np.where(index, base + offset * layout.value_bytes, -1)
    scale_at = base + shape.block_size * layout.value_bytes + offset * layout.scale_bytes
    live["index_scale_offset"][:] = np.where(index & (layout.scale_bytes > 0), scale_at, -1)
    live["schedule"][:] = _schedule(seq_len, shape.parts)


def _schedule(seq_len: np.ndarray, parts: int) -> np.ndarray:
    prefix = np.cumsum(-(-np.maximum(seq_len, 1) // SCHEDULE_SPLIT))
    quota, rest = divmod(int(prefix[-1]), parts)
    part = np.arange(parts + 1)
    start = part * quota + np.maximum(part - (parts - rest), 0)
    row = np.searchsorted(prefix, start, side="right")
    before = np.concatenate(([0], prefix))[np.minimum(row, len(prefix))]
    return np.stack([row, np.where(row < len(prefix), start - before, 0)], axis=1)
