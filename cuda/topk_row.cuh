// What all parts of topk.cu share: keys of logits, who a thread is, sums over a cluster, and where a selection goes.
//
// THREADS, the threads of a block, CLUSTER, the blocks of a row, ITEMS, the keys that a thread holds, and LONG, whether
// a row may have more than the threads hold, are defined by whoever compiles.
#pragma once
#include "cluster.cuh"

namespace gk {

constexpr i32 WARPS = THREADS / WARP, PAGES = 1024;
constexpr u32 LOWEST_KEY = 0x007fffffu;  // of -inf

// Ascending like the floats; NaN counts as -inf and -0.0 as 0.0.
GK_DEVICE u32 order_key(float x) {
  const u32 bits = __float_as_uint(fmaxf(x, negative_infinity()) + 0.0f);
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}

// The float of a key.
GK_DEVICE float float_of(u32 key) {
  return __uint_as_float(key ^ (~static_cast<u32>(static_cast<i32>(key) >> 31) | 0x80000000u));
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
GK_DEVICE void copy_async(i32* shared, const i32* global) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}
GK_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#else
GK_DEVICE i32 pinned(i32 value) { return value; }
GK_DEVICE const float* pinned(const float* pointer) { return pointer; }
GK_DEVICE void copy_async(i32* shared, const i32* global) { *shared = *global; }
GK_DEVICE void wait_for_copies() {}
#endif

// Division of 0 .. 2^31 - 1 by a constant of the launch: n / by == n * multiplier >> 31 + shift.
struct Divisor {
  i32 by;
  u32 multiplier;
  i32 shift;

  GK_DEVICE i32 quotient(i32 n) const {
    return static_cast<i32>(__umulhi(2 * static_cast<u32>(n), multiplier) >> shift);
  }
};

// The token whose row this block selects from.
GK_DEVICE i64 token() { return blockIdx.x / CLUSTER_BLOCKS; }

// Which thread this is.
struct Self {
  i32 lane = pinned(lane_index()), warp = pinned(warp_index());

  GK_DEVICE i32 thread() const { return warp * WARP + lane; }
  GK_DEVICE i32 rank() const { return cluster_rank(); }
};

// In shared memory: the columns of a page table row that a block may need, `count` from `first` on; of more than fit,
// none.
struct Pages {
  i32 first, count, wanted;
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
    const i32 wanted = begin < end ? min(block_size.quotient(end - 1) + 1, table_width) - first : 0;
    const i32 count = wanted <= PAGES ? wanted : 0;
    if (self.thread() == 0) pages.first = first, pages.count = count, pages.wanted = wanted;
    const i32* from = columns() + first;
#pragma unroll 1
    for (i32 i = self.thread(); i < count; i += THREADS) copy_async(&pages.at[i], from + i);
  }

  // NEAR: all columns that may be asked for were fetched.
  template <bool NEAR>
  GK_DEVICE i32 slot_of(i32 at, const Pages& pages) const {
    const i32 column = block_size.quotient(at);
    i32 page;
    if (NEAR) {
      const i32 nth = column - pages.first;
      if (at < 0 || nth >= pages.count) return -1;
      page = pages.at[nth];
    } else {
      if (at < 0 || column >= table_width) return -1;
      page = __ldg(columns() + column);
    }
    return (page - column) * block_size.by + at;
  }

  GK_DEVICE void put(i32 entry, i32 at, i32 to) const {
    position[token() * k + entry] = at;
    slot[token() * k + entry] = to;
  }

  // Translate and write entries worker, worker + workers, ... below `count` of those from `first` on, BATCH at a time
  // so that their pages are looked up together. `position_of`: of an entry.
  template <i32 BATCH, bool NEAR, class PositionOf>
  GK_DEVICE void write(i32 first, i32 count, i32 worker, i32 workers, const Pages& pages,
                       PositionOf position_of) const {
#pragma unroll 1
    for (i32 i = worker; i < count; i += BATCH * workers) {
      i32 at[BATCH], to[BATCH];
#pragma unroll
      for (i32 n = 0; n < BATCH; ++n) at[n] = i + n * workers < count ? position_of(i + n * workers) : -1;
#pragma unroll
      for (i32 n = 0; n < BATCH; ++n) to[n] = slot_of<NEAR>(at[n], pages);
#pragma unroll
      for (i32 n = 0; n < BATCH; ++n)
        if (i + n * workers < count) put(first + i + n * workers, at[n], to[n]);
    }
  }
};

}  // namespace gk
