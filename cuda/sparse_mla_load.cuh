// Of sparse_mla_wgmma.cuh: queries and keys on their way into shared memory.
#pragma once

// ---- queries

GK_DEVICE float largest_bf16(uint4 v) {
  float amax = 0.0f;
  for (u32 word : {v.x, v.y, v.z, v.w})
    amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word & 0xffff0000u))));
  return amax;
}

template <bool TO_BF16>
GK_DEVICE u32 scaled_query(u32 word, float by) {
  const float low = __uint_as_float(word << 16) * by, high = __uint_as_float(word & 0xffff0000u) * by;
  return TO_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
}

template <bool TO_BF16>
GK_DEVICE uint4 scaled_query(uint4 v, float by) {
  return {scaled_query<TO_BF16>(v.x, by), scaled_query<TO_BF16>(v.y, by), scaled_query<TO_BF16>(v.z, by),
          scaled_query<TO_BF16>(v.w, by)};
}

// A warp a row. In fp16 the row's largest magnitude is brought to 2^14 .. 2^15; `factor` takes that back and is
// positive: its sign goes to the queries.
GK_DEVICE void load_queries(Shared& s, const void* q, i32 heads, float factor) {
  for (i32 row = warp_index(); row < HEAD_TILE; row += THREADS / WARP) {
    const i32 lane = lane_index();
    uint4 part[3] = {};
    if (row < heads) {
      const uint4* from = static_cast<const uint4*>(q) + row * (PANELS * 8);
      for (i32 i = 0; i < 3; ++i)
        if (i < 2 || lane < 8) part[i] = from[32 * i + lane];
    }
    u32 power = 127;
    if (!BF16) {
      const float amax = warp_max(fmaxf(largest_bf16(part[0]), fmaxf(largest_bf16(part[1]), largest_bf16(part[2]))));
      power = min(268u - (__float_as_uint(amax) >> 23), 230u);
    }
    const float by = copysignf(power_of_two(power), factor);
    for (i32 i = 0; i < 2; ++i) {
      const i32 chunk = chunk_with(8 * (32 * i + lane));
      *chunk_of(s.q + chunk / 8 * PANEL_BYTES, row, chunk % 8) = scaled_query<BF16>(part[i], by);
    }
    if (lane < 8) *chunk_of(s.q + VALUE_PANELS * PANEL_BYTES, row, lane) = scaled_query<BF16_ROPE>(part[2], by);
    if (lane == 0) s.factor[row] = fmaxf(fabsf(factor) * power_of_two(254 - power), FLOAT_TINY);
  }
}

// ---- loading: a warp 16 keys of each tile; lane l has bytes 16 * (l % 8) .. of parts of keys l / 8 + 4 * i

using Round = uint4[PARTS];

// Round `i`. Lane n of `record` has key n's.
GK_DEVICE u64 address_of(u64 record, i32 i) {
  const u64 from = __shfl_sync(ALL_LANES, record, 4 * i + lane_index() / 8);
  return from == 0 ? 0 : from + 16 * (lane_index() % 8);
}

GK_DEVICE uint4 load_part(u64 from, i32 part) {
  if (FORMAT == GK_FP8 && part == 4) return load_8_or_zero(from, RANK - 8 * (lane_index() % 8));
  return load_16_or_zero(from, BF16 || part < 4 ? 128 * part : ROPE_AT);
}

// Where the lane writes in shared memory: the chunk lane % 8 of row 16 * warp + lane / 8 of a tile, for codes in its
// one of two panels. Four rows on, chunks are 4 further, modulo 8: 64 bytes, by exclusive or.
struct Places {
  u32 codes, whole;

  GK_DEVICE Places(const u8* tile, i32 warp, i32 lane) {
    const i32 row = 16 * warp + lane / 8;
    whole = shared_address(tile) + row * 128 + (lane % 8 ^ row % 8) * 16;
    codes = whole + lane / 4 % 2 * PANEL_BYTES;
  }

  // Part `part` of round `i`; codes of the lane are 16 values of a panel, see chunk_of.
  GK_DEVICE void store(i32 i, i32 part, uint4 v) const {
    const u32 rows = i * 4 * 128, further = i % 2 * 64;
    if (BF16 || part == 4) {
      if (FORMAT == GK_FP8) {
        const uint2 a = e4m3_to_f16(v.x), b = e4m3_to_f16(v.y);
        v = {a.x, a.y, b.x, b.y};
      }
      store_shared((whole ^ further) + rows + (BF16 ? part : VALUE_PANELS) * PANEL_BYTES, v);
      return;
    }
    const uint2 a = e4m3_to_f16(v.x), b = e4m3_to_f16(v.y), c = e4m3_to_f16(v.z), d = e4m3_to_f16(v.w);
    store_shared((codes ^ further) + rows + 2 * part * PANEL_BYTES, {a.x, a.y, b.x, b.y});
    store_shared((codes ^ further ^ 64) + rows + 2 * part * PANEL_BYTES, {c.x, c.y, d.x, d.y});
  }
};

// Lane l asks for half of the lines of key l % 16.
GK_DEVICE void prefetch_record(u64 record) {
  constexpr i32 LINES = (TOKEN_BYTES + 127) / 128, EACH = (LINES + 1) / 2;
  const u64 from = record + lane_index() / 16 * EACH * 128;
  for (i32 i = 0; i < EACH; ++i)
    if (record != 0) prefetch_l2(reinterpret_cast<const void*>(from + 128 * i));
}

GK_DEVICE void load_tiles(Shared& s, const Keys& keys, i32 tiles) {
  const i32 lane = lane_index(), warp = warp_index() % 4, key = 16 * warp + lane % 16;
  u64 record = keys.record(keys.slot(0, key));
  i32 next = keys.slot(1, key), after_next = keys.slot(2, key);
  Round rounds[AHEAD];
#pragma unroll
  for (i32 i = 0; i < AHEAD; ++i) {
    const u64 from = address_of(record, i);
#pragma unroll
    for (i32 part = 0; part < PARTS; ++part) rounds[i][part] = load_part(from, part);
  }
  prefetch_record(keys.record(next));
#pragma unroll 1
  for (i32 n = 0; n < tiles; ++n) {
    const i32 stage = n % STAGES;
    prefetch_record(keys.record(after_next));
    uint4 scales = {0, 0, 0, 0};
    if (SCALED) scales = load_16_or_zero(record, RANK);
    const u32 there = __ballot_sync(ALL_LANES, record != 0);
    const u64 next_record = keys.record(next);
    next = after_next, after_next = keys.slot(n + 3, key);
    const Places places(s.keys[stage], warp, lane);
    barrier_wait(&s.keys_empty[stage], (n / STAGES + 1) & 1);
#pragma unroll
    for (i32 i = 0; i < ROUNDS; ++i) {
      const u64 from = address_of(i + AHEAD < ROUNDS ? record : next_record, (i + AHEAD) % ROUNDS);
#pragma unroll
      for (i32 part = 0; part < PARTS; ++part) {
        places.store(i, part, rounds[i % AHEAD][part]);
        rounds[i % AHEAD][part] = load_part(from, part);
      }
    }
    record = next_record;
    if (SCALED && lane < 16) {
      s.tile_scale[stage][0][key] = __uint_as_float(scales.x), s.tile_scale[stage][1][key] = __uint_as_float(scales.y);
      s.tile_scale[stage][2][key] = __uint_as_float(scales.z), s.tile_scale[stage][3][key] = __uint_as_float(scales.w);
    }
    if (lane == 0) s.there_of_warp[stage][warp] = static_cast<u16>(there);
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.keys_full[stage]);
  }
}
