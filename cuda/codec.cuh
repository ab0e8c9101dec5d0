// Number formats: FP8 e4m3, FP4 e2m1 with UE8M0 exponents, bf16. Bit for bit what graphkv/codecs.py does; its head says
// which choices are pinned and how. The PTX conversions of newer devices give the same bits as the portable code.
#pragma once
#include "common.cuh"

// Formats of pages and dtypes of inputs, as graphkv/ops/launch.py numbers them.
#define GK_FP32 0
#define GK_BF16 1
#define GK_FP8 2
#define GK_FP4 3
#define GK_FP8_DS_MLA 4

#if !defined(GK_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define GK_PTX_E4M3 1
#endif

namespace gk {

constexpr float FLOAT_MAX = 3.402823466e+38f;
constexpr float FLOAT_TINY = 1.175494351e-38f;  // 2^-126, the least normal float
constexpr float E4M3_MAX = 448.0f;

GK_DEVICE bool is_nan(float x) { return x != x; }

// 2^(e - 127) for e in 1..254.
GK_DEVICE float power_of_two(u32 biased_exponent) { return __uint_as_float(biased_exponent << 23); }

// ---- bf16

GK_DEVICE float decode_bf16(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// To nearest even. A NaN stays one; adding the rounding bias to it could carry into infinity or zero.
GK_DEVICE u16 encode_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (is_nan(x)) return 0x7fc0;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// ---- e4m3: sign, 4 exponent bits of bias 7, 3 mantissa bits; 448 is the largest, 0x7f NaN, there is no infinity

// To nearest even, saturating at 448; a NaN of either sign is 0x7f.
GK_DEVICE u8 encode_e4m3(float x) {
#ifdef GK_PTX_E4M3
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<u8>(pair);
#else
  if (is_nan(x)) return 0x7f;
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
  u32 magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x43e00000) return static_cast<u8>(sign | 0x7e);  // 448 and more
  if (magnitude < 0x3c800000) {  // below 2^-6 codes are multiples of 2^-9, the last bit of a float near 2^14
    const float rounded = __uint_as_float(magnitude) + 16384.0f;
    return static_cast<u8>(sign | (__float_as_uint(rounded) - 0x46800000));
  }
  magnitude += 0x7ffff + (magnitude >> 20 & 1);
  return static_cast<u8>(sign | ((magnitude >> 20) - (120 << 3)));
#endif
}

// Four codes in a word, `a` in the lowest byte.
GK_DEVICE u32 encode_e4m3(float a, float b, float c, float d) {
#ifdef GK_PTX_E4M3
  u32 word;
  asm("{\n\t.reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\tcvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
#else
  return encode_e4m3(a) | encode_e4m3(b) << 8 | encode_e4m3(c) << 16 | static_cast<u32>(encode_e4m3(d)) << 24;
#endif
}

GK_DEVICE float decode_e4m3(u8 code) {
  const u32 magnitude = code & 0x7f, sign = static_cast<u32>(code & 0x80) << 24;
  if (magnitude == 0x7f) return __uint_as_float(0x7fc00000);
  // The code's bits in a float's exponent and mantissa, times 2^(127 - 7): right for subnormal codes too.
  const float value = __uint_as_float(magnitude << 20) * power_of_two(247);
  return __uint_as_float(__float_as_uint(value) | sign);
}

// The four codes of a word, lowest byte first.
GK_DEVICE void decode_e4m3(u32 word, float (&x)[4]) {
#ifdef GK_PTX_E4M3
  asm("{\n\t.reg .b16 low, high;\n\t.reg .b32 halves;\n\t.reg .b16 a, b;\n\t"
      "mov.b32 {low, high}, %4;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, low;\n\t"
      "mov.b32 {a, b}, halves;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, b;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, high;\n\t"
      "mov.b32 {a, b}, halves;\n\tcvt.f32.f16 %2, a;\n\tcvt.f32.f16 %3, b;\n\t}"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(word));
#else
  for (i32 i = 0; i < 4; ++i) x[i] = decode_e4m3(static_cast<u8>(word >> 8 * i));
#endif
}

// ---- e2m1: sign, then one of 0 .5 1 1.5 2 3 4 6

// A tie goes to the smaller magnitude and zero has no sign; NaN is 0.
GK_DEVICE u8 encode_e2m1(float x) {
  const float a = fabsf(x);
  const i32 code = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5.0f);
  return static_cast<u8>(code | (code > 0 && x < 0.0f ? 8 : 0));
}

GK_DEVICE float decode_e2m1(u32 code) {
  const u32 magnitude = code & 7, exponent = magnitude >> 1;
  // 2^(e - 1) * (1 + m / 2), and 0 or .5 where e is 0.
  const u32 bits = exponent ? (exponent + 126) << 23 | (magnitude & 1) << 22 : magnitude * 0x3f000000u;
  return __uint_as_float(bits | (code & 8) << 28);
}

// ---- scales

// A group's amax from its lanes' largest |x|: at least `floor`, infinity counted as the largest float.
GK_DEVICE float settle_amax(float amax, float floor) { return fminf(fmaxf(amax, floor), FLOAT_MAX); }

// Biased exponent of the least power of two not below amax / 448 (= 1.75 * 2^8) or amax / 6 (= 1.5 * 2^2).
GK_DEVICE u32 ceil_exponent_e4m3(float amax) {
  const u32 bits = __float_as_uint(amax);
  return (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);
}
GK_DEVICE u32 ceil_exponent_e2m1(float amax) {
  const u32 bits = __float_as_uint(amax);
  return (bits >> 23) - 2 + ((bits & 0x7fffff) > 0x400000);
}

// ---- inputs, and bytes at any address

// Element i of a row.
template <i32 DTYPE>
GK_DEVICE float load_element(const void* row, i64 i) {
  if (DTYPE == GK_FP32) return static_cast<const float*>(row)[i];
  if (DTYPE == GK_BF16) return decode_bf16(static_cast<const u16*>(row)[i]);
  return decode_e4m3(static_cast<const u8*>(row)[i]);
}

// DTYPE is GK_FP32 or GK_BF16.
template <i32 DTYPE>
GK_DEVICE void store_element(void* row, i64 i, float x) {
  if (DTYPE == GK_FP32) static_cast<float*>(row)[i] = x;
  else static_cast<u16*>(row)[i] = encode_bf16(x);
}

template <i32 DTYPE>
GK_DEVICE const void* advance(const void* base, i64 elements) {
  return static_cast<const u8*>(base) + elements * (DTYPE == GK_FP32 ? 4 : DTYPE == GK_BF16 ? 2 : 1);
}

// `COUNT` neighbouring elements from number `first`, in one access where four of them are aligned.
template <i32 DTYPE, i32 COUNT>
GK_DEVICE void load_elements(const void* row, i32 first, float (&x)[COUNT]) {
  const void* from = advance<DTYPE>(row, first);
  if constexpr (COUNT == 4 && DTYPE == GK_FP32) {
    if (is_aligned<float4>(from)) {
      const float4 v = *static_cast<const float4*>(from);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      return;
    }
  }
  if constexpr (COUNT == 4 && DTYPE == GK_BF16) {
    if (is_aligned<uint2>(from)) {
      const uint2 v = *static_cast<const uint2*>(from);
      x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
      x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
      return;
    }
  }
  for (i32 i = 0; i < COUNT; ++i) x[i] = load_element<DTYPE>(from, i);
}

// `BYTES` little-endian bytes of `word` to any address, in one access where it is aligned.
template <i32 BYTES>
GK_DEVICE void store_word(u8* to, u32 word) {
  if (BYTES == 4 && is_aligned<u32>(to)) {
    *reinterpret_cast<u32*>(to) = word;
  } else if (BYTES == 2 && is_aligned<u16>(to)) {
    *reinterpret_cast<u16*>(to) = static_cast<u16>(word);
  } else {
    for (i32 i = 0; i < BYTES; ++i) to[i] = static_cast<u8>(word >> 8 * i);
  }
}

template <i32 BYTES>
GK_DEVICE u32 load_word(const u8* from) {
  if (BYTES == 4 && is_aligned<u32>(from)) return *reinterpret_cast<const u32*>(from);
  if (BYTES == 2 && is_aligned<u16>(from)) return *reinterpret_cast<const u16*>(from);
  u32 word = 0;
  for (i32 i = 0; i < BYTES; ++i) word |= static_cast<u32>(from[i]) << 8 * i;
  return word;
}

// `COUNT` (1, 2 or 4) neighbouring values as e4m3 codes.
template <i32 COUNT>
GK_DEVICE void store_e4m3(u8* to, const float (&x)[COUNT]) {
  u32 word = 0;
  for (i32 i = 0; i < COUNT; ++i) word |= static_cast<u32>(encode_e4m3(x[i])) << 8 * i;
  store_word<COUNT>(to, word);
}

// `COUNT` neighbouring values as floats or bf16 to any address, in one access where four of them are aligned.
template <i32 DTYPE, i32 COUNT>
GK_DEVICE void store_plain(u8* to, const float (&x)[COUNT]) {
  u32 words[COUNT];
  for (i32 i = 0; i < COUNT; ++i) words[i] = DTYPE == GK_FP32 ? __float_as_uint(x[i]) : encode_bf16(x[i]);
  if constexpr (COUNT == 4 && DTYPE == GK_FP32) {
    if (is_aligned<uint4>(to)) {
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      return;
    }
  }
  if constexpr (COUNT == 4 && DTYPE == GK_BF16) {
    if (is_aligned<uint2>(to)) {
      *reinterpret_cast<uint2*>(to) = {words[0] | words[1] << 16, words[2] | words[3] << 16};
      return;
    }
  }
  constexpr i32 BYTES = DTYPE == GK_FP32 ? 4 : 2;
  for (i32 i = 0; i < COUNT; ++i) store_word<BYTES>(to + BYTES * i, words[i]);
}

}  // namespace gk
