// The part of topk.cu that selects from keys in registers.
#pragma once
#include "topk_digits.cuh"

namespace gk {

// Keys of a block's entries 0, 1, 2, ...: the `items` times 32 from `first` on are a warp's, lane n having every 32nd
// of them from first + n on. GROUP items are handled at once.
struct Entries {
  static constexpr i32 GROUP = ITEMS % 8 == 0 ? 4 : 1;
  i32 first, items;
  u32 keys[ITEMS];

  GK_DEVICE Entries(const Self& self, i32 count) {
    items = div_ceil(max(1, count), THREADS * GROUP) * GROUP;
    first = self.warp * items * WARP;
  }

  // How many of the lane's items are below `count`, and maybe more.
  GK_DEVICE i32 items_below(const Self& self, i32 count) const { return (count - first - self.lane + WARP - 1) >> 5; }

  // Make the keys out of the values of the entries below `count`. The others get a key below all, and are not selected.
  GK_DEVICE void make_keys(const Self& self, const float (&values)[ITEMS], i32 count) {
    visit_items([&](i32 i) { keys[i] = order_key(values[i]); });
    const i32 mine = items_below(self, count);
    if (mine >= items) return;
#pragma unroll
    for (i32 i = 0; i < ITEMS; ++i)
      if (i >= mine) keys[i] = 0;
  }

  // Give every key to `look`. A warp's lanes do so together.
  template <class Look>
  GK_DEVICE void visit(Look look) const {
    visit_items([&](i32 i) { look(keys[i]); });
  }

  template <class Look>
  GK_DEVICE void visit_items(Look look) const {
#pragma unroll
    for (i32 begin = 0; begin < ITEMS; begin += GROUP) {
      if (begin >= items) break;
#pragma unroll
      for (i32 i = begin; i < begin + GROUP; ++i) look(i);
    }
  }
};

// Of the keys that equal the threshold, forget those that are not selected.
GK_DEVICE void drop_ties(const Self& self, Shared& shared, Entries& entries, const Threshold& threshold) {
  const u32 before = (1u << self.lane) - 1;
  i32 ties = 0;
  entries.visit([&](u32 key) { ties += key == threshold.key; });
  ties = sum_before(self, shared, TIES, __reduce_add_sync(ALL_LANES, ties));
  entries.visit_items([&](i32 i) {
    const u32 word = __ballot_sync(ALL_LANES, entries.keys[i] == threshold.key);
    if (entries.keys[i] == threshold.key && ties + __popc(word & before) >= threshold.wanted) entries.keys[i] = 0;
    ties += __popc(word);
  });
}

// Every warp lists the entries that it selects before it knows where they go. `list`: room for all entries of the
// block. `position_of`: of an entry.
template <class PositionOf>
GK_DEVICE void write_selected(const Self& self, Shared& shared, Entries& entries, const Threshold& threshold,
                              const Row& row, i32* list, PositionOf position_of) {
  if (threshold.splits()) drop_ties(self, shared, entries, threshold);
  const u32 before = (1u << self.lane) - 1;
  list += self.warp * (ITEMS * WARP);
  i32 own = 0;
  entries.visit_items([&](i32 i) {
    const bool chosen = entries.keys[i] >= threshold.key;
    const u32 word = __ballot_sync(ALL_LANES, chosen);
    if (chosen) list[own + __popc(word & before)] = entries.first + i * WARP + self.lane;
    own += __popc(word);
  });
  const i32 first = sum_before(self, shared, CHOSEN, own);
  __syncwarp();
  const auto listed = [&](i32 i) { return position_of(list[i]); };
  if (shared.pages.count == shared.pages.wanted) {
    row.write<4, true>(first, own, self.lane, WARP, shared.pages, listed);
  } else {
    row.write<1, false>(first, own, self.lane, WARP, shared.pages, listed);
  }
}

// Find the k-th largest key over the cluster. `guess`: bins to begin with. If it has a key, those below that one are no
// candidates, and if the last bin, for all keys above the others, is met, all begins anew. `round`: of the bins
// to count in; the other blocks are there once round 0 is over.
GK_DEVICE Threshold find_threshold(const Self& self, Shared& shared, const Entries& entries, Threshold guess, i32 k,
                                   i32 round) {
  i32 wanted[RANKS];
#pragma unroll
  for (i32 n = 0; n < RANKS; ++n) wanted[n] = k;
#pragma unroll 1
  for (;; ++round) {
    i32* histogram = next_histogram(self, shared, round);
    entries.visit([&](u32 key) {
      if (!LONG) atomicAdd(&histogram[key >> FIRST_SHIFT], 1);
      else if (key >= guess.key) atomicAdd(&histogram[min((key - guess.key) >> guess.shift, BINS - 1u)], 1);
    });
    __syncthreads();
    if (round == 0) cluster_wait();
    find_bins(self, shared, round, wanted);
    if (!LONG || guess.key == 0 || shared.found[0].digit < BINS - 1) break;
    guess = {0, FIRST_SHIFT, 0, 0};
  }
  return narrow_down(self, shared, entries, guess, 0, round);
}

}  // namespace gk
