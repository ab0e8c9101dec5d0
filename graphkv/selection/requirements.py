"""What a kind of cache can do, and what a caller asks of one. `create` holds the two against each other."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TypeVar

from graphkv.config import CacheConfig
from graphkv.errors import InvalidValue
from graphkv.kernel_choice import IndexScorer, KernelChoice, LatentAttention, TokenSelector
from graphkv.layout import Role, Side
from graphkv.selection.consumers import CPU, DeviceFacts

_E = TypeVar("_E", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a kind of cache can do.

    Attributes:
        draft: hold a draft side, take drafts and accept a part of them.
        rewind: take tokens back, across block edges.
        graph: serve a captured step.
        prefix_hit: reuse the full blocks of an earlier sequence's beginning.
        partial_hit: reuse a part of a block as well.
        fork: let sequences share their past.
        offload: move sequences and cached blocks to host memory or disk and back.
        growth: add and give back blocks at fixed addresses.
    """

    draft: bool
    rewind: bool
    graph: bool
    prefix_hit: bool
    partial_hit: bool
    fork: bool
    offload: bool
    growth: bool


V1 = Capabilities(
    draft=True,
    rewind=True,
    graph=False,
    prefix_hit=False,
    partial_hit=False,
    fork=False,
    offload=False,
    growth=False,
)
V2 = Capabilities(**{flag.name: True for flag in fields(Capabilities)})


class ContextParallel(StrEnum):
    """How the tokens of one sequence are spread over ranks; tensor, expert and data parallelism spread none."""

    NONE = "none"
    STAR = "star"
    RING = "ring"
    HELIX = "helix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """What an outside store of KV blocks moves, and whether it hears of rewinds (`manager.on_rewind`)."""

    name: str
    roles: frozenset[Role] = frozenset(Role)
    sides: frozenset[Side] = frozenset(Side)
    hears_rewind: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What the caller will use a cache for. The defaults ask for nothing.

    Attributes:
        graph, prefix_hit, partial_hit, fork, offload, growth: see `Capabilities`.
        beam_width: candidates a sequence that a search keeps side by side.
        context_parallel: how one sequence's tokens are spread over ranks.
        connector: an outside store of blocks.
        index_scorer, token_selector, latent_attention: whose kernels read the cache.
        index_page_size, latent_page_size: tokens a page as these kernels see it, None for the block size; see
            `graphkv.selection.subpages`.
    """

    graph: bool = False
    prefix_hit: bool = False
    partial_hit: bool = False
    fork: bool = False
    offload: bool = False
    growth: bool = False
    beam_width: int = 1
    context_parallel: ContextParallel = ContextParallel.NONE
    connector: Connector | None = None
    index_scorer: IndexScorer = IndexScorer.GRAPHKV
    token_selector: TokenSelector = TokenSelector.GRAPHKV
    latent_attention: LatentAttention = LatentAttention.GRAPHKV
    index_page_size: int | None = None
    latent_page_size: int | None = None

    def __post_init__(self) -> None:
        kinds: tuple[tuple[str, type[StrEnum]], ...]
        kinds = (
            ("context_parallel", ContextParallel),
            ("index_scorer", IndexScorer),
            ("token_selector", TokenSelector),
            ("latent_attention", LatentAttention),
        )
        for name, kind in kinds:
            object.__setattr__(self, name, _member(kind, getattr(self, name), name))
        for name in ("beam_width", "index_page_size", "latent_page_size"):
            value = getattr(self, name)
            optional = value is None and name != "beam_width"
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidValue(f"{name} must be a positive integer, got {value!r}")

    @property
    def kernels(self) -> KernelChoice:
        """What of this a model must know: whose kernels to call, on pages of which size."""
        return KernelChoice(
            index_scorer=self.index_scorer,
            token_selector=self.token_selector,
            latent_attention=self.latent_attention,
            index_page_size=self.index_page_size,
            latent_page_size=self.latent_page_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that is chosen when a cache is built.

    Attributes:
        use_v2: ManagerV2, or the V1 baseline.
        next_n: query tokens a row and decode step (1 + draft tokens).
        device: where the cache will live.
    """

    config: CacheConfig
    use_v2: bool = True
    next_n: int = 1
    requirements: Requirements = field(default_factory=Requirements)
    device: DeviceFacts = CPU

    @property
    def capabilities(self) -> Capabilities:
        return V2 if self.use_v2 else V1

    @property
    def drafts(self) -> bool:
        return self.next_n > 1 or bool(self.config.draft_layers)

    @property
    def splits_scales(self) -> bool:
        """Whether index K has its scales behind pages smaller than a block, so that blocks are copied whole."""
        return self.page_size(Role.INDEX_K) < self.config.block_size and bool(
            self.config.page_layout(Role.INDEX_K).scale_bytes
        )

    def page_size(self, role: Role) -> int:
        """Tokens a page as the consumer of `role` sees it."""
        return self.requirements.kernels.page_size(role, self.config.block_size)


def _member(kind: type[_E], value: str, name: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidValue(f"{name} must be one of {[str(m) for m in kind]}, got {value!r}") from None
