// Merge of attention over parts of the keys, by the log-sum-exp of each part.
//
//   m = max over s of lse[s]        w[s] = exp(lse[s] - m)        w = sum of w[s]
//   out = sum of w[s] * outputs[s] / w                            lse = m + log(w)
//
//   outputs (S, T, H, D) scalar_t   state 0 at `outputs`, state s at rest + (s - 1) * rest_stride
//   lses    (S, T, H)    float      the same; -inf: the state is empty, its outputs are not used
//   out     (T, H, D)    scalar_t   may be one of the states' outputs
//   lse_out (T, H)       float      -inf, and 0 in out, where every state is empty
//
// States are contiguous. Numerics: float, added in the order of s, rounded once.
// Parallelisation: one thread per kWidth features of a row (t, h); a block takes as many rows as
// have room. Two states are asked for before the first is used. A thread writes only where it read,
// after reading: in place is safe.
// Mirror: engine/reference/merge_states.py
#include "common/packed.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kStates = 2;  // in flight at once

__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

struct States {
  const scalar_t *outputs, *rest;
  const float *lses, *rest_lses;
  int64_t rest_stride, rest_lse_stride;
  int count;

  __device__ __forceinline__ float lse(int s, int64_t row) const {
    return s == 0 ? lses[row] : rest_lses[(s - 1) * rest_lse_stride + row];
  }
  __device__ __forceinline__ const scalar_t* output(int s) const {
    return s == 0 ? outputs : rest + (s - 1) * rest_stride;
  }
};

struct Weights {
  float largest, total;
};

__device__ __forceinline__ Weights weights_of(const States& states, int64_t row) {
  Weights all{minus_inf(), 0.0f};
#pragma unroll 1
  for (int s = 0; s < states.count; ++s) {
    const float lse = states.lse(s, row);
    all.largest = lse > all.largest || lse != lse ? lse : all.largest;  // a NaN stays
  }
  if (all.largest == minus_inf()) return all;
#pragma unroll 1
  for (int s = 0; s < states.count; ++s) all.total += expf(states.lse(s, row) - all.largest);
  return all;
}

template <int kWidth>
__device__ __forceinline__ void load_states(const States& states, int first, int64_t at,
                                            Packed<kWidth> (&x)[kStates]) {
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    x[i] = Packed<kWidth>{};
    if (first + i < states.count) x[i] = load_packed<kWidth>(states.output(first + i) + at);
  }
}

// Merges kWidth features from `at`; returns the row's weights.
template <int kWidth>
__device__ __forceinline__ Weights merge_features(const States& states, int64_t row, int64_t at,
                                                  scalar_t* out) {
  Packed<kWidth> x[kStates];
  load_states<kWidth>(states, 0, at, x);  // asked for before the log-sum-exps are waited for
  const Weights all = weights_of(states, row);
  float sum[kWidth] = {};
#pragma unroll 1
  for (int first = 0; first < states.count; first += kStates) {
    if (first > 0) load_states<kWidth>(states, first, at, x);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const float lse = first + i < states.count ? states.lse(first + i, row) : minus_inf();
      if (lse == minus_inf()) continue;  // what an empty state holds may be NaN
      const float weight = expf(lse - all.largest);
      const Vec<scalar_t, kWidth> own = unpack<kWidth>(x[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += weight * to_float(own.v[j]);
    }
  }
  const float scale = all.total == 0.0f ? 0.0f : 1.0f / all.total;
  Vec<scalar_t, kWidth> y;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) y.v[j] = from_float<scalar_t>(sum[j] * scale);
  store_vec(out + at, y);
  return all;
}

template <int kWidth>
__device__ __forceinline__ void merge_states(const States& states, scalar_t* out, float* lse_out,
                                             int64_t num_rows, int head_dim, int rows_per_block) {
  const int items = head_dim / kWidth;
  const int threads_per_row = min(items, kThreads);
  const int place = static_cast<int>(threadIdx.x) / threads_per_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + place;
  if (place >= rows_per_block || row >= num_rows) return;
  const int first = static_cast<int>(threadIdx.x) % threads_per_row;
#pragma unroll 1
  for (int item = first; item < items; item += threads_per_row) {
    const Weights all =
        merge_features<kWidth>(states, row, row * head_dim + item * kWidth, out);
    if (item == 0) lse_out[row] = all.total == 0.0f ? minus_inf() : all.largest + logf(all.total);
  }
}

#define ENGINE_MERGE_STATES(name, width)                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                           \
      name(const scalar_t* outputs, const scalar_t* rest, const float* lses,                       \
           const float* rest_lses, int64_t rest_stride, int64_t rest_lse_stride, int num_states,   \
           scalar_t* out, float* lse_out, int64_t num_rows, int head_dim, int rows_per_block) {    \
    merge_states<width>(States{outputs, rest, lses, rest_lses, rest_stride, rest_lse_stride,       \
                               num_states},                                                        \
                        out, lse_out, num_rows, head_dim, rows_per_block);                         \
  }

ENGINE_MERGE_STATES(merge_states_vector, kVec)
ENGINE_MERGE_STATES(merge_states_scalar, 1)
