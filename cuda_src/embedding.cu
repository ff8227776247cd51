// Rows of the embedding table, scaled.
//
//   out[t] = weight[token_ids[t]] * scale
//
//   token_ids (T,)   int32      outside [0, V): the row of out is NaN
//   weight    (V, N) scalar_t   contiguous
//   out       (T, N) scalar_t   contiguous
//
// Numerics: the product in float, rounded once (scale 1 is exact).
// Parallelisation: one thread per kWidth features; blockIdx.x walks a row, blockIdx.y the rows.
// Mirror: engine/reference/embedding.py
#include "common/types.cuh"

constexpr int kThreads = 128;

template <int kWidth>
__device__ __forceinline__ void embedding(const int* __restrict__ token_ids,
                                          const scalar_t* __restrict__ weight,
                                          scalar_t* __restrict__ out, int64_t num_tokens,
                                          int64_t vocab_size, int n, float scale) {
  const int64_t feature = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (feature >= n) return;
  for (int64_t t = blockIdx.y; t < num_tokens; t += gridDim.y) {
    const int64_t id = token_ids[t];
    Vec<scalar_t, kWidth> row;
    if (id >= 0 && id < vocab_size) {
      row = load_vec<scalar_t, kWidth>(weight + id * n + feature);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) row.v[j] = from_float<scalar_t>(to_float(row.v[j]) * scale);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) row.v[j] = from_float<scalar_t>(__int_as_float(0x7fffffff));
    }
    store_vec(out + t * n + feature, row);
  }
}

#define ENGINE_EMBEDDING(name, width)                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                                       \
      name(const int* token_ids, const scalar_t* weight, scalar_t* out, int64_t num_tokens,    \
           int64_t vocab_size, int n, float scale) {                                           \
    embedding<width>(token_ids, weight, out, num_tokens, vocab_size, n, scale);                \
  }

ENGINE_EMBEDDING(embedding_vector, kVec)
ENGINE_EMBEDDING(embedding_scalar, 1)
