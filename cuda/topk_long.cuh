// The part of topk.cu for rows with more logits than its threads hold.
//
// A sample of the row tells a bound that, most likely, somewhat more than k logits reach. What reaches it, in order of
// positions, becomes the entries that are selected from. Where that is too little or too much, a slower way needs no
// luck: it reads the row once for every round.
#pragma once
#include "topk_entries.cuh"

namespace gk {

constexpr i32 CAPACITY = THREADS * ITEMS, RUNS = WARPS * ITEMS;
// Of a row, over its blocks: twice as many fit if the blocks have equal parts of them.
constexpr i32 MOST_CANDIDATES = CLUSTER_BLOCKS == 1 ? CAPACITY / 8 * 7 : CAPACITY / 8 * 11;
constexpr i32 AHEAD = 16384 / THREADS, MOST_WORDS = 32, SEGMENT = MOST_WORDS * THREADS;

// A block's share of a row: positions begin .. end - 1, of which those below `limit`, at most `end`, are in the
// context.
struct Part {
  const float* logits;
  i32 begin, end, limit;

  GK_DEVICE float at(i32 position) const {
    return position < limit ? __ldg(logits + position) : negative_infinity();
  }

  // The sample: CAPACITY positions, in RUNS runs of neighbours, evenly spaced over a part that is longer. The lane's
  // position of item `i`.
  GK_DEVICE i32 sampled(const Self& self, i32 i) const {
    const u64 run = self.warp + i * WARPS, runs = (end - begin) / WARP;
    return begin + static_cast<i32>(run * runs / RUNS) * WARP + self.lane;
  }

  template <class Look>
  GK_DEVICE void visit(Look look) const {
#pragma unroll 4
    for (i32 position = begin + static_cast<i32>(threadIdx.x); position < limit; position += THREADS)
      look(order_key(__ldg(logits + position)));
  }
};

// The sum of what the threads before this one gave for `own`; `all`: of all threads. `turn`: 0 and 1 in turn.
GK_DEVICE i32 block_sum_before(const Self& self, Shared& shared, i32 turn, i32 own, i32& all) {
  const i32 through = warp_inclusive_scan(own);
  if (self.lane == WARP - 1) shared.totals[turn][self.warp] = through;
  __syncthreads();
  const i32 other = self.lane < WARPS ? shared.totals[turn][self.lane] : 0;
  all = __reduce_add_sync(ALL_LANES, other);
  return __reduce_add_sync(ALL_LANES, self.lane < self.warp ? other : 0) + through - own;
}

// The `words` times 32 positions of each warp, `words` times 1024 of the block, from `begin` on.
struct Segment {
  i32 begin, words;

  GK_DEVICE Segment(i32 begin, i32 end) : begin(begin), words(end - begin > SEGMENT / 2 ? MOST_WORDS : AHEAD) {}
  GK_DEVICE i32 position(const Self& self, i32 word) const {
    return begin + (self.warp * words + word) * WARP + self.lane;
  }
  GK_DEVICE i32 end() const { return begin + words * THREADS; }
};

// Put the positions of what reaches `bound` into `list`, as far as they fit. Returns how many there are.
GK_DEVICE i32 list_candidates(const Self& self, Shared& shared, const Part& part, float (&ahead)[AHEAD], float bound,
                              i32* list) {
  i32 count = 0;
  Segment segment(part.begin, part.end);
#pragma unroll 1
  for (i32 turn = 0; segment.begin < part.end; turn ^= 1) {
    const Segment next(segment.end(), part.end);
    u32 mine = 0;
#pragma unroll 1
    for (i32 first = 0; first < segment.words; first += AHEAD) {
      const bool within = first + AHEAD < segment.words;
      const i32 then = within ? segment.position(self, first + AHEAD) : next.position(self, 0);
      const float* from = pinned(part.logits + then);
      const i32 left = part.limit - then;
      const auto take = [&](i32 i) {
        const u32 word = __ballot_sync(ALL_LANES, ahead[i] >= bound);
        if (self.lane == first + i) mine = word;
      };
      if (__all_sync(ALL_LANES, left > (AHEAD - 1) * WARP)) {
#pragma unroll
        for (i32 i = 0; i < AHEAD; ++i) take(i), ahead[i] = __ldg(from + i * WARP);
      } else {
#pragma unroll
        for (i32 i = 0; i < AHEAD; ++i) {
          take(i);
          ahead[i] = i * WARP < left ? __ldg(from + i * WARP) : negative_infinity();
        }
      }
    }
    i32 all, at = count + block_sum_before(self, shared, turn, __popc(mine), all);
    const i32 position = segment.begin + (self.warp * segment.words + self.lane) * WARP;
#pragma unroll 1
    for (; mine && at < CAPACITY; mine &= mine - 1, ++at) list[at] = position + __ffs(static_cast<i32>(mine)) - 1;
    count += all;
    segment = next;
  }
  __syncthreads();
  return count;
}

// Find what may be selected: its number, or -1 where luck is needed and is not there. `values`: of the sample. `list`:
// its positions in order. `threshold`: the key that it reaches, and bins of which the last one is likely to hold only
// what is selected.
GK_DEVICE i32 find_candidates(const Self& self, Shared& shared, const Part& part, const float (&values)[ITEMS], i32 k,
                              i32* list, i32& round, Threshold& threshold) {
  if (k > MOST_CANDIDATES / 4 * 3) {
    cluster_wait();
    return -1;
  }
  float ahead[AHEAD];
  const Segment first(part.begin, part.end);
#pragma unroll
  for (i32 i = 0; i < AHEAD; ++i) ahead[i] = part.at(first.position(self, i));
  Entries sample(self, CAPACITY);
#pragma unroll
  for (i32 i = 0; i < ITEMS; ++i) {
    sample.keys[i] = part.sampled(self, i) < part.limit ? order_key(values[i]) : LOWEST_KEY;
    atomicAdd(&shared.histogram[0][sample.keys[i] >> FIRST_SHIFT], 1);
  }
  __syncthreads();
  cluster_wait();
  // The k-th largest is about there in the sample, give or take almost four standard deviations.
  const float ratio = static_cast<float>(CAPACITY) / (part.end - part.begin), expected = k * ratio;
  const float doubt = 3.75f * sqrtf(expected) + 4;
  const i32 ranks[RANKS] = {static_cast<i32>(expected + doubt), max(1, static_cast<i32>(expected - doubt))};
  find_bins(self, shared, 0, ranks);
  const u32 high = shared.found[1].digit;
  const i32 slack = max(0, min(ranks[0], static_cast<i32>(MOST_CANDIDATES * ratio) - ranks[0]));
  const Threshold low = narrow_down(self, shared, sample, {0, FIRST_SHIFT, 0, 0}, slack, round);
  if (low.key <= LOWEST_KEY) return -1;
  threshold.key = low.key;
  threshold.shift = max(0, WARP - __clz(static_cast<i32>(((high + 1) << FIRST_SHIFT) - 1 - low.key)) - BITS);
  const i32 count = list_candidates(self, shared, part, ahead, float_of(low.key), list);
  share_sum(self, shared, CANDIDATES, count);
  i32 all = 0, most = 0;
#pragma unroll
  for (i32 block = 0; block < CLUSTER_BLOCKS; ++block) {
    all += shared.sums[CANDIDATES][block][0];
    most = max(most, shared.sums[CANDIDATES][block][0]);
  }
  return most <= CAPACITY && all >= k ? count : -1;
}

// The lowest `count` set bits of `word`.
GK_DEVICE u32 lowest_bits(u32 word, i32 count) {
  if (count <= 0) return 0;
#pragma unroll 1
  for (i32 extra = __popc(word) - count; extra > 0; --extra) word &= ~(0x80000000u >> __clz(static_cast<i32>(word)));
  return word;
}

// Select from the logits themselves.
GK_DEVICE void select_far(const Self& self, Shared& shared, const Part& part, i32 k, i32& round, const Row& row) {
  i32* histogram = next_histogram(self, shared, ++round);
  part.visit([&](u32 key) { atomicAdd(&histogram[key >> FIRST_SHIFT], 1); });
  __syncthreads();
  const i32 ranks[RANKS] = {k, k};
  find_bins(self, shared, round, ranks);
  const Threshold threshold = narrow_down(self, shared, part, {0, FIRST_SHIFT, 0, 0}, 0, round);
  const bool splits = threshold.splits();
  const u32 sure = threshold.key + splits;  // what reaches it is selected; of what equals the threshold, `wanted`
  i32 above = 0, ties = 0;
  part.visit([&](u32 key) {
    above += key >= sure;
    ties += splits && key == threshold.key;
  });
  const auto in_blocks_before = [&](Sums which, i32 own) {
    share_sum(self, shared, which, __reduce_add_sync(ALL_LANES, own));
    return __reduce_add_sync(ALL_LANES, sum_of_warps(self, shared.sums[which], [&](i32 b) { return b < self.rank(); }));
  };
  above = in_blocks_before(CHOSEN, above), ties = in_blocks_before(TIES, ties);
  i32 first = above + min(ties, threshold.wanted);
#pragma unroll 1
  for (Segment segment(part.begin, part.end); segment.begin < part.end; segment = Segment(segment.end(), part.end)) {
    u32 chosen = 0, tied = 0;
#pragma unroll 1
    for (i32 word = 0; word < segment.words; ++word) {
      const i32 position = segment.position(self, word);
      const u32 key = position < part.limit ? order_key(__ldg(part.logits + position)) : 0;
      const u32 reaches = __ballot_sync(ALL_LANES, key >= sure), ties = __ballot_sync(ALL_LANES, key == threshold.key);
      if (self.lane == word) chosen = reaches, tied = splits ? ties : 0;
    }
    i32 all;
    const i32 before = ties + block_sum_before(self, shared, 0, __popc(tied), all);
    ties += all;
    chosen |= lowest_bits(tied, threshold.wanted - before);
    i32 at = first + block_sum_before(self, shared, 1, __popc(chosen), all);
    first += all;
    const i32 position = segment.begin + (self.warp * segment.words + self.lane) * WARP;
#pragma unroll 1
    for (; chosen; chosen &= chosen - 1, ++at) {
      const i32 next = position + __ffs(static_cast<i32>(chosen)) - 1;
      row.put(at, next, row.slot_of<false>(next, shared.pages));
    }
  }
}

}  // namespace gk
