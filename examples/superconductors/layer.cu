// The parts of a layer beside attention, with the weights in shared memory and rows in registers.
//
//   norm_product   out = rmsnorm(x) W^T
//   finish_layer   s = x + mixed O^T (x itself without `mixed`);  out = s + swiglu(rmsnorm(s) G^T) D^T
//
// A warp owns 16 rows. Lane 4 g + t holds of rows g and g + 8, in every block of 32 columns, the
// eight from 8 t on: 16 bytes of memory, so rows are loaded and stored in whole vectors. A product's
// terms may be added in any order, so these are also its operand fragments, four columns for each of
// two instructions, if the lane reads the same columns of W. Outputs keep the layout if the column n
// of a tile i is W's row 8 (n / 2) + 2 i + n % 2 of the block: no product needs a shuffle, and what
// lies between two of them never leaves the registers.
#include "common/activation.cuh"
#include "common/cp_async.cuh"
#include "common/mma.cuh"
#include "common/types.cuh"

using T = scalar_t;

constexpr int kHidden = HIDDEN;
constexpr int kBlocks = kHidden / 32;  // of a row's columns
constexpr int kRows = 16;              // of a warp
constexpr int kTiles = 4;              // of 8 columns in a block

// Operand fragments of 16 rows: per block, two instructions' worth.
template <int kCount>
struct Operand {
  uint32_t a[2 * kCount][4];
};

// Sums of 16 rows: [block][tile], in mma's order.
struct Sums {
  float d[kBlocks][kTiles][4];
};

struct Lane {
  int g = threadIdx.x % 32 / 4;
  int t = threadIdx.x % 4;
};

// Starts the copy of a matrix of kColumns columns to shared memory. Odd rows have the halves of 128
// bytes exchanged, so that eight lanes which read two rows touch all banks.
template <int kColumns>
__device__ void copy_weight(T* smem, const T* weight, int rows) {
  constexpr int kChunks = kColumns / 8;
  for (int i = threadIdx.x; i < rows * kChunks; i += blockDim.x) {
    const int row = i / kChunks, chunk = i % kChunks;
    cp_async_16(smem + 8 * (row * kChunks + (chunk ^ (row % 2 * 4))), weight + 8 * i);
  }
}

// A matrix W in shared memory, as a lane reads it.
template <int kColumns>
struct Weight {
  const uint4* smem;
  int halves[2];  // where blocks with an even and an odd number begin, in 16 bytes

  __device__ Weight(const void* smem, Lane lane) : smem(static_cast<const uint4*>(smem)) {
    const int first = (8 * (lane.g / 2) + lane.g % 2) * (kColumns / 8) + lane.t;
    halves[0] = first + 4 * (lane.g % 2);
    halves[1] = first - 4 * (lane.g % 2);
  }

  // Operands of two instructions: the lane's eight values, in `block` of W's columns, of its column
  // of the tile `tile` in the block `rows` of W's rows. `even` blocks, an even number, are added.
  __device__ __forceinline__ uint4 at(int rows, int tile, int block, int even = 0) const {
    return smem[halves[block % 2] + (32 * rows + 2 * tile) * (kColumns / 8) + 4 * (block + even)];
  }
};

// d += (two instructions of `operand`, of its `block`) W^T.
template <int kCount>
__device__ __forceinline__ void multiply(float (&d)[4], const Operand<kCount>& operand, int block,
                                         uint4 w) {
  const uint32_t first[2] = {w.x, w.y}, second[2] = {w.z, w.w};
  mma_m16n8k16<T>(d, operand.a[2 * block], first);
  mma_m16n8k16<T>(d, operand.a[2 * block + 1], second);
}

// Sets the operand's fragments of a block from the 16 bytes of rows g and g + 8.
template <int kCount>
__device__ __forceinline__ void set_block(Operand<kCount>& operand, int block, uint4 low,
                                          uint4 high) {
  const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) operand.a[2 * block + k][i] = a[k][i];
}

// The lane's first value of row g (or g + 8) of the warp's rows; rows past the last repeat it.
__device__ __forceinline__ const T* row_of(const T* x, int64_t first, int half, int64_t rows,
                                           Lane lane) {
  const int64_t row = min(first + lane.g + 8 * half, rows - 1);
  return x + row * kHidden + 8 * lane.t;
}

__device__ __forceinline__ void load_operand(Operand<kBlocks>& operand, const T* x, int64_t first,
                                             int64_t rows, Lane lane) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    set_block(operand, b, *reinterpret_cast<const uint4*>(row_of(x, first, 0, rows, lane) + 32 * b),
              *reinterpret_cast<const uint4*>(row_of(x, first, 1, rows, lane) + 32 * b));
}

__device__ __forceinline__ void load_sums(Sums& sums, const T* x, int64_t first, int64_t rows,
                                          Lane lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const auto v = load_vec<T, 8>(row_of(x, first, half, rows, lane) + 32 * b);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums.d[b][i / 2][2 * half + i % 2] = to_float(v.v[i]);
    }
}

// Stores a block of 32 columns of the rows that exist; `out` is at the block's first column.
__device__ __forceinline__ void store_block(T* out, const float (&d)[kTiles][4], int64_t first,
                                            int64_t rows, int64_t width, Lane lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane.g + 8 * half;
    if (row >= rows) continue;
    uint4 v;
    v.x = pack2<T>(d[0][2 * half], d[0][2 * half + 1]);
    v.y = pack2<T>(d[1][2 * half], d[1][2 * half + 1]);
    v.z = pack2<T>(d[2][2 * half], d[2][2 * half + 1]);
    v.w = pack2<T>(d[3][2 * half], d[3][2 * half + 1]);
    *reinterpret_cast<uint4*>(out + row * width + 8 * lane.t) = v;
  }
}

// The rows divided by their root mean square, times the norm's weight, as operands.
__device__ __forceinline__ void normalise(Operand<kBlocks>& operand, const Sums& sums,
                                          const T* norm, float eps, Lane lane) {
  float scale[2] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) scale[j / 2] += sums.d[b][i][j] * sums.d[b][i][j];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale[half] += __shfl_xor_sync(0xffffffffu, scale[half], 1);
    scale[half] += __shfl_xor_sync(0xffffffffu, scale[half], 2);
    scale[half] = rsqrtf(scale[half] * (1.0f / kHidden) + eps);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const auto w = load_vec<T, 8>(norm + 32 * b + 8 * lane.t);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float even = to_float(w.v[2 * i]), odd = to_float(w.v[2 * i + 1]);
      const float(&d)[4] = sums.d[b][i];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        operand.a[2 * b + i / 2][i % 2 * 2 + half] = pack2<T>(
            d[2 * half] * scale[half] * even, d[2 * half + 1] * scale[half] * odd);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    norm_product(const scalar_t* x, const scalar_t* norm, const scalar_t* weight, scalar_t* out, int64_t rows, int N,
                 float eps) {
  extern __shared__ __align__(16) unsigned char smem[];
  T* const shared = reinterpret_cast<T*>(smem);
  const Lane lane;
  const Weight<kHidden> w(shared, lane);
  copy_weight<kHidden>(shared, weight, N);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32) * kRows;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32) * kRows;
  for (; first < rows; first += stride) {
    Operand<kBlocks> normed;
    {
      Sums sums;
      load_sums(sums, x, first, rows, lane);
      normalise(normed, sums, norm, eps, lane);
    }
    for (int n = 0; n < N / 32; ++n) {
      float d[kTiles][4] = {};
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) multiply(d[i], normed, b, w.at(n, i, b));
      store_block(out + 32 * n, d, first, rows, N, lane);
    }
  }
}

#ifdef INNER
// sums += swiglu(operand G^T) D^T for 32 of the inner columns: block f + odd, where f is even.
template <int kInner>
__device__ __forceinline__ void feed_forward(Sums& sums, const Operand<kBlocks>& operand,
                                             const Weight<kHidden>& w, const Weight<kInner>& d,
                                             int f, int odd) {
  float gate[kTiles][4] = {}, up[kTiles][4] = {};
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      multiply(gate[i], operand, b, w.at(f + odd, i, b));
      multiply(up[i], operand, b, w.at(kInner / 32 + f + odd, i, b));
    }
  Operand<1> inner;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const g = gate[i] + 2 * half;
      const float* const u = up[i] + 2 * half;
      inner.a[i / 2][i % 2 * 2 + half] = pack2<T>(silu(g[0]) * u[0], silu(g[1]) * u[1]);
    }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n)
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      multiply(sums.d[n][i], inner, 0, d.at(n, i, odd, f));
}

extern "C" __global__ void __launch_bounds__(256, 1)
    finish_layer(const scalar_t* x, const scalar_t* norm, const scalar_t* gate_up, const scalar_t* down,
                 const scalar_t* mixed, const scalar_t* mixed_weight, scalar_t* out, int64_t rows, float eps) {
  constexpr int kInner = INNER;
  extern __shared__ __align__(16) unsigned char smem[];
  // Rows of `down`, then of gate, up and the product of `mixed`.
  T* const shared_down = reinterpret_cast<T*>(smem);
  T* const shared_rows = shared_down + kHidden * kInner;
  constexpr int kMixed = 2 * kInner / 32;  // first block of the rows for `mixed`
  const Lane lane;
  const Weight<kInner> d(shared_down, lane);
  const Weight<kHidden> w(shared_rows, lane);
  copy_weight<kInner>(shared_down, down, kHidden);
  copy_weight<kHidden>(shared_rows, gate_up, 2 * kInner);
  const bool has_mixed = mixed != nullptr && mixed_weight != nullptr;
  if (has_mixed) copy_weight<kHidden>(shared_rows + 2 * kInner * kHidden, mixed_weight, kHidden);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32) * kRows;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32) * kRows;
  for (; first < rows; first += stride) {
    Sums sums;
    Operand<kBlocks> operand;
    load_sums(sums, x, first, rows, lane);
    if (has_mixed) {
      load_operand(operand, mixed, first, rows, lane);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
            multiply(sums.d[n][i], operand, b, w.at(kMixed + n, i, b));
    }
    normalise(operand, sums, norm, eps, lane);
#pragma unroll 1
    for (int f = 0; f < kInner / 32; f += 2) {
      feed_forward<kInner>(sums, operand, w, d, f, 0);
      feed_forward<kInner>(sums, operand, w, d, f, 1);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
      store_block(out + 32 * n, sums.d[n], first, rows, kHidden, lane);
  }
}
#endif
