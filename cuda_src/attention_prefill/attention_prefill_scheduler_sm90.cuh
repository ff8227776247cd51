// Work tiles of the Hopper prefill kernels, and the order in which persistent CTAs process them.
//
// A work tile consists of several query tokens of one sequence with all query heads of one
// key/value head: rows of Q are (token, head), and the same tiles of K and V serve all of them.
// Tiles are numbered section by section; a section is a set of (sequence, key/value head) pairs
// whose K and V fit in L2 together. Within a section the longest tiles come first: the last tokens
// if causal, otherwise the full tiles. CTAs fetch tile numbers from a counter.
#pragma once

#include "common/attention_pattern.cuh"
#include "common/attention_sm90.cuh"

// Parameters of the launch, the same for all CTAs. The host also computes fields that follow from
// others, since the divisions would need registers, of which producer warps have few.
struct Problem {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const int* block_tables;
  const int* context_lens;
  int* counter;          // 0 before and after the launch
  int64_t table_stride;  // row stride of block_tables
  int64_t max_keys;      // dense: rows of K; paged: keys that a row of the table covers
  int total_q, group, num_kv_heads;
  int tile_tokens;              // query tokens per tile: rows / group
  int q_bytes;                  // bytes of Q per tile in shared memory
  int box_keys;                 // keys per TMA box; divides the keys per tile and per page
  int block_shift, num_blocks;  // log2(block_size), number of pages
  // Strides of the pages in page rows: PageRows in engine/kernels/_pages.py.
  int page_rows, head_rows, token_rows;
  int num_pairs, section;        // (sequence, key/value head) pairs: in total, per section
  int tiles_of_pair;             // tiles per pair, for the longest sequence
  int long_tiles, short_tokens;  // tiles of tile_tokens per sequence; tokens of later tiles
  int total;                     // number of work tiles in the launch
  int splits;                    // number of CTAs that share a tile's keys
  int causal;
  unsigned reach;   // number of keys a row sees, up to its last key: the window, or 2^31
  Pattern pattern;  // used by kernels compiled with PATTERN only
};

// A work tile and its keys. The producer writes it to shared memory.
struct alignas(16) WorkTile {
  int first_token;              // row of q; negative: no work left
  int tokens;                   // number of tokens, from first_token on
  int last_key_of_first_token;  // negative: that token sees no key
  int kv_head;
  int begin, end;  // range of key tiles
  int split;
  int position;  // position of first_token: key index if causal, otherwise query index
  int k_begin;   // dense: first row of K and V
  int num_keys;
  int first_key;     // first key that any row of the tile sees
  const int* table;  // row of the block table; null if dense
};

// Finds work tile t. Returns false if it has no tokens because its sequence is shorter than the
// longest one.
template <int kKeys>
__device__ __forceinline__ bool find_work_tile(const Problem& problem, int t, WorkTile& work) {
  const int per_section = problem.section * problem.tiles_of_pair * problem.splits;
  const int section = t / per_section, in_section = t - section * per_section;
  const int first_pair = section * problem.section;
  const int width = min(problem.section, problem.num_pairs - first_pair) * problem.splits;
  const int step = in_section / width, column = in_section - step * width;
  const int pair = first_pair + column / problem.splits;
  work.split = column % problem.splits;
  const int b = pair / problem.num_kv_heads;
  work.kv_head = pair - b * problem.num_kv_heads;

  // SAFETY: offsets and lengths are clamped to the arrays' sizes.
  const int q_begin = min(max(problem.cu_seqlens_q[b], 0), problem.total_q);
  const int num_tokens = min(max(problem.cu_seqlens_q[b + 1], q_begin), problem.total_q) - q_begin;
  const int i = problem.causal ? problem.tiles_of_pair - 1 - step : step;
  const int token = min(i, problem.long_tiles) * problem.tile_tokens +
                    max(i - problem.long_tiles, 0) * problem.short_tokens;
  const int most = i < problem.long_tiles ? problem.tile_tokens : problem.short_tokens;
  if (token >= num_tokens) return false;
  work.table = nullptr;
  work.k_begin = 0;
  if (problem.block_tables != nullptr) {
    work.table = problem.block_tables + b * problem.table_stride;
    work.num_keys = min(static_cast<int64_t>(max(problem.context_lens[b], 0)), problem.max_keys);
  } else {
    const int64_t begin = max(problem.cu_seqlens_k[b], 0);
    work.k_begin = min(begin, problem.max_keys);
    const int64_t end = max(problem.cu_seqlens_k[b + 1], work.k_begin);
    work.num_keys = min(end, problem.max_keys) - work.k_begin;
  }

  work.first_token = q_begin + token;
  work.tokens = min(num_tokens - token, most);
  work.last_key_of_first_token = work.num_keys - 1;
  work.position = token;
  int last = work.last_key_of_first_token;  // last key that any row sees
  if (problem.causal) {
    work.position = work.last_key_of_first_token += 1 - num_tokens + token;
    last = work.last_key_of_first_token + work.tokens - 1;
  }
  work.first_key = 0;
  if (problem.reach < 1u << 31)
    work.first_key = max(0, work.last_key_of_first_token - static_cast<int>(problem.reach) + 1);
  work.begin = work.first_key / kKeys;
  work.end = last < work.first_key ? work.begin : last / kKeys + 1;
  const int share = (work.end - work.begin + problem.splits - 1) / problem.splits;
  work.begin = min(work.begin + work.split * share, work.end);
  work.end = min(work.begin + share, work.end);
  return true;
}
