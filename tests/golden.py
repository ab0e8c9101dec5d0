"""Byte vectors worked out by hand from the published formats. No writer and no oracle had a part in them."""

from __future__ import annotations

# (position, block_size, page, value byte, scale byte), counted from the layer's view
FP8_PLACE = (130, 64, 9, 76_288, 84_232)
FP4_PLACE = (130, 64, 9, 39_296, 43_272)

# Pages coalesced 3 a block, slot block 5, layer 2, in-page position 2: value byte, scale byte in the view; value byte
# from the pool's base.
FP8_COALESCED = (126_976, 134_920, 143_872)
FP4_COALESCED = (65_408, 69_384, 74_112)

# A head of 128 values whose amax is 448, so the scale is 1: value, e4m3 code.
FP8_CODES = (
    (448.0, 0x7E),
    (-448.0, 0xFE),
    (1.0, 0x38),
    (-0.5, 0xB0),
    (0.0, 0x00),
    (1.0625, 0x38),  # half way between 1 and 1.125: the even code
    (1.1875, 0x3A),  # half way between 1.125 and 1.25: the even code
    (0.015625, 0x08),  # 2^-6, the least normal
    (0.013671875, 0x07),  # 7 * 2^-9, the largest subnormal
    (0.001953125, 0x01),  # 2^-9, the least subnormal
    (0.0009765625, 0x00),  # half of it: the even code
    (0.0029296875, 0x02),  # half way between 1 and 2 steps: the even code
    (300.0, 0x79),  # 288 is nearer than 320
    (304.0, 0x7A),  # half way: the even code
)
FP8_SCALE_ONE = b"\x00\x00\x80\x3f"

# amax, floor, the bytes of the FP8 scale (little-endian float)
FP8_SCALES = (
    (3.0, 1e-4, b"\x00\x00\x00\x3c"),  # 2^-7
    (448.0, 1e-4, b"\x00\x00\x80\x3f"),  # 1
    (448.00003, 1e-4, b"\x00\x00\x00\x40"),  # the next float needs 2
    (0.0, 1e-12, b"\x00\x00\x80\x27"),  # 2^-48
    (0.0, 1e-4, b"\x00\x00\x80\x34"),  # 2^-22
    (1.75, 1e-4, b"\x00\x00\x80\x3b"),  # 2^-8, exactly
)

# A group of 32 values whose amax is 6, so the exponent is 127: value, e2m1 code.
FP4_CODES = (
    (6.0, 0x7),
    (-6.0, 0xF),
    (0.25, 0x0),  # each threshold belongs to the smaller code
    (0.26, 0x1),
    (0.75, 0x1),
    (-0.76, 0xA),
    (1.25, 0x2),
    (-1.5, 0xB),
    (1.75, 0x3),
    (2.5, 0x4),
    (3.5, 0x5),
    (5.0, 0x6),
    (-5.1, 0xF),
    (-0.1, 0x0),  # no negative zero
)
FP4_PACKED = bytes([0xF7, 0x10, 0xA1, 0xB2, 0x43, 0x65, 0x0F])  # the even element in the low nibble

# amax, floor, UE8M0 byte
FP4_EXPONENTS = ((3.0, 1e-12, 126), (5.0, 1e-12, 127), (0.0, 1e-12, 85), (6.0, 1e-4, 127), (6.0000005, 1e-4, 128))

# An fp8_ds_mla record: tiles of amax 448, 896, 0 and 3.5, rope 1, -2, 0 ...: bytes at offsets of the 656.
DS_MLA_TILES = (448.0, 896.0, 0.0, 3.5)
DS_MLA_SCALES = b"\x00\x00\x80\x3f\x00\x00\x00\x40\x00\x00\x80\x00\x00\x00\x00\x3c"
DS_MLA_CODES = ((0, 0x7E), (128, 0x7E), (256, 0x00), (384, 0x7E), (385, 0x00))
DS_MLA_ROPE = (528, b"\x80\x3f\x00\xc0\x00\x00")

# Bytes a token of 61 layers: latent format, index_k format, bytes
BYTES_PER_TOKEN = (
    ("fp8", "fp8", 43_188),
    ("fp8", "fp4", 39_284),
    ("bf16", "fp8", 78_324),
    ("bf16", "fp4", 74_420),
    ("fp8_ds_mla", "fp8", 48_068),
    ("fp8_ds_mla", "fp4", 44_164),
)
