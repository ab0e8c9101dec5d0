// does    first node of a step: pick the frame whose packet carries the next step number, check it whole, apply its edits
//         to the device-resident table and lengths, derive the live set and the work split
// reads   frame0/frame1 packet words (graphkv/packet.py); StepState
// writes  LiveSet of `rows` batch rows and `tokens` query tokens; StepState table, length, step, healthy, fault
// launch  grid rows + 1 (the last CTA applies edits of rows outside the batch and pads the token tail), 256 threads,
//         (rows + 32) * 4 bytes of dynamic shared memory
#include "derive.cuh"
#include "step_state.cuh"

struct Packet {
  const i32* words;
  i32 rows, tokens, edits;
  bool accepted;
};

// Every CTA checks the whole packet for itself: all agree, without waiting for each other, before any of them writes.
// `shared` holds 33 words.
__device__ Packet check_packet(const i32* words, i32 next, i32 rows, i32 tokens, i32 packet_words, u32* shared) {
  Packet packet{words, words[ROWS], words[TOKENS], words[EDITS], false};
  const i64 token_words = words[TOKEN_WORDS];
  const i64 used = HEADER_WORDS + (i64)RECORD_WORDS * packet.rows + (i64)EDIT_WORDS * packet.edits + token_words;
  const bool sizes = packet.rows >= 0 && packet.rows <= rows && packet.tokens >= 0 && packet.tokens <= tokens &&
                     packet.edits >= 0 && token_words >= 0 && used <= packet_words && words[BUCKET] == rows;
  u32 sum = 0;
  if (sizes)
    for (i32 i = threadIdx.x; i < (i32)used; i += blockDim.x)
      if (i != CHECKSUM) sum += (u32)words[i] * (u32)(2 * i + 1);
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 total = 0;
    for (u32 warp = 0; warp < (blockDim.x >> 5); ++warp) total += shared[warp];
    shared[32] = sizes && words[STEP] == next && total == (u32)words[CHECKSUM];
  }
  __syncthreads();
  packet.accepted = shared[32] != 0;
  return packet;
}

// Edits of one line of the table, or of every line where `line` is negative: a cell is named at most with one value in a packet, so CTAs
// that apply the same edit write the same word.
__device__ void apply_edits(const Packet& packet, const StepState& state, i32 max_blocks, i32 line) {
  const i32* edits = packet.words + HEADER_WORDS + RECORD_WORDS * packet.rows;
  for (i32 i = threadIdx.x; i < packet.edits; i += blockDim.x) {
    const i32* edit = edits + EDIT_WORDS * i;
    if (line < 0 || edit[0] == line) state.block_table[(i64)edit[0] * max_blocks + edit[1]] = edit[2];
  }
}

__device__ void latch_row(const LiveSet& live, const StepState& state, const Packet& packet, i32 r, i32* shared_length) {
  const i32* record = packet.words + HEADER_WORDS + RECORD_WORDS * r;
  const i32 row = record[0], start = record[1], edit = record[2], offset = record[3];
  const i32 end = r + 1 < packet.rows ? record[RECORD_WORDS + 1] : packet.tokens;
  const i32 line = live.first_line + row;
  apply_edits(packet, state, live.max_blocks, line);
  if (threadIdx.x == 0) {
    i32 length = edit >= 0 ? edit : state.length[row] + (edit < KEEP_LENGTH ? edit + 1 : 0);
    if (length < 0) length = 0;
    state.length[row] = length;
    *shared_length = length;
    live.batch_row[r] = row;
    live.query_start[r] = start;
    live.seq_len[r] = length + end - start;
  }
  __syncthreads();
  const i32 length = *shared_length;
  const i32* table_row = state.block_table + (i64)line * live.max_blocks;
  const i32* supplied = packet.words + HEADER_WORDS + RECORD_WORDS * packet.rows + EDIT_WORDS * packet.edits;
  for (i32 i = threadIdx.x; i < end - start; i += blockDim.x) {
    derive_token(live, table_row, r, start + i, length + i);
    live.token_ids[start + i] = offset >= 0 ? supplied[offset + i] : state.next_tokens[(i64)row * state.next_n + i];
  }
  derive_pages(live, table_row, r, (length + end - start + (1 << live.block_shift) - 1) >> live.block_shift);
}

extern "C" __global__ void latch(LiveSet live, StepState state, const i32* frame0, const i32* frame1, i32 rows, i32 tokens,
                                 i32 packet_words) {
  GK_DYN_SHARED(i32, shared);  // [rows + 32]
  __shared__ u32 check[33];
  __shared__ i32 word;
  const i32 next = next_step(state);
  const Packet packet = check_packet(next & 1 ? frame1 : frame0, next, rows, tokens, packet_words, check);
  const i32 r = blockIdx.x, live_tokens = packet.accepted ? packet.tokens : 0;

  if (r < rows && packet.accepted && r < packet.rows) {
    latch_row(live, state, packet, r, &word);
  } else if (r < rows) {
    if (threadIdx.x == 0) {
      live.batch_row[r] = -1;
      live.query_start[r] = live_tokens;
      live.seq_len[r] = 0;
    }
    derive_pages(live, state.block_table, r, 0);
  } else {
    if (packet.accepted) apply_edits(packet, state, live.max_blocks, -1);
    if (threadIdx.x == 0) live.query_start[rows] = live_tokens;
    for (i32 token = live_tokens + threadIdx.x; token < tokens; token += blockDim.x) {
      const i32 owner = token / state.next_n;
      pad_token(live, owner < rows ? owner : rows - 1, token);
      live.token_ids[token] = 0;
    }
  }

  if (!arrive_last(live.arrivals, rows + 1, &word)) return;
  derive_schedule(live, rows, shared);
  if (threadIdx.x == 0) {
    *live.arrivals = 0;
    *state.healthy = packet.accepted;
    if (packet.accepted) {
      *state.step = next;
    } else if (state.fault[0] == 0) {  // the first fault is the one to tell; those after it follow from it
      state.fault[1] = next;
      state.fault[2] = packet.words[STEP];
      state.fault[0] = 1;
      __threadfence_system();
    }
  }
}
