// does    select each token's min(k, context_len) largest logits, ties by lowest position, in ascending position order,
//         and translate the positions into slots of the latent pool
// reads   logits f32 [tokens, width], rows logits_stride apart; context_lens, token_rows i32 [tokens];
//         page_table i32 [rows, table_width], rows table_stride apart; multiplier, shift: see Divisor
// writes  out_slot, out_position i32 [tokens, k], -1 past the selection; a slot is -1 too where the table is too narrow
// launch  grid tokens * CLUSTER, THREADS threads, 4 * THREADS * shared_items bytes of dynamic shared memory;
//         the CLUSTER blocks of a token share its row; shared_items is a multiple of 4
//         A row is read from memory once and its keys stay in shared memory, shared_items a thread (of a longer row the
//         others are read again in every pass). Up to three radix passes find the k-th largest key, one ordered pass
//         writes. Only integers are counted, hence deterministic.
//         For short rows every instruction counts: a warp has few keys and passes through all of the code.
// variant: THREADS=1024 CLUSTER=1
// variant: THREADS=1024 CLUSTER=2
// variant: THREADS=1024 CLUSTER=4
// variant: THREADS=1024 CLUSTER=8
// variant: THREADS=512 CLUSTER=1
#include "topk_row.cuh"

using namespace gk;

constexpr i32 CHUNK = WARP, DIGITS = 3, FIRST_SHIFT = 20, BINS = 4096, BINS_A_THREAD = BINS / THREADS, LIST = 2 * BINS;
static_assert(BINS_A_THREAD % 4 == 0, "a thread reads its bins four at a time");

struct Shared {
  union {
    i32 histogram[2][BINS];  // of the digits in turn
    i32 list[LIST];          // selected positions of this block, once the histograms are done with
  };
  i32 in_bins[DIGITS][CLUSTER_BLOCKS][WARPS];                      // keys in the bins of each warp of each block
  i32 above[CLUSTER_BLOCKS][WARPS], equal[CLUSTER_BLOCKS][WARPS];  // keys of each warp of each block, see Count
  i32 pages[PAGES];  // the part of the page table that this block may need
  Mailbox bins_known[DIGITS], counts_known;
  i32 digit, wanted, held;
};

// Between rounds the bits of `key` from `shift` on are decided: of the `held` keys that equal it in them, `wanted` are
// selected, and of the others those above.
struct Threshold {
  u32 key;
  i32 shift, wanted, held;
};

template <i32 BYTES>
GK_DEVICE void clear(const Self& self, void* shared) {
  static_assert(BYTES % (THREADS * sizeof(int4)) == 0, "all threads clear the same number of vectors");
#pragma unroll
  for (i32 i = 0; i < BYTES / sizeof(int4); i += THREADS) static_cast<int4*>(shared)[i + self.thread] = {0, 0, 0, 0};
}

// Read the stretch, eight items ahead, and count the highest digit of its keys. Clears both histograms before.
GK_DEVICE void read_keys(const Self& self, Shared& shared, Stretch& stretch) {
  float even[GROUP] = {}, odd[GROUP] = {};
  stretch.fetch(even, 0);
  stretch.fetch(odd, GROUP);
  clear<sizeof shared.histogram>(self, shared.histogram);
  __syncthreads();
#pragma unroll 1
  for (i32 first = 0; first < stretch.items; first += 2 * GROUP) {
    stretch.keep(even, first, shared.histogram[0], FIRST_SHIFT);
    stretch.fetch(even, first + 2 * GROUP);
    if (first + GROUP >= stretch.items) break;
    stretch.keep(odd, first + GROUP, shared.histogram[0], FIRST_SHIFT);
    stretch.fetch(odd, first + 3 * GROUP);
  }
  __syncthreads();
}

// Find the bin that the `wanted`-th largest of the keys counted over the cluster is in, and so decide that digit.
GK_DEVICE void decide_digit(const Self& self, Shared& shared, i32 digit, Threshold& threshold) {
  const i32 lane = self.lane, warp = self.warp, wanted = threshold.wanted;
  const int4* bins = reinterpret_cast<const int4*>(shared.histogram[digit % 2] + self.thread * BINS_A_THREAD);
  i32 sum = 0;
#pragma unroll
  for (i32 i = 0; i < BINS_A_THREAD / 4; ++i) sum += bins[i].x + bins[i].y + bins[i].z + bins[i].w;
  sum = __reduce_add_sync(ALL_LANES, sum);
  if (lane < CLUSTER_BLOCKS) send(&shared.in_bins[digit][self.rank][warp], shared.bins_known[digit], lane, sum);
  receive(shared.bins_known[digit]);
  sum = 0;
#pragma unroll
  for (i32 block = 0; block < CLUSTER_BLOCKS; ++block) sum += lane < WARPS ? shared.in_bins[digit][block][lane] : 0;
  i32 above = __reduce_add_sync(ALL_LANES, lane > warp ? sum : 0);
  sum = __shfl_sync(ALL_LANES, sum, warp);
  if (above < wanted && wanted <= above + sum) {
    i32 counts[BINS_A_THREAD] = {}, mine = 0;
#pragma unroll(16 / BINS_A_THREAD)
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
        shared.digit = self.thread * BINS_A_THREAD + i;
        shared.wanted = wanted - above;
        shared.held = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
  threshold.key |= static_cast<u32>(shared.digit) << threshold.shift;
  threshold.wanted = shared.wanted, threshold.held = shared.held;
}

// Find the k-th largest key, 12, 12 and 8 bits at a time from the top; no further than to where every key that equals
// the decided bits is selected.
GK_DEVICE Threshold find_threshold(const Self& self, Shared& shared, const Stretch& stretch, i32 k) {
  Threshold threshold = {0, FIRST_SHIFT, k, 0};
#pragma unroll 1
  for (i32 digit = 0;; ++digit) {
    decide_digit(self, shared, digit, threshold);
    if (threshold.wanted == threshold.held || digit == DIGITS - 1) return threshold;
    i32* histogram = shared.histogram[(digit + 1) % 2];
    if (digit == 1) {  // in use before; what another block read of it, it read before it sent the sums just received
      clear<sizeof shared.histogram[0]>(self, histogram);
      __syncthreads();
    }
    const u32 span = 1u << threshold.shift;
    threshold.shift = digit == 0 ? 8 : 0;
#pragma unroll 1
    for (i32 first = 0; first < stretch.items; first += GROUP) {
      u32 group[GROUP];
      stretch.read(group, first);
#pragma unroll
      for (i32 i = 0; i < GROUP; ++i) {
        const u32 offset = group[i] - threshold.key;
        if (offset < span) atomicAdd(&histogram[offset >> threshold.shift], 1);
      }
    }
    __syncthreads();
  }
}

// The lowest `count` set bits of `word`.
GK_DEVICE u32 lowest_bits(u32 word, i32 count) {
  if (count <= 0) return 0;
#pragma unroll 1
  for (i32 extra = __popc(word) - count; extra > 0; --extra) word &= ~(0x80000000u >> __clz(static_cast<i32>(word)));
  return word;
}

// What of a chunk of 32 items is selected. Bit n of lane j's words: the key of lane n's item j is above the threshold
// for certain; is one of those of which only some are selected.
struct Words {
  u32 above, equal;
};

GK_DEVICE Words find_selected(const Self& self, const Stretch& stretch, i32 first, const Threshold& threshold) {
  const bool split = threshold.wanted < threshold.held;
  const u32 floor = split ? threshold.key : threshold.key - 1;
  const i32 lane = self.lane, items = min(CHUNK, stretch.items - first);
  Words words = {0, 0};
#pragma unroll 1
  for (i32 item = 0; item < items; item += GROUP) {
    u32 group[GROUP];
    stretch.read(group, first + item);
#pragma unroll
    for (i32 i = 0; i < GROUP; ++i) {
      const u32 above = __ballot_sync(ALL_LANES, group[i] > floor);
      if (lane == item + i) words.above = above;
    }
    if (!split) continue;
#pragma unroll
    for (i32 i = 0; i < GROUP; ++i) {
      const u32 equal = __ballot_sync(ALL_LANES, group[i] == floor);
      if (lane == item + i) words.equal = equal;
    }
  }
  return words;
}

// How many keys are above, and how many equal.
struct Count {
  i32 above, equal;

  GK_DEVICE i32 selected(const Threshold& threshold) const { return above + min(equal, threshold.wanted); }
};

// What stands before this warp, before this block and before the next block of the cluster.
struct Places {
  Count warp, block, next;
};

GK_DEVICE void place(const Self& self, const i32 (*counts)[WARPS], i32& warp, i32& block, i32& next) {
  const i32 lane = self.lane, rank = self.rank, own = lane < WARPS ? counts[rank][lane] : 0;
  block = 0;
#pragma unroll
  for (i32 other = 0; other < CLUSTER_BLOCKS - 1; ++other)
    block += lane < WARPS && other < rank ? counts[other][lane] : 0;
  if (CLUSTER_BLOCKS > 1) block = __reduce_add_sync(ALL_LANES, block);
  warp = block + __reduce_add_sync(ALL_LANES, lane < self.warp ? own : 0);
  next = block + __reduce_add_sync(ALL_LANES, own);
}

GK_DEVICE Places find_places(const Self& self, Shared& shared, Count own) {
  if (self.lane < CLUSTER_BLOCKS) {
    send(&shared.above[self.rank][self.warp], shared.counts_known, self.lane, own.above);
    send(&shared.equal[self.rank][self.warp], shared.counts_known, self.lane, own.equal);
  }
  receive(shared.counts_known);
  Places places;
  place(self, shared.above, places.warp.above, places.block.above, places.next.above);
  place(self, shared.equal, places.warp.equal, places.block.equal, places.next.equal);
  return places;
}

// Put the positions that the lanes' words select into the list, the first one as entry `at`, so far as the list goes
// from 0 to LIST - 1. `items` words, at most 32, of positions from `position` on. Returns how many they are.
GK_DEVICE i32 list_selected(const Self& self, i32* list, u32 word, i32 items, i32 position, i32 at) {
  const i32 bits = items > 1 ? 1 << (WARP - __clz(items - 1)) : 1;  // a lane's share, so that all of them work
  const u32 offset = self.lane * bits;
  word = __shfl_sync(ALL_LANES, word, offset / WARP % WARP) >> offset % WARP & (ALL_LANES >> (WARP - bits));
  const i32 count = __popc(word), through = warp_inclusive_scan(count);
  at += through - count;
#pragma unroll 1
  for (; word; word &= word - 1, ++at)
    if (static_cast<u32>(at) < LIST) list[at] = position + offset + __ffs(static_cast<i32>(word)) - 1;
  return __shfl_sync(ALL_LANES, through, WARP - 1);
}

// Translate and write entries worker, worker + workers, ... below `count` of those from `first` on, two at a time so
// that their pages are looked up together. `position_of`: of an entry.
template <class PositionOf>
GK_DEVICE void write_entries(const Row& row, i32 first, i32 count, i32 worker, i32 workers, PositionOf position_of) {
#pragma unroll 1
  for (i32 i = worker; i < count; i += 2 * workers) {
    const bool two = i + workers < count;
    const i32 position = position_of(i), other_position = two ? position_of(i + workers) : -1;
    const i32 slot = row.slot_of(position), other_slot = row.slot_of(other_position);
    row.position[first + i] = position, row.slot[first + i] = slot;
    if (two) row.position[first + i + workers] = other_position, row.slot[first + i + workers] = other_slot;
  }
}

GK_DEVICE void write_selected(const Self& self, Shared& shared, const Stretch& stretch, const Threshold& threshold,
                              const Row& row) {
  const bool split = threshold.wanted < threshold.held;
  Words words = {0, 0};
  Count own = {0, 0};
  Places places = {};
  i32 first = 0, stop = 0;
  // Once over the chunks to count, then once for each LIST selected positions of the block. The words of a single chunk
  // are found only once.
#pragma unroll 1
  for (bool counted = false; !counted || first < stop; counted = true) {
    i32 at = places.warp.selected(threshold) - first, equal_before = places.warp.equal;
#pragma unroll 1
    for (i32 item = 0; item < stretch.items; item += CHUNK) {
      if (!counted || stretch.items > CHUNK) words = find_selected(self, stretch, item, threshold);
      if (!counted) {
        own.above += __popc(words.above), own.equal += __popc(words.equal);
        continue;
      }
      u32 selected = words.above;
      if (split) {
        const i32 count = __popc(words.equal), through = warp_inclusive_scan(count);
        selected |= lowest_bits(words.equal, threshold.wanted - equal_before - through + count);
        equal_before += __shfl_sync(ALL_LANES, through, WARP - 1);
      }
      const i32 items = min(CHUNK, stretch.items - item);
      at += list_selected(self, shared.list, selected, items, stretch.begin + item * WARP, at);
    }
    if (!counted) {
      own = {__reduce_add_sync(ALL_LANES, own.above), __reduce_add_sync(ALL_LANES, own.equal)};
      places = find_places(self, shared, own);
      first = places.block.selected(threshold), stop = places.next.selected(threshold);
      continue;
    }
    wait_for_copies();
    __syncthreads();
    write_entries(row, first, min(LIST, stop - first), self.thread, THREADS, [&](i32 i) { return shared.list[i]; });
    __syncthreads();
    first += LIST;
  }
}

extern "C" __global__ void GK_CLUSTER_LAUNCH(CLUSTER) __launch_bounds__(THREADS, 1024 / THREADS)
topk(const float* logits, i64 logits_stride, i32 width, const i32* context_lens, const i32* page_table,
     i64 table_stride, i32 table_width, const i32* token_rows, i32 block_size, i32 multiplier, i32 shift, i32 k,
     i32 shared_items, i32* out_slot, i32* out_position) {
  __shared__ __align__(16) Shared shared;
  GK_DYN_SHARED(u32, keys);
  const Self self;
  const i64 token = blockIdx.x / CLUSTER_BLOCKS;
  const i32 context = min(__ldg(context_lens + token), width);
  const i32 table_row = context > 0 ? __ldg(token_rows + token) : 0;
  Row row = {page_table + table_row * table_stride, table_width, {block_size, static_cast<u32>(multiplier), shift},
             out_slot + token * k, out_position + token * k, nullptr, 0, 0};
  if (context <= k) {
    write_entries(row, 0, k, self.rank * THREADS + self.thread, CLUSTER_BLOCKS * THREADS,
                  [&](i32 i) { return i < context ? i : -1; });
    return;
  }
  if (self.thread == 0) {
    for (Mailbox& box : shared.bins_known) open(box, CLUSTER_BLOCKS * WARPS);
    open(shared.counts_known, 2 * CLUSTER_BLOCKS * WARPS);
  }
  cluster_arrive();
  Stretch stretch(self, logits + token * logits_stride, context, keys, shared_items);
  read_keys(self, shared, stretch);
  const i32 begin = self.rank * stretch.items * THREADS;
  row.fetch_pages(self, shared.pages, begin, min(begin + stretch.items * THREADS, context));
  cluster_wait();
  const Threshold threshold = find_threshold(self, shared, stretch, k);
  write_selected(self, shared, stretch, threshold, row);
}
