// Twins, on the CPU, of the sm_90a instructions in hopper.cuh and wgmma16.cuh, as far as kernels tested here use them.
//
// Shared memory is addressed from the block's own, operands of products are found by what a descriptor of the device
// says (panels of 128-byte rows, chunks exchanged), and barriers in shared memory yield to the other threads. Copies of
// a thread happen when it waits for them; what else is asynchronous on the device happens at once, so there a missing
// fence or wait is not found.
#pragma once
#include <deque>

#include "cuda_host.h"

#define GK_SWIZZLED_SHARED(type, name) GK_DYN_SHARED(type, name)

namespace gk {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const char*>(pointer) - gk_host::block->dynamic_shared);
}

// ---- barriers: arrivals left, arrivals of a phase, and the parity of the phase that runs

struct HostBarrier {
  unsigned left;
  unsigned arrivals : 31, parity : 1;
};

inline void yield_until(bool (*ready)(const void*, unsigned), const void* what, unsigned value) {
  for (long turns = 0; !ready(what, value); ++turns) {
    if (turns > 10'000'000) gk_host::fail("deadlock at a barrier in shared memory"), std::abort();
    gk_host::to_scheduler();
  }
}

inline void barrier_init(unsigned long long* barrier, unsigned arrivals) {
  *reinterpret_cast<HostBarrier*>(barrier) = {arrivals, arrivals, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(unsigned long long* barrier) {
  HostBarrier& b = *reinterpret_cast<HostBarrier*>(barrier);
  if (--b.left == 0) b.left = b.arrivals, b.parity ^= 1;
}
inline void barrier_wait(unsigned long long* barrier, unsigned parity) {
  const auto ended = [](const void* b, unsigned p) { return static_cast<const HostBarrier*>(b)->parity != p; };
  yield_until(ended, barrier, parity);
}

// Of `threads` threads of the block.
inline void barrier_of(int number, int threads) {
  static thread_local unsigned waiting[16], phase[16];
  const unsigned mine = phase[number];
  if (++waiting[number] == static_cast<unsigned>(threads)) {
    waiting[number] = 0, ++phase[number];
    return;
  }
  const auto passed = [](const void* p, unsigned was) { return *static_cast<const unsigned*>(p) != was; };
  yield_until(passed, &phase[number], mine);
}

// ---- nothing to wait for

inline void async_proxy_fence() {}
inline void products_begin() {}
inline void products_commit() {}
inline void products_wait_but_one() {}
template <int COUNT>
void products_wait(float (&)[COUNT]) {}
template <int>
void take_registers() {}
template <int>
void give_registers() {}
inline void prefetch_l2(const void*) {}

// ---- 16-bit numbers

template <bool BF16>
float value_of(unsigned short bits) {
  if (BF16) return __uint_as_float(static_cast<unsigned>(bits) << 16);
  _Float16 half;
  memcpy(&half, &bits, 2);
  return half;
}
inline unsigned short half_bits(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}
inline unsigned pair(unsigned short low, unsigned short high) { return low | static_cast<unsigned>(high) << 16; }
inline unsigned pack_f16(float low, float high) { return pair(half_bits(low), half_bits(high)); }
inline unsigned short bf16_bits(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fc0 : static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline unsigned pack_bf16(float low, float high) { return pair(bf16_bits(low), bf16_bits(high)); }
inline unsigned multiply_f16(unsigned a, unsigned b) {
  return pack_f16(value_of<false>(a & 0xffff) * value_of<false>(b & 0xffff),
                  value_of<false>(a >> 16) * value_of<false>(b >> 16));
}
inline float e4m3_value(unsigned code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 0x7f) == 0x7f ? NAN
                          : exponent == 0       ? ldexpf(static_cast<float>(mantissa), -9)
                                                : ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}
inline uint2 e4m3_to_f16(unsigned codes) {
  return {pack_f16(e4m3_value(codes & 0xff), e4m3_value(codes >> 8 & 0xff)),
          pack_f16(e4m3_value(codes >> 16 & 0xff), e4m3_value(codes >> 24))};
}
inline unsigned larger_halves(unsigned a, unsigned b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline float exp2_approximate(float x) { return exp2f(x); }

// ---- products. A descriptor is a shared address in units of 16 bytes, and above it the distance of the next panel.

inline unsigned long long rows_of_128_bytes(const void* b) { return shared_address(b) >> 4; }
template <int PANEL_BYTES>
unsigned long long columns_of_panels(const void* b) {
  return shared_address(b) >> 4 | static_cast<unsigned long long>(PANEL_BYTES >> 4) << 32;
}

template <bool BF16>
float operand(unsigned long long start, int row, int byte) {
  unsigned address = static_cast<unsigned>(start << 4) + row / 8 * 1024 + row % 8 * 128 + byte;
  address ^= (address >> 7 & 7) << 4;
  unsigned short bits;
  memcpy(&bits, gk_host::block->dynamic_shared + address, 2);
  return value_of<BF16>(bits);
}

// Rows lane / 4 and + 8 of the warp's fragment.
template <bool BF16>
void gather_rows(uint4 a, float (&of)[2][16]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int other = 0; other < 4; ++other) {
    const int from = lane / 4 * 4 + other;
    const unsigned words[4] = {__shfl_sync(~0u, a.x, from), __shfl_sync(~0u, a.y, from), __shfl_sync(~0u, a.z, from),
                               __shfl_sync(~0u, a.w, from)};
    for (int w = 0; w < 4; ++w)
      for (int e = 0; e < 2; ++e)
        of[w % 2][w / 2 * 8 + 2 * other + e] = value_of<BF16>(static_cast<unsigned short>(words[w] >> 16 * e));
  }
}

template <bool BF16>
void multiply_rows(float (&d)[16], uint4 a, unsigned long long b, bool add) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float of[2][16];
  gather_rows<BF16>(a, of);
  for (int i = 0; i < 16; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = add ? d[i] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += of[i / 2 % 2][k] * operand<BF16>(b, column, 2 * k);
    d[i] = sum;
  }
}

template <bool BF16>
void multiply_columns(float (&d)[64], uint4 a, unsigned long long b) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float of[2][16];
  gather_rows<BF16>(a, of);
  for (int i = 0; i < 64; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      d[i] += of[i / 2 % 2][k] * operand<BF16>(b + column / 64 * (b >> 32), k, column % 64 * 2);
  }
}

// ---- memory

inline uint4 load_16_or_zero(unsigned long long from, long long distance) {
  return from == 0 ? uint4{0, 0, 0, 0} : *reinterpret_cast<const uint4*>(from + distance);
}

// Copies that a thread has started, and how many are in each group that it has closed.
struct HostCopies {
  struct Copy {
    unsigned to, bytes;
    const char* from;  // null for zeros
  };
  std::deque<Copy> copies;
  std::deque<std::size_t> groups;
  std::size_t open = 0;

  static HostCopies& mine() {
    static thread_local std::vector<HostCopies> of_thread(1024);
    return of_thread[gk_host::block->running->linear];
  }
};

inline void start_copy(unsigned to, unsigned long long from, long long distance, unsigned bytes) {
  HostCopies& mine = HostCopies::mine();
  mine.copies.push_back({to, bytes, from == 0 ? nullptr : reinterpret_cast<const char*>(from + distance)});
  ++mine.open;
}
inline void copy_16_or_zero(unsigned to, unsigned long long from, long long distance) {
  start_copy(to, from, distance, 16);
}
inline void copy_8_or_zero(unsigned to, unsigned long long from, long long distance) {
  start_copy(to, from, distance, 8);
}
inline void copies_commit() {
  HostCopies& mine = HostCopies::mine();
  mine.groups.push_back(std::exchange(mine.open, 0));
}
template <int LEFT>
void copies_wait() {
  for (HostCopies& mine = HostCopies::mine(); mine.groups.size() > LEFT; mine.groups.pop_front())
    for (std::size_t left = mine.groups.front(); left > 0; --left, mine.copies.pop_front()) {
      const HostCopies::Copy& copy = mine.copies.front();
      char* to = gk_host::block->dynamic_shared + copy.to;
      if (copy.from) memcpy(to, copy.from, copy.bytes);
      else memset(to, 0, copy.bytes);
    }
}

template <int DISTANCE>
uint4 load_matrices(unsigned row) {
  const unsigned lane = threadIdx.x % 32;
  unsigned v[4];
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned from = __shfl_sync(~0u, row, 8 * i + lane / 4) + DISTANCE + lane % 4 * 4;
    memcpy(&v[i], gk_host::block->dynamic_shared + from, 4);
  }
  return {v[0], v[1], v[2], v[3]};
}
inline uint4 load_shared(unsigned from) {
  return *reinterpret_cast<const uint4*>(gk_host::block->dynamic_shared + from);
}
inline void store_shared(unsigned to, uint4 v) {
  *reinterpret_cast<uint4*>(gk_host::block->dynamic_shared + to) = v;
}

}  // namespace gk
