// Producer warps: copies of the chunks to come, the decays, and M (mamba2_chunk.cuh).
#pragma once

#include "common/cp_async.cuh"
#include "common/exp2.cuh"
#include "common/named_barrier.cuh"
#include "mamba2/mamba2_chunk.cuh"

// Named barriers. Producers arrive at a chunk's ready_barrier once its copies have landed and its M
// is complete, and consumers wait there. Consumers arrive at its read_barrier once they have read
// it, and producers wait there before they fill its stage again.
//
// SAFETY: chunks alternate between two barriers of each kind. A warp may still wait at a chunk's
// barrier while others arrive at the next chunk's, but none arrives at that of the chunk after it.
constexpr int kProducerBarrier = 1;
__device__ __forceinline__ int ready_barrier(int chunk) { return 2 + chunk % 2; }
__device__ __forceinline__ int read_barrier(int chunk) { return 4 + chunk % 2; }

template <int kStages>
class ChunkProducer {
 public:
  using Shared = ChunkShared<kStages>;
  static_assert(kHeads <= kProducerWarps, "a warp computes the decays of a head");

  __device__ __forceinline__ ChunkProducer(const ChunkBlock& block, Shared& smem, int warp_idx)
      : block_(block), p_(block.p), smem_(smem), warp_idx_(warp_idx) {
    const int head = block.head + warp_idx;
    if (warp_idx < kHeads) {
      rate_ = kLog2E * expf(p_.a_log[head]);
      dt_bias_ = p_.dt_bias[head];
    }
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    load_steps(0);
    write_factors(0);
  }

  // Starts the copies of chunk number `index`, if there is one; always commits a group.
  __device__ __forceinline__ void copy(int index) {
    if (index < block_.chunks.count()) {
      const Chunk tokens = block_.chunks.chunk(index);
      const int64_t t = block_.sequence.begin + tokens.begin;
      const int group = block_.head / (p_.num_heads / p_.num_groups);
      ChunkStage& stage = smem_.stages[index % kStages];
      copy_columns<kStateSize>(stage.b, p_.b + t * p_.b_stride_t + group * p_.b_stride_h,
                               p_.b_stride_t, tokens.count());
      copy_columns<kStateSize>(stage.c, p_.c + t * p_.c_stride_t + group * p_.c_stride_h,
                               p_.c_stride_t, tokens.count());
      const scalar_t* const x = p_.x + t * p_.x_stride_t + block_.row;
#pragma unroll
      for (int i = 0; i < kHeads; ++i)
        copy_columns<kRows>(stage.x[i], x + (block_.head + i) * p_.x_stride_h, p_.x_stride_t,
                            tokens.count());
    }
    cp_async_commit();
  }

  // Makes chunk number `index` ready for the consumers; and then the factors of the chunk after it,
  // by warps whose rows of M are short.
  __device__ __forceinline__ void produce(int index) {
    load_steps(index + 1);
    cp_async_wait<kStages - 2>();
    named_barrier_sync<kProducerThreads>(kProducerBarrier);
    switch (warp_idx_) {
      case 0:
        mix_rows<1>(index);
        break;
      case 1:
        mix_rows<2>(index);
        break;
      case 2:
        mix_rows<3>(index);
        break;
      default:
        mix_rows<4>(index);
    }
    named_barrier_arrive<kThreads>(ready_barrier(index));
    write_factors(index + 1);
  }

 private:
  template <int kColumns>
  __device__ __forceinline__ void copy_columns(scalar_t* smem, const scalar_t* gmem, int64_t stride,
                                               int count) const {
    copy_rows<kChunkTokens, kColumns, kProducerThreads>(smem, kColumns + kPad, gmem, stride, count);
  }

  // Loads the time steps of the lane's two tokens of chunk number `index`.
  __device__ __forceinline__ void load_steps(int index) {
    if (warp_idx_ >= kHeads || index >= block_.chunks.count()) return;
    const Chunk tokens = block_.chunks.chunk(index);
    const scalar_t* const dt = p_.dt + block_.head + warp_idx_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane_idx() + i;
      is_token_[i] = at < tokens.count();
      if (is_token_[i]) dt_[i] = dt[(block_.sequence.begin + tokens.begin + at) * p_.dt_stride_t];
    }
  }

  // Writes the factors of the warp's head for chunk number `index`. A logarithm is at least -128,
  // which is a decay of 0 already: differences of running sums stay exact, and finite.
  __device__ __forceinline__ void write_factors(int index) const {
    if (warp_idx_ >= kHeads || index >= block_.chunks.count()) return;
    ChunkFactors& factors = smem_.factors[index % 3][warp_idx_];
    float step[2], c[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      step[i] = is_token_[i] ? time_step(p_, to_float(dt_[i]), dt_bias_) : 0.0f;
      c[i] = fmaxf(-step[i] * rate_, -128.0f);
    }
    float sum = c[0] + c[1];
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const float before = __shfl_up_sync(kFullMask, sum, offset);
      if (lane_idx() >= offset) sum += before;
    }
    const float before = __shfl_up_sync(kFullMask, sum, 1);
    if (lane_idx() > 0) c[0] += before;
    c[1] = sum;
    const float last = __shfl_sync(kFullMask, sum, kWarpSize - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 2 * lane_idx() + i;
      factors.log_decay[at] = c[i];
      factors.step[at] = step[i];
      factors.read[at] = exp2_approx(c[i]);
      factors.write[at] = step[i] * exp2_approx(last - c[i]);
    }
  }

  // Computes the warp's 16 rows of M, which have kBlocks blocks of 16 columns.
  template <int kBlocks>
  __device__ __forceinline__ void mix_rows(int index) {
    static_assert(kBlocks <= kProducerWarps, "a warp per block of rows");
    const ChunkStage& stage = smem_.stages[index % kStages];
    constexpr int kRow = (kBlocks - 1) * 16;
    const auto c = OperandTiles<kStatePitch>::down(stage.c + kRow * kStatePitch);
    const auto b = OperandTiles<kStatePitch>::across(stage.b);
    float sums[2 * kBlocks][4] = {};
#pragma unroll
    for (int k = 0; k < kStateSize; k += 16) {
      uint32_t rows[4];
      c.load(rows, 0, k);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t columns[4];
        b.load(columns, block * 16, k);
        multiply(sums[2 * block], sums[2 * block + 1], rows, columns);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i)
      write_mix<kBlocks>(smem_.mix[index % 2][i], smem_.factors[index % 3][i], sums);
  }

  template <int kBlocks>
  __device__ __forceinline__ static void write_mix(scalar_t* mix, const ChunkFactors& factors,
                                                   const float (&sums)[2 * kBlocks][4]) {
    const int row = (kBlocks - 1) * 16 + lane_idx() / 4, column = lane_idx() % 4 * 2;
    const float row_decays[2] = {factors.log_decay[row], factors.log_decay[row + 8]};
    mix += row * kTokenPitch + column;
#pragma unroll
    for (int tile = 0; tile < 2 * kBlocks; ++tile) {
      const auto decays = load_vec<float, 2>(factors.log_decay + tile * 8 + column);
      const auto steps = load_vec<float, 2>(factors.step + tile * 8 + column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float decay = exp2_approx(row_decays[half] - decays.v[n]);
          pair[n] = sums[tile][2 * half + n] * steps.v[n] * decay;
          if (tile * 8 + column + n > row + half * 8) pair[n] = 0.0f;  // its decay may be infinite
        }
        *reinterpret_cast<uint32_t*>(mix + half * 8 * kTokenPitch + tile * 8) =
            pack2<scalar_t>(pair[0], pair[1]);
      }
    }
  }

  const ChunkBlock& block_;
  const Mamba2Params& p_;
  Shared& smem_;
  const int warp_idx_;
  // Of the warp's head: e^a_log in log2 units, and the next chunk's time steps.
  float rate_, dt_bias_;
  scalar_t dt_[2];
  bool is_token_[2];
};
