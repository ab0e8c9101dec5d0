"""Whose kernels read the cache in a step: graphkv's own, or those of a library that is installed beside it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from graphkv.layout import Role


class IndexScorer(StrEnum):
    """Whose kernel scores the indexer's keys."""

    GRAPHKV = "graphkv"
    DEEPGEMM = "deepgemm"


class TokenSelector(StrEnum):
    """Whose kernel picks the best scores and turns them into token slots."""

    GRAPHKV = "graphkv"
    FLASHINFER = "flashinfer"


class LatentAttention(StrEnum):
    """Whose kernel attends to the selected latents."""

    GRAPHKV = "graphkv"
    FLASHMLA = "flashmla"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What a runtime was required to use, as its model sees it in `StepContext.kernels`.

    Attributes:
        index_scorer, token_selector, latent_attention: whose kernels.
        index_page_size, latent_page_size: tokens a page as these kernels see it, None for the block size.
    """

    index_scorer: IndexScorer = IndexScorer.GRAPHKV
    token_selector: TokenSelector = TokenSelector.GRAPHKV
    latent_attention: LatentAttention = LatentAttention.GRAPHKV
    index_page_size: int | None = None
    latent_page_size: int | None = None

    def page_size(self, role: Role, block_size: int) -> int:
        """Tokens a page as the kernels that read `role` see it."""
        asked = self.index_page_size if role is Role.INDEX_K else self.latent_page_size
        return block_size if asked is None else asked


OWN_KERNELS = KernelChoice()
"""graphkv's kernels, pages of a block."""
