// Operands of mma_m16n8k16 in shared memory, as ldmatrix loads them (common/mma.cuh).
//
// `pitch` is the number of elements between rows. Two tiles of n are loaded at once: b[0], b[1] is
// the operand of the first, b[2], b[3] that of the second.
#pragma once

#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

__device__ __forceinline__ int lane_idx() { return threadIdx.x % kWarpSize; }

// The warp's index in its block, which the compiler then knows to be the same in all lanes.
__device__ __forceinline__ int uniform_warp_idx() {
  return __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

// Rows [m, m + 16) and columns [k, k + 16) of A, stored by rows.
template <typename T>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const T* smem, int pitch, int m, int k) {
  ldmatrix_x4(a, smem + (m + lane_idx() % 16) * pitch + k + lane_idx() / 16 * 8);
}

// Rows [k, k + 16) and columns [n, n + 16) of B, with B^T stored by rows.
template <typename T>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const T* smem, int pitch, int n, int k) {
  const int matrix = lane_idx() / 8;
  ldmatrix_x4(b, smem + (n + matrix / 2 * 8 + lane_idx() % 8) * pitch + k + matrix % 2 * 8);
}

// A matrix in shared memory whose tiles one lane loads repeatedly: the lane's address is computed
// once, and hidden, because the compiler would keep a register for each tile's address.
template <int kPitch>
class OperandTiles {
 public:
  // For operands that load_a loads; and, transposed, for B stored by rows of k.
  __device__ __forceinline__ static OperandTiles down(const scalar_t* smem) {
    return OperandTiles(smem + lane_idx() % 16 * kPitch + lane_idx() / 16 * 8);
  }

  // For operands that load_b loads; and, transposed, for A^T stored by rows of k.
  __device__ __forceinline__ static OperandTiles across(const scalar_t* smem) {
    const int matrix = lane_idx() / 8;
    return OperandTiles(smem + (matrix / 2 * 8 + lane_idx() % 8) * kPitch + matrix % 2 * 8);
  }

  // The tile of 16 x 16 at a row and column of memory.
  __device__ __forceinline__ void load(uint32_t (&r)[4], int row, int column) const {
    ldmatrix_x4(r, address_ + 2 * (row * kPitch + column));
  }
  __device__ __forceinline__ void load_trans(uint32_t (&r)[4], int row, int column) const {
    ldmatrix_x4_trans(r, address_ + 2 * (row * kPitch + column));
  }

 private:
  __device__ __forceinline__ explicit OperandTiles(const scalar_t* smem)
      : address_(smem_address(smem)) {
    asm volatile("" : "+r"(address_));
  }

  uint32_t address_;
};

// d[0], d[1] += A B for the two tiles of n.
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4],
                                         const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma_m16n8k16<scalar_t>(first, a, {b[0], b[1]});
  mma_m16n8k16<scalar_t>(second, a, {b[2], b[3]});
}

// Copies kRows rows of kColumns elements to shared memory; rows from `count` on become zeros.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void copy_rows(scalar_t* smem, int pitch, const scalar_t* gmem,
                                          int64_t stride, int count) {
  constexpr int kPerRow = kColumns / kVec;
  const int first_row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow * kVec;
  if constexpr (kThreads % kPerRow == 0) {  // a thread's rows are evenly spaced: one address each
    constexpr int kStep = kThreads / kPerRow;
    smem += first_row * pitch + column;
    gmem += first_row * stride + column;
#pragma unroll
    for (int row = 0; row < kRows; row += kStep) {
      if (kRows % kStep != 0 && row + first_row >= kRows) break;
      cp_async_16(smem + row * pitch, gmem + row * stride, row + first_row < count);
    }
  } else {
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kPerRow; i += kThreads) {
      const int row = i / kPerRow, at = i % kPerRow * kVec;
      cp_async_16(smem + row * pitch + at, gmem + row * stride + at, row < count);
    }
  }
}
