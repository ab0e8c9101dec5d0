// does    encode one token's latent and rope part a warp and write the record at its slot
// reads   c [tokens, RANK] and rope [tokens, ROPE] of dtype SOURCE, rows *_stride elements apart;
//         slot i64 [tokens], -1 skips the token; scale is the cache's one scale of format fp8
// writes  pages u8, page_stride bytes apart; nothing for a slot outside 0..num_slots-1
// launch  grid ceil(tokens / 4), 128 threads
// variant: FORMAT=0 SOURCE=0 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: FORMAT=1 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: FORMAT=2 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: FORMAT=4 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: FORMAT=4 SOURCE=0 RANK=512 ROPE=64 BLOCK_SIZE=64
#include "codec.cuh"

static_assert(FORMAT != GK_FP8_DS_MLA || RANK % 128 == 0, "a warp holds one tile of 128 values");

using namespace gk;

constexpr i32 LANE_VALUES = RANK % 4 == 0 && ROPE % 4 == 0 ? 4 : 1;
constexpr i32 SPAN = LANE_VALUES * WARP;  // values a warp holds at once
constexpr i32 ROPE_START = RANK + 4 * (RANK / 128);  // of an fp8_ds_mla record
constexpr i32 TOKEN_BYTES = FORMAT == GK_FP8_DS_MLA ? ROPE_START + 2 * ROPE
                            : (RANK + ROPE) * (FORMAT == GK_FP32 ? 4 : FORMAT == GK_BF16 ? 2 : 1);

// One part of the record, `width` values from byte `to` on, in a format that treats every value alike.
template <i32 PART_FORMAT>
GK_DEVICE void store_part(u8* to, const void* from, i32 width, float scale) {
  for (i32 first = lane_index() * LANE_VALUES; first < width; first += SPAN) {
    float x[LANE_VALUES];
    load_elements<SOURCE>(from, first, x);
    if (PART_FORMAT == GK_FP8) {
      for (i32 i = 0; i < LANE_VALUES; ++i) x[i] = x[i] / scale;
      store_e4m3(to + first, x);
    } else {
      store_plain<PART_FORMAT>(to + first * (PART_FORMAT == GK_FP32 ? 4 : 2), x);
    }
  }
}

// The latent as e4m3 in tiles of 128, each with the scale max(amax / 448, 2^-126), which a zero tile needs against NaN.
GK_DEVICE void store_tiles(u8* record, const void* c) {
  for (i32 first = lane_index() * 4; first < RANK; first += 128) {
    float x[4], amax = 0.0f;
    load_elements<SOURCE>(c, first, x);
    for (i32 i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(x[i]));  // a NaN loses
    const float scale = fmaxf(settle_amax(warp_max(amax), 0.0f) / E4M3_MAX, FLOAT_TINY);
    for (i32 i = 0; i < 4; ++i) x[i] = x[i] / scale;
    store_e4m3(record + first, x);
    if (lane_index() == 0) store_word<4>(record + RANK + first / 128 * 4, __float_as_uint(scale));
  }
}

extern "C" __global__ void __launch_bounds__(128)
store_latent(const void* c, i64 c_stride, const void* rope, i64 rope_stride, u8* pages, i64 page_stride,
             const i64* slots, i64 num_slots, i32 tokens, float scale) {
  const i32 token = blockIdx.x * warps_in_block() + warp_index();
  if (token >= tokens) return;
  const i64 slot = slots[token];
  if (slot < 0 || slot >= num_slots) return;
  const TokenPlace place = token_place(slot, BLOCK_SIZE);
  u8* record = pages + place.page * page_stride + static_cast<i64>(place.offset) * TOKEN_BYTES;
  const void* c_row = advance<SOURCE>(c, token * c_stride);
  const void* rope_row = advance<SOURCE>(rope, token * rope_stride);
  if (FORMAT == GK_FP8_DS_MLA) {
    store_tiles(record, c_row);
    store_part<GK_BF16>(record + ROPE_START, rope_row, ROPE, 1.0f);
  } else {
    constexpr i32 VALUE_BYTES = FORMAT == GK_FP32 ? 4 : FORMAT == GK_BF16 ? 2 : 1;
    store_part<FORMAT>(record, c_row, RANK, scale);
    store_part<FORMAT>(record + VALUE_BYTES * RANK, rope_row, ROPE, scale);
  }
}
