// Flash attention on tensor cores, for 16-bit inputs: one CTA processes one tile of query rows
// against any range of keys.
//
// kWarpsM x kWarpsN warps. A warp owns 16 kRowTiles rows and kKeys / kWarpsN keys of each tile.
// With kWarpsN = 1 the warps split the rows (prefill); with kWarpsM = 1 they split the keys
// (decode) and merge their results at the end. Heads whose O does not fit into the registers have
// kColumnWarps warps for the same rows and keys: each computes all of S, which costs less than
// exchanging P, and its own columns of O. cp.async loads Q, K and V to shared memory; K and V
// have kStages stages, so kStages - 1 tiles are in flight while one is in use.
//
// Per tile: S = Q K^T in float; P = 2^(S - running max), rounded to scalar_t; O = O 2^(old max -
// new max) + P V in float. The accumulators of S have the register layout of P V's A operand, so P
// never leaves registers. Lane 4 g + t holds rows g and g + 8 of each row tile (common/mma.cuh).
#pragma once

#include "common/attention.cuh"
#include "common/mma.cuh"

template <int kHeadDim, int kWarpsM, int kWarpsN, int kRowTiles, int kKeys, int kStages,
          int kColumnWarps = 1>
struct MmaAttention {
  using Layout = TileLayout<kHeadDim>;
  static constexpr int kThreads = kWarpsM * kWarpsN * kColumnWarps * kWarpSize;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kWarpsM;
  static constexpr int kWarpKeys = kKeys / kWarpsN;
  static constexpr int kColumns = kHeadDim / kColumnWarps;  // columns of V and O per warp
  static constexpr int kTile = kKeys * Layout::kPitch;      // elements per tile of K or V
  static constexpr int kSharedBytes =
      (kRows * Layout::kPitch + kStages * 2 * kTile) * static_cast<int>(sizeof(scalar_t));
  static_assert(kWarpKeys % 16 == 0, "a warp multiplies 16 keys at a time");
  static_assert(kWarpsN == 1 || kColumnWarps == 1, "warps split the keys or the columns");

  float o[kRowTiles][kColumns / 8][4];
  float max[kRowTiles][2];  // running maximum, in log2 units
  float sum[kRowTiles][2];  // this lane's share of the running sum of P

  // Processes keys [begin, end) for the kRows rows from row_begin on; `smem` holds kSharedBytes.
  template <typename Rows>
  __device__ __forceinline__ void run(scalar_t* smem, const Queries& queries, const KeyValues& kv,
                                      const Rows& rows, const ScoreRule& rule, int row_begin,
                                      int begin, int end) {
    scalar_t* const smem_kv = smem + kRows * Layout::kPitch;
    const int warp_row = row_begin + warp_m() * kWarpRows;
    start();
    // Range of keys that the warp's rows see. A warp past the last row is idle.
    const int low = rows.first_key(warp_row), low_last = rows.last_common_key(warp_row);
    const int high_last = rows.last_key(min(warp_row + kWarpRows, rows.count) - 1);
    const bool has_rows = warp_row < rows.count;

    const int first = begin / kKeys * kKeys;
    const int num_tiles = begin < end ? (end - first + kKeys - 1) / kKeys : 0;
    load_queries<kHeadDim, kRows, kThreads>(smem, queries, rows, row_begin);
#pragma unroll 1
    for (int tile = 1 - kStages; tile < num_tiles; ++tile) {  // the first iterations only load
      if (tile >= 0) {
        cp_async_wait<kStages - 2>();
        // SAFETY: makes every thread's copies of this tile visible, and ensures that all warps are
        // done with the previous tile, whose stage the next load overwrites.
        __syncthreads();
      }
      const auto is_hidden = [&](int tile) {
        const int last_row = min(row_begin + kRows, rows.count) - 1;
        return rows.skips(row_begin, last_row, first + tile * kKeys, kKeys);
      };
      const int next = tile + kStages - 1;
      load(smem_kv, kv, next, Rows::kHasPattern && is_hidden(next) ? 0 : num_tiles, first, begin,
           end);
      if (Rows::kHasPattern && is_hidden(tile)) continue;
      const int key = first + tile * kKeys + warp_n() * kWarpKeys;
      if (tile >= 0 && has_rows && key <= high_last && key + kWarpKeys > low) {
        const bool is_whole = key + kWarpKeys - 1 <= low_last && rows.sees(high_last, key);
        const scalar_t* smem_k = smem_kv + tile % kStages * 2 * kTile;
        update(smem, smem_k, smem_k + kTile, rows, rule, warp_row, key, is_whole);
      }
    }
    cp_async_wait<0>();
  }

  // Passes the finished rows to a writer such as Output.
  template <typename Writer>
  __device__ __forceinline__ void finish(scalar_t* smem, const RowRule& rows, int row_begin,
                                         const Writer& writer) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[r][half] += __shfl_xor_sync(kFullMask, sum[r][half], 1);
        sum[r][half] += __shfl_xor_sync(kFullMask, sum[r][half], 2);
      }
    if constexpr (kWarpsN > 1) {
      merge(reinterpret_cast<float*>(smem), rows, row_begin, writer);
    } else {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row_begin + warp_m() * kWarpRows + r * 16 + half * 8 + lane_idx() / 4;
          if (row >= rows.count) continue;
          if (lane_idx() % 4 == 0 && first_column() == 0)
            writer.row(row, max[r][half], sum[r][half]);
          const float factor = writer.factor(row, max[r][half], sum[r][half]);
          store_row(writer, writer.at(row), o[r], half, factor);
        }
    }
  }

 private:
  __device__ static __forceinline__ int lane_idx() { return threadIdx.x % kWarpSize; }
  __device__ static __forceinline__ int warp_m() { return threadIdx.x / kWarpSize % kWarpsM; }
  __device__ static __forceinline__ int warp_n() {
    return kColumnWarps > 1 ? 0 : threadIdx.x / kWarpSize / kWarpsM;
  }
  // First column of V and O that the warp computes.
  __device__ static __forceinline__ int first_column() {
    return kColumnWarps > 1 ? threadIdx.x / kWarpSize / kWarpsM * kColumns : 0;
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max[r][half] = -kInf;
        sum[r][half] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[r][d][i] = 0.0f;
    }
  }

  // Every call commits a group, even if empty, so the waits can count groups.
  __device__ static __forceinline__ void load(scalar_t* smem_kv, const KeyValues& kv, int tile,
                                              int num_tiles, int first, int begin, int end) {
    if (tile < num_tiles) {
      scalar_t* smem_k = smem_kv + tile % kStages * 2 * kTile;
      load_tile<kHeadDim, kKeys, kThreads>(smem_k, smem_k + kTile, kv, first + tile * kKeys, begin,
                                           end);
    }
    cp_async_commit();
  }

  // Processes the warp's share of a key tile: kWarpKeys keys from `key` on.
  template <typename Rows>
  __device__ __forceinline__ void update(const scalar_t* smem_q, const scalar_t* smem_k,
                                         const scalar_t* smem_v, const Rows& rows,
                                         const ScoreRule& rule, int warp_row, int key,
                                         bool is_whole) {
    float s[kRowTiles][kWarpKeys / 8][4];
    multiply_qk(s, smem_q, smem_k);
    if (rule.inner != 0.0f) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[r][j][i] = rule.cap(s[r][j][i]);
    }
    if (!is_whole) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + r * 16 + half * 8 + lane_idx() / 4;
          const int last_key = rows.last_key(row);
#pragma unroll
          for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (!rows.sees(row, last_key, key + j * 8 + lane_idx() % 4 * 2 + i))
                s[r][j][2 * half + i] = -kInf;
        }
    }
    if constexpr (Rows::kHasPattern) mask_pattern(s, rows, warp_row, key);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      softmax<0>(s[r], r, rule.factor);
      softmax<1>(s[r], r, rule.factor);
    }
    multiply_pv(s, smem_v);
  }

  template <typename Rows>
  __device__ static __forceinline__ void mask_pattern(float (&s)[kRowTiles][kWarpKeys / 8][4],
                                                      const Rows& rows, int warp_row, int key) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!rows.in_pattern(warp_row + r * 16 + i / 2 * 8 + lane_idx() / 4,
                               key + j * 8 + lane_idx() % 4 * 2 + i % 2))
            s[r][j][i] = -kInf;
  }

  __device__ static __forceinline__ void multiply_qk(float (&s)[kRowTiles][kWarpKeys / 8][4],
                                                     const scalar_t* smem_q,
                                                     const scalar_t* smem_k) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[r][j][i] = 0.0f;
    const int lane_idx = recomputed(threadIdx.x % kWarpSize);
    const int q_row = warp_m() * kWarpRows + lane_idx % 16, q_word = lane_idx / 16;
    const int k_row = warp_n() * kWarpKeys + lane_idx % 8 + lane_idx / 16 * 8,
              k_word = lane_idx / 8 % 2;
    const scalar_t* q = smem_q + q_row * Layout::kPitch;
    const scalar_t* k = smem_k + k_row * Layout::kPitch;
    const int q_swizzle = Layout::swizzle(q_row) ^ q_word,
              k_swizzle = Layout::swizzle(k_row) ^ k_word;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t frag_q[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
        ldmatrix_x4(frag_q[r], q + r * 16 * Layout::kPitch + ((2 * step) ^ q_swizzle) * kVec);
#pragma unroll
      for (int j = 0; j < kWarpKeys / 16; ++j) {
        uint32_t frag[4];
        ldmatrix_x4(frag, k + j * 16 * Layout::kPitch + ((2 * step) ^ k_swizzle) * kVec);
        const uint32_t left[2] = {frag[0], frag[1]}, right[2] = {frag[2], frag[3]};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_m16n8k16<scalar_t>(s[r][2 * j], frag_q[r], left);
          mma_m16n8k16<scalar_t>(s[r][2 * j + 1], frag_q[r], right);
        }
      }
    }
  }

  // Turns the scores of half a row tile (rows g or g + 8) into P, and updates max, sum and O.
  template <int kHalf>
  __device__ __forceinline__ void softmax(float (&s)[kWarpKeys / 8][4], int r, float factor) {
    float top = s[0][2 * kHalf];
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j)
      top = fmaxf(top, fmaxf(s[j][2 * kHalf], s[j][2 * kHalf + 1]));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
    const float new_max = fmaxf(max[r][kHalf], top * factor);
    const float base = finite_or_zero(new_max);
    const float rescale = exp2_approx(max[r][kHalf] - base);
    max[r][kHalf] = new_max;
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
      for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i) {
        s[j][i] = exp2_approx(fmaf(s[j][i], factor, -base));
        part += s[j][i];
      }
    sum[r][kHalf] = sum[r][kHalf] * rescale + part;
#pragma unroll
    for (int d = 0; d < kColumns / 8; ++d) {
      o[r][d][2 * kHalf] *= rescale;
      o[r][d][2 * kHalf + 1] *= rescale;
    }
  }

  __device__ __forceinline__ void multiply_pv(const float (&p)[kRowTiles][kWarpKeys / 8][4],
                                              const scalar_t* smem_v) {
    const int lane_idx = recomputed(threadIdx.x % kWarpSize);
    const int v_row = warp_n() * kWarpKeys + lane_idx % 16;
    const scalar_t* v = smem_v + v_row * Layout::kPitch;
    const int v_swizzle = Layout::swizzle(v_row) ^ (lane_idx / 16);
    const int first_word = first_column() / kVec;
#pragma unroll
    for (int j = 0; j < kWarpKeys / 16; ++j) {
      uint32_t frag_p[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          frag_p[r][i] =
              pack2<scalar_t>(p[r][2 * j + i / 2][i % 2 * 2], p[r][2 * j + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int d = 0; d < kColumns / 16; ++d) {
        uint32_t frag[4];
        ldmatrix_x4_trans(frag,
                          v + j * 16 * Layout::kPitch + ((first_word + 2 * d) ^ v_swizzle) * kVec);
        const uint32_t left[2] = {frag[0], frag[1]}, right[2] = {frag[2], frag[3]};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_m16n8k16<scalar_t>(o[r][2 * d], frag_p[r], left);
          mma_m16n8k16<scalar_t>(o[r][2 * d + 1], frag_p[r], right);
        }
      }
    }
  }

  template <typename Writer, typename T>
  __device__ static __forceinline__ void store_row(const Writer& writer, T* out,
                                                   const float (&row_o)[kColumns / 8][4], int half,
                                                   float factor) {
    const int column = first_column() + lane_idx() % 4 * 2;
    if (writer.is_vector) {
#pragma unroll
      for (int d = 0; d < kColumns / 8; ++d)
        writer.pair(out, d * 8 + column, row_o[d][2 * half] * factor,
                    row_o[d][2 * half + 1] * factor);
    } else {
#pragma unroll
      for (int d = 0; d < kColumns / 8; ++d)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          writer.single(out, d * 8 + column + i, row_o[d][2 * half + i] * factor);
    }
  }

  // Warps that split the keys of these rows store their partials to shared memory; all threads then
  // sum the partials in a fixed order.
  template <typename Writer>
  __device__ __forceinline__ void merge(float* smem, const RowRule& rows, int row_begin,
                                        const Writer& writer) {
    // Maxima [kWarpsN][kRows], sums [kWarpsN][kRows], then O [kWarpsN][kRows][kHeadDim].
    float* const smem_max = smem;
    float* const smem_sum = smem_max + kWarpsN * kRows;
    float* const smem_o = smem_sum + kWarpsN * kRows;
    static_assert(kWarpsN * kRows * (2 + kHeadDim) * 4 <= kSharedBytes,
                  "the merge fits in the tiles");
    __syncthreads();  // SAFETY: other warps may still read the last tile, which this overwrites.
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m() * kWarpRows + r * 16 + half * 8 + lane_idx() / 4;
        const int partial = warp_n() * kRows + row;
        if (lane_idx() % 4 == 0) {
          smem_max[partial] = max[r][half];
          smem_sum[partial] = sum[r][half];
        }
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d)
          store_vec(smem_o + partial * kHeadDim + d * 8 + lane_idx() % 4 * 2,
                    Vec<float, 2>{o[r][d][2 * half], o[r][d][2 * half + 1]});
      }
    __syncthreads();
    constexpr int kPairs = kHeadDim / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kPairs; i += kThreads) {
      const int row = i / kPairs, column = i % kPairs * 2;
      if (row_begin + row >= rows.count) break;
      float top = -kInf, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarpsN; ++w) top = fmaxf(top, smem_max[w * kRows + row]);
#pragma unroll
      for (int w = 0; w < kWarpsN; ++w) {
        const int partial = w * kRows + row;
        const float weight = exp2_approx(smem_max[partial] - finite_or_zero(top));
        const Vec<float, 2> part = load_vec<float, 2>(smem_o + partial * kHeadDim + column);
        total += smem_sum[partial] * weight;
        x += part.v[0] * weight;
        y += part.v[1] * weight;
      }
      if (column == 0) writer.row(row_begin + row, top, total);
      const float factor = writer.factor(row_begin + row, top, total);
      auto* out = writer.at(row_begin + row);
      writer.single(out, column, x * factor);
      writer.single(out, column + 1, y * factor);
    }
  }
};
