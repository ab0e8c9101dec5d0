// The sm_90a side of paged_index_logits_fp8.cu: the roles of a CTA's warps, and what they share. One warp has pages
// copied into a ring, three lay out the queries of the next group, and three warpgroups take every third page each:
// products of its keys with the queries, the weighted sum over the heads.
//
// For groups of one or two tokens the keys go through registers, which frees the buffer at once and leaves shared memory
// to the queries; for larger groups that costs more than products which read both operands from shared memory. There
// the two tokens of a pair make one product. Either way a score is the same sum of the same products.
#pragma once

constexpr i32 MOST_TOKENS = 1 << 15;                                    // of a call
constexpr i32 PAGE = VALUES + 4 * BLOCK, ROOM = 9 * 1024;               // bytes of a page, and of its buffer
constexpr i32 LOADERS = 96;                                             // threads that lay out queries
constexpr i32 FEEDER_REGISTERS = 56, CONSUMER_REGISTERS = 152;          // of 128 each that the launch gives
constexpr i32 WEIGHTS_EACH = HEADS / 4, WEIGHT_ROW = WEIGHTS_EACH + 4;  // a lane's; 4 more keep shared banks apart

constexpr bool BY_REGISTERS = GROUP <= 2;

// A group's share of the CTA's pages, as the consumers need it.
struct Assignment {
  i32 token;
  i32 size;
  i32 first_page;
  i32 pages;
  i32 context[GROUP];
};

// Of the group in work and of the next one, laid out for product_start.
struct Queries {
  u8 values[2][GROUP][HEADS][DIM];
  float weights[2][GROUP][4][WEIGHT_ROW];  // [.., lane % 4, ..]
  Assignment assignment[2];
  u64 full[2], empty[2];
};

// Buffers for pages, all that fit. A buffer is always the same consumer's. A wait tells only two rounds of a barrier
// apart: a consumer that came to a buffer while another had yet to take the round before would read too early.
constexpr i32 STAGES =
    (SHARED_BYTES - 1024 - static_cast<i32>(sizeof(Queries))) / (ROOM + 20) / CONSUMERS * CONSUMERS;

struct Shared {
  u8 page[STAGES][ROOM];  // rows of 128 bytes, as rows_of_128_bytes wants them: the keys, then two of scales
  Queries queries;
  u64 full[STAGES], empty[STAGES];
  float bias[STAGES];  // NaN where there was no page to read, else 0
};
static_assert(FEEDER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (1 + CONSUMERS) * 128, "no register is new");
static_assert(sizeof(Queries::values) >= 4 * (MOST_TOKENS / WARP + 2), "the marks of page_range lie there at first");
static_assert(STAGES >= 2 * CONSUMERS && sizeof(Shared) <= SHARED_BYTES - 1024, "the ring fits, and is worth having");

// A place in a ring of buffers, and the parity that the barriers of this round end with.
struct Place {
  i32 at;
  u32 parity;
  GK_DEVICE void advance(i32 by, i32 size) {
    at += by;
    if (at >= size) at -= size, parity ^= 1;
  }
};

// One warp: the pages of the range, in order, into the ring.
GK_DEVICE void load_pages(Shared& shared, const Call& call, const TileMap& tiles, const QueryTokens& tokens,
                          PageRange range) {
  Place place = {0, 1};
  for (i32 left = range.pages; left > 0; range.page = 0) {
    const QueryGroup group = group_at<GROUP>(tokens, range.token);
    const i32 count = min(div_ceil(group.longest, BLOCK) - range.page, left);
    const i32 mine = range.page + lane_index();
    i32 ahead = lane_index() < count ? call.page_at(group.row, mine) : -1, pages = -1;
    for (i32 i = 0; i < count; ++i) {
      if (i % WARP == 0) {  // 32 page indices at a time, asked for 32 pages ahead
        pages = ahead;
        ahead = i + WARP + lane_index() < count ? call.page_at(group.row, mine + i + WARP) : -1;
      }
      const i32 page = __shfl_sync(ALL_LANES, pages, i % WARP);
      barrier_wait(&shared.empty[place.at], place.parity);
      if (lane_index() == 0) {
        u64* full = &shared.full[place.at];
        shared.bias[place.at] = page < 0 ? __uint_as_float(0x7fc00000u) : 0.0f;
        if (page < 0) {
          barrier_arrive(full);
        } else {
          barrier_arrive_for(full, PAGE);
          tile_copy_once(shared.page[place.at], tiles, page, full);
        }
      }
      place.advance(1, STAGES);
    }
    left -= count;
    range.token = group.first + group.size;
  }
}

// Queries of a group, as rows_of_128_bytes wants them.
GK_DEVICE void lay_out_queries(u8* to, const u8* q, i32 chunks, i32 thread) {
  constexpr i32 BATCH = 6;
  for (i32 first = thread; first < chunks; first += BATCH * LOADERS) {
    uint4 loaded[BATCH];
#pragma unroll
    for (i32 i = 0; i < BATCH; ++i)
      if (first + i * LOADERS < chunks) loaded[i] = __ldg(reinterpret_cast<const uint4*>(q) + first + i * LOADERS);
#pragma unroll
    for (i32 i = 0; i < BATCH; ++i) {
      const i32 chunk = (first + i * LOADERS) % 8, head = (first + i * LOADERS) / 8;
      if (first + i * LOADERS >= chunks) break;
      *reinterpret_cast<uint4*>(to + head * DIM + (chunk ^ head % 8) * 16) = loaded[i];
    }
  }
}

// Three warps: the queries of each group, one group ahead of the consumers.
GK_DEVICE void load_queries(Queries& queries, const Call& call, const QueryTokens& tokens, PageRange range,
                            i32 thread) {
  Place place = {0, 1};
  for (i32 left = range.pages; left > 0; range.page = 0) {
    const QueryGroup group = group_at<GROUP>(tokens, range.token);
    const i32 count = min(div_ceil(group.longest, BLOCK) - range.page, left);
    const i64 first_head = static_cast<i64>(group.first) * HEADS;
    barrier_wait(&queries.empty[place.at], place.parity);
    lay_out_queries(&queries.values[place.at][0][0][0], call.q + first_head * DIM, group.size * HEADS * 8, thread);
    for (i32 i = thread; i < group.size * HEADS; i += LOADERS) {
      const i32 token = i / HEADS, head = i % HEADS;
      queries.weights[place.at][token][head / 2 % 4][head / 8 * 2 + head % 2] = __ldg(call.weights + first_head + i);
    }
    Assignment& assignment = queries.assignment[place.at];
    if (thread == 0) {
      assignment.token = group.first, assignment.size = group.size;
      assignment.first_page = range.page, assignment.pages = count;
    }
    if (thread < group.size) assignment.context[thread] = tokens.length(group.first + thread);
    async_proxy_fence();
    barrier_arrive(&queries.full[place.at]);
    place.advance(1, 2);
    left -= count;
    range.token = group.first + group.size;
  }
}

// NaN stays NaN.
GK_DEVICE float relu(float x) {
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(x));
  return result;
}

// The sum over this thread's heads, for its two rows.
GK_DEVICE void add_heads(const float* products, const float (&weights)[WEIGHTS_EACH], float (&sums)[2]) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (i32 i = 0; i < WEIGHTS_EACH; i += 2) {
      even += relu(products[2 * i + 2 * r]) * weights[i];
      odd += relu(products[2 * i + 2 * r + 1]) * weights[i + 1];
    }
    sums[r] = even + odd;
  }
}

GK_DEVICE void load_weights(const float (&from)[4][WEIGHT_ROW], float (&weights)[WEIGHTS_EACH]) {
#pragma unroll
  for (i32 i = 0; i < WEIGHTS_EACH; i += 4) {
    const float4 w = *reinterpret_cast<const float4*>(&from[lane_index() % 4][i]);
    weights[i] = w.x, weights[i + 1] = w.y, weights[i + 2] = w.z, weights[i + 3] = w.w;
  }
}

// The sum over the four lanes that share rows, for one of two tokens and one of two rows, both chosen by the lane.
// The order of the additions is the same for either token and for a token alone.
GK_DEVICE float add_lanes(const float (&first)[2], const float (&second)[2]) {
  const bool is_second = GROUP > 1 && (lane_index() & 2), is_lower = lane_index() & 1;
  float kept[2];
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    const float given = is_second || GROUP == 1 ? first[r] : second[r];
    kept[r] = (is_second ? second[r] : first[r]) + __shfl_xor_sync(ALL_LANES, given, 2);
  }
  return (is_lower ? kept[1] : kept[0]) + __shfl_xor_sync(ALL_LANES, is_lower ? kept[0] : kept[1], 1);
}

// A consumer's view of the group in work.
struct Task {
  const Queries* queries;
  i32 buffer;
  i32 size;
  float weights[WEIGHTS_EACH];  // where groups have one token: they stay in registers

  GK_DEVICE u64 operand(i32 token) const { return rows_of_128_bytes(queries->values[buffer][token][0]); }
  GK_DEVICE void add(i32 token, const float* products, float (&sums)[2]) const {
    float of_token[WEIGHTS_EACH];
    load_weights(queries->weights[buffer][token], of_token);
    add_heads(products, of_token, sums);
  }
};

// The scores of one page's rows for one token. `keys`: a fragment, or as rows_of_128_bytes describes them.
template <class Keys>
GK_DEVICE void score_token(const Task& task, i32 token, const Keys& keys, float (&sums)[2]) {
  float products[HEADS / 2];
  product_start(products, keys, task.operand(token));
  product_wait(products);
  if (GROUP == 1) add_heads(products, task.weights, sums);
  else task.add(token, products, sums);
}

// The same for tokens `token` and `token` + 1, if that is there, see add_lanes.
GK_DEVICE float score_pair(const Task& task, i32 token, const u32 (&keys)[16]) {
  float sums[2][2] = {};
  if (GROUP > 1 && token + 1 < task.size) score_token(task, token + 1, keys, sums[1]);
  score_token(task, token, keys, sums[0]);
  return add_lanes(sums[0], sums[1]);
}

GK_DEVICE float score_pair(const Task& task, i32 token, u64 keys) {
  float sums[2][2] = {};
  if (token + 1 < task.size) {
    float products[HEADS];
    product_start(products, keys, task.operand(token));
    product_wait(products);
    task.add(token, products, sums[0]);
    task.add(token + 1, products + HEADS / 2, sums[1]);
  } else {
    score_token(task, token, keys, sums[0]);
  }
  return add_lanes(sums[0], sums[1]);
}

// Keys of a page, for score_pair: a fragment of this warp's 16 rows, or where they are.
GK_DEVICE void take_keys(const u8* page, u32 (&keys)[16]) {
  const i32 lane = lane_index();
  const u8* row = page + (warp_index() % 4 * 16 + lane % 16) * DIM;
#pragma unroll
  for (i32 step = 0; step < 4; ++step) load_matrices(keys + 4 * step, row + ((2 * step + lane / 16) ^ lane % 8) * 16);
}
GK_DEVICE void take_keys(const u8* page, u64& keys) { keys = rows_of_128_bytes(page); }

template <bool>
struct KeysOf {
  u32 keys[16];
};
template <>
struct KeysOf<false> {
  u64 keys;
};

GK_DEVICE float scale_of(const u8* page, i32 row) {
  const i32 chunk = row % 32 / 4 ^ row / 32;  // the scales are the page's rows 64 and 65
  return *reinterpret_cast<const float*>(page + VALUES + row / 32 * DIM + chunk * 16 + row % 4 * 4);
}

// A warpgroup: every CONSUMERS-th page of the range.
GK_DEVICE void consume(Shared& shared, const Call& call, i32 pages, i32 consumer) {
  constexpr i32 PAIRS = (GROUP + 1) / 2;
  const i32 my_row = threadIdx.x % 128 / WARP * 16 + lane_index() / 4 + lane_index() % 2 * 8;
  const i32 my_token = lane_index() % 4 / 2;
  Place place = {consumer, 0}, query = {0, 0};
  const auto free_buffer = [&] {
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&shared.empty[place.at]);
  };
  for (i32 base = 0, i = consumer; base < pages;) {
    barrier_wait(&shared.queries.full[query.at], query.parity);
    const Assignment& assignment = shared.queries.assignment[query.at];
    Task task = {&shared.queries, query.at, assignment.size, {}};
    if (GROUP == 1) load_weights(shared.queries.weights[query.at][0], task.weights);
    i32 ends[PAIRS];
#pragma unroll
    for (i32 pair = 0; pair < PAIRS; ++pair) {
      const i32 token = 2 * pair + my_token;
      ends[pair] = token < task.size ? assignment.context[token] : 0;
    }
    const i64 first = (assignment.token + my_token) * call.out_stride;
    i32 position = (assignment.first_page + i - base) * BLOCK + my_row;
    for (base += assignment.pages; i < base; i += CONSUMERS, position += CONSUMERS * BLOCK) {
      barrier_wait(&shared.full[place.at], place.parity);
      KeysOf<BY_REGISTERS> page;
      take_keys(shared.page[place.at], page.keys);
      const float scale = scale_of(shared.page[place.at], my_row), bias = shared.bias[place.at];
      if (BY_REGISTERS) free_buffer();
#pragma unroll
      for (i32 pair = 0; pair < PAIRS; ++pair) {
        if (2 * pair >= task.size) break;
        const float sum = score_pair(task, 2 * pair, page.keys);
        if (position < ends[pair])
          store_element<OUTPUT>(call.out, first + 2 * pair * call.out_stride + position, sum * scale + bias);
      }
      if (!BY_REGISTERS) free_buffer();
      place.advance(CONSUMERS, STAGES);
    }
    __syncwarp();
    if (lane_index() == 0) barrier_arrive(&shared.queries.empty[query.at]);
    query.advance(1, 2);
  }
}

// Ask for the page tables before the contexts are here: the first page is then one trip to memory nearer. Tables that
// are large, most of them perhaps unused, are left alone. The consumers' threads: the others look at the tokens first.
GK_DEVICE void prefetch_tables(const Call& call, i32 width) {
  constexpr u32 LINE = 32;
  const u32 columns = min(call.table_width, div_ceil(width, BLOCK)), lines = (columns + LINE - 1) / LINE;
  const u32 line = (threadIdx.x - 128) * gridDim.x + blockIdx.x, row = line / lines;
  if (row < call.rows && static_cast<u64>(lines) * call.rows <= 64 * gridDim.x)
    prefetch_l2(call.page_table + row * call.table_stride + line % lines * LINE);
}

GK_DEVICE void run(const Call& call, const TileMap& tiles, const QueryTokens& tokens, u8* memory) {
  Shared& shared = *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  if (threadIdx.x >= 128) prefetch_tables(call, tokens.width);
  if (threadIdx.x == blockDim.x - WARP) {  // of the warp that has the fewest tokens to look at
    for (i32 i = 0; i < STAGES; ++i) barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], 4);
    for (i32 i = 0; i < 2; ++i) {
      barrier_init(&shared.queries.full[i], LOADERS);
      barrier_init(&shared.queries.empty[i], 4 * CONSUMERS);
    }
    barrier_init_fence();
  }
  // The marks lie where no copy engine writes.
  const PageRange range = page_range<GROUP, WARPS>(tokens, BLOCK, reinterpret_cast<u32*>(shared.queries.values));
  const i32 consumer = static_cast<i32>(threadIdx.x) / 128 - 1;
  if (consumer >= 0) {
    more_registers<CONSUMER_REGISTERS>();
    consume(shared, call, range.pages, consumer);
  } else {
    fewer_registers<FEEDER_REGISTERS>();
    if (warp_index() == 0) load_pages(shared, call, tiles, tokens, range);
    else load_queries(shared.queries, call, tokens, range, threadIdx.x - WARP);
  }
}
