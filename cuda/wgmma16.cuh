// Matrix products of sm_90a's warpgroups on 16-bit operands, summed in fp32, and what their fragments are made of.
//
// A panel is 64 columns of a matrix: rows of 128 bytes at a multiple of 1,024 in shared memory, the 16-byte chunk c of
// row n at chunk c ^ n % 8. `rows_of_128_bytes` of hopper.cuh describes one whose rows are the result's rows or
// columns.
#pragma once
#include "hopper.cuh"

#if defined(GK_HOPPER) && !defined(GK_HOST)
// Dynamic shared memory that products read: its panels start at multiples of 1,024 bytes.
#define GK_SWIZZLED_SHARED(type, name)                                   \
  extern __shared__ __align__(1024) unsigned char gk_swizzled_shared[]; \
  type* name = reinterpret_cast<type*>(gk_swizzled_shared)

namespace gk {

// A panel whose rows are summed over and whose columns are the result's; the next 64 columns are in the next panel.
template <i32 PANEL_BYTES>
GK_DEVICE u64 columns_of_panels(const void* b) {
  constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32, NEXT_PANEL = (PANEL_BYTES >> 4) << 16;
  return SWIZZLE_128 | EIGHT_ROWS | NEXT_PANEL | (shared_address(b) >> 4 & 0x3fff);
}

// Around a chain of products: registers that went in are settled, the chain is closed.
GK_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GK_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define GK_D8(d, i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define GK_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define GK_D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define GK_D64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," GK_TEN(1) GK_TEN(2) GK_TEN(3) GK_TEN(4) GK_TEN(5) "%60,%61,%62,%63}"

// All chains but the last one are done, and their fragments may be written again.
GK_DEVICE void products_wait_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// All chains are done; `d` is the result of one.
GK_DEVICE void products_wait(float (&d)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : GK_D8(d, 0), GK_D8(d, 8) : : "memory");
}
GK_DEVICE void products_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : GK_D8(d, 0), GK_D8(d, 8), GK_D8(d, 16), GK_D8(d, 24), GK_D8(d, 32), GK_D8(d, 40), GK_D8(d, 48),
                 GK_D8(d, 56)
               :
               : "memory");
}

// d [64, 32] = (add ? d : 0) + a [64, 16] . b [32, 16]^T; a is the fragment in registers, b 16 columns of a panel. With
// `a` in shared memory too, a product this narrow takes more than twice as long.
#define GK_MULTIPLY_ROWS(type)                                                                             \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %21, 0;\n\t"                                      \
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " GK_D16                      \
               ", {%16,%17,%18,%19}, %20, add, 1, 1, 0;\n\t}"                                              \
               : GK_D8(d, 0), GK_D8(d, 8)                                                                  \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<i32>(add)))

// d [64, 128] += a [64, 16] . b [16, 128]; a is the fragment in registers, b 16 rows of two neighbouring panels.
#define GK_MULTIPLY_COLUMNS(type)                                                                          \
  asm volatile("{\n\t.reg .pred add;\n\tsetp.eq.u32 add, 0, 0;\n\t"                                        \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " GK_D64                     \
               ", {%64,%65,%66,%67}, %68, add, 1, 1, 1;\n\t}"                                             \
               : GK_D8(d, 0), GK_D8(d, 8), GK_D8(d, 16), GK_D8(d, 24), GK_D8(d, 32), GK_D8(d, 40),         \
                 GK_D8(d, 48), GK_D8(d, 56)                                                                \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b))

template <bool BF16>
GK_DEVICE void multiply_rows(float (&d)[16], uint4 a, u64 b, bool add) {
  if constexpr (BF16) GK_MULTIPLY_ROWS("bf16");
  else GK_MULTIPLY_ROWS("f16");
}

template <bool BF16>
GK_DEVICE void multiply_columns(float (&d)[64], uint4 a, u64 b) {
  if constexpr (BF16) GK_MULTIPLY_COLUMNS("bf16");
  else GK_MULTIPLY_COLUMNS("f16");
}

#undef GK_D8
#undef GK_TEN
#undef GK_D16
#undef GK_D64
#undef GK_MULTIPLY_ROWS
#undef GK_MULTIPLY_COLUMNS

// ---- two 16-bit numbers in a word, the first in the low half

GK_DEVICE u32 pack_f16(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

GK_DEVICE u32 pack_bf16(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Four e4m3 codes, exact in fp16.
GK_DEVICE uint2 e4m3_to_f16(u32 codes) {
  uint2 words;
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(words.x), "=r"(words.y)
      : "r"(codes));
  return words;
}

GK_DEVICE u32 multiply_f16(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The larger one of each half, as unsigned numbers.
GK_DEVICE u32 larger_halves(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

GK_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- registers of a warpgroup, moved between the warpgroups of a block

template <i32 REGISTERS>
GK_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <i32 REGISTERS>
GK_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- global memory

// 16 bytes at an address and a distance, zeros if the address is 0. They are of memory that nobody writes while
// the kernel runs, and not wanted again in this core. One piece of code: no move of registers waits for the load.
GK_DEVICE uint4 load_16_or_zero(u64 from, i64 distance) {
  uint4 v;
  asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u64 there, %4, 0;\n\t"
               "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
               "@there ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%5];\n\t}"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
               : "l"(from), "l"(from + distance));
  return v;
}

// The four matrices of a fragment, as load_matrices of hopper.cuh; a lane's row begins DISTANCE behind `row`.
template <i32 DISTANCE>
GK_DEVICE uint4 load_matrices(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(row), "n"(DISTANCE)
               : "memory");
  return v;
}

// Start copying 16 bytes (or 8) to shared memory, zeros if the address is 0. Copies are counted in groups of a thread.
GK_DEVICE void copy_16_or_zero(u32 to, u64 from, i64 distance) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from + distance), "r"(from ? 16 : 0)
               : "memory");
}
GK_DEVICE void copy_8_or_zero(u32 to, u64 from, i64 distance) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from + distance), "r"(from ? 8 : 0)
               : "memory");
}
GK_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All groups of this thread but the last `LEFT` have arrived, for itself.
template <i32 LEFT>
GK_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

GK_DEVICE uint4 load_shared(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

GK_DEVICE void store_shared(u32 to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A barrier of `threads` threads of the block, number 1 to 15.
GK_DEVICE void barrier_of(i32 number, i32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace gk
#endif
