"""Step metadata: the tensors a model's kernels read, at addresses fixed for life, and the state they derive from.

A live set exists once a side. It is filled on the device, by the latch and by in-graph nodes; the host never writes it.
`StepMetadata` is a set of views of it for one batch shape; views are made once a shape and then reused, so a captured
graph and the code that looks at its inputs see the same storage.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch

from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.layout import PageLayout, Side
from graphkv.window import Window

TABLE_COLUMN_MULTIPLE = 4
"""Tables are read and written in 16-byte pieces."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Live tensors of one side and layer group for R batch rows (padded ones included) and T query tokens.

    A padded row has length 0, row -1, slots -1 and null pages; kernels test for that and write nothing. So does a token
    whose position has no block. In a group with a window, pages that no query can read any more are null.
    """

    side: Side
    group: int  # of `CacheConfig.groups`
    window: Window | None  # what the group's layers read; None for everything
    rows: int
    tokens: int
    token_ids: torch.Tensor  # i64 [T], 0 padded
    position: torch.Tensor  # i64 [T], 0 padded
    token_row: torch.Tensor  # i32 [T], the token's batch row
    query_start: torch.Tensor  # i32 [R + 1], first token of each batch row; padded rows repeat the live total
    batch_row: torch.Tensor  # i32 [R], -1 padded
    seq_len: torch.Tensor  # i32 [R], tokens readable in this step, its own included; 0 padded
    context_len: torch.Tensor  # i32 [T], position + 1; 0 padded
    latent_slot: torch.Tensor  # i64 [T], token slot in a layer's latent view, -1 = do not write
    index_slot: torch.Tensor  # i64 [T], token slot in a layer's index_k view, -1 = do not write, or no index_k
    index_value_offset: torch.Tensor  # i64 [T], byte of the token's values in a layer's index_k view, -1 padded
    index_scale_offset: torch.Tensor  # i64 [T], byte of its scales, -1 padded or where the format has none
    latent_page_table: torch.Tensor  # i32 [R, max_blocks], 0 (null page) past the row's tokens
    index_page_table: torch.Tensor  # i32 [R, max_blocks], 0 (null page) past the row's tokens
    schedule: torch.Tensor  # i32 [parts + 1, 2], work split: worker s starts at (row, 256-token segment)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor by field name."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}


@dataclass(frozen=True, slots=True)
class DerivePlan:
    """How a side's live set follows from another side's batch: its query tokens begin at length + accepted + shift.

    Attributes:
        query_len: query tokens a row; 0 takes each row's own count from the other side (a ragged prefill).
        shift: tokens to go past the row's length.
        accepted: int32 [rows], added to each length, None adds nothing.
    """

    query_len: int = 0
    shift: int = 0
    accepted: torch.Tensor | None = None

    def tokens(self, batch: StepMetadata) -> int:
        """Query tokens that the derived live set has."""
        return batch.rows * self.query_len if self.query_len else batch.tokens


@dataclass(frozen=True, slots=True)
class LiveShape:
    """Numbers that shape a side's live set.

    Attributes:
        max_rows: most batch rows.
        max_tokens: most query tokens.
        max_blocks: columns of the block table, a multiple of 4.
        block_size: tokens a block.
        latent_scale, index_scale: pages a block in the pools of its side and group; index_scale may be 0.
        index_layout: bytes of an index_k page.
        parts: workers of the schedule (multiprocessors of the device).
        group, window: see `StepMetadata`.
        first_line: where the group's lines of the block table begin.
    """

    max_rows: int
    max_tokens: int
    max_blocks: int
    block_size: int
    latent_scale: int
    index_scale: int
    index_layout: PageLayout
    parts: int
    group: int = 0
    window: Window | None = None
    first_line: int = 0


class LiveSetStruct(ctypes.Structure):
    """`LiveSet` of cuda/derive.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "position", "token_row", "query_start", "batch_row")),
        *((name, ctypes.c_void_p) for name in ("seq_len", "context_len", "latent_slot", "index_slot")),
        *((name, ctypes.c_void_p) for name in ("index_value_offset", "index_scale_offset")),
        *((name, ctypes.c_void_p) for name in ("latent_page_table", "index_page_table", "live_columns", "schedule")),
        ("arrivals", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("max_blocks", "block_shift", "latent_scale", "index_scale")),
        *((name, ctypes.c_int32) for name in ("index_value_bytes", "index_scale_bytes", "parts", "first_line")),
    )


class LiveSet:
    """All live tensors of one side and group at their full size, zero or padded until the first latch."""

    def __init__(self, side: Side, shape: LiveShape, device: Device) -> None:
        self.side = side
        self.shape = shape
        rows, tokens, columns = shape.max_rows, shape.max_tokens, shape.max_blocks
        i32, i64 = torch.int32, torch.int64
        self._full: dict[str, torch.Tensor] = {
            "token_ids": device.zeros(tokens, i64),
            "position": device.zeros(tokens, i64),
            "token_row": device.zeros(tokens, i32),
            "query_start": device.zeros(rows + 1, i32),
            "batch_row": device.zeros(rows, i32).fill_(-1),
            "seq_len": device.zeros(rows, i32),
            "context_len": device.zeros(tokens, i32),
            "latent_slot": device.zeros(tokens, i64).fill_(-1),
            "index_slot": device.zeros(tokens, i64).fill_(-1),
            "index_value_offset": device.zeros(tokens, i64).fill_(-1),
            "index_scale_offset": device.zeros(tokens, i64).fill_(-1),
            "latent_page_table": device.zeros((rows, columns), i32),
            "index_page_table": device.zeros((rows, columns), i32),
            "schedule": device.zeros((shape.parts + 1, 2), i32),
        }
        self.live_columns = device.zeros(rows, i32)
        self.arrivals = device.zeros(1, i32)
        self._views: dict[tuple[int, int], StepMetadata] = {}

    def views(self, rows: int, tokens: int) -> StepMetadata:
        """The live tensors cut to `rows` batch rows and `tokens` query tokens; the same object for the same shape."""
        key = (rows, tokens)
        if key not in self._views:
            shape = self.shape
            if not (0 < rows <= shape.max_rows and 0 < tokens <= shape.max_tokens):
                raise InvalidValue(
                    f"a step of {rows} rows and {tokens} tokens does not fit live sets of {shape.max_rows} rows and "
                    f"{shape.max_tokens} tokens; build the runtime with larger max_rows or prefill_chunk"
                )
            per_token = ("token_ids", "position", "token_row", "context_len", "latent_slot", "index_slot")
            ends = dict.fromkeys((*per_token, "index_value_offset", "index_scale_offset"), tokens)
            ends |= dict.fromkeys(("batch_row", "seq_len", "latent_page_table", "index_page_table"), rows)
            ends |= {"query_start": rows + 1, "schedule": shape.parts + 1}
            cut = {name: tensor[: ends[name]] for name, tensor in self._full.items()}
            self._views[key] = StepMetadata(self.side, shape.group, shape.window, rows, tokens, **cut)
        return self._views[key]

    def struct(self) -> LiveSetStruct:
        """The kernels' parameter; holds addresses, so this object must outlive every launch that uses it."""
        shape = self.shape
        pointers = {name: tensor.data_ptr() for name, tensor in self._full.items()}
        return LiveSetStruct(
            **pointers,
            live_columns=self.live_columns.data_ptr(),
            arrivals=self.arrivals.data_ptr(),
            max_blocks=shape.max_blocks,
            block_shift=shape.block_size.bit_length() - 1,
            latent_scale=shape.latent_scale,
            index_scale=shape.index_scale,
            index_value_bytes=shape.index_layout.value_bytes,
            index_scale_bytes=shape.index_layout.scale_bytes,
            parts=shape.parts,
            first_line=shape.first_line,
        )


LiveSets = Mapping[Side, tuple[LiveSet, ...]]
"""Of each side, one for each of its layer groups, ascending."""


class StepStateStruct(ctypes.Structure):
    """`StepState` of cuda/step_state.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("step", "healthy", "fault", "length", "block_table", "next_tokens")),
        ("max_rows", ctypes.c_int32),
        ("next_n", ctypes.c_int32),
    )


class StepState:
    """Device-resident state, edited by packets and advanced by replays. `fault` is host memory the device writes.

    Attributes:
        block_table: i32 [groups * rows, max_blocks]; line g * rows + r is row r's in group g.

    Args:
        rows: rows of the per-sequence tables.
        max_blocks: columns of the block table.
        next_n: query tokens a row and decode step.
        groups: layer groups.
    """

    def __init__(self, rows: int, max_blocks: int, next_n: int, device: Device, groups: int = 1) -> None:
        self.next_n = next_n
        self.step = device.zeros(1, torch.int32)
        self.healthy = device.zeros(1, torch.int32)
        self.fault = device.pinned(4, torch.int32)
        self.length = device.zeros(rows, torch.int32)
        self.block_table = device.zeros((groups * rows, max_blocks), torch.int32)
        self.next_tokens = device.zeros((rows, next_n), torch.int32)

    def struct(self) -> StepStateStruct:
        """The kernels' parameter; holds addresses, so this object must outlive every launch that uses it."""
        names = ("step", "healthy", "fault", "length", "block_table", "next_tokens")
        pointers = {name: getattr(self, name).data_ptr() for name in names}
        return StepStateStruct(**pointers, max_rows=self.length.shape[0], next_n=self.next_n)


class SideBinding:
    """Which side's live sets the names `current` and `group` mean while a step function runs.

    A captured graph holds addresses, not names: rebinding while capturing makes the two parts of one graph bake the
    two sides' addresses; rebinding at any other time would redirect nothing and is refused.
    """

    def __init__(self, *target: StepMetadata) -> None:
        self._sides = {Side.TARGET: target}
        self._current = Side.TARGET
        self._open = False

    @property
    def current(self) -> StepMetadata:
        """The live set of the current side's first group."""
        return self._sides[self._current][0]

    @property
    def current_side(self) -> Side:
        return self._current

    def group(self, group: int) -> StepMetadata:
        """The current side's live set of `group`."""
        return next(metadata for metadata in self._sides[self._current] if metadata.group == group)

    def of(self, side: Side) -> StepMetadata:
        """The live set of `side`'s first group, whichever side is current."""
        if side not in self._sides:
            raise InvalidValue(f"the {side} side has no live set in this step yet; derive it first: step.derive(...)")
        return self._sides[side][0]

    def bind(self, *metadata: StepMetadata) -> None:
        """A side was derived: from now on its name means these, one for each of its groups."""
        self._sides[metadata[0].side] = metadata

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, a step function runs (eagerly or being captured) and may rebind."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self._current = Side.TARGET

    @contextlib.contextmanager
    def side(self, side: Side) -> Iterator[StepMetadata]:
        """Makes `side` current inside the block; the one before is current again after it, also after an error."""
        if not self._open:
            raise InvalidValue(
                "sides can be rebound only while the step function runs or is being captured: a captured graph holds "
                "addresses, so rebinding between replays would change nothing"
            )
        bound, before = self.of(side), self._current
        self._current = side
        try:
            yield bound
        finally:
            self._current = before
