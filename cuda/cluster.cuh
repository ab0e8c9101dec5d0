// Thread-block clusters of `CLUSTER` blocks (a power of two up to 8): barriers, and words of a peer's shared memory.
//
// Where there are no clusters (before sm_90, on the CPU) a block is a cluster of its own, whatever CLUSTER says: such
// code compiles everywhere and is launched with CLUSTER = 1 there.
#pragma once
#include "common.cuh"

#if CLUSTER > 1 && !defined(GK_HOST) && __CUDA_ARCH__ >= 900
#define GK_CLUSTERS 1
#define GK_CLUSTER_LAUNCH(blocks) __attribute__((cluster_dims(blocks, 1, 1)))
#else
#define GK_CLUSTERS 0
#define GK_CLUSTER_LAUNCH(blocks)
#endif

namespace gk {

#if GK_CLUSTERS

constexpr i32 CLUSTER_BLOCKS = CLUSTER;

GK_DEVICE i32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<i32>(rank);
}

// A barrier in two halves: what a thread wrote before it arrived is seen by whoever has waited. All threads of all
// blocks must call both, in turn.
GK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
GK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address, in the cluster's shared window, of the peer's copy of `mine`.
GK_DEVICE u32 peer_address(const void* mine, i32 rank) {
  u32 address;
  const u32 own = static_cast<u32>(__cvta_generic_to_shared(mine));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  return address;
}

GK_DEVICE void peer_store(i32* mine, i32 rank, i32 value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(peer_address(mine, rank)), "r"(value) : "memory");
}

GK_DEVICE int2 peer_load(const int2* mine, i32 rank) {
  int2 value;
  asm volatile("ld.shared::cluster.v2.s32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(peer_address(mine, rank)));
  return value;
}

#else

constexpr i32 CLUSTER_BLOCKS = 1;

GK_DEVICE i32 cluster_rank() { return 0; }
GK_DEVICE void cluster_arrive() {}
GK_DEVICE void cluster_wait() { __syncthreads(); }
GK_DEVICE void peer_store(i32* mine, i32, i32 value) { *mine = value; }
GK_DEVICE int2 peer_load(const int2* mine, i32) { return *mine; }

#endif

}  // namespace gk
