// How topk.cu finds the k-th largest key of a row: radix passes over digits of BITS bits from the top.
#pragma once
#include "topk_row.cuh"

namespace gk {

constexpr i32 BITS = THREADS == 1024 ? 12 : 11, BINS = 1 << BITS, DIGITS = 3, BINS_A_THREAD = BINS / THREADS;
constexpr i32 FIRST_SHIFT = 32 - BITS, SECOND_SHIFT = FIRST_SHIFT - BITS;
static_assert(BINS_A_THREAD % 4 == 0, "a thread reads its bins four at a time");
static_assert(SECOND_SHIFT > 0 && SECOND_SHIFT <= BITS, "three digits make a key");

struct Shared {
  i32 histogram[2][BINS];                            // of the digits in turn
  i32 in_bins[DIGITS][CLUSTER_BLOCKS][WARPS];        // keys in the bins of each warp of each block
  i32 equal[CLUSTER_BLOCKS][WARPS], chosen[CLUSTER_BLOCKS][WARPS];  // see WarpPlaces
  Pages pages;
  Mailbox bins_known[DIGITS], equal_known, chosen_known;
  i32 digit, wanted, held;
};

// Between rounds the bits of `key` from `shift` on are decided: of the `held` keys that equal it in them, `wanted` are
// selected, and of the others those above.
struct Threshold {
  u32 key;
  i32 shift, wanted, held;

  // Some keys that equal the threshold are selected, and some not.
  GK_DEVICE bool splits() const { return wanted < held; }
};

template <i32 BYTES>
GK_DEVICE void clear(const Self& self, void* shared) {
  static_assert(BYTES % (THREADS * sizeof(int4)) == 0, "all threads clear the same number of vectors");
#pragma unroll
  for (i32 i = 0; i < BYTES / sizeof(int4); i += THREADS) static_cast<int4*>(shared)[i + self.thread()] = {0, 0, 0, 0};
}

// Find the bin that the `wanted`-th largest of the keys counted over the cluster is in, and so decide that digit.
GK_DEVICE void decide_digit(const Self& self, Shared& shared, i32 digit, Threshold& threshold) {
  const i32 lane = self.lane, warp = self.warp, wanted = threshold.wanted;
  const int4* bins = reinterpret_cast<const int4*>(shared.histogram[digit % 2] + self.thread() * BINS_A_THREAD);
  i32 sum = 0;
#pragma unroll
  for (i32 i = 0; i < BINS_A_THREAD / 4; ++i) sum += bins[i].x + bins[i].y + bins[i].z + bins[i].w;
  sum = __reduce_add_sync(ALL_LANES, sum);
  if (lane < CLUSTER_BLOCKS) send(&shared.in_bins[digit][self.rank()][warp], shared.bins_known[digit], lane, sum);
  receive(shared.bins_known[digit]);
  sum = 0;
#pragma unroll
  for (i32 block = 0; block < CLUSTER_BLOCKS; ++block) sum += lane < WARPS ? shared.in_bins[digit][block][lane] : 0;
  i32 above = __reduce_add_sync(ALL_LANES, lane > warp ? sum : 0);
  sum = __shfl_sync(ALL_LANES, sum, warp);
  if (above < wanted && wanted <= above + sum) {
    i32 counts[BINS_A_THREAD] = {}, mine = 0;
#pragma unroll(LONG ? 1 : 4)
    for (i32 block = 0; block < CLUSTER_BLOCKS; ++block) {
#pragma unroll
      for (i32 i = 0; i < BINS_A_THREAD; i += 4) {
        const int4 part = peer_load(bins + i / 4, block);
        counts[i] += part.x, counts[i + 1] += part.y, counts[i + 2] += part.z, counts[i + 3] += part.w;
      }
    }
#pragma unroll
    for (i32 i = 0; i < BINS_A_THREAD; ++i) mine += counts[i];
    above += sum - warp_inclusive_scan(mine);
#pragma unroll
    for (i32 i = BINS_A_THREAD - 1; i >= 0; --i) {
      if (above < wanted && wanted <= above + counts[i]) {
        shared.digit = self.thread() * BINS_A_THREAD + i;
        shared.wanted = wanted - above;
        shared.held = counts[i];
      }
      above += counts[i];
    }
  }
  wait_for_copies();  // of pages, for all threads: after the first digit they have arrived
  __syncthreads();
  threshold.key |= static_cast<u32>(shared.digit) << threshold.shift;
  threshold.wanted = shared.wanted, threshold.held = shared.held;
}

// Find the k-th largest key, digit by digit, the first one being counted already; no further than to where every key
// that equals the decided bits is selected.
GK_DEVICE Threshold find_threshold(const Self& self, Shared& shared, const Stretch& stretch, i32 k) {
  Threshold threshold = {0, FIRST_SHIFT, k, 0};
#pragma unroll 1
  for (i32 digit = 0;; ++digit) {
    decide_digit(self, shared, digit, threshold);
    if (!threshold.splits() || digit == DIGITS - 1) return threshold;
    i32* histogram = shared.histogram[(digit + 1) % 2];
    if (digit == 1) {  // in use before; what another block read of it, it read before it sent the sums just received
      clear<sizeof shared.histogram[0]>(self, histogram);
      __syncthreads();
    }
    const u32 span = 1u << threshold.shift;
    threshold.shift = digit == 0 ? SECOND_SHIFT : 0;
    stretch.visit([&](u32 key, i32) {
      const u32 offset = key - threshold.key;
      if (offset < span) atomicAdd(&histogram[offset >> threshold.shift], 1);
    });
    __syncthreads();
  }
}

}  // namespace gk
