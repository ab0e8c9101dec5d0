// Values on their way into pages, 16 a lane: what the stores of index K and of latents share.
//
// Each store has a path that moves 16 values a lane, taken where widths and addresses are multiples of 16 bytes, and
// one for any address. Both give the same bytes.
#pragma once
#include "codec.cuh"

namespace gk {

// ---- sixteen neighbouring values of a lane, at multiples of 16 bytes

template <i32 DTYPE>
GK_DEVICE void load_sixteen(const void* from, float (&x)[16]) {
  uint4 v[DTYPE == GK_FP32 ? 4 : 2];
  for (i32 i = 0; i < (DTYPE == GK_FP32 ? 4 : 2); ++i) v[i] = static_cast<const uint4*>(from)[i];
  const u32* words = reinterpret_cast<const u32*>(v);
  for (i32 i = 0; i < 16; ++i)
    x[i] = DTYPE == GK_FP32 ? __uint_as_float(words[i])
                             : __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}

GK_DEVICE uint4 encode_e4m3(const float (&x)[16]) {
  u32 words[4];
  for (i32 i = 0; i < 4; ++i) words[i] = encode_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  return {words[0], words[1], words[2], words[3]};
}

template <i32 DTYPE>
GK_DEVICE void store_sixteen(u8* to, const float (&x)[16]) {
  uint4* vectors = reinterpret_cast<uint4*>(to);
  u32 words[DTYPE == GK_FP32 ? 16 : 8];
  for (i32 i = 0; i < (DTYPE == GK_FP32 ? 16 : 8); ++i)
    words[i] = DTYPE == GK_FP32 ? __float_as_uint(x[i]) : encode_bf16(x[2 * i]) | encode_bf16(x[2 * i + 1]) << 16;
  for (i32 i = 0; i < (DTYPE == GK_FP32 ? 4 : 2); ++i)
    vectors[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
}

template <i32 COUNT>
GK_DEVICE float largest_magnitude(const float (&x)[COUNT]) {
  float amax = 0.0f;
  for (i32 i = 0; i < COUNT; ++i) amax = fmaxf(amax, fabsf(x[i]));  // a NaN loses
  return amax;
}

// Divide values by a scale for e4m3, each quotient rounded as a division would round it: with the inverse rounded to
// nearest, one correction makes up for it (that its codes are a division's was checked at every tie between two codes).
// True divisions where the correction could underflow, or has no remainder to go by, as of infinity. `largest`: the
// largest magnitude among x.
template <i32 COUNT>
GK_DEVICE void divide(float (&x)[COUNT], float by, float largest) {
  if (by < 0x1p-80f || by > 0x1p+100f || largest > by * 1024.0f) {
    for (i32 i = 0; i < COUNT; ++i) x[i] = x[i] / by;
    return;
  }
  const float inverse = __frcp_rn(by);
  for (i32 i = 0; i < COUNT; ++i) {
    const float quotient = x[i] * inverse;
    x[i] = copysignf(fmaf(fmaf(-by, quotient, x[i]), inverse, quotient), x[i]);  // the sum of two zeros has no sign
  }
}

// Everything at multiples of 16 bytes: rows of `from` of `DTYPE`, and pages.
template <i32 DTYPE>
GK_DEVICE bool in_vectors(const void* from, i64 stride, const u8* pages, i64 page_stride) {
  const i64 row_bytes = stride * (DTYPE == GK_FP32 ? 4 : 2);
  return ((reinterpret_cast<i64>(from) | row_bytes | reinterpret_cast<i64>(pages) | page_stride) & 15) == 0;
}

}  // namespace gk
