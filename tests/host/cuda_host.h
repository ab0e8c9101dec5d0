// CUDA C++ for the CPU, as far as the kernels of cuda/ use it. Stands in front of a .cu file; needs no NVIDIA header.
//
// There: thread indices, static and dynamic shared memory, block barriers, warp shuffles, votes and reductions (with
// partial masks too), atomics, cached loads and stores, bit casts, explicitly rounded arithmetic, vector types.
// Not there: inline PTX, half types, cp.async, TMA, mbarrier, mma, clusters, cooperative groups, __activemask.
// Not found by it: races (run both orders and compare), memory-order faults, reads of unwritten static shared memory.
#pragma once
#include <algorithm>
#include <cmath>

#include "fibers.h"

#define GK_HOST 1
#define GK_DYN_SHARED(type, name) type* name = reinterpret_cast<type*>(gk_host::block->dynamic_shared)
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __shared__ static thread_local  // one block at a time is run by an OS thread
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define threadIdx (gk_host::block->running->thread_index)
#define blockIdx (gk_host::block->index)
#define blockDim (gk_host::block->dim)
#define gridDim (gk_host::block->grid)
#define warpSize 32

// ---- vector types, with the alignment that a vector access needs on the device
#define GK_HOST_VECTOR(T, name)                                                                \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                           \
  struct name##3 { T x, y, z; };                                                               \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };           \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                   \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
GK_HOST_VECTOR(signed char, char)
GK_HOST_VECTOR(unsigned char, uchar)
GK_HOST_VECTOR(short, short)
GK_HOST_VECTOR(unsigned short, ushort)
GK_HOST_VECTOR(int, int)
GK_HOST_VECTOR(float, float)
GK_HOST_VECTOR(long long, longlong)
GK_HOST_VECTOR(unsigned long long, ulonglong)
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- barriers and fences
inline void __syncthreads() { gk_host::block_barrier(); }
inline int __syncthreads_count(int p) {
  gk_host::block_barrier(p != 0);
  return gk_host::block->votes;
}
inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
inline int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { gk_host::warp_barrier(mask); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }
inline void __trap() { std::abort(); }

// ---- warp exchange
namespace gk_host {
template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
// The value of lane `source`; poison where it took no part, which the device leaves undefined.
template <class T>
T exchange(unsigned mask, T value, unsigned source) {
  warp().pending[lane()] = to_bits(value);
  warp_barrier(mask);
  constexpr uint64_t poison = 0x0101010101010101ull * POISON;
  return from_bits<T>(block->running->present >> (source % WARP) & 1 ? warp().settled[source % WARP] : poison);
}
template <class T, class Op>
T reduce(unsigned mask, T value, Op op) {
  warp().pending[lane()] = to_bits(value);
  warp_barrier(mask);
  T result = value;
  for (unsigned l = 0; l < WARP; ++l)
    if (l != lane() && block->running->present >> l & 1) result = op(result, from_bits<T>(warp().settled[l]));
  return result;
}
inline unsigned ballot(unsigned mask, bool p) {
  return reduce(mask, p ? 1u << lane() : 0u, [](unsigned a, unsigned b) { return a | b; });
}
}  // namespace gk_host

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  unsigned first = gk_host::lane() & ~(width - 1);
  return gk_host::exchange(mask, v, first | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  unsigned l = gk_host::lane(), source = l ^ bits;
  bool inside = (source & ~(width - 1)) <= (l & ~(width - 1));
  return gk_host::exchange(mask, v, inside ? source : l);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned l = gk_host::lane();
  return gk_host::exchange(mask, v, (l & (width - 1)) + by < static_cast<unsigned>(width) ? l + by : l);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  unsigned l = gk_host::lane();
  return gk_host::exchange(mask, v, (l & (width - 1)) >= by ? l - by : l);
}
inline unsigned __ballot_sync(unsigned mask, int p) { return gk_host::ballot(mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return gk_host::ballot(mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return gk_host::ballot(mask, p == 0) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
  uint64_t mine = gk_host::to_bits(v);
  gk_host::exchange(mask, v, gk_host::lane());
  unsigned same = 0;
  for (unsigned l = 0; l < 32; ++l)
    same |= (gk_host::block->running->present >> l & 1 && gk_host::warp().settled[l] == mine) ? 1u << l : 0u;
  return same;
}
#define GK_HOST_REDUCE(name, expression)                                         \
  template <class T>                                                             \
  T name(unsigned mask, T v) {                                                   \
    return gk_host::reduce(mask, v, [](T a, T b) -> T { return expression; });   \
  }
GK_HOST_REDUCE(__reduce_add_sync, a + b)
GK_HOST_REDUCE(__reduce_min_sync, b < a ? b : a)
GK_HOST_REDUCE(__reduce_max_sync, a < b ? b : a)
GK_HOST_REDUCE(__reduce_and_sync, a & b)
GK_HOST_REDUCE(__reduce_or_sync, a | b)
GK_HOST_REDUCE(__reduce_xor_sync, a ^ b)

// ---- memory: cache hints mean nothing here, but a volatile load stays one load
template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldca(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
T __ldcv(const T* p) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return *p;
}
template <class T>
void __stcg(T* p, T v) { *p = v; }
template <class T>
void __stcs(T* p, T v) { *p = v; }
template <class T>
void __stwt(T* p, T v) { *p = v; }

namespace gk_host {
template <class T, class Op>
T fetch(T* p, Op op) {
  T old, wanted;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do wanted = op(old);
  while (!__atomic_compare_exchange(p, &old, &wanted, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return old;
}
}  // namespace gk_host
#define GK_HOST_ATOMIC(name, expression)                                               \
  template <class T>                                                                   \
  T name(T* p, std::common_type_t<T> v) {                                              \
    return gk_host::fetch(p, [v](T old) -> T { return expression; });                  \
  }
GK_HOST_ATOMIC(atomicAdd, old + v)
GK_HOST_ATOMIC(atomicSub, old - v)
GK_HOST_ATOMIC(atomicMin, v < old ? v : old)
GK_HOST_ATOMIC(atomicMax, old < v ? v : old)
GK_HOST_ATOMIC(atomicAnd, old & v)
GK_HOST_ATOMIC(atomicOr, old | v)
GK_HOST_ATOMIC(atomicXor, old ^ v)
GK_HOST_ATOMIC(atomicExch, v)
GK_HOST_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
  return gk_host::fetch(p, [=](T old) -> T { return old == expected ? v : old; });
}

// ---- bits
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(1ull * a * b >> 32); }
inline unsigned __float_as_uint(float f) { return gk_host::from_bits<unsigned>(gk_host::to_bits(f)); }
inline int __float_as_int(float f) { return gk_host::from_bits<int>(gk_host::to_bits(f)); }
inline float __uint_as_float(unsigned u) { return gk_host::from_bits<float>(u); }
inline float __int_as_float(int i) { return gk_host::from_bits<float>(static_cast<unsigned>(i)); }

// ---- arithmetic. The build contracts nothing, so plain operators round as the _rn intrinsics do.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) { return static_cast<int>(rintf(a)); }
inline int __float2int_rz(float a) { return static_cast<int>(a); }
inline unsigned __float2uint_rn(float a) { return static_cast<unsigned>(rintf(a)); }
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

// ---- what tests/host_kernels.py calls for a kernel
namespace gk_host {
template <class T>
constexpr char letter() {
  if (std::is_pointer_v<T>) return 'P';
  if (std::is_same_v<T, float>) return 'f';
  if (std::is_integral_v<T> && sizeof(T) == 4) return 'i';
  if (std::is_integral_v<T> && sizeof(T) == 8) return 'q';
  return std::is_class_v<T> ? 'S' : '?';
}
template <auto K>
struct Entry;
template <class... A, void (*K)(A...)>
struct Entry<K> {
  template <size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    K(*static_cast<A*>(arguments[I])...);
  }
  static void body(void** arguments) { call(arguments, std::index_sequence_for<A...>{}); }
  static constexpr char signature[] = {letter<A>()..., 0};
  static constexpr size_t sizes[] = {sizeof(A)..., 0};
};
// `shape`: grid x, y, z, block x, y, z, bytes of dynamic shared memory, OS threads, backwards.
inline int run_shape(void (*body)(void**), void** arguments, const unsigned* shape) {
  const dim3 grid{shape[0], shape[1], shape[2]}, dim{shape[3], shape[4], shape[5]};
  return run_grid({body, arguments, grid, dim, shape[6], shape[7], shape[8] != 0});
}
}  // namespace gk_host

extern "C" inline __attribute__((used)) const char* gk_host_error() { return gk_host::error_text.c_str(); }
#define GK_HOST_EXPORT(kernel)                                                                                \
  extern "C" const char* gk_host_signature_##kernel() { return gk_host::Entry<&::kernel>::signature; }        \
  extern "C" const size_t* gk_host_sizes_##kernel() { return gk_host::Entry<&::kernel>::sizes; }              \
  extern "C" int gk_host_run_##kernel(const unsigned* gk_shape, void** gk_arguments) {                        \
    return gk_host::run_shape(&gk_host::Entry<&::kernel>::body, gk_arguments, gk_shape);                      \
  }
