// does    quantise tokens' index K and write it at their slots; FP8 and FP4 scales go behind the page's values
// reads   k [tokens, HEAD_DIM] of dtype SOURCE, rows k_stride elements apart; slot i64 [tokens], -1 skips the token
// writes  pages u8, page_stride bytes apart; nothing for a slot outside 0..num_slots-1
// launch  grid ceil(tokens / 8), 64 threads
// variant: INDEX_K_FORMAT=0 SOURCE=0 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: INDEX_K_FORMAT=1 SOURCE=1 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: INDEX_K_FORMAT=2 SOURCE=0 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: INDEX_K_FORMAT=2 SOURCE=1 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=1
// variant: INDEX_K_FORMAT=3 SOURCE=1 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
#include "store_index_k.cuh"

using namespace gk;

extern "C" __global__ void __launch_bounds__(64)
store_index_k(const void* k, i64 k_stride, u8* pages, i64 page_stride, const i64* slots, i64 num_slots, i32 tokens,
              float amax_floor) {
  const IndexKStore store = {k, k_stride, pages, page_stride, slots, num_slots, tokens, amax_floor};
  store.store((blockIdx.x * warps_in_block() + warp_index()) * IndexKStore::TOKENS);
}
