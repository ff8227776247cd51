// One block of attention_backward on tensor cores: a stationary row tile, past which tiles are
// streamed.
//
// For dK and dV the stationary rows are keys and queries are streamed; for dQ it is the reverse.
// `a` and `b` are K and V (or Q and dO) of the rows, `x` and `y` are Q and dO (or K and V) of the
// stream: scores are a x^T, dP is b y^T, and
//
//   first += dS x        dK, or dQ
//   second += P y        dV
//
// A warp owns 16 rows. The accumulators of the scores and dP have the register layout of an A
// operand, so P and dS never leave registers (common/mma.cuh).
#pragma once

#include "attention_backward/attention_backward_problem.cuh"
#include "common/mma.cuh"

template <int kHeadDim, int kWarps, int kStream, int kStages, bool kOfKeys>
struct MmaBackward {
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRows = 16 * kWarps;
  // Result columns per pass: two accumulators of more than 128 columns do not fit in registers.
  static constexpr int kColumns = kOfKeys && kHeadDim > 128 ? 128 : kHeadDim;
  static constexpr int kRowTile = kRows * Layout::kPitch, kTile = kStream * Layout::kPitch;
  static constexpr int kSharedBytes =
      2 * (kRowTile + kStages * kTile) * static_cast<int>(sizeof(scalar_t)) +
      2 * (kRows + kStages * kStream) * static_cast<int>(sizeof(float));

  float first[kColumns / 8][4];
  float second[kOfKeys ? kColumns / 8 : 1][4];

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        first[d][i] = 0.0f;
        if constexpr (kOfKeys) second[d][i] = 0.0f;
      }
  }

  // Processes the row tile from row_begin on against rows [begin, end) of the stream. `lse` and
  // `delta` are those of this head's queries; `column` is the first result column.
  template <typename AnySequence>
  __device__ __forceinline__ void run(unsigned char* smem_bytes, const AnySequence& sequence,
                                      const ScoreRule& rule, const Rows& a, const Rows& b,
                                      const Rows& x, const Rows& y, const float* lse,
                                      const float* delta, int64_t stat_stride, int row_begin,
                                      int begin, int end, int column) {
    scalar_t* const smem_a = reinterpret_cast<scalar_t*>(smem_bytes);
    scalar_t* const smem_b = smem_a + kRowTile;
    scalar_t* const smem_stream = smem_b + kRowTile;
    float* const smem_stats = reinterpret_cast<float*>(smem_stream + kStages * 2 * kTile);
    const int tiles = begin < end ? (end - begin + kStream - 1) / kStream : 0;
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
    VisibleTiles<AnySequence::kHasPattern, decltype(hidden_of)> loaded(hidden_of, tiles);
    auto current = loaded;
#pragma unroll 1
    for (int turn = 1 - kStages; current.has_turn(turn); ++turn) {  // turns before 0 only load
      // SAFETY: ensures that all warps are done with the previous tile, whose stage the next load
      // overwrites; with two stages it also makes this tile's copies visible.
      if (turn >= 0) {
        if constexpr (kStages == 2) cp_async_wait<0>();
        __syncthreads();
      }
      const int later = turn + kStages - 1, next = loaded.at(later);
      if (loaded.has_turn(later)) {
        scalar_t* const to = smem_stream + later % kStages * 2 * kTile;
        load_rows<kHeadDim, kStream, kThreads>(to, x, begin + next * kStream);
        load_rows<kHeadDim, kStream, kThreads>(to + kTile, y, begin + next * kStream);
        if constexpr (kOfKeys)
          load_statistics<kStream, kThreads>(smem_stats + later % kStages * 2 * kStream, lse, delta,
                                             stat_stride, begin + next * kStream, sequence.num_q);
        loaded.next();
      }
      cp_async_commit();
      if (turn < 0) continue;
      if constexpr (kStages == 1) {
        cp_async_wait<0>();
        __syncthreads();
      }
      const scalar_t* const smem_x = smem_stream + turn % kStages * 2 * kTile;
      update(smem_a, smem_b, smem_x, smem_x + kTile,
             kOfKeys ? smem_stats + turn % kStages * 2 * kStream : smem_stats, sequence,
             current.hidden(), rule, row_begin, begin + current.at(turn) * kStream, column);
      current.next();
    }
    cp_async_wait<0>();
  }

  __device__ __forceinline__ void store(const GradientRows& to_first, const GradientRows& to_second,
                                        int row_begin, int column) const {
    const int row = row_begin + warp_idx() * 16 + lane_idx() / 4;
#pragma unroll
    for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = column + d * 8 + lane_idx() % 4 * 2;
        to_first.pair(row + 8 * half, at, first[d][2 * half], first[d][2 * half + 1]);
        if constexpr (kOfKeys)
          to_second.pair(row + 8 * half, at, second[d][2 * half], second[d][2 * half + 1]);
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
                                         int stream_begin, int column) {
    float s[kStream / 8][4], dp[kStream / 8][4];
    multiply(s, smem_a, smem_x);
    multiply(dp, smem_b, smem_y);
    if (rule.inner != 0.0f)
      differentiate<true>(s, dp, stats, sequence, hidden, rule, row_begin, stream_begin);
    else
      differentiate<false>(s, dp, stats, sequence, hidden, rule, row_begin, stream_begin);
    accumulate(first, dp, smem_x, column);
    if constexpr (kOfKeys) accumulate(second, s, smem_y, column);
  }

  // Turns scores into P and dP into dS, in place.
  template <bool kSoftcap, typename AnySequence>
  __device__ static __forceinline__ void differentiate(float (&s)[kStream / 8][4],
                                                       float (&dp)[kStream / 8][4],
                                                       const float* stats,
                                                       const AnySequence& sequence, Hides hidden,
                                                       const ScoreRule& rule, int row_begin,
                                                       int stream_begin) {
    const int row = warp_idx() * 16 + lane_idx() / 4;
#pragma unroll
    for (int j = 0; j < kStream / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int my_row = row + i / 2 * 8, my_column = j * 8 + lane_idx() % 4 * 2 + i % 2;
        const int query = kOfKeys ? stream_begin + my_column : row_begin + my_row;
        const int key = kOfKeys ? row_begin + my_row : stream_begin + my_column;
        const int stat = kOfKeys ? my_column : my_row;
        const Gradient g = gradient<kSoftcap>(rule, s[j][i], dp[j][i], stats[stat],
                                              stats[(kOfKeys ? kStream : kRows) + stat],
                                              sees(sequence, hidden, query, key));
        s[j][i] = g.p;
        dp[j][i] = g.ds;
      }
  }

  // Computes c = rows x stream^T.
  __device__ static __forceinline__ void multiply(float (&c)[kStream / 8][4],
                                                  const scalar_t* smem_rows,
                                                  const scalar_t* smem_cols) {
#pragma unroll
    for (int j = 0; j < kStream / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[j][i] = 0.0f;
    const int lane_idx = recomputed(threadIdx.x % kWarpSize);
    const int a_row = warp_idx() * 16 + lane_idx % 16, b_row = lane_idx % 8 + lane_idx / 16 * 8;
    const scalar_t* const a = smem_rows + a_row * Layout::kPitch;
    const scalar_t* const b = smem_cols + b_row * Layout::kPitch;
    const int a_swizzle = Layout::swizzle(a_row) ^ (lane_idx / 16);
    const int b_swizzle = Layout::swizzle(b_row) ^ (lane_idx / 8 % 2);
#pragma unroll(kHeadDim > 128 ? 4 : kHeadDim / 16)
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t frag_a[4];
      ldmatrix_x4(frag_a, a + ((2 * step) ^ a_swizzle) * kVec);
#pragma unroll
      for (int j = 0; j < kStream / 16; ++j) {
        uint32_t frag[4];
        ldmatrix_x4(frag, b + j * 16 * Layout::kPitch + ((2 * step) ^ b_swizzle) * kVec);
        const uint32_t left[2] = {frag[0], frag[1]}, right[2] = {frag[2], frag[3]};
        mma_m16n8k16<scalar_t>(c[2 * j], frag_a, left);
        mma_m16n8k16<scalar_t>(c[2 * j + 1], frag_a, right);
      }
    }
  }

  // Computes sum += weights x stream for the columns from `column` on.
  template <int kCount>
  __device__ static __forceinline__ void accumulate(float (&sum)[kCount][4],
                                                    const float (&weights)[kStream / 8][4],
                                                    const scalar_t* smem_values, int column) {
    const int lane_idx = recomputed(threadIdx.x % kWarpSize);
    const scalar_t* const values = smem_values + lane_idx % 16 * Layout::kPitch;
    const int swizzle = Layout::swizzle(lane_idx % 16) ^ (lane_idx / 16);
#pragma unroll
    for (int j = 0; j < kStream / 16; ++j) {
      uint32_t frag_w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        frag_w[i] = pack2<scalar_t>(weights[2 * j + i / 2][i % 2 * 2],
                                    weights[2 * j + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int d = 0; d < kCount / 2; ++d) {
        uint32_t frag[4];
        ldmatrix_x4_trans(
            frag, values + j * 16 * Layout::kPitch + ((column / kVec + 2 * d) ^ swizzle) * kVec);
        const uint32_t left[2] = {frag[0], frag[1]}, right[2] = {frag[2], frag[3]};
        mma_m16n8k16<scalar_t>(sum[2 * d], frag_w, left);
        mma_m16n8k16<scalar_t>(sum[2 * d + 1], frag_w, right);
      }
    }
  }
};
