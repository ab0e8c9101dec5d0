"""The step protocol's parts, built alone and small, on any of the executors that must agree."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from host_kernels import build
from step_oracle import live_set

from graphkv import packet as pk
from graphkv.device import Device
from graphkv.latch import CudaNodes, HostNodes, Ring
from graphkv.layout import IndexKFormat, Side, index_k_layout
from graphkv.metadata import DerivePlan, LiveSet, LiveSets, LiveShape, StepMetadata, StepState
from graphkv.window import Window


class HostKernelNodes:
    """The kernels of cuda/ run on the CPU: the same launches as CudaNodes, through the host header."""

    def __init__(self, live: LiveSets, state: StepState, ring: Ring, host: Any, device: Any) -> None:
        self.live, self.state, self.ring, self.host, self.device = live, state, ring, host, device
        self.words = host[0].shape[0]

    def latch(self, rows: int, tokens: int, stream: int) -> None:
        build("pull.cu").launch("pull", 1, 512, [*self.host, *self.device, self.state.struct(), self.words])
        args = [self.live[Side.TARGET][0].struct(), self.state.struct(), *self.device, rows, tokens, self.words]
        build("latch.cu").launch("latch", rows + 1, 256, args, (rows + 32) * 4)

    def derive(self, live: LiveSet, batch: StepMetadata, plan: DerivePlan, stream: int) -> StepMetadata:
        tokens = plan.tokens(batch)
        structs = [live.struct(), self.state.struct()]
        args = [batch.batch_row, batch.query_start, plan.accepted, plan.shift, plan.query_len, batch.rows, tokens]
        build("derive.cu").launch("derive", batch.rows + 1, 256, [*structs, *args], (batch.rows + 32) * 4)
        return live.views(batch.rows, tokens)

    def advance(self, rows: int, output: torch.Tensor, accepted: Any, prefill: bool, stream: int) -> None:
        structs = [self.live[Side.TARGET][0].struct(), self.state.struct()]
        args = [*structs, output, accepted, *self.ring.lines, rows, self.ring.rows, int(prefill)]
        build("advance.cu").launch("advance", -(-rows // 256), 256, args)


class World:
    """Live sets, state, frames and nodes for up to `rows` batch rows; a host copy of what the device should hold.

    Args:
        executor: "numpy" (the CPU device), "kernels" (cuda/ on the CPU) or "cuda".
        windowed_only: whether the target side has no layer in group 0, so that its first live set is of group 1.
    """

    def __init__(
        self,
        executor: str,
        *,
        rows: int = 4,
        max_rows: int = 6,
        columns: int = 8,
        block_size: int = 16,
        next_n: int = 1,
        index_k: IndexKFormat = IndexKFormat.FP8,
        parts: int = 5,
        max_tokens: int = 64,
        windowed_only: bool = False,
    ) -> None:
        self.device = Device.of("cuda" if executor == "cuda" else "cpu")
        self.executor, self.rows, self.next_n, self.block_size = executor, rows, next_n, block_size
        self.layout = index_k_layout(index_k, 128, block_size)
        self.scales = {Side.TARGET: ((3, 2), (2, 0)), Side.DRAFT: ((1, 1), (1, 0))}  # of groups 0 and 1
        self.parts = parts
        self.live = {
            side: tuple(
                LiveSet(
                    side,
                    LiveShape(
                        rows,
                        max_tokens,
                        columns,
                        block_size,
                        *scales,
                        self.layout,
                        parts,
                        group,
                        Window(20) if group else None,
                        group * max_rows,
                    ),
                    self.device,
                )
                for group, scales in enumerate(groups)
            )
            for side, groups in self.scales.items()
        }
        if windowed_only:
            self.live[Side.TARGET] = self.live[Side.TARGET][1:]
        self.max_rows, self.first = max_rows, int(windowed_only)
        self.state = StepState(max_rows, columns, next_n, self.device, 2)
        self.ring = Ring(rows, next_n, self.device)
        self.size = pk.PacketSize(rows=rows, edits=2 * max_rows * columns, tokens=max_tokens)
        self.host = tuple(self.device.pinned(self.size.words, torch.int32) for _ in range(2))
        self.arenas = self.host
        if executor != "numpy":
            self.arenas = tuple(self.device.zeros(self.size.words, torch.int32) for _ in range(2))
        self.writers = [pk.PacketWriter(arena.numpy(), self.size) for arena in self.host]
        if executor == "numpy":
            self.nodes: Any = HostNodes(self.live, self.state, self.ring, self.host)
        elif executor == "kernels":
            self.nodes = HostKernelNodes(self.live, self.state, self.ring, self.host, self.arenas)
        else:
            self.nodes = CudaNodes(self.live, self.state, self.ring, self.arenas, self.host)
        self.table = np.zeros((2 * max_rows, columns), np.int32)
        self.length = np.zeros(max_rows, np.int64)
        self.step = 0

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.executor == "cuda" else 0

    def publish(
        self,
        rows: list[int],
        *,
        query: list[int] | None = None,
        edits: dict[tuple[int, int], int] | None = None,
        length_edits: dict[int, int] | None = None,
        supplied: dict[int, list[int]] | None = None,
        step: int | None = None,
        bucket: int | None = None,
    ) -> np.ndarray:
        """Write the next step's packet into its frame, and what it changes into the host copy; the packet's words."""
        step = (self.step + 1) & pk.STEP_MASK if step is None else step
        writer = self.writers[step & 1]
        edits, length_edits, supplied = edits or {}, length_edits or {}, supplied or {}
        records = writer.records(np.array(rows, np.int32), self.next_n)
        if query is not None:
            records[:, pk.QUERY_START] = np.cumsum([0, *query])[:-1]
        words: list[int] = []
        for r, row in enumerate(rows):
            records[r, pk.LENGTH_EDIT] = length_edits.get(row, pk.KEEP_LENGTH)
            records[r, pk.TOKEN_OFFSET] = len(words) if row in supplied else pk.DEVICE_TOKENS
            words += supplied.get(row, [])
        writer.amended()
        cells = writer.edits(len(rows), len(edits))
        for cell, ((row, column), block) in zip(cells, edits.items(), strict=True):
            cell[:] = row, column, block
            self.table[row, column] = block
        writer.tokens(len(rows), len(edits), len(words))[:] = words
        for row, edit in length_edits.items():
            self.length[row] = edit if edit >= 0 else max(0, self.length[row] + (edit + 1 if edit < -1 else 0))
        tokens = sum(query) if query is not None else len(rows) * self.next_n
        used = writer.seal(
            step,
            rows=len(rows),
            tokens=tokens,
            edits=len(edits),
            token_words=len(words),
            bucket=self.rows if bucket is None else bucket,
        )
        return writer.words[: used // 4]

    def latch(self, rows: int | None = None, tokens: int | None = None) -> StepMetadata:
        rows = self.rows if rows is None else rows
        tokens = rows * self.next_n if tokens is None else tokens
        self.nodes.latch(rows, tokens, self.stream())
        self.device.synchronize()
        return self.live[Side.TARGET][0].views(rows, tokens)

    def advance(self, output: np.ndarray, accepted: np.ndarray | None = None, prefill: bool = False) -> None:
        device = self.device.torch
        taken = None if accepted is None else torch.from_numpy(accepted.astype(np.int32)).to(device)
        tokens = torch.from_numpy(output.astype(np.int64)).to(device)
        self.nodes.advance(output.shape[0], tokens, taken, prefill, self.stream())
        self.device.synchronize()

    def expected(
        self,
        batch: list[tuple[int, int, int]],
        rows: int,
        tokens: int,
        side: Side = Side.TARGET,
        group: int | None = None,
    ) -> Any:
        group = self.first if group is None else group
        latent_scale, index_scale = self.scales[side][group]
        return live_set(
            rows=rows,
            tokens=tokens,
            next_n=self.next_n,
            batch=batch,
            table=self.table[group * self.max_rows :][: self.max_rows],
            block_size=self.block_size,
            latent_scale=latent_scale,
            index_scale=index_scale,
            value_bytes=self.layout.value_bytes,
            scale_bytes=self.layout.scale_bytes,
            parts=self.parts,
        )

    def poison(self, side: Side = Side.TARGET, group: int = 0) -> None:
        """Junk into every live tensor that the next latch must write in full (page tables keep their null tail)."""
        live = self.live[side][group]
        shape = live.shape
        for name, tensor in live.views(shape.max_rows, shape.max_tokens).tensors().items():
            if not name.endswith("page_table"):
                tensor.fill_(-0x5A5A5A5B)


def assert_live(live: StepMetadata, expected: dict[str, np.ndarray]) -> None:
    for name, want in expected.items():
        got = getattr(live, name).cpu().numpy()
        np.testing.assert_array_equal(got, want, err_msg=name, strict=True)


def struct_bytes(struct: ctypes.Structure) -> bytes:
    return bytes(struct)
