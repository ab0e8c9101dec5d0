// The attention of sparse_mla_decode in plain arithmetic, for every device, format and width.
//
// launch  grid tokens * head_tiles, 256 threads, 4 * (HEAD_TILE + KEY_TILE) * WIDTH bytes of dynamic shared memory;
//         CTA n takes HEAD_TILE heads of token n / head_tiles through all keys, KEY_TILE at a time (online softmax)
#pragma once

constexpr i32 THREADS = 256, HEAD_TILE = 16, KEY_TILE = 16;
constexpr i32 WIDTH = (RANK + ROPE + 63) / 64 * 64, QUADS = WIDTH / 4;  // of a row in shared memory, zeros at its end
constexpr i32 VALUE_THREADS = THREADS / 2, HEADS_EACH = HEAD_TILE / 2;  // half of the CTA sums up half of the heads
constexpr i32 VALUE_QUADS = (RANK + 3) / 4, QUADS_EACH = (VALUE_QUADS + VALUE_THREADS - 1) / VALUE_THREADS;

struct KeyTile {
  i32 slot[KEY_TILE];                // -1: no key
  float score[HEAD_TILE][KEY_TILE];  // q . latent
  float4 weight[HEAD_TILE][KEY_TILE / 4];
  float rescale[HEAD_TILE];  // of what was summed up before this tile; at the end 1 / sum of weights
};

GK_DEVICE float decode_value(const u8* record, i32 i, float scale) {
  if (FORMAT == GK_FP8) return decode_e4m3(record[i]) * scale;
  if (FORMAT != GK_FP8_DS_MLA) return load_element<FORMAT == GK_FP8_DS_MLA ? GK_BF16 : FORMAT>(record, i);
  if (i >= RANK) return decode_bf16(static_cast<u16>(load_word<2>(record + ROPE_START + 2 * (i - RANK))));
  return decode_e4m3(record[i]) * __uint_as_float(load_word<4>(record + RANK + i / 128 * 4));
}

// Values 4 * quad .. + 3 of a latent, zeros past its end; in wide accesses where the widths allow.
GK_DEVICE float4 decode_quad(const u8* record, i32 quad, float scale) {
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const i32 first = 4 * quad;
  if ((FORMAT == GK_FP8 || (FORMAT == GK_FP8_DS_MLA && first < RANK)) && first + 4 <= RANK + ROPE) {
    const u32 word = load_word<4>(record + first);
    if (FORMAT == GK_FP8_DS_MLA) scale = __uint_as_float(load_word<4>(record + RANK + first / 128 * 4));
    decode_e4m3(word, x);
    for (i32 i = 0; i < 4; ++i) x[i] *= scale;
  } else if ((FORMAT == GK_FP32 || FORMAT == GK_BF16) && first + 4 <= RANK + ROPE) {
    load_elements<FORMAT == GK_FP32 ? GK_FP32 : GK_BF16>(record, first, x);
  } else {
    for (i32 i = 0; i < 4 && first + i < RANK + ROPE; ++i) x[i] = decode_value(record, first + i, scale);
  }
  return {x[0], x[1], x[2], x[3]};
}

GK_DEVICE void load_queries(float4* shared_q, const void* q, i32 heads) {
  for (i32 i = threadIdx.x; i < HEAD_TILE * WIDTH; i += THREADS) {
    const i32 head = i / WIDTH, column = i % WIDTH;
    const bool there = head < heads && column < RANK + ROPE;
    reinterpret_cast<float*>(shared_q)[i] = there ? load_element<SOURCE>(q, head * (RANK + ROPE) + column) : 0.0f;
  }
}

// A warp a latent.
GK_DEVICE void load_latents(float4* latents, const KeyTile& tile, const u8* pages, i64 page_stride, float scale) {
  for (i32 key = warp_index(); key < KEY_TILE; key += THREADS / WARP) {
    const i32 slot = tile.slot[key];
    const u8* record = pages + slot / BLOCK_SIZE * page_stride + static_cast<i64>(slot % BLOCK_SIZE) * TOKEN_BYTES;
    for (i32 quad = lane_index(); quad < QUADS; quad += WARP)
      latents[key * QUADS + quad] = slot >= 0 ? decode_quad(record, quad, scale) : float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
}

// Of 2 * HALF sums that 2 * HALF lanes hold parts of, give away one half and take the other lane's part of the other.
template <i32 HALF>
GK_DEVICE void fold(float (&sums)[16], i32 part) {
#pragma unroll
  for (i32 i = 0; i < HALF; ++i) {
    const float low = sums[i], high = sums[i + HALF];
    const float keep = part & HALF ? high : low, give = part & HALF ? low : high;
    sums[i] = keep + __shfl_xor_sync(ALL_LANES, give, HALF);
  }
}

// 16 lanes share 4 x 4 scores: each sums up every 16th quad, then lane n is left with the whole of score n.
GK_DEVICE void score_tile(KeyTile& tile, const float4* q, const float4* latents) {
  const i32 part = lane_index() % 16, square = 2 * warp_index() + lane_index() / 16;
  const i32 head = square / 4 * 4, key = square % 4 * 4;
  float dot[16] = {};
#pragma unroll 1
  for (i32 quad = part; quad < QUADS; quad += 16) {
    float4 k[4];
#pragma unroll
    for (i32 j = 0; j < 4; ++j) k[j] = latents[(key + j) * QUADS + quad];
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float4 a = q[(head + i) * QUADS + quad];
#pragma unroll
      for (i32 j = 0; j < 4; ++j) dot[4 * i + j] += a.x * k[j].x + a.y * k[j].y + a.z * k[j].z + a.w * k[j].w;
    }
  }
  fold<8>(dot, part);
  fold<4>(dot, part);
  fold<2>(dot, part);
  fold<1>(dot, part);
  tile.score[head + part / 4][key + part % 4] = dot[0];
}

// Half a warp a head, a lane a key. `largest` and `sum` run over the tiles so far.
GK_DEVICE void weigh_tile(KeyTile& tile, float softmax_scale, float& largest, float& sum) {
  const i32 head = threadIdx.x / KEY_TILE, key = threadIdx.x % KEY_TILE;
  const bool there = tile.slot[key] >= 0;
  const float score = there ? tile.score[head][key] * softmax_scale : negative_infinity();
  const float now = fmaxf(largest, warp_max(score, KEY_TILE));
  const float weight = there ? expf(score - now) : 0.0f;
  const float rescale = largest == now ? 1.0f : expf(largest - now);  // equal also where both are -inf
  sum = sum * rescale + warp_sum(weight, KEY_TILE);
  largest = now;
  reinterpret_cast<float*>(tile.weight[head])[key] = weight;
  if (key == 0) tile.rescale[head] = rescale;
}

GK_DEVICE float4 scaled(float4 v, float by) { return {v.x * by, v.y * by, v.z * by, v.w * by}; }

GK_DEVICE void add_values(float4 (&acc)[HEADS_EACH][QUADS_EACH], const KeyTile& tile, const float4* latents,
                          i32 first_head, i32 value_thread) {
#pragma unroll
  for (i32 i = 0; i < HEADS_EACH; ++i)
#pragma unroll
    for (i32 e = 0; e < QUADS_EACH; ++e) acc[i][e] = scaled(acc[i][e], tile.rescale[first_head + i]);
#pragma unroll 1
  for (i32 key = 0; key < KEY_TILE; key += 4) {
#pragma unroll
    for (i32 e = 0; e < QUADS_EACH; ++e) {
      const i32 quad = value_thread + e * VALUE_THREADS;
      if (quad >= VALUE_QUADS) break;
      float4 v[4];
#pragma unroll
      for (i32 j = 0; j < 4; ++j) v[j] = latents[(key + j) * QUADS + quad];
#pragma unroll
      for (i32 i = 0; i < HEADS_EACH; ++i) {
        const float4 w = tile.weight[first_head + i][key / 4];
        acc[i][e].x += w.x * v[0].x + w.y * v[1].x + w.z * v[2].x + w.w * v[3].x;
        acc[i][e].y += w.x * v[0].y + w.y * v[1].y + w.z * v[2].y + w.w * v[3].y;
        acc[i][e].z += w.x * v[0].z + w.y * v[1].z + w.z * v[2].z + w.w * v[3].z;
        acc[i][e].w += w.x * v[0].w + w.y * v[1].w + w.z * v[2].w + w.w * v[3].w;
      }
    }
  }
}

GK_DEVICE void write_values(void* out, const float4 (&acc)[HEADS_EACH][QUADS_EACH], const KeyTile& tile, i32 first_head,
                            i32 heads, i32 value_thread) {
#pragma unroll
  for (i32 i = 0; i < HEADS_EACH; ++i) {
    if (first_head + i >= heads) break;
#pragma unroll
    for (i32 e = 0; e < QUADS_EACH; ++e) {
      const i32 column = 4 * (value_thread + e * VALUE_THREADS);
      const float4 v = scaled(acc[i][e], tile.rescale[first_head + i]);
      const float x[4] = {v.x, v.y, v.z, v.w};
      for (i32 j = 0; j < 4 && column + j < RANK; ++j) {
        const i32 at = (first_head + i) * RANK + column + j;
        if (SOURCE == GK_FP32) static_cast<float*>(out)[at] = x[j];
        else static_cast<u16*>(out)[at] = encode_bf16(x[j]);
      }
    }
  }
}

GK_DEVICE void attend(const void* q, const u8* pages, i64 page_stride, i64 num_slots, const i32* slots, i32 k,
                      float softmax_scale, float scale, void* out, i32 heads, i32 head_tiles) {
  GK_DYN_SHARED(float4, shared_q);
  float4* latents = shared_q + HEAD_TILE * QUADS;
  __shared__ KeyTile tile;
  const i64 token = blockIdx.x / head_tiles, token_head = token * heads + blockIdx.x % head_tiles * HEAD_TILE;
  const i32 tile_heads = min(HEAD_TILE, heads - static_cast<i32>(blockIdx.x % head_tiles) * HEAD_TILE);
  const i32 first_head = threadIdx.x / VALUE_THREADS * HEADS_EACH, value_thread = threadIdx.x % VALUE_THREADS;
  load_queries(shared_q, advance<SOURCE>(q, token_head * (RANK + ROPE)), tile_heads);
  float largest = negative_infinity(), sum = 0.0f;
  float4 acc[HEADS_EACH][QUADS_EACH] = {};
  for (i32 first = 0; first < k; first += KEY_TILE) {
    bool there = false;
    if (threadIdx.x < KEY_TILE) {
      const i32 slot = first + threadIdx.x < k ? slots[token * k + first + threadIdx.x] : -1;
      there = slot >= 0 && slot < num_slots;
      tile.slot[threadIdx.x] = there ? slot : -1;
    }
    if (!__syncthreads_or(there)) continue;
    load_latents(latents, tile, pages, page_stride, scale);
    __syncthreads();
    score_tile(tile, shared_q, latents);
    __syncthreads();
    weigh_tile(tile, softmax_scale, largest, sum);
    __syncthreads();
    add_values(acc, tile, latents, first_head, value_thread);
  }
  __syncthreads();  // the last values were added with the last tile's factors
  if (threadIdx.x % KEY_TILE == 0) tile.rescale[threadIdx.x / KEY_TILE] = sum == 0.0f ? 0.0f : 1.0f / sum;
  __syncthreads();
  void* token_out = static_cast<u8*>(out) + token_head * RANK * (SOURCE == GK_FP32 ? 4 : 2);
  write_values(token_out, acc, tile, first_head, tile_heads, value_thread);
}
