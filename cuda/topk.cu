// does    select each token's min(k, context_len) largest logits, ties by lowest position, in ascending position order,
//         and translate the positions into slots of the latent pool
// reads   logits f32 [tokens, width], rows logits_stride apart; context_lens, token_rows i32 [tokens];
//         page_table i32 [rows, table_width], rows table_stride apart; multiplier, shift: see Divisor
// writes  out_slot, out_position i32 [tokens, k], -1 past the selection; a slot is -1 too where the table is too narrow
// launch  grid tokens * CLUSTER, THREADS threads, 4 * (1 + LONG) * THREADS * ITEMS bytes of dynamic shared memory; the
//         CLUSTER blocks of a token share its row
//         LONG = 0: width is at most CLUSTER * THREADS * ITEMS; a row is read once, its keys are kept in registers.
//         LONG = 1: what may be selected is found by a sample and kept, up to THREADS * ITEMS keys a block.
//         EAGER: read the row up to `width` before its context is known, which saves a trip to memory.
//         Radix passes find the k-th largest key, one ordered pass writes. Only integers are counted, hence
//         deterministic.
//         For short rows every instruction counts: a warp has few keys and passes through all of the code.
// variant: THREADS=512 ITEMS=8 CLUSTER=1 LONG=0 EAGER=0
// variant: THREADS=512 ITEMS=8 CLUSTER=1 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=1 LONG=0 EAGER=0
// variant: THREADS=512 ITEMS=16 CLUSTER=1 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=2 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=4 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=8 LONG=0 EAGER=1
// variant: THREADS=1024 ITEMS=4 CLUSTER=1 LONG=1 EAGER=0
// variant: THREADS=1024 ITEMS=4 CLUSTER=2 LONG=1 EAGER=0
// variant: THREADS=1024 ITEMS=4 CLUSTER=4 LONG=1 EAGER=0
// variant: THREADS=1024 ITEMS=4 CLUSTER=8 LONG=1 EAGER=0
#if LONG
#include "topk_long.cuh"
#else
#include "topk_entries.cuh"
#endif

using namespace gk;

GK_DEVICE void prepare(const Self& self, Shared& shared) {
  clear<sizeof shared.histogram>(self, shared.histogram);
  if (self.thread() == 0) {
    for (Mailbox& box : shared.bins_known) open(box, CLUSTER_BLOCKS * WARPS);
    for (Mailbox& box : shared.sums_known) open(box, CLUSTER_BLOCKS * WARPS);
  }
  cluster_arrive();
}

extern "C" __global__ void GK_CLUSTER_LAUNCH(CLUSTER) __launch_bounds__(THREADS, 1024 / THREADS)
topk(const float* logits, i64 logits_stride, i32 width, const i32* context_lens, const i32* page_table,
     i64 table_stride, i32 table_width, const i32* token_rows, i32 block_size, i32 multiplier, i32 shift, i32 k,
     i32* out_slot, i32* out_position) {
  __shared__ __align__(16) Shared shared;
  GK_DYN_SHARED(i32, list);
  const Self self;
  i32 context = __ldg(context_lens + token());
  const i32 table_row = __ldg(token_rows + token());
  logits += token() * logits_stride;
  // The blocks of a row have neighbouring shares of it, and entries are positions of a share, or some of them.
  const i32 reach = EAGER ? width : max(1, min(context, width));
  const i32 share = div_ceil(reach, CLUSTER_BLOCKS * WARP) * WARP, begin = self.rank() * share;
  Entries entries(self, share);
  float values[ITEMS];
#if LONG
  const bool every = share <= THREADS * ITEMS;
  const Part part = {logits, begin, begin + share, min(begin + share, reach)};
#pragma unroll
  for (i32 i = 0; i < ITEMS; ++i)
    values[i] = part.at(every ? begin + entries.first + i * WARP + self.lane : part.sampled(self, i));
#else
  const float* from = pinned(logits + begin + entries.first + self.lane);
  const i32 mine = entries.items_below(self, min(share, reach - begin));
#pragma unroll
  for (i32 i = 0; i < ITEMS; ++i)
    if (i < mine) values[i] = __ldcs(from + i * WARP);
#endif
  prepare(self, shared);
  context = min(context, width);
  const Row row = {page_table, table_stride, context > 0 ? table_row : 0, table_width,
                   {block_size, static_cast<u32>(multiplier), shift}, out_slot, out_position, k};
  if (context <= k) {
    row.write<2, false>(0, k, self.rank() * THREADS + self.thread(), CLUSTER_BLOCKS * THREADS, shared.pages,
                        [&](i32 i) { return i < context ? i : -1; });
    cluster_wait();
    return;
  }
  const i32 end = min(begin + share, context);
  row.fetch_pages(self, shared.pages, begin, end);
  __syncthreads();
  i32 count = end - begin, round = 0;
  Threshold threshold = {0, FIRST_SHIFT, 0, 0};
#if LONG
  i32* candidates = list + THREADS * ITEMS;
  if (!every) {
    count = find_candidates(self, shared, part, values, k, candidates, round, threshold);
    if (count < 0) return select_far(self, shared, part, k, round, row);
    ++round;
    entries = Entries(self, count);
    entries.visit_items([&](i32 i) {
      const i32 entry = entries.first + i * WARP + self.lane;
      if (entry < count) values[i] = __ldg(logits + candidates[entry]);
    });
  }
#endif
  entries.make_keys(self, values, count);
  threshold = find_threshold(self, shared, entries, threshold, k, round);
  write_selected(self, shared, entries, threshold, row, list, [&](i32 entry) {
#if LONG
    if (!every) return candidates[entry];
#endif
    return begin + entry;
  });
}
