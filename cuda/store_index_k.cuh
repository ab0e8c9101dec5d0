// Index K of some tokens on its way into pages. Wants the defines INDEX_K_FORMAT, SOURCE, HEAD_DIM, BLOCK_SIZE,
// LINEAR_SCALE.
#pragma once
#include "store.cuh"

namespace gk {

struct IndexKStore {
  static_assert(INDEX_K_FORMAT < GK_FP8 || HEAD_DIM % 128 == 0 ||
                    (INDEX_K_FORMAT == GK_FP8 && (HEAD_DIM == 32 || HEAD_DIM == 64)),
                "a warp quantises 128 values at a time, or one short FP8 group");
  static constexpr i32 TOKENS = 4;  // a warp
  static constexpr i32 LANE_VALUES = HEAD_DIM % 128 == 0 ? 4 : HEAD_DIM % 64 == 0 ? 2 : 1;
  static constexpr i32 SPAN = LANE_VALUES * WARP;  // values a warp holds at once on the path for any address
  static constexpr i32 VALUE_BYTES = INDEX_K_FORMAT == GK_FP32 ? 4 * HEAD_DIM : INDEX_K_FORMAT == GK_BF16 ? 2 * HEAD_DIM
                                     : INDEX_K_FORMAT == GK_FP8 ? HEAD_DIM : HEAD_DIM / 2;
  static constexpr i32 SCALE_BYTES = INDEX_K_FORMAT == GK_FP8   ? 4 * (HEAD_DIM / SPAN)
                                     : INDEX_K_FORMAT == GK_FP4 ? HEAD_DIM / 32 : 0;

  const void* k;
  i64 k_stride;
  u8* pages;
  i64 page_stride;
  const i64* slots;
  i64 num_slots;
  i32 tokens;
  float amax_floor;

  // Store TOKENS tokens from `first` on. A whole warp calls it.
  GK_DEVICE void store(i32 first) const {
    if (HEAD_DIM % 128 == 0 && in_vectors<SOURCE>(k, k_stride, pages, page_stride)) {
      store_vectors(first);
      return;
    }
    for (i32 token = first; token < min(first + TOKENS, tokens); ++token) store_token(token);
  }

 private:
  GK_DEVICE u8* values_at(TokenPlace place) const {
    return pages + place.page * page_stride + static_cast<i64>(place.offset) * VALUE_BYTES;
  }
  GK_DEVICE u8* scales_at(TokenPlace place) const {
    return pages + place.page * page_stride + static_cast<i64>(BLOCK_SIZE) * VALUE_BYTES +
           static_cast<i64>(place.offset) * SCALE_BYTES;
  }

  // Divides values of a group, whose largest magnitude is `amax`, by its scale, which is returned.
  template <i32 COUNT>
  GK_DEVICE float scale_fp8(float (&x)[COUNT], float amax) const {
    const float settled = settle_amax(amax, amax_floor);
    if (LINEAR_SCALE) {
      const float scale = settled / E4M3_MAX;
      divide(x, scale, amax);
      return scale;
    }
    const u32 exponent = ceil_exponent_e4m3(settled);
    for (i32 i = 0; i < COUNT; ++i) x[i] = x[i] * power_of_two(254 - exponent);
    return power_of_two(exponent);
  }

  // 8 lanes a token; its slot is on the way while its values are.
  GK_DEVICE void store_vectors(i32 first) const {
    const i32 token = first + lane_index() / 8, part = lane_index() % 8;
    const i64 slot = token < tokens ? slots[token] : -1;
    const void* row = advance<SOURCE>(k, min(token, tokens - 1) * k_stride);
    const bool there = slot >= 0 && slot < num_slots;
    const TokenPlace place = token_place(there ? slot : 0, BLOCK_SIZE);
    for (i32 group = 0; group < HEAD_DIM; group += 128) {
      float x[16];
      load_sixteen<SOURCE>(advance<SOURCE>(row, group + 16 * part), x);
      if (INDEX_K_FORMAT == GK_FP8) {
        const float scale = scale_fp8(x, warp_max(largest_magnitude(x), 8));
        if (there) *reinterpret_cast<uint4*>(values_at(place) + group + 16 * part) = encode_e4m3(x);
        if (there && part == 0) store_word<4>(scales_at(place) + group / 32, __float_as_uint(scale));
      } else if (INDEX_K_FORMAT == GK_FP4) {
        const u32 exponent = ceil_exponent_e2m1(settle_amax(warp_max(largest_magnitude(x), 2), amax_floor));
        uint2 codes = {0, 0};
        for (i32 i = 0; i < 8; ++i) {
          codes.x |= static_cast<u32>(encode_e2m1(x[i] * power_of_two(254 - exponent))) << 4 * i;
          codes.y |= static_cast<u32>(encode_e2m1(x[i + 8] * power_of_two(254 - exponent))) << 4 * i;
        }
        if (there) *reinterpret_cast<uint2*>(values_at(place) + group / 2 + 8 * part) = codes;
        if (there && part % 2 == 0) scales_at(place)[group / 32 + part / 2] = static_cast<u8>(exponent);
      } else if (there) {
        store_sixteen<INDEX_K_FORMAT>(values_at(place) + (group + 16 * part) * (INDEX_K_FORMAT == GK_FP32 ? 4 : 2), x);
      }
    }
  }

  GK_DEVICE void store_token(i32 token) const {
    const i64 slot = slots[token];
    if (slot < 0 || slot >= num_slots) return;
    const TokenPlace place = token_place(slot, BLOCK_SIZE);
    const void* row = advance<SOURCE>(k, token * k_stride);
    for (i32 first = lane_index() * LANE_VALUES; first < HEAD_DIM; first += SPAN) {
      float x[LANE_VALUES];
      load_elements<SOURCE>(row, first, x);
      if (INDEX_K_FORMAT == GK_FP8) {
        const float scale = scale_fp8(x, warp_max(largest_magnitude(x)));
        store_e4m3(values_at(place) + first, x);
        if (lane_index() == 0) store_word<4>(scales_at(place) + first / SPAN * 4, __float_as_uint(scale));
      } else if (INDEX_K_FORMAT == GK_FP4) {  // 8 lanes of 4 values share an exponent
        const u32 exponent = ceil_exponent_e2m1(settle_amax(warp_max(largest_magnitude(x), 8), amax_floor));
        u32 codes = 0;
        for (i32 i = 0; i < LANE_VALUES; ++i)
          codes |= static_cast<u32>(encode_e2m1(x[i] * power_of_two(254 - exponent))) << 4 * i;
        store_word<2>(values_at(place) + first / 2, codes);
        if (lane_index() % 8 == 0) scales_at(place)[first / 32] = static_cast<u8>(exponent);
      } else {
        store_plain<INDEX_K_FORMAT>(values_at(place) + first * (VALUE_BYTES / HEAD_DIM), x);
      }
    }
  }
};

}  // namespace gk
