// Of sparse_mla_wgmma.cuh: sums of values by weight, and the merging of what the blocks of a cluster have.
#pragma once

// ---- values: warpgroup `side` sums up columns 256 * side .. + 255, in two parts of 128

using Values = float[2][64];

GK_DEVICE void rescale_values(Values& acc, float low, float high) {
  if (!__any_sync(ALL_LANES, low != 1.0f || high != 1.0f)) return;
#pragma unroll
  for (i32 i = 0; i < 128; ++i) acc[i / 64][i % 64] *= i / 2 % 2 ? high : low;
}

GK_DEVICE void add_tiles(Values& acc, Shared& s, i32 tiles, i32 side) {
  const i32 row = warp_index() % 4 * 16 + lane_index() / 4;
#pragma unroll 1
  for (i32 n = 0; n < tiles; ++n) {
    const i32 stage = n % STAGES;
    const u64 values = columns_of_panels<KEY_PANEL>(s.keys[stage] + 4 * side * KEY_PANEL);
    barrier_wait(&s.weight_full, n & 1);
    uint4 weight[KEY_TILE / 16];
#pragma unroll
    for (i32 step = 0; step < KEY_TILE / 16; ++step) weight[step] = s.weight[step][threadIdx.x % 128];
    rescale_values(acc, s.rescale[row], s.rescale[row + 8]);
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&s.weight_empty);
    products_begin();
#pragma unroll
    for (i32 step = 0; step < KEY_TILE / 16; ++step)
#pragma unroll
      for (i32 t = 0; t < 2; ++t)
        multiply_columns<BF16>(acc[t], weight[step], values + t * 2 * (KEY_PANEL >> 4) + step * (16 * 128 >> 4));
    products_commit();
    products_wait(acc[0]), products_wait(acc[1]);
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&s.keys_empty[stage]);
  }
}

// ---- the end: sums over weights, through shared memory, so that rows are written whole

#if GK_CLUSTERS
GK_DEVICE float peer_float(const float* mine, i32 rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(peer_address(mine, rank)) : "memory");
  return v;
}

GK_DEVICE float4 peer_float4(const float* mine, i32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(peer_address(mine, rank))
               : "memory");
  return v;
}
#else
GK_DEVICE float peer_float(const float* mine, i32) { return *mine; }
GK_DEVICE float4 peer_float4(const float* mine, i32) { return *reinterpret_cast<const float4*>(mine); }
#endif

constexpr i32 VALUE_THREADS = 256, MERGED_ROWS = HEAD_TILE / CLUSTER_BLOCKS;

// Of the threads that have the values; the others are gone or on their way.
GK_DEVICE void values_barrier() { barrier_of(1, VALUE_THREADS); }

// In a cluster, threads that have ended count as arrived.
GK_DEVICE void all_values_barrier() {
#if GK_CLUSTERS
  cluster_barrier();
#else
  values_barrier();
#endif
}

GK_DEVICE void store_sums(Shared& s, const Values& acc, float unit, i32 side) {
  const i32 first = warp_index() % 4 * 16 + lane_index() / 4;
#pragma unroll
  for (i32 i = 0; i < 64; ++i) {
    const i32 t = i / 32, j = i / 2 % 16, half = i % 2;
    const float* pair = &acc[t][4 * j + 2 * half];
    float* to = &s.sums[first + 8 * half][256 * side + column_of(16 * t + j) + lane_index() % 4 * 2];
    *reinterpret_cast<float2*>(to) = {pair[0] * unit, pair[1] * unit};
  }
}

// What row `i` of this block's rows is multiplied by as `peer` has it, for a thread each.
GK_DEVICE void weigh_peers(Shared& s, i32 thread) {
  const i32 row = cluster_rank() * MERGED_ROWS + thread / CLUSTER_BLOCKS, peer = thread % CLUSTER_BLOCKS;
  const float reference = peer_float(&s.reference[row], peer), most = warp_max(reference, CLUSTER_BLOCKS);
  const float weight = reference == most ? 1.0f : exp2_approximate(reference - most);
  const float sum = warp_sum(weight * peer_float(&s.sum[row], peer), CLUSTER_BLOCKS);
  s.merge[thread] = sum == 0.0f ? 0.0f : weight / sum;
}

// Each block merges MERGED_ROWS rows of all blocks.
GK_DEVICE void merge_values(u16* out, Shared& s, i32 heads) {
  const i32 thread = threadIdx.x - 128, column = thread % 128 * 4;
#pragma unroll(16 / CLUSTER_BLOCKS)
  for (i32 i = thread / 128; i < MERGED_ROWS; i += 2) {
    const i32 row = cluster_rank() * MERGED_ROWS + i;
    float4 part[CLUSTER_BLOCKS], v = {};
#pragma unroll
    for (i32 peer = 0; peer < CLUSTER_BLOCKS; ++peer) part[peer] = peer_float4(&s.sums[row][column], peer);
#pragma unroll
    for (i32 peer = 0; peer < CLUSTER_BLOCKS; ++peer) {
      const float by = s.merge[i * CLUSTER_BLOCKS + peer];
      v.x += part[peer].x * by, v.y += part[peer].y * by, v.z += part[peer].z * by, v.w += part[peer].w * by;
    }
    uint2* to = reinterpret_cast<uint2*>(out + row * RANK + column);
    if (row < heads) *to = {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)};
  }
}

GK_DEVICE void sum_values(void* out, Shared& s, i32 tiles, i32 heads, float scale, i32 side) {
  Values acc = {};
  add_tiles(acc, s, tiles, side);
  barrier_wait(&s.weight_full, tiles & 1);
  const float unit = SCALED ? s.unit_of_sums : FORMAT == GK_FP8 ? scale : 1.0f;
  values_barrier();  // no product reads queries or keys any more
  store_sums(s, acc, unit, side);
  all_values_barrier();
  if (threadIdx.x < 128 + HEAD_TILE) weigh_peers(s, threadIdx.x - 128);
  values_barrier();
  merge_values(static_cast<u16*>(out), s, heads);
#if GK_CLUSTERS
  cluster_barrier();  // nobody's shared memory goes while others read it
#endif
}
