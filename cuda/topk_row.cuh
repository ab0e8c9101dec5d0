// A token's row of topk.cu: the keys of its logits, and where its selection goes.
//
// THREADS, the threads of a block, CLUSTER, the blocks of a row, ITEMS, the keys that a thread holds in registers, and
// LONG, whether it may have more than those, are defined by whoever compiles.
#pragma once
#include "cluster.cuh"

namespace gk {

constexpr i32 WARPS = THREADS / WARP, GROUP = 4, PAGES = 1024;
constexpr u32 LOWEST_KEY = 0x007fffffu;  // of -inf

// Ascending like the floats; NaN counts as -inf and -0.0 as 0.0.
GK_DEVICE u32 order_key(float x) {
  const u32 bits = __float_as_uint(fmaxf(x, negative_infinity()) + 0.0f);
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}

#ifndef GK_HOST
// What goes through here stays in a register; the compiler would rather work it out anew in every round of a loop.
GK_DEVICE i32 pinned(i32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
GK_DEVICE const float* pinned(const float* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
GK_DEVICE u32* pinned_shared(u32* pointer) {
  asm volatile("" : "+l"(pointer));
  __builtin_assume(__isShared(pointer));
  return pointer;
}
GK_DEVICE void copy_async(i32* shared, const i32* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}
GK_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else
GK_DEVICE i32 pinned(i32 value) { return value; }
GK_DEVICE const float* pinned(const float* pointer) { return pointer; }
GK_DEVICE u32* pinned_shared(u32* pointer) { return pointer; }
GK_DEVICE void copy_async(i32* shared, const i32* global) { *shared = *global; }
GK_DEVICE void wait_for_copies() {}
#endif

// Division of 0 .. 2^31 - 1 by a constant of the launch: n / by == n * multiplier >> 31 + shift.
struct Divisor {
  i32 by;
  u32 multiplier;
  i32 shift;

  GK_DEVICE i32 quotient(i32 n) const { return static_cast<i32>(__umulhi(2 * static_cast<u32>(n), multiplier) >> shift); }
};

// The token whose row this block selects from.
GK_DEVICE i64 token() { return blockIdx.x / CLUSTER_BLOCKS; }

// Which thread this is.
struct Self {
  i32 lane = pinned(lane_index()), warp = pinned(warp_index());

  GK_DEVICE i32 thread() const { return warp * WARP + lane; }
  GK_DEVICE i32 rank() const { return cluster_rank(); }
};

// In shared memory: the columns of a page table row that a block may need, `count` from `first` on.
struct Pages {
  i32 first, count;
  i32 at[PAGES];
};

// Where a token's selection goes, and its row of the page table.
struct Row {
  const i32* page_table;
  i64 table_stride;
  i32 table_row, table_width;
  Divisor block_size;
  i32 *slot, *position;  // of the first token
  i32 k;

  GK_DEVICE const i32* columns() const { return page_table + pinned(table_row) * table_stride; }

  // Start to copy the columns of positions begin .. end - 1, if they fit.
  GK_DEVICE void fetch_pages(const Self& self, Pages& pages, i32 begin, i32 end) const {
    const i32 first = block_size.quotient(begin);
    i32 count = begin < end ? min(block_size.quotient(end - 1) + 1, table_width) - first : 0;
    if (count > PAGES) count = 0;
    if (self.thread() == 0) pages.first = first, pages.count = count;
    const i32* from = columns() + first;
#pragma unroll 1
    for (i32 i = self.thread(); i < count; i += THREADS) copy_async(&pages.at[i], from + i);
  }

  // `pages`: fetched, or null.
  GK_DEVICE i32 slot_of(i32 at, const Pages* pages) const {
    const i32 column = block_size.quotient(at);
    if (at < 0 || column >= table_width) return -1;
    const bool near = pages && static_cast<u32>(column - pages->first) < pages->count;
    const i32 page = near ? pages->at[column - pages->first] : __ldg(columns() + column);
    return (page - column) * block_size.by + at;
  }

  GK_DEVICE void put(i32 entry, i32 at, i32 to) const {
    position[token() * k + entry] = at;
    slot[token() * k + entry] = to;
  }

  // Translate and write entries worker, worker + workers, ... below `count` of those from `first` on, BATCH at a time
  // so that their pages are looked up together. `position_of`: of an entry.
  template <i32 BATCH, class PositionOf>
  GK_DEVICE void write(i32 first, i32 count, i32 worker, i32 workers, const Pages* pages, PositionOf position_of) const {
#pragma unroll 1
    for (i32 i = worker; i < count; i += BATCH * workers) {
      i32 at[BATCH], to[BATCH];
#pragma unroll
      for (i32 n = 0; n < BATCH; ++n) at[n] = i + n * workers < count ? position_of(i + n * workers) : -1;
#pragma unroll
      for (i32 n = 0; n < BATCH; ++n) to[n] = slot_of(at[n], pages);
#pragma unroll
      for (i32 n = 0; n < BATCH; ++n) {
        if (i + n * workers >= count) break;
        put(first + i + n * workers, at[n], to[n]);
      }
    }
  }
};

// The neighbouring positions that one warp looks after: `items` times 32, lane n having every 32nd from begin + n on.
// The keys of items first_held() on are in registers, those before, if LONG, in shared memory, or, from `resident` on,
// made anew from the logits whenever they are asked for. What is past the context counts as -inf: as the highest
// positions of all they lose every tie, and the context is longer than the selection.
struct Stretch {
  const float* logits;
  i64 logits_stride;
  i32 shared_items;
  i32 lane, context, begin, items;
  u32* stored;  // of the lane's first position
  u32 held[ITEMS];

  // Positions below `reach`, not less than the context, are laid out over the threads; for LONG = 0 they all fit. The
  // context may follow.
  GK_DEVICE Stretch(const Self& self, const float* logits, i64 stride, i32 reach, u32* shared, i32 shared_items)
      : logits(logits), logits_stride(stride), shared_items(shared_items), lane(self.lane), context(0) {
    items = pinned(div_ceil(div_ceil(reach, CLUSTER_BLOCKS * THREADS), GROUP) * GROUP);
    begin = (self.rank() * WARPS + self.warp) * items * WARP;
    stored = pinned_shared(shared + self.warp * resident() * WARP + lane);
  }

  GK_DEVICE i32 first_held() const { return LONG ? (items - 1) & -ITEMS : 0; }
  GK_DEVICE i32 resident() const { return min(first_held(), shared_items); }

  // The lane's items that are within `context`, and their logits.
  GK_DEVICE i32 items_within(i32 context) const { return min(items, (context - begin - lane + WARP - 1) >> 5); }
  GK_DEVICE const float* from() const { return logits + token() * logits_stride + begin + lane; }

  GK_DEVICE void fetch_first(float (&values)[ITEMS], i32 reach) const {
    const float* at = pinned(from());
    const i32 mine = items_within(reach);
#pragma unroll
    for (i32 i = 0; i < ITEMS; ++i)
      if (i < mine) values[i] = __ldcs(at + i * WARP);
  }

  // Make the keys, the first ones out of `values`, and give each to `count`.
  template <class Count>
  GK_DEVICE void keep(float (&values)[ITEMS], Count count) {
    const i32 mine = items_within(context);
    const auto key_of = [&](float value, i32 item) { return item < mine ? order_key(value) : LOWEST_KEY; };
    if (LONG) {
      const float* next = pinned(from() + ITEMS * WARP);
#pragma unroll 1
      for (i32 first = 0; first < first_held(); first += ITEMS, next += ITEMS * WARP) {
#pragma unroll
        for (i32 i = 0; i < ITEMS; ++i) {
          const u32 key = key_of(values[i], first + i);
          if (first + ITEMS + i < mine) values[i] = __ldcs(next + i * WARP);
          if (first + i < resident()) stored[(first + i) * WARP] = key;
          count(key);
        }
      }
    }
#pragma unroll
    for (i32 i = 0; i < ITEMS; ++i) held[i] = key_of(values[i], first_held() + i);
    visit_held([&](u32 key, i32) { count(key); });
  }

  // Give the keys in registers and their items, counted from first_held(), to `look`. A warp's lanes do so together.
  template <class Look>
  GK_DEVICE void visit_held(Look look) const {
    const i32 left = items - first_held();
#pragma unroll
    for (i32 first = 0; first < ITEMS; first += GROUP) {
      if (first >= left) break;
#pragma unroll
      for (i32 i = first; i < first + GROUP; ++i) look(held[i], i);
    }
  }

  // Likewise of the others, from item `begin` to before item `end`, multiples of GROUP, counted from `begin`.
  template <class Look>
  GK_DEVICE void visit_stored(i32 begin, i32 end, Look look) const {
#pragma unroll 1
    for (i32 first = begin; first < end; first += GROUP) {
      u32 keys[GROUP];
      if (__builtin_expect(first < resident(), true)) {
#pragma unroll
        for (i32 i = 0; i < GROUP; ++i) keys[i] = stored[(first + i) * WARP];
      } else {
        // Pinned, so that nothing of what this needs is worked out, and kept, before.
        const i32 position = pinned(this->begin + lane + first * WARP), left = context - position;
        const float* at = logits + token() * logits_stride + position;
#pragma unroll
        for (i32 i = 0; i < GROUP; ++i) keys[i] = i * WARP < left ? order_key(__ldg(at + i * WARP)) : LOWEST_KEY;
      }
#pragma unroll
      for (i32 i = 0; i < GROUP; ++i) look(keys[i], first - begin + i);
    }
  }

  template <class Look>
  GK_DEVICE void visit(Look look) const {
    if (LONG) visit_stored(0, first_held(), look);
    visit_held(look);
  }
};

}  // namespace gk
