// does    score the positions of each token's context: sum over heads h of relu(q[h] . k[position]) * weights[h]
// reads   q [tokens, HEADS, HEAD_DIM] of dtype SOURCE; weights f32 [tokens, HEADS]; pages u8, page_stride bytes apart;
//         page_table i32 [rows, table_width], rows table_stride apart; token_rows, context_lens i32 [tokens]
// writes  out [tokens, width] of dtype OUTPUT, rows out_stride apart, at positions below the token's context_len only.
//         A position without a page in the pool scores NaN, which top-k ranks lowest.
// launch  grid tokens * splits, 128 threads, 4 * ((HEAD_TILE + TILE) * 4 * ROW + HEAD_TILE + HEAD_THREADS * TILE) bytes
//         of dynamic shared memory; CTA n scores every splits-th tile of TILE positions of token n / splits
// variant: FORMAT=0 SOURCE=0 OUTPUT=0 HEADS=64 HEAD_DIM=128 BLOCK_SIZE=64
// variant: FORMAT=1 SOURCE=1 OUTPUT=1 HEADS=64 HEAD_DIM=128 BLOCK_SIZE=64
// variant: FORMAT=2 SOURCE=2 OUTPUT=0 HEADS=64 HEAD_DIM=128 BLOCK_SIZE=64
// variant: FORMAT=2 SOURCE=1 OUTPUT=0 HEADS=32 HEAD_DIM=128 BLOCK_SIZE=64
// variant: FORMAT=3 SOURCE=1 OUTPUT=0 HEADS=64 HEAD_DIM=128 BLOCK_SIZE=64
#include "codec.cuh"

using namespace gk;

// A thread holds KEYS keys times HEADS_EACH heads.
constexpr i32 TILE = 64, KEY_THREADS = 16, KEYS = TILE / KEY_THREADS;
constexpr i32 HEAD_THREADS = 8, HEADS_EACH = HEADS >= 64 ? 8 : (HEADS + 7) / 8;
constexpr i32 HEAD_TILE = HEAD_THREADS * HEADS_EACH;
constexpr i32 QUADS = (HEAD_DIM + 3) / 4, ROW = QUADS + 1;  // float4s of a row; one more keeps shared banks apart
constexpr i32 VALUE_BYTES = FORMAT == GK_FP32 ? 4 * HEAD_DIM : FORMAT == GK_BF16 ? 2 * HEAD_DIM
                            : FORMAT == GK_FP8 ? HEAD_DIM : HEAD_DIM / 2;
constexpr i32 FP8_GROUP = HEAD_DIM < 128 ? HEAD_DIM : 128;
constexpr i32 SCALE_BYTES = FORMAT == GK_FP8 ? 4 * (HEAD_DIM / FP8_GROUP) : FORMAT == GK_FP4 ? HEAD_DIM / 32 : 0;

struct Shared {
  float4* q;       // [HEAD_TILE, ROW]
  float4* k;       // [TILE, ROW]
  float* weights;  // [HEAD_TILE]
  float* partial;  // [HEAD_THREADS, TILE]
};

// Values 4 * quad .. + 3 of a key, zeros past HEAD_DIM.
GK_DEVICE float4 decode_quad(const u8* values, const u8* scales, i32 quad) {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (FORMAT == GK_FP8) {
    const u32 word = load_word<4>(values + 4 * quad);
    const float scale = __uint_as_float(load_word<4>(scales + 4 * (4 * quad / FP8_GROUP)));
    decode_e4m3(word, x);
    for (i32 i = 0; i < 4; ++i) x[i] *= scale;
  } else if (FORMAT == GK_FP4) {
    const u32 word = load_word<2>(values + 2 * quad);
    const float scale = power_of_two(scales[quad / 8]);
    for (i32 i = 0; i < 4; ++i) x[i] = decode_e2m1(word >> 4 * i) * scale;
  } else if (4 * quad + 4 <= HEAD_DIM) {
    load_elements<FORMAT>(values, 4 * quad, x);
  } else {
    for (i32 i = 0; 4 * quad + i < HEAD_DIM; ++i) x[i] = load_element<FORMAT>(values, 4 * quad + i);
  }
  return {x[0], x[1], x[2], x[3]};
}

GK_DEVICE void load_queries(const Shared& shared, const void* q, const float* weights, i32 first_head) {
  for (i32 i = threadIdx.x; i < HEAD_TILE * QUADS; i += blockDim.x) {
    const i32 head = i / QUADS, quad = i % QUADS;
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (first_head + head < HEADS)
      for (i32 j = 0; j < 4 && 4 * quad + j < HEAD_DIM; ++j)
        x[j] = load_element<SOURCE>(q, (first_head + head) * HEAD_DIM + 4 * quad + j);
    shared.q[head * ROW + quad] = {x[0], x[1], x[2], x[3]};
  }
  for (i32 head = threadIdx.x; head < HEAD_TILE; head += blockDim.x)
    shared.weights[head] = first_head + head < HEADS ? weights[first_head + head] : 0.0f;
}

// A warp a key. Keys past the context are left as they are: their scores are not written.
GK_DEVICE void load_keys(const Shared& shared, const u8* pages, i64 page_stride, i32 num_pages, const i32* table_row,
                         i32 table_width, i32 first, i32 count) {
  const float nan = __uint_as_float(0x7fc00000u);
  for (i32 key = warp_index(); key < count; key += warps_in_block()) {
    const i32 column = (first + key) / BLOCK_SIZE, offset = (first + key) % BLOCK_SIZE;
    const i32 index = column < table_width ? table_row[column] : -1;
    const bool readable = index >= 0 && index < num_pages;
    const u8* page = pages + index * page_stride;
    const u8* values = page + static_cast<i64>(offset) * VALUE_BYTES;
    const u8* scales = page + static_cast<i64>(BLOCK_SIZE) * VALUE_BYTES + static_cast<i64>(offset) * SCALE_BYTES;
    for (i32 quad = lane_index(); quad < QUADS; quad += WARP)
      shared.k[key * ROW + quad] = readable ? decode_quad(values, scales, quad) : float4{nan, nan, nan, nan};
  }
}

// Add this thread's heads' share to the scores of its keys.
GK_DEVICE void score(const Shared& shared, i32 key_thread, i32 head_thread, float (&sum)[KEYS]) {
  float dot[HEADS_EACH][KEYS] = {};
#pragma unroll 2
  for (i32 quad = 0; quad < QUADS; ++quad) {
    float4 k[KEYS];
#pragma unroll
    for (i32 j = 0; j < KEYS; ++j) k[j] = shared.k[(key_thread + KEY_THREADS * j) * ROW + quad];
#pragma unroll
    for (i32 i = 0; i < HEADS_EACH; ++i) {
      const float4 q = shared.q[(head_thread + HEAD_THREADS * i) * ROW + quad];
#pragma unroll
      for (i32 j = 0; j < KEYS; ++j) dot[i][j] += q.x * k[j].x + q.y * k[j].y + q.z * k[j].z + q.w * k[j].w;
    }
  }
#pragma unroll
  for (i32 i = 0; i < HEADS_EACH; ++i)
#pragma unroll
    for (i32 j = 0; j < KEYS; ++j)  // written so that a NaN stays one
      sum[j] += (dot[i][j] < 0.0f ? 0.0f : dot[i][j]) * shared.weights[head_thread + HEAD_THREADS * i];
}

extern "C" __global__ void __launch_bounds__(128)
paged_index_logits(const void* q, const float* weights, const u8* pages, i64 page_stride, i32 num_pages,
                   const i32* page_table, i64 table_stride, i32 table_width, const i32* token_rows,
                   const i32* context_lens, void* out, i64 out_stride, i32 splits, i32 width) {
  GK_DYN_SHARED(float4, floats);
  Shared shared = {floats, floats + HEAD_TILE * ROW, nullptr, nullptr};
  shared.weights = reinterpret_cast<float*>(shared.k + TILE * ROW);
  shared.partial = shared.weights + HEAD_TILE;
  const i32 token = blockIdx.x / splits, split = blockIdx.x % splits;
  const i32 context = min(context_lens[token], width);
  if (static_cast<i64>(split) * TILE >= context) return;  // a padded token's row is not even read
  const i32* table_row = page_table + token_rows[token] * table_stride;
  const void* token_q = advance<SOURCE>(q, static_cast<i64>(token) * HEADS * HEAD_DIM);
  const float* token_weights = weights + static_cast<i64>(token) * HEADS;
  const i32 key_thread = threadIdx.x % KEY_THREADS, head_thread = threadIdx.x / KEY_THREADS;
  if (HEADS <= HEAD_TILE) load_queries(shared, token_q, token_weights, 0);
  for (i64 first = static_cast<i64>(split) * TILE; first < context; first += static_cast<i64>(splits) * TILE) {
    const i32 count = static_cast<i32>(min(context - first, static_cast<i64>(TILE)));
    load_keys(shared, pages, page_stride, num_pages, table_row, table_width, static_cast<i32>(first), count);
    float sum[KEYS] = {};
    for (i32 first_head = 0; first_head < HEADS; first_head += HEAD_TILE) {
      if (HEADS > HEAD_TILE) {
        __syncthreads();  // the last scores with the previous heads are done
        load_queries(shared, token_q, token_weights, first_head);
      }
      __syncthreads();
      score(shared, key_thread, head_thread, sum);
    }
#pragma unroll
    for (i32 j = 0; j < KEYS; ++j) shared.partial[head_thread * TILE + key_thread + KEY_THREADS * j] = sum[j];
    __syncthreads();
    if (threadIdx.x < count) {
      float total = 0.0f;
      for (i32 i = 0; i < HEAD_THREADS; ++i) total += shared.partial[i * TILE + threadIdx.x];
      store_element<OUTPUT>(out, token * out_stride + first + threadIdx.x, total);
    }
  }
}
