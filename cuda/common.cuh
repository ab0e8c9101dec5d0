// What every kernel shares: fixed-width names, warp and block collectives, and 64-bit slot arithmetic.
//
// Conventions of this folder
// - NVRTC and nothing else: a file here includes only files of this folder, never a header of NVIDIA's or the host's.
// - One kernel a file where possible: `extern "C" __global__ void name(...)`, `name` being the file's stem.
// - Parameters are pointers, i32, i64, float, or plain structs. Blocks are one-dimensional, a multiple of 32 threads.
// - Dynamic shared memory comes from GK_DYN_SHARED, aligned to 128 bytes.
// - Inline PTX stands inside `#ifndef GK_HOST` with a portable twin behind it: the tests run these files on the CPU.
// - A file that is compiled with defines lists each set on a line of its own, `// variant: NAME=VALUE NAME=VALUE`; the
//   tests compile every listed variant for every architecture. Without such a line there is one variant, no defines.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#ifndef GK_HOST
// One untyped array behind every use, so that two kernels of a file may want different types.
#define GK_DYN_SHARED(type, name)                                  \
  extern __shared__ __align__(128) unsigned char gk_dyn_shared[]; \
  type* name = reinterpret_cast<type*>(gk_dyn_shared)
#endif

#define GK_DEVICE __device__ __forceinline__

namespace gk {

constexpr i32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

GK_DEVICE i32 lane_index() { return static_cast<i32>(threadIdx.x % WARP); }
GK_DEVICE i32 warp_index() { return static_cast<i32>(threadIdx.x / WARP); }
GK_DEVICE i32 warps_in_block() { return static_cast<i32>(blockDim.x / WARP); }
#ifndef GK_HOST
GK_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
#endif

template <class T>
GK_DEVICE T div_ceil(T a, T b) {
  return (a + b - 1) / b;
}

GK_DEVICE float positive_infinity() { return __uint_as_float(0x7f800000u); }
GK_DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }

struct Sum {
  template <class T>
  GK_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

// For floats a NaN loses against a number, as in fmaxf.
struct Max {
  template <class T>
  GK_DEVICE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
  GK_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Min {
  template <class T>
  GK_DEVICE T operator()(T a, T b) const {
    return a < b ? a : b;
  }
  GK_DEVICE float operator()(float a, float b) const { return fminf(a, b); }
};

// Every lane gets the result over `width` neighbouring lanes (a power of two). All 32 lanes must call it.
template <class Op, class T>
GK_DEVICE T warp_reduce(T value, Op op, i32 width = WARP) {
  for (i32 step = width / 2; step > 0; step /= 2) value = op(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

template <class T>
GK_DEVICE T warp_sum(T value, i32 width = WARP) {
  return warp_reduce(value, Sum{}, width);
}

template <class T>
GK_DEVICE T warp_max(T value, i32 width = WARP) {
  return warp_reduce(value, Max{}, width);
}

// Lane n gets the sum over lanes 0..n. All 32 lanes must call it.
template <class T>
GK_DEVICE T warp_inclusive_scan(T value) {
  for (i32 step = 1; step < WARP; step *= 2) {
    T below = __shfl_up_sync(ALL_LANES, value, step);
    if (lane_index() >= step) value += below;
  }
  return value;
}

// Every thread gets the result over the block. `scratch`: WARP elements of shared memory, free again on return.
// All threads of the block must call it. `identity` op x == x.
template <class Op, class T>
GK_DEVICE T block_reduce(T value, T identity, Op op, T* scratch) {
  value = warp_reduce(value, op);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  value = lane_index() < warps_in_block() ? scratch[lane_index()] : identity;
  value = warp_reduce(value, op);
  __syncthreads();
  return value;
}

template <class T>
GK_DEVICE T block_sum(T value, T* scratch) {
  return block_reduce(value, T(0), Sum{}, scratch);
}

// Thread n gets the sum over threads 0..n-1, and `total` the sum over the block. `scratch`: WARP elements of shared
// memory, free again on return. All threads of the block must call it.
template <class T>
GK_DEVICE T block_exclusive_scan(T value, T* scratch, T& total) {
  T through = warp_inclusive_scan(value);
  if (lane_index() == WARP - 1) scratch[warp_index()] = through;
  __syncthreads();
  T warps = lane_index() < warps_in_block() ? scratch[lane_index()] : T(0);
  warps = warp_inclusive_scan(warps);
  total = __shfl_sync(ALL_LANES, warps, WARP - 1);
  T before = __shfl_sync(ALL_LANES, warps, warp_index() - 1);  // of no meaning in warp 0, and unused there
  __syncthreads();
  return through - value + (warp_index() > 0 ? before : T(0));
}

// The page and the in-page position of a token slot.
struct TokenPlace {
  i64 page;
  i32 offset;
};

// `slot` >= 0. The 32-bit division is about four times as cheap, and nearly every slot fits.
GK_DEVICE TokenPlace token_place(i64 slot, i32 block_size) {
  if (slot < (i64(1) << 32)) {
    u32 page = static_cast<u32>(slot) / static_cast<u32>(block_size);
    return {page, static_cast<i32>(static_cast<u32>(slot) - page * static_cast<u32>(block_size))};
  }
  i64 page = slot / block_size;
  return {page, static_cast<i32>(slot - page * block_size)};
}

// The token slot of position `position` of a row, -1 where its page-table entry is the null page 0.
GK_DEVICE i64 token_slot(const i32* page_table_row, i32 position, i32 block_size) {
  i64 page = page_table_row[position / block_size];
  return page == 0 ? -1 : page * block_size + position % block_size;
}

template <class T>
GK_DEVICE bool is_aligned(const void* address) {
  return reinterpret_cast<u64>(address) % sizeof(T) == 0;
}

// Copy `bytes` bytes with `workers` threads, this one being number `worker`: 16 bytes at a time where both ends allow.
GK_DEVICE void copy_bytes(u8* to, const u8* from, i64 bytes, i32 worker, i32 workers) {
  i64 done = 0;
  if (is_aligned<uint4>(to) && is_aligned<uint4>(from)) {
    i64 vectors = bytes / 16;
    for (i64 i = worker; i < vectors; i += workers)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    done = vectors * 16;
  }
  for (i64 i = done + worker; i < bytes; i += workers) to[i] = from[i];
}

}  // namespace gk
