// The part of a chunk that does not depend on the state: T and Q K^T * D (gated_delta_chunk.cuh).
//
// One block of four warps per chunk and head; warp w computes rows 16 w to 16 w + 15 of the
// products. All matrices are lower triangular, so blocks of 16 x 16 above the diagonal are skipped.
#pragma once

#include "common/cp_async.cuh"
#include "common/exp2.cuh"
#include "common/pdl.cuh"
#include "gated_delta/gated_delta_channels.cuh"
#include "common/mma_operands.cuh"
#include "gated_delta/gated_delta_inverse.cuh"
#include "gated_delta/gated_delta_prepare_shared.cuh"

// Base-2 logarithm of a decay, at least -128, which is a decay of 0 already: differences of running
// sums stay exact, and finite. NaN stays NaN.
__device__ __forceinline__ float log2_decay(const GatedDeltaParams& p, scalar_t a, float a_log,
                                            float dt_bias) {
  const float log2 = kLog2E * log_decay(p, to_float(a), a_log, dt_bias);
  return log2 < -128.0f ? -128.0f : log2;
}

class Preparation {
 public:
  __device__ __forceinline__ Preparation(const GatedDeltaParams& p, PrepareShared& smem,
                                         const ChunkScratch& scratch, int head, int64_t token,
                                         int count)
      : p_(p),
        smem_(smem),
        scratch_(scratch),
        head_(head),
        token_(token),
        count_(count),
        warp_idx_(uniform_warp_idx()) {}

  __device__ __forceinline__ void run() {
    const int key_head = head_ / (p_.num_heads / p_.num_key_heads);
    PrepareOperands& operands = smem_.matrices.operands;
    copy(operands.k, p_.k + token_ * p_.k_stride_t + key_head * p_.k_stride_h, p_.k_stride_t);
    copy(operands.q, p_.q + token_ * p_.q_stride_t + key_head * p_.q_stride_h, p_.q_stride_t);
    if constexpr (kHasChannelGate)
      copy(channel_gates(), p_.a + token_ * p_.a_stride_t + head_ * p_.a_stride_h, p_.a_stride_t);
    cp_async_commit();
    compute_gates();
    cp_async_wait<0>();
    __syncthreads();
    PrepareTriangles& triangles = smem_.matrices.triangles;
    scalar_t* const inverse = reinterpret_cast<scalar_t*>(triangles.inverse);
    scalar_t* const reads = reinterpret_cast<scalar_t*>(triangles.reads);
    if constexpr (kHasChannelGate) {
      compute_channel_gates();
      Block k_squares = {}, q_squares = {};
      add_squares(k_squares, operands.k);
      add_squares(q_squares, operands.q);
      store_factors(k_squares, q_squares);
      __syncthreads();
      ChannelProducts(smem_, scratch_, warp_idx_).run();
      __syncthreads();
    } else {
      multiply_by_keys();
      complete_running_sum();
      __syncthreads();  // SAFETY: k and q are read no more, their factors are complete.
      write_row_factors();
      store_block();
      store_earlier_blocks();
      __syncwarp();
    }
    Inversion(smem_, warp_idx_).run();
    __syncthreads();
    store_triangle(scratch_.inverse, inverse);
    if constexpr (!kHasChannelGate) store_triangle(scratch_.reads, reads);
  }

 private:
  using Block = float[2][4];  // the sums of 16 x 16 elements

  __device__ __forceinline__ void copy(scalar_t* smem, const scalar_t* gmem, int64_t stride) const {
    copy_rows<kChunkTokens, kKeyDim, kPrepareThreads>(smem, kKeyPitch, gmem, stride, count_);
  }

  // beta, and the running sums c of the logarithms of the decays: each half's own.
  __device__ __forceinline__ void compute_gates() {
    const int i = threadIdx.x;
    if (i < kChunkTokens) {
      const int64_t t = token_ + i;
      float g = 0.0f, beta = 0.0f;
      if (i < count_) {
        const float b = to_float(p_.b[t * p_.b_stride_t + head_]);
        if constexpr (!kHasChannelGate)
          g = log2_decay(p_, p_.a[t * p_.a_stride_t + head_], p_.a_log[head_], p_.dt_bias[head_]);
        beta = update_strength(b, p_.beta_scale);
      }
      smem_.beta[i] = beta;
      if constexpr (!kHasChannelGate) smem_.log_decay[i] = running_sum(g);
    }
  }

  // Sum of g over the lanes up to this one.
  __device__ __forceinline__ float running_sum(float g) const {
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const float before = __shfl_up_sync(kFullMask, g, offset);
      if (lane_idx() >= offset) g += before;
    }
    return g;
  }

  // Adds the first half's c to the second's.
  __device__ __forceinline__ void complete_running_sum() {
    if (warp_idx_ == 1) smem_.log_decay[threadIdx.x] += smem_.log_decay[kWarpSize - 1];
  }

  // The decays' arguments with a gate per channel, where the triangles will be.
  __device__ __forceinline__ scalar_t* channel_gates() const {
    static_assert(sizeof(PrepareTriangles) >= sizeof(PrepareOperands::k), "room for the gates");
    return reinterpret_cast<scalar_t*>(&smem_.matrices.triangles);
  }

  // c of every token for the thread's channel.
  __device__ __forceinline__ void compute_channel_gates() {
    static_assert(kKeyDim <= kPrepareThreads, "one thread per channel");
    const int d = threadIdx.x;
    if (d >= kKeyDim) return;
    const scalar_t* const a = channel_gates() + d;
    const float a_log = p_.a_log[head_], bias = p_.dt_bias[head_ * kKeyDim + d];
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < kChunkTokens; ++i) {
      if (i < count_) sum += log2_decay(p_, a[i * kKeyPitch], a_log, bias);
      smem_.channel_decay[i * kChannelPitch + d] = sum;
    }
  }

  // The products of the warp's 16 rows with each other; the squares of their norms are the
  // diagonal.
  __device__ __forceinline__ void add_squares(Block& sums, const scalar_t* rows) const {
#pragma unroll
    for (int d = 0; d < kKeyDim; d += 16) {
      uint32_t a[4], b[4];
      load_a(a, rows, kKeyPitch, warp_idx_ * kBlock, d);
      load_b(b, rows, kKeyPitch, warp_idx_ * kBlock, d);
      multiply(sums[0], sums[1], a, b);
    }
  }

  // 1 / |k| and scale / |q| of the warp's rows, from the diagonals of their squares.
  __device__ __forceinline__ void store_factors(const Block& k_squares, const Block& q_squares) {
    const int row = lane_idx() / 4;
    if (row / 2 != lane_idx() % 4) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp_idx_ * kBlock + half * 8 + row;
      const float* const k = k_squares[half] + 2 * half;
      const float* const q = q_squares[half] + 2 * half;
      const bool is_valid = i < count_;
      smem_.k_factor[i] = is_valid ? rsqrtf((row % 2 == 0 ? k[0] : k[1]) + p_.eps) : 0.0f;
      smem_.q_factor[i] =
          is_valid ? p_.scale * rsqrtf((row % 2 == 0 ? q[0] : q[1]) + p_.eps) : 0.0f;
    }
  }

  // The warp's 16 rows of K K^T and Q K^T, and the factors.
  __device__ __forceinline__ void multiply_by_keys() {
    const PrepareOperands& operands = smem_.matrices.operands;
    Block q_squares = {};
#pragma unroll
    for (int d = 0; d < kKeyDim; d += 16) {
      uint32_t k[4], q[4], b[4];
      load_a(k, operands.k, kKeyPitch, warp_idx_ * kBlock, d);
      load_a(q, operands.q, kKeyPitch, warp_idx_ * kBlock, d);
#pragma unroll
      for (int j = 0; j < kBlocks - 1; ++j) {
        if (j >= warp_idx_) break;
        load_b(b, operands.k, kKeyPitch, j * kBlock, d);
        multiply(k_sums_[j][0], k_sums_[j][1], k, b);
        multiply(q_sums_[j][0], q_sums_[j][1], q, b);
      }
      load_b(b, operands.k, kKeyPitch, warp_idx_ * kBlock, d);
      multiply(k_block_[0], k_block_[1], k, b);
      multiply(q_block_[0], q_block_[1], q, b);
      load_b(b, operands.q, kKeyPitch, warp_idx_ * kBlock, d);
      multiply(q_squares[0], q_squares[1], q, b);
    }
    store_factors(k_block_, q_squares);
  }

  __device__ __forceinline__ void write_row_factors() const {
    const int i = threadIdx.x;
    if (i >= kChunkTokens) return;
    const float c = smem_.log_decay[i], last = smem_.log_decay[kChunkTokens - 1];
    const float key = smem_.k_factor[i];
    scratch_.factors[i] = smem_.q_factor[i] * exp2_approx(c);
    scratch_.factors[ChunkScratch::kKeyRows + i] = key * exp2_approx(c);
    scratch_.factors[ChunkScratch::kXRows + i] = key * exp2_approx(last - c);
    if (i == 0) scratch_.factors[ChunkScratch::kDecay] = exp2_approx(last);
  }

  // A and the reads within the warp's block of tokens.
  __device__ __forceinline__ void store_block() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane_idx() / 4, i = warp_idx_ * kBlock + row;
      const float c = smem_.log_decay[i], read = smem_.q_factor[i];
      const float update = smem_.beta[i] * smem_.k_factor[i];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int column = tile * 8 + lane_idx() % 4 * 2, j = warp_idx_ * kBlock + column;
        const auto keys = load_vec<float, 2>(smem_.k_factor + j);
        const auto decays = load_vec<float, 2>(smem_.log_decay + j);
        float a[2], reads[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          // The exponent is masked first: above the diagonal it may overflow.
          const bool is_read = row >= column + n;
          const float decay = is_read ? keys.v[n] * exp2_approx(c - decays.v[n]) : 0.0f;
          a[n] = row > column + n ? update * decay * k_block_[tile][2 * half + n] : 0.0f;
          reads[n] = read * decay * q_block_[tile][2 * half + n];
        }
        store_vec(smem_.diagonal[warp_idx_] + row * kDiagonalPitch + column,
                  Vec<float, 2>{a[0], a[1]});
        store_pair(smem_.matrices.triangles.reads, i, j, pack2<scalar_t>(reads[0], reads[1]));
      }
    }
  }

  // A and the reads of the warp's rows and earlier blocks. c before the rows, `middle`, splits a
  // decay in a factor of the row and one of the column, both at most 1.
  __device__ __forceinline__ void store_earlier_blocks() {
    if (warp_idx_ == 0) return;
    PrepareTriangles& triangles = smem_.matrices.triangles;
    const float middle = smem_.log_decay[warp_idx_ * kBlock - 1];
    float updates[2], reads[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = warp_idx_ * kBlock + half * 8 + lane_idx() / 4;
      const float decay = exp2_approx(smem_.log_decay[i] - middle);
      updates[half] = smem_.beta[i] * smem_.k_factor[i] * decay;
      reads[half] = smem_.q_factor[i] * decay;
    }
#pragma unroll
    for (int tile = 0; tile < 2 * (kBlocks - 1); ++tile) {
      if (tile / 2 >= warp_idx_) break;
      const int j = tile * 8 + lane_idx() % 4 * 2;
      const auto keys = load_vec<float, 2>(smem_.k_factor + j);
      const auto decays = load_vec<float, 2>(smem_.log_decay + j);
      const float first = keys.v[0] * exp2_approx(middle - decays.v[0]);
      const float second = keys.v[1] * exp2_approx(middle - decays.v[1]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = warp_idx_ * kBlock + half * 8 + lane_idx() / 4;
        const float* const k = k_sums_[tile / 2][tile % 2] + 2 * half;
        const float* const q = q_sums_[tile / 2][tile % 2] + 2 * half;
        const SplitPair a(updates[half] * first * k[0], updates[half] * second * k[1]);
        store_pair(triangles.system.high, i, j, a.high);
        store_pair(triangles.system.low, i, j, a.low);
        store_pair(triangles.reads, i, j,
                   pack2<scalar_t>(reads[half] * first * q[0], reads[half] * second * q[1]));
      }
    }
  }

  static __device__ __forceinline__ void store_pair(Triangle& to, int i, int j, uint32_t pair) {
    *reinterpret_cast<uint32_t*>(to + i * kTrianglePitch + j) = pair;
  }

  // Writes a triangle, up to each row's block of 16 columns.
  static __device__ __forceinline__ void store_triangle(scalar_t* out, const scalar_t* triangle) {
    constexpr int kPerRow = kChunkTokens / kVec;
#pragma unroll
    for (int n = threadIdx.x; n < kChunkTokens * kPerRow; n += kPrepareThreads) {
      const int i = n / kPerRow, j = n % kPerRow * kVec;
      if (j / kBlock > i / kBlock) continue;
      store_vec(out + i * kChunkTokens + j,
                load_vec<scalar_t, kVec>(triangle + i * kTrianglePitch + j));
    }
  }

  const GatedDeltaParams& p_;
  PrepareShared& smem_;
  const ChunkScratch scratch_;
  const int head_;
  const int64_t token_;  // the chunk's first
  const int count_;      // its tokens
  const int warp_idx_;
  // Of the warp's rows: K K^T and Q K^T of earlier blocks, and of its own.
  Block k_sums_[kBlocks - 1] = {}, q_sums_[kBlocks - 1] = {}, k_block_ = {}, q_block_ = {};
};

// The sequence that owns chunk id `chunk`.
__device__ __forceinline__ int sequence_of_chunk(const GatedDeltaParams& p, int num_sequences,
                                                 int chunk) {
  int low = 0, high = num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_seqlens_q[middle] / kChunkTokens + 2 * middle <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ void prepare_chunk(const GatedDeltaParams& p, PrepareShared& smem) {
  pdl_trigger();
  pdl_wait();
  const int chunk = p.first_chunk + blockIdx.x, head = blockIdx.y;
  const int b = sequence_of_chunk(p, p.num_sequences, chunk);
  const Sequence sequence = load_sequence(p, b);
  const ChunkRange range(p, sequence, b);
  const int index = chunk - range.first_id;
  if (index < range.begin || index >= range.end) return;
  const Chunk tokens = range.chunk(index);
  Preparation(p, smem, ChunkScratch(p, chunk, head), head, sequence.begin + tokens.begin,
              tokens.count())
      .run();
}
