// A latent with its rope part on its way into a page. Wants the defines LATENT_FORMAT, SOURCE, RANK, ROPE, BLOCK_SIZE.
#pragma once
#include "store.cuh"

namespace gk {

struct LatentStore {
  static_assert(LATENT_FORMAT != GK_FP8_DS_MLA || RANK % 128 == 0, "a warp holds one tile of 128 values");
  static constexpr i32 LANE_VALUES = RANK % 4 == 0 && ROPE % 4 == 0 ? 4 : 1;
  static constexpr i32 SPAN = LANE_VALUES * WARP;  // values a warp holds at once on the path for any address
  static constexpr i32 ROPE_START = RANK + 4 * (RANK / 128);  // of an fp8_ds_mla record
  static constexpr i32 PART_FORMAT = LATENT_FORMAT == GK_FP8_DS_MLA ? GK_BF16 : LATENT_FORMAT;  // of the rope part
  static constexpr i32 VALUE_BYTES = LATENT_FORMAT == GK_FP32 ? 4 : LATENT_FORMAT == GK_BF16 ? 2 : 1;
  static constexpr i32 PART_BYTES = PART_FORMAT == GK_FP32 ? 4 : PART_FORMAT == GK_BF16 ? 2 : 1;
  static constexpr i32 ROPE_AT = LATENT_FORMAT == GK_FP8_DS_MLA ? ROPE_START : RANK * VALUE_BYTES;
  static constexpr i32 TOKEN_BYTES = ROPE_AT + ROPE * PART_BYTES;
  static constexpr bool VECTORS = RANK % 128 == 0 && ROPE % 16 == 0 && ROPE_AT % 16 == 0;

  const void* c;
  i64 c_stride;
  const void* rope;
  i64 rope_stride;
  u8* pages;
  i64 page_stride;
  const i64* slots;
  i64 num_slots;
  i32 tokens;
  float scale;  // the cache's one scale of format fp8

  // Store one token. A whole warp calls it.
  GK_DEVICE void store(i32 token) const {
    if (token >= tokens) return;
    const i64 slot = slots[token];
    const void* c_row = advance<SOURCE>(c, token * c_stride);
    const void* rope_row = advance<SOURCE>(rope, token * rope_stride);
    const bool there = slot >= 0 && slot < num_slots;
    const TokenPlace place = token_place(there ? slot : 0, BLOCK_SIZE);
    u8* record = pages + place.page * page_stride + static_cast<i64>(place.offset) * TOKEN_BYTES;
    if (VECTORS && in_vectors<SOURCE>(c, c_stride, pages, page_stride) &&
        in_vectors<SOURCE>(rope, rope_stride, pages, page_stride)) {
      store_vectors(record, c_row, rope_row, there);
    } else if (there) {
      if (LATENT_FORMAT == GK_FP8_DS_MLA) store_tiles(record, c_row);
      else store_part(record, c_row, RANK);
      store_part(record + ROPE_AT, rope_row, ROPE);
    }
  }

 private:
  // The scale of a tile: max(amax / 448, 2^-126), which a zero tile needs against NaN.
  GK_DEVICE static float tile_scale(float amax) { return fmaxf(settle_amax(amax, 0.0f) / E4M3_MAX, FLOAT_TINY); }

  // 16 values a lane; the values are on the way while the token's slot is. A rope part that is stored as it came is
  // copied by the lanes from the last one down, 16 bytes each.
  GK_DEVICE void store_vectors(u8* record, const void* c_row, const void* rope_row, bool there) const {
    constexpr bool COPY_ROPE = PART_FORMAT == SOURCE && ROPE * PART_BYTES <= 16 * WARP;
    const i32 lane = lane_index(), turned = WARP - 1 - lane;
    uint4 copied = {0, 0, 0, 0};
    if (COPY_ROPE && 16 * turned < ROPE * PART_BYTES) copied = static_cast<const uint4*>(rope_row)[turned];
    for (i32 pass = 0; pass < RANK; pass += 16 * WARP) {
      const i32 first = pass + 16 * lane;
      float x[16] = {};
      if (first < RANK) load_sixteen<SOURCE>(advance<SOURCE>(c_row, first), x);
      if (LATENT_FORMAT == GK_FP8_DS_MLA) {
        const float amax = warp_max(largest_magnitude(x), 8), by = tile_scale(amax);
        divide(x, by, amax);
        if (there && first < RANK) *reinterpret_cast<uint4*>(record + first) = encode_e4m3(x);
        if (there && first < RANK && lane % 8 == 0) store_word<4>(record + RANK + first / 32, __float_as_uint(by));
      } else if (there && first < RANK) {
        store_plain_values<LATENT_FORMAT>(record, first, x);
      }
    }
    if constexpr (COPY_ROPE) {
      if (there && 16 * turned < ROPE * PART_BYTES) reinterpret_cast<uint4*>(record + ROPE_AT)[turned] = copied;
    } else {
      for (i32 first = 16 * lane; there && first < ROPE; first += 16 * WARP) {
        float x[16];
        load_sixteen<SOURCE>(advance<SOURCE>(rope_row, first), x);
        store_plain_values<PART_FORMAT>(record + ROPE_AT, first, x);
      }
    }
  }

  // Values of a format that treats every value alike, from number `first` of a part at `to` on.
  template <i32 VALUE_FORMAT>
  GK_DEVICE void store_plain_values(u8* to, i32 first, float (&x)[16]) const {
    if constexpr (VALUE_FORMAT == GK_FP8) {
      divide(x, scale, largest_magnitude(x));
      *reinterpret_cast<uint4*>(to + first) = encode_e4m3(x);
    } else {
      store_sixteen<VALUE_FORMAT>(to + first * PART_BYTES, x);
    }
  }

  // One part of the record, `width` values from byte `to` on, in a format that treats every value alike.
  GK_DEVICE void store_part(u8* to, const void* from, i32 width) const {
    for (i32 first = lane_index() * LANE_VALUES; first < width; first += SPAN) {
      float x[LANE_VALUES];
      load_elements<SOURCE>(from, first, x);
      if (PART_FORMAT == GK_FP8) {
        for (i32 i = 0; i < LANE_VALUES; ++i) x[i] = x[i] / scale;
        store_e4m3(to + first, x);
      } else {
        store_plain<PART_FORMAT>(to + first * PART_BYTES, x);
      }
    }
  }

  GK_DEVICE static void store_tiles(u8* record, const void* c_row) {
    for (i32 first = lane_index() * 4; first < RANK; first += 128) {
      float x[4];
      load_elements<SOURCE>(c_row, first, x);
      const float amax = warp_max(largest_magnitude(x)), by = tile_scale(amax);
      divide(x, by, amax);
      store_e4m3(record + first, x);
      if (lane_index() == 0) store_word<4>(record + RANK + first / 128 * 4, __float_as_uint(by));
    }
  }
};

}  // namespace gk
