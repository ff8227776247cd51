// Gradient of an embedding table: the rows of dout, summed by token id.
//
//   out[v] = scale * sum_t dout[t]  over the t with token_ids[t] == v;  out[padding_id] = 0
//
//   dout       (T, N) scalar_t   contiguous
//   sorted_ids (T,)   int32      token ids in ascending order; those outside [0, V) are skipped
//   order      (T,)   int64      row of dout of each sorted id, ascending within an id
//   out        (V, N) scalar_t   contiguous; is_large: larger than L2, so stored evict-first
//
// Numerics: summed in float in a fixed order (the result is reproducible), rounded once.
// Parallelisation: a block owns kIds ids. A warp sums the rows of an id. Ids with more than
// kMaxAlone rows (text has very frequent tokens) follow: each warp sums an eighth of the rows, and
// the first warp adds the eight sums.
// Mirror: engine/reference/embedding_backward.py
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kIds = 32;
constexpr int kMaxAlone = 32;

// Returns the number of sorted ids below `id`: each round, the threads of the block probe evenly
// spaced places of the range that is left.
__device__ __forceinline__ int64_t lower_bound(const int* __restrict__ sorted_ids, int64_t count,
                                               int64_t id) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t step = (count + kThreads - 1) / kThreads;
    const int64_t place = (threadIdx.x + 1) * step - 1;  // last place of this thread's share
    const int num_below = __syncthreads_count(place < count && sorted_ids[low + place] < id);
    low += num_below * step;
    count = min(count - num_below * step, step - 1);
  }
  return low;
}

// Adds the rows order[first:last] of dout, at this thread's columns, to acc.
template <int kWidth>
__device__ __forceinline__ void add_rows(const scalar_t* __restrict__ dout,
                                         const int64_t* __restrict__ order, int64_t first,
                                         int64_t last, int64_t n, float (&acc)[kWidth]) {
  constexpr int kRows = kWidth == 1 ? 2 : 4;  // loads in flight
  for (; first < last; first += kRows) {
    int64_t tokens[kRows];
    Packed<kWidth> rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) tokens[i] = order[min(first + i, last - 1)];
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = load_packed<kWidth>(dout + tokens[i] * n);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first + i >= last) break;
      const Vec<scalar_t, kWidth> row = unpack<kWidth>(rows[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) acc[j] += to_float(row.v[j]);
    }
  }
}

template <int kWidth>
__device__ __forceinline__ void store(scalar_t* out, const float (&acc)[kWidth], float scale,
                                      bool is_large) {
  Vec<scalar_t, kWidth> row;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) row.v[j] = from_float<scalar_t>(acc[j] * scale);
  store_vec(out, row, is_large);
}

template <int kWidth>
__device__ __forceinline__ void embedding_backward(const scalar_t* __restrict__ dout,
                                                   const int* __restrict__ sorted_ids,
                                                   const int64_t* __restrict__ order,
                                                   scalar_t* __restrict__ out, int64_t num_tokens,
                                                   int64_t vocab_size, int64_t padding_id,
                                                   int64_t n, float scale, bool is_large) {
  __shared__ int64_t starts[kIds];
  __shared__ int64_t ends[kIds];
  __shared__ float sums[kWarps][32 * kWidth];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int64_t first_id = static_cast<int64_t>(blockIdx.x) * kIds;
  if (threadIdx.x < kIds) starts[threadIdx.x] = ends[threadIdx.x] = 0;
  const int64_t begin = lower_bound(sorted_ids, num_tokens, first_id);
  __syncthreads();
  for (int64_t i = begin + threadIdx.x; i < num_tokens; i += kThreads) {
    const int64_t id = sorted_ids[i] - first_id;
    if (id >= kIds) break;
    if (i == begin || sorted_ids[i - 1] != sorted_ids[i]) starts[id] = i;
    if (i == num_tokens - 1 || sorted_ids[i + 1] != sorted_ids[i]) ends[id] = i + 1;
  }
  __syncthreads();
  const auto count = [&](int i) { return first_id + i == padding_id ? 0 : ends[i] - starts[i]; };
  for (int i = warp; i < kIds && first_id + i < vocab_size; i += kWarps) {
    if (count(i) > kMaxAlone) continue;
#pragma unroll 1
    for (int64_t column = lane * kWidth; column < n; column += 32 * kWidth) {
      float acc[kWidth] = {};
      add_rows<kWidth>(dout + column, order, starts[i], starts[i] + count(i), n, acc);
      store<kWidth>(out + (first_id + i) * n + column, acc, scale, is_large);
    }
  }
  for (int i = 0; i < kIds && first_id + i < vocab_size; ++i) {
    if (count(i) <= kMaxAlone) continue;
    const int64_t share = (count(i) + kWarps - 1) / kWarps;
    const int64_t first = starts[i] + warp * share;
    const int64_t last = min(first + share, ends[i]);
#pragma unroll 1
    for (int64_t begin_column = 0; begin_column < n; begin_column += 32 * kWidth) {
      const int64_t column = begin_column + lane * kWidth;
      float acc[kWidth] = {};
      if (column < n) add_rows<kWidth>(dout + column, order, first, last, n, acc);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[warp][j * 32 + lane] = acc[j];
      __syncthreads();
      if (warp == 0 && column < n) {
        for (int other = 1; other < kWarps; ++other) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) acc[j] += sums[other][j * 32 + lane];
        }
        store<kWidth>(out + (first_id + i) * n + column, acc, scale, is_large);
      }
      __syncthreads();
    }
  }
}

#define ENGINE_EMBEDDING_BACKWARD(name, width)                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                           \
      name(const scalar_t* dout, const int* sorted_ids, const int64_t* order, scalar_t* out,       \
           int64_t num_tokens, int64_t vocab_size, int64_t padding_id, int64_t n, float scale,     \
           int is_large) {                                                                         \
    pdl_trigger();                                                                                 \
    pdl_wait();                                                                                    \
    embedding_backward<width>(dout, sorted_ids, order, out, num_tokens, vocab_size, padding_id, n, \
                              scale, is_large);                                                    \
  }

ENGINE_EMBEDDING_BACKWARD(embedding_backward_vector, kVec)
ENGINE_EMBEDDING_BACKWARD(embedding_backward_scalar, 1)
