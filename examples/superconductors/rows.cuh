// Rows in registers, and matrices in shared memory whose products with them stay in registers.
//
// A warp owns 16 rows, cut into blocks of 32 columns. In each block lane 4 g + t holds columns 8 t to
// 8 t + 7 of rows g and g + 8: 16 bytes of memory, so rows are loaded and stored as whole vectors.
// wgmma expects other columns there, but a product's terms may be added in any order. copy_matrix
// permutes a matrix accordingly: its columns to the order of the operands, its rows to that of the
// results (result_of). A result then has the layout of an operand and stays in the registers until
// the next product.
#pragma once

#include "common/mbarrier.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "common/wgmma_weights.cuh"

constexpr int kHidden = HIDDEN;
constexpr int kBlocks = kHidden / 32;  // blocks of 32 columns in a row
constexpr int kGroupRows = 64;         // rows per warpgroup
constexpr int kChunk = 64;             // columns of a matrix in a row of 128 bytes

// Operands of 16 rows: two instructions per block.
template <int kCount>
struct Operand {
  uint32_t a[2 * kCount][4];
};

struct Lane {
  int g = threadIdx.x % 32 / 4;
  int t = threadIdx.x % 4;
};

// Copies a matrix of `rows` x kColumns to shared memory as tiles of `height` rows and 64 columns,
// one after another. Row r becomes row place(r) of each tile.
template <int kColumns, typename Place>
__device__ __forceinline__ void copy_matrix(unsigned char* smem, const scalar_t* matrix, int rows,
                                            int height, Place place) {
  constexpr int kVectors = kColumns / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * kVectors; i += blockDim.x) {
    const int r = i / kVectors, vector = i % kVectors;
    const uint4 v = reinterpret_cast<const uint4*>(matrix)[i];
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
    const int row = place(r), t = vector % 4;
    unsigned char* const tile = smem + vector / 8 * height * kSwizzleRowBytes;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // columns 8 t + 2 j: operands 16 (j / 2) + 8 (j % 2) + 2 t
      const int chunk = vector / 4 % 2 * 4 + j;
      *reinterpret_cast<uint32_t*>(tile + swizzle_128b(row, chunk) + 4 * t) = pairs[j];
    }
  }
}

// The place of column `feature` among the results: in each block, 8 i + 2 t + e for 8 t + 2 i + e.
__device__ __forceinline__ int result_of(int feature) {
  const int x = feature % 32;
  return feature - x + x % 8 / 2 * 8 + x / 8 * 2 + x % 2;
}

// Starts sums (64 x kN) += operand (64 x 32 kCount) times rows [row, row + kN) of a matrix of
// `height` rows in shared memory, from column 32 `block` on.
template <int kN, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kN / 2], const Operand<kCount>& operand,
                                         unsigned matrix, int height, int row, int block,
                                         bool accumulate) {
#pragma unroll
  for (int k = 0; k < 2 * kCount; ++k) {
    const int column = 32 * block + 16 * k;
    const uint64_t b = wgmma_descriptor(
        matrix + (column / kChunk * height + row) * kSwizzleRowBytes + column % kChunk * 2);
    wgmma_weights<kN>(sums, operand.a[k], b, accumulate || k != 0);
  }
}

// The lane's first value of row g (or g + 8) of the warp's rows; rows past the last repeat it.
__device__ __forceinline__ const scalar_t* row_of(const scalar_t* x, int64_t first, int half,
                                                  int64_t rows, Lane lane) {
  const int64_t row = min(first + lane.g + 8 * half, rows - 1);
  return x + row * kHidden + 8 * lane.t;
}

__device__ __forceinline__ void load_operand(Operand<kBlocks>& operand, const scalar_t* x,
                                             int64_t first, int64_t rows, Lane lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint4 v = *reinterpret_cast<const uint4*>(row_of(x, first, half, rows, lane) + 32 * b);
      operand.a[2 * b][half] = v.x;
      operand.a[2 * b][2 + half] = v.y;
      operand.a[2 * b + 1][half] = v.z;
      operand.a[2 * b + 1][2 + half] = v.w;
    }
}

// Asks for rows that are loaded later: a lane for half of a line of row g, and of row g + 8.
__device__ __forceinline__ void prefetch_rows(const scalar_t* x, int64_t first, int64_t rows,
                                              Lane lane) {
  if (lane.t >= kHidden / 32) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane.g + 8 * half;
    if (row < rows) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + row * kHidden + 32 * lane.t));
  }
}

// Sets the sums of row g (or g + 8), whose first value for this lane is at `p`: 16 b + 4 i +
// 2 half + e is column 32 b + 8 t + 2 i + e.
__device__ __forceinline__ void load_half(float (&sums)[kHidden / 2], const scalar_t* p, int half) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const auto v = load_vec<scalar_t, 8>(p + 32 * b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[16 * b + i / 2 * 4 + 2 * half + i % 2] = to_float(v.v[i]);
  }
}

__device__ __forceinline__ void load_sums(float (&sums)[kHidden / 2], const scalar_t* x,
                                          int64_t first, int64_t rows, Lane lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) load_half(sums, row_of(x, first, half, rows, lane), half);
}

// Stores kCount / 16 blocks of the rows that exist; `out` is at their first column.
template <int kCount>
__device__ __forceinline__ void store_sums(scalar_t* out, const float (&sums)[kCount],
                                           int64_t first, int64_t rows, int64_t width, Lane lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + lane.g + 8 * half;
    if (row >= rows) continue;
#pragma unroll
    for (int b = 0; b < kCount / 16; ++b) {
      const float* const s = sums + 16 * b + 2 * half;
      const uint4 v = {pack2<scalar_t>(s[0], s[1]), pack2<scalar_t>(s[4], s[5]),
                       pack2<scalar_t>(s[8], s[9]), pack2<scalar_t>(s[12], s[13])};
      *reinterpret_cast<uint4*>(out + row * width + 32 * b + 8 * lane.t) = v;
    }
  }
}

// The rows divided by their root mean square, times the norm's weight, as operands.
__device__ __forceinline__ void normalise(Operand<kBlocks>& operand,
                                          const float (&sums)[kHidden / 2], const scalar_t* norm,
                                          float eps, Lane lane) {
  float scale[2] = {};
#pragma unroll
  for (int i = 0; i < kHidden / 2; ++i) scale[i % 4 / 2] += sums[i] * sums[i];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale[half] += __shfl_xor_sync(0xffffffffu, scale[half], 1);
    scale[half] += __shfl_xor_sync(0xffffffffu, scale[half], 2);
    scale[half] = rsqrtf(scale[half] * (1.0f / kHidden) + eps);
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const auto w = load_vec<scalar_t, 8>(norm + 32 * b + 8 * lane.t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = to_float(w.v[2 * i]), odd = to_float(w.v[2 * i + 1]);
      const float* const s = sums + 16 * b + 4 * i;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        operand.a[2 * b + i / 2][i % 2 * 2 + half] =
            pack2<scalar_t>(s[2 * half] * scale[half] * even, s[2 * half + 1] * scale[half] * odd);
    }
  }
}

// The block's dynamic shared memory from the first multiple of 1024 bytes on, which swizzled tiles
// need.
__device__ __forceinline__ unsigned char* aligned(unsigned char* smem) {
  return smem + (1024 - smem_address(smem) % 1024) % 1024;
}
