// Work split of the scores: query tokens of one batch row form groups that read each page once, and the pages of all
// groups, in token order, are dealt out in equal contiguous ranges. Derived by every CTA for itself, from the live
// contexts: no plan kernel, nothing to rebuild when lengths change, and padded tokens have no share in it.
#pragma once
#include "common.cuh"

namespace gk {

struct QueryTokens {
  const i32* row;      // [count], of any value where the context is 0
  const i32* context;  // [count]
  i32 count;
  i32 width;  // contexts are cut to it

  GK_DEVICE i32 length(i32 token) const {
    return token >= 0 && token < count ? max(0, min(__ldg(context + token), width)) : 0;
  }
};

// A group, of at most MOST tokens: tokens first .. first + size - 1 of one batch row, no context longer than `longest`.
struct QueryGroup {
  i32 first;
  i32 size;
  i32 row;
  i32 longest;
};

// The first group at or behind `token`, which is a group's first token or padded; size 0 behind the last one.
// All 32 lanes get the same.
template <i32 MOST>
GK_DEVICE QueryGroup group_at(const QueryTokens& tokens, i32 token) {
  while (token < tokens.count) {
    const i32 mine = token + lane_index();
    const i32 length = tokens.length(mine), row = mine < tokens.count ? __ldg(tokens.row + mine) : 0;
    const u32 live = __ballot_sync(ALL_LANES, length > 0);
    if (live & 1) {
      const i32 first_row = __shfl_sync(ALL_LANES, row, 0);
      const u32 others = ~__ballot_sync(ALL_LANES, length > 0 && row == first_row);
      const i32 size = min(others ? __ffs(static_cast<i32>(others)) - 1 : WARP, MOST);
      return {token, size, first_row, warp_max(lane_index() < size ? length : 0)};
    }
    token += live ? __ffs(static_cast<i32>(live)) - 1 : WARP;
  }
  return {token, 0, 0, 0};
}

// One CTA's range: `pages` pages, from page `page` of the group that starts at `token` on.
struct PageRange {
  i32 token;
  i32 page;
  i32 pages;
};

// Bit t of `starts`, [count / 32 + 2] words: token t and the one before are not of one row. Bits behind the last token
// are set.
template <i32 WARPS>
GK_DEVICE void mark_starts(const QueryTokens& tokens, u32* starts) {
  for (i32 word = warp_index(); word < tokens.count / WARP + 2; word += WARPS) {
    const i32 token = word * WARP + lane_index();
    bool start = true;
    if (token > 0 && token < tokens.count) {
      const i32 row = __ldg(tokens.row + token), before = __ldg(tokens.row + token - 1);
      start = row != before || tokens.length(token) == 0 || tokens.length(token - 1) == 0;
    }
    const u32 bits = __ballot_sync(ALL_LANES, start);
    if (lane_index() == 0) starts[word] = bits;
  }
}

// Pages of the group that starts at `token`; 0 where none does.
template <i32 MOST>
GK_DEVICE i32 pages_from(const QueryTokens& tokens, const u32* starts, i32 token, i32 block_size) {
  i32 longest = tokens.length(token);
  if (longest == 0) return 0;
  i32 word = token / WARP;
  const u64 behind = (starts[word] | static_cast<u64>(starts[word + 1]) << 32) >> (token % WARP + 1);
  u32 before = starts[word] & (ALL_LANES >> (WARP - 1 - token % WARP));
  while (before == 0) before = starts[--word];
  if ((token - (word * WARP + WARP - 1 - __clz(static_cast<i32>(before)))) % MOST != 0) return 0;
  const i32 next = __ffsll(static_cast<i64>(behind));
  const i32 size = next ? min(next, MOST) : MOST;
#pragma unroll
  for (i32 i = 1; i < MOST; ++i) longest = max(longest, i < size ? tokens.length(token + i) : 0);
  return div_ceil(longest, block_size);
}

// This CTA's range of all pages. All WARPS warps of the CTA; fewer than 2^31 pages in all.
// `starts`: count / 32 + 2 words of shared memory, free again on return.
template <i32 MOST, i32 WARPS>
GK_DEVICE PageRange page_range(const QueryTokens& tokens, i32 block_size, u32* starts) {
  __shared__ i32 warp_pages[WARP];
  __shared__ PageRange range;
  const i32 words = div_ceil(tokens.count, WARP), span = div_ceil(words, WARPS);
  const i32 first = warp_index() * span, end = min(first + span, words);
  mark_starts<WARPS>(tokens, starts);
  __syncthreads();
  i32 sum = 0;
  for (i32 word = first; word < end; ++word)
    sum += pages_from<MOST>(tokens, starts, word * WARP + lane_index(), block_size);
  sum = warp_sum(sum);
  if (lane_index() == 0) warp_pages[warp_index()] = sum;
  __syncthreads();
  const i32 of_warp = lane_index() < WARPS ? warp_pages[lane_index()] : 0;
  const i32 total = warp_sum(of_warp);
  i32 before = warp_sum(lane_index() < warp_index() ? of_warp : 0);
  const i32 ctas = gridDim.x, cta = blockIdx.x;
  const i32 quota = static_cast<u32>(total) / gridDim.x, rest = total - quota * ctas;
  const i32 begin = cta * quota + min(cta, rest), pages = quota + (cta < rest);
  if (pages == 0) return {0, 0, 0};
  if (before <= begin && begin < before + sum) {  // it begins in this warp's span
    for (i32 word = first; word < end && before <= begin; ++word) {
      const i32 mine = pages_from<MOST>(tokens, starts, word * WARP + lane_index(), block_size);
      const i32 through = before + warp_inclusive_scan(mine), page = begin - (through - mine);
      if (page >= 0 && page < mine) range = {word * WARP + lane_index(), page, pages};
      before = __shfl_sync(ALL_LANES, through, WARP - 1);
    }
  }
  __syncthreads();
  return range;
}

}  // namespace gk
