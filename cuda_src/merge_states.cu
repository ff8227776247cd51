// Merge of attention over parts of the keys, by the log-sum-exp of each part.
//
//   m = max over s of lse[s]        w[s] = exp(lse[s] - m)        w = sum of w[s]
//   out = sum of w[s] * outputs[s] / w                            lse = m + log(w)
//
//   outputs (S, T, H, D) scalar_t   state 0 at `outputs`, state s at rest + (s - 1) * rest_stride
//   lses    (S, T, H)    float      the same; -inf: the state is empty, its outputs are not used
//   out     (T, H, D)    scalar_t   may be one of the states' outputs; is_large: L2 should not keep
//                                   it
//   lse_out (T, H)       float      -inf, and 0 in out, where every state is empty
//
// States are contiguous. Numerics: float, added in the order of s, rounded once.
// Parallelisation: one thread per kWidth features of a row (t, h); a block takes as many rows as
// have room. Four states are asked for before the first is used, or two states of two rows where there
// are two and many rows. A thread writes only where it read, after reading: in place is safe.
// Mirror: engine/reference/merge_states.py
#include "common/packed.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;

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

// What is in flight of a row: the log-sum-exps and kWidth features of kStates states.
template <int kWidth, int kStates>
struct Loaded {
  float lse[kStates];
  Packed<kWidth> x[kStates];

  __device__ __forceinline__ void load(const States& states, int first, int64_t row, int64_t at) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      lse[i] = minus_inf();
      x[i] = Packed<kWidth>{};
      if (first + i >= states.count) continue;
      lse[i] = states.lse(first + i, row);
      x[i] = load_packed<kWidth>(states.output(first + i) + at);
    }
  }
};

__device__ __forceinline__ float larger(float a, float b) {  // a NaN stays
  return a > b || a != a ? a : b;
}

// Merges kWidth features from `at`, the first kStates states of which are loaded; returns the row's
// log-sum-exp.
template <int kWidth, int kStates>
__device__ __forceinline__ float merge_features(const States& states, int64_t row, int64_t at,
                                                Loaded<kWidth, kStates>& loaded, scalar_t* out,
                                                bool is_large) {
  float largest = minus_inf(), total = 0.0f, sum[kWidth] = {};
#pragma unroll
  for (int i = 0; i < kStates; ++i) largest = larger(loaded.lse[i], largest);
#pragma unroll 1
  for (int s = kStates; s < states.count; ++s) largest = larger(states.lse(s, row), largest);
#pragma unroll 1
  for (int first = 0; first < states.count; first += kStates) {
    if (first > 0) loaded.load(states, first, row, at);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      if (loaded.lse[i] == minus_inf()) continue;  // what an empty state holds may be NaN
      const float weight = expf(loaded.lse[i] - largest);
      const Vec<scalar_t, kWidth> own = unpack<kWidth>(loaded.x[i]);
      total += weight;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += weight * to_float(own.v[j]);
    }
  }
  const float scale = total == 0.0f ? 0.0f : 1.0f / total;
  Vec<scalar_t, kWidth> y;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) y.v[j] = from_float<scalar_t>(sum[j] * scale);
  store_vec(out + at, y, is_large);
  return total == 0.0f ? minus_inf() : largest + logf(total);
}

// kRows rows a thread, rows_per_block apart.
template <int kWidth, int kStates, int kRows>
__device__ __forceinline__ void merge_states(const States& states, scalar_t* out, float* lse_out,
                                             int64_t num_rows, int head_dim, int rows_per_block,
                                             bool is_large) {
  const int items = head_dim / kWidth;
  const int threads_per_row = min(items, kThreads);
  const int place = static_cast<int>(threadIdx.x) / threads_per_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows * rows_per_block + place;
  if (place >= rows_per_block) return;
  const int first = static_cast<int>(threadIdx.x) % threads_per_row;
#pragma unroll 1
  for (int item = first; item < items; item += threads_per_row) {
    Loaded<kWidth, kStates> loaded[kRows];
    const auto row_of = [&](int i) { return row + i * rows_per_block; };
    const auto at = [&](int i) { return row_of(i) * head_dim + item * kWidth; };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row_of(i) < num_rows) loaded[i].load(states, 0, row_of(i), at(i));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row_of(i) >= num_rows) break;
      const float lse = merge_features(states, row_of(i), at(i), loaded[i], out, is_large);
      if (item == 0) lse_out[row_of(i)] = lse;
    }
  }
}

#define ENGINE_MERGE_STATES(name, width, states_at_once, rows)                                     \
  extern "C" __global__ void __launch_bounds__(kThreads) name(                                     \
      const scalar_t* outputs, const scalar_t* rest, const float* lses, const float* rest_lses,    \
      int64_t rest_stride, int64_t rest_lse_stride, int num_states, scalar_t* out, float* lse_out, \
      int64_t num_rows, int head_dim, int rows_per_block, int is_large) {                          \
    merge_states<width, states_at_once, rows>(                                                     \
        States{outputs, rest, lses, rest_lses, rest_stride, rest_lse_stride, num_states}, out,     \
        lse_out, num_rows, head_dim, rows_per_block, is_large != 0);                               \
  }

ENGINE_MERGE_STATES(merge_states_vector, kVec, 4, 1)
ENGINE_MERGE_STATES(merge_states_pairs, kVec, 2, 2)
ENGINE_MERGE_STATES(merge_states_scalar, 1, 4, 1)
