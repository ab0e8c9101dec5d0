// does    list the slots that each token reads of a layer with a window: its sinks, then its window, by position
// reads   context_lens, token_rows i32 [tokens]; page_table i32 [rows, table_width], rows table_stride apart
// writes  out_slot i32 [tokens, k], -1 where a position has no page, and past the list
// launch  grid (tokens, chunks), 256 threads: thread n of a token's chunks writes entry n, n + 256 * chunks, ...
#include "common.cuh"

using namespace gk;

constexpr i32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    window_slots(const i32* context_lens, const i32* page_table, i64 table_stride, i32 table_width,
                 const i32* token_rows, i32 block_size, i32 window, i32 sinks, i32 k, i32* out_slot) {
  const i64 token = blockIdx.x;
  const i32 length = context_lens[token];
  const i32 start = length > window ? length - window : 0;  // of the window
  const i32 first = start < sinks ? start : sinks;          // sinks that are not in it
  const i32* row = page_table + (length > 0 ? token_rows[token] * table_stride : 0);
  const i64 slots = static_cast<i64>(table_width) * block_size;
  for (i32 i = blockIdx.y * THREADS + threadIdx.x; i < k; i += gridDim.y * THREADS) {
    const i32 position = i < first ? i : start + (i - first);
    const bool there = length > 0 && position < length && position < slots;
    out_slot[token * k + i] = there ? static_cast<i32>(token_slot(row, position, block_size)) : -1;
  }
}
