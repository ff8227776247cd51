// Merges attention over parts of the keys, weighting each part by its log-sum-exp.
//
//   m = max over s of lse[s]        w[s] = exp(lse[s] - m)        w = sum of w[s]
//   out = sum of w[s] * outputs[s] / w                            lse = m + log(w)
//
// A state with lse -inf is empty: its outputs are not used. If every state is empty, out is 0 and
// lse is -inf. Arguments: MergeStatesParams, below.
//
// Numerics: float, summed in the order of s, rounded once.
// Parallelisation: one thread per kWidth features of a row (t, h); a block takes as many rows as
// its threads cover. A thread issues the loads of four states before it uses the first; with two
// states and many rows, those of two rows. It writes only what it has read, so the op may run in
// place.
// Mirror: engine/reference/merge_states.py
#include "common/packed.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;

__device__ __forceinline__ float minus_inf() { return __int_as_float(0xff800000); }

// S states of T * H rows, each state contiguous: state 0 at `outputs` and `lses`, state s > 0 at
// `rest` and `rest_lses`, (s - 1) strides further on.
struct MergeStatesParams {
  const scalar_t* outputs;               // (T, H, D)
  const scalar_t* rest;                  // (S - 1, T, H, D)
  const float* lses;                     // (T, H)
  const float* rest_lses;                // (S - 1, T, H)
  int64_t rest_stride, rest_lse_stride;  // elements from one state to the next
  scalar_t* out;                         // (T, H, D); may be one of the states' outputs
  float* lse_out;                        // (T, H)
  int64_t num_rows;                      // T * H
  int num_states;                        // S
  int head_dim;                          // D
  int rows_per_block;
  int is_large;  // 1: out is larger than L2, so stored evict-first

  __device__ __forceinline__ float lse(int s, int64_t row) const {
    return s == 0 ? lses[row] : rest_lses[(s - 1) * rest_lse_stride + row];
  }
  __device__ __forceinline__ const scalar_t* output(int s) const {
    return s == 0 ? outputs : rest + (s - 1) * rest_stride;
  }
};

// The log-sum-exps and kWidth features of kStates states of a row.
template <int kWidth, int kStates>
struct Loaded {
  float lse[kStates];
  Packed<kWidth> x[kStates];

  __device__ __forceinline__ void load(const MergeStatesParams& p, int first, int64_t row,
                                       int64_t at) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      lse[i] = minus_inf();
      x[i] = Packed<kWidth>{};
      if (first + i >= p.num_states) continue;
      lse[i] = p.lse(first + i, row);
      x[i] = load_packed<kWidth>(p.output(first + i) + at);
    }
  }
};

__device__ __forceinline__ float larger(float a, float b) {  // propagates NaN
  return a > b || a != a ? a : b;
}

// Merges the kWidth features at offset `at`, with the first kStates states in `loaded`, and returns
// the row's log-sum-exp.
template <int kWidth, int kStates>
__device__ __forceinline__ float merge_features(const MergeStatesParams& p, int64_t row, int64_t at,
                                                Loaded<kWidth, kStates>& loaded) {
  float largest = minus_inf(), total = 0.0f, sum[kWidth] = {};
#pragma unroll
  for (int i = 0; i < kStates; ++i) largest = larger(loaded.lse[i], largest);
#pragma unroll 1
  for (int s = kStates; s < p.num_states; ++s) largest = larger(p.lse(s, row), largest);
#pragma unroll 1
  for (int first = 0; first < p.num_states; first += kStates) {
    if (first > 0) loaded.load(p, first, row, at);
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      if (loaded.lse[i] == minus_inf()) continue;  // the output of an empty state may be NaN
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
  store_vec(p.out + at, y, p.is_large != 0);
  return total == 0.0f ? minus_inf() : largest + logf(total);
}

// Each thread merges kRows rows, rows_per_block apart.
template <int kWidth, int kStates, int kRows>
__device__ __forceinline__ void merge_states(const MergeStatesParams& p) {
  const int items = p.head_dim / kWidth;
  const int threads_per_row = min(items, kThreads);
  const int place = static_cast<int>(threadIdx.x) / threads_per_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows * p.rows_per_block + place;
  if (place >= p.rows_per_block) return;
  const int first = static_cast<int>(threadIdx.x) % threads_per_row;
#pragma unroll 1
  for (int item = first; item < items; item += threads_per_row) {
    Loaded<kWidth, kStates> loaded[kRows];
    const auto row_of = [&](int i) { return row + i * p.rows_per_block; };
    const auto at = [&](int i) { return row_of(i) * p.head_dim + item * kWidth; };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row_of(i) < p.num_rows) loaded[i].load(p, 0, row_of(i), at(i));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row_of(i) >= p.num_rows) break;
      const float lse = merge_features(p, row_of(i), at(i), loaded[i]);
      if (item == 0) p.lse_out[row_of(i)] = lse;
    }
  }
}

#define ENGINE_MERGE_STATES(name, width, num_states_at_once, num_rows_at_once) \
  extern "C" __global__ void __launch_bounds__(kThreads)                       \
      name(const __grid_constant__ MergeStatesParams p) {                      \
    merge_states<width, num_states_at_once, num_rows_at_once>(p);              \
  }

ENGINE_MERGE_STATES(merge_states_vector, kVec, 4, 1)
ENGINE_MERGE_STATES(merge_states_pairs, kVec, 2, 2)
ENGINE_MERGE_STATES(merge_states_scalar, 1, 4, 1)
