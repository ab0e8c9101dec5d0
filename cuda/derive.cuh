// The live set of one side and layer group, and how a batch row of it is derived from the device-resident table and
// lengths. Mirrored by graphkv.metadata (LiveSetStruct) and, in NumPy, by graphkv.latch: change all three together.
#pragma once
#include "common.cuh"

struct LiveSet {
  i64* token_ids;            // [tokens]
  i64* position;             // [tokens]
  i32* token_row;            // [tokens]
  i32* query_start;          // [rows + 1]
  i32* batch_row;            // [rows], -1 padded
  i32* seq_len;              // [rows], this step's tokens included
  i32* context_len;          // [tokens], position + 1, 0 padded
  i64* latent_slot;          // [tokens], -1 = do not write
  i64* index_slot;           // [tokens]
  i64* index_value_offset;   // [tokens], byte in a layer's view
  i64* index_scale_offset;   // [tokens], -1 where the format has no scales behind its values
  i32* latent_page_table;    // [rows, max_blocks], null page past the row's tokens
  i32* index_page_table;     // [rows, max_blocks]
  i32* live_columns;         // [rows], columns that may hold something else than the null page
  i32* schedule;             // [parts + 1, 2]
  u32* arrivals;             // [1], zero between launches
  i32 max_blocks;
  i32 block_shift;           // log2 of the block size
  i32 latent_scale;          // pages a block
  i32 index_scale;           // 0 where the group owns no index_k
  i32 index_value_bytes;     // a token
  i32 index_scale_bytes;     // a token, 0 if none
  i32 parts;                 // workers of the schedule
  i32 first_line;            // of the block table, where the group's lines begin
};

// Tokens a worker takes at a time; DeepGEMM's paged logits use the same split.
constexpr int SCHEDULE_SPLIT = 256;

__device__ __forceinline__ void derive_token(const LiveSet& live, const i32* table_row, i32 row, i32 token, i32 position) {
  const i32 block = table_row[position >> live.block_shift];
  const i32 offset = position & ((1 << live.block_shift) - 1);
  const i64 latent_page = (i64)block * live.latent_scale;
  const i64 index_page = (i64)block * live.index_scale;
  const i64 block_size = 1ll << live.block_shift;
  const i64 page_base = index_page * block_size * (live.index_value_bytes + live.index_scale_bytes);
  const bool store = block != 0, index = store && live.index_scale;  // the null block is never written
  live.position[token] = position;
  live.token_row[token] = row;
  live.context_len[token] = position + 1;
  live.latent_slot[token] = store ? latent_page * block_size + offset : -1;
  live.index_slot[token] = index ? index_page * block_size + offset : -1;
  live.index_value_offset[token] = index ? page_base + (i64)offset * live.index_value_bytes : -1;
  live.index_scale_offset[token] =
      index && live.index_scale_bytes
          ? page_base + block_size * live.index_value_bytes + (i64)offset * live.index_scale_bytes
          : -1;
}

__device__ __forceinline__ void pad_token(const LiveSet& live, i32 row, i32 token) {
  live.position[token] = 0;
  live.token_row[token] = row;
  live.context_len[token] = 0;
  live.latent_slot[token] = -1;
  live.index_slot[token] = -1;
  live.index_value_offset[token] = -1;
  live.index_scale_offset[token] = -1;
}

// Both page tables of batch row `row` from `table_row`; columns from `blocks` on show the null page. Only columns that
// hold something, or held something before, are touched: a short row of a wide table costs what it holds.
// All threads of the CTA take part. max_blocks is a multiple of 4 and the tables are 16-byte aligned.
__device__ __forceinline__ void derive_pages(const LiveSet& live, const i32* table_row, i32 row, i32 blocks) {
  const i32 before = live.live_columns[row];
  const i32 columns = blocks > before ? blocks : before;
  const int4* source = reinterpret_cast<const int4*>(table_row);
  int4* latent = reinterpret_cast<int4*>(live.latent_page_table + (i64)row * live.max_blocks);
  int4* index = reinterpret_cast<int4*>(live.index_page_table + (i64)row * live.max_blocks);
  for (i32 column = threadIdx.x * 4; column < columns; column += blockDim.x * 4) {
    int4 id = make_int4(0, 0, 0, 0);
    if (column < blocks) {
      id = source[column >> 2];
      if (column + 1 >= blocks) id.y = 0;
      if (column + 2 >= blocks) id.z = 0;
      if (column + 3 >= blocks) id.w = 0;
    }
    latent[column >> 2] = make_int4(id.x * live.latent_scale, id.y * live.latent_scale, id.z * live.latent_scale, id.w * live.latent_scale);
    index[column >> 2] = make_int4(id.x * live.index_scale, id.y * live.index_scale, id.z * live.index_scale, id.w * live.index_scale);
  }
  __syncthreads();  // every thread has read live_columns
  if (threadIdx.x == 0) live.live_columns[row] = blocks;
}

// The work split over `parts` workers, from this step's lengths: worker s starts at (row, segment of that row), the last
// entry is the end. Lengths count as at least 1, so a padded row costs one empty segment. One CTA, all threads.
// `shared` holds rows + 32 words.
__device__ __forceinline__ void derive_schedule(const LiveSet& live, i32 rows, i32* shared) {
  i32* prefix = shared;          // [rows], inclusive
  i32* warp_total = shared + rows;  // [32]
  const i32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = blockDim.x >> 5;
  i32 carry = 0;
  for (i32 base = 0; base < rows; base += blockDim.x) {
    const i32 row = base + thread;
    i32 length = row < rows ? reinterpret_cast<volatile i32*>(live.seq_len)[row] : 0;
    if (length < 1) length = 1;
    i32 sum = row < rows ? (length + SCHEDULE_SPLIT - 1) / SCHEDULE_SPLIT : 0;
    for (int step = 1; step < 32; step <<= 1) {
      const i32 left = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += left;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    i32 total = 0;
    for (i32 w = 0; w < warps; ++w) {
      if (w == warp) sum += total + carry;
      total += warp_total[w];
    }
    if (row < rows) prefix[row] = sum;
    carry += total;
    __syncthreads();
  }
  const i32 quota = carry / live.parts, rest = carry % live.parts;
  for (i32 part = thread; part <= live.parts; part += blockDim.x) {
    const i32 extra = part - (live.parts - rest);  // the last `rest` workers take one segment more
    const i32 start = part * quota + (extra > 0 ? extra : 0);
    i32 low = 0, high = rows;
    while (low < high) {
      const i32 middle = (low + high) / 2;
      if (prefix[middle] > start) high = middle;
      else low = middle + 1;
    }
    live.schedule[2 * part] = low;
    live.schedule[2 * part + 1] = low < rows ? start - (low ? prefix[low - 1] : 0) : 0;
  }
}

// True in every thread of the CTA that arrives last; what other CTAs wrote before arriving is visible to it.
__device__ __forceinline__ bool arrive_last(u32* arrivals, u32 ctas, i32* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *flag = atomicAdd(arrivals, 1u) == ctas - 1;
  __syncthreads();
  __threadfence();
  return *flag != 0;
}
