// Sampling: process each row of logits, cut its candidates, draw one; no sort of the row.
//
//   logits    (B, V) float   row b starts at b * stride; only read
//   The other arguments are those of engine/kernels/sample.py, by the same names, null if absent.
//   processed (B, processed_stride) float   scratch: rows changed by bias, mask or penalties
//   keys, tiles, states                     scratch: what the scan tells sample_choose
//   token_ids, status, num_kept (B,) int;  logprobs (B,) float, or null
//   top_ids (B, num_top) int, top_logprobs (B, num_top) float, or null
//
// Formula and order of the steps: the notes of engine/kernels/sample.py.
// Numerics: whatever decides which token is chosen is float32 with one rounding per operation, or
// integer arithmetic, so that it equals the mirror bit for bit (common/exact_math.cuh). Only the
// log-probabilities, and bounds with a proven margin, use other functions.
// Parallelisation: sample_scan, one warp per tile of 1024 logits and no barrier, is the one read of
// memory: it keeps the largest logit of every segment (common/segments.cuh). sample_scan_process
// does the same where rows may have to be changed first; a block does so for its four tiles in
// shared memory. sample_choose, one block of 512 threads a row, finds in the keys which segments
// can hold a candidate, lists these and cuts and draws there (common/candidates.cuh). Where the
// candidates are more than a list holds it walks the row (common/row_cut.cuh); where nothing is
// cut, several blocks share the row.
// Mirror: engine/reference/sample.py
#include "common/candidates.cuh"
#include "common/penalties.cuh"
#include "common/row_cut.cuh"
#include "common/segments.cuh"
#include "common/types.cuh"

constexpr int kScanThreads = 128;
constexpr int kScanWarps = kScanThreads / kWarpSize;
constexpr int kChunk = kScanWarps * kTile;  // logits of a block of the scan
constexpr int kOk = 0, kBadLogits = 1, kBadParameter = 2;

struct State {  // shared by the blocks of sample_choose that work on one row
  uint64_t best;
  uint32_t num_kept, num_done;
};

// What both scans are told.
struct Scan {
  const float* logits;
  int64_t stride;
  int vocab;
  const float *temperature, *top_p, *min_p;
  const int* top_k;
  int num_top, num_tiles, num_segments, shift;
  uint32_t* keys;  // (B, 2, kMaxSegments): of the row, and of the raw logits where they differ
  Tile* tiles;
  State* states;
};

__device__ __forceinline__ bool is_filtered(int top_k, float top_p, float min_p, int vocab) {
  return (top_k > 0 && top_k < vocab) || top_p < 1.0f || min_p > 0.0f;
}

// Keys and sums of one tile; x is as changed, where the row is.
__device__ __forceinline__ void scan_tile(const Scan& scan, int64_t b, int tile,
                                          const TileValues& x, bool is_changed) {
  uint32_t* keys = scan.keys + b * 2 * kMaxSegments;
  Tile* result = scan.tiles + b * scan.num_tiles + tile;
  const bool is_first_lane = threadIdx.x % kWarpSize == 0;
  if (tile == 0 && is_first_lane) scan.states[b] = State{0, 0, 0};
  const uint32_t key = store_keys(x, tile, scan.shift, scan.num_segments, keys);

  // Where top_k says how many candidates there are, they are found without the sums.
  const float temperature = scan.temperature[b];
  const int top_k = scan.top_k[b];
  const bool has_limit = top_k > 0 && top_k <= kMaxCandidates;
  if (temperature > 0.0f && !has_limit &&
      is_filtered(top_k, scan.top_p[b], scan.min_p[b], scan.vocab)) {
    float largest = minus_inf(), sum = 0.0f;
    if (key > kMinusInfKey && key < kInfKey) {
      largest = from_ordered_key(key);
      sum = tile_sum(x, largest, scale_of(temperature));
    }
    if (is_first_lane) store_vec(&result->largest, Vec<float, 2>{{largest, sum}});
  }

  if (scan.num_top < 0) return;
  const Row raw(scan.logits + b * scan.stride, scan.vocab);
  const TileValues y = is_changed ? load_tile(raw, tile) : x;  // log-probabilities are of these
  if (is_changed && scan.num_top > 0) {
    store_keys(y, tile, scan.shift, scan.num_segments, keys + kMaxSegments);
  }
  const float largest = tile_largest(y);
  const float sum = largest > minus_inf() ? tile_raw_sum(y, largest) : 0.0f;
  if (is_first_lane) store_vec(&result->raw_largest, Vec<float, 2>{{largest, sum}});
}

#define ENGINE_SCAN_PARAMETERS                                                                    \
  const float *logits, int64_t stride, int vocab, const float *temperature, const int *top_k,     \
      const float *top_p, const float *min_p, int num_top, int num_tiles, int num_segments,       \
      int shift, uint32_t *keys, Tile *tiles, State *states
#define ENGINE_SCAN                                                                               \
  Scan {                                                                                          \
    logits, stride, vocab, temperature, top_p, min_p, top_k, num_top, num_tiles, num_segments,    \
        shift, keys, tiles, states                                                                \
  }

extern "C" __global__ void __launch_bounds__(kScanThreads, 8) sample_scan(ENGINE_SCAN_PARAMETERS) {
  const int num_chunks = (num_tiles + kScanWarps - 1) / kScanWarps;
  const int64_t b = blockIdx.x / num_chunks;
  const int chunk = blockIdx.x % num_chunks;
  const int tile = chunk * kScanWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  if (tile >= num_tiles) return;
  const TileValues x = load_tile(Row(logits + b * stride, vocab), tile);
  scan_tile(ENGINE_SCAN, b, tile, x, false);
}

extern "C" __global__ void __launch_bounds__(kScanThreads, 4) sample_scan_process(
    ENGINE_SCAN_PARAMETERS, const int* history, int max_history, const int* history_lens,
    const int* prompt_lens, const float* repetition_penalty, const float* presence_penalty,
    const float* frequency_penalty, const int* logit_bias_ids, const float* logit_bias_values,
    const int* cu_logit_bias, int num_bias, const int* allowed, float* processed,
    int64_t processed_stride, int* is_processed) {
  __shared__ alignas(16) float changed[kChunk];
  __shared__ int counts[kChunk];
  const int num_chunks = (num_tiles + kScanWarps - 1) / kScanWarps;
  const int64_t b = blockIdx.x / num_chunks;
  const int chunk = blockIdx.x % num_chunks;
  const int tile = chunk * kScanWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  const int begin = chunk * kChunk, size = min(kChunk, vocab - begin);
  const float* row = logits + b * stride;

  const float repetition = repetition_penalty ? repetition_penalty[b] : 1.0f;
  const float presence = presence_penalty ? presence_penalty[b] : 0.0f;
  const float frequency = frequency_penalty ? frequency_penalty[b] : 0.0f;
  const int len = history ? min(max(history_lens[b], 0), max_history) : 0;
  const int bias_begin = cu_logit_bias ? max(cu_logit_bias[b], 0) : 0;
  const int bias_end = cu_logit_bias ? min(cu_logit_bias[b + 1], num_bias) : 0;
  const bool has_penalty = len > 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  const bool has_work = allowed || has_penalty || bias_begin < bias_end;
  if (chunk == 0 && threadIdx.x == 0) is_processed[b] = has_work;
  if (!has_work) {
    if (tile >= num_tiles) return;
    scan_tile(ENGINE_SCAN, b, tile, load_tile(Row(row, vocab), tile), false);
    return;
  }

  const int* mask = allowed ? allowed + b * ((vocab + 31) / 32) : nullptr;
  for (int i = threadIdx.x; i < size; i += kScanThreads) {
    const int id = begin + i;
    const float x = row[id];
    const bool stays = !mask || (static_cast<uint32_t>(mask[id / 32]) >> (id % 32) & 1u);
    changed[i] = stays || is_bad(x) ? x : minus_inf();  // a NaN is reported even where it is masked
    counts[i] = 0;
  }
  __syncthreads();
  for (int i = bias_begin + threadIdx.x; i < bias_end; i += kScanThreads) {
    const int at = logit_bias_ids[i] - begin;
    if (logit_bias_ids[i] >= 0 && at >= 0 && at < size) {
      changed[at] = __fadd_rn(changed[at], logit_bias_values[i]);
    }
  }
  __syncthreads();
  if (has_penalty) {
    penalize(changed, counts, history + b * max_history, len, prompt_lens[b], begin, size,
             repetition, presence, frequency);
    __syncthreads();
  }
  float* out = processed + b * processed_stride + begin;
  for (int i = threadIdx.x; i < size; i += kScanThreads) out[i] = changed[i];
  if (tile >= num_tiles) return;
  // Generic pointers: the tile is read from shared memory as if the chunk were a row of its own.
  const TileValues x = load_tile(Row(changed, size), threadIdx.x / kWarpSize);
  scan_tile(ENGINE_SCAN, b, tile, x, true);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= kFloatMax; }

__device__ __forceinline__ bool is_usable(float temperature, float top_p, float min_p,
                                          float repetition, float presence, float frequency) {
  return temperature >= 0.0f && is_finite(temperature) && top_p > 0.0f && top_p <= 1.0f &&
         min_p >= 0.0f && min_p <= 1.0f && repetition > 0.0f && is_finite(repetition) &&
         is_finite(presence) && is_finite(frequency);
}

__device__ __forceinline__ void load_keys(const uint32_t* keys, int num_segments,
                                          uint32_t (&mine)[kKeys]) {
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int segment = i * kThreads + static_cast<int>(threadIdx.x);
    mine[i] = segment < num_segments ? keys[segment] : 0;
  }
}

__device__ __forceinline__ uint32_t largest_key(const uint32_t (&keys)[kKeys],
                                                uint64_t* scratch) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) top = max(top, keys[i]);
  return block_max<kWarps>(top, scratch);
}

// The least logit that is the largest, and not -inf, of a segment.
__device__ __forceinline__ float lowest_of_largest(const uint32_t (&keys)[kKeys],
                                                   uint64_t* scratch) {
  return from_ordered_key(~block_max<kWarps>(inverse_of_lowest(keys), scratch));
}

// The lowest id whose logit has the key `top`, the largest of all.
__device__ int first_of_largest(const Row& row, const uint32_t (&keys)[kKeys], uint32_t top,
                                int shift, uint64_t* scratch) {
  uint32_t inverse = 0;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (keys[i] == top) inverse = max(inverse, ~static_cast<uint32_t>(i * kThreads + threadIdx.x));
  }
  const int segment = static_cast<int>(~block_max<kWarps>(inverse, scratch));
  inverse = 0;
  const int group = (segment << shift) * kWarpSize + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) < kWarpSize << shift) {
    const Vec<float, 4> x = row.group(group);
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      if (ordered_key(x.v[i]) == top) inverse = ~static_cast<uint32_t>(4 * group + i);
    }
  }
  return static_cast<int>(~block_max<kWarps>(inverse, scratch));
}

struct LogSum {
  float largest, log_sum;
};

// Logarithm of the sum of exponentials of the row's raw logits, in two parts.
__device__ LogSum log_sum_of(const Tile* tiles, int num_tiles, uint64_t* scratch) {
  float largest = minus_inf(), sum = 0.0f;
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    largest = fmaxf(largest, tiles[i].raw_largest);
  }
  largest = block_reduce<kWarps>(largest, Max<float>(), scratch);
  for (int i = threadIdx.x; i < num_tiles; i += kThreads) {
    const float own = tiles[i].raw_sum;
    if (own > 0.0f) sum += own * expf(tiles[i].raw_largest - largest);
  }
  return LogSum{largest, logf(block_reduce<kWarps>(sum, Sum<float>(), scratch))};
}

// Joins the draws of the row's blocks; true in the block that came last and so knows the result.
__device__ bool join_draws(State* state, uint64_t* best, int* num_kept, ChooseShared& s) {
  if (gridDim.y == 1) return true;
  if (threadIdx.x == 0) {
    atomicMax(&state->best, *best);
    atomicAdd(&state->num_kept, static_cast<uint32_t>(*num_kept));
    __threadfence();  // SAFETY: both are there before this block counts as done.
    s.is_last = atomicAdd(&state->num_done, 1u) == gridDim.y - 1;
    __threadfence();
    s.list[0] = atomicMax(&state->best, 0ull);
    s.size = static_cast<int>(atomicAdd(&state->num_kept, 0u));
  }
  __syncthreads();
  *best = s.list[0];
  *num_kept = s.size;
  const bool is_last = s.is_last;
  __syncthreads();  // SAFETY: all have read s.list and s.size before they are used again.
  return is_last;
}

// Puts the num_top largest logits of the row into s.sorted by a search of the row.
__device__ void list_top(const Row& row, int num_top, ChooseShared& s) {
  const uint64_t threshold = select_order<kWarps>(
      row, [](uint64_t, float) -> uint64_t { return 1; }, num_top, s.select);
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  for_each_id(row, [&](float logit, int id) {
    const uint64_t order = order_of(logit, id);
    if (order >= threshold) s.list[atomicAdd(&s.size, 1)] = order;
  });
  __syncthreads();
  block_sort_descending(s.list, num_top, s.sorted);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_choose(
    const float* logits, int64_t stride, int vocab, const float* processed,
    int64_t processed_stride, const int* is_processed, const float* temperature, const int* top_k,
    const float* top_p, const float* min_p, const uint64_t* seeds, const int64_t* positions,
    const float* repetition_penalty, const float* presence_penalty, const float* frequency_penalty,
    int num_top, int num_tiles, int num_segments, int shift, const uint32_t* keys,
    const Tile* tiles, State* states, int* token_ids, int* status, int* num_kept, float* logprobs,
    int* top_ids, float* top_logprobs) {
  __shared__ ChooseShared s;
  uint64_t* scratch = s.select.scratch;
  const int64_t b = blockIdx.x;
  keys += b * 2 * kMaxSegments;
  tiles += b * num_tiles;
  uint32_t mine[kKeys];
  load_keys(keys, num_segments, mine);
  const bool is_random = temperature[b] > 0.0f;
  const bool is_cut = is_random && is_filtered(top_k[b], top_p[b], min_p[b], vocab);
  const bool is_shared = is_random && !is_cut;
  if (blockIdx.y > 0 && !is_shared) return;

  const bool is_changed = is_processed && is_processed[b];
  const Row raw(logits + b * stride, vocab);
  const Row row = is_changed ? Row(processed + b * processed_stride, vocab) : raw;
  const bool can_use = is_usable(temperature[b], top_p[b], min_p[b],
                                 repetition_penalty ? repetition_penalty[b] : 1.0f,
                                 presence_penalty ? presence_penalty[b] : 0.0f,
                                 frequency_penalty ? frequency_penalty[b] : 0.0f);
  const uint32_t top = largest_key(mine, scratch);
  if (!can_use || top >= kInfKey || top <= kMinusInfKey) {
    if (blockIdx.y > 0) return;
    if (threadIdx.x == 0) {
      token_ids[b] = -1;
      status[b] = can_use ? kBadLogits : kBadParameter;
      num_kept[b] = 0;
      if (num_top >= 0) logprobs[b] = nanf("");
    }
    if (static_cast<int>(threadIdx.x) < num_top) {
      top_ids[b * num_top + threadIdx.x] = -1;
      top_logprobs[b * num_top + threadIdx.x] = nanf("");
    }
    return;
  }

  int token, num_listed = -1, kept = 1;
  if (!is_random) {
    token = first_of_largest(row, mine, top, shift, scratch);
  } else {
    const Job job = make_job(row, from_ordered_key(top), temperature[b], top_k[b], top_p[b],
                             min_p[b], seeds[b], positions[b]);
    uint64_t winner;
    if (is_shared) {
      const int groups = (row.num_groups() + gridDim.y - 1) / gridDim.y;
      const int begin = min(static_cast<int>(blockIdx.y) * groups, row.num_groups());
      const int end = min(begin + groups, row.num_groups());
      winner = draw_row<false>(job, 0, begin, end, s, &kept);
      if (!join_draws(states + b, &winner, &kept, s)) return;
    } else {
      int wanted = max(job.top_k > 0 ? job.top_k : kListed, num_top);
      const int most = job.top_k > 0 ? wanted : max(wanted, most_listed(num_segments));
      for (kept = -1; wanted <= kMaxCandidates; wanted = most) {
        bool is_whole;
        num_listed = list_largest(row, mine, top, wanted, shift, s, &is_whole);
        if (num_listed >= 0) kept = cut_list(job, num_listed, is_whole, tiles, num_tiles, s);
        if (kept >= 0 || num_listed < 0 || wanted >= most) break;
      }
      if (kept >= 0) {
        Drawing drawing{0, kGumbelLowest};
        draw_list(job, kept, s, drawing);
        winner = end_drawing(drawing, s);
      } else {
        num_listed = -1;
        winner = choose_from_row(job, lowest_of_largest(mine, scratch), s, &kept);
      }
    }
    token = id_of(winner);
  }
  LogSum all{0.0f, 0.0f};
  if (num_top >= 0) all = log_sum_of(tiles, num_tiles, scratch);
  if (threadIdx.x == 0) {
    token_ids[b] = token;
    status[b] = kOk;
    num_kept[b] = kept;
    if (num_top >= 0) logprobs[b] = raw.data[token] - all.largest - all.log_sum;
  }
  if (num_top <= 0) return;
  if (is_changed || num_listed < 0) {  // no list, or one of the changed logits
    if (is_changed) load_keys(keys + kMaxSegments, num_segments, mine);
    const uint32_t raw_top = largest_key(mine, scratch);
    bool is_whole;
    num_listed = list_largest(raw, mine, raw_top, num_top, shift, s, &is_whole);
  }
  if (num_listed < num_top) list_top(raw, num_top, s);
  if (static_cast<int>(threadIdx.x) < num_top) {
    const uint64_t order = s.sorted[threadIdx.x];
    top_ids[b * num_top + threadIdx.x] = id_of(order);
    top_logprobs[b * num_top + threadIdx.x] = logit_of(order) - all.largest - all.log_sum;
  }
}
