// does    attend from each token's heads to its selected latents: softmax(q . latent * softmax_scale) over the keys,
//         value = first RANK values of the latent
// reads   q [tokens, heads, RANK + ROPE] of dtype SOURCE; pages u8, page_stride bytes apart; slots i32 [tokens, k], an
//         entry outside 0..num_slots-1 is skipped; scale is the cache's one scale of format fp8
// writes  out [tokens, heads, RANK] of dtype SOURCE, zeros for a token without a key
// launch  as sparse_mla_plain.cuh says; with WGMMA=1 on sm_90a as sparse_mla_wgmma.cuh does
// variant: FORMAT=0 SOURCE=0 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=0 CLUSTER=1
// variant: FORMAT=1 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=0 CLUSTER=1
// variant: FORMAT=2 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=0 CLUSTER=1
// variant: FORMAT=4 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=0 CLUSTER=1
// variant: FORMAT=1 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=1 CLUSTER=4
// variant: FORMAT=2 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=1 CLUSTER=2
// variant: FORMAT=4 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=1 CLUSTER=1
// variant: FORMAT=4 SOURCE=1 RANK=512 ROPE=64 BLOCK_SIZE=64 WGMMA=1 CLUSTER=16
#include "cluster.cuh"
#include "codec.cuh"
#include "wgmma16.cuh"

using namespace gk;

constexpr i32 ROPE_START = RANK + 4 * (RANK / 128);  // of an fp8_ds_mla record
constexpr i32 TOKEN_BYTES = FORMAT == GK_FP8_DS_MLA ? ROPE_START + 2 * ROPE
                            : (RANK + ROPE) * (FORMAT == GK_FP32 ? 4 : FORMAT == GK_BF16 ? 2 : 1);

#if WGMMA && defined(GK_HOPPER)
#include "sparse_mla_wgmma.cuh"
#else
#include "sparse_mla_plain.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS) GK_CLUSTER_LAUNCH(CLUSTER)
sparse_mla_decode(const void* q, const u8* pages, i64 page_stride, i64 num_slots, const i32* slots, i32 k,
                  float softmax_scale, float scale, void* out, i32 heads, i32 head_tiles) {
  attend(q, pages, page_stride, num_slots, slots, k, softmax_scale, scale, out, heads, head_tiles);
}
