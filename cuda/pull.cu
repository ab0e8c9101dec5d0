// does    bring the next step's packet from the frame's pinned arena into its device arena
// reads   host0/host1 packet words through the bus; StepState.step
// writes  device0/device1, the words the packet uses
// launch  grid 1 (small reads of host memory from many CTAs queue up behind each other), 512 threads
#include "step_state.cuh"

extern "C" __global__ void pull(const int4* host0, const int4* host1, int4* device0, int4* device1, StepState state,
                                i32 packet_words) {
  __shared__ i32 header[HEADER_WORDS];
  const i32 odd = next_step(state) & 1, pieces = packet_words / 4, thread = threadIdx.x;
  const int4* host = odd ? host1 : host0;
  int4* device = odd ? device1 : device0;
  // The first piece of every thread is fetched beside the header that tells how many are used: one trip over the bus.
  int4 first = make_int4(0, 0, 0, 0);
  if (thread < pieces) first = __ldcv(host + thread);
  if (thread < HEADER_WORDS / 4) reinterpret_cast<int4*>(header)[thread] = first;
  __syncthreads();
  const i64 used = HEADER_WORDS + (i64)RECORD_WORDS * header[ROWS] + (i64)EDIT_WORDS * header[EDITS] + header[TOKEN_WORDS];
  i64 count = (used + 3) / 4;
  if (count < HEADER_WORDS / 4 || count > pieces) count = HEADER_WORDS / 4;  // torn sizes: the latch refuses the header
  if (thread < count) device[thread] = first;
  for (i64 i = thread + blockDim.x; i < count; i += blockDim.x) device[i] = __ldcv(host + i);
}
