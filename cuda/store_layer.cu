// does    what store_latent and store_index_k do, in one launch: all of a layer's writes for some tokens
// reads   as they do; both sources have dtype SOURCE, both pools pages of BLOCK_SIZE tokens
// writes  as they do
// launch  grid ceil(tokens / 4) + ceil(tokens / 16), 128 threads; the CTAs of latents come first, they take longer
// variant: LATENT_FORMAT=4 INDEX_K_FORMAT=2 SOURCE=1 RANK=512 ROPE=64 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: LATENT_FORMAT=4 INDEX_K_FORMAT=3 SOURCE=0 RANK=512 ROPE=64 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
// variant: LATENT_FORMAT=1 INDEX_K_FORMAT=1 SOURCE=1 RANK=512 ROPE=64 HEAD_DIM=128 BLOCK_SIZE=64 LINEAR_SCALE=0
#include "store_index_k.cuh"
#include "store_latent.cuh"

using namespace gk;

extern "C" __global__ void __launch_bounds__(128)
store_layer(const void* c, i64 c_stride, const void* rope, i64 rope_stride, u8* latent_pages, i64 latent_page_stride,
            const i64* latent_slots, i64 num_latent_slots, float scale, const void* k, i64 k_stride, u8* index_pages,
            i64 index_page_stride, const i64* index_slots, i64 num_index_slots, float amax_floor, i32 tokens) {
  const i32 latent_blocks = div_ceil(tokens, warps_in_block()), block = static_cast<i32>(blockIdx.x) - latent_blocks;
  if (block < 0) {
    const LatentStore store = {c,           c_stride,         rope,   rope_stride, latent_pages, latent_page_stride,
                           latent_slots, num_latent_slots, tokens, scale};
    store.store(blockIdx.x * warps_in_block() + warp_index());
  } else {
    const IndexKStore store = {k,           k_stride,        index_pages, index_page_stride,
                           index_slots, num_index_slots, tokens,      amax_floor};
    store.store((block * warps_in_block() + warp_index()) * IndexKStore::TOKENS);
  }
}
