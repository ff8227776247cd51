// The part of a chunk that does not depend on the state: W, U and Q K^T (gated_delta_chunk.cuh).
//
// One block of four warps per chunk and head; warp w computes rows 16 w to 16 w + 15 of each
// product. All matrices are lower triangular, so blocks of 16 columns beyond the warp's rows are
// skipped. T is inverted in float: its halves by substitution, one column per lane, the block below
// them as -T22 (A21 T11).
#pragma once

#include "common/cp_async.cuh"
#include "common/exp2.cuh"
#include "gated_delta/gated_delta_channels.cuh"
#include "gated_delta/gated_delta_fragments.cuh"
#include "gated_delta/gated_delta_prepare_shared.cuh"

// Base-2 logarithm of a decay, at least -128, which is a decay of 0 already: differences of running
// sums stay exact, and finite.
__device__ __forceinline__ float log2_decay(const GatedDeltaParams& p, scalar_t a, float a_log,
                                            float dt_bias) {
  return fmaxf(kLog2E * log_decay(p, to_float(a), a_log, dt_bias), -128.0f);
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
    const scalar_t* const k = p_.k + token_ * p_.k_stride_t + key_head * p_.k_stride_h;
    const scalar_t* const q = p_.q + token_ * p_.q_stride_t + key_head * p_.q_stride_h;
    const scalar_t* const v = p_.v + token_ * p_.v_stride_t + head_ * p_.v_stride_h;
    copy<kKeyDim>(smem_.k, kKeyPitch, k, p_.k_stride_t);
    copy<kKeyDim>(smem_.q_or_v, kKeyPitch, q, p_.q_stride_t);
    cp_async_commit();
    compute_gates();
    cp_async_wait<0>();
    __syncthreads();
    compute_factors();
    __syncthreads();

    if constexpr (kHasChannelGate) {
      ChannelProducts(smem_, scratch_, warp_idx_).run();
    } else {
      write_row_factors();
      float sums[kChunkTokens / 8][4];
      multiply_by_keys(sums, smem_.k);
      store_system(sums);
      multiply_by_keys(sums, smem_.q_or_v);
      store_reads(sums);
    }
    __syncthreads();  // SAFETY: the system is complete, and no warp reads q any more.
    copy<kValueDim>(smem_.q_or_v, kWidePitch, v, p_.v_stride_t);
    cp_async_commit();
    invert();
    cp_async_wait<0>();
    __syncthreads();

    float* const beta = smem_.beta;
    const auto of_value = [&](int j) { return beta[j]; };
    const auto of_key = [&](int j) {
      const float decay = kHasChannelGate ? 1.0f : exp2_approx(smem_.log_decay[j]);
      return beta[j] * smem_.k_factor[j] * decay;
    };
    multiply_inverse<kKeyDim>(scratch_.w, smem_.k, kKeyPitch, of_key);
    multiply_inverse<kValueDim>(scratch_.u, smem_.q_or_v, kWidePitch, of_value);
  }

 private:
  template <int kColumns>
  __device__ __forceinline__ void copy(scalar_t* smem, int pitch, const scalar_t* gmem,
                                       int64_t stride) const {
    copy_rows<kChunkTokens, kColumns, kPrepareThreads>(smem, pitch, gmem, stride, count_);
  }

  // beta, and the running sums c of the logarithms of the decays.
  __device__ __forceinline__ void compute_gates() {
    const int i = threadIdx.x;
    if (i < kChunkTokens) {
      const int64_t t = token_ + i;
      float g = 0.0f, beta = 0.0f;
      if (i < count_) {
        beta = update_strength(to_float(p_.b[t * p_.b_stride_t + head_]), p_.beta_scale);
        if constexpr (!kHasChannelGate)
          g = log2_decay(p_, p_.a[t * p_.a_stride_t + head_], p_.a_log[head_], p_.dt_bias[head_]);
      }
      smem_.beta[i] = beta;
      if constexpr (!kHasChannelGate) smem_.log_decay[i] = running_sum(g);
    }
    if constexpr (kHasChannelGate) compute_channel_gates();
  }

  // Sum of g over the lanes up to this one; compute_factors adds the first warp's to the second.
  __device__ __forceinline__ float running_sum(float g) const {
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const float before = __shfl_up_sync(kFullMask, g, offset);
      if (lane_idx() >= offset) g += before;
    }
    return g;
  }

  // c of every token for the thread's channel.
  __device__ __forceinline__ void compute_channel_gates() {
    static_assert(kKeyDim <= kPrepareThreads, "one thread per channel");
    const int d = threadIdx.x;
    if (d >= kKeyDim) return;
    const scalar_t* const a = p_.a + token_ * p_.a_stride_t + head_ * p_.a_stride_h + d;
    const float a_log = p_.a_log[head_], bias = p_.dt_bias[head_ * kKeyDim + d];
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kChunkTokens; ++i) {
      const scalar_t gate = a[(i < count_ ? i : 0) * p_.a_stride_t];
      if (i < count_) sum += log2_decay(p_, gate, a_log, bias);
      smem_.channel_decay[i * kChannelPitch + d] = sum;
    }
  }

  // 1 / |k| and scale / |q| of each row, two threads a row; and c of the second half.
  __device__ __forceinline__ void compute_factors() {
    const int row = threadIdx.x / 2;
    const float k_squares = half_row_squares(smem_.k, row);
    const float q_squares = half_row_squares(smem_.q_or_v, row);
    const float first_half = kHasChannelGate ? 0.0f : smem_.log_decay[kHalf - 1];
    if (threadIdx.x % 2 != 0) return;
    const bool is_valid = row < count_;
    smem_.k_factor[row] = is_valid ? 1.0f / sqrtf(k_squares + p_.eps) : 0.0f;
    smem_.q_factor[row] = is_valid ? p_.scale / sqrtf(q_squares + p_.eps) : 0.0f;
    if (!kHasChannelGate && row >= kHalf) smem_.log_decay[row] += first_half;
  }

  // Sum of squares of a row, of which each of two neighbouring threads reads every other vector.
  __device__ __forceinline__ float half_row_squares(const scalar_t* smem, int row) const {
    float sum = 0.0f;
#pragma unroll
    for (int column = 0; column < kKeyDim; column += 2 * kVec) {
      const auto values =
          load_vec<scalar_t, kVec>(smem + row * kKeyPitch + column + threadIdx.x % 2 * kVec);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum += to_float(values.v[j]) * to_float(values.v[j]);
    }
    return sum + __shfl_xor_sync(kFullMask, sum, 1);
  }

  __device__ __forceinline__ void write_row_factors() const {
    const int i = threadIdx.x;
    if (i >= kChunkTokens) return;
    const float c = smem_.log_decay[i], last = smem_.log_decay[kChunkTokens - 1];
    scratch_.factors[i] = smem_.q_factor[i] * exp2_approx(c);
    scratch_.factors[ChunkScratch::kXRows + i] = smem_.k_factor[i] * exp2_approx(last - c);
    if (i == 0) scratch_.factors[ChunkScratch::kDecay] = exp2_approx(last);
  }

  // The warp's 16 rows of `rows` K^T; rows are those of k or q.
  __device__ __forceinline__ void multiply_by_keys(float (&sums)[kChunkTokens / 8][4],
                                                   const scalar_t* rows) const {
#pragma unroll
    for (auto& tile : sums)
#pragma unroll
      for (float& sum : tile) sum = 0.0f;
#pragma unroll
    for (int d = 0; d < kKeyDim; d += 16) {
      uint32_t a[4];
      load_a(a, rows, kKeyPitch, warp_idx_ * 16, d);
#pragma unroll
      for (int block = 0; block < kChunkTokens / 16; ++block) {
        if (block > warp_idx_) break;
        uint32_t b[4];
        load_b(b, smem_.k, kKeyPitch, block * 16, d);
        multiply(sums[2 * block], sums[2 * block + 1], a, b);
      }
    }
  }

  // Calls f(i, j, sum of element (i, j), sum of (i, j + 1)) for the lane's elements.
  template <typename F>
  __device__ __forceinline__ void for_each(const float (&sums)[kChunkTokens / 8][4], F f) const {
#pragma unroll
    for (int tile = 0; tile < kChunkTokens / 8; ++tile) {
      if (tile / 2 > warp_idx_) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = warp_idx_ * 16 + half * 8 + lane_idx() / 4;
        f(i, tile * 8 + lane_idx() % 4 * 2, sums[tile][2 * half], sums[tile][2 * half + 1]);
      }
    }
  }

  // Factor of element (i, j) of K K^T or Q K^T: the decay from j to i, and 1 / |k_j|.
  // The exponent is masked first: above the diagonal it may overflow.
  __device__ __forceinline__ float decay(int i, int j, bool is_below) const {
    if (!is_below) return 0.0f;
    return smem_.k_factor[j] * exp2_approx(smem_.log_decay[i] - smem_.log_decay[j]);
  }

  __device__ __forceinline__ void store_system(const float (&sums)[kChunkTokens / 8][4]) {
    for_each(sums, [&](int i, int j, float first, float second) {
      const float row = smem_.beta[i] * smem_.k_factor[i];
      const Vec<float, 2> pair = {row * first * decay(i, j, i > j),
                                  row * second * decay(i, j + 1, i > j + 1)};
      store_vec(smem_.system + i * kSystemPitch + j, pair);
    });
  }

  __device__ __forceinline__ void store_reads(const float (&sums)[kChunkTokens / 8][4]) const {
    for_each(sums, [&](int i, int j, float first, float second) {
      const float row = smem_.q_factor[i];
      const uint32_t pair = pack2<scalar_t>(row * first * decay(i, j, i >= j),
                                            row * second * decay(i, j + 1, i >= j + 1));
      *reinterpret_cast<uint32_t*>(scratch_.reads + i * kChunkTokens + j) = pair;
    });
  }

  // Replaces A by T = (I + A)^-1.
  __device__ __forceinline__ void invert() {
    if (warp_idx_ < 2) invert_half(smem_.system + warp_idx_ * kHalf * (kSystemPitch + 1));
    __syncthreads();
    float* const below = smem_.system + kHalf * kSystemPitch;
    float* const product = smem_.system + kHalf;
    multiply_halves(product, below, smem_.system, 1.0f);
    __syncthreads();
    multiply_halves(below, below + kHalf, product, -1.0f);
    __syncthreads();
  }

  // Inverts I + A for one half on the diagonal: lane j solves for column j.
  __device__ __forceinline__ void invert_half(float* half) {
    float column[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float sum = i == lane_idx() ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const auto row = load_vec<float, 4>(half + i * kSystemPitch + m);
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (m + n < i) sum -= row.v[n] * column[m + n];
      }
      column[i] = sum;
    }
    __syncwarp();  // SAFETY: all lanes have read A.
#pragma unroll
    for (int i = 0; i < kHalf; ++i) half[i * kSystemPitch + lane_idx()] = column[i];
  }

  // out = sign * left * right for quarters of the system; a thread computes 8 elements of a row.
  __device__ __forceinline__ void multiply_halves(float* out, const float* left, const float* right,
                                                  float sign) {
    constexpr int kColumns = kHalf * kHalf / kPrepareThreads;
    const int row = threadIdx.x / (kHalf / kColumns);
    const int column = threadIdx.x % (kHalf / kColumns) * kColumns;
    float sums[kColumns] = {};
#pragma unroll 8
    for (int m = 0; m < kHalf; ++m) {
      const float x = left[row * kSystemPitch + m];
#pragma unroll
      for (int j = 0; j < kColumns; j += 4) {
        const auto y = load_vec<float, 4>(right + m * kSystemPitch + column + j);
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[j + n] += x * y.v[n];
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) out[row * kSystemPitch + column + j] = sign * sums[j];
  }

  // The warp's rows of T diag(factor) B, for kColumns columns of B; rounded to scalar_t.
  template <int kColumns, typename Factor>
  __device__ __forceinline__ void multiply_inverse(scalar_t* out, const scalar_t* smem_b, int pitch,
                                                   Factor factor) const {
    const int row = warp_idx_ * 16 + lane_idx() / 4;
    uint32_t a[kChunkTokens / 16][4];
#pragma unroll
    for (int block = 0; block < kChunkTokens / 16; ++block) {
      if (block > warp_idx_) break;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int i = row + part % 2 * 8, j = block * 16 + part / 2 * 8 + lane_idx() % 4 * 2;
        const auto pair = load_vec<float, 2>(smem_.system + i * kSystemPitch + j);
        a[block][part] = pack2<scalar_t>(pair.v[0] * factor(j), pair.v[1] * factor(j + 1));
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      float sums[2][4] = {};
#pragma unroll
      for (int block = 0; block < kChunkTokens / 16; ++block) {
        if (block > warp_idx_) break;
        uint32_t b[4];
        load_b_trans(b, smem_b, pitch, n, block * 16);
        multiply(sums[0], sums[1], a[block], b);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = n + tile * 8 + lane_idx() % 4 * 2;
          *reinterpret_cast<uint32_t*>(out + (row + half * 8) * kColumns + column) =
              pack2<scalar_t>(sums[tile][2 * half], sums[tile][2 * half + 1]);
        }
    }
  }

  const GatedDeltaParams& p_;
  PrepareShared& smem_;
  const ChunkScratch scratch_;
  const int head_;
  const int64_t token_;  // the chunk's first
  const int count_;      // its tokens
  const int warp_idx_;
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
