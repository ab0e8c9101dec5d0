"""Number formats in torch: FP8 e4m3, FP4 e2m1 with UE8M0 exponents, and the records built from them.

This is the CPU path behind `graphkv.ops` and, on any device, the readable statement of what `cuda/codec.cuh` does.
Both, and the NumPy oracle of the tests, agree on every bit because each choice that could differ is pinned here:

- a power-of-two scale is found by integer arithmetic on the bits of amax, never by a division or a logarithm;
- scaling is exact for powers of two and a true division otherwise; rounding is to nearest even, saturating at 448;
- amax skips NaN and counts infinity as the largest float, so a scale is always finite and positive;
- a NaN becomes e4m3 code 0x7F or e2m1 code 0; an infinity becomes the largest code of its sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphkv.errors import InvalidValue
from graphkv.layout import DS_MLA_TILE, FP4_GROUP, FP8_GROUP, MIN_AMAX_FLOOR, IndexKFormat, LatentFormat, ScaleMode

E4M3_MAX = 448.0
_FLOAT_MAX = torch.finfo(torch.float32).max
_FLOAT_TINY = torch.finfo(torch.float32).tiny
_E4M3_NAN = 0x7F
# 448 = 1.75 * 2^8 and 6 = 1.5 * 2^2: the mantissa bits and the exponent of the largest code of each format.
_E4M3_TOP = (0x600000, 8)
_E2M1_TOP = (0x400000, 2)
_E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantise_fp8(
    x: Tensor, scale_mode: ScaleMode = ScaleMode.POW2, amax_floor: float = 1e-4, group: int = FP8_GROUP
) -> tuple[Tensor, Tensor]:
    """FP8 codes and scales of rows, `value = code * scale`.

    Args:
        x: f32 or bf16 [..., D].
        scale_mode: scale = amax/448 (`linear`) or the least power of two not below it (`pow2`).
        amax_floor: the least amax of a group; an all-zero group has codes 0 and the scale of the floor.
        group: values that share a scale; a row shorter than that is one group.

    Returns:
        codes u8 [..., D] (e4m3 bit patterns) and scales f32 [..., D / min(group, D)].
    """
    _check_floor(amax_floor)
    groups = _grouped(x, min(group, x.shape[-1]))
    amax = _amax(groups).clamp_min(amax_floor)
    if ScaleMode(scale_mode) is ScaleMode.POW2:
        exponent = _ceil_exponent(amax, _E4M3_TOP)
        scale, scaled = _power(exponent), groups * _power(254 - exponent).unsqueeze(-1)
    else:
        scale = amax / _e4m3_max(amax)
        scaled = groups / scale.unsqueeze(-1)
    return encode_e4m3(scaled).flatten(-2), scale


def dequantise_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """f32 [..., D] of codes u8 [..., D] and scales f32 [..., G], each scale for D / G neighbours."""
    values = torch.unflatten(decode_e4m3(codes), -1, (scales.shape[-1], -1))
    return (values * scales.unsqueeze(-1)).flatten(-2)


def quantise_fp4(x: Tensor, amax_floor: float = 1e-4) -> tuple[Tensor, Tensor]:
    """FP4 e2m1 codes and UE8M0 exponents of rows, `value = code * 2^(exponent - 127)`, 32 values an exponent.

    Args:
        x: f32 or bf16 [..., D], D a multiple of 32.
        amax_floor: as for `quantise_fp8`.

    Returns:
        packed u8 [..., D/2], the even element in the low nibble, and exponents u8 [..., D/32].
    """
    _check_floor(amax_floor)
    groups = _grouped(x, FP4_GROUP)
    exponent = _ceil_exponent(_amax(groups).clamp_min(amax_floor), _E2M1_TOP)
    scaled = (groups * _power(254 - exponent).unsqueeze(-1)).flatten(-2)
    magnitude = scaled.abs().nan_to_num_(nan=0.0, posinf=_FLOAT_MAX)
    thresholds = torch.tensor(_E2M1_THRESHOLDS, device=x.device)
    code = torch.bucketize(magnitude, thresholds, out_int32=True)  # a tie goes to the smaller code
    code |= ((scaled < 0) & (code > 0)).to(torch.int32) << 3  # no negative zero
    return (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8), exponent.to(torch.uint8)


def dequantise_fp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """f32 [..., D] of packed codes u8 [..., D/2] and UE8M0 exponents u8 [..., D/32]."""
    code = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
    table = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], device=packed.device)
    groups = torch.unflatten(table[code], -1, (-1, FP4_GROUP))
    return (groups * _power(exponents.to(torch.int32)).unsqueeze(-1)).flatten(-2)


def quantise_query(
    q: Tensor, scale_mode: ScaleMode = ScaleMode.POW2, amax_floor: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Indexer queries in FP8, for callers that fold the scale into the head weights.

    Args:
        q: f32 or bf16 [T, H, D].

    Returns:
        q float8_e4m3fn [T, H, D] and its scale f32 [T, H]; `weights * scale` makes up for the scale.
    """
    codes, scale = quantise_fp8(q, scale_mode, amax_floor, group=q.shape[-1])
    return codes.view(torch.float8_e4m3fn), scale.squeeze(-1)


def encode_index_k(k: Tensor, fmt: IndexKFormat, scale_mode: ScaleMode, amax_floor: float) -> tuple[Tensor, Tensor]:
    """The bytes of index K rows: k f32 or bf16 [T, D] -> values u8 [T, value_bytes], scales u8 [T, scale_bytes]."""
    if fmt is IndexKFormat.FP8:
        codes, scale = quantise_fp8(k, scale_mode, amax_floor)
        return codes, scale.view(torch.uint8)
    if fmt is IndexKFormat.FP4:
        return quantise_fp4(k, amax_floor)
    values = _as_bytes(k, torch.float32 if fmt is IndexKFormat.FP32 else torch.bfloat16)
    return values, values.new_empty((k.shape[0], 0))


def decode_index_k(values: Tensor, scales: Tensor, fmt: IndexKFormat) -> Tensor:
    """f32 [N, D] of values u8 [N, value_bytes] and scales u8 [N, scale_bytes] of index K rows."""
    if fmt is IndexKFormat.FP8:
        return dequantise_fp8(values, _from_bytes(scales, torch.float32))
    if fmt is IndexKFormat.FP4:
        return dequantise_fp4(values, scales)
    return _from_bytes(values, torch.float32 if fmt is IndexKFormat.FP32 else torch.bfloat16).float()


def encode_latent(c: Tensor, rope: Tensor, fmt: LatentFormat, scale: float) -> Tensor:
    """The records of latents: c [T, R] and rope [T, P], f32 or bf16 -> u8 [T, value_bytes].

    `scale` is the cache's one scale of format `fp8` (value = code * scale) and has no part in the others.
    A tile of `fp8_ds_mla` has scale max(amax/448, 2^-126): a zero tile gets 2^-126 and codes 0, so no NaN arises.
    """
    if fmt is LatentFormat.FP8_DS_MLA:
        tiles = _grouped(c, DS_MLA_TILE)
        tile_scale = (_amax(tiles) / _e4m3_max(tiles)).clamp_min(_FLOAT_TINY)
        codes = encode_e4m3(tiles / tile_scale.unsqueeze(-1)).flatten(-2)
        return torch.cat((codes, tile_scale.view(torch.uint8), _as_bytes(rope, torch.bfloat16)), dim=-1)
    latent = torch.cat((c, rope), dim=-1)
    if fmt is LatentFormat.FP8:
        return encode_e4m3(latent.float() / torch.tensor(scale, dtype=torch.float32, device=c.device))
    return _as_bytes(latent, torch.float32 if fmt is LatentFormat.FP32 else torch.bfloat16)


def decode_latent(records: Tensor, fmt: LatentFormat, scale: float, kv_lora_rank: int) -> Tensor:
    """f32 [N, R + P] of latent records u8 [N, value_bytes]; R is `kv_lora_rank`, P follows from the record."""
    if fmt is LatentFormat.FP8_DS_MLA:
        rope_start = kv_lora_rank + 4 * (kv_lora_rank // DS_MLA_TILE)
        tile_scale = _from_bytes(records[:, kv_lora_rank:rope_start], torch.float32)
        c = dequantise_fp8(records[:, :kv_lora_rank], tile_scale)
        return torch.cat((c, _from_bytes(records[:, rope_start:], torch.bfloat16).float()), dim=-1)
    if fmt is LatentFormat.FP8:
        return decode_e4m3(records) * torch.tensor(scale, dtype=torch.float32, device=records.device)
    return _from_bytes(records, torch.float32 if fmt is LatentFormat.FP32 else torch.bfloat16).float()


def encode_e4m3(x: Tensor) -> Tensor:
    """e4m3 bit patterns u8 of f32 values: to nearest even, saturating at 448; NaN is 0x7F."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), _E4M3_NAN)


def decode_e4m3(codes: Tensor) -> Tensor:
    """f32 values of e4m3 bit patterns u8."""
    return codes.view(torch.float8_e4m3fn).float()


def _check_floor(amax_floor: float) -> None:
    if not MIN_AMAX_FLOOR <= amax_floor <= _FLOAT_MAX:
        raise InvalidValue(
            f"amax_floor must be at least {MIN_AMAX_FLOOR:.3g} (2^-100) and finite, got {amax_floor}; "
            "use 1e-4 (DeepSeek) or 1e-12 (TensorRT-LLM)"
        )


def _grouped(x: Tensor, group: int) -> Tensor:
    if group == 0 or x.shape[-1] % group:
        raise InvalidValue(f"a row must be a multiple of {group} values to share scales, got {x.shape[-1]}")
    return torch.unflatten(x.float(), -1, (-1, group))


def _e4m3_max(like: Tensor) -> Tensor:
    """448 as a tensor: torch on CUDA turns a division by a Python number into a product, one rounding away."""
    return torch.full((), E4M3_MAX, dtype=torch.float32, device=like.device)


def _amax(groups: Tensor) -> Tensor:
    return groups.abs().nan_to_num_(nan=0.0, posinf=_FLOAT_MAX).amax(dim=-1)


def _ceil_exponent(amax: Tensor, top: tuple[int, int]) -> Tensor:
    """Biased exponent (i32) of the least power of two not below amax / top, exact for every normal amax."""
    mantissa, exponent = top
    bits = amax.view(torch.int32)
    return (bits >> 23) - exponent + ((bits & 0x7FFFFF) > mantissa).to(torch.int32)


def _power(biased_exponent: Tensor) -> Tensor:
    """2^(e - 127) as f32, for e in 1..254."""
    return (biased_exponent << 23).view(torch.float32)


def _as_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).contiguous().view(torch.uint8)


def _from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.contiguous().view(dtype)
