// Parameters of sample_choose, and access to its rows.
#pragma once

#include "sample/candidates.cuh"

struct SampleChooseParams {
  const float* logits;              // (B, V), row b starts at b * stride
  int64_t stride;                   // elements
  int vocab;                        // V
  const float* processed;           // (B, V) processed rows, processed_stride apart; or null
  int64_t processed_stride;         // elements
  const int* is_processed;          // (B,) whether the row's logits were changed; null: none were
  const float* temperature;         // (B,) the filters: see engine/kernels/sample.py
  const int* top_k;                 // (B,)
  const float* top_p;               // (B,)
  const float* min_p;               // (B,)
  const uint64_t* seeds;            // (B,)
  const int64_t* positions;         // (B,)
  const float* repetition_penalty;  // (B,), or null; only validated here, like the next two
  const float* presence_penalty;    // (B,), or null
  const float* frequency_penalty;   // (B,), or null
  int num_top;  // number of log-probabilities to list; -1: none, not even the token's
  int num_tiles, num_segments;  // tiles and segments per row
  int shift;                    // 2^shift segments share a key
  const uint32_t* keys;         // (B, 2, kMaxSegments) from the scan; [:, 1]: raw logits' keys
  const struct Tile* tiles;     // (B, num_tiles) from the scan
  struct DrawState* states;     // (B,) zeroed by the scan
  struct WalkQueue* queue;      // a single queue, zeroed by the scan
  struct Walk* walks;           // (min(B, kMaxWalks),) scratch
  int* token_ids;               // (B,) the result; -1 if status is not 0
  int* status;                  // (B,)
  int* num_kept;                // (B,) number of candidates in the draw
  float* logprobs;              // (B,), or null
  int* top_ids;                 // (B, num_top), or null
  float* top_logprobs;          // (B, num_top), or null
};

__device__ __forceinline__ bool is_changed(const SampleChooseParams& p, int64_t b) {
  return p.is_processed && p.is_processed[b];
}
__device__ __forceinline__ Row raw_row(const SampleChooseParams& p, int64_t b) {
  return Row(p.logits + b * p.stride, p.vocab);
}
// Returns the logits used to choose the row's token.
__device__ __forceinline__ Row row_of(const SampleChooseParams& p, int64_t b) {
  return is_changed(p, b) ? Row(p.processed + b * p.processed_stride, p.vocab) : raw_row(p, b);
}
// `top`: key of the row's largest logit.
__device__ __forceinline__ Job job_of(const SampleChooseParams& p, int64_t b, uint32_t top) {
  return make_job(row_of(p, b), from_ordered_key(top), p.temperature[b], p.top_k[b], p.top_p[b],
                  p.min_p[b], p.seeds[b], p.positions[b]);
}
