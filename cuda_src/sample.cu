// Sampling: process each row of logits, cut its candidates, draw one; no sort of the row.
//
//   logits    (B, V) float   row b starts at b * stride; only read
//   The other arguments are those of engine/kernels/sample.py, by the same names, null if absent.
//   processed (B, processed_stride) float   scratch: rows changed by bias, mask or penalties
//   counts    (B, V) int     scratch: how often an id was seen
//   chunks, listed, states   scratch: what sample_scan tells sample_choose
//   token_ids, status, num_kept (B,) int;  logprobs (B,) float, or null
//   top_ids (B, num_top) int, top_logprobs (B, num_top) float, or null
//
// Formula and order of the steps: the notes of engine/kernels/sample.py.
// Numerics: whatever decides which token is chosen is float32 with one rounding per operation, or
// integer arithmetic, so that it equals the mirror bit for bit (common/exact_math.cuh). Only the
// log-probabilities use expf and logf.
// Parallelisation: sample_process, one block a row, only where rows are to be changed. sample_scan,
// one block of 256 threads per chunk of up to 4096 logits of a row, is the one read of memory: it
// finds the largest logit, sums exponentials, and lists the chunk's largest logits, 64 of them or
// a few more. sample_choose, one block of 512 threads a row, merges the lists, or their largest
// entries, and cuts and draws there. Where the candidates are more than the lists hold it searches
// the row itself (common/row_select.cuh); where nothing is cut, several blocks share the row.
// Mirror: engine/reference/sample.py
#include "common/candidates.cuh"
#include "common/chunk_lists.cuh"
#include "common/penalties.cuh"
#include "common/row_select.cuh"
#include "common/types.cuh"

constexpr int kProcessThreads = 1024;
constexpr int kOk = 0, kBadLogits = 1, kBadParameter = 2;

struct State {  // shared by the blocks of sample_choose that work on one row
  uint64_t best;
  uint32_t num_kept, num_done;
};

__device__ __forceinline__ bool is_filtered(int top_k, float top_p, float min_p, int vocab) {
  return (top_k > 0 && top_k < vocab) || top_p < 1.0f || min_p > 0.0f;
}

extern "C" __global__ void __launch_bounds__(kProcessThreads, 1) sample_process(
    const float* __restrict__ logits, int64_t stride, int vocab, const int* history,
    int max_history, const int* history_lens, const int* prompt_lens,
    const float* repetition_penalty, const float* presence_penalty, const float* frequency_penalty,
    const int* logit_bias_ids, const float* logit_bias_values, const int* cu_logit_bias,
    int num_bias, const int* allowed, float* processed, int64_t processed_stride, int* counts,
    int* is_processed) {
  const int64_t b = blockIdx.x;
  const float repetition = repetition_penalty ? repetition_penalty[b] : 1.0f;
  const float presence = presence_penalty ? presence_penalty[b] : 0.0f;
  const float frequency = frequency_penalty ? frequency_penalty[b] : 0.0f;
  const int len = history ? min(max(history_lens[b], 0), max_history) : 0;
  const int bias_begin = cu_logit_bias ? max(cu_logit_bias[b], 0) : 0;
  const int bias_end = cu_logit_bias ? min(cu_logit_bias[b + 1], num_bias) : 0;
  const bool has_penalty = len > 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  const bool has_work = allowed || has_penalty || bias_begin < bias_end;
  if (threadIdx.x == 0) is_processed[b] = has_work;
  if (!has_work) return;

  const float* source = logits + b * stride;
  const int* mask = allowed ? allowed + b * ((vocab + 31) / 32) : nullptr;
  float* row = processed + b * processed_stride;
  for (int id = threadIdx.x; id < vocab; id += kProcessThreads) {
    const float x = source[id];
    const bool stays = !mask || (static_cast<uint32_t>(mask[id / 32]) >> (id % 32) & 1u);
    row[id] = stays || is_bad(x) ? x : minus_inf();  // a NaN is reported even where it is masked
  }
  __syncthreads();
  for (int i = bias_begin + threadIdx.x; i < bias_end; i += kProcessThreads) {
    const int id = logit_bias_ids[i];
    if (id >= 0 && id < vocab) row[id] = __fadd_rn(row[id], logit_bias_values[i]);
  }
  __syncthreads();
  if (has_penalty) {
    penalize(row, counts + b * vocab, history + b * max_history, len, prompt_lens[b], vocab,
             repetition, presence, frequency);
  }
}

extern "C" __global__ void __launch_bounds__(kScanThreads, 4) sample_scan(
    const float* __restrict__ logits, int64_t stride, int vocab, const float* processed,
    int64_t processed_stride, const int* is_processed, const float* temperature, const int* top_k,
    const float* top_p, const float* min_p, int num_top, int chunk_groups, Chunk* chunks,
    uint64_t* listed, State* states) {
  __shared__ ScanShared s;
  const int64_t b = blockIdx.x;
  const int64_t slot = b * gridDim.y + blockIdx.y;
  const bool is_changed = is_processed && is_processed[b];
  const Row raw(logits + b * stride, vocab);
  const Row row = is_changed ? Row(processed + b * processed_stride, vocab) : raw;
  const int first_group = blockIdx.y * chunk_groups;
  const int end_group = min(first_group + chunk_groups, row.num_groups());
  if (blockIdx.y == 0 && threadIdx.x == 0) states[b] = State{0, 0, 0};

  float x[kScanValues];
  scan_load(row, first_group, end_group, x);
  bool has_bad = false;
  uint64_t best = 0;
  float largest = minus_inf();
#pragma unroll
  for (int i = 0; i < kScanValues; ++i) {
    has_bad |= is_bad(x[i]);
    largest = fmaxf(largest, x[i]);
    const int group = first_group + (i / 4) * kScanThreads + threadIdx.x;
    if (x[i] > minus_inf()) best = Max<uint64_t>()(best, order_of(x[i], 4 * group + i % 4));
  }
  best = block_reduce<kScanWarps>(best, Max<uint64_t>(), s.scratch);
  has_bad = __syncthreads_or(has_bad);
  Chunk* chunk = chunks + slot;
  if (threadIdx.x == 0) *chunk = Chunk{best, minus_inf(), 0.0f, kNoList, 0, has_bad, 0};

  const bool is_cut = temperature[b] > 0.0f && is_filtered(top_k[b], top_p[b], min_p[b], vocab);
  if ((is_cut || (num_top > 0 && !is_changed)) && !has_bad) {
    scan_list(x, first_group, scan_bound(largest, s), s, chunk, listed + slot * kMaxListed);
  }
  if (num_top < 0) return;
  if (is_changed) {  // log-probabilities are those of the raw logits
    scan_load(raw, first_group, end_group, x);
    largest = minus_inf();
#pragma unroll
    for (int i = 0; i < kScanValues; ++i) largest = fmaxf(largest, x[i]);
  }
  largest = block_reduce<kScanWarps>(largest, Max<float>(), s.scratch);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kScanValues; ++i) sum += x[i] > minus_inf() ? expf(x[i] - largest) : 0.0f;
  sum = block_reduce<kScanWarps>(sum, Sum<float>(), s.scratch);
  if (threadIdx.x == 0) {
    chunk->lse_max = largest;
    chunk->lse_sum = sum;
  }
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= kFloatMax; }

__device__ __forceinline__ bool is_usable(float temperature, float top_p, float min_p,
                                          float repetition, float presence, float frequency) {
  return temperature >= 0.0f && is_finite(temperature) && top_p > 0.0f && top_p <= 1.0f &&
         min_p >= 0.0f && min_p <= 1.0f && repetition > 0.0f && is_finite(repetition) &&
         is_finite(presence) && is_finite(frequency);
}

struct Summary {  // of all chunks of a row
  uint64_t best;
  uint32_t bound;
  bool is_bad;
  float lse_max, lse_sum;
};

__device__ Summary summarize(const Chunk* chunks, int num_chunks, uint64_t* scratch) {
  Chunk mine{0, minus_inf(), 0.0f, 0, 0, 0, 0};
  if (static_cast<int>(threadIdx.x) < num_chunks) mine = chunks[threadIdx.x];
  Summary all;
  all.best = block_reduce<kWarps>(mine.best, Max<uint64_t>(), scratch);
  all.bound = block_reduce<kWarps>(mine.bound, Max<uint32_t>(), scratch);
  all.is_bad = __syncthreads_or(mine.is_bad);
  all.lse_max = block_reduce<kWarps>(mine.lse_max, Max<float>(), scratch);
  const float part = mine.lse_sum > 0.0f ? mine.lse_sum * expf(mine.lse_max - all.lse_max) : 0.0f;
  all.lse_sum = block_reduce<kWarps>(part, Sum<float>(), scratch);
  return all;
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

// Puts the num_top largest logits of the row into s.list, descending, by a search of the row.
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
  block_sort_descending(s.list, num_top);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) sample_choose(
    const float* __restrict__ logits, int64_t stride, int vocab, const float* processed,
    int64_t processed_stride, const int* is_processed, const float* temperature, const int* top_k,
    const float* top_p, const float* min_p, const uint64_t* seeds, const int64_t* positions,
    const float* repetition_penalty, const float* presence_penalty, const float* frequency_penalty,
    int num_top, int num_chunks, const Chunk* chunks, const uint64_t* listed, State* states,
    int* token_ids, int* status, int* num_kept, float* logprobs, int* top_ids,
    float* top_logprobs) {
  __shared__ ChooseShared s;
  const int64_t b = blockIdx.x;
  const bool is_cut = is_filtered(top_k[b], top_p[b], min_p[b], vocab);
  const bool is_shared = temperature[b] > 0.0f && !is_cut;
  if (blockIdx.y > 0 && !is_shared) return;

  const bool is_changed = is_processed && is_processed[b];
  const Row raw(logits + b * stride, vocab);
  const Row row = is_changed ? Row(processed + b * processed_stride, vocab) : raw;
  chunks += b * num_chunks;
  listed += b * num_chunks * kMaxListed;
  const Summary all = summarize(chunks, num_chunks, s.select.scratch);
  const bool can_use = is_usable(temperature[b], top_p[b], min_p[b],
                                 repetition_penalty ? repetition_penalty[b] : 1.0f,
                                 presence_penalty ? presence_penalty[b] : 0.0f,
                                 frequency_penalty ? frequency_penalty[b] : 0.0f);
  if (!can_use || all.is_bad || all.best == 0) {
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

  const Job job = make_job(row, all.best, temperature[b], top_k[b], top_p[b], min_p[b], seeds[b],
                           positions[b]);
  uint64_t winner = all.best;
  int num_listed = -1, kept = 1;
  if (is_shared) {
    const int groups = (row.num_groups() + gridDim.y - 1) / gridDim.y;
    const int begin = min(static_cast<int>(blockIdx.y) * groups, row.num_groups());
    winner = draw_row(job, 0, begin, min(begin + groups, row.num_groups()), s, &kept);
    if (!join_draws(states + b, &winner, &kept, s)) return;
  } else if (temperature[b] > 0.0f) {
    num_listed = merge_lists(chunks, listed, num_chunks, all.bound, job.largest, job.top_k, s);
    kept = num_listed < 0 ? -1 : cut_list(job, num_listed, s);
    if (kept >= 0) {
      winner = draw_list(job, kept, s);
    } else {
      winner = draw_row(job, cut_row(job, s), 0, row.num_groups(), s, &kept);
    }
  }
  const int token = id_of(winner);
  const float log_sum = num_top >= 0 ? logf(all.lse_sum) : 0.0f;
  if (threadIdx.x == 0) {
    token_ids[b] = token;
    status[b] = kOk;
    num_kept[b] = kept;
    if (num_top >= 0) logprobs[b] = raw.data[token] - all.lse_max - log_sum;
  }
  if (num_top <= 0) return;
  if (is_changed) {
    num_listed = -1;  // the list is of the changed logits
  } else if (num_listed < 0) {
    num_listed = merge_lists(chunks, listed, num_chunks, all.bound, job.largest, num_top, s);
  }
  if (num_listed < num_top) list_top(raw, num_top, s);
  if (static_cast<int>(threadIdx.x) < num_top) {
    const uint64_t order = s.list[threadIdx.x];
    top_ids[b * num_top + threadIdx.x] = id_of(order);
    top_logprobs[b * num_top + threadIdx.x] = logit_of(order) - all.lse_max - log_sum;
  }
}
