// Repetition, presence and frequency penalties on some neighbouring logits of a row.
#pragma once

#include "common/types.cuh"

constexpr int kInPrompt = 1 << 30;

// Counts occurrences of the ids [begin, begin + size) in the history, then lets one thread per
// distinct id change its logit. Logit and count of id are logits[id - begin] and counts[id -
// begin]; all counts are 0 before and after.
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
    const int seen = atomicExch(&counts[at], 0);  // SAFETY: one thread of those with this id wins.
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
