// Products of a chunk with a gate per channel: sums over channels d of
//
//   k_id k_jd e^(c_id - c_jd)   and   q_id k_jd e^(c_id - c_jd),   i >= j.
//
// e^(c_i) and e^(-c_j) apart would overflow. Between two blocks of 16 tokens, c at the end of the
// block before the rows' block lies between c_i and c_j, so e^(c_i - c) and e^(c - c_j) are both at
// most 1: they scale the operands of a product on tensor cores. Within a block c of its middle does
// the same, if no factor becomes too large; else the sums are computed directly, a pair (i, j) per
// lane.
#pragma once

#include "common/exp2.cuh"
#include "common/mma_operands.cuh"
#include "gated_delta/gated_delta_prepare_shared.cuh"

class ChannelProducts {
 public:
  __device__ __forceinline__ ChannelProducts(PrepareShared& smem, const ChunkScratch& scratch,
                                             int warp_idx)
      : smem_(smem),
        operands_(smem.matrices.operands),
        scratch_(scratch),
        first_row_(16 * warp_idx),
        warp_idx_(warp_idx) {}

  // Fills the system and the scratch, but for the inverse.
  __device__ __forceinline__ void run() {
    multiply_blocks();
    if (splits_at_middle()) {
      multiply_own_block();
    } else {
      multiply_pairs();
    }
    write_scaled();
  }

 private:
  using Pair = Vec<float, 2>;

  // float16 holds values up to 2^16, bfloat16 up to 2^127.
  static constexpr float kMaxExponent = ENGINE_DTYPE == 1 ? 8.0f : 60.0f;

  __device__ __forceinline__ int middle_row() const { return first_row_ + 7; }

  __device__ __forceinline__ Pair decay(int token, int channel) const {
    return load_vec<float, 2>(smem_.channel_decay + token * kChannelPitch + channel);
  }

  static __device__ __forceinline__ Pair values(const scalar_t* smem, int token, int channel) {
    const auto pair = load_vec<scalar_t, 2>(smem + token * kKeyPitch + channel);
    return {to_float(pair.v[0]), to_float(pair.v[1])};
  }

  // The pair x 2^(from - to), rounded and packed.
  static __device__ __forceinline__ uint32_t scaled(const Pair& x, const Pair& from,
                                                    const Pair& to) {
    return pack2<scalar_t>(x.v[0] * exp2_approx(from.v[0] - to.v[0]),
                           x.v[1] * exp2_approx(from.v[1] - to.v[1]));
  }

  // The warp's 16 rows against all earlier blocks.
  __device__ __forceinline__ void multiply_blocks() {
    float k_sums[kChunkTokens / 8][4] = {}, q_sums[kChunkTokens / 8][4] = {};
    if (warp_idx_ == 0) return;
#pragma unroll 1
    for (int d = 0; d < kKeyDim; d += 16) {
      const int channel = d + lane_idx() % 4 * 2;
      const Pair middle[2] = {decay(first_row_ - 1, channel), decay(first_row_ - 1, channel + 8)};
      uint32_t k[4], q[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int i = first_row_ + lane_idx() / 4 + part % 2 * 8, at = channel + part / 2 * 8;
        const Pair c = decay(i, at);
        k[part] = scaled(values(operands_.k, i, at), c, middle[part / 2]);
        q[part] = scaled(values(operands_.q, i, at), c, middle[part / 2]);
      }
#pragma unroll
      for (int block = 0; block < kChunkTokens / 16 - 1; ++block) {
        if (block >= warp_idx_) break;
        uint32_t b[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int j = block * 16 + part / 2 * 8 + lane_idx() / 4, at = channel + part % 2 * 8;
          b[part] = scaled(values(operands_.k, j, at), middle[part % 2], decay(j, at));
        }
        multiply(k_sums[2 * block], k_sums[2 * block + 1], k, b);
        multiply(q_sums[2 * block], q_sums[2 * block + 1], q, b);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kChunkTokens / 8 - 2; ++tile) {
      if (tile / 2 >= warp_idx_) break;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        store(first_row_ + n / 2 * 8 + lane_idx() / 4, tile * 8 + lane_idx() % 4 * 2 + n % 2,
              k_sums[tile][n], q_sums[tile][n]);
    }
  }

  // Whether factors relative to c of the block's middle stay below 2^kMaxExponent.
  __device__ __forceinline__ bool splits_at_middle() const {
    bool is_below = true;
#pragma unroll
    for (int d = 2 * lane_idx(); d < kKeyDim; d += 2 * kWarpSize) {
      const Pair first = decay(first_row_, d), middle = decay(middle_row(), d);
      const Pair last = decay(first_row_ + 15, d);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        is_below &= fmaxf(first.v[n] - middle.v[n], middle.v[n] - last.v[n]) < kMaxExponent;
    }
    return __all_sync(kFullMask, is_below);
  }

  // The warp's own block on tensor cores.
  __device__ __forceinline__ void multiply_own_block() {
    float k_sums[2][4] = {}, q_sums[2][4] = {};
#pragma unroll 1
    for (int d = 0; d < kKeyDim; d += 16) {
      const int channel = d + lane_idx() % 4 * 2;
      const Pair middle[2] = {decay(middle_row(), channel), decay(middle_row(), channel + 8)};
      uint32_t k[4], q[4], b[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int i = first_row_ + lane_idx() / 4 + part % 2 * 8, at = channel + part / 2 * 8;
        const int j = first_row_ + lane_idx() / 4 + part / 2 * 8, from = channel + part % 2 * 8;
        const Pair c = decay(i, at);
        k[part] = scaled(values(operands_.k, i, at), c, middle[part / 2]);
        q[part] = scaled(values(operands_.q, i, at), c, middle[part / 2]);
        b[part] = scaled(values(operands_.k, j, from), middle[part % 2], decay(j, from));
      }
      multiply(k_sums[0], k_sums[1], k, b);
      multiply(q_sums[0], q_sums[1], q, b);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = first_row_ + n / 2 * 8 + lane_idx() / 4;
        const int j = first_row_ + tile * 8 + lane_idx() % 4 * 2 + n % 2;
        if (i >= j) {
          store(i, j, k_sums[tile][n], q_sums[tile][n]);
        } else {
          clear_read(i, j);
        }
      }
  }

  // The 136 pairs i >= j of the warp's own block.
  __device__ __forceinline__ void multiply_pairs() {
    constexpr int kPairs = 16 * 17 / 2;
#pragma unroll 1
    for (int pair = lane_idx(); pair < kPairs; pair += kWarpSize) {
      const int row = static_cast<int>((sqrtf(8.0f * pair + 1.0f) - 1.0f) * 0.5f);
      const int i = first_row_ + row, j = first_row_ + pair - row * (row + 1) / 2;
      float k_sum = 0.0f, q_sum = 0.0f;
#pragma unroll 4
      for (int d = 0; d < kKeyDim; d += 2) {
        const Pair ci = decay(i, d), cj = decay(j, d), kj = values(operands_.k, j, d);
        const Pair ki = values(operands_.k, i, d), qi = values(operands_.q, i, d);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float key = kj.v[n] * exp2_approx(ci.v[n] - cj.v[n]);
          k_sum = fmaf(ki.v[n], key, k_sum);
          q_sum = fmaf(qi.v[n], key, q_sum);
        }
      }
      store(i, j, k_sum, q_sum);
      if (i != j) clear_read(j, i);
    }
  }

  __device__ __forceinline__ void clear_read(int i, int j) {
    scratch_.reads[i * kChunkTokens + j] = from_float<scalar_t>(0.0f);
  }

  // Stores one element of A and of the reads.
  __device__ __forceinline__ void store(int i, int j, float k_sum, float q_sum) {
    const float column = smem_.k_factor[j];
    const float x = smem_.beta[i] * smem_.k_factor[i] * column * k_sum;
    if (i / kBlock == j / kBlock) {
      smem_.diagonal[i / kBlock][i % kBlock * kDiagonalPitch + j % kBlock] = x;
    } else {
      const SplitPair pair(x, 0.0f);
      System& system = smem_.matrices.triangles.system;
      system.high[i * kTrianglePitch + j] = static_cast<uint16_t>(pair.high);
      system.low[i * kTrianglePitch + j] = static_cast<uint16_t>(pair.low);
    }
    scratch_.reads[i * kChunkTokens + j] = from_float<scalar_t>(smem_.q_factor[i] * column * q_sum);
  }

  // Writes diag(e^c) Q, diag(e^c) K, diag(e^(c_last - c)) K and e^(c_last).
  __device__ __forceinline__ void write_scaled() {
    constexpr int kPairs = kKeyDim / 2;
#pragma unroll 2
    for (int n = threadIdx.x; n < kChunkTokens * kPairs; n += kPrepareThreads) {
      const int i = n / kPairs, d = n % kPairs * 2;
      const Pair zero = {0.0f, 0.0f}, c = decay(i, d), last = decay(kChunkTokens - 1, d);
      Pair k = values(operands_.k, i, d), q = values(operands_.q, i, d);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        k.v[m] *= smem_.k_factor[i];
        q.v[m] *= smem_.q_factor[i];
      }
      const int at = i * kKeyDim + d;
      *reinterpret_cast<uint32_t*>(scratch_.q + at) = scaled(q, c, zero);
      *reinterpret_cast<uint32_t*>(scratch_.k_reads + at) = scaled(k, c, zero);
      *reinterpret_cast<uint32_t*>(scratch_.k_writes + at) = scaled(k, last, c);
      if (i == 0) {
        scratch_.factors[ChunkScratch::kDecay + d] = exp2_approx(last.v[0]);
        scratch_.factors[ChunkScratch::kDecay + d + 1] = exp2_approx(last.v[1]);
      }
    }
  }

  PrepareShared& smem_;
  const PrepareOperands& operands_;
  const ChunkScratch& scratch_;
  const int first_row_, warp_idx_;
};
