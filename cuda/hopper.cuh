// Instructions that only sm_90a has, one function each: shared-memory barriers, bulk copies, FP8 matrix products.
// GK_HOPPER is defined where they are; a kernel that uses them has a portable twin for everywhere else.
#pragma once
#include "common.cuh"

namespace gk {

// Where tiles of pages lie, as the driver encodes it (graphkv/tile_map.py); a `const __grid_constant__` parameter.
struct __align__(64) TileMap {
  u64 words[16];
};

}  // namespace gk

#if !defined(GK_HOST) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GK_HOPPER 1

namespace gk {

// ---- a barrier in shared memory: its phase ends when all arrivals, and all announced bytes, are in

GK_DEVICE void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Between the initialisation, by one thread, and the __syncthreads behind it: copy engines see the barriers too.
GK_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

GK_DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrive, and announce bytes that bulk copies will bring before the phase may end.
GK_DEVICE void barrier_arrive_for(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Return once the phase of this parity has ended. Of a fresh barrier the phase of parity 1 counts as ended.
GK_DEVICE void barrier_wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}

// ---- copies

// Start copying tile `page` of a map to shared memory, at a multiple of 1,024: its rows of 128 bytes come as
// rows_of_128_bytes wants them. The barrier counts the bytes. What is read once should not push out of the L2 cache what
// is read again: these lines are the first to go.
GK_DEVICE void tile_copy_once(void* to, const TileMap& map, i32 page, u64* barrier) {
  constexpr u64 EVICT_FIRST = 0x12f0000000000000;  // as createpolicy.fractional.L2::evict_first makes it
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %2, %3}], [%4], %5;" ::"r"(shared_address(to)),
               "l"(&map), "r"(0), "r"(page), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
               : "memory");
}

// This thread's ordinary writes to shared memory come before what copy engines and tensor cores do after a barrier.
GK_DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 16-byte matrices, to[i] being this lane's 4 bytes of matrix i; lane 8 * i + r says where its row r begins.
GK_DEVICE void load_matrices(u32* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

GK_DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- products: d [64, N] = a [64, 128] . b [N, 128]^T in e4m3, summed in fp32

// Rows of 128 bytes in shared memory, at a multiple of 1,024; 16-byte chunk c of row n lies at chunk c ^ n % 8.
GK_DEVICE u64 rows_of_128_bytes(const void* rows) {
  constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32, UNUSED = 1ull << 16;
  return SWIZZLE_128 | EIGHT_ROWS | UNUSED | (shared_address(rows) >> 4 & 0x3fff);
}

#define GK_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define GK_TO_10 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define GK_D16 "{" GK_TO_10 "%10,%11,%12,%13,%14,%15}"
#define GK_D32 "{" GK_TO_10 GK_TEN(1) GK_TEN(2) "%30,%31}"
#define GK_D64 "{" GK_TO_10 GK_TEN(1) GK_TEN(2) GK_TEN(3) GK_TEN(4) GK_TEN(5) "%60,%61,%62,%63}"
#define GK_8(x, i) \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])
// One step of 32 along the 128; the first one overwrites d.
#define GK_STEP(n, d, a, b, add)                                                                               \
  "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, " add ", 0;\n\t"                                                   \
  "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 " d ", " a ", " b ", add, 1, 1;\n\t}"

GK_DEVICE void product_step(float (&d)[64], u64 a, u64 b, i32 add) {
  asm volatile(GK_STEP(128, GK_D64, "%64", "%65", "%66")
               : GK_8(d, 0), GK_8(d, 8), GK_8(d, 16), GK_8(d, 24), GK_8(d, 32), GK_8(d, 40), GK_8(d, 48), GK_8(d, 56)
               : "l"(a), "l"(b), "r"(add));
}
GK_DEVICE void product_step(float (&d)[32], u64 a, u64 b, i32 add) {
  asm volatile(GK_STEP(64, GK_D32, "%32", "%33", "%34")
               : GK_8(d, 0), GK_8(d, 8), GK_8(d, 16), GK_8(d, 24)
               : "l"(a), "l"(b), "r"(add));
}
GK_DEVICE void product_step(float (&d)[16], u64 a, u64 b, i32 add) {
  asm volatile(GK_STEP(32, GK_D16, "%16", "%17", "%18") : GK_8(d, 0), GK_8(d, 8) : "l"(a), "l"(b), "r"(add));
}

// The same with a fragment of `a` in registers, 4 words for the step.
GK_DEVICE void product_step(float (&d)[32], const u32* a, u64 b, i32 add) {
  asm volatile(GK_STEP(64, GK_D32, "{%32,%33,%34,%35}", "%36", "%37")
               : GK_8(d, 0), GK_8(d, 8), GK_8(d, 16), GK_8(d, 24)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
GK_DEVICE void product_step(float (&d)[16], const u32* a, u64 b, i32 add) {
  asm volatile(GK_STEP(32, GK_D16, "{%16,%17,%18,%19}", "%20", "%21")
               : GK_8(d, 0), GK_8(d, 8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

GK_DEVICE u64 step_of(u64 rows, i32 step) { return rows + 2 * step; }
GK_DEVICE const u32* step_of(const u32 (&fragment)[16], i32 step) { return fragment + 4 * step; }

// A warpgroup's 128 threads make a product together, of N = 2 * COUNT columns. `b` is described by rows_of_128_bytes, so
// is `a`, unless it is a fragment: of a warp's rows g = lane / 4 and g + 8, a[4 * s + r] holds four bytes of row
// g + r % 2 * 8, from 32 * s + r / 2 * 16 + lane % 4 * 4 on. d[4 * j + 2 * r + c] is row g + 8 * r, column
// 8 * j + lane % 4 * 2 + c. Between start and wait nobody touches d.
template <i32 COUNT, class A>
GK_DEVICE void product_start(float (&d)[COUNT], const A& a, u64 b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (i32 step = 0; step < 4; ++step) product_step(d, step_of(a, step), step_of(b, step), step > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait for all products; `d` is one's result.
GK_DEVICE void product_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : GK_8(d, 0), GK_8(d, 8), GK_8(d, 16), GK_8(d, 24), GK_8(d, 32), GK_8(d, 40), GK_8(d, 48), GK_8(d, 56)
               :
               : "memory");
}
GK_DEVICE void product_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : GK_8(d, 0), GK_8(d, 8), GK_8(d, 16), GK_8(d, 24) : : "memory");
}
GK_DEVICE void product_wait(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : GK_8(d, 0), GK_8(d, 8) : : "memory");
}

#undef GK_TEN
#undef GK_TO_10
#undef GK_D16
#undef GK_D32
#undef GK_D64
#undef GK_8
#undef GK_STEP

// Hand registers from warpgroups that need few to those that need many; every warp of a warpgroup calls it.
template <i32 COUNT>
GK_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <i32 COUNT>
GK_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace gk
#endif
