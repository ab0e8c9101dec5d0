// does    last node of a step: lengths go up, the model's tokens become the next step's query tokens, results go to the host
// reads   LiveSet of the target side; tokens i64 [rows, next_n]; accepted i32 [rows] or null (all of a row's query tokens)
// writes  StepState length, next_tokens; ring0/ring1 (host memory, by step number): step, then accepted [capacity], then
//         emitted [capacity, next_n] (accepted drafts, then the new token, then -1)
// launch  grid ceil(rows / 256), 256 threads; chunk = 1 in a prefill step, which emits the new token alone
#include "derive.cuh"
#include "step_state.cuh"

constexpr int RING_HEADER_WORDS = 8;

extern "C" __global__ void advance(LiveSet live, StepState state, const i64* tokens, const i32* accepted, i32* ring0,
                                   i32* ring1, i32 rows, i32 capacity, i32 chunk) {
  if (!*state.healthy) return;
  const i32 r = blockIdx.x * blockDim.x + threadIdx.x, step = *state.step, next_n = state.next_n;
  i32* ring = step & 1 ? ring1 : ring0;
  if (r == 0) ring[0] = step;
  if (r >= rows) return;
  const i32 row = live.batch_row[r];
  i32* emitted = ring + RING_HEADER_WORDS + capacity + (i64)r * next_n;
  if (row < 0) {
    ring[RING_HEADER_WORDS + r] = 0;
    for (i32 i = 0; i < next_n; ++i) emitted[i] = -1;
    return;
  }
  const i32 start = live.query_start[r], query_len = live.query_start[r + 1] - start;
  i32 taken = accepted ? accepted[r] : query_len;
  ring[RING_HEADER_WORDS + r] = taken;  // as the model gave it: the host refuses a value out of range
  if (taken < 1) taken = 1;
  if (taken > query_len) taken = query_len;
  state.length[row] += taken;
  const i32 drafts = chunk ? 0 : taken - 1;
  for (i32 i = 0; i < next_n; ++i) {
    const i32 token = (i32)tokens[(i64)r * next_n + i];
    state.next_tokens[(i64)row * next_n + i] = token;
    if (i == 0) emitted[drafts] = token;
    if (i < drafts) emitted[i] = (i32)live.token_ids[start + 1 + i];
    else if (i > drafts) emitted[i] = -1;
  }
}
