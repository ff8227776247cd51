// A CTA of attention_prefill_few_tokens_sm90: its work and its columns.
#pragma once

#include "attention_prefill/attention_prefill_few_tokens_smem_sm90.cuh"

// What all warps of a CTA know. Tiles are counted from the last one: tile t is key tile
// tile.end - 1 - t.
struct Cta {
  const FewTokensMemory& smem;
  const Problem& problem;
  const WorkTile& tile;
  int num_tiles;
  int new_tile;  // key tiles from this one on may hold keys that the preceding kernel writes
  int stages;    // stages of K, and as many of V
  int first_column, value_columns;  // the CTA's columns of V
  int value_chunk;                  // columns that a TMA box of V has: 32 or 64
  int value_bytes;                  // bytes of a stage of V
};
