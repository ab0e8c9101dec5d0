// does    copy blocks, or a range of tokens of them, from place to place: the listed parts of all listed moves
// reads   the source of each move in each part, through device pointers or mapped host memory
// writes  the target of each move in each part; nothing if a move's range of tokens is empty
// launch  any grid, 512 threads: a CTA takes pieces of CHUNK bytes in turn. Moves must not depend on each other.
#include "common.cuh"

using namespace gk;

constexpr i32 MAX_PARTS = 16, MAX_MOVES = 192, THREADS = 512;
constexpr i32 VECTORS = 4;  // 16-byte loads that a thread has in flight: a bus needs many bytes under way
constexpr i32 CHUNK = THREADS * VECTORS * 16;

// What of a block stands at one regular distance: all bytes of a pool's block, or the values or scales of its pages.
struct CopyPart {
  u8* target;
  const u8* source;
  i64 target_stride, source_stride;  // bytes from block to block
  i64 page_stride;                   // bytes from page to page of a block
  i32 pages, token_bytes;
  i32 chunks;      // pieces of a page that a move of all tokens has
  i32 first_item;  // pieces of a move that the parts before this one have
};

struct CopyMove {
  i32 source, target, first_token, end_token;
};

// By value, so that no staging memory needs an owner while the launch is under way. 4096 bytes are the most there are.
struct CopyPlan {
  CopyPart parts[MAX_PARTS];
  CopyMove moves[MAX_MOVES];
  i32 num_parts, num_moves;
  i32 items;  // pieces of a move
  i32 unused;
};
static_assert(sizeof(CopyPlan) <= 4096, "a kernel's parameters end at 4 KiB");

GK_DEVICE void copy_piece(u8* to, const u8* from, i32 bytes) {
  const bool aligned = is_aligned<uint4>(to) && is_aligned<uint4>(from);
  const i32 vectors = aligned ? bytes / 16 : 0;
  const uint4* in = reinterpret_cast<const uint4*>(from);
  uint4* out = reinterpret_cast<uint4*>(to);
  if (vectors == CHUNK / 16) {
    uint4 held[VECTORS];
#pragma unroll
    for (i32 i = 0; i < VECTORS; ++i) held[i] = __ldcs(in + threadIdx.x + i * THREADS);
#pragma unroll
    for (i32 i = 0; i < VECTORS; ++i) __stcs(out + threadIdx.x + i * THREADS, held[i]);
    return;
  }
#pragma unroll 1
  for (i32 i = threadIdx.x; i < vectors; i += THREADS) __stcs(out + i, __ldcs(in + i));
#pragma unroll 1
  for (i32 i = vectors * 16 + threadIdx.x; i < bytes; i += THREADS) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(512) copy_blocks(const __grid_constant__ CopyPlan plan) {
  const i64 total = static_cast<i64>(plan.items) * plan.num_moves;
  for (i64 item = blockIdx.x; item < total; item += gridDim.x) {
    const i32 number = static_cast<i32>(item / plan.items);
    i32 rest = static_cast<i32>(item - static_cast<i64>(number) * plan.items), place = 0;
    while (place + 1 < plan.num_parts && rest >= plan.parts[place + 1].first_item) ++place;
    const CopyPart& part = plan.parts[place];
    const CopyMove& move = plan.moves[number];
    rest -= part.first_item;
    const i32 page = rest / part.chunks;
    const i64 begin = static_cast<i64>(rest - page * part.chunks) * CHUNK;
    const i64 left = static_cast<i64>(move.end_token - move.first_token) * part.token_bytes - begin;
    if (left <= 0) continue;
    const i64 within = page * part.page_stride + static_cast<i64>(move.first_token) * part.token_bytes + begin;
    copy_piece(part.target + move.target * part.target_stride + within,
               part.source + move.source * part.source_stride + within, static_cast<i32>(left < CHUNK ? left : CHUNK));
  }
}
