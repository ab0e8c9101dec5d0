// does    copy the index K of whole rows out of their pages into contiguous values and scales, still quantised
// reads   pages u8, page_stride bytes apart; page_table i32 [rows, table_width], rows table_stride apart;
//         start i32 [rows + 1]: output tokens start[b] .. start[b+1]-1 are positions 0, 1, .. of row b
// writes  out_values u8 [tokens, VALUE_BYTES], out_scales u8 [tokens, SCALE_BYTES]; nothing for output tokens outside
//         every row, past a row's table, or of a page outside the pool
// launch  grid ceil(tokens / 128), 128 threads: 32 tokens a warp
// variant: VALUE_BYTES=128 SCALE_BYTES=4 BLOCK_SIZE=64
// variant: VALUE_BYTES=64 SCALE_BYTES=4 BLOCK_SIZE=64
// variant: VALUE_BYTES=256 SCALE_BYTES=0 BLOCK_SIZE=64
// variant: VALUE_BYTES=512 SCALE_BYTES=0 BLOCK_SIZE=64
#include "codec.cuh"

static_assert(SCALE_BYTES % 4 == 0, "scales are copied in words of 4 bytes");

using namespace gk;

constexpr i32 AT_ONCE = 8 * WARP;  // rows whose starts a warp looks at in one go

struct Rows {
  i32 low, high;
};

// Narrow `first` .. `first` + `count` - 1 to at most AT_ONCE rows, the last one that starts at or before `token` being
// among them: 32-fold at a time. A warp asks together.
GK_DEVICE void narrow(const i32* start, i32& first, i32& count, i32 token) {
  while (count > AT_ONCE) {
    const i32 step = div_ceil(count, WARP), probe = lane_index() * step;
    const u32 before = __ballot_sync(ALL_LANES, probe < count && start[first + min(probe, count - 1)] <= token);
    const i32 part = before == 0 ? 0 : WARP - 1 - __clz(before);
    first += part * step;
    count = min(step, count - part * step);
  }
}

// The last rows that start at or before `token` and `last`. Rows without tokens share their start with the next one.
GK_DEVICE Rows rows_of(const i32* start, i32 rows, i32 token, i32 last) {
  i32 first = 0, count = rows;
  narrow(start, first, count, token);
  i32 starts[AT_ONCE / WARP];
#pragma unroll
  for (i32 i = 0; i < AT_ONCE / WARP; ++i) {
    const i32 n = i * WARP + lane_index();
    starts[i] = n < count ? start[first + n] : 0x7fffffff;
  }
  i32 low = -1, high = -1;
#pragma unroll
  for (i32 i = 0; i < AT_ONCE / WARP; ++i) {
    low += __popc(__ballot_sync(ALL_LANES, starts[i] <= token));
    high += __popc(__ballot_sync(ALL_LANES, starts[i] <= last));
  }
  if (count < rows) {  // `last` may be beyond
    high = 0, count = rows - first;
    i32 from = first;
    narrow(start, from, count, last);
    high = from - first + count - 1;
  }
  return {first + max(low, 0), first + max(high, 0)};
}

GK_DEVICE i32 row_between(const i32* start, i32 low, i32 high, i32 token) {
  while (high > low) {
    const i32 middle = low + (high - low + 1) / 2;
    if (start[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

struct Source {
  const u8 *values, *scales;  // null: the output token has none
};

GK_DEVICE Source source_of(const u8* pages, i64 page_stride, i32 num_pages, const i32* table_row, i32 table_width,
                           i32 position) {
  const i32 column = position / BLOCK_SIZE, offset = position % BLOCK_SIZE;
  const i32 index = column < table_width ? table_row[column] : -1;
  if (index < 0 || index >= num_pages) return {nullptr, nullptr};
  const u8* page = pages + index * page_stride;
  return {page + static_cast<i64>(offset) * VALUE_BYTES,
          page + static_cast<i64>(BLOCK_SIZE) * VALUE_BYTES + static_cast<i64>(offset) * SCALE_BYTES};
}

GK_DEVICE const u8* of_lane(const u8* pointer, i32 lane) {
  return reinterpret_cast<const u8*>(__shfl_sync(ALL_LANES, reinterpret_cast<u64>(pointer), lane));
}

// The values of a warp's 32 tokens, lane i having token i's place, in vectors of 16 bytes: all that fit into registers
// are on the way before the first is written.
GK_DEVICE void copy_vectors(u8* to, const u8* values) {
  constexpr i32 VECTORS = VALUE_BYTES / 16, LOADS = 8;  // VECTORS loads a lane, LOADS at a time
  const i32 lane = lane_index();
  for (i32 first = 0; first < VECTORS; first += LOADS) {
    uint4 v[LOADS];
    const u8* from[LOADS];
#pragma unroll
    for (i32 i = 0; i < LOADS; ++i) {
      const i32 n = (first + i) * WARP + lane;
      from[i] = of_lane(values, n / VECTORS % WARP);
      if (first + i < VECTORS && from[i] != nullptr) v[i] = reinterpret_cast<const uint4*>(from[i])[n % VECTORS];
    }
#pragma unroll
    for (i32 i = 0; i < LOADS; ++i)
      if (first + i < VECTORS && from[i] != nullptr) reinterpret_cast<uint4*>(to)[(first + i) * WARP + lane] = v[i];
  }
}

GK_DEVICE void copy_each_byte(u8* to, const u8* values) {
  for (i32 i = 0; i < WARP; ++i) {
    const u8* from = of_lane(values, i);
    if (from != nullptr) copy_bytes(to + i * VALUE_BYTES, from, VALUE_BYTES, lane_index(), WARP);
  }
}

extern "C" __global__ void __launch_bounds__(128)
gather_index_k(const u8* pages, i64 page_stride, i32 num_pages, const i32* page_table, i64 table_stride,
               i32 table_width, i32 rows, const i32* start, u8* out_values, u8* out_scales, i32 tokens) {
  const i32 first = (blockIdx.x * warps_in_block() + warp_index()) * WARP, token = first + lane_index();
  if (first >= tokens) return;
  const i32 begin = start[0], end = min(tokens, start[rows]);
  const Rows around = rows_of(start, rows, first, first + WARP - 1);
  Source source = {nullptr, nullptr};
  if (token < end && token >= begin) {
    const i32 row = row_between(start, around.low, around.high, token);
    source = source_of(pages, page_stride, num_pages, page_table + row * table_stride, table_width, token - start[row]);
  }
  u8* to = out_values + static_cast<i64>(first) * VALUE_BYTES;
  const bool vectors = VALUE_BYTES % 16 == 0 &&
                       ((reinterpret_cast<i64>(pages) | page_stride | reinterpret_cast<i64>(out_values)) & 15) == 0;
  if (vectors) copy_vectors(to, source.values);
  else copy_each_byte(to, source.values);
  if (source.scales == nullptr) return;
  for (i32 i = 0; i < SCALE_BYTES; i += 4)
    store_word<4>(out_scales + static_cast<i64>(token) * SCALE_BYTES + i, load_word<4>(source.scales + i));
}
