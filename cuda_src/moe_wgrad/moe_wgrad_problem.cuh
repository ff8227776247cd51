// Rows of an expert, and the addresses of an operand's rows, in both kernels of moe_wgrad.
#pragma once

#include "common/types.cuh"

// The sorted pairs [first, first + count) of one expert.
struct ExpertRows {
  int first, count;

  __device__ __forceinline__ ExpertRows(const int* offsets, int expert, int num_pairs) {
    first = min(max(offsets[expert], 0), num_pairs);
    count = min(max(offsets[expert + 1], first), num_pairs) - first;
  }
};

// An operand with `width` columns: the rows of the pairs sorted by expert or, with `order`, the
// rows of their tokens.
struct PairRows {
  const scalar_t* matrix;
  const int* order;  // null: the rows themselves are sorted
  int width, num_pairs, top_k;

  // Row of sorted pair `place`; an invalid pair has the row of pair 0.
  __device__ __forceinline__ int row(int place) const {
    if (order == nullptr) return place;
    const int pair = order[place];
    return (pair < 0 || pair >= num_pairs ? 0 : pair) / top_k;
  }
  __device__ __forceinline__ const scalar_t* at(int place) const {
    return matrix + static_cast<int64_t>(row(place)) * width;
  }
};
