// does    copy the index K of whole rows out of their pages into contiguous values and scales, still quantised
// reads   pages u8, page_stride bytes apart; page_table i32 [rows, table_width], rows table_stride apart;
//         start i32 [rows + 1]: output tokens start[b] .. start[b+1]-1 are positions 0, 1, .. of row b
// writes  out_values u8 [tokens, VALUE_BYTES], out_scales u8 [tokens, SCALE_BYTES]; nothing for output tokens outside
//         every row, past a row's table, or of a page outside the pool
// launch  grid ceil(tokens / 16), 128 threads: 8 a token
// variant: VALUE_BYTES=128 SCALE_BYTES=4 BLOCK_SIZE=64
// variant: VALUE_BYTES=64 SCALE_BYTES=4 BLOCK_SIZE=64
// variant: VALUE_BYTES=256 SCALE_BYTES=0 BLOCK_SIZE=64
// variant: VALUE_BYTES=512 SCALE_BYTES=0 BLOCK_SIZE=64
#include "codec.cuh"

static_assert(SCALE_BYTES % 4 == 0, "scales are copied in words of 4 bytes");

using namespace gk;

constexpr i32 WORKERS = 8;

// The last row that starts at or before `token`: rows without tokens share their start with the next one.
GK_DEVICE i32 row_of(const i32* start, i32 rows, i32 token) {
  i32 low = 0, high = rows;
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    if (start[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

extern "C" __global__ void __launch_bounds__(128)
gather_index_k(const u8* pages, i64 page_stride, i32 num_pages, const i32* page_table, i64 table_stride,
               i32 table_width, i32 rows, const i32* start, u8* out_values, u8* out_scales, i32 tokens) {
  const i32 token = blockIdx.x * (blockDim.x / WORKERS) + threadIdx.x / WORKERS, worker = threadIdx.x % WORKERS;
  if (token >= tokens || token < start[0] || token >= start[rows]) return;
  const i32 row = row_of(start, rows, token);
  const i32 position = token - start[row], column = position / BLOCK_SIZE, offset = position % BLOCK_SIZE;
  if (column >= table_width) return;
  const i32 index = page_table[row * table_stride + column];
  if (index < 0 || index >= num_pages) return;
  const u8* page = pages + index * page_stride;
  const u8* values = page + static_cast<i64>(offset) * VALUE_BYTES;
  const u8* scales = page + static_cast<i64>(BLOCK_SIZE) * VALUE_BYTES + static_cast<i64>(offset) * SCALE_BYTES;
  copy_bytes(out_values + static_cast<i64>(token) * VALUE_BYTES, values, VALUE_BYTES, worker, WORKERS);
  for (i32 i = 4 * worker; i < SCALE_BYTES; i += 4 * WORKERS)
    store_word<4>(out_scales + static_cast<i64>(token) * SCALE_BYTES + i, load_word<4>(scales + i));
}
