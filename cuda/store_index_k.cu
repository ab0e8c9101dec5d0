// does    quantise one token's index K a warp and write it at its slot; FP8 and FP4 scales go behind the page's values
// reads   k [tokens, HEAD_DIM] of dtype SOURCE, rows k_stride elements apart; slot i64 [tokens], -1 skips the token
// writes  pages u8, page_stride bytes apart; nothing for a slot outside 0..num_slots-1
// launch  grid ceil(tokens / 4), 128 threads
// variant: FORMAT=0 SOURCE=0 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: FORMAT=1 SOURCE=1 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: FORMAT=2 SOURCE=0 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: FORMAT=2 SOURCE=1 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=1
// variant: FORMAT=3 SOURCE=1 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
#include "codec.cuh"

static_assert(FORMAT < GK_FP8 || HEAD_DIM % 128 == 0 || (FORMAT == GK_FP8 && (HEAD_DIM == 32 || HEAD_DIM == 64)),
              "a warp quantises 128 values at a time, or one short FP8 group");

using namespace gk;

constexpr i32 LANE_VALUES = HEAD_DIM % 128 == 0 ? 4 : HEAD_DIM % 64 == 0 ? 2 : 1;
constexpr i32 SPAN = LANE_VALUES * WARP;  // values a warp holds at once
constexpr i32 VALUE_BYTES = FORMAT == GK_FP32 ? 4 * HEAD_DIM : FORMAT == GK_BF16 ? 2 * HEAD_DIM
                            : FORMAT == GK_FP8 ? HEAD_DIM : HEAD_DIM / 2;
constexpr i32 SCALE_BYTES = FORMAT == GK_FP8 ? 4 * (HEAD_DIM / SPAN) : FORMAT == GK_FP4 ? HEAD_DIM / 32 : 0;

GK_DEVICE float largest(const float (&x)[LANE_VALUES]) {
  float amax = 0.0f;
  for (i32 i = 0; i < LANE_VALUES; ++i) amax = fmaxf(amax, fabsf(x[i]));  // a NaN loses
  return amax;
}

GK_DEVICE void store_fp8(u8* values, u8* scales, i32 first, float (&x)[LANE_VALUES], float amax_floor) {
  const float amax = settle_amax(warp_max(largest(x)), amax_floor);
  float scale;
  if (LINEAR_SCALE) {
    scale = amax / E4M3_MAX;
    for (i32 i = 0; i < LANE_VALUES; ++i) x[i] = x[i] / scale;
  } else {
    const u32 exponent = ceil_exponent_e4m3(amax);
    scale = power_of_two(exponent);
    for (i32 i = 0; i < LANE_VALUES; ++i) x[i] = x[i] * power_of_two(254 - exponent);
  }
  store_e4m3(values + first, x);
  if (lane_index() == 0) store_word<4>(scales + first / SPAN * 4, __float_as_uint(scale));
}

// 8 lanes of 4 values share an exponent.
GK_DEVICE void store_fp4(u8* values, u8* scales, i32 first, const float (&x)[LANE_VALUES], float amax_floor) {
  const u32 exponent = ceil_exponent_e2m1(settle_amax(warp_max(largest(x), 8), amax_floor));
  u32 codes = 0;
  for (i32 i = 0; i < LANE_VALUES; ++i)
    codes |= static_cast<u32>(encode_e2m1(x[i] * power_of_two(254 - exponent))) << 4 * i;
  store_word<2>(values + first / 2, codes);
  if (lane_index() % 8 == 0) scales[first / 32] = static_cast<u8>(exponent);
}

extern "C" __global__ void __launch_bounds__(128)
store_index_k(const void* k, i64 k_stride, u8* pages, i64 page_stride, const i64* slots, i64 num_slots, i32 tokens,
              float amax_floor) {
  const i32 token = blockIdx.x * warps_in_block() + warp_index();
  if (token >= tokens) return;
  const i64 slot = slots[token];
  if (slot < 0 || slot >= num_slots) return;
  const TokenPlace place = token_place(slot, BLOCK_SIZE);
  u8* page = pages + place.page * page_stride;
  u8* values = page + static_cast<i64>(place.offset) * VALUE_BYTES;
  u8* scales = page + static_cast<i64>(BLOCK_SIZE) * VALUE_BYTES + static_cast<i64>(place.offset) * SCALE_BYTES;
  const void* row = advance<SOURCE>(k, token * k_stride);
  for (i32 first = lane_index() * LANE_VALUES; first < HEAD_DIM; first += SPAN) {
    float x[LANE_VALUES];
    load_elements<SOURCE>(row, first, x);
    if (FORMAT == GK_FP8) store_fp8(values, scales, first, x, amax_floor);
    else if (FORMAT == GK_FP4) store_fp4(values, scales, first, x, amax_floor);
    else store_plain<FORMAT>(values + first * (VALUE_BYTES / HEAD_DIM), x);
  }
}
