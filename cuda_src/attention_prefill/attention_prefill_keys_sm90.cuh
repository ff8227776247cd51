// The keys of a work tile: the key tiles that its rows see, and the boxes that TMA copies.
#pragma once

#include "attention_prefill/attention_prefill_scheduler_sm90.cuh"

// Ranges of key tiles for a set of rows: key tiles outside [begin, end) are hidden from all rows,
// those in [whole_begin, whole_end) are fully visible to all rows. Patterns are not considered.
struct KeyTileRange {
  int begin, end, whole_begin, whole_end;
};

// Returns the ranges for tokens [first, last] of a work tile; empty if last < first.
template <int kKeys>
__device__ __forceinline__ KeyTileRange key_tile_range(const Problem& problem, const WorkTile& tile,
                                                       int first, int last) {
  const int last_key_of_first_token = tile.last_key_of_first_token + (problem.causal ? first : 0);
  const int last_key_of_last_token = tile.last_key_of_first_token + (problem.causal ? last : 0);
  KeyTileRange range{tile.begin, min(tile.end, ::max(last_key_of_last_token + kKeys, 0) / kKeys), 0,
                     ::max(last_key_of_first_token + 1, 0) / kKeys};
  if (problem.reach < 1u << 31) {
    const int reach = static_cast<int>(problem.reach);
    range.begin = ::max(range.begin, ::max(last_key_of_first_token - reach + 1, 0) / kKeys);
    range.whole_begin = (::max(last_key_of_last_token - reach + 1, 0) + kKeys - 1) / kKeys;
  }
  if (first > last) range.end = range.begin;
  return range;
}

// First tensor-map row of box `box` of key tile n. A box without keys starts far out of bounds: the
// copy yields zeros.
template <int kKeys>
__device__ __forceinline__ int key_box_row(const Problem& problem, const WorkTile& tile, int n,
                                           int box) {
  const int key = n * kKeys + box * problem.box_keys;
  if (problem.block_tables == nullptr) return tile.k_begin + key;
  if (box * problem.box_keys >= kKeys || key >= tile.num_keys ||
      key + problem.box_keys <= tile.first_key)
    return 0x7fffff00;
  // SAFETY: an id outside the cache is clamped, so a damaged table cannot cause reads outside it.
  const unsigned id = static_cast<unsigned>(tile.table[key >> problem.block_shift]);
  const int page = min(id, static_cast<unsigned>(problem.num_blocks - 1));
  return page * problem.page_rows + tile.kv_head * problem.head_rows +
         (key & ((1 << problem.block_shift) - 1)) * problem.token_rows;
}
