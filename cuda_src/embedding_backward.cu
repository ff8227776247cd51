// Gradient of an embedding table: the rows of dout, summed by token id.
//
//   out[v] = scale * sum_t dout[t]  over the t with token_ids[t] == v;  out[padding_id] = 0
//
//   dout       (T, N) scalar_t   contiguous
//   sorted_ids (T,)   int32      token ids in ascending order; those outside [0, V) are skipped
//   order      (T,)   int64      row of dout of each sorted id, ascending within an id
//   parts      (ceil(T / kRows), 2, N) float   scratch
//   out        (V, N) scalar_t   contiguous; is_large: larger than L2, so stored evict-first
//
// Numerics: summed in float in a fixed order (the result is reproducible), rounded once.
// Parallelisation: _clear writes zeros. In _sum a block owns kRows sorted ids, so a frequent id
// (text has very frequent ones) is as much work as many rare ones. It stores the sums of the ids
// that it sees whole; of an id that began before it, or goes on behind it, it stores a part. In
// _join the block where such an id begins adds the parts.
// Mirror: engine/reference/embedding_backward.py
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;  // most per block
constexpr int kRows = 64;
constexpr int kLoads = 8;   // rows in flight
constexpr int kStores = 4;  // vectors that a thread of _clear stores

struct EmbeddingBackwardParams {
  const scalar_t* dout;
  const int* sorted_ids;
  const int64_t* order;
  float* parts;
  scalar_t* out;
  int64_t num_tokens;
  int64_t vocab_size;
  int64_t padding_id;
  int64_t n;
  float scale;
  int is_large;
};

// Returns the id at a place of the sorted ids, or -1 for one to skip and outside of them.
__device__ __forceinline__ int id_at(const EmbeddingBackwardParams& p, int64_t place) {
  if (place < 0 || place >= p.num_tokens) return -1;
  const int id = p.sorted_ids[place];
  return id < 0 || id >= p.vocab_size || id == p.padding_id ? -1 : id;
}

template <int kWidth>
__device__ __forceinline__ void store_row(const EmbeddingBackwardParams& p, int id, int64_t column,
                                          const float (&acc)[kWidth]) {
  Vec<scalar_t, kWidth> row;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) row.v[j] = from_float<scalar_t>(acc[j] * p.scale);
  store_vec(p.out + id * p.n + column, row, p.is_large);
}

template <int kWidth>
__device__ __forceinline__ void clear(const EmbeddingBackwardParams& p) {
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kStores * kThreads + threadIdx.x) * kWidth;
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    const int64_t at = first + i * kThreads * kWidth;
    if (at < p.vocab_size * p.n) store_vec(p.out + at, Vec<scalar_t, kWidth>{}, p.is_large);
  }
}

template <int kWidth>
__device__ __forceinline__ void sum(const EmbeddingBackwardParams& p) {
  __shared__ int ids[kRows + 2];  // of the place before the block, its own, and of the one behind
  __shared__ int64_t rows[kRows];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;
  const int count = min(static_cast<int64_t>(kRows), p.num_tokens - first);
  for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
    ids[i] = id_at(p, first + i - 1);
    // SAFETY: rows are clamped to those of dout, so that a wrong `order` reads nothing else.
    if (i < count) rows[i] = min(max(p.order[first + i], 0ll), p.num_tokens - 1) * p.n;
  }
  __syncthreads();
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kWidth;
  if (column >= p.n) return;
  float acc[kWidth] = {};
#pragma unroll 1
  for (int i = 0; i < count; i += kLoads) {
    Packed<kWidth> loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      loaded[j] = load_packed<kWidth>(p.dout + rows[min(i + j, count - 1)] + column);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (i + j >= count) break;
      const Vec<scalar_t, kWidth> row = unpack<kWidth>(loaded[j]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) acc[k] += to_float(row.v[k]);
      const int id = ids[i + j + 1];
      if (id == ids[i + j + 2] && i + j + 1 < count) continue;
      if (id >= 0 && id != ids[0] && id != ids[count + 1]) {
        store_row<kWidth>(p, id, column, acc);
      } else if (id >= 0) {
        float* part = p.parts + (2 * static_cast<int64_t>(blockIdx.x) + (id != ids[0])) * p.n;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) part[column + k] = acc[k];
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) acc[k] = 0.0f;
    }
  }
}

// Adds the parts of the id that begins in this block and goes on behind it, if there is one.
template <int kWidth>
__device__ __forceinline__ void join(const EmbeddingBackwardParams& p) {
  const int64_t block = blockIdx.x;
  const int64_t behind = (block + 1) * kRows;
  const int id = id_at(p, behind - 1);
  if (id < 0 || id != id_at(p, behind) || id == id_at(p, block * kRows - 1)) return;
  int64_t end = block + 1;  // the first block that does not begin with the id
  for (int64_t high = (p.num_tokens + kRows - 1) / kRows; end < high;) {
    const int64_t middle = (end + high) / 2;
    if (p.sorted_ids[middle * kRows] == id) {
      end = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kWidth;
  if (column >= p.n) return;
  const auto part = [&](int64_t slot) {
    return load_vec<float, kWidth>(p.parts + slot * p.n + column);
  };
  Vec<float, kWidth> total = part(2 * block + 1);
#pragma unroll 4
  for (int64_t other = block + 1; other < end; ++other) {
    const Vec<float, kWidth> next = part(2 * other);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) total.v[k] += next.v[k];
  }
  store_row<kWidth>(p, id, column, total.v);
}

#define ENGINE_EMBEDDING_BACKWARD(step, suffix, width)                        \
  extern "C" __global__ void __launch_bounds__(kThreads)                      \
      embedding_backward_##step##_##suffix(const EmbeddingBackwardParams p) { \
    pdl_trigger();                                                            \
    pdl_wait();                                                               \
    step<width>(p);                                                           \
  }

ENGINE_EMBEDDING_BACKWARD(clear, vector, kVec)
ENGINE_EMBEDDING_BACKWARD(clear, scalar, 1)
ENGINE_EMBEDDING_BACKWARD(sum, vector, kVec)
ENGINE_EMBEDDING_BACKWARD(sum, scalar, 1)
ENGINE_EMBEDDING_BACKWARD(join, vector, kVec)
ENGINE_EMBEDDING_BACKWARD(join, scalar, 1)
