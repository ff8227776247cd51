// Repetition, presence and frequency penalties on one row of logits.
#pragma once

#include "common/types.cuh"

// Counts occurrences of the ids of a row, then lets one thread per distinct id change its logit.
__device__ void penalize(float* row, int* counts, const int* history, int len, int prompt_len,
                         int vocab, float repetition, float presence, float frequency) {
  constexpr int kInPrompt = 1 << 30;
  for (int i = threadIdx.x; i < len; i += blockDim.x) {
    if (history[i] >= 0 && history[i] < vocab) counts[history[i]] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < len; i += blockDim.x) {
    const int id = history[i];
    if (id < 0 || id >= vocab) continue;
    if (i < prompt_len) atomicOr(&counts[id], kInPrompt);
    else atomicAdd(&counts[id], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < len; i += blockDim.x) {
    const int id = history[i];
    if (id < 0 || id >= vocab) continue;
    const int seen = atomicExch(&counts[id], 0);  // SAFETY: one thread of those with this id wins.
    if (seen == 0) continue;
    float x = row[id];
    x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    const int times = seen & ~kInPrompt;
    if (times > 0) {
      x = __fsub_rn(x, __fmul_rn(frequency, __int2float_rn(times)));
      x = __fsub_rn(x, presence);
    }
    row[id] = x;
  }
}
