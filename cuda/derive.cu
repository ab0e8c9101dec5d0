// does    derive the live set of one side and layer group from the device-resident lengths and the batch of another side
// reads   batch_row [rows] (-1 padded) and query_start [rows + 1] of the other side; StepState; accepted [rows] or null
// writes  LiveSet of `rows` batch rows and `tokens` query tokens, but its token ids, which are the model's to write
// launch  grid rows + 1 (the last CTA pads the token tail), 256 threads, (rows + 32) * 4 bytes of dynamic shared memory
//         a row's query tokens begin at position length + accepted + shift: `query_len` of them, or as many as on the
//         other side where query_len is 0; positions past the row's columns are padded
#include "derive.cuh"
#include "step_state.cuh"

extern "C" __global__ void derive(LiveSet live, StepState state, const i32* batch_row, const i32* query_start,
                                  const i32* accepted, i32 shift, i32 query_len, i32 rows, i32 tokens) {
  GK_DYN_SHARED(i32, shared);  // [rows + 32]
  __shared__ i32 word;
  const i32 r = blockIdx.x;
  const i32 start = query_len ? r * query_len : query_start[r];
  if (r < rows) {
    const i32 row = batch_row[r], end = query_len ? start + query_len : query_start[r + 1];
    const i32* table_row = state.block_table;
    i32 length = 0, blocks = 0;
    if (row >= 0) {
      length = state.length[row] + (accepted ? accepted[r] : 0) + shift;
      table_row += (i64)(live.first_line + row) * live.max_blocks;
      blocks = (length + end - start + (1 << live.block_shift) - 1) >> live.block_shift;
      if (blocks > live.max_blocks) blocks = live.max_blocks;
    }
    for (i32 i = threadIdx.x; i < end - start; i += blockDim.x) {
      const bool fits = row >= 0 && ((length + i) >> live.block_shift) < live.max_blocks;
      if (fits) derive_token(live, table_row, r, start + i, length + i);
      else pad_token(live, r, start + i);
    }
    derive_pages(live, table_row, r, blocks);
    if (threadIdx.x == 0) {
      live.batch_row[r] = row;
      live.query_start[r] = start;
      live.seq_len[r] = row >= 0 ? length + end - start : 0;
    }
  } else {
    if (threadIdx.x == 0) live.query_start[rows] = start;
    for (i32 token = start + threadIdx.x; token < tokens; token += blockDim.x) {
      const i32 owner = token / state.next_n;
      pad_token(live, owner < rows ? owner : rows - 1, token);
    }
  }
  if (!arrive_last(live.arrivals, rows + 1, &word)) return;
  derive_schedule(live, rows, shared);
  if (threadIdx.x == 0) *live.arrivals = 0;
}
