"""What the codecs, the stores and the selection must give, in NumPy and straight from the definitions.

Nothing of graphkv is imported, and the methods differ on purpose: codes are found by search among all values of a
format in float64, powers of two by comparison, places of bytes by written-out offsets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3_values() -> NDArray[np.float64]:
    """The value of each of the 256 codes."""
    values = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = code >> 3 & 0xF, code & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[code] = np.nan if code & 0x7F == 0x7F else sign * magnitude
    return values


E4M3 = e4m3_values()


def encode_e4m3(x: NDArray[np.floating]) -> Bytes:
    """The nearest code of each value, of two equally near ones the even code; NaN is 0x7F."""
    magnitudes = E4M3[:0x7F]
    wanted = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    above = np.clip(np.searchsorted(magnitudes, np.nan_to_num(wanted)), 1, 0x7E)
    below = above - 1
    to_above, to_below = magnitudes[above] - wanted, wanted - magnitudes[below]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), 0x7F, code + np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def least_power(amax: NDArray[np.floating], top: float) -> NDArray[np.int64]:
    """The least integer e with top * 2^e >= amax, by exact comparison."""
    wanted = amax.astype(np.float64)
    e = np.floor(np.log2(wanted / top)).astype(np.int64) - 1
    for _ in range(4):
        e = np.where(np.ldexp(top, e) < wanted, e + 1, e)
    return e


def amax_of(groups: Floats, floor: float) -> Floats:
    magnitude = np.abs(groups)
    magnitude = np.where(np.isnan(magnitude), np.float32(0), np.minimum(magnitude, np.finfo(np.float32).max))
    return np.maximum(magnitude.max(-1), np.float32(floor)).astype(np.float32)


def quantise_fp8(x: Floats, linear: bool, floor: float) -> tuple[Bytes, Floats]:
    """Codes [T, D] and scales [T, G]."""
    groups = x.reshape(len(x), -1, min(128, x.shape[1]))
    amax = amax_of(groups, floor)
    with np.errstate(over="ignore"):
        if linear:
            scale = (amax / np.float32(448)).astype(np.float32)
            scaled = (groups / scale[..., None]).astype(np.float32)
        else:
            e = least_power(amax, 448.0)
            scale = np.ldexp(np.float32(1), e).astype(np.float32)
            scaled = np.ldexp(groups.astype(np.float64), -e[..., None])
    return encode_e4m3(scaled).reshape(x.shape), scale


def quantise_fp4(x: Floats, floor: float) -> tuple[Bytes, Bytes]:
    """Packed codes [T, D/2] and exponents [T, D/32]."""
    groups = x.reshape(len(x), -1, 32)
    e = least_power(amax_of(groups, floor), 6.0)
    scaled = np.ldexp(groups.astype(np.float64), -e[..., None]).reshape(x.shape)
    distance = np.abs(np.minimum(np.abs(np.nan_to_num(scaled, posinf=6, neginf=6)), 6)[..., None] - E2M1)
    code = distance.argmin(-1)  # the first of two equally near ones, which is the smaller
    code = np.where((scaled < 0) & (code > 0), code + 8, code)
    return (code[:, 0::2] + 16 * code[:, 1::2]).astype(np.uint8), (e + 127).astype(np.uint8)


def bf16_bits(x: NDArray[np.floating]) -> NDArray[np.uint16]:
    """To nearest even, by rounding the significand to 8 bits in float64."""
    _, exponent = np.frexp(x.astype(np.float64))
    unit = np.maximum(exponent, -125) - 8
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(x.astype(np.float64), -unit)), unit).astype(np.float32)
    return np.where(np.isnan(x), 0x7FC0, rounded.view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def index_k_bytes(k: Floats, fmt: str, linear: bool = False, floor: float = 1e-4) -> tuple[Bytes, Bytes]:
    """Values [T, value_bytes] and scales [T, scale_bytes] of rows."""
    if fmt == "fp8":
        codes, scale = quantise_fp8(k, linear, floor)
        return codes, scale.view(np.uint8)
    if fmt == "fp4":
        return quantise_fp4(k, floor)
    values = np.ascontiguousarray(k) if fmt == "fp32" else bf16_bits(k)
    return values.view(np.uint8), np.empty((len(k), 0), np.uint8)


def decode_index_k(values: Bytes, scales: Bytes, fmt: str) -> NDArray[np.float64]:
    if fmt == "fp8":
        scale = np.ascontiguousarray(scales).view(np.float32).astype(np.float64)
        return (E4M3[values].reshape(len(values), scale.shape[1], -1) * scale[..., None]).reshape(len(values), -1)
    if fmt == "fp4":
        code = np.stack([values & 15, values >> 4], -1).reshape(len(values), -1)
        signed = np.where(code >= 8, -1.0, 1.0) * E2M1[code % 8]
        exponent = np.repeat(scales.astype(np.int64) - 127, 32, axis=1)
        return np.ldexp(signed, exponent)
    rows = np.ascontiguousarray(values)
    return (rows.view(np.float32) if fmt == "fp32" else bf16_values(rows.view(np.uint16))).astype(np.float64)


def latent_bytes(c: Floats, rope: Floats, fmt: str, scale: float) -> Bytes:
    """Records [T, value_bytes]."""
    if fmt == "fp8_ds_mla":
        tiles = c.reshape(len(c), -1, 128)
        tile_scale = np.maximum(amax_of(tiles, 0.0) / np.float32(448), np.float32(2.0**-126)).astype(np.float32)
        codes = encode_e4m3((tiles / tile_scale[..., None]).astype(np.float32)).reshape(c.shape)
        return np.concatenate([codes, tile_scale.view(np.uint8), bf16_bits(rope).view(np.uint8)], axis=1)
    latent = np.concatenate([c, rope], axis=1)
    if fmt == "fp8":
        return encode_e4m3((latent / np.float32(scale)).astype(np.float32))
    return (latent if fmt == "fp32" else bf16_bits(latent)).view(np.uint8)


def decode_latent(records: Bytes, fmt: str, scale: float, rank: int) -> NDArray[np.float64]:
    if fmt == "fp8_ds_mla":
        middle = rank + rank // 32
        tile_scale = np.ascontiguousarray(records[:, rank:middle]).view(np.float32).astype(np.float64)
        c = E4M3[records[:, :rank]] * np.repeat(tile_scale, 128, axis=1)
        rope = bf16_values(np.ascontiguousarray(records[:, middle:]).view(np.uint16))
        return np.concatenate([c, rope], axis=1)
    if fmt == "fp8":
        return E4M3[records] * float(np.float32(scale))
    rows = np.ascontiguousarray(records)
    return (rows.view(np.float32) if fmt == "fp32" else bf16_values(rows.view(np.uint16))).astype(np.float64)


def place_rows(
    image: Bytes, page_stride: int, block_size: int, slots: NDArray[np.int64], values: Bytes, scales: Bytes
) -> None:
    """Write rows into the flat bytes of pages, one slot after the other; -1 writes nothing."""
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page = slot // block_size * page_stride
        value_at = page + slot % block_size * values.shape[1]
        image[value_at : value_at + values.shape[1]] = values[t]
        scale_at = page + block_size * values.shape[1] + slot % block_size * scales.shape[1]
        image[scale_at : scale_at + scales.shape[1]] = scales[t]


def take_rows(
    image: Bytes, page_stride: int, block_size: int, slots: list[int], value_bytes: int, scale_bytes: int
) -> tuple[Bytes, Bytes]:
    """Read rows back by slot."""
    values, scales = np.empty((len(slots), value_bytes), np.uint8), np.empty((len(slots), scale_bytes), np.uint8)
    for t, slot in enumerate(slots):
        page = slot // block_size * page_stride
        value_at = page + slot % block_size * value_bytes
        values[t] = image[value_at : value_at + value_bytes]
        scale_at = page + block_size * value_bytes + slot % block_size * scale_bytes
        scales[t] = image[scale_at : scale_at + scale_bytes]
    return values, scales


def row_slots(page_table_row: NDArray[np.int32], length: int, block_size: int) -> list[int]:
    """The slots of positions 0 .. length - 1 of a row."""
    return [int(page_table_row[p // block_size]) * block_size + p % block_size for p in range(length)]


def index_logits(q: NDArray[np.floating], weights: Floats, k: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores [n] of one token: q [H, D], weights [H], k [n, D]."""
    dots = q.astype(np.float64) @ k.T
    return weights.astype(np.float64) @ np.where(dots < 0, 0.0, dots)


def select(logits: Floats, k: int) -> list[int]:
    """Positions of the min(k, n) largest logits, ties by lowest position, in ascending order; NaN ranks with -inf."""
    ranked = [-np.inf if np.isnan(value) else float(value) for value in logits]
    return sorted(sorted(range(len(ranked)), key=lambda p: (-ranked[p], p))[:k])


def attend(
    q: NDArray[np.floating], latents: NDArray[np.float64], softmax_scale: float, rank: int
) -> NDArray[np.float64]:
    """Attention [H, R] of one token: q [H, R + P] over latents [n, R + P]; zeros for n = 0."""
    if not len(latents):
        return np.zeros((len(q), rank))
    scores = q.astype(np.float64) @ latents.T * softmax_scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ latents[:, :rank]
