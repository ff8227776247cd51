// First stage of sampling: one read of all logits, which yields the segments' keys and the tiles'
// sums.
#pragma once

#include "sample/segments.cuh"
#include "sample/shared_walk.cuh"

struct SampleScanParams {
  const float* logits;       // (B, V), row b starts at b * stride; only read
  int64_t stride;            // elements
  int vocab;                 // V
  const float* temperature;  // (B,) the filters: see engine/kernels/sample.py
  const int* top_k;          // (B,)
  const float* top_p;        // (B,)
  const float* min_p;        // (B,)
  int num_top;               // number of log-probabilities to list; -1: none, not even the token's
  int num_tiles, num_segments;  // tiles and segments per row
  int shift;                    // 2^shift segments share a key
  uint32_t* keys;            // (B, 2, kMaxSegments) keys; [:, 1]: raw logits' keys if they differ
  struct Tile* tiles;        // (B, num_tiles)
  struct DrawState* states;  // (B,) zeroed here
  struct WalkQueue* queue;   // a single queue, zeroed here
  // The fields below are null or 0 in sample_scan.
  const int* history;  // (B, max_history) ids so far, or null
  int max_history;
  const int* history_lens;          // (B,)
  const int* prompt_lens;           // (B,)
  const float* repetition_penalty;  // (B,), or null
  const float* presence_penalty;    // (B,), or null
  const float* frequency_penalty;   // (B,), or null
  const int* logit_bias_ids;        // (num_bias,), or null
  const float* logit_bias_values;   // (num_bias,)
  const int* cu_logit_bias;         // (B + 1,) row b's entries are [cu[b], cu[b + 1])
  int num_bias;
  const int* allowed;       // (B or num_allowed, ceil(V / 32)) bit masks, or null
  const int* allowed_rows;  // (B,) mask index; outside [0, num_allowed): no mask; or null
  int num_allowed;
  float* processed;          // (B, V) changed rows, processed_stride apart
  int64_t processed_stride;  // elements
  int* is_processed;         // (B,) whether the row was changed
};

constexpr int kScanThreads = 128;
constexpr int kScanWarps = kScanThreads / kWarpSize;
constexpr int kScanChunk = kScanWarps * kTile;  // logits per block of the scan
constexpr int kQueueWords = sizeof(WalkQueue) / sizeof(uint32_t);

// State shared by the blocks of sample_choose that draw from one row.
struct DrawState {
  uint64_t best;
  uint32_t num_kept, num_done;
};
static_assert(sizeof(DrawState) == 8 * STATE_WORDS,
              "engine/kernels/sample.py allocates another size");

__device__ __forceinline__ bool is_filtered(int top_k, float top_p, float min_p, int vocab) {
  return (top_k > 0 && top_k < vocab) || top_p < 1.0f || min_p > 0.0f;
}

// The row and chunk that this block scans, and this warp's tile.
struct ScanPlace {
  int64_t b;
  int chunk, tile;

  __device__ __forceinline__ explicit ScanPlace(int num_tiles) {
    const int num_chunks = (num_tiles + kScanWarps - 1) / kScanWarps;
    b = blockIdx.x / num_chunks;
    chunk = blockIdx.x % num_chunks;
    tile = chunk * kScanWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  }
};

// Writes the keys and sums of one tile of row b; if is_changed, x holds processed logits.
__device__ __forceinline__ void scan_tile(const SampleScanParams& p, int64_t b, int tile,
                                          const TileValues& x, bool is_changed) {
  uint32_t* keys = p.keys + b * 2 * kMaxSegments;
  Tile* result = p.tiles + b * p.num_tiles + tile;
  const bool is_first_lane = threadIdx.x % kWarpSize == 0;
  if (tile == 0 && is_first_lane) p.states[b] = DrawState{0, 0, 0};
  if (b == 0 && tile == 0) {
    uint32_t* words = reinterpret_cast<uint32_t*>(p.queue);
    for (int i = threadIdx.x % kWarpSize; i < kQueueWords; i += kWarpSize) words[i] = 0;
  }
  const uint32_t key = store_keys(x, tile, p.shift, p.num_segments, keys);

  // If top_k fits a list, the candidates are found without the sums.
  const float temperature = p.temperature[b];
  const int top_k = p.top_k[b];
  const bool has_limit = top_k > 0 && top_k <= kMaxCandidates;
  if (temperature > 0.0f && !has_limit && is_filtered(top_k, p.top_p[b], p.min_p[b], p.vocab)) {
    float largest = minus_inf(), sum = 0.0f;
    if (key > kMinusInfKey && key < kInfKey) {
      largest = from_ordered_key(key);
      sum = tile_sum(x, largest, scale_of(temperature));
    }
    if (is_first_lane) store_vec(&result->largest, Vec<float, 2>{{largest, sum}});
  }

  if (p.num_top < 0) return;
  const Row raw(p.logits + b * p.stride, p.vocab);
  const TileValues y = is_changed ? load_tile(raw, tile) : x;  // raw logits, for log-probabilities
  if (is_changed && p.num_top > 0) {
    store_keys(y, tile, p.shift, p.num_segments, keys + kMaxSegments);
  }
  const float largest = tile_largest(y);
  const float sum = largest > minus_inf() ? tile_raw_sum(y, largest) : 0.0f;
  if (is_first_lane) store_vec(&result->raw_largest, Vec<float, 2>{{largest, sum}});
}
