// A token's row of topk.cu: the keys of its logits, and where its selection goes.
//
// THREADS, the threads of a block, and CLUSTER, the blocks of a row, are defined by whoever compiles.
#pragma once
#include "cluster.cuh"

namespace gk {

constexpr i32 WARPS = THREADS / WARP, GROUP = 4, PAGES = 1024;

// Ascending like the floats; NaN counts as -inf and -0.0 as 0.0. Never 0, which stands for "no key".
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

  GK_DEVICE i32 quotient(i32 n) const {
    return static_cast<i32>(static_cast<u64>(static_cast<u32>(n)) * multiplier >> 31 >> shift);
  }
};

// Which thread this is.
struct Self {
  i32 thread = pinned(static_cast<i32>(threadIdx.x)), lane = pinned(thread % WARP), warp = pinned(thread / WARP);
  i32 rank = cluster_rank();
};

// Where a token's selection goes, and its row of the page table.
struct Row {
  const i32* page_table;
  i32 table_width;
  Divisor block_size;
  i32 *slot, *position;
  const i32* pages;  // in shared memory: the `num_pages` columns of page_table from `first_page` on, if they fit
  i32 first_page, num_pages;

  // Start to copy the columns of positions begin .. end - 1 to `room`, if they fit.
  GK_DEVICE void fetch_pages(const Self& self, i32* room, i32 begin, i32 end) {
    pages = room;
    first_page = block_size.quotient(begin);
    num_pages = begin < end ? min(block_size.quotient(end - 1) + 1, table_width) - first_page : 0;
    if (num_pages > PAGES) num_pages = 0;
    for (i32 i = self.thread; i < num_pages; i += THREADS) copy_async(&room[i], page_table + first_page + i);
  }

  GK_DEVICE i32 slot_of(i32 at) const {
    const i32 column = block_size.quotient(at), nth = column - first_page;
    if (at < 0 || column >= table_width) return -1;
    const i32 page = static_cast<u32>(nth) < num_pages ? pages[nth] : __ldg(page_table + column);
    return (page - column) * block_size.by + at;
  }
};

// The neighbouring positions that one warp looks after: `items` times 32, lane n having every 32nd from begin + n on,
// `mine` of them within the context, the keys of the first `resident` in shared memory. Always GROUP items are handled
// at once, the last ones with key 0.
struct Stretch {
  const float* logits;  // of the lane's first position
  u32* keys;            // likewise
  i32 begin, items, mine, resident;

  GK_DEVICE Stretch(const Self& self, const float* row, i32 context, u32* shared, i32 shared_items) {
    items = div_ceil(context, CLUSTER_BLOCKS * THREADS);
    resident = min(div_ceil(items, GROUP) * GROUP, shared_items);
    begin = (self.rank * WARPS + self.warp) * items * WARP;
    mine = max(0, min(items, (context - begin - self.lane + WARP - 1) / WARP));
    logits = pinned(row + begin + self.lane);
    keys = pinned_shared(shared + self.warp * resident * WARP + self.lane);
  }

  GK_DEVICE void fetch(float (&values)[GROUP], i32 first) const {
    const float* from = logits + first * WARP;
    const i32 left = mine - first;
#pragma unroll
    for (i32 i = 0; i < GROUP; ++i)
      if (i < left) values[i] = __ldcs(from + i * WARP);
  }

  GK_DEVICE void make_keys(u32 (&group)[GROUP], const float (&values)[GROUP], i32 first) const {
    const i32 left = mine - first;
#pragma unroll
    for (i32 i = 0; i < GROUP; ++i) group[i] = i < left ? order_key(values[i]) : 0;
  }

  GK_DEVICE void keep(const float (&values)[GROUP], i32 first, i32* histogram, i32 shift) {
    u32 group[GROUP];
    make_keys(group, values, first);
    if (first < resident) {
#pragma unroll
      for (i32 i = 0; i < GROUP; ++i) keys[first * WARP + i * WARP] = group[i];
    }
#pragma unroll
    for (i32 i = 0; i < GROUP; ++i) atomicAdd(&histogram[group[i] >> shift], 1);
  }

  // The keys of items first .. first + GROUP - 1; the whole warp asks for the same ones.
  GK_DEVICE void read(u32 (&group)[GROUP], i32 first) const {
    if (__builtin_expect(first < resident, true)) {
#pragma unroll
      for (i32 i = 0; i < GROUP; ++i) group[i] = keys[first * WARP + i * WARP];
    } else {
      float values[GROUP] = {};
      fetch(values, first);
      make_keys(group, values, first);
    }
  }
};

}  // namespace gk
