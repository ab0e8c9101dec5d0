// The attention of sparse_mla_decode on sm_90a's tensor cores: 64 heads a block, 32 keys at a time.
//
// launch  grid tokens * head_tiles * CLUSTER, 512 threads, SHARED_BYTES of dynamic shared memory; CTA n takes the tiles
//         n % CLUSTER, n % CLUSTER + CLUSTER, .. of its token's keys, and the CTAs of a cluster merge what they have
// wants   q in bf16, RANK 512, ROPE 64, and pages that start at multiples of 16 bytes, page_stride too
//
// Four warpgroups: one computes scores and weights, two sum up the values of 256 columns each, one loads and decodes.
// FP8 codes go into the products in fp16, where they are exact. A key's scales are taken apart: the power of two under
// the largest one, its unit, stays outside, so codes are multiplied by less than two: what loses bits is 2^-14 of the
// key's largest values, and scales that are powers of two change no bit. Scores are multiplied by units in fp32, and so
// are weights, relative to the power of two under the largest unit so far. There they are less than 2^15, and full
// precision reaches 2^-28 of the largest. Queries are fp16 as well, each row scaled by a power of two. Records of bf16
// go in as bf16.
#pragma once

static_assert(SOURCE == GK_BF16 && RANK == 512 && ROPE == 64 && FORMAT != GK_FP32, "what this kernel is made for");

constexpr i32 THREADS = 512, HEAD_TILE = 64, KEY_TILE = 32, STAGES = 3;
constexpr i32 VALUE_PANELS = RANK / 64, PANELS = VALUE_PANELS + 1;
constexpr i32 QUERY_PANEL = HEAD_TILE * 128, KEY_PANEL = KEY_TILE * 128;  // bytes
constexpr bool BF16 = FORMAT == GK_BF16, BF16_ROPE = FORMAT != GK_FP8, SCALED = FORMAT == GK_FP8_DS_MLA;
constexpr i32 ROPE_AT = SCALED ? ROPE_START : BF16 ? 2 * RANK : RANK;  // byte of a record
// A warp loads 8 keys of a tile in 2 rounds: in each one 8 lanes have a key and copy 16 bytes of its parts. The rounds of
// AHEAD tiles are on their way.
constexpr i32 PARTS = BF16 ? PANELS : 5, ROUNDS = 2, AHEAD = BF16 ? 1 : 2;
// A warpgroup's registers a thread, 512 in all.
constexpr i32 WEIGHT_REGISTERS = 96, LOAD_REGISTERS = 80, VALUE_REGISTERS = 168;
constexpr i32 MERGED_ROW = RANK + 8;  // floats; the 8 keep the rows of a fragment in different banks
// A weight is 2^WEIGHT_BITS where the score is the row's reference. That is its largest score so far, or up to HEADROOM
// (in powers of two) less, so that what is summed up is seldom rescaled.
constexpr float WEIGHT_BITS = 10.0f, HEADROOM = 4.0f, LOG2_E = 1.44269504f;

struct Shared {
  union {
    struct {
      u8 q[PANELS * QUERY_PANEL];
      u8 keys[STAGES][PANELS * KEY_PANEL];
    };
    float sums[HEAD_TILE][MERGED_ROW];  // in the end, of this block
  };
  uint4 raw[AHEAD * ROUNDS * PARTS][128];  // what each lane that loads has on its way
  uint4 scales[AHEAD][KEY_TILE];           // of keys on their way
  union {
    uint4 weight[KEY_TILE / 16][128];  // a fragment of 16 keys for each thread
    float factor[HEAD_TILE];           // before: of a sum of products to a score in powers of two
    struct {                           // behind
      float reference[HEAD_TILE], sum[HEAD_TILE];  // of scores, and of weights
      float merge[HEAD_TILE];                      // factors of the blocks' sums
    };
  };
  float unit[STAGES][KEY_TILE];
  float unit_of_sums;        // in the end
  float rescale[HEAD_TILE];  // of what was summed up before this tile
  u64 keys_full[STAGES], keys_empty[STAGES], weight_full, weight_empty;
  union {
    u32 there[STAGES];  // a bit for each key
    u8 there_of_warp[STAGES][4];
  };
  i32 tiles;
};
constexpr i32 SHARED_BYTES = sizeof(Shared);
static_assert(SHARED_BYTES <= 231424, "what ops/latent.py asks for; 227 KiB are the most");

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

// The power of two at or under a positive number, and the inverse of one.
GK_DEVICE float power_under(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
GK_DEVICE float inverse_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

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
  const i32 warpgroup = threadIdx.x / 128, row = warp_index() % 4 * 16 + lane_index() / 4;
  Loader loader(s, keys);
  if (warpgroup == 3) loader.find();
  const Queries queries(static_cast<const u16*>(q) + token_head * (RANK + ROPE), tile_heads);
  if (warpgroup == 3) loader.start();
  if (threadIdx.x == 0) init_barriers(s);
  __syncthreads();
  count_tiles(s, keys);
  queries.store(s, softmax_scale * LOG2_E * (FORMAT == GK_FP8 ? scale : 1.0f));
  __syncthreads();
  const i32 tiles = s.tiles;
  const float factor[2] = {s.factor[row], s.factor[row + 8]};
  __syncthreads();  // weights take the place of factors
  void* tile_out = static_cast<u16*>(out) + token_head * RANK;
  if (warpgroup == 0) {
    give_registers<WEIGHT_REGISTERS>();
    weigh_tiles(s, tiles, factor);
  } else if (warpgroup == 3) {
    give_registers<LOAD_REGISTERS>();
    loader.load(tiles);
  } else {
    take_registers<VALUE_REGISTERS>();
    sum_values(tile_out, s, tiles, tile_heads, scale, warpgroup - 1);
  }
}
