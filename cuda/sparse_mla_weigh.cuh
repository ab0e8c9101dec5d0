// Of sparse_mla_wgmma.cuh: scores, and the weights that they give.
#pragma once

// ---- scores: a thread has rows g and g + 8 of its warp's 16, g = lane / 4: element i of a fragment is of row
// g + i / 2 % 2 * 8 and column i / 4 * 8 + lane % 4 * 2 + i % 2

using Scores = float[16];

// The fragments of a panel of queries, 16 columns each; `q` is where the lane finds its row of the first one.
template <i32 PANEL>
GK_DEVICE void load_panel(uint4 (&a)[4], u32 q) {
#pragma unroll
  for (i32 step = 0; step < 4; ++step) a[step] = load_matrices<PANEL * QUERY_PANEL>(q ^ 32 * step);
}

GK_DEVICE u32 row_of_queries(const Shared& s) {
  const i32 lane = lane_index(), row = warp_index() * 16 + lane / 8 % 2 * 8 + lane % 8;
  return shared_address(s.q) + row * 128 + (lane / 16 ^ lane % 8) * 16;
}

// The panel of rope parts, whose fragments are in `a`, then the others. Scales do not apply to rope parts. While the
// products of one panel run, the fragments of the next one are loaded.
template <i32 N = 0>
GK_DEVICE void score_panels(Scores& score, Scores& rope, uint4 (&a)[2][4], u32 q, u64 keys) {
  const u64 panel = keys + (N == 0 ? VALUE_PANELS : N - 1) * (KEY_PANEL >> 4);
  products_begin();
#pragma unroll
  for (i32 step = 0; step < 4; ++step) {
    if (N == 0) multiply_rows<BF16_ROPE>(SCALED ? rope : score, a[0][step], panel + 2 * step, step > 0);
    else multiply_rows<BF16>(score, a[N % 2][step], panel + 2 * step, !SCALED || N > 1 || step > 0);
  }
  products_commit();
  if (N > 0) products_wait_but_one();
  if constexpr (N < VALUE_PANELS) {
    load_panel<N>(a[(N + 1) % 2], q);
    score_panels<N + 1>(score, rope, a, q, keys);
  }
}

GK_DEVICE void score_tile(Scores& score, Scores& rope, const Shared& s, i32 stage) {
  const u32 q = row_of_queries(s);
  uint4 a[2][4];
  load_panel<VALUE_PANELS>(a[0], q);
  score_panels(score, rope, a, q, rows_of_128_bytes(s.keys[stage]));
  products_wait(score);
  if (SCALED) products_wait(rope);
}

// The units of the thread's keys: of keys 8 * j + lane % 4 * 2 and + 1.
using Units = float2[KEY_TILE / 8];

// The power of two under the largest unit so far, `largest`, and what it was before by what it is.
GK_DEVICE float settle_unit(const float (&unit)[KEY_TILE], float& largest) {
  const float before = largest;
  largest = power_under(fmaxf(warp_max(unit[lane_index()]), before));
  return before * inverse_power(largest);
}

// Scores become weights, relative to the reference of their row.
GK_DEVICE void weigh_tile(Scores& score, const float (&factor)[2], float (&reference)[2], float (&sum)[2],
                          float (&rescale)[2], u32 there) {
  if (there != ~u32(0)) {
    there >>= lane_index() % 4 * 2;
#pragma unroll
    for (i32 i = 0; i < 16; ++i) score[i] = there >> (i / 4 * 8 + i % 2) & 1 ? score[i] : negative_infinity();
  }
  float most[2] = {negative_infinity(), negative_infinity()};
#pragma unroll
  for (i32 i = 0; i < 16; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
  float offset[2];
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    const float largest = warp_max(most[half], 4) * factor[half];
    const bool higher = largest > reference[half] + HEADROOM;
    rescale[half] = higher ? exp2_approximate(reference[half] - largest) : 1.0f;
    reference[half] = higher ? largest : reference[half];
    sum[half] *= rescale[half];
    offset[half] = WEIGHT_BITS - (reference[half] == negative_infinity() ? 0.0f : reference[half]);
  }
#pragma unroll
  for (i32 i = 0; i < 16; ++i) {
    score[i] = exp2_approximate(fmaf(score[i], factor[i / 2 % 2], offset[i / 2 % 2]));
    sum[i / 2 % 2] += score[i];
  }
}

// score = score * unit * by + rest
GK_DEVICE void multiply_by(Scores& score, const Units& unit, float by, const Scores& rest) {
#pragma unroll
  for (i32 j = 0; j < KEY_TILE / 8; ++j) {
    const float low = unit[j].x * by, high = unit[j].y * by;
#pragma unroll
    for (i32 i = 4 * j; i < 4 * j + 4; ++i) score[i] = fmaf(score[i], i % 2 ? high : low, rest[i]);
  }
}

GK_DEVICE u32 pack_weights(float low, float high) { return BF16 ? pack_bf16(low, high) : pack_f16(low, high); }

GK_DEVICE void weigh_tiles(Shared& s, i32 tiles, const float (&factor)[2]) {
  const i32 row = warp_index() * 16 + lane_index() / 4;
  float reference[2] = {negative_infinity(), negative_infinity()}, sum[2] = {}, rescale[2];
  float largest_unit = FLOAT_TINY, unit_change = 1.0f;
  Scores score = {}, rope = {};
#pragma unroll 1
  for (i32 n = 0; n < tiles; ++n) {
    const i32 stage = n % STAGES;
    barrier_wait(&s.keys_full[stage], n / STAGES & 1);
    score_tile(score, rope, s, stage);
    Units unit;
    if (SCALED) {
#pragma unroll
      for (i32 j = 0; j < KEY_TILE / 8; ++j)
        unit[j] = *reinterpret_cast<const float2*>(&s.unit[stage][8 * j + lane_index() % 4 * 2]);
      unit_change = settle_unit(s.unit[stage], largest_unit);
      multiply_by(score, unit, 1.0f, rope);
    }
    weigh_tile(score, factor, reference, sum, rescale, s.there[stage]);
    if (SCALED) multiply_by(score, unit, inverse_power(largest_unit), {});
    barrier_wait(&s.weight_empty, (n + 1) & 1);
#pragma unroll
    for (i32 i = 0; i < KEY_TILE / 16; ++i)
      s.weight[i][threadIdx.x] = {pack_weights(score[8 * i], score[8 * i + 1]),
                                  pack_weights(score[8 * i + 2], score[8 * i + 3]),
                                  pack_weights(score[8 * i + 4], score[8 * i + 5]),
                                  pack_weights(score[8 * i + 6], score[8 * i + 7])};
    if (lane_index() % 4 == 0) s.rescale[row] = rescale[0] * unit_change, s.rescale[row + 8] = rescale[1] * unit_change;
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&s.weight_full);
  }
  barrier_wait(&s.weight_empty, (tiles + 1) & 1);
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    sum[half] = warp_sum(sum[half], 4);
    if (lane_index() % 4 == 0) s.sum[row + 8 * half] = sum[half], s.reference[row + 8 * half] = reference[half];
  }
  if (threadIdx.x == 0) s.unit_of_sums = largest_unit;
  __syncwarp();
  if (lane_index() == 0) barrier_arrive(&s.weight_full);
}
