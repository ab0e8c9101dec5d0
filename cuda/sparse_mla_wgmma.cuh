// The attention of sparse_mla_decode on sm_90a's tensor cores: 64 heads a block, 64 keys at a time.
//
// launch  grid tokens * head_tiles * CLUSTER, 512 threads, SHARED_BYTES of dynamic shared memory; CTA n takes the tiles
//         n % CLUSTER, n % CLUSTER + CLUSTER, .. of its token's keys, and the CTAs of a cluster merge what they have
// wants   q in bf16, RANK 512, ROPE 64, and pages that start at multiples of 16 bytes, page_stride too
//
// Four warpgroups: one computes scores and weights, two sum up the values of 256 columns each, one loads and decodes.
// FP8 codes go into the products as they are, exact in fp16, and their scales are applied outside: a tile's scale to
// the sum of its 128 products for a score, in fp32, and to the weights for the values, in fp16. There a weight is at
// most 2^8 and a scale, relative to the power of two under the largest one so far, less than 2^7: neither overflows,
// and what loses bits is 2^-20 of the largest. Queries are fp16 as well, each row scaled by a power of two. Records of
// bf16 go in as bf16.
#pragma once

static_assert(SOURCE == GK_BF16 && RANK == 512 && ROPE == 64 && FORMAT != GK_FP32, "what this kernel is made for");

constexpr i32 THREADS = 512, HEAD_TILE = 64, KEY_TILE = 64, STAGES = 2;
constexpr i32 VALUE_PANELS = RANK / 64, PANELS = VALUE_PANELS + 1, TILE_BYTES = PANELS * PANEL_BYTES;
constexpr bool BF16 = FORMAT == GK_BF16, BF16_ROPE = FORMAT != GK_FP8, SCALED = FORMAT == GK_FP8_DS_MLA;
constexpr i32 ROPE_AT = SCALED ? ROPE_START : BF16 ? 2 * RANK : RANK;  // byte of a record
// A warp loads 16 keys in 4 rounds: in each one 8 lanes have a key and load 16 bytes of its parts. AHEAD rounds are in
// flight.
constexpr i32 PARTS = BF16 ? PANELS : 5, ROUNDS = 4, AHEAD = SCALED || BF16 ? 1 : 2;
// A warpgroup's registers a thread, 512 in all.
constexpr i32 WEIGHT_REGISTERS = SCALED ? 104 : 72, LOAD_REGISTERS = SCALED ? 56 : 88, VALUE_REGISTERS = 176;
constexpr i32 MERGED_ROW = RANK + 8;  // floats; the 8 keep the rows of a fragment in different banks
constexpr float WEIGHT_BITS = 8.0f, SCALE_TOP = 64.0f, LOG2_E = 1.44269504f;

struct Shared {
  u8 q[TILE_BYTES];
  u8 keys[STAGES][TILE_BYTES];  // in the end the sums of this block, float [HEAD_TILE][MERGED_ROW]
  union {
    uint4 weight[KEY_TILE / 16][128];  // a fragment of 16 keys for each thread
    float factor[HEAD_TILE];           // before: of a sum of products to a score in powers of two
    struct {                           // behind
      float largest[HEAD_TILE], sum[HEAD_TILE];  // scores, and weights
      float merge[HEAD_TILE];                    // factors of the blocks' sums
    };
  };
  float tile_scale[STAGES][4][KEY_TILE];
  u32 half_scale[4][KEY_TILE / 2];  // relative to the tile's unit, in fp16
  float unit_change[4];             // old unit by new one; in the end the unit of the sums
  float rescale[HEAD_TILE];         // of what was summed up before this tile
  u64 keys_full[STAGES], keys_empty[STAGES], weight_full, weight_empty;
  union {
    u64 there[STAGES];  // a bit for each key
    u16 there_of_warp[STAGES][4];
  };
  i32 tiles;
};
constexpr i32 SHARED_BYTES = sizeof(Shared);
static_assert(SHARED_BYTES == 232288, "what ops/latent.py asks for; 227 KiB are the most");
static_assert(HEAD_TILE * MERGED_ROW * 4 <= STAGES * TILE_BYTES, "the sums take the place of keys");

// The 16-byte chunk `chunk` of row `row` of a panel. Of FP8 codes, values 16 c .. + 7 are chunk c and 16 c + 8 .. + 15
// are chunk c + 4, and in odd panels the other way around: so 8 lanes that decode 16 values each write to all banks.
GK_DEVICE uint4* chunk_of(u8* panel, i32 row, i32 chunk) {
  return reinterpret_cast<uint4*>(panel + row * 128 + (chunk ^ row % 8) * 16);
}

// The first column of chunk number `n`, counted over the panels.
GK_DEVICE constexpr i32 column_of(i32 n) { return BF16 ? 8 * n : n / 8 * 64 + n % 4 * 16 + (n / 4 + n / 8) % 2 * 8; }
GK_DEVICE i32 chunk_with(i32 column) {
  return BF16 ? column / 8 : column / 64 * 8 + column % 64 / 16 + (column / 8 + column / 64) % 2 * 4;
}

// ---- the slots of this block

struct Keys {
  const u8* pages;
  i64 page_stride, num_slots;
  const i32* slots;  // of the token
  i32 k;

  // -1 where there is no key.
  GK_DEVICE i32 slot(i32 tile, i32 key) const {
    const i32 index = (tile * CLUSTER_BLOCKS + cluster_rank()) * KEY_TILE + key;
    const i32 slot = index < k ? slots[index] : -1;
    return slot < num_slots ? slot : -1;
  }
  // Address 0 where there is no key.
  GK_DEVICE u64 record(i32 slot) const {
    if (slot < 0) return 0;
    return reinterpret_cast<u64>(pages) + slot / BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * TOKEN_BYTES;
  }
};

// Tiles up to the last one that has a key.
GK_DEVICE void count_tiles(Shared& s, const Keys& keys) {
  const i32 all = div_ceil(div_ceil(keys.k, KEY_TILE) - cluster_rank(), CLUSTER_BLOCKS);
  i32 last = 0;
  for (i32 i = threadIdx.x; i < all * KEY_TILE; i += THREADS)
    if (keys.slot(i / KEY_TILE, i % KEY_TILE) >= 0) last = i / KEY_TILE + 1;
  last = warp_max(last);
  if (lane_index() == 0) atomicMax(&s.tiles, last);
}

#include "sparse_mla_load.cuh"
#include "sparse_mla_sum.cuh"
#include "sparse_mla_weigh.cuh"

GK_DEVICE void init_barriers(Shared& s) {
  for (i32 i = 0; i < STAGES; ++i) {
    barrier_init(&s.keys_full[i], 4);   // warps that load
    barrier_init(&s.keys_empty[i], 8);  // warps that sum values
  }
  barrier_init(&s.weight_full, 4);
  barrier_init(&s.weight_empty, 8);
  barrier_init_fence();
  s.tiles = 0;
}

GK_DEVICE void attend(const void* q, const u8* pages, i64 page_stride, i64 num_slots, const i32* slots, i32 k,
                      float softmax_scale, float scale, void* out, i32 heads, i32 head_tiles) {
  GK_SWIZZLED_SHARED(Shared, shared);
  Shared& s = *shared;
  const i32 unit = blockIdx.x / CLUSTER_BLOCKS, head = unit % head_tiles * HEAD_TILE;
  const i64 token = unit / head_tiles, token_head = token * heads + head;
  const i32 tile_heads = min(HEAD_TILE, heads - head);
  const Keys keys = {pages, page_stride, num_slots, slots + token * k, k};
  if (threadIdx.x == 0) init_barriers(s);
  __syncthreads();
  count_tiles(s, keys);
  load_queries(s, static_cast<const u16*>(q) + token_head * (RANK + ROPE), tile_heads,
               softmax_scale * LOG2_E * (FORMAT == GK_FP8 ? scale : 1.0f));
  async_proxy_fence();
  __syncthreads();
  const i32 tiles = s.tiles, warpgroup = threadIdx.x / 128, row = warp_index() % 4 * 16 + lane_index() / 4;
  const float factor[2] = {s.factor[row], s.factor[row + 8]};
  __syncthreads();  // weights take the place of factors
  void* tile_out = static_cast<u16*>(out) + token_head * RANK;
  if (warpgroup == 0) {
    give_registers<WEIGHT_REGISTERS>();
    weigh_tiles(s, tiles, factor);
  } else if (warpgroup == 3) {
    give_registers<LOAD_REGISTERS>();
    load_tiles(s, keys, tiles);
  } else {
    take_registers<VALUE_REGISTERS>();
    sum_values(tile_out, s, tiles, tile_heads, scale, warpgroup - 1);
  }
}
