"""The torch codecs against the NumPy oracle and the vectors worked out by hand."""

from __future__ import annotations

import golden
import numpy as np
import oracles
import pytest
import torch
from places import rows, tensor

from graphkv import codecs
from graphkv.errors import InvalidValue
from graphkv.layout import IndexKFormat, LatentFormat, ScaleMode


def test_every_e4m3_code_decodes_to_its_value(device: torch.device) -> None:
    decoded = codecs.decode_e4m3(torch.arange(256, dtype=torch.uint8, device=device)).cpu().numpy()
    np.testing.assert_array_equal(decoded, oracles.E4M3.astype(np.float32))


def test_e4m3_rounds_to_nearest_even_at_and_beside_every_midpoint(device: torch.device) -> None:
    exact = oracles.E4M3[:0x7F]
    middle = (exact[1:] + exact[:-1]) / 2
    beside = [np.nextafter(middle.astype(np.float32), np.float32(side)) for side in (0, 1000)]
    points = np.concatenate([exact, middle, *beside, [449, 464, 1e30, np.inf, np.nan, 1e-45]]).astype(np.float32)
    points = np.concatenate([points, -points])
    codes = codecs.encode_e4m3(tensor(points, device)).cpu().numpy()
    np.testing.assert_array_equal(codes, oracles.encode_e4m3(points))


def test_fp8_codes_by_hand(device: torch.device) -> None:
    row = np.zeros((1, 128), np.float32)
    row[0, : len(golden.FP8_CODES)] = [value for value, _ in golden.FP8_CODES]
    codes, scale = codecs.quantise_fp8(tensor(row, device))
    assert scale.cpu().numpy().tobytes() == golden.FP8_SCALE_ONE
    assert codes[0, : len(golden.FP8_CODES)].tolist() == [code for _, code in golden.FP8_CODES]
    assert not codes[0, len(golden.FP8_CODES) :].any()


@pytest.mark.parametrize(("amax", "floor", "scale"), golden.FP8_SCALES)
def test_fp8_scales_by_hand(device: torch.device, amax: float, floor: float, scale: bytes) -> None:
    row = torch.zeros(1, 128, device=device)
    row[0, 77] = -amax
    codes, got = codecs.quantise_fp8(row, ScaleMode.POW2, floor)
    assert got.cpu().numpy().tobytes() == scale
    if amax == 0:
        assert not (codes & 0x7F).any()


def test_fp4_codes_by_hand(device: torch.device) -> None:
    row = torch.zeros(1, 128, device=device)
    row[0, : len(golden.FP4_CODES)] = torch.tensor([value for value, _ in golden.FP4_CODES])
    packed, exponents = codecs.quantise_fp4(row, 1e-12)
    assert bytes(packed[0, : len(golden.FP4_PACKED)].tolist()) == golden.FP4_PACKED
    assert exponents.tolist() == [[127, 85, 85, 85]]


@pytest.mark.parametrize(("amax", "floor", "exponent"), golden.FP4_EXPONENTS)
def test_fp4_exponents_by_hand(device: torch.device, amax: float, floor: float, exponent: int) -> None:
    row = torch.zeros(1, 128, device=device)
    row[0, 40] = amax
    assert codecs.quantise_fp4(row, floor)[1][0, 1].item() == exponent


@pytest.mark.parametrize("top", [448.0, 6.0])
def test_a_power_of_two_scale_is_the_least_for_every_mantissa(top: float) -> None:
    """All 2^23 mantissas, at the ends and in the middle of the exponents that a floor can leave."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for exponent in (28, 127, 254):
        amax = (mantissas | exponent << 23).view(torch.float32)
        field = codecs._ceil_exponent(amax, codecs._E4M3_TOP if top == 448.0 else codecs._E2M1_TOP)
        scaled = top * 2.0 ** (field.double() - 127)
        wanted = amax.double()
        assert bool((scaled >= wanted).all())
        assert bool((scaled / 2 < wanted).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("floor", [1e-4, 1e-12])
@pytest.mark.parametrize("mode", list(ScaleMode))
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_fp8_rows_match_the_oracle(
    device: torch.device, rng: np.random.Generator, head_dim: int, mode: ScaleMode, floor: float, dtype: torch.dtype
) -> None:
    x = tensor(rows(rng, 64, head_dim), device, dtype)
    codes, scale = codecs.quantise_fp8(x, mode, floor)
    want_codes, want_scale = oracles.quantise_fp8(x.float().cpu().numpy(), mode is ScaleMode.LINEAR, floor)
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    np.testing.assert_array_equal(scale.cpu().numpy().view(np.uint32), want_scale.view(np.uint32))
    back = codecs.dequantise_fp8(codes, scale).cpu().numpy()
    with np.errstate(over="ignore"):  # the row with an infinity
        want = oracles.decode_index_k(want_codes, want_scale.view(np.uint8), "fp8").astype(np.float32)
    np.testing.assert_array_equal(back, want)


@pytest.mark.parametrize("floor", [1e-4, 1e-12])
def test_fp4_rows_match_the_oracle(device: torch.device, rng: np.random.Generator, floor: float) -> None:
    x = rows(rng, 64, 128)
    packed, exponents = codecs.quantise_fp4(tensor(x, device), floor)
    want_packed, want_exponents = oracles.quantise_fp4(x, floor)
    np.testing.assert_array_equal(packed.cpu().numpy(), want_packed)
    np.testing.assert_array_equal(exponents.cpu().numpy(), want_exponents)
    back = codecs.dequantise_fp4(packed, exponents).cpu().numpy()
    with np.errstate(over="ignore"):
        want = oracles.decode_index_k(want_packed, want_exponents, "fp4").astype(np.float32)
    np.testing.assert_array_equal(back, want)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("mode", list(ScaleMode))
def test_a_zero_row_quantises_to_zeros(device: torch.device, fmt: str, mode: ScaleMode) -> None:
    values, scales = codecs.encode_index_k(torch.zeros(2, 128, device=device), IndexKFormat(fmt), mode, 1e-12)
    assert not values.any()
    decoded = codecs.decode_index_k(values, scales, IndexKFormat(fmt))
    assert not decoded.any()
    assert bool(decoded.isfinite().all())


def test_a_ds_mla_record_by_hand(device: torch.device) -> None:
    c = torch.zeros(1, 512, device=device)
    for tile, amax in enumerate(golden.DS_MLA_TILES):
        c[0, 128 * tile] = amax
    rope = torch.zeros(1, 64, device=device)
    rope[0, :2] = torch.tensor([1.0, -2.0])
    record = bytes(codecs.encode_latent(c, rope, LatentFormat.FP8_DS_MLA, 1.0)[0].tolist())
    assert len(record) == 656
    assert record[512:528] == golden.DS_MLA_SCALES
    assert [(at, record[at]) for at, _ in golden.DS_MLA_CODES] == list(golden.DS_MLA_CODES)
    at, want = golden.DS_MLA_ROPE
    assert record[at : at + len(want)] == want
    assert np.count_nonzero(np.frombuffer(record, np.uint8)) == 3 + 2 + 1 + 1 + 1 + 3  # codes, scales, rope


@pytest.mark.parametrize("fmt", list(LatentFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_records_match_the_oracle(
    device: torch.device, rng: np.random.Generator, fmt: LatentFormat, dtype: torch.dtype
) -> None:
    c, rope = (tensor(rows(rng, 64, width), device, dtype) for width in (256, 32))
    records = codecs.encode_latent(c, rope, fmt, 0.037).cpu().numpy()
    want = oracles.latent_bytes(c.float().cpu().numpy(), rope.float().cpu().numpy(), fmt, 0.037)
    if fmt in ("fp32", "bf16"):  # the payload of a NaN is not pinned
        both = [
            x.view(np.float32) if fmt == "fp32" else oracles.bf16_values(x.view(np.uint16)) for x in (records, want)
        ]
        np.testing.assert_array_equal(*both)
    else:
        ordinary = [t for t in range(64) if t != 3]  # nor is it in the bf16 rope
        np.testing.assert_array_equal(records[ordinary], want[ordinary])
    decoded = codecs.decode_latent(tensor(want, device), fmt, 0.037, 256).cpu().numpy()
    np.testing.assert_array_equal(decoded, oracles.decode_latent(want, fmt, 0.037, 256).astype(np.float32))


def test_a_query_has_one_scale_a_head(device: torch.device, rng: np.random.Generator) -> None:
    x = rows(rng, 24, 128)
    q, scale = codecs.quantise_query(tensor(x.reshape(3, 8, 128), device))
    codes, want = oracles.quantise_fp8(x, False, 1e-4)
    assert (q.dtype, tuple(q.shape), tuple(scale.shape)) == (torch.float8_e4m3fn, (3, 8, 128), (3, 8))
    np.testing.assert_array_equal(q.view(torch.uint8).cpu().numpy().reshape(24, 128), codes)
    np.testing.assert_array_equal(scale.cpu().numpy().reshape(24, 1), want)


@pytest.mark.parametrize("floor", [0.0, -1.0, 1e-40, float("nan"), float("inf")])
def test_a_floor_that_breaks_scales_is_refused(floor: float) -> None:
    with pytest.raises(InvalidValue, match="amax_floor must be at least"):
        codecs.quantise_fp8(torch.ones(1, 128), ScaleMode.POW2, floor)
    with pytest.raises(InvalidValue, match="amax_floor must be at least"):
        codecs.quantise_fp4(torch.ones(1, 128), floor)


@pytest.mark.parametrize(("width", "quantise"), [(130, codecs.quantise_fp8), (48, codecs.quantise_fp4)])
def test_a_width_that_does_not_divide_is_refused(width: int, quantise: object) -> None:
    with pytest.raises(InvalidValue, match=f"got {width}"):
        quantise(torch.ones(1, width))  # type: ignore[operator]
