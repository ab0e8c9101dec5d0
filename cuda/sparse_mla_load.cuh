// Of sparse_mla_wgmma.cuh: queries and keys on their way into shared memory.
#pragma once

// ---- queries

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

// A warp has rows warp, warp + 16 and so on. In fp16 a row's largest magnitude is brought to 2^14 .. 2^15; `factor`
// takes that back and is positive: its sign goes to the queries.
struct Queries {
  static constexpr i32 ROWS = HEAD_TILE * WARP / THREADS;
  uint4 part[ROWS][3];

  // Starts loading; rows from `heads` on are zero.
  GK_DEVICE Queries(const void* q, i32 heads) {
#pragma unroll
    for (i32 n = 0; n < ROWS; ++n) {
      const i32 row = warp_index() + n * (THREADS / WARP);
      const u64 from = row < heads ? reinterpret_cast<u64>(q) + row * (PANELS * 128) + lane_index() * 16 : 0;
#pragma unroll
      for (i32 i = 0; i < 3; ++i) part[n][i] = load_16_or_zero(i < 2 || lane_index() < 8 ? from : 0, 512 * i);
    }
  }

  // Bits of the largest magnitude of a row, in bf16.
  GK_DEVICE u32 largest(i32 n) const {
    u32 most = 0;
#pragma unroll
    for (const uint4& v : part[n])
      for (u32 word : {v.x, v.y, v.z, v.w}) most = larger_halves(most, word & 0x7fff7fff);
    return __reduce_max_sync(ALL_LANES, max(most >> 16, most & 0xffff));
  }

  GK_DEVICE void store(Shared& s, float factor) const {
    const i32 lane = lane_index();
#pragma unroll
    for (i32 n = 0; n < ROWS; ++n) {
      const i32 row = warp_index() + n * (THREADS / WARP);
      const u32 power = BF16 ? 127 : min(268u - (largest(n) >> 7), 230u);
      const float by = copysignf(power_of_two(power), factor);
#pragma unroll
      for (i32 i = 0; i < 2; ++i) {
        const i32 chunk = chunk_with(8 * (32 * i + lane));
        *chunk_of(s.q + chunk / 8 * QUERY_PANEL, row, chunk % 8) = scaled_query<BF16>(part[n][i], by);
      }
      if (lane < 8) *chunk_of(s.q + VALUE_PANELS * QUERY_PANEL, row, lane) = scaled_query<BF16_ROPE>(part[n][2], by);
      if (lane == 0) s.factor[row] = fmaxf(fabsf(factor) * power_of_two(254 - power), FLOAT_TINY);
    }
  }
};

// ---- loading: lane l has bytes 16 * (l % 8) .. of parts of keys l / 8 + 4 * i of its warp, i being the round. Bytes
// are copied to places of the lane's own, where nobody else looks for them, and decoded from there.

// What codes of a key are multiplied by, twice in a word for each tile of 128, and the key's unit.
struct Scales {
  u32 by[4];
  float unit;

  GK_DEVICE explicit Scales(uint4 v) {
    const float scale[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    unit = power_under(fmaxf(fmaxf(fmaxf(scale[0], scale[1]), fmaxf(scale[2], scale[3])), FLOAT_TINY));
#pragma unroll
    for (i32 t = 0; t < 4; ++t) {
      const float relative = scale[t] * inverse_power(unit);
      by[t] = pack_f16(relative, relative);
    }
  }

  GK_DEVICE uint2 decode(i32 tile, u32 codes) const {
    const uint2 v = e4m3_to_f16(codes);
    return {multiply_f16(v.x, by[tile]), multiply_f16(v.y, by[tile])};
  }
};

struct Loader {
  Shared& s;
  const Keys& keys;
  const i32 warp, lane, row;  // the row in a tile of the lane's key in round 0
  i32 slots[AHEAD][ROUNDS];   // of the first tiles; then, in slots[0], of the next one that is copied
  u32 there;                  // a byte of the warp's keys for the present tile, in the next one for the tile behind, ..

  GK_DEVICE Loader(Shared& s, const Keys& keys)
      : s(s), keys(keys), warp(warp_index() % 4), lane(lane_index()), row(8 * warp + lane / 8) {}

  GK_DEVICE void find(i32 n, i32 place) {
#pragma unroll
    for (i32 i = 0; i < ROUNDS; ++i) slots[place][i] = keys.slot(n, row + 4 * i);
  }

  // Before anything else of the kernel.
  GK_DEVICE void find() {
#pragma unroll
    for (i32 n = 0; n < AHEAD; ++n) find(n, n);
  }
  GK_DEVICE void start() {
    there = 0;
#pragma unroll
    for (i32 n = 0; n < AHEAD; ++n) copy_tile(n, n, slots[n]);
    find(AHEAD, 0);
  }

  // The lane's place for part `part` of round `i` of tile `n`; tile n + AHEAD has the same one.
  GK_DEVICE u32 place(i32 n, i32 i, i32 part) const {
    return shared_address(&s.raw[(n % AHEAD * ROUNDS + i) * PARTS + part][32 * warp + lane]);
  }

  // Start copying tile `n`, which is `distance` behind the present one.
  GK_DEVICE void copy_tile(i32 n, i32 distance, const i32 (&slot)[ROUNDS]) {
#pragma unroll
    for (i32 i = 0; i < ROUNDS; ++i) {
      const u64 record = keys.record(slot[i]), from = record == 0 ? 0 : record + 16 * (lane % 8);
#pragma unroll
      for (i32 part = 0; part < PARTS; ++part) {
        if (FORMAT == GK_FP8 && part == 4) copy_8_or_zero(place(n, i, part), from, RANK - 8 * (lane % 8));
        else copy_16_or_zero(place(n, i, part), from, BF16 || part < 4 ? 128 * part : ROPE_AT);
      }
      if (SCALED && lane % 8 == 0) copy_16_or_zero(shared_address(&s.scales[n % AHEAD][row + 4 * i]), record, RANK);
      const u32 lanes = __ballot_sync(ALL_LANES, record != 0);
      there |= ((lanes & 0x01010101) * 0x10204080 >> 28) << (8 * distance + 4 * i);
    }
    copies_commit();
  }

  // 16 bytes of part `part`, to row `row + 4 * i`. In the second round chunks are 4 further, modulo 8: 64 bytes, by
  // exclusive or. Codes are 16 values of one of two panels, see chunk_of.
  GK_DEVICE void store_part(const u8* tile, i32 i, i32 part, uint4 v, const Scales& scales) const {
    const u32 chunk = (lane % 8 ^ lane / 8) * 16 ^ 64 * i, whole = shared_address(tile) + (row + 4 * i) * 128 + chunk;
    if (BF16 || (part == 4 && FORMAT != GK_FP8)) {
      store_shared(whole + (BF16 ? part : VALUE_PANELS) * KEY_PANEL, v);
      return;
    }
    const auto decode = [&](u32 codes) { return SCALED ? scales.decode(part, codes) : e4m3_to_f16(codes); };
    const uint2 a = decode(v.x), b = decode(v.y);
    if (part == 4) {
      store_shared(whole + VALUE_PANELS * KEY_PANEL, {a.x, a.y, b.x, b.y});
      return;
    }
    const uint2 c = decode(v.z), d = decode(v.w);
    const u32 codes = whole + (lane / 4 % 2 + 2 * part) * KEY_PANEL;
    store_shared(codes, {a.x, a.y, b.x, b.y});
    store_shared(codes ^ 64, {c.x, c.y, d.x, d.y});
  }

  // Tile `n` out of the lane's places.
  GK_DEVICE void store_tile(i32 n, i32 stage) const {
    constexpr i32 AT_ONCE = BF16 ? 1 : ROUNDS;  // rounds whose bytes fit into registers
#pragma unroll
    for (i32 first = 0; first < ROUNDS; first += AT_ONCE) {
      uint4 v[AT_ONCE][PARTS], scales[AT_ONCE];
#pragma unroll
      for (i32 i = 0; i < AT_ONCE; ++i) {
        if (SCALED) scales[i] = load_shared(shared_address(&s.scales[n % AHEAD][row + 4 * (first + i)]));
#pragma unroll
        for (i32 part = 0; part < PARTS; ++part) v[i][part] = load_shared(place(n, first + i, part));
      }
#pragma unroll
      for (i32 i = 0; i < AT_ONCE; ++i) {
        const Scales of(SCALED ? scales[i] : uint4{});
        if (SCALED && lane % 8 == 0) s.unit[stage][row + 4 * (first + i)] = of.unit;
#pragma unroll
        for (i32 part = 0; part < PARTS; ++part) store_part(s.keys[stage], first + i, part, v[i][part], of);
      }
    }
  }

  GK_DEVICE void load(i32 tiles) {
#pragma unroll 1
    for (i32 n = 0; n < tiles; ++n) {
      const i32 stage = n % STAGES;
      barrier_wait(&s.keys_empty[stage], (n / STAGES + 1) & 1);
      copies_wait<AHEAD - 1>();
      __syncwarp();  // scales are copied by one lane for others
      store_tile(n, stage);
      if (lane == 0) s.there_of_warp[stage][warp] = static_cast<u8>(there);
      there >>= 8;
      async_proxy_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(&s.keys_full[stage]);
      copy_tile(n + AHEAD, AHEAD - 1, slots[0]);
      find(n + AHEAD + 1, 0);
    }
    copies_wait<0>();
  }
};
