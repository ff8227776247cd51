// Up-projections of LoRA adapters, a matrix per adapter, for a batch that mixes adapters.
//
//   out[t] = b[s] h[t] + bias[s], or out[t] + that, for each token t of each adapter s
//
// The columns are those of up to 8 fused products (q, k and v); each reads its own part of h.
// Arguments: LoraExpandParams, below.
//
// Numerics: the partial sums of h are added in order; for 16-bit dtypes the total is rounded to
// scalar_t, for the tensor cores. Sums of the bias and the products in float, plus the former value
// of out; rounded once.
// Parallelisation: a block computes kColumns columns of one part for a tile of one adapter's tokens
// (lora_tile.cuh). h is summed into shared memory; b goes from memory to registers, up to a rank of
// 32 before pdl_wait. Values of k and columns are permuted among the lanes, so that a lane reads 4
// consecutive k of b and writes 8 consecutive columns of out.
// Mirror: engine/reference/lora_expand.py
#include "common/mma.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "lora/lora_tile.cuh"

constexpr int kColumns = 256;
constexpr int kMaxParts = 8;
constexpr int kQuad = 4;          // values of rank per access
constexpr int kSplitsAtOnce = 8;  // partial sums of h in flight per thread

struct LoraExpandParams {
  const float* h;                // (P, T, h_columns), contiguous
  const scalar_t* b;             // (S, N, rank), contiguous
  const scalar_t* bias;          // (S, N), contiguous; null: none
  const int* order;              // (T,) tokens sorted by adapter
  const int* offsets;            // (S + 1,) first entry of order of each adapter, and the end
  scalar_t* out;                 // (T, N)
  int64_t out_stride;            // elements
  int num_splits;                // P
  int num_tokens, num_adapters;  // T, S
  int columns, rank, h_columns;  // N, r, parts * r
  int is_vector;                 // rank % 4 == 0; h, b and rows of out are aligned to 16 bytes
  int accumulate;                // add to out, and leave rows of tokens without an adapter
  // Ends of the parts' columns; those of parts that do not exist are N.
  int bound0, bound1, bound2, bound3, bound4, bound5, bound6, bound7;
};

// The columns that a block computes: at most kColumns from `first` on, before `end` of their part.
struct ColumnBlock {
  int part, first, end;
};

__device__ __forceinline__ ColumnBlock find_columns(const LoraExpandParams& p, int block) {
  const int bounds[kMaxParts] = {p.bound0, p.bound1, p.bound2, p.bound3,
                                 p.bound4, p.bound5, p.bound6, p.bound7};
  ColumnBlock found = {0, 0, 0};
  int begin = 0;
#pragma unroll
  for (int part = 0; part < kMaxParts; ++part) {
    const int blocks = (bounds[part] - begin + kColumns - 1) / kColumns;
    if (block >= 0 && block < blocks) found = {part, begin + block * kColumns, bounds[part]};
    block -= blocks;
    begin = bounds[part];
  }
  return found;
}

// h of a tile in shared memory, in scalar_t: 16-bit rows are padded so that four rows of 32 bytes
// meet all banks.
#if ENGINE_DTYPE == 0
constexpr int kStep = kQuad;  // ranks are rounded up to this, with zeros
__device__ __forceinline__ int row_stride(int rank) { return (rank + kStep - 1) / kStep * kStep; }
__device__ __forceinline__ void store_quad(scalar_t* to, const float (&x)[kQuad]) {
  store_vec(to, Vec<float, kQuad>{x[0], x[1], x[2], x[3]});
}
#else
constexpr int kStep = 16;
__device__ __forceinline__ int row_stride(int rank) {
  return ((rank + kStep - 1) / kStep | 1) * kStep;
}
__device__ __forceinline__ void store_quad(scalar_t* to, const float (&x)[kQuad]) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack2<scalar_t>(x[0], x[1]), pack2<scalar_t>(x[2], x[3]));
}
#endif

// Sums h of `count` rows, of the tokens `smem_tokens`, over the splits into `smem_h`. Rows up to a
// multiple of 16, rows without a token and values beyond the rank are zeros.
template <bool kIsVector>
__device__ __forceinline__ void sum_h(const LoraExpandParams& p, int count, int part,
                                      const int* smem_tokens, scalar_t* smem_h) {
  const int quads = (p.rank + kStep - 1) / kStep * (kStep / kQuad);
  const int64_t split_stride = static_cast<int64_t>(p.num_tokens) * p.h_columns;
  for (int item = threadIdx.x; item < (count + 15) / 16 * 16 * quads; item += kThreads) {
    const int row = item / quads, k = item % quads * kQuad;
    const int token = smem_tokens[row];
    float sums[kQuad] = {};
    if (token >= 0 && k < p.rank) {
      const float* const from = p.h + static_cast<int64_t>(token) * p.h_columns + part * p.rank + k;
      if constexpr (kIsVector) {
        for (int first = 0; first < p.num_splits; first += kSplitsAtOnce) {
          Vec<float, kQuad> x[kSplitsAtOnce];
#pragma unroll
          for (int i = 0; i < kSplitsAtOnce; ++i)
            if (first + i < p.num_splits)
              x[i] = load_vec<float, kQuad>(from + (first + i) * split_stride);
#pragma unroll
          for (int i = 0; i < kSplitsAtOnce; ++i)
            if (first + i < p.num_splits)
#pragma unroll
              for (int j = 0; j < kQuad; ++j) sums[j] += x[i].v[j];
        }
      } else {
        for (int split = 0; split < p.num_splits; ++split)
#pragma unroll
          for (int j = 0; j < kQuad; ++j)
            if (k + j < p.rank) sums[j] += from[split * split_stride + j];
      }
    }
    store_quad(smem_h + row * row_stride(p.rank) + k, sums);
  }
}

// Values k to k + 3 of a row of b, as type T; 0 beyond the rank.
template <typename T, bool kIsVector>
__device__ __forceinline__ T load_quad(const scalar_t* row, int k, int rank) {
  static_assert(sizeof(T) == kQuad * sizeof(scalar_t), "four values");
  if constexpr (kIsVector) {
    return k < rank ? *reinterpret_cast<const T*>(row + k) : T{};
  } else {
    Vec<scalar_t, kQuad> x;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) x.v[j] = k + j < rank ? row[k + j] : from_float<scalar_t>(0.0f);
    return *reinterpret_cast<const T*>(&x);
  }
}

// Copies an adapter's bias of the block's columns to `smem_bias`; zeros if there is none.
__device__ __forceinline__ void load_bias(const LoraExpandParams& p, int adapter,
                                          const ColumnBlock& block, scalar_t* smem_bias) {
  const int64_t row = static_cast<int64_t>(adapter) * p.columns;
#pragma unroll
  for (int i = threadIdx.x; i < kColumns; i += kThreads) {
    const int column = block.first + i;
    smem_bias[i] =
        p.bias != nullptr && column < block.end ? p.bias[row + column] : from_float<scalar_t>(0.0f);
  }
}

// Zeros, for tokens without an adapter.
__device__ __forceinline__ void write_zeros(const LoraExpandParams& p, const LoraTile& tile,
                                            const ColumnBlock& block, bool is_aligned) {
  constexpr int kWords = kColumns / kVec;
  Vec<scalar_t, kVec> zeros;
#pragma unroll
  for (int i = 0; i < kVec; ++i) zeros.v[i] = from_float<scalar_t>(0.0f);
  for (int item = threadIdx.x; item < tile.count * kWords; item += kThreads) {
    const int token = tile_token(tile, p.order, p.num_tokens, item / kWords);
    if (token < 0) continue;
    const int column = block.first + item % kWords * kVec;
    scalar_t* const to = p.out + token * p.out_stride + column;
    if (is_aligned && column + kVec <= block.end) {
      store_vec(to, zeros);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (column + i < block.end) to[i] = zeros.v[i];
    }
  }
}

#if ENGINE_DTYPE == 0
// A thread computes columns threadIdx.x and threadIdx.x + kThreads of the block for 16 tokens at a
// time. `b` is the row of the block's first column.
template <bool kIsVector>
struct Product {
  __device__ __forceinline__ void load_b(const scalar_t*, int, int) {}
  __device__ __forceinline__ void load_out(const LoraExpandParams&, int, const ColumnBlock&, bool,
                                           const int*, scalar_t*) {}

  __device__ __forceinline__ void compute(const LoraExpandParams& p, int count, const scalar_t* b,
                                          const scalar_t* smem_bias, const ColumnBlock& block, bool,
                                          const int* smem_tokens, const scalar_t* smem_h,
                                          const scalar_t*) {
    const int stride = row_stride(p.rank), columns = min(kColumns, block.end - block.first);
#pragma unroll 1
    for (int row = 0; row < count; row += 16) {
#pragma unroll 1
      for (int column = threadIdx.x; column < columns; column += kThreads) {
        float sums[16] = {};
#pragma unroll 1
        for (int k = 0; k < p.rank; k += kQuad) {
          const auto w = load_quad<Vec<float, kQuad>, kIsVector>(b + column * p.rank, k, p.rank);
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const auto x = load_vec<float, kQuad>(smem_h + (row + i) * stride + k);
#pragma unroll
            for (int j = 0; j < kQuad; ++j) sums[i] = fmaf(x.v[j], w.v[j], sums[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int token = smem_tokens[row + i];
          if (token < 0) continue;
          const float sum = sums[i] + smem_bias[column];
          float* const to = p.out + token * p.out_stride + block.first + column;
          *to = p.accumulate ? *to + sum : sum;
        }
      }
    }
  }
};
#else
// A warp computes 64 columns for 16 tokens at a time: two groups of 32, each four n8 tiles. The
// order of k and of columns within mma's tiles is ours, as long as both operands agree: k 2t, 2t+1,
// 2t+8 and 2t+9 of a step are values 4t to 4t+3 of h and b; column 2t+e of tile n is column 8t+2n+e
// of the group. `b` is the row of the block's first column.
template <bool kIsVector>
struct Product {
  static constexpr int kSteps = kIsVector ? 2 : 1;  // steps of k16 in registers
  static constexpr int kGroups = 2;
  uint2 frag_b[kSteps][kGroups][4];

  // The group's first column, counted from the block's.
  __device__ __forceinline__ static int group_column(int group) {
    return threadIdx.x / kWarpSize * 64 + group * 32;
  }
  // Loads kSteps steps of a group's b, of which `columns` columns exist, from `first_step` on.
  __device__ __forceinline__ void load_steps(const scalar_t* b, int columns, int rank, int group,
                                             int first_step) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int k = (first_step + step) * 16;
      if (k >= rank) break;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = group_column(group) + g / 2 * 8 + 2 * n + g % 2;
        frag_b[step][group][n] =
            load_quad<uint2, kIsVector>(b + column * rank, k + 4 * t, column < columns ? rank : 0);
      }
    }
  }
  // Loads b's first steps of all groups: all of b, up to a rank of kSteps * 16.
  __device__ __forceinline__ void load_b(const scalar_t* b, int columns, int rank) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) load_steps(b, columns, rank, group, 0);
  }
  // Starts copying out, which the product is added to, into `smem_out`: each thread those whole
  // words that it will write.
  __device__ __forceinline__ void load_out(const LoraExpandParams& p, int count,
                                           const ColumnBlock& block, bool is_aligned,
                                           const int* smem_tokens, scalar_t* smem_out) {
    if (!p.accumulate || !is_aligned) return;
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (int row = 0; row < count; row += 16)
#pragma unroll
      for (int word = 0; word < 2 * kGroups; ++word) {
        const int token = smem_tokens[row + g + word / kGroups * 8];
        const int column = block.first + group_column(word % kGroups) + 8 * t;
        if (token >= 0 && column + 8 <= block.end)
          cp_async_16(smem_out + word_offset(row, word), p.out + token * p.out_stride + column);
      }
    cp_async_commit();
  }
  // Place in `smem_out` of a thread's word of 16 rows: words half * kGroups + group.
  __device__ __forceinline__ static int word_offset(int row, int word) {
    return ((row / 16 * 2 * kGroups + word) * kThreads + threadIdx.x) * 8;
  }
  // Writes sums of 8 columns from `column` on, those before `end`; adds them if p.accumulate, to
  // the values in `smem_word` if they are a whole word.
  __device__ __forceinline__ void write_sums(const LoraExpandParams& p, int token, int column,
                                             int end, bool is_aligned, const float (&sums)[8],
                                             const scalar_t* smem_word) {
    scalar_t* const to = p.out + token * p.out_stride + column;
    if (is_aligned && column + 8 <= end) {
      Vec<scalar_t, 8> x;
      if (p.accumulate) x = load_vec<scalar_t, 8>(smem_word);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x.v[i] = from_float<scalar_t>(p.accumulate ? to_float(x.v[i]) + sums[i] : sums[i]);
      store_vec(to, x);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < end)
          to[i] = from_float<scalar_t>(p.accumulate ? to_float(to[i]) + sums[i] : sums[i]);
    }
  }
  // Multiplies 16 rows of h, of which `smem_row` is the first, by a group's b.
  __device__ __forceinline__ void multiply(const scalar_t* smem_row, const scalar_t* b, int columns,
                                           int rank, int group, float (&sums)[4][4]) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4, stride = row_stride(rank);
#pragma unroll 1
    for (int first_step = 0; first_step * 16 < rank; first_step += kSteps) {
      if (rank > kSteps * 16) load_steps(b, columns, rank, group, first_step);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int k = (first_step + step) * 16;
        if (k >= rank) break;
        const scalar_t* const from = smem_row + g * stride + k + 4 * t;
        const uint2 low = *reinterpret_cast<const uint2*>(from);
        const uint2 high = *reinterpret_cast<const uint2*>(from + 8 * stride);
        const uint32_t a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint2 quad = frag_b[step][group][n];
          const uint32_t half[2] = {quad.x, quad.y};
          mma_m16n8k16<scalar_t>(sums[n], a, half);
        }
      }
    }
  }
  __device__ __forceinline__ void compute(const LoraExpandParams& p, int count, const scalar_t* b,
                                          const scalar_t* smem_bias, const ColumnBlock& block,
                                          bool is_aligned, const int* smem_tokens,
                                          const scalar_t* smem_h, const scalar_t* smem_out) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    const int columns = block.end - block.first;
    cp_async_wait<0>();  // no barrier: a thread reads only what it copied
#pragma unroll 1
    for (int row = 0; row < count; row += 16) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group_column(group) >= columns) break;
        float sums[4][4];
        const auto bias = load_vec<scalar_t, 8>(smem_bias + group_column(group) + 8 * t);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sums[i / 2][i % 2] = sums[i / 2][2 + i % 2] = to_float(bias.v[i]);
        multiply(smem_h + row * row_stride(p.rank), b, columns, p.rank, group, sums);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = smem_tokens[row + g + 8 * half];
          if (token < 0) continue;
          float values[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) values[i] = sums[i / 2][2 * half + i % 2];
          write_sums(p, token, block.first + group_column(group) + 8 * t, block.end, is_aligned,
                     values, smem_out + word_offset(row, half * kGroups + group));
        }
      }
    }
  }
};
#endif

template <int kTokens, bool kIsVector>
__device__ __forceinline__ void lora_expand(const LoraExpandParams& p, unsigned char* smem_bytes) {
  auto* const smem_tokens = reinterpret_cast<int*>(smem_bytes);
  auto* const smem_bias = reinterpret_cast<scalar_t*>(smem_tokens + kTokens);
  scalar_t* const smem_h = smem_bias + kColumns;
  scalar_t* const smem_out = smem_h + kTokens * row_stride(p.rank);
  const int num_groups = p.num_adapters + (p.accumulate ? 0 : 1);
  const LoraTile tile =
      find_tile<kTokens>(p.offsets, num_groups, p.num_adapters, p.num_tokens, blockIdx.y);
  if (tile.count == 0) return pdl_wait();
  const ColumnBlock block = find_columns(p, blockIdx.x);
  const bool is_aligned = kIsVector && block.first % kVec == 0;
  if (tile.group == p.num_adapters) {
    pdl_wait();
    return write_zeros(p, tile, block, is_aligned);
  }
  const scalar_t* const b =
      p.b + (static_cast<int64_t>(tile.group) * p.columns + block.first) * p.rank;
  // No kernel writes the matrices: they are read while the preceding kernel ends.
  Product<kIsVector> product;
  product.load_b(b, block.end - block.first, p.rank);
  load_bias(p, tile.group, block, smem_bias);
  if (threadIdx.x < kTokens)
    smem_tokens[threadIdx.x] = tile_token(tile, p.order, p.num_tokens, threadIdx.x);
  __syncthreads();
  pdl_wait();
  product.load_out(p, tile.count, block, is_aligned, smem_tokens, smem_out);
  sum_h<kIsVector>(p, tile.count, block.part, smem_tokens, smem_h);
  __syncthreads();
  product.compute(p, tile.count, b, smem_bias, block, is_aligned, smem_tokens, smem_h, smem_out);
}

#define ENGINE_LORA_EXPAND(tokens)                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, 4)              \
      lora_expand_##tokens(const __grid_constant__ LoraExpandParams p) { \
    extern __shared__ __align__(16) unsigned char smem_bytes[];          \
    pdl_trigger();                                                       \
    if (p.is_vector)                                                     \
      lora_expand<tokens, true>(p, smem_bytes);                          \
    else                                                                 \
      lora_expand<tokens, false>(p, smem_bytes);                         \
  }

ENGINE_LORA_EXPAND(16)
ENGINE_LORA_EXPAND(64)
