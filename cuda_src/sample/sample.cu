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
#include "sample/candidates.cuh"
#include "sample/penalties.cuh"
#include "sample/row_team.cuh"
#include "sample/result.cuh"
#include "sample/segments.cuh"
#include "common/types.cuh"

constexpr int kScanThreads = 128;
constexpr int kScanWarps = kScanThreads / kWarpSize;
constexpr int kChunk = kScanWarps * kTile;  // logits of a block of the scan
constexpr int kBoardWords = sizeof(Board) / sizeof(uint32_t);

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
  Board* board;
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
  if (b == 0 && tile == 0) {
    uint32_t* words = reinterpret_cast<uint32_t*>(scan.board);
    for (int i = threadIdx.x % kWarpSize; i < kBoardWords; i += kWarpSize) words[i] = 0;
  }
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

#define ENGINE_SCAN_PARAMETERS                                                                \
  const float *logits, int64_t stride, int vocab, const float *temperature, const int *top_k, \
      const float *top_p, const float *min_p, int num_top, int num_tiles, int num_segments,   \
      int shift, uint32_t *keys, Tile *tiles, State *states, Board *board
#define ENGINE_SCAN                                                                            \
  Scan {                                                                                       \
    logits, stride, vocab, temperature, top_p, min_p, top_k, num_top, num_tiles, num_segments, \
        shift, keys, tiles, states, board                                                      \
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

extern "C" __global__ void __launch_bounds__(kScanThreads, 4)
    sample_scan_process(ENGINE_SCAN_PARAMETERS, const int* history, int max_history,
                        const int* history_lens, const int* prompt_lens,
                        const float* repetition_penalty, const float* presence_penalty,
                        const float* frequency_penalty, const int* logit_bias_ids,
                        const float* logit_bias_values, const int* cu_logit_bias, int num_bias,
                        const int* allowed, float* processed, int64_t processed_stride,
                        int* is_processed) {
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

// Cuts and draws among a list of the row's largest; no token if it is too short.
__device__ __forceinline__ Result choose_from_list(const Job& job, const uint32_t (&keys)[kKeys],
                                                   uint32_t top, int num_top, int num_segments,
                                                   int shift, const Tile* tiles, int num_tiles,
                                                   ChooseShared& s) {
  int wanted = max(job.top_k > 0 ? job.top_k : kListed, num_top);
  const int most = job.top_k > 0 ? wanted : max(wanted, most_listed(num_segments));
  Result result{kNoToken, -1, kUncertain};
  for (; wanted <= kMaxCandidates; wanted = most) {
    bool is_whole;
    result.num_listed = list_largest(job.row, keys, top, wanted, shift, s, &is_whole);
    if (result.num_listed < 0) break;
    result.kept = cut_list(job, result.num_listed, is_whole, tiles, num_tiles, s);
    if (result.kept != kUncertain || wanted >= most) break;
  }
  if (result.num_listed < 0 || result.kept < 0) return Result{kNoToken, -1, 0};
  Drawing drawing{0, kGumbelLowest};
  draw_list(job, result.kept, s, drawing);
  result.token = id_of(end_drawing(drawing, s));
  return result;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_choose(const float* logits, int64_t stride, int vocab, const float* processed,
                  int64_t processed_stride, const int* is_processed, const float* temperature,
                  const int* top_k, const float* top_p, const float* min_p, const uint64_t* seeds,
                  const int64_t* positions, const float* repetition_penalty,
                  const float* presence_penalty, const float* frequency_penalty, int num_top,
                  int num_tiles, int num_segments, int shift, const uint32_t* keys,
                  const Tile* tiles, State* states, Board* board, Walk* walks, int* token_ids,
                  int* status, int* num_kept, float* logprobs, int* top_ids, float* top_logprobs) {
  __shared__ ChooseShared s;
  uint64_t* scratch = s.select.scratch;
  const int64_t b = blockIdx.x;
  if (threadIdx.x == 0) atomicAdd(&board->num_started, 1u);
  const uint32_t* const row_keys = keys + b * 2 * kMaxSegments;
  const Tile* const row_tiles = tiles + b * num_tiles;
  uint32_t mine[kKeys];
  load_keys(row_keys, num_segments, mine);
  const Team team{Batch{logits, stride, vocab, processed, processed_stride, is_processed,
                        temperature, top_k, top_p, min_p, seeds, positions},
                  board, walks, static_cast<int>(gridDim.x)};
  const bool is_random = temperature[b] > 0.0f;
  const bool is_cut = is_random && is_filtered(top_k[b], top_p[b], min_p[b], vocab);
  const bool is_shared = is_random && !is_cut;
  // Rows that may have to be walked: their blocks help those that are.
  const bool is_helper = is_cut && !(top_k[b] > 0 && top_k[b] < vocab);
  const bool is_owner = blockIdx.y == 0 || is_shared;
  if (!is_owner && !is_helper) return;

  Result result{kNoToken, -1, 1};
  int own = -1;  // walk of this block's row
  if (is_owner) {
    const bool can_use = is_usable(temperature[b], top_p[b], min_p[b],
                                   repetition_penalty ? repetition_penalty[b] : 1.0f,
                                   presence_penalty ? presence_penalty[b] : 0.0f,
                                   frequency_penalty ? frequency_penalty[b] : 0.0f);
    const uint32_t top = largest_key(mine, scratch);
    if (!can_use || top >= kInfKey || top <= kMinusInfKey) {
      if (blockIdx.y > 0) return;
      result = Result{can_use ? kBadLogitsToken : kBadParameterToken, -1, 0};
    } else if (!is_random) {
      result.token = first_of_largest(team.batch.row(b), mine, top, shift, scratch);
    } else {
      const Job job = team.batch.job(b, top);
      uint64_t winner;
      if (is_shared) {
        const int groups = (job.row.num_groups() + gridDim.y - 1) / gridDim.y;
        const int begin = min(static_cast<int>(blockIdx.y) * groups, job.row.num_groups());
        const int end = min(begin + groups, job.row.num_groups());
        winner = draw_row<false>(job, 0, begin, end, s, &result.kept);
        if (!join_draws(states + b, &winner, &result.kept, s)) return;
        result.token = id_of(winner);
      } else {
        result = choose_from_list(job, mine, top, max(num_top, 0), num_segments, shift, row_tiles,
                                  num_tiles, s);
        if (result.token < 0) {
          own = team.put_up(b, job, lowest_of_largest(mine, scratch), top, s);
        }
      }
    }
  }

  for (uint32_t turn = blockIdx.x + blockIdx.y * gridDim.x; own != kMaxWalks; ++turn) {
    // Opaque, so that what follows from it is not computed before the loop and kept in registers.
    int opaque = static_cast<int>(blockIdx.x);
    asm volatile("" : "+r"(opaque));
    const int64_t row = opaque;
    const uint32_t* const row_keys = keys + row * 2 * kMaxSegments;
    const Tile* const row_tiles = tiles + row * num_tiles;
    if (result.token != kNoToken) {
      const OutputPointers out{token_ids + row,         status + row,
                               num_kept + row,          logprobs + row,
                               top_ids + row * num_top, top_logprobs + row * num_top};
      write_result(result, out, team.batch, row, num_top, num_tiles, num_segments, shift, row_keys,
                   row_tiles, s);
      result.token = kNoToken;
      uint32_t is_last = 0;
      if (threadIdx.x == 0) is_last = team.finish();
      if (!is_helper || team.broadcast(is_last, s)) return;
    }
    const uint32_t next = team.next(own, turn, s);
    if (next == ~0u) return;
    const int slot = static_cast<int>(next / 8);
    const uint32_t phase = next % 8;
    if (phase == kDecided) {
      result = Result{id_of(__ldcg(&walks[slot].best)), -1,
                      static_cast<int>(__ldcg(&walks[slot].num_drawn))};
      own = -1;
    } else if (phase == kTied) {
      own = kMaxWalks;
      break;
    } else if (phase == 0 || !team.work(slot, phase, s)) {
      __nanosleep(100);
    }
  }

  // To be walked by this block alone.
  load_keys(row_keys, num_segments, mine);
  const Job job = team.batch.job(b, largest_key(mine, scratch));
  const float low = lowest_of_largest(mine, scratch);
  result.token = id_of(choose_from_row(job, low, s, &result.kept));
  const OutputPointers out{token_ids + b,         status + b,
                           num_kept + b,          logprobs + b,
                           top_ids + b * num_top, top_logprobs + b * num_top};
  write_result(result, out, team.batch, b, num_top, num_tiles, num_segments, shift, row_keys,
               row_tiles, s);
  if (threadIdx.x == 0) team.finish();
}
