// Instructions that only sm_90a has, one function each: shared-memory barriers, bulk copies, FP8 matrix products.
// GK_HOPPER is defined where they are; a kernel that uses them has a portable twin for everywhere else.
#pragma once
#include "common.cuh"

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

// Start copying `bytes` bytes from global to shared memory; all three are multiples of 16. The barrier counts them.
// What is read once should not push out of the L2 cache what is read again: these lines are the first to go.
GK_DEVICE void bulk_copy_once(void* to, const void* from, u32 bytes, u64* barrier) {
  constexpr u64 EVICT_FIRST = 0x12f0000000000000;  // as createpolicy.fractional.L2::evict_first makes it
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
               : "memory");
}

// This thread's ordinary writes to shared memory come before what copy engines and tensor cores do after a barrier.
GK_DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

GK_DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- products: d [64, N] = a [64, 128] . b [N, 128]^T in e4m3, summed in fp32

// `b`: N rows of 128 bytes in shared memory, at a multiple of 1,024; 16-byte chunk c of row n lies at chunk c ^ n % 8.
GK_DEVICE u64 rows_of_128_bytes(const void* b) {
  constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32, UNUSED = 1ull << 16;
  return SWIZZLE_128 | EIGHT_ROWS | UNUSED | (shared_address(b) >> 4 & 0x3fff);
}

#define GK_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define GK_SINGLE "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define GK_8(how, x, i) \
  how(x[i]), how(x[i + 1]), how(x[i + 2]), how(x[i + 3]), how(x[i + 4]), how(x[i + 5]), how(x[i + 6]), how(x[i + 7])
#define GK_OPERANDS GK_8("r", a, 0), GK_8("r", a, 8), "l"(b), "l"(b + 2), "l"(b + 4), "l"(b + 6)
// One step of 32 along the 128; the first one overwrites d.
#define GK_STEP(n, d, a, b, add) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" d "}, {" a "}, " b ", " add ", 1, 1;\n\t"
#define GK_PRODUCT(n, d, a0, a1, a2, a3, b0, b1, b2, b3)                               \
  "{\n\t.reg .pred add, set;\n\tsetp.eq.u32 add, 0, 0;\n\tsetp.ne.u32 set, 0, 0;\n\t" \
  "wgmma.fence.sync.aligned;\n\t" GK_STEP(n, d, a0, b0, "set") GK_STEP(n, d, a1, b1, "add") \
      GK_STEP(n, d, a2, b2, "add") GK_STEP(n, d, a3, b3, "add") "wgmma.commit_group.sync.aligned;\n\t}"

// A warpgroup's 128 threads start a product together, and touch `d` only after product_wait gave it out. `a` and `d`
// are laid out as wgmma's fragments. Of a warp's rows g = lane / 4 and g + 8, a[4 * s + r] holds four bytes of row
// g + r % 2 * 8, from 32 * s + r / 2 * 16 + lane % 4 * 4 on; d[4 * j + 2 * r + c] is row g + 8 * r, column
// 8 * j + lane % 4 * 2 + c.
GK_DEVICE void product_start(float (&d)[32], const u32 (&a)[16], u64 b) {
  asm volatile(GK_PRODUCT(64, GK_SINGLE GK_TEN(1) GK_TEN(2) "%30,%31", "%32,%33,%34,%35", "%36,%37,%38,%39",
                          "%40,%41,%42,%43", "%44,%45,%46,%47", "%48", "%49", "%50", "%51")
               : GK_8("=f", d, 0), GK_8("=f", d, 8), GK_8("=f", d, 16), GK_8("=f", d, 24)
               : GK_OPERANDS);
}

GK_DEVICE void product_start(float (&d)[16], const u32 (&a)[16], u64 b) {
  asm volatile(GK_PRODUCT(32, GK_SINGLE "%10,%11,%12,%13,%14,%15", "%16,%17,%18,%19", "%20,%21,%22,%23",
                          "%24,%25,%26,%27", "%28,%29,%30,%31", "%32", "%33", "%34", "%35")
               : GK_8("=f", d, 0), GK_8("=f", d, 8)
               : GK_OPERANDS);
}

// Wait for all products; `d` is one's result.
GK_DEVICE void product_wait(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : GK_8("+f", d, 0), GK_8("+f", d, 8), GK_8("+f", d, 16), GK_8("+f", d, 24));
}

GK_DEVICE void product_wait(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : GK_8("+f", d, 0), GK_8("+f", d, 8));
}

// Hand registers from warpgroups that need few to those that need many; every warp of a warpgroup calls it.
template <i32 COUNT>
GK_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <i32 COUNT>
GK_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#undef GK_TEN
#undef GK_SINGLE
#undef GK_8
#undef GK_OPERANDS
#undef GK_STEP
#undef GK_PRODUCT

}  // namespace gk
#endif
