// One product per head: multi-head latent attention multiplies each head of the queries, and of the
// results, by a matrix of the head's own.
//
//   out[t, h] = weight[h] x[t, h]        x (T, H, K), weight (H, N, K), out (T, H, N)
//
// The matrices may be stored transposed, (H, K, N): one stored up-projection then serves the
// queries, transposed, and the results.
// Arguments: HeadGemmParams, below.
//
// Numerics: sums in float, over k in order; rounded once.
// Parallelisation: a CTA computes kColumns columns of one head for kTokens tokens; its warps divide
// the columns. Chunks of kChunk values of k pass through a ring of cp.async stages. With few tokens
// the weight is read once, at memory's rate, by many small CTAs.
// Mirror: engine/reference/head_gemm.py
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr int kThreads = 128;
constexpr int kColumns = 64;
constexpr int kWords = 128 / 16;       // 16-byte words per row of a chunk
constexpr int kChunk = kWords * kVec;  // values of k per chunk
constexpr int kStages = 3;

struct HeadGemmParams {
  const scalar_t* x;       // (T, H, K)
  const scalar_t* weight;  // (H, N, K), or (H, K, N) in the transposed kernels; rows contiguous
  scalar_t* out;           // (T, H, N)
  int64_t x_stride_t, x_stride_h, out_stride_t, out_stride_h;  // elements
  int64_t weight_stride_h, weight_stride_row;                  // elements
  int num_tokens;                                              // T
  int columns, depth;                                          // N, K
  int is_vector;  // rows of x and weight consist of whole, aligned 16-byte words
};

// kRows rows of kRowWords 16-byte words, swizzled: word w of row r is in place w ^ (r % 8).
template <int kRows, int kRowWords>
struct Tile {
  scalar_t values[kRows * kRowWords * kVec];

  __device__ __forceinline__ static int offset(int row, int word) {
    return (row * kRowWords + (word ^ (row & 7))) * kVec;
  }
  __device__ __forceinline__ float at(int row, int column) const {
    return to_float(values[offset(row, column / kVec) + column % kVec]);
  }
  // Starts copying a tile of `from`, of which `rows` rows and `columns` columns exist; the rest
  // is 0.
  template <bool kIsVector>
  __device__ __forceinline__ void load(const scalar_t* from, int64_t stride, int rows,
                                       int columns) {
#pragma unroll
    for (int i = 0; i < kRows * kRowWords / kThreads; ++i) {
      const int row = (i * kThreads + threadIdx.x) / kRowWords, word = threadIdx.x % kRowWords;
      const int column = word * kVec;
      scalar_t* const to = values + offset(row, word);
      const scalar_t* const source = from + row * stride + column;
      if constexpr (kIsVector) {
        const bool valid = row < rows && column < columns;
        cp_async_16(to, valid ? source : from, valid);
      } else {
        Vec<scalar_t, kVec> x;
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          x.v[j] = row < rows && column + j < columns ? source[j] : from_float<scalar_t>(0.0f);
        store_vec(to, x);
      }
    }
  }
};

// A stage: a chunk of k of the rows of x and of the columns' weights.
template <int kTokens, bool kTransposed>
struct Stage {
  using Weight = Tile<kTransposed ? kChunk : kColumns, kTransposed ? kColumns / kVec : kWords>;
  Tile<kTokens, kWords> x;
  Weight weight;
};

// Sums of kTokens x kColumns results: each warp has kColumns / kWarps columns.
#if ENGINE_DTYPE == 0
template <int kTokens, bool kTransposed>
struct Sums {
  static constexpr int kOwn = kTokens * kColumns / kThreads;
  float sums[kOwn] = {};

  __device__ __forceinline__ void add(const Stage<kTokens, kTransposed>& stage) {
    const int column = threadIdx.x % kColumns;
#pragma unroll 4
    for (int k = 0; k < kChunk; ++k) {
      const float w = kTransposed ? stage.weight.at(k, column) : stage.weight.at(column, k);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int row = i * (kThreads / kColumns) + threadIdx.x / kColumns;
        sums[i] = fmaf(stage.x.at(row, k), w, sums[i]);
      }
    }
  }
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      use(i * (kThreads / kColumns) + threadIdx.x / kColumns, threadIdx.x % kColumns, sums[i]);
  }
};
#else
template <int kTokens, bool kTransposed>
struct Sums {
  static_assert(kColumns == kThreads / kWarpSize * 16, "two n8 tiles per warp");
  float sums[kTokens / 16][2][4] = {};  // m16 x n8 tiles

  __device__ __forceinline__ void add(const Stage<kTokens, kTransposed>& stage) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const auto& weight = stage.weight;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      uint32_t b[4];  // columns 0 to 7 of k 0 to 7 and 8 to 15, then columns 8 to 15
      if constexpr (kTransposed)
        ldmatrix_x4_trans(
            b, weight.values + weight.offset(step * 16 + lane % 16, warp * 2 + lane / 16));
      else
        ldmatrix_x4(b, weight.values + weight.offset(warp * 16 + lane / 16 * 8 + lane % 8,
                                                     step * 2 + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < kTokens / 16; ++m) {
        uint32_t a[4];
        ldmatrix_x4(a, stage.x.values + stage.x.offset(m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t half[2] = {b[2 * n], b[2 * n + 1]};
          mma_m16n8k16<scalar_t>(sums[m][n], a, half);
        }
      }
    }
  }
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int m = 0; m < kTokens / 16; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          use(m * 16 + lane / 4 + i / 2 * 8, warp * 16 + n * 8 + lane % 4 * 2 + i % 2,
              sums[m][n][i]);
  }
};
#endif

template <int kTokens, bool kTransposed, bool kIsVector>
__device__ __forceinline__ void head_gemm(const HeadGemmParams& p, unsigned char* smem_bytes) {
  auto* const stages = reinterpret_cast<Stage<kTokens, kTransposed>*>(smem_bytes);
  const int first_column = blockIdx.x * kColumns, head = blockIdx.y;
  const int first_token = blockIdx.z * kTokens, columns = p.columns - first_column;
  const scalar_t* const weight = p.weight + head * p.weight_stride_h;
  const scalar_t* const x = p.x + first_token * p.x_stride_t + head * p.x_stride_h;
  const int chunks = (p.depth + kChunk - 1) / kChunk;
  const auto load_weight = [&](int chunk) {
    if (chunk >= chunks) return;
    const int k = chunk * kChunk;
    const int row = kTransposed ? k : first_column, column = kTransposed ? first_column : k;
    stages[chunk % kStages].weight.template load<kIsVector>(
        weight + row * p.weight_stride_row + column, p.weight_stride_row,
        kTransposed ? p.depth - k : columns, kTransposed ? columns : p.depth - k);
  };
  const auto load_x = [&](int chunk) {
    if (chunk < chunks)
      stages[chunk % kStages].x.template load<kIsVector>(
          x + chunk * kChunk, p.x_stride_t, p.num_tokens - first_token, p.depth - chunk * kChunk);
    cp_async_commit();
  };
  // No kernel writes the weight: its first chunks are read while the preceding kernel ends.
  for (int chunk = 0; chunk < kStages - 1; ++chunk) load_weight(chunk);
  pdl_wait();
  for (int chunk = 0; chunk < kStages - 1; ++chunk) load_x(chunk);
  Sums<kTokens, kTransposed> sums;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the chunk has arrived, and the previous one has been read
    load_weight(chunk + kStages - 1);
    load_x(chunk + kStages - 1);
    sums.add(stages[chunk % kStages]);
  }
  sums.for_each([&](int row, int column, float value) {
    const int token = first_token + row, n = first_column + column;
    if (token < p.num_tokens && n < p.columns)
      p.out[token * p.out_stride_t + head * p.out_stride_h + n] = from_float<scalar_t>(value);
  });
}

#define ENGINE_HEAD_GEMM(name, tokens, transposed)               \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)      \
      name(const __grid_constant__ HeadGemmParams p) {           \
    extern __shared__ __align__(128) unsigned char smem_bytes[]; \
    pdl_trigger();                                               \
    if (p.is_vector)                                             \
      head_gemm<tokens, transposed, true>(p, smem_bytes);        \
    else                                                         \
      head_gemm<tokens, transposed, false>(p, smem_bytes);       \
  }

ENGINE_HEAD_GEMM(head_gemm_16, 16, false)
ENGINE_HEAD_GEMM(head_gemm_64, 64, false)
ENGINE_HEAD_GEMM(head_gemm_16_transposed, 16, true)
ENGINE_HEAD_GEMM(head_gemm_64_transposed, 64, true)
