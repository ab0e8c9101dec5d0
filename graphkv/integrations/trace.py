"""A record of what a model decided and answered, written on the device while it runs, captured or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphkv.config import Indexer
from graphkv.step import StepContext

NEVER_WRITTEN = -2
"""In a record of choices: no step has written this cell. (-1 is a selection's padding.)"""


@dataclass(frozen=True, slots=True)
class RowRecord:
    """What was recorded of one row, on the CPU. Only the last position of a prefill chunk has logits.

    Attributes:
        selected: int32 [S, k] positions by full indexer layer, -1 padded.
        routed: int64 [S, experts a token] by mixture layer.
        logits: [S, vocab], NaN where none was recorded.
    """

    selected: dict[int, torch.Tensor]
    routed: dict[int, torch.Tensor]
    logits: torch.Tensor


class Trace:
    """An `Observer` with a cell for each (row, position): every choice and every logit of a row's whole life.

    A record of everything costs memory in proportion, so this is for small models and short contexts.

    Args:
        model: the Hugging Face model to be observed.
        max_rows: rows of the runtime.
        max_positions: longest sequence.
    """

    def __init__(self, model: Any, *, max_rows: int, max_positions: int) -> None:
        config, head = model.config, model.lm_head.weight
        layers = range(config.num_hidden_layers)
        types = getattr(config, "indexer_types", None) or [Indexer.FULL] * config.num_hidden_layers
        self.max_positions = max_positions
        self._spare_cell = max_rows * max_positions  # where padded tokens write
        cells = self._spare_cell + 1

        def choices(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((cells, width), NEVER_WRITTEN, dtype=dtype, device=head.device)

        self._selected = {i: choices(config.index_topk, torch.int32) for i in layers if types[i] == Indexer.FULL}
        self._routed = {
            i: choices(config.num_experts_per_tok, torch.int64)
            for i in layers
            if hasattr(model.model.layers[i].mlp, "experts")
        }
        self._logits = torch.full((cells, head.shape[0]), torch.nan, dtype=head.dtype, device=head.device)
        self._cell = torch.zeros(0, dtype=torch.int64, device=head.device)
        self._settle()

    def begin(self, step: StepContext) -> None:
        """Works out each token's cell: int64 [T]."""
        metadata = step.metadata
        row = metadata.batch_row.long()[metadata.token_row]
        cell = row * self.max_positions + metadata.position
        self._cell = cell.masked_fill_(metadata.context_len == 0, self._spare_cell)

    def selected(self, layer: int, position: torch.Tensor) -> None:
        self._selected[layer].index_copy_(0, self._cell, position)

    def routed(self, layer: int, experts: torch.Tensor) -> None:
        self._routed[layer].index_copy_(0, self._cell, experts)

    def answered(self, token: torch.Tensor, logits: torch.Tensor) -> None:
        self._logits.index_copy_(0, self._cell[token], logits)

    def take(self, row: int, length: int) -> RowRecord:
        """Copies the record of a row's first `length` positions and wipes the row; its steps must have retired."""
        cells = slice(row * self.max_positions, row * self.max_positions + length)
        record = RowRecord(
            selected={layer: values[cells].clone().cpu() for layer, values in self._selected.items()},
            routed={layer: values[cells].clone().cpu() for layer, values in self._routed.items()},
            logits=self._logits[cells].clone().float().cpu(),
        )
        whole = slice(row * self.max_positions, (row + 1) * self.max_positions)
        for values in (*self._selected.values(), *self._routed.values()):
            values[whole] = NEVER_WRITTEN
        self._logits[whole] = torch.nan
        self._settle()
        return record

    def _settle(self) -> None:
        """Steps run on a stream of their own, which what was queued here must not overtake."""
        if self._logits.is_cuda:
            torch.cuda.synchronize(self._logits.device)
