"""Byte layout of a page: what stands at which byte for every role and format.

Numbers only: no tensor is touched here. The codecs that fill these bytes are in `graphkv.codecs`; the kernels in
`cuda/` follow the same arithmetic, and golden vectors in the tests pin both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from graphkv.errors import InvalidValue

FP8_GROUP = 128  # index K values that share one fp32 scale
FP4_GROUP = 32  # index K values that share one UE8M0 exponent byte
MIN_AMAX_FLOOR = 2.0**-100  # below it the exponent of a scale, or of its inverse, would leave the range of a float
DS_MLA_TILE = 128  # latent values that share one fp32 scale in fp8_ds_mla


class Role(StrEnum):
    """What bytes are: the MLA latent KV, or the indexer K with its scales."""

    LATENT = "latent"
    INDEX_K = "index_k"


class Side(StrEnum):
    """The target model's layers, or the draft model's."""

    TARGET = "target"
    DRAFT = "draft"


class LatentFormat(StrEnum):
    """How one token's latent KV is stored. `fp8` has one scale for the whole cache, `fp8_ds_mla` four a token."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"


class IndexKFormat(StrEnum):
    """How one token's index K is stored. The quantised formats keep a page's scales behind all its values."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


class ScaleMode(StrEnum):
    """FP8 scale: the next power of two at or above amax/448 (`pow2`, "ue8m0" elsewhere), or amax/448 itself."""

    POW2 = "pow2"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Bytes of one page (one layer's share of one block) of one role.

    A page holds the values of its `block_size` tokens side by side, then their scales side by side. Formats whose
    scales stand inside the token's record (`fp8_ds_mla`) or that have none count everything as values.

    Attributes:
        block_size: tokens a page.
        value_bytes: bytes of one token's values.
        scale_bytes: bytes of one token's scales behind the values of the page, 0 if there are none.
    """

    role: Role
    format: LatentFormat | IndexKFormat
    block_size: int
    value_bytes: int
    scale_bytes: int

    @property
    def token_bytes(self) -> int:
        """Byte budget of a token; the last dimension of a page view. Not a record where scale_bytes > 0."""
        return self.value_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def value_offset(self, page: int, position: int) -> int:
        """Byte of the first value of in-page `position`, counted from the base that `page` counts from."""
        return page * self.page_bytes + position * self.value_bytes

    def scale_offset(self, page: int, position: int) -> int:
        """Byte of the first scale of in-page `position`; -1 where the page has no scales behind its values."""
        if self.scale_bytes == 0:
            return -1
        return page * self.page_bytes + self.block_size * self.value_bytes + position * self.scale_bytes


def latent_layout(fmt: LatentFormat, kv_lora_rank: int, rope_dim: int, block_size: int) -> PageLayout:
    """Layout of a latent page for a latent of `kv_lora_rank` values and a rope part of `rope_dim` values."""
    fmt = LatentFormat(fmt)
    width = kv_lora_rank + rope_dim
    if fmt is LatentFormat.FP8_DS_MLA:
        if kv_lora_rank % DS_MLA_TILE:
            raise InvalidValue(
                f"latent format fp8_ds_mla needs kv_lora_rank in multiples of {DS_MLA_TILE}, got {kv_lora_rank}; "
                "use bf16 for other widths"
            )
        value_bytes = kv_lora_rank + 4 * (kv_lora_rank // DS_MLA_TILE) + 2 * rope_dim
    else:
        value_bytes = width * {LatentFormat.FP32: 4, LatentFormat.BF16: 2, LatentFormat.FP8: 1}[fmt]
    return PageLayout(Role.LATENT, fmt, block_size, value_bytes, 0)


def index_k_layout(fmt: IndexKFormat, head_dim: int, block_size: int) -> PageLayout:
    """Layout of an index_k page for an indexer key of `head_dim` values."""
    fmt = IndexKFormat(fmt)
    if fmt is IndexKFormat.FP8:
        if head_dim % FP8_GROUP and head_dim not in (32, 64):
            raise InvalidValue(
                f"index_k format fp8 needs index_head_dim 32, 64 or a multiple of {FP8_GROUP}, got {head_dim}; "
                "use bf16 for other widths"
            )
        return PageLayout(Role.INDEX_K, fmt, block_size, head_dim, 4 * -(-head_dim // FP8_GROUP))
    if fmt is IndexKFormat.FP4:
        if head_dim % FP8_GROUP:
            raise InvalidValue(
                f"index_k format fp4 needs index_head_dim in multiples of {FP8_GROUP}, got {head_dim}; "
                "use fp8 or bf16 for other widths"
            )
        return PageLayout(Role.INDEX_K, fmt, block_size, head_dim // 2, head_dim // FP4_GROUP)
    return PageLayout(Role.INDEX_K, fmt, block_size, head_dim * (4 if fmt is IndexKFormat.FP32 else 2), 0)
