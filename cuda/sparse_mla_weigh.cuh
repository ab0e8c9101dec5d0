// Of sparse_mla_wgmma.cuh: scores, and the weights that they give.
#pragma once

// ---- scores: a thread has rows g and g + 8 of its warp's 16, g = lane / 4: element i of a fragment is of row
// g + i / 2 % 2 * 8 and column i / 4 * 8 + lane % 4 * 2 + i % 2

// d = (add ? d : 0) + q . keys^T over PANELS_EACH panels from `panel` on.
template <i32 PANELS_EACH, bool OF_BF16>
GK_DEVICE void multiply_panels(float (&d)[32], u64 q, u64 keys, i32 panel, bool add) {
#pragma unroll
  for (i32 step = 0; step < 4 * PANELS_EACH; ++step) {
    const u64 at = (panel + step / 4) * (PANEL_BYTES >> 4) + step % 4 * 2;
    multiply_rows<OF_BF16>(d, q + at, keys + at, add || step > 0);
  }
}

GK_DEVICE void score_tile(float (&score)[32], float (&part)[32], Shared& s, i32 stage) {
  const u64 q = rows_of_128_bytes(s.q), keys = rows_of_128_bytes(s.keys[stage]);
  products_begin();
  multiply_panels<1, BF16_ROPE>(score, q, keys, VALUE_PANELS, false);
  if (!SCALED) multiply_panels<VALUE_PANELS, BF16>(score, q, keys, 0, true);
  if (SCALED) {
#pragma unroll
    for (i32 t = 0; t < 4; ++t) {
      if (t > 0) products_begin();
      multiply_panels<2, false>(part, q, keys, 2 * t, false);
      products_commit();
      products_wait<0>();
#pragma unroll
      for (i32 j = 0; j < 8; ++j) {
        const float2 scale = *reinterpret_cast<float2*>(&s.tile_scale[stage][t][8 * j + lane_index() % 4 * 2]);
#pragma unroll
        for (i32 i = 4 * j; i < 4 * j + 4; ++i) score[i] += part[i] * (i % 2 ? scale.y : scale.x);
      }
    }
  } else {
    products_commit();
    products_wait<0>();
  }
}

// Scores become weights, relative to the largest score of their row so far.
GK_DEVICE void weigh_tile(float (&score)[32], const float (&factor)[2], float (&largest)[2], float (&sum)[2],
                          float (&rescale)[2], u64 there) {
  if (there != ~u64(0)) {
    there >>= lane_index() % 4 * 2;
#pragma unroll
    for (i32 i = 0; i < 32; ++i) score[i] = there >> (i / 4 * 8 + i % 2) & 1 ? score[i] : negative_infinity();
  }
  float most[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
  for (i32 i = 0; i < 32; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    most[half] = fmaxf(warp_max(most[half], 4) * factor[half], largest[half]);
    rescale[half] = largest[half] == most[half] ? 1.0f : exp2_approximate(largest[half] - most[half]);
    sum[half] *= rescale[half];
    largest[half] = most[half];
    most[half] = (most[half] == negative_infinity() ? 0.0f : most[half]) - WEIGHT_BITS;
  }
#pragma unroll
  for (i32 i = 0; i < 32; ++i) {
    score[i] = exp2_approximate(fmaf(score[i], factor[i / 2 % 2], -most[i / 2 % 2]));
    sum[i / 2 % 2] += score[i];
  }
}

GK_DEVICE float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Warp w: the scales of tile w of all keys in fp16, relative to the power of two at or under the largest one so far.
GK_DEVICE void relate_scales(Shared& s, i32 stage, float& unit) {
  const i32 tile = warp_index(), lane = lane_index();
  const float2 scale = reinterpret_cast<const float2*>(s.tile_scale[stage][tile])[lane];
  const float most = fmaxf(warp_max(fmaxf(scale.x, scale.y)), unit);
  const float now = __uint_as_float(__float_as_uint(most) & 0x7f800000u), by = inverse_power(now) * SCALE_TOP;
  s.half_scale[tile][lane] = pack_f16(scale.x * by, scale.y * by);
  if (lane == 0) s.unit_change[tile] = unit * inverse_power(now);
  unit = now;
}

GK_DEVICE u32 pack_weights(float low, float high) { return BF16 ? pack_bf16(low, high) : pack_f16(low, high); }

GK_DEVICE void weigh_tiles(Shared& s, i32 tiles, const float (&factor)[2]) {
  const i32 row = warp_index() * 16 + lane_index() / 4;
  float largest[2] = {negative_infinity(), negative_infinity()}, sum[2] = {}, rescale[2];
  float score[32] = {}, part[32] = {}, unit = FLOAT_TINY * SCALE_TOP;
#pragma unroll 1
  for (i32 n = 0; n < tiles; ++n) {
    const i32 stage = n % STAGES;
    barrier_wait(&s.keys_full[stage], n / STAGES & 1);
    score_tile(score, part, s, stage);
    weigh_tile(score, factor, largest, sum, rescale, s.there[stage]);
    barrier_wait(&s.weight_empty, (n + 1) & 1);
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      s.weight[i][threadIdx.x] = {pack_weights(score[8 * i], score[8 * i + 1]),
                                  pack_weights(score[8 * i + 2], score[8 * i + 3]),
                                  pack_weights(score[8 * i + 4], score[8 * i + 5]),
                                  pack_weights(score[8 * i + 6], score[8 * i + 7])};
    if (lane_index() % 4 == 0) s.rescale[row] = rescale[0], s.rescale[row + 8] = rescale[1];
    if (SCALED) relate_scales(s, stage, unit);
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&s.weight_full);
  }
  barrier_wait(&s.weight_empty, (tiles + 1) & 1);
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    sum[half] = warp_sum(sum[half], 4);
    if (lane_index() % 4 == 0) s.sum[row + 8 * half] = sum[half], s.largest[row + 8 * half] = largest[half];
  }
  if (lane_index() == 0) s.unit_change[warp_index()] = unit / SCALE_TOP;
  __syncwarp();
  if (lane_index() == 0) barrier_arrive(&s.weight_full);
}
