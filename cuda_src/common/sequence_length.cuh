// Clamped sequence length, shared by the decode attention kernels.
#pragma once

#include "common/types.cuh"

// SAFETY: a length that exceeds the block table is clamped to it.
__device__ __forceinline__ int sequence_length(const int* context_lens, int b, int64_t max_keys) {
  return static_cast<int>(min(static_cast<int64_t>(max(context_lens[b], 0)), max_keys));
}
