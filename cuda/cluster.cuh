// Thread-block clusters of CLUSTER blocks (a power of two up to 16): words sent to, and read from, each other's shared
// memory.
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

// Counts what has arrived in this block's shared memory; good for one round of exchange. It costs a cluster barrier's
// wait, not its fence, which orders global memory too and takes a microsecond with 1024 threads.
struct Mailbox {
  u64 state;
};

#if GK_CLUSTERS

constexpr i32 CLUSTER_BLOCKS = CLUSTER;

// The address of block `rank`'s copy of what is at `own` here.
GK_DEVICE u32 peer_address(const void* own, i32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  return address;
}

GK_DEVICE i32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<i32>(rank);
}

// One thread prepares a mailbox for `words` words, before `cluster_arrive`.
GK_DEVICE void open(Mailbox& box, i32 words) {
  const u32 address = shared_address(&box);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(4 * words) : "memory");
}

// All threads, once: after `cluster_wait` every block runs and has opened its mailboxes.
GK_DEVICE void cluster_arrive() {
  __syncwarp();
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
GK_DEVICE void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Write a word to where `own` is in block `rank`, and count it in that block's `box`.
GK_DEVICE void send(i32* own, Mailbox& box, i32 rank, i32 value) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
               ::"r"(peer_address(own, rank)), "r"(value), "r"(peer_address(&box, rank))
               : "memory");
}

// All threads wait for every word that `box` was opened for. What a sender's block had done before it sent, up to a
// barrier of that block, is seen too.
GK_DEVICE void receive(Mailbox& box) {
  u32 done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(&box))
        : "memory");
  } while (!done);
}

// All threads that have not ended: what each wrote before is seen by all behind it, in any block's shared memory.
GK_DEVICE void cluster_barrier() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

GK_DEVICE int4 peer_load(const int4* own, i32 rank) {
  int4 value;
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(peer_address(own, rank))
               : "memory");
  return value;
}

#else

constexpr i32 CLUSTER_BLOCKS = 1;

GK_DEVICE i32 cluster_rank() { return 0; }
GK_DEVICE void open(Mailbox&, i32) {}
GK_DEVICE void cluster_arrive() {}
GK_DEVICE void cluster_wait() {}
GK_DEVICE void send(i32* own, Mailbox&, i32, i32 value) { *own = value; }
GK_DEVICE void receive(Mailbox&) { __syncthreads(); }
GK_DEVICE int4 peer_load(const int4* own, i32) { return *own; }

#endif

}  // namespace gk
