"""What a model sees of a step, and what it gives back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from graphkv.config import CacheConfig
from graphkv.device import Device
from graphkv.errors import InvalidValue
from graphkv.kernel_choice import OWN_KERNELS, KernelChoice
from graphkv.layout import Role, Side
from graphkv.metadata import DerivePlan, SideBinding, StepMetadata

StepKind = Literal["decode", "prefill"]


class Workspace:
    """Scratch tensors by name, owned by the runtime for as long as a graph may hold their addresses.

    They are made during warm-up, largest bucket first, and frozen before the first capture: a name that would have to
    grow after that is refused, because graphs hold the old address.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._frozen = False

    def freeze(self) -> None:
        self._frozen = True

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of `shape` at the address that `name` has; contents do not outlive the step."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < num_bytes:
            if self._frozen:
                have = "does not exist" if buffer is None else f"has {buffer.nbytes} bytes"
                raise InvalidValue(
                    f"workspace {name!r} of {num_bytes} bytes was asked for after capture, where it {have}; ask for it "
                    "at its largest in every decode step, so that warm-up makes it"
                )
            buffer = self._buffers[name] = self._device.empty(max(num_bytes, 1), torch.uint8)
        return buffer[:num_bytes].view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


class PageViews(Protocol):
    """The cache as a model sees it: one page view a layer, whichever pool its bytes are in."""

    config: CacheConfig

    def view(self, side: Side, role: Role, layer: int) -> torch.Tensor:
        """uint8 [pages, block_size, 1, token_bytes], indexed by the side's page table and slots of that role."""

    def page_scale(self, side: Side, role: Role) -> int:
        """Pages a block in the pool of that side and role."""


class StepContext:
    """One step as the model sees it.

    Attributes:
        kind: "decode" (every row feeds next_n tokens; captured, so shapes are fixed and the host may read nothing) or
            "prefill" (a ragged batch, run eagerly).
        rows: batch rows, padded ones included.
        tokens: query tokens of all rows.
        next_n: query tokens a row in a decode step.
        max_context: no context_len of the step is above this; a multiple of the block size.
        pools: the cache; `pools.view(side, role, layer)` is what the stores and readers take.
        workspace: scratch at fixed addresses, `workspace(name, shape, dtype)`.
        kernels: whose kernels the caller requires to read the cache, and the page sizes that these see.
    """

    def __init__(
        self,
        kind: StepKind,
        binding: SideBinding,
        pools: PageViews,
        workspace: Workspace,
        next_n: int,
        max_context: int,
        derive: Callable[[Side, StepMetadata, DerivePlan], tuple[StepMetadata, ...]],
        kernels: KernelChoice = OWN_KERNELS,
    ) -> None:
        self.kind = kind
        self._binding = binding
        self._derive = derive
        self.rows = binding.current.rows
        self.tokens = binding.current.tokens
        self.pools = pools
        self.workspace = workspace
        self.next_n = next_n
        self.max_context = max_context
        self.kernels = kernels

    @property
    def metadata(self) -> StepMetadata:
        """The current side's live tensors: the target's, unless inside `with step.side(Side.DRAFT)`.

        Slots and page tables are those of the side's first layer group. A model with windows asks `metadata_for`.
        """
        return self._binding.current

    def metadata_for(self, layer: int) -> StepMetadata:
        """The current side's live tensors of the group that its layer `layer` is in. Layers without a window, and those
        of one window, share them; all groups agree in everything but slots, page tables and window."""
        return self._binding.group(self.pools.config.group_of(self._binding.current_side, layer))

    def side(self, side: Side) -> contextlib.AbstractContextManager[StepMetadata]:
        """Makes `side` current inside the block, see `SideBinding`."""
        return self._binding.side(side)

    def derive(
        self, side: Side, query_len: int = 0, *, shift: int = 0, accepted: torch.Tensor | None = None
    ) -> StepMetadata:
        """Fill a side's live sets in-graph from the target's batch, e.g. the draft side's after acceptance.

        Args:
            side: which; its layers must be in the config.
            query_len: query tokens a row; 0 mirrors the target side's token for token.
            shift, accepted: the query tokens begin at position length + accepted + shift of each row. `accepted` is
                int32 [rows] on the step's device. A decode step has blocks up to `CacheConfig.draft_lookahead` tokens
                past those that its next_n query tokens can reach.

        Returns:
            The side's live tensors, also current inside `with step.side(side)`. Token ids are left to the caller, in
            its first group.
        """
        if accepted is not None and (accepted.dtype != torch.int32 or tuple(accepted.shape) != (self.rows,)):
            raise InvalidValue(f"accepted must be int32 [{self.rows}], got {accepted.dtype} {list(accepted.shape)}")
        batch = self._binding.of(Side.TARGET)
        metadata = self._derive(side, batch, DerivePlan(query_len, shift, accepted))
        self._binding.bind(*metadata)
        return metadata[0]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step function returns.

    Attributes:
        tokens: int64 [rows, next_n], the query tokens of each row's next step: the token sampled after the last
            accepted one, then drafts. In a prefill step column 0 is the token sampled after the row's last token.
        accepted: int32 [rows], how many of its query tokens each row keeps (1 .. next_n); None keeps them all.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor | None = None

    def check(self, rows: int, next_n: int, device: torch.device) -> None:
        """Refuse tensors that the advance node could not read."""
        wanted: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]]
        wanted = [("tokens", self.tokens, torch.int64, (rows, next_n))]
        if self.accepted is not None:
            wanted.append(("accepted", self.accepted, torch.int32, (rows,)))
        for name, tensor, dtype, shape in wanted:
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device != device:
                raise InvalidValue(
                    f"StepOutput.{name} must be {dtype} {list(shape)} on {device}, got {tensor.dtype} "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise InvalidValue(f"StepOutput.{name} must be contiguous, got strides {tensor.stride()}")


class StepModel(Protocol):
    """A model's part of a step: read `step.metadata`, store and read the cache through `step.pools`, sample.

    In a decode step it must be capturable: the same shapes every time, no host reads, no copies from the host.
    """

    def __call__(self, step: StepContext) -> StepOutput:
        """Run the model for the step's tokens."""
