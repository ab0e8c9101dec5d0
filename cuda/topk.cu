// does    select each token's min(k, context_len) largest logits, ties by lowest position, in ascending position order,
//         and translate the positions into slots of the latent pool
// reads   logits f32 [tokens, width], rows logits_stride apart; context_lens, token_rows i32 [tokens];
//         page_table i32 [rows, table_width], rows table_stride apart
// writes  out_slot, out_position i32 [tokens, k], -1 past the selection; a slot is -1 too where the table is too narrow
// launch  grid tokens, 1024 threads
//         Three radix passes find the k-th largest key, two ordered ones write: integer counts, hence deterministic.
#include "common.cuh"

using namespace gk;

constexpr i32 THREADS = 1024, WARPS = THREADS / WARP, BINS = 2 * THREADS;

struct Threshold {
  u32 key;    // the k-th largest key
  i32 equal;  // keys equal to it that belong to the selection
};

struct Row {
  const i32* page_table;
  i32 table_width, block_size;
  i32 *slot, *position;
};

// Ascending like the floats; NaN counts as -inf and -0.0 as 0.0.
GK_DEVICE u32 order_key(float x) {
  if (x != x) x = negative_infinity();
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

GK_DEVICE void emit(const Row& row, i32 index, i32 position) {
  const i32 column = position / row.block_size;
  const bool known = position >= 0 && column < row.table_width;
  row.position[index] = position;
  row.slot[index] = known ? row.page_table[column] * row.block_size + position % row.block_size : -1;
}

// Find the k-th largest of `count` >= k keys, 11, 11 and 10 bits at a time from the top.
GK_DEVICE Threshold find_threshold(const float* logits, i32 count, i32 k, i32* histogram, i32* scratch) {
  __shared__ Threshold found;
  u32 key = 0, decided = 0;
  i32 wanted = k;
  const i32 shifts[3] = {21, 10, 0};
#pragma unroll
  for (i32 pass = 0; pass < 3; ++pass) {
    const u32 mask = pass < 2 ? 0x7ff : 0x3ff;
    for (i32 bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
    __syncthreads();
#pragma unroll 4
    for (i32 i = threadIdx.x; i < count; i += THREADS) {
      const u32 candidate = order_key(__ldg(logits + i));
      if ((candidate & decided) == key) atomicAdd(&histogram[candidate >> shifts[pass] & mask], 1);
    }
    __syncthreads();
    // Thread n counts the bins 2n and 2n + 1 from the top; the one whose bins reach `wanted` holds the digit.
    const i32 upper = BINS - 1 - 2 * static_cast<i32>(threadIdx.x);
    const i32 in_upper = histogram[upper], in_both = in_upper + histogram[upper - 1];
    i32 total;
    const i32 above = block_exclusive_scan(in_both, scratch, total);
    if (above < wanted && wanted <= above + in_both) {
      const bool first = wanted <= above + in_upper;
      found.key = key | static_cast<u32>(first ? upper : upper - 1) << shifts[pass];
      found.equal = wanted - above - (first ? 0 : in_upper);
    }
    __syncthreads();
    key = found.key;
    wanted = found.equal;
    decided |= mask << shifts[pass];
  }
  return {key, wanted};
}

// Each warp counts, then writes, a stretch of neighbouring positions; the counts give it its place in the output.
GK_DEVICE void write_selected(const float* logits, i32 count, Threshold threshold, const Row& row) {
  __shared__ i32 above_in[WARPS], equal_in[WARPS];
  const i32 stretch = div_ceil(div_ceil(count, WARPS), WARP) * WARP;
  const i32 begin = warp_index() * stretch, end = min(begin + stretch, count);
  i32 above = 0, equal = 0;
#pragma unroll 4
  for (i32 i = begin + lane_index(); i < end; i += WARP) {
    const u32 key = order_key(__ldg(logits + i));
    above += key > threshold.key;
    equal += key == threshold.key;
  }
  above = warp_sum(above);
  equal = warp_sum(equal);
  if (lane_index() == 0) above_in[warp_index()] = above, equal_in[warp_index()] = equal;
  __syncthreads();
  const bool before = lane_index() < warp_index();
  above = warp_sum(before ? above_in[lane_index()] : 0);
  equal = warp_sum(before ? equal_in[lane_index()] : 0);
  const u32 lanes_below = (1u << lane_index()) - 1;
  for (i32 i = begin + lane_index(); i - lane_index() < end; i += WARP) {
    const u32 key = i < end ? order_key(__ldg(logits + i)) : 0;
    const u32 above_lanes = __ballot_sync(ALL_LANES, i < end && key > threshold.key);
    const u32 equal_lanes = __ballot_sync(ALL_LANES, i < end && key == threshold.key);
    const i32 rank_above = above + __popc(above_lanes & lanes_below);
    const i32 rank_equal = equal + __popc(equal_lanes & lanes_below);
    const bool tied = equal_lanes >> lane_index() & 1;
    if (above_lanes >> lane_index() & 1 || (tied && rank_equal < threshold.equal))
      emit(row, rank_above + min(rank_equal, threshold.equal), i);
    above += __popc(above_lanes);
    equal += __popc(equal_lanes);
  }
}

extern "C" __global__ void __launch_bounds__(1024)
topk(const float* logits, i64 logits_stride, i32 width, const i32* context_lens, const i32* page_table,
     i64 table_stride, i32 table_width, const i32* token_rows, i32 block_size, i32 k, i32* out_slot,
     i32* out_position) {
  __shared__ i32 histogram[BINS], scratch[WARP];
  const i64 token = blockIdx.x;
  const i32 context = min(context_lens[token], width);
  Row row = {page_table, table_width, block_size, out_slot + token * k, out_position + token * k};
  if (context > 0) row.page_table += token_rows[token] * table_stride;
  if (context <= k) {
    for (i32 i = threadIdx.x; i < k; i += THREADS) emit(row, i, i < context ? i : -1);
    return;
  }
  const float* token_logits = logits + token * logits_stride;
  const Threshold threshold = find_threshold(token_logits, context, k, histogram, scratch);
  write_selected(token_logits, context, threshold, row);
}
