// How topk.cu finds the key of a rank: radix passes over digits of BITS bits, counted over a cluster.
#pragma once
#include "topk_row.cuh"

namespace gk {

constexpr i32 BITS = THREADS == 1024 ? 12 : 11, BINS = 1 << BITS, FIRST_SHIFT = 32 - BITS;
constexpr i32 BINS_A_THREAD = BINS / THREADS;
constexpr i32 RANKS = LONG ? 2 : 1, ROUNDS = LONG ? 10 : 3;
static_assert(BINS_A_THREAD % 4 == 0, "a thread reads its bins four at a time");

struct Found {
  i32 digit, wanted, held;
};

struct Shared {
  i32 histogram[2][BINS];                  // of the rounds in turn
  i32 in_bins[2][CLUSTER_BLOCKS][WARPS];   // likewise: keys in the bins of each warp of each block
  i32 sums[3][CLUSTER_BLOCKS][WARPS];      // see Sums
  i32 totals[2][WARPS];                    // see block_sum_before
  Pages pages;
  Mailbox bins_known[ROUNDS], sums_known[3];
  Found found[RANKS];
};

// What is summed over the warps of a cluster, each once.
enum Sums { TIES, CHOSEN, CANDIDATES };

// Keys from `key` on, in bins of 2^shift. Once a round is over: of the `held` keys in one such bin `wanted` are
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

// Of the words that all warps of the cluster sent, the sum of those of the blocks and lanes' warps that are `taken`.
template <class Taken>
GK_DEVICE i32 sum_of_warps(const Self& self, const i32 (*all)[WARPS], Taken taken) {
  i32 sum = 0;
#pragma unroll
  for (i32 block = 0; block < CLUSTER_BLOCKS; ++block)
    sum += self.lane < WARPS && taken(block) ? all[block][self.lane] : 0;
  return sum;
}

GK_DEVICE void share_sum(const Self& self, Shared& shared, Sums which, i32 own) {
  if (self.lane < CLUSTER_BLOCKS)
    send(&shared.sums[which][self.rank()][self.warp], shared.sums_known[which], self.lane, own);
  receive(shared.sums_known[which]);
}

// The sum of what the warps before this one, over the cluster, gave for `own`.
GK_DEVICE i32 sum_before(const Self& self, Shared& shared, Sums which, i32 own) {
  share_sum(self, shared, which, own);
  return __reduce_add_sync(ALL_LANES, sum_of_warps(self, shared.sums[which], [&](i32 block) {
    return block < self.rank() || (block == self.rank() && self.lane < self.warp);
  }));
}

// Of a bin of the thread: `above` keys are above its last bin.
GK_DEVICE void look_for(const Self& self, Found& found, i32 wanted, i32 above, const i32 (&counts)[BINS_A_THREAD]) {
#pragma unroll
  for (i32 i = BINS_A_THREAD - 1; i >= 0; --i) {
    if (above < wanted && wanted <= above + counts[i])
      found = {self.thread() * BINS_A_THREAD + i, wanted - above, counts[i]};
    above += counts[i];
  }
}

// Find the bins that the `wanted`-th largest of the keys counted over the cluster are in; all threads may read
// shared.found until the barrier before the next round.
GK_DEVICE void find_bins(const Self& self, Shared& shared, i32 round, const i32 (&wanted)[RANKS]) {
  const i32 lane = self.lane, warp = self.warp;
  const int4* bins = reinterpret_cast<const int4*>(shared.histogram[round % 2] + self.thread() * BINS_A_THREAD);
  i32(*in_bins)[WARPS] = shared.in_bins[round % 2];
  i32 counts[BINS_A_THREAD], mine = 0;
#pragma unroll
  for (i32 i = 0; i < BINS_A_THREAD; i += 4) {
    const int4 part = bins[i / 4];
    counts[i] = part.x, counts[i + 1] = part.y, counts[i + 2] = part.z, counts[i + 3] = part.w;
    mine += part.x + part.y + part.z + part.w;
  }
  if (CLUSTER_BLOCKS == 1) {
    const i32 through = warp_inclusive_scan(mine);
    if (lane == WARP - 1) in_bins[0][warp] = through;
    const i32 sum = __shfl_sync(ALL_LANES, through, WARP - 1);
    __syncthreads();
    const i32 other = lane < WARPS ? in_bins[0][lane] : 0;
    const i32 above = __reduce_add_sync(ALL_LANES, lane > warp ? other : 0) + sum - through;
#pragma unroll
    for (i32 n = 0; n < RANKS; ++n)
      if (above < wanted[n] && wanted[n] <= above + mine) look_for(self, shared.found[n], wanted[n], above, counts);
  } else {
    i32 sum = __reduce_add_sync(ALL_LANES, mine);
    if (lane < CLUSTER_BLOCKS) send(&in_bins[self.rank()][warp], shared.bins_known[round], lane, sum);
    receive(shared.bins_known[round]);
    sum = sum_of_warps(self, in_bins, [](i32) { return true; });
    i32 above = __reduce_add_sync(ALL_LANES, lane > warp ? sum : 0);
    sum = __shfl_sync(ALL_LANES, sum, warp);
    bool here = false;
#pragma unroll
    for (i32 n = 0; n < RANKS; ++n) here |= above < wanted[n] && wanted[n] <= above + sum;
    if (here) {
#pragma unroll(LONG ? 1 : 4)
      for (i32 step = 1; step < CLUSTER_BLOCKS; ++step) {
#pragma unroll
        for (i32 i = 0; i < BINS_A_THREAD; i += 4) {
          const int4 part = peer_load(bins + i / 4, self.rank() ^ step);
          counts[i] += part.x, counts[i + 1] += part.y, counts[i + 2] += part.z, counts[i + 3] += part.w;
          mine += part.x + part.y + part.z + part.w;
        }
      }
      above += sum - warp_inclusive_scan(mine);
#pragma unroll
      for (i32 n = 0; n < RANKS; ++n) look_for(self, shared.found[n], wanted[n], above, counts);
    }
  }
  wait_for_copies();  // of pages, for all threads: after the first round they have arrived
  __syncthreads();
}

// The next round's bins, empty.
GK_DEVICE i32* next_histogram(const Self& self, Shared& shared, i32 round) {
  i32* histogram = shared.histogram[round % 2];
  if (round > 1) {  // in use before; what another block read of it, it read before it sent the sums received last
    clear<sizeof shared.histogram[0]>(self, histogram);
    __syncthreads();
  }
  return histogram;
}

// Go on from the bin that was found until every key in it is selected, or no more than `slack` are in it, or it has one
// key. `keys.visit` gives every key of the block to what it is called with. `round`: of the bins counted last.
template <class Keys>
GK_DEVICE Threshold narrow_down(const Self& self, Shared& shared, const Keys& keys, Threshold threshold, i32 slack,
                                i32& round) {
#pragma unroll 1
  for (;;) {
    const Found found = shared.found[0];
    threshold.key += static_cast<u32>(found.digit) << threshold.shift;
    threshold.wanted = found.wanted, threshold.held = found.held;
    if (!threshold.splits() || threshold.shift == 0 || found.held <= slack) return threshold;
    const u32 last = (1u << threshold.shift) - 1;
    threshold.shift = max(0, threshold.shift - BITS);
    i32* histogram = next_histogram(self, shared, ++round);
    keys.visit([&](u32 key) {
      const u32 offset = key - threshold.key;
      if (offset <= last) atomicAdd(&histogram[offset >> threshold.shift], 1);
    });
    __syncthreads();
    i32 wanted[RANKS];
#pragma unroll
    for (i32 n = 0; n < RANKS; ++n) wanted[n] = threshold.wanted;
    find_bins(self, shared, round, wanted);
  }
}

}  // namespace gk
