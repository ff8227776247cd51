// T = (I + A)^-1 diag(beta) of a chunk (gated_delta_chunk.cuh).
//
// In blocks of 16 x 16 tokens, warp j computes T's block column j: with D_i the inverse of block i
// on I + A's diagonal, T_jj = D_j, and below it T_ij = -D_i (A_ij T_jj + ... + A_i(i-1) T_(i-1)j).
// D is found by substitution in float, a column per lane. The products run on tensor cores: each
// operand is the sum of two bfloat16 values (SplitPair). They are transposed, so that a block of T,
// as sums, becomes the left operand of the products below it.
#pragma once

#include "gated_delta/gated_delta_prepare_shared.cuh"

class Inversion {
 public:
  __device__ __forceinline__ Inversion(PrepareShared& smem, int warp_idx)
      : smem_(smem),
        system_(smem.matrices.triangles.system),
        out_(reinterpret_cast<scalar_t*>(smem.matrices.triangles.inverse)),
        j_(warp_idx) {}

  // The warp's block of A on the diagonal must be complete; the others by the barrier.
  __device__ __forceinline__ void run() {
    invert_diagonal();
    __syncthreads();
    Operand column[kBlocks];  // T_jj, and the blocks below it
    load_diagonal(column[0]);
#pragma unroll
    for (int below = 1; below < kBlocks; ++below) {
      const int i = j_ + below;
      if (i >= kBlocks) break;
      float sums[2][4] = {}, block[2][4] = {};
#pragma unroll
      for (int m = 0; m < below; ++m) add_product(sums, column[m], i, j_ + m);
      Operand negative;
      negative.set(sums, -1.0f);
      add_product(block, negative, i, i);
      if (below + 1 < kBlocks) column[below].set(block, 1.0f);
      store(block, i);
    }
  }

 private:
  // A 16 x 16 left operand.
  struct Operand {
    uint32_t high[4], low[4];

    __device__ __forceinline__ void set(int part, const SplitPair& pair) {
      high[part] = pair.high;
      low[part] = pair.low;
    }

    // Sums times `factor`.
    __device__ __forceinline__ void set(const float (&sums)[2][4], float factor) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* const pair = sums[part / 2] + part % 2 * 2;
        set(part, SplitPair(factor * pair[0], factor * pair[1]));
      }
    }
  };

  // Replaces block j on the diagonal by its inverse, a column per lane in both halves of the warp.
  __device__ __forceinline__ void invert_diagonal() {
    float* const diagonal = smem_.diagonal[j_];
    const int j = lane_idx() % kBlock;
    float column[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float sums[2] = {i == j ? 1.0f : 0.0f, 0.0f};
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const auto row = load_vec<float, 4>(diagonal + i * kDiagonalPitch + m);
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (m + n < i) sums[n % 2] -= row.v[n] * column[m + n];
      }
      column[i] = sums[0] + sums[1];
    }
    __syncwarp();  // SAFETY: all lanes have read A.
    const float beta = smem_.beta[kBlock * j_ + j];
    const int at = kBlock * j_ * (kTrianglePitch + 1) + j;
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      const int row = i + lane_idx() / kBlock;  // a half of the warp stores every other row
      const float x = lane_idx() < kBlock ? column[i] : column[i + 1];
      const SplitPair pair(x, 0.0f);
      diagonal[row * kDiagonalPitch + j] = x;
      system_.high[at + row * kTrianglePitch] = static_cast<uint16_t>(pair.high);
      system_.low[at + row * kTrianglePitch] = static_cast<uint16_t>(pair.low);
      out_[at + row * kTrianglePitch] = from_float<scalar_t>(x * beta);
    }
    __syncwarp();
  }

  // Transposed, as a left operand.
  __device__ __forceinline__ void load_diagonal(Operand& a) const {
    const float* const diagonal = smem_.diagonal[j_];
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int row = lane_idx() / 4 + part % 2 * 8, k = lane_idx() % 4 * 2 + part / 2 * 8;
      a.set(part, SplitPair(diagonal[k * kDiagonalPitch + row],
                            diagonal[(k + 1) * kDiagonalPitch + row]));
    }
  }

  // sums += a times the transpose of block (i, j) of the system.
  __device__ __forceinline__ void add_product(float (&sums)[2][4], const Operand& a, int i,
                                              int j) const {
    uint32_t high[4], low[4];
    load_b(high, system_.high, kTrianglePitch, kBlock * i, kBlock * j);
    load_b(low, system_.low, kTrianglePitch, kBlock * i, kBlock * j);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      mma_m16n8k16<__nv_bfloat16>(sums[n], a.low, {high[2 * n], high[2 * n + 1]});
      mma_m16n8k16<__nv_bfloat16>(sums[n], a.high, {low[2 * n], low[2 * n + 1]});
      mma_m16n8k16<__nv_bfloat16>(sums[n], a.high, {high[2 * n], high[2 * n + 1]});
    }
  }

  // Stores T_ij, whose transpose `sums` holds.
  __device__ __forceinline__ void store(const float (&sums)[2][4], int i) const {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float beta = smem_.beta[kBlock * j_ + part % 2 * 8 + lane_idx() / 4];
      const float* const pair = sums[part / 2] + part % 2 * 2;
      const uint32_t values = movmatrix(pack2<scalar_t>(beta * pair[0], beta * pair[1]));
      const int row = kBlock * i + part / 2 * 8 + lane_idx() / 4;
      const int column = kBlock * j_ + part % 2 * 8 + lane_idx() % 4 * 2;
      *reinterpret_cast<uint32_t*>(out_ + row * kTrianglePitch + column) = values;
    }
  }

  PrepareShared& smem_;
  System& system_;
  scalar_t* const out_;  // T
  const int j_;          // the warp's block column
};
