// does    encode one token's latent and rope part a warp and write the record at its slot
// reads   c [tokens, RANK] and rope [tokens, ROPE] of dtype SOURCE, rows *_stride elements apart;
//         slot i64 [tokens], -1 skips the token; scale is the cache's one scale of format fp8
// writes  pages u8, page_stride bytes apart; nothing for a slot outside 0..num_slots-1
// launch  grid ceil(tokens / 4), 128 threads
// variant: LATENT_FORMAT=0 SOURCE=0 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: LATENT_FORMAT=1 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: LATENT_FORMAT=2 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: LATENT_FORMAT=4 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64
// variant: LATENT_FORMAT=4 SOURCE=0 RANK=512 ROPE=64 BLOCK_SIZE=64
#include "store_latent.cuh"

using namespace gk;

extern "C" __global__ void __launch_bounds__(128)
store_latent(const void* c, i64 c_stride, const void* rope, i64 rope_stride, u8* pages, i64 page_stride,
             const i64* slots, i64 num_slots, i32 tokens, float scale) {
  const LatentStore store = {c,     c_stride,    rope,  rope_stride, pages,
                             page_stride, slots, num_slots,   tokens, scale};
  store.store(blockIdx.x * warps_in_block() + warp_index());
}
