// Device-resident state of the step protocol, never rebuilt: what a packet edits and a replay advances.
// Mirrored by graphkv.metadata (StepStateStruct).
#pragma once
#include "common.cuh"

struct StepState {
  i32* step;         // [1] number of the last step that ran
  i32* healthy;      // [1] 1 while the replay under way accepted its packet
  i32* fault;        // [4] host memory: faults so far, expected step, found step, 0
  i32* length;       // [max_rows] tokens whose KV is valid
  i32* block_table;  // [groups * max_rows, max_blocks], line g * max_rows + r is row r's in layer group g
  i32* next_tokens;  // [max_rows, next_n] the query tokens of each row's next step
  i32 max_rows;
  i32 next_n;
};

// Packet layout, see graphkv/packet.py.
constexpr int HEADER_WORDS = 16, RECORD_WORDS = 4, EDIT_WORDS = 3;
enum HeaderWord { STEP, CHECKSUM, ROWS, TOKENS, EDITS, TOKEN_WORDS, BUCKET };
constexpr i32 KEEP_LENGTH = -1;

// Step numbers go around at 2^31; their parity, which picks the frame and the ring line, does not notice.
__device__ __forceinline__ i32 next_step(const StepState& state) { return (i32)(((u32)*state.step + 1) & 0x7fffffffu); }
