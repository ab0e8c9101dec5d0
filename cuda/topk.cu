// does    select each token's min(k, context_len) largest logits, ties by lowest position, in ascending position order,
//         and translate the positions into slots of the latent pool
// reads   logits f32 [tokens, width], rows logits_stride apart; context_lens, token_rows i32 [tokens];
//         page_table i32 [rows, table_width], rows table_stride apart; multiplier, shift: see Divisor
// writes  out_slot, out_position i32 [tokens, k], -1 past the selection; a slot is -1 too where the table is too narrow
// launch  grid tokens * CLUSTER, THREADS threads; the CLUSTER blocks of a token share its row. Dynamic shared memory:
//         LONG = 0, where width <= CLUSTER * THREADS * ITEMS: 4 * THREADS * ITEMS bytes; LONG = 1: 4 * THREADS *
//         shared_items bytes, shared_items being a multiple of GROUP.
//         A row is read from memory once and its keys stay on the chip, ITEMS a thread in registers and shared_items in
//         shared memory (of a longer row the others are read again in every pass). Up to three radix passes find the
//         k-th largest key, one ordered pass writes. Only integers are counted, hence deterministic.
//         EAGER: read the row up to `width` before its context is known, which saves a trip to memory.
//         For short rows every instruction counts: a warp has few keys and passes through all of the code.
// variant: THREADS=512 ITEMS=8 CLUSTER=1 LONG=0 EAGER=0
// variant: THREADS=512 ITEMS=8 CLUSTER=1 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=1 LONG=0 EAGER=0
// variant: THREADS=512 ITEMS=16 CLUSTER=1 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=2 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=4 LONG=0 EAGER=1
// variant: THREADS=512 ITEMS=16 CLUSTER=8 LONG=0 EAGER=1
// variant: THREADS=1024 ITEMS=32 CLUSTER=1 LONG=1 EAGER=0
// variant: THREADS=1024 ITEMS=32 CLUSTER=2 LONG=1 EAGER=0
// variant: THREADS=1024 ITEMS=32 CLUSTER=4 LONG=1 EAGER=0
// variant: THREADS=1024 ITEMS=32 CLUSTER=8 LONG=1 EAGER=0
#include "topk_write.cuh"

using namespace gk;

extern "C" __global__ void GK_CLUSTER_LAUNCH(CLUSTER) __launch_bounds__(THREADS, 1024 / THREADS)
topk(const float* logits, i64 logits_stride, i32 width, const i32* context_lens, const i32* page_table,
     i64 table_stride, i32 table_width, const i32* token_rows, i32 block_size, i32 multiplier, i32 shift, i32 k,
     i32 shared_items, i32* out_slot, i32* out_position) {
  __shared__ __align__(16) Shared shared;
  GK_DYN_SHARED(u32, memory);
  const Self self;
  i32 context = __ldg(context_lens + token());
  const i32 table_row = __ldg(token_rows + token());
  const i32 reach = EAGER ? width : max(1, min(context, width));
  Stretch stretch(self, logits, logits_stride, reach, memory, shared_items);
  float values[ITEMS];
  stretch.fetch_first(values, reach);
  clear<sizeof shared.histogram>(self, shared.histogram);
  if (self.thread() == 0) {
    for (Mailbox& box : shared.bins_known) open(box, CLUSTER_BLOCKS * WARPS);
    open(shared.equal_known, CLUSTER_BLOCKS * WARPS);
    open(shared.chosen_known, CLUSTER_BLOCKS * WARPS);
  }
  cluster_arrive();
  stretch.context = context = min(context, width);
  const Row row = {page_table, table_stride, context > 0 ? table_row : 0, table_width,
             {block_size, static_cast<u32>(multiplier), shift}, out_slot, out_position, k};
  if (context <= k) {
    row.write<2>(0, k, self.rank() * THREADS + self.thread(), CLUSTER_BLOCKS * THREADS, nullptr,
                 [&](i32 i) { return i < context ? i : -1; });
    cluster_wait();
    return;
  }
  const i32 begin = self.rank() * stretch.items * THREADS;
  row.fetch_pages(self, shared.pages, begin, min(begin + stretch.items * THREADS, context));
  __syncthreads();
  stretch.keep(values, [&](u32 key) { atomicAdd(&shared.histogram[0][key >> FIRST_SHIFT], 1); });
  __syncthreads();
  cluster_wait();
  const Threshold threshold = find_threshold(self, shared, stretch, k);
  write_selected(self, shared, stretch, threshold, row, reinterpret_cast<i32*>(memory));
}
