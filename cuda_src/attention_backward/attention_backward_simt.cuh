// One block of attention_backward in true float32 on CUDA cores, with the same interface and
// operand roles as attention_backward_mma.cuh.
//
// A warp owns kWarpRows rows; the stream comes in tiles of 32 rows. For scores and dP each lane
// owns one row of the stream, for the sums every 32nd column; shuffles broadcast P and dS between
// the two. Intermediate values are not rounded. This path is for checks, not for speed.
#pragma once

#include "attention_backward/attention_backward_problem.cuh"

template <int kHeadDim, int kWarps, int kWarpRows, bool kOfKeys>
struct SimtBackward {
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kStream = kWarpSize;
  static constexpr int kColumns = kHeadDim;
  static constexpr int kLaneColumns = kHeadDim / kWarpSize;
  static constexpr int kSharedBytes =
      2 * (kRows + kStream) * (Layout::kPitch + 1) * static_cast<int>(sizeof(float));

  float first[kWarpRows][kLaneColumns];
  float second[kOfKeys ? kWarpRows : 1][kLaneColumns];

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        first[r][c] = 0.0f;
        if constexpr (kOfKeys) second[r][c] = 0.0f;
      }
  }

  template <typename AnySequence>
  __device__ __forceinline__ void run(unsigned char* smem_bytes, const AnySequence& sequence,
                                      const ScoreRule& rule, const Rows& a, const Rows& b,
                                      const Rows& x, const Rows& y, const float* lse,
                                      const float* delta, int64_t stat_stride, int row_begin,
                                      int begin, int end, int) {
    scalar_t* const smem_a = reinterpret_cast<scalar_t*>(smem_bytes);
    scalar_t* const smem_b = smem_a + kRows * Layout::kPitch;
    scalar_t* const smem_x = smem_b + kRows * Layout::kPitch;
    scalar_t* const smem_y = smem_x + kStream * Layout::kPitch;
    float* const smem_stats = smem_y + kStream * Layout::kPitch;
    __syncthreads();  // SAFETY: other warps may still read the previous call's tiles.
    load_rows<kHeadDim, kRows, kThreads>(smem_a, a, row_begin);
    load_rows<kHeadDim, kRows, kThreads>(smem_b, b, row_begin);
    if constexpr (!kOfKeys)
      load_statistics<kRows, kThreads>(smem_stats, lse, delta, stat_stride, row_begin,
                                       sequence.num_q);
    const auto hidden_of = [&](int tile) {
      const int row = begin + tile * kStream;
      return kOfKeys ? hides(sequence, row, kStream, row_begin, kRows)
                     : hides(sequence, row_begin, kRows, row, kStream);
    };
    const int tiles = begin < end ? (end - begin + kStream - 1) / kStream : 0;
    VisibleTiles<AnySequence::kHasPattern, decltype(hidden_of)> visible(hidden_of, tiles);
#pragma unroll 1
    for (int turn = 0; visible.has_turn(turn); ++turn) {
      const int at = begin + visible.at(turn) * kStream;
      __syncthreads();  // SAFETY: all warps are done with the tile that is about to be overwritten.
      load_rows<kHeadDim, kStream, kThreads>(smem_x, x, at);
      load_rows<kHeadDim, kStream, kThreads>(smem_y, y, at);
      if constexpr (kOfKeys)
        load_statistics<kStream, kThreads>(smem_stats, lse, delta, stat_stride, at, sequence.num_q);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      update(smem_a, smem_b, smem_x, smem_y, smem_stats, sequence, visible.hidden(), rule,
             row_begin, at, a.head_dim);
      visible.next();
    }
    cp_async_wait<0>();
  }

  __device__ __forceinline__ void store(const GradientRows& to_first, const GradientRows& to_second,
                                        int row_begin, int) const {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r)
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int row = row_begin + warp_idx() * kWarpRows + r, column = c * kWarpSize + lane_idx();
        to_first.single(row, column, first[r][c]);
        if constexpr (kOfKeys) to_second.single(row, column, second[r][c]);
      }
  }

 private:
  __device__ static __forceinline__ int lane_idx() { return threadIdx.x % kWarpSize; }
  __device__ static __forceinline__ int warp_idx() { return threadIdx.x / kWarpSize; }

  template <typename AnySequence>
  __device__ __forceinline__ void update(const scalar_t* smem_a, const scalar_t* smem_b,
                                         const scalar_t* smem_x, const scalar_t* smem_y,
                                         const float* stats, const AnySequence& sequence,
                                         Hides hidden, const ScoreRule& rule, int row_begin,
                                         int stream_begin, int head_dim) {
    float p[kWarpRows], ds[kWarpRows];
    const int first_row = warp_idx() * kWarpRows;
    multiply(p, smem_a + first_row * Layout::kPitch, smem_x + lane_idx() * Layout::kPitch,
             head_dim);
    multiply(ds, smem_b + first_row * Layout::kPitch, smem_y + lane_idx() * Layout::kPitch,
             head_dim);
    if (rule.inner != 0.0f)
      differentiate<true>(p, ds, stats, sequence, hidden, rule, row_begin, stream_begin);
    else
      differentiate<false>(p, ds, stats, sequence, hidden, rule, row_begin, stream_begin);
#pragma unroll 4
    for (int j = 0; j < kStream; ++j) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float weight = __shfl_sync(kFullMask, ds[r], j);
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c)
          first[r][c] += weight * to_float(smem_x[j * Layout::kPitch + c * kWarpSize + lane_idx()]);
        if constexpr (kOfKeys) {
          const float other = __shfl_sync(kFullMask, p[r], j);
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c)
            second[r][c] +=
                other * to_float(smem_y[j * Layout::kPitch + c * kWarpSize + lane_idx()]);
        }
      }
    }
  }

  // Turns scores into P and dP into dS, in place.
  template <bool kSoftcap, typename AnySequence>
  __device__ static __forceinline__ void differentiate(float (&p)[kWarpRows],
                                                       float (&ds)[kWarpRows], const float* stats,
                                                       const AnySequence& sequence, Hides hidden,
                                                       const ScoreRule& rule, int row_begin,
                                                       int stream_begin) {
    const int first_row = warp_idx() * kWarpRows;
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const int row = row_begin + first_row + r, streamed = stream_begin + lane_idx();
      const int query = kOfKeys ? streamed : row, key = kOfKeys ? row : streamed;
      const int stat = kOfKeys ? lane_idx() : first_row + r;
      const Gradient g = gradient<kSoftcap>(rule, p[r], ds[r], stats[stat],
                                            stats[(kOfKeys ? kStream : kRows) + stat],
                                            sees(sequence, hidden, query, key));
      p[r] = g.p;
      ds[r] = g.ds;
    }
  }

  // Dot products of each of the warp's rows with the lane's row of the stream.
  __device__ static __forceinline__ void multiply(float (&dot)[kWarpRows], const scalar_t* rows,
                                                  const scalar_t* mine, int head_dim) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) dot[r] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < head_dim; d += kVec) {
      const Vec<scalar_t, kVec> x = load_vec<scalar_t, kVec>(mine + d);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const Vec<scalar_t, kVec> y = load_vec<scalar_t, kVec>(rows + r * Layout::kPitch + d);
#pragma unroll
        for (int i = 0; i < kVec; ++i) dot[r] += to_float(x.v[i]) * to_float(y.v[i]);
      }
    }
  }
};
