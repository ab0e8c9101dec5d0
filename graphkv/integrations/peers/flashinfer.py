"""FlashInfer's top-k with page-table transform as the selector of tokens (`token_selector="flashinfer"`).

One launch picks the best scores of each token and writes their token slots and positions to the caller's buffers, -1
padded. Ties at the boundary go to the lowest position, as with graphkv's own top-k, so both choose the same tokens of
the same scores; the order within a token is FlashInfer's, the same every time. Scores must not be NaN.
"""

from __future__ import annotations

import torch

from graphkv.integrations.peers.library import Library

_NAME = "top_k_page_table_transform"
LIBRARY = Library(
    module="flashinfer",
    option='token_selector="flashinfer"',
    source="PyPI (flashinfer-python 0.7.4 or newer)",
    instead='token_selector="graphkv"',
    functions={_NAME: ("tie_break", "dsa_graph_safe", "page_size", "out", "out_raw_indices")},
)
_LOWEST_POSITION = 1  # `TopKTieBreak.SMALL`


class FlashInferSelector:
    """Selects in decode and prefill.

    Raises:
        LibraryMissing: FlashInfer is not there, or too old.
    """

    def __init__(self) -> None:
        self._select = LIBRARY.load()[_NAME]

    def __call__(
        self,
        logits: torch.Tensor,
        context_len: torch.Tensor,
        page_table: torch.Tensor,
        token_row: torch.Tensor,
        block_size: int,
        out_slot: torch.Tensor,
        out_position: torch.Tensor,
    ) -> None:
        """As `graphkv.ops.topk`, but for the order of the selected; k is at most 2048, block_size a power of two."""
        self._select(
            logits,
            page_table,
            context_len,
            out_slot.shape[1],
            row_to_batch=token_row,
            deterministic=True,
            tie_break=_LOWEST_POSITION,
            dsa_graph_safe=True,
            page_size=block_size,
            out=out_slot,
            out_raw_indices=out_position,
        )
