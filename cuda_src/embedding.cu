// Embedding lookup, scaled.
//
//   out[t] = weight[token_ids[t]] * scale
//
//   token_ids (T,)   int32      id outside [0, V): NaN row in out; kPaddingId: zero row
//   weight    (V, N) scalar_t   contiguous
//   out       (T, N) scalar_t   contiguous; is_large: larger than L2, so stored evict-first
//
// Numerics: multiplied in float, rounded once (scale 1 is exact).
// Parallelisation: one thread per kWidth features of up to kRows rows, all loaded before the first
// store; blockIdx.x walks a row, blockIdx.y the rows.
// Mirror: engine/reference/embedding.py
#include "common/packed.cuh"
#include "common/padding.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kRows = 4;

template <int kWidth>
__device__ __forceinline__ void embedding(const int* __restrict__ token_ids,
                                          const scalar_t* __restrict__ weight,
                                          scalar_t* __restrict__ out, int64_t num_tokens,
                                          int64_t vocab_size, int n, float scale, bool is_large) {
  const int64_t feature = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (feature >= n) return;
  for (int64_t first = blockIdx.y; first < num_tokens;
       first += kRows * static_cast<int64_t>(gridDim.y)) {
    const auto token = [&](int i) { return first + i * static_cast<int64_t>(gridDim.y); };
    int64_t ids[kRows];
    Packed<kWidth> rows[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      ids[i] = token(i) < num_tokens ? token_ids[token(i)] : kPaddingId;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = Packed<kWidth>{};
      if (ids[i] >= 0 && ids[i] < vocab_size) {
        rows[i] = load_packed<kWidth>(weight + ids[i] * n + feature);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (token(i) >= num_tokens) break;
      const bool is_known = (ids[i] >= 0 && ids[i] < vocab_size) || ids[i] == kPaddingId;
      Vec<scalar_t, kWidth> row = unpack<kWidth>(rows[i]);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float x = is_known ? to_float(row.v[j]) * scale : quiet_nan();
        row.v[j] = from_float<scalar_t>(x);
      }
      store_vec(out + token(i) * n + feature, row, is_large);
    }
  }
}

#define ENGINE_EMBEDDING(name, width)                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads)                                    \
      name(const int* token_ids, const scalar_t* weight, scalar_t* out, int64_t num_tokens, \
           int64_t vocab_size, int n, float scale, int is_large) {                          \
    pdl_wait();                                                                             \
    pdl_trigger(); /* after the wait: layers/attention.py relies on this order */           \
    embedding<width>(token_ids, weight, out, num_tokens, vocab_size, n, scale, is_large);   \
  }

ENGINE_EMBEDDING(embedding_vector, kVec)
ENGINE_EMBEDDING(embedding_scalar, 1)
