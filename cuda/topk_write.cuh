// How topk.cu writes what the threshold selects, in ascending order of positions.
#pragma once
#include "topk_digits.cuh"

namespace gk {

// The sum of what the warps before this one, over the cluster, gave for `own`; `all`: one word a warp.
GK_DEVICE i32 sum_before(const Self& self, i32 (*all)[WARPS], Mailbox& known, i32 own) {
  if (self.lane < CLUSTER_BLOCKS) send(&all[self.rank()][self.warp], known, self.lane, own);
  receive(known);
  i32 sum = 0;
#pragma unroll
  for (i32 block = 0; block < CLUSTER_BLOCKS; ++block) {
    const bool before = block < self.rank() || (block == self.rank() && self.lane < self.warp);
    sum += self.lane < WARPS && before ? all[block][self.lane] : 0;
  }
  return __reduce_add_sync(ALL_LANES, sum);
}

#if !LONG

// Every warp lists what it selects before it knows where that goes. `list`: room for all keys of the block.
GK_DEVICE void write_selected(const Self& self, Shared& shared, Stretch& stretch, const Threshold& threshold,
                              const Row& row, i32* list) {
  const u32 before = (1u << self.lane) - 1;
  if (threshold.splits()) {
    i32 equal = 0;
    stretch.visit_held([&](u32 key, i32) { equal += key == threshold.key; });
    equal = sum_before(self, shared.equal, shared.equal_known, __reduce_add_sync(ALL_LANES, equal));
#pragma unroll
    for (i32 i = 0; i < ITEMS; ++i) {
      const u32 word = __ballot_sync(ALL_LANES, stretch.held[i] == threshold.key);
      if (stretch.held[i] == threshold.key && equal + __popc(word & before) >= threshold.wanted) stretch.held[i] = 0;
      equal += __popc(word);
    }
  }
  list += self.warp * (ITEMS * WARP);
  const i32 position = stretch.begin + self.lane;
  i32 count = 0;
  stretch.visit_held([&](u32 key, i32 item) {
    const bool chosen = key >= threshold.key;
    const u32 word = __ballot_sync(ALL_LANES, chosen);
    if (chosen) list[count + __popc(word & before)] = position + item * WARP;
    count += __popc(word);
  });
  const i32 first = sum_before(self, shared.chosen, shared.chosen_known, count);
  __syncwarp();
  row.write<4>(first, count, self.lane, WARP, &shared.pages, [&](i32 i) { return list[i]; });
}

#else

// Bit i of lane n and bit n of lane i change places.
GK_DEVICE u32 transpose(const Self& self, u32 word) {
  u32 low = 0x0000ffffu;
#pragma unroll
  for (i32 step = 16; step > 0; step /= 2) {
    const u32 other = __shfl_xor_sync(ALL_LANES, word, step);
    word = self.lane & step ? (word & ~low) | (other >> step & low) : (word & low) | (other << step & ~low);
    low ^= low << step / 2;
  }
  return word;
}

// The lowest `count` set bits of `word`.
GK_DEVICE u32 lowest_bits(u32 word, i32 count) {
  if (count <= 0) return 0;
#pragma unroll 1
  for (i32 extra = __popc(word) - count; extra > 0; --extra) word &= ~(0x80000000u >> __clz(static_cast<i32>(word)));
  return word;
}

// Word j: of the 32 lanes' items first + j, of ITEMS, the keys above the threshold; and those that equal it.
struct Words {
  u32 above, equal;

  // Word j: what is selected. `seen`: how many keys that equal the threshold stand before; counted on.
  GK_DEVICE u32 selected(const Threshold& threshold, i32& seen) const {
    if (!threshold.splits()) return above;
    const i32 count = __popc(equal), through = warp_inclusive_scan(count);
    const i32 left = threshold.wanted - seen - through + count;
    seen += __shfl_sync(ALL_LANES, through, WARP - 1);
    return above | lowest_bits(equal, left);
  }
};

// Of the keys in registers, or of the ITEMS others from `first` on.
template <bool HELD>
GK_DEVICE Words find_words(const Self& self, const Stretch& stretch, const Threshold& threshold, i32 first = 0) {
  Words words = {0, 0};
#pragma unroll 1
  for (u32 more = threshold.splits();; --more) {  // first what is above, then, or at once, what is not below
    const u32 floor = threshold.key + more;
    u32 bits = 0;
    const auto look = [&](u32 key, i32 item) { bits |= (key >= floor) << item; };
    if (HELD) stretch.visit_held(look);
    else stretch.visit_stored(first, first + ITEMS, look);
    bits = transpose(self, bits);
    if (more == 0) {
      (threshold.splits() ? words.equal : words.above) = bits & ~words.above;
      return words;
    }
    words.above = bits;
  }
}

// Write what the lanes' words select, as entries from `first` on; `items` words of positions from `position` on.
GK_DEVICE i32 write_words(const Self& self, const Row& row, const Pages& pages, u32 word, i32 items, i32 position, i32 first) {
  const i32 bits = 1 << (WARP - __clz(items - 1));  // a lane's share, so that all of them work; items >= GROUP
  const i32 offset = self.lane * bits;
  word = __shfl_sync(ALL_LANES, word, offset / WARP % WARP) >> offset % WARP & (ALL_LANES >> (WARP - bits));
  const i32 count = __popc(word), through = warp_inclusive_scan(count);
  i32 at = first + through - count;
#pragma unroll 1
  for (; word; word &= word - 1, ++at) {
    const i32 chosen = position + offset + __ffs(static_cast<i32>(word)) - 1;
    row.put(at, chosen, row.slot_of(chosen, &pages));
  }
  return first + __shfl_sync(ALL_LANES, through, WARP - 1);
}

GK_DEVICE void write_selected(const Self& self, Shared& shared, Stretch& stretch, const Threshold& threshold,
                              const Row& row, i32*) {
  enum { TIES, COUNT, WRITE };
  const Words held = find_words<true>(self, stretch, threshold);
  Words stored = {0, 0};
  i32 seen = 0, at = 0;
  bool known = false;
#pragma unroll 1
  for (i32 pass = threshold.splits() ? TIES : COUNT; pass <= WRITE; ++pass) {
    i32 equal = seen, own = 0;
#pragma unroll 1
    for (i32 first = 0; first < stretch.items; first += ITEMS) {
      if (first < stretch.first_held() && !known) stored = find_words<false>(self, stretch, threshold, first);
      const Words words = first < stretch.first_held() ? stored : held;
      if (pass == TIES) {
        own += __popc(words.equal);
        continue;
      }
      const u32 word = words.selected(threshold, equal);
      own += __popc(word);
      if (pass == WRITE) {
        const i32 items = min(ITEMS, stretch.items - first), position = stretch.begin + first * WARP;
        at = write_words(self, row, shared.pages, word, items, position, at);
      }
    }
    if (pass == WRITE) return;
    known = stretch.first_held() == ITEMS;
    own = __reduce_add_sync(ALL_LANES, own);
    if (pass == TIES) seen = sum_before(self, shared.equal, shared.equal_known, own);
    else at = sum_before(self, shared.chosen, shared.chosen_known, own);
  }
}

#endif

}  // namespace gk
