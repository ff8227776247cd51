// Down-projections of LoRA adapters, a matrix per adapter, for a batch that mixes adapters.
//
//   out[p, t] = a[s] x[t] over split p of k, for each token t of each adapter s
//
// Arguments: LoraShrinkParams, below.
//
// Numerics: sums in float, over k in order within a split. Every tile size adds in the same order,
// and no sum depends on other tokens.
// Parallelisation: a block computes kColumns columns of one split for a tile of one adapter's
// tokens (lora_tile.cuh). Chunks of kChunk values of k pass through a ring of cp.async stages.
// Splits let the whole GPU read the matrices of a few tokens.
// Mirror: engine/reference/lora_shrink.py
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "lora/lora_tile.cuh"

constexpr int kColumns = 64;
constexpr int kWords = 128 / 16;       // 16-byte words per row of a chunk
constexpr int kChunk = kWords * kVec;  // values of k per chunk
constexpr int kStages = 4;
constexpr int kGrain = 64;                      // splits begin at multiples of this many values
constexpr int kRowsAtOnce = kThreads / kWords;  // rows that the block copies at once

struct LoraShrinkParams {
  const scalar_t* x;             // (T, K), rows x_stride elements apart
  const scalar_t* a;             // (S, R, K), contiguous
  const int* order;              // (T,) tokens sorted by adapter
  const int* offsets;            // (S + 1,) first entry of order of each adapter, and the end
  float* out;                    // (P, T, R), contiguous
  int64_t x_stride;              // elements
  int num_tokens, num_adapters;  // T, S
  int columns, depth;            // R, K
  int num_splits;                // P
  int is_vector;                 // rows of x and a consist of whole, aligned 16-byte words
  int is_paired;                 // pairs of columns of out are aligned to 8 bytes
};

// kRows rows of one chunk, swizzled: word w of row r is in place w ^ (r % 8).
template <int kRows>
struct Tile {
  scalar_t values[kRows * kChunk];

  __device__ __forceinline__ static int offset(int row, int word) {
    return row * kChunk + (word ^ (row & 7)) * kVec;
  }
  // Starts copying word threadIdx.x % kWords of a row from `source`, where `valid` values are left
  // in the row; the rest of the word becomes 0.
  template <bool kIsVector>
  __device__ __forceinline__ void load(int row, const scalar_t* source, int valid) {
    scalar_t* const to = values + offset(row, threadIdx.x % kWords);
    if (kIsVector && valid > 0) {
      cp_async_16(to, source);
    } else {
      Vec<scalar_t, kVec> x;
#pragma unroll
      for (int j = 0; j < kVec; ++j) x.v[j] = j < valid ? source[j] : from_float<scalar_t>(0.0f);
      store_vec(to, x);
    }
  }
};

// Rows of x that do not exist, and rows of a beyond the last column, stay as they are: a row's
// values reach only its own results, which are not stored.
template <int kTokens>
struct Stage {
  Tile<kTokens> x;
  Tile<kColumns> a;
};

// A thread's share of the tile's kTokens x kColumns sums.
#if ENGINE_DTYPE == 0
template <int kTokens>
struct Sums {
  static constexpr int kOwn = kTokens * kColumns / kThreads;  // rows of this thread's column
  float sums[kOwn] = {};

  __device__ __forceinline__ static int column() { return threadIdx.x % kColumns; }
  __device__ __forceinline__ static int row(int i) { return threadIdx.x / kColumns * kOwn + i; }

  __device__ __forceinline__ void add(const Stage<kTokens>& stage, int columns, int) {
    if (column() >= columns) return;
#pragma unroll 1
    for (int word = 0; word < kWords; ++word) {
      const auto w = load_vec<float, 4>(stage.a.values + stage.a.offset(column(), word));
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const auto x = load_vec<float, 4>(stage.x.values + stage.x.offset(row(i), word));
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i] = fmaf(x.v[j], w.v[j], sums[i]);
      }
    }
  }
  // Calls use(row, column, value, value of column + 1, how many of the two this is).
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) use(row(i), column(), sums[i], 0.0f, 1);
  }
};
#else
// 16 tokens: the warps divide the columns. 64 tokens: each warp computes all columns of 16 tokens.
template <int kTokens>
struct Sums {
  static constexpr int kRowWarps = kTokens / 16;
  static constexpr int kWarpColumns = kColumns * kRowWarps / (kThreads / kWarpSize);
  float sums[kWarpColumns / 16][2][4] = {};  // m16 x n8 tiles

  __device__ __forceinline__ static int first_row() {
    return threadIdx.x / kWarpSize % kRowWarps * 16;
  }
  __device__ __forceinline__ static int first_column(int pair) {
    return threadIdx.x / kWarpSize / kRowWarps * kWarpColumns + pair * 16;
  }
  __device__ __forceinline__ void add(const Stage<kTokens>& stage, int columns, int rows) {
    if (first_row() >= rows || first_column(0) >= columns) return;
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      uint32_t a[4];
      ldmatrix_x4(a,
                  stage.x.values + stage.x.offset(first_row() + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kWarpColumns / 16; ++pair) {
        if (first_column(pair) >= columns) break;
        uint32_t b[4];  // columns 0 to 7 of k 0 to 7 and 8 to 15, then columns 8 to 15
        ldmatrix_x4(b,
                    stage.a.values + stage.a.offset(first_column(pair) + lane / 16 * 8 + lane % 8,
                                                    step * 2 + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t half[2] = {b[2 * n], b[2 * n + 1]};
          mma_m16n8k16<scalar_t>(sums[pair][n], a, half);
        }
      }
    }
  }
  template <typename Use>
  __device__ __forceinline__ void for_each(const Use& use) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int pair = 0; pair < kWarpColumns / 16; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          use(first_row() + lane / 4 + half * 8, first_column(pair) + n * 8 + lane % 4 * 2,
              sums[pair][n][half * 2], sums[pair][n][half * 2 + 1], 2);
  }
};
#endif

template <int kTokens, bool kIsVector>
__device__ __forceinline__ void lora_shrink(const LoraShrinkParams& p, unsigned char* smem_bytes) {
  auto* const stages = reinterpret_cast<Stage<kTokens>*>(smem_bytes);
  const LoraTile tile =
      find_tile<kTokens>(p.offsets, p.num_adapters, p.num_adapters, p.num_tokens, blockIdx.y);
  if (tile.count == 0) return pdl_wait();
  const int first_column = blockIdx.x * kColumns, columns = p.columns - first_column;
  const int split = blockIdx.z;
  const int64_t grains = (p.depth + kGrain - 1) / kGrain;
  const int begin = static_cast<int>(grains * split / p.num_splits) * kGrain;
  const int end = min(static_cast<int>(grains * (split + 1) / p.num_splits) * kGrain, p.depth);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int row = threadIdx.x / kWords, k = begin + threadIdx.x % kWords * kVec;

  const scalar_t* const a =
      p.a + (static_cast<int64_t>(tile.group) * p.columns + first_column + row) * p.depth + k;
  const scalar_t* x[kTokens / kRowsAtOnce];  // null: the tile has fewer rows
#pragma unroll
  for (int i = 0; i < kTokens / kRowsAtOnce; ++i) {
    const int token = tile_token(tile, p.order, p.num_tokens, i * kRowsAtOnce + row);
    x[i] = token < 0 ? nullptr : p.x + token * p.x_stride + k;
  }
  const auto load_a = [&](int chunk) {
    if (chunk >= chunks) return;
#pragma unroll
    for (int i = 0; i < kColumns / kRowsAtOnce; ++i)
      if (i * kRowsAtOnce + row < columns)
        stages[chunk % kStages].a.template load<kIsVector>(
            i * kRowsAtOnce + row,
            a + static_cast<int64_t>(i * kRowsAtOnce) * p.depth + chunk * kChunk,
            end - k - chunk * kChunk);
  };
  const auto load_x = [&](int chunk) {
    if (chunk < chunks) {
#pragma unroll
      for (int i = 0; i < kTokens / kRowsAtOnce; ++i)
        if (x[i] != nullptr)
          stages[chunk % kStages].x.template load<kIsVector>(
              i * kRowsAtOnce + row, x[i] + chunk * kChunk, end - k - chunk * kChunk);
    }
    cp_async_commit();
  };
  // No kernel writes the matrices: their first chunks are read while the preceding kernel ends.
  for (int chunk = 0; chunk < kStages - 1; ++chunk) load_a(chunk);
  pdl_wait();
  for (int chunk = 0; chunk < kStages - 1; ++chunk) load_x(chunk);
  Sums<kTokens> sums;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the chunk has arrived, and the previous one has been read
    load_a(chunk + kStages - 1);
    load_x(chunk + kStages - 1);
    sums.add(stages[chunk % kStages], columns, tile.count);
  }
  sums.for_each([&](int row, int column, float value, float next, int count) {
    const int token = tile_token(tile, p.order, p.num_tokens, row);
    if (token < 0 || column >= columns) return;
    float* const to = p.out + (static_cast<int64_t>(split) * p.num_tokens + token) * p.columns +
                      first_column + column;
    if (count == 2 && p.is_paired) {
      store_vec(to, Vec<float, 2>{value, next});
    } else {
      to[0] = value;
      if (count == 2 && column + 1 < columns) to[1] = next;
    }
  });
}

#define ENGINE_LORA_SHRINK(tokens)                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, 3)              \
      lora_shrink_##tokens(const __grid_constant__ LoraShrinkParams p) { \
    extern __shared__ __align__(128) unsigned char smem_bytes[];         \
    pdl_trigger();                                                       \
    if (p.is_vector)                                                     \
      lora_shrink<tokens, true>(p, smem_bytes);                          \
    else                                                                 \
      lora_shrink<tokens, false>(p, smem_bytes);                         \
  }

ENGINE_LORA_SHRINK(16)
ENGINE_LORA_SHRINK(64)
