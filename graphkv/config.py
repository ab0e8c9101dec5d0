"""What a cache holds: layers, widths and formats. Frozen and validated once; parts below take plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from graphkv.errors import InvalidValue
from graphkv.layout import (
    MIN_AMAX_FLOOR,
    IndexKFormat,
    LatentFormat,
    PageLayout,
    Role,
    ScaleMode,
    Side,
    index_k_layout,
    latent_layout,
)
from graphkv.window import Window

_E = TypeVar("_E", bound=StrEnum)


class Indexer(StrEnum):
    """`full`: the layer scores tokens itself and owns index_k. `shared`: it reuses the last full layer's top-k.

    `none`: it selects nothing, since it reads every token of its window.
    """

    FULL = "full"
    SHARED = "shared"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of one side. Every layer owns latent bytes; only a full indexer owns index_k bytes.

    Attributes:
        indexer: by default `full`, and `none` for a layer with a window, which can be nothing else.
        window: tokens readable at a position, itself included; None for all.
        sinks: first tokens of the sequence, which stay readable behind the window.
    """

    indexer: Indexer | None = None
    window: int | None = None
    sinks: int = 0

    def __post_init__(self) -> None:
        usual = Indexer.FULL if self.window is None else Indexer.NONE
        indexer = usual if self.indexer is None else _member(Indexer, self.indexer, "indexer")
        object.__setattr__(self, "indexer", indexer)
        if self.window is None and self.sinks:
            raise InvalidValue(f"sinks={self.sinks} is for a layer with a window; a layer without one reads all tokens")
        if (self.window is None) == (indexer is Indexer.NONE):
            raise InvalidValue(
                f"indexer={indexer} does not go with window={self.window}: a layer with a window reads all of its "
                'tokens (indexer "none"), any other selects them ("full" or "shared")'
            )
        if self.window is not None:
            Window(self.window, self.sinks)

    def owns(self, role: Role) -> bool:
        return role is Role.LATENT or self.indexer is Indexer.FULL

    @property
    def reach(self) -> Window | None:
        """What the layer can read; None for everything. Layers of one reach are a layer group."""
        return None if self.window is None else Window(self.window, self.sinks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Shape of the cache of one model, with its draft side if it has one.

    Attributes:
        layers: the target side's layers, in model order; a full indexer comes before any that shares its top-k.
        draft_layers: the draft side's layers (same widths and formats), empty without speculation.
        kv_lora_rank, qk_rope_head_dim: values of the latent and of its rope part (512 + 64).
        index_head_dim, index_heads, index_topk: the indexer's key width, query heads and selected tokens.
        latent, index_k: byte formats, see `graphkv.layout`.
        index_k_scale, index_k_amax_floor: FP8 quantisation mode; the floor is 1e-4 (DeepSeek) or 1e-12 (TensorRT-LLM).
        latent_scale: the one scale of latent format `fp8` (value = code * scale).
        block_size: tokens a block.
    """

    layers: tuple[LayerSpec, ...]
    draft_layers: tuple[LayerSpec, ...] = ()
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    index_heads: int = 64
    index_topk: int = 2048
    latent: LatentFormat = LatentFormat.BF16
    index_k: IndexKFormat = IndexKFormat.FP8
    index_k_scale: ScaleMode = ScaleMode.POW2
    index_k_amax_floor: float = 1e-4
    latent_scale: float = 1.0
    block_size: int = 64

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "layers", tuple(self.layers))
        put(self, "draft_layers", tuple(self.draft_layers))
        put(self, "latent", _member(LatentFormat, self.latent, "latent"))
        put(self, "index_k", _member(IndexKFormat, self.index_k, "index_k"))
        put(self, "index_k_scale", _member(ScaleMode, self.index_k_scale, "index_k_scale"))
        for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_heads", "index_topk", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidValue(f"{name} must be a positive integer, got {value!r}")
        if self.block_size & (self.block_size - 1):
            raise InvalidValue(f"block_size must be a power of two, got {self.block_size}; 64 suits every consumer")
        if not MIN_AMAX_FLOOR <= self.index_k_amax_floor < math.inf:
            raise InvalidValue(
                f"index_k_amax_floor must be at least {MIN_AMAX_FLOOR:.3g} (2^-100) and finite, got "
                f"{self.index_k_amax_floor}; use 1e-4 (DeepSeek) or 1e-12 (TensorRT-LLM)"
            )
        if not self.latent_scale > 0:
            raise InvalidValue(f"latent_scale must be positive, got {self.latent_scale}")
        if not self.layers:
            raise InvalidValue("a cache needs at least one layer, got none")
        for side in Side:
            specs = self.side_layers(side)
            if not all(isinstance(spec, LayerSpec) for spec in specs):
                raise InvalidValue(f"{side} layers must be LayerSpec objects, got {specs!r}")
            first = next((i for i, spec in enumerate(specs) if spec.window is None), 0)
            if specs and specs[first].indexer is Indexer.SHARED:
                raise InvalidValue(
                    f"{side} layer {first} is a shared indexer, but no layer before it has a top-k to share"
                )
        for role in Role:  # a width that a format cannot hold is refused here, before anything is built
            self.page_layout(role)

    def side_layers(self, side: Side) -> tuple[LayerSpec, ...]:
        return self.layers if side is Side.TARGET else self.draft_layers

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides that own layers."""
        return (Side.TARGET, Side.DRAFT) if self.draft_layers else (Side.TARGET,)

    @property
    def latent_dim(self) -> int:
        """Values of one token's latent, rope part included."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def page_layout(self, role: Role) -> PageLayout:
        """Byte layout of a page of `role`; the same for every layer and side."""
        if role is Role.LATENT:
            return latent_layout(self.latent, self.kv_lora_rank, self.qk_rope_head_dim, self.block_size)
        return index_k_layout(self.index_k, self.index_head_dim, self.block_size)

    @property
    def groups(self) -> tuple[Window | None, ...]:
        """What the layers of each group can read: of group 0 everything (None), whether or not a layer is in it, then
        one entry for each window that layers have, in the order in which they come."""
        return (None, *self.windows)

    @property
    def windows(self) -> tuple[Window, ...]:
        """What the layers of each group behind group 0 can read."""
        reaches = [spec.reach for side in Side for spec in self.side_layers(side) if spec.reach is not None]
        return tuple(dict.fromkeys(reaches))

    def group_of(self, side: Side, layer: int) -> int:
        """The group of a layer."""
        specs = self.side_layers(side)
        if not 0 <= layer < len(specs):
            raise InvalidValue(f"{side} layer {layer} is out of range: that side has {len(specs)} layers")
        return self.groups.index(specs[layer].reach)

    def side_groups(self, side: Side) -> tuple[int, ...]:
        """The groups that have layers of that side, ascending."""
        return tuple(sorted({self.groups.index(spec.reach) for spec in self.side_layers(side)}))

    def page_scale(self, side: Side, role: Role, group: int = 0) -> int:
        """Pages a block in the pool of (group, side, role): the layers of that group and side that own the role."""
        reach = self.groups[group]
        return sum(spec.owns(role) for spec in self.side_layers(side) if spec.reach == reach)

    def layer_offset(self, side: Side, role: Role, layer: int) -> int:
        """Rank of `layer` among the pages of a block in the pool of its group and of (side, role)."""
        specs = self.side_layers(side)
        self.group_of(side, layer)  # refuses a layer that is not there
        if not specs[layer].owns(role):
            if specs[layer].window is not None:
                raise InvalidValue(
                    f"{side} layer {layer} has a window, all of whose tokens it reads, and owns no {role} bytes"
                )
            raise InvalidValue(
                f"{side} layer {layer} is a shared indexer and owns no {role} bytes; use layer "
                f"{self.owner_of_topk(side, layer)}, whose top-k it reuses"
            )
        return sum(spec.owns(role) for spec in specs[:layer] if spec.reach == specs[layer].reach)

    def owner_of_topk(self, side: Side, layer: int) -> int:
        """The layer whose top-k `layer` uses: itself, or the last full indexer before it."""
        specs = self.side_layers(side)
        if self.group_of(side, layer):
            raise InvalidValue(f"{side} layer {layer} has a window, all of whose tokens it reads: it uses no top-k")
        return max(i for i in range(layer + 1) if specs[i].indexer is Indexer.FULL)

    def with_options(self, **changes: Any) -> CacheConfig:
        """A copy with some fields replaced, validated again."""
        known = {field.name for field in fields(self)}
        if unknown := sorted(set(changes) - known):
            raise InvalidValue(f"unknown cache options {unknown}; the known ones are {sorted(known)}")
        return replace(self, **changes)

    @classmethod
    def named(cls, name: str, **changes: Any) -> CacheConfig:
        """The cache of a published model: one of `graphkv.config.MODELS`, with options replaced by `changes`."""
        if name not in MODELS:
            raise InvalidValue(f"unknown model {name!r}; known are {sorted(MODELS)}; or build a CacheConfig by hand")
        return MODELS[name].with_options(**changes)

    @classmethod
    def from_hf(cls, hf_config: Any, **changes: Any) -> CacheConfig:
        """The cache of a Hugging Face DSA model, from its config object or from the dictionary of its config.json.

        Reads the indexer's per-layer pattern where the family has one (GLM's `indexer_types`).
        """

        def get(key: str) -> Any:
            return hf_config.get(key) if isinstance(hf_config, Mapping) else getattr(hf_config, key, None)

        family = get("model_type")
        needed = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_n_heads")
        missing = [key for key in (*needed, "index_topk") if get(key) is None]
        if missing:
            raise InvalidValue(
                f"{family!r} is not a DeepSeek-Sparse-Attention config: it lacks {missing}; known families are "
                "deepseek_v32 and glm_moe_dsa"
            )
        num_layers = get("num_hidden_layers")
        types = get("indexer_types") or [Indexer.FULL] * num_layers
        if len(types) != num_layers:
            raise InvalidValue(f"indexer_types names {len(types)} layers, but num_hidden_layers is {num_layers}")
        config = cls(
            layers=tuple(LayerSpec(kind) for kind in types),
            kv_lora_rank=get("kv_lora_rank"),
            qk_rope_head_dim=get("qk_rope_head_dim"),
            index_head_dim=get("index_head_dim"),
            index_heads=get("index_n_heads"),
            index_topk=get("index_topk"),
        )
        return config.with_options(**changes)


def _member(kind: type[_E], value: Any, name: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise InvalidValue(f"{name} must be one of {[str(m) for m in kind]}, got {value!r}") from None


MODELS: dict[str, CacheConfig] = {
    "deepseek-v3.2": CacheConfig(layers=(LayerSpec(),) * 61, index_heads=64),
    "glm-5": CacheConfig(layers=(LayerSpec(),) * 78, index_heads=32),
}
