// Sizes of mla_decode, the list of a sequence's partials, and the addresses of its rows.
//
// A row is a pair (token, head) of one sequence: row = token * H + head. All rows of a sequence
// read the same keys, so a row tile may mix tokens and heads.
#pragma once

#include "common/attention.cuh"

constexpr int kLatent = LATENT;          // L: values of a key that are also its value
constexpr int kRope = ROPE;              // R: rotated values of a key
constexpr int kWidth = kLatent + kRope;  // values of a key

// Where a sequence's partials are in scratch memory. Written by the CTA of split 0, as an int4.
struct SplitList {
  int count;        // number of splits; fewer than 2: the result is already written
  int first;        // partial of split 0
  int later, step;  // split i > 0 has partial later + i * step

  __device__ __forceinline__ static SplitList of(const int4& x) {
    return SplitList{x.x, x.y, x.z, x.w};
  }
  __device__ __forceinline__ int4 packed() const { return make_int4(count, first, later, step); }
  __device__ __forceinline__ int partial(int split) const {
    return split == 0 ? first : later + split * step;
  }
};

// A sequence's rows of the result, or of a partial in scratch memory.
struct RowOutput {
  scalar_t* out;
  float* lse;  // (rows,), or null
  int64_t token_stride, head_stride;
  int num_heads;

  __device__ __forceinline__ scalar_t* at(int row) const {
    return out + row / num_heads * token_stride + row % num_heads * head_stride;
  }
  __device__ __forceinline__ void write_lse(int row, float base, float sum) const {
    if (lse != nullptr) lse[row] = sum == 0.0f ? -kInf : (base + log2f(sum)) * kLn2;
  }
};
__device__ __forceinline__ float inverse_sum(float sum) {
  return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
}
