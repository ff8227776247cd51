// Logit processing before sampling: mask, bias and penalties.
#pragma once

#include "sample/scan.cuh"

constexpr int kInPrompt = 1 << 30;

// Applies repetition, presence and frequency penalties to logits [begin, begin + size) of a row.
// Counts each id's occurrences in the history; then one thread per distinct id changes its logit.
// Index id - begin of `logits` and `counts` belongs to id; all counts are 0 before and after.
__device__ void penalize(float* logits, int* counts, const int* history, int len, int prompt_len,
                         int begin, int size, float repetition, float presence, float frequency) {
  for (int i = threadIdx.x; i < len; i += blockDim.x) {
    const int at = history[i] - begin;
    if (history[i] < 0 || at < 0 || at >= size) continue;
    if (i < prompt_len)
      atomicOr(&counts[at], kInPrompt);
    else
      atomicAdd(&counts[at], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < len; i += blockDim.x) {
    const int at = history[i] - begin;
    if (history[i] < 0 || at < 0 || at >= size) continue;
    const int seen =
        atomicExch(&counts[at], 0);  // SAFETY: only one of the threads with this id gets the count.
    if (seen == 0) continue;
    float x = logits[at];
    x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    const int times = seen & ~kInPrompt;
    if (times > 0) {
      x = __fsub_rn(x, __fmul_rn(frequency, __int2float_rn(times)));
      x = __fsub_rn(x, presence);
    }
    logits[at] = x;
  }
}

// The changes to apply to row b.
struct RowChanges {
  float repetition, presence, frequency;
  int history_len, bias_begin, bias_end;
  bool has_penalty;
  const int* mask;  // (ceil(V / 32),) or null

  __device__ __forceinline__ RowChanges(const SampleScanParams& p, int64_t b) {
    repetition = p.repetition_penalty ? p.repetition_penalty[b] : 1.0f;
    presence = p.presence_penalty ? p.presence_penalty[b] : 0.0f;
    frequency = p.frequency_penalty ? p.frequency_penalty[b] : 0.0f;
    history_len = p.history ? min(max(p.history_lens[b], 0), p.max_history) : 0;
    bias_begin = p.cu_logit_bias ? max(p.cu_logit_bias[b], 0) : 0;
    bias_end = p.cu_logit_bias ? min(p.cu_logit_bias[b + 1], p.num_bias) : 0;
    has_penalty = history_len > 0 && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
    const int64_t mask_row = p.allowed_rows ? p.allowed_rows[b] : b;
    const bool has_mask = p.allowed && mask_row >= 0 && mask_row < p.num_allowed;
    mask = has_mask ? p.allowed + mask_row * ((p.vocab + 31) / 32) : nullptr;
  }
  __device__ __forceinline__ bool allows(int id) const {
    return mask == nullptr || (static_cast<uint32_t>(mask[id / 32]) >> (id % 32) & 1u);
  }
};

// Writes the processed logits [begin, begin + size) of row b to `changed`. Ends with a block
// barrier.
__device__ __forceinline__ void change_chunk(const SampleScanParams& p, const RowChanges& changes,
                                             int64_t b, int begin, int size, float* changed,
                                             int* counts) {
  const float* row = p.logits + b * p.stride;
  for (int i = threadIdx.x; i < size; i += kScanThreads) {
    const int id = begin + i;
    const float x = row[id];
    changed[i] = changes.allows(id) || is_bad(x) ? x : minus_inf();  // a masked NaN is reported
    counts[i] = 0;
  }
  __syncthreads();
  for (int i = changes.bias_begin + threadIdx.x; i < changes.bias_end; i += kScanThreads) {
    const int id = p.logit_bias_ids[i], at = id - begin;
    if (id < 0 || at < 0 || at >= size || !changes.allows(id)) continue;
    changed[at] = __fadd_rn(changed[at], p.logit_bias_values[i]);
  }
  __syncthreads();
  if (changes.has_penalty) {
    penalize(changed, counts, p.history + b * p.max_history, changes.history_len, p.prompt_lens[b],
             begin, size, changes.repetition, changes.presence, changes.frequency);
    __syncthreads();
  }
}
