// does    what paged_index_logits does, for FP8 index K, e4m3 queries, 32 or 64 heads of 128 and blocks of 64: a page
//         is read once for up to GROUP query tokens of a batch row, and scored by the tensor cores of sm_90a
// reads   q e4m3 [tokens, HEADS, 128]; weights f32 [tokens, HEADS]; pages u8, page_stride bytes apart; q, pages and
//         page_stride are multiples of 16; page_table i32 [rows, table_width], rows table_stride apart;
//         token_rows, context_lens i32 [tokens]; tiles: the pages as rows of 128 bytes
// writes  out [tokens, width] of dtype OUTPUT, rows out_stride apart, at positions below the token's context_len only.
//         A position without a page in the pool scores NaN, which top-k ranks lowest.
// launch  grid: as many CTAs as run at once, or fewer; 512 threads, SHARED_BYTES bytes of dynamic shared memory; at
//         most 32,768 tokens, and fewer than 2^31 pages for all groups of up to GROUP tokens, see query_groups.cuh.
//         GROUP, a power of two up to 8, changes the speed only
// variant: HEADS=64 GROUP=1 OUTPUT=0 SHARED_BYTES=231424
// variant: HEADS=64 GROUP=1 OUTPUT=1 SHARED_BYTES=231424
// variant: HEADS=64 GROUP=2 OUTPUT=0 SHARED_BYTES=231424
// variant: HEADS=64 GROUP=8 OUTPUT=0 SHARED_BYTES=231424
// variant: HEADS=32 GROUP=1 OUTPUT=0 SHARED_BYTES=231424
// variant: HEADS=32 GROUP=4 OUTPUT=0 SHARED_BYTES=231424
#include "codec.cuh"
#include "hopper.cuh"
#include "query_groups.cuh"

using namespace gk;

static_assert(HEADS == 32 || HEADS == 64, "a product has the columns of one token's heads, or of two tokens'");

constexpr i32 CONSUMERS = 3, WARPS = 4 + 4 * CONSUMERS;  // warpgroups that score, beside one that feeds them
constexpr i32 BLOCK = 64, DIM = 128, VALUES = BLOCK * DIM;

struct Call {
  const u8* q;
  const float* weights;
  const u8* pages;
  i64 page_stride;
  i32 num_pages;
  const i32* page_table;
  i64 table_stride;
  i32 rows;
  i32 table_width;
  void* out;
  i64 out_stride;

  // The page of a row's column, negative where it has none in the pool.
  GK_DEVICE i32 page_at(i32 row, i32 column) const {
    const i32 page = column < table_width ? __ldg(page_table + row * table_stride + column) : -1;
    return page < num_pages ? page : -1;
  }
};

#ifdef GK_HOPPER
#include "index_logits_roles.cuh"
#else

// One score, by the definition.
GK_DEVICE float score(const Call& call, i32 token, i32 page, i32 offset) {
  if (page < 0) return __uint_as_float(0x7fc00000u);
  const u8* keys = call.pages + page * call.page_stride;
  float sum = 0.0f;
  for (i32 head = 0; head < HEADS; ++head) {
    const i64 row = static_cast<i64>(token) * HEADS + head;
    float product = 0.0f;
    for (i32 i = 0; i < DIM; i += 4) {
      float q[4], k[4];
      decode_e4m3(load_word<4>(call.q + row * DIM + i), q);
      decode_e4m3(load_word<4>(keys + offset * DIM + i), k);
      for (i32 j = 0; j < 4; ++j) product += q[j] * k[j];
    }
    sum += (product < 0.0f ? 0.0f : product) * call.weights[row];
  }
  return sum * __uint_as_float(load_word<4>(keys + VALUES + 4 * offset));
}

// The same split, without tensor cores: right everywhere, fast nowhere.
GK_DEVICE void run(const Call& call, const TileMap&, const QueryTokens& tokens, u8* memory) {
  PageRange range = page_range<GROUP, WARPS>(tokens, BLOCK, reinterpret_cast<u32*>(memory));
  for (; range.pages > 0; range.page = 0) {
    const QueryGroup group = group_at<GROUP>(tokens, range.token);
    const i32 end = min(div_ceil(group.longest, BLOCK), range.page + range.pages);
    for (i32 column = range.page; column < end; ++column) {
      const i32 page = call.page_at(group.row, column);
      for (i32 i = threadIdx.x; i < group.size * BLOCK; i += blockDim.x) {
        const i32 token = group.first + i / BLOCK, position = column * BLOCK + i % BLOCK;
        if (position < tokens.length(token))
          store_element<OUTPUT>(call.out, token * call.out_stride + position, score(call, token, page, i % BLOCK));
      }
    }
    range.pages -= end - range.page;
    range.token = group.first + group.size;
  }
}

#endif

extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1)
paged_index_logits_fp8(const u8* q, const float* weights, const u8* pages, i64 page_stride, i32 num_pages,
                       const i32* page_table, i64 table_stride, i32 rows, i32 table_width, const i32* token_rows,
                       const i32* context_lens, void* out, i64 out_stride, i32 tokens, i32 width,
                       const __grid_constant__ TileMap tiles) {
  GK_DYN_SHARED(u8, memory);
  run({q, weights, pages, page_stride, num_pages, page_table, table_stride, rows, table_width, out, out_stride},
      tiles, {token_rows, context_lens, tokens, width}, memory);
}
