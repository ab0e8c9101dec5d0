// Of sparse_mla_wgmma.cuh: sums of values by weight, and the merging of what the blocks of a cluster have.
#pragma once

// ---- values: warpgroup `side` sums up columns 256 * side .. + 255, as two scaled tiles of 128

using Values = float[2][64];

GK_DEVICE void rescale_values(float (&acc)[64], float low, float high) {
  if (!__any_sync(ALL_LANES, low != 1.0f || high != 1.0f)) return;
#pragma unroll
  for (i32 i = 0; i < 64; ++i) acc[i] *= i / 2 % 2 ? high : low;
}

GK_DEVICE void add_tiles(Values& acc, Shared& s, i32 tiles, i32 side) {
  const i32 row = warp_index() % 4 * 16 + lane_index() / 4;
#pragma unroll 1
  for (i32 n = 0; n < tiles; ++n) {
    const i32 stage = n % STAGES;
    const u64 values = columns_of_panels(s.keys[stage] + 4 * side * PANEL_BYTES);
    barrier_wait(&s.weight_full, n & 1);
#pragma unroll
    for (i32 t = 0; t < 2; ++t) {
      const float change = SCALED ? s.unit_change[2 * side + t] : 1.0f;
      rescale_values(acc[t], s.rescale[row] * change, s.rescale[row + 8] * change);
    }
    products_begin();
#pragma unroll
    for (i32 step = 0; step < KEY_TILE / 16; ++step) {
      const uint4 weight = s.weight[step][threadIdx.x % 128];
#pragma unroll
      for (i32 t = 0; t < 2; ++t) {
        const u32* scale = &s.half_scale[2 * side + t][8 * step + lane_index() % 4];
        const uint4 a = !SCALED ? weight
                                : uint4{multiply_f16(weight.x, scale[0]), multiply_f16(weight.y, scale[0]),
                                        multiply_f16(weight.z, scale[4]), multiply_f16(weight.w, scale[4])};
        multiply_columns<BF16>(acc[t], a, values + t * 2 * (PANEL_BYTES >> 4) + step * (16 * 128 >> 4));
      }
      products_commit();
      products_wait<0>();  // one step's fragments at a time: there are no registers for more
    }
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&s.weight_empty), barrier_arrive(&s.keys_empty[stage]);
  }
}

// ---- the end: sums over weights

GK_DEVICE void write_values(void* out, const Values& acc, const float (&unit)[2], const Shared& s, i32 heads,
                            i32 side) {
  const i32 first = warp_index() % 4 * 16 + lane_index() / 4;
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    const i32 row = first + 8 * half;
    const float sum = s.sum[row], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (row >= heads) continue;
    u16* to = static_cast<u16*>(out) + row * RANK + 256 * side + lane_index() % 4 * 2;
#pragma unroll
    for (i32 t = 0; t < 2; ++t)
#pragma unroll
      for (i32 j = 0; j < 16; ++j) {
        const float* pair = &acc[t][4 * j + 2 * half];
        *reinterpret_cast<u32*>(to + column_of(16 * t + j)) =
            pack_bf16(pair[0] * inverse * unit[t], pair[1] * inverse * unit[t]);
      }
  }
}

#if GK_CLUSTERS
GK_DEVICE float peer_float(const void* mine, i32 rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(peer_address(mine, rank)) : "memory");
  return v;
}

GK_DEVICE float4 peer_float4(const void* mine, i32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(peer_address(mine, rank))
               : "memory");
  return v;
}

constexpr i32 VALUE_THREADS = 256, MERGED_ROWS = HEAD_TILE / CLUSTER_BLOCKS;

// Each block merges MERGED_ROWS rows of all blocks. Called by the threads that have the values; the others are gone or
// on their way, and threads that have ended count as arrived at a cluster's barrier.
GK_DEVICE void merge_values(void* out, const Values& acc, const float (&unit)[2], Shared& s, i32 heads, i32 side) {
  constexpr i32 WAIT_FOR_VALUES = 1;
  const i32 thread = threadIdx.x - 128, first = warp_index() % 4 * 16 + lane_index() / 4;
  float* sums = reinterpret_cast<float*>(s.keys);
  barrier_of(WAIT_FOR_VALUES, VALUE_THREADS);  // no product reads the keys any more
#pragma unroll
  for (i32 i = 0; i < 64; ++i) {
    const i32 t = i / 32, j = i / 2 % 16, half = i % 2;
    float* to = sums + (first + 8 * half) * MERGED_ROW + 256 * side + column_of(16 * t + j) + lane_index() % 4 * 2;
    *reinterpret_cast<float2*>(to) = {acc[t][4 * j + 2 * half] * unit[t], acc[t][4 * j + 2 * half + 1] * unit[t]};
  }
  cluster_barrier();
  if (thread < HEAD_TILE) {
    const i32 row = cluster_rank() * MERGED_ROWS + thread / CLUSTER_BLOCKS, peer = thread % CLUSTER_BLOCKS;
    const float largest = peer_float(&s.largest[row], peer), most = warp_max(largest, CLUSTER_BLOCKS);
    const float weight = largest == most ? 1.0f : exp2_approximate(largest - most);
    const float sum = warp_sum(weight * peer_float(&s.sum[row], peer), CLUSTER_BLOCKS);
    s.merge[thread] = sum == 0.0f ? 0.0f : weight / sum;
  }
  barrier_of(WAIT_FOR_VALUES, VALUE_THREADS);
  const i32 column = thread % 128 * 4;
#pragma unroll 2
  for (i32 i = thread / 128; i < MERGED_ROWS; i += 2) {
    const i32 row = cluster_rank() * MERGED_ROWS + i;
    float4 part[CLUSTER_BLOCKS], v = {};
#pragma unroll
    for (i32 peer = 0; peer < CLUSTER_BLOCKS; ++peer) part[peer] = peer_float4(sums + row * MERGED_ROW + column, peer);
#pragma unroll
    for (i32 peer = 0; peer < CLUSTER_BLOCKS; ++peer) {
      const float by = s.merge[i * CLUSTER_BLOCKS + peer];
      v.x += part[peer].x * by, v.y += part[peer].y * by, v.z += part[peer].z * by, v.w += part[peer].w * by;
    }
    uint2* to = reinterpret_cast<uint2*>(static_cast<u16*>(out) + row * RANK + column);
    if (row < heads) *to = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
  }
  cluster_barrier();  // nobody's shared memory goes while others read it
}
#endif

GK_DEVICE void sum_values(void* out, Shared& s, i32 tiles, i32 heads, float scale, i32 side) {
  Values acc = {};
  add_tiles(acc, s, tiles, side);
  barrier_wait(&s.weight_full, tiles & 1);
  float unit[2];
  for (i32 t = 0; t < 2; ++t) unit[t] = SCALED ? s.unit_change[2 * side + t] : FORMAT == GK_FP8 ? scale : 1.0f;
#if GK_CLUSTERS
  merge_values(out, acc, unit, s, heads, side);
#else
  write_values(out, acc, unit, s, heads, side);
#endif
}
