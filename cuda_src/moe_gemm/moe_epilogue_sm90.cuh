// The epilogue of moe_gemm_sm90.cu's consumers.
//
// The weight is wgmma's A and the tokens are its B, so D is (features, tokens) and few tokens take
// little time. A warpgroup has two accumulators: gate and up of the same 64 features, or 128
// features. With one m-tile it has 64 features or, mixed, gate and up of 32.
#pragma once

#include "common/codes.cuh"
#include "moe_gemm/moe_activation.cuh"
#include "common/pipeline_state.cuh"
#include "moe_gemm/moe_scheduler_sm90.cuh"

struct MoeEpilogue {
  const scalar_t* bias;   // (E, R), or null
  scalar_t* out;          // with kQuantizesOut: the codes
  bool scatters;          // false: rows of out are sorted by expert
  int num_rows, columns;  // rows of the weight, columns of out
  MoeGate gate;
  float* out_scales;  // with kQuantizesOut: (P, columns / 128)

  __device__ __forceinline__ bool is_gated() const { return gate.is_gated(); }
  __device__ __forceinline__ bool is_mixed() const { return kMixesRows && is_gated(); }
  __device__ __forceinline__ int warpgroup_columns() const {
    return kMmaTiles * kMmaM / (is_gated() ? 2 : 1);
  }

  __device__ __forceinline__ float bias_of(int expert, int row) const {
    if (bias == nullptr || row >= num_rows) return 0.0f;
    return to_float(bias[static_cast<int64_t>(expert) * num_rows + row]);
  }
};

using MoeSums = float[kMmaTiles][kTokens / 2];

// Bytes per row of staging, and the byte offset of features 8 * part to 8 * part + 7 of a row: a
// swizzle, so that the lanes of a warp use different banks.
template <bool kIsMixed>
constexpr int kStagingRow = kIsMixed ? kSlabRowBytes / 2 : kSlabRowBytes;
template <bool kIsMixed>
__device__ __forceinline__ int staging_place(int row, int part) {
  const int chunk = part ^ (kIsMixed ? row / 2 & 3 : row & 7);
  return row * kStagingRow<kIsMixed> + (chunk << 4);
}

// Writes 64 features of the tile's tokens, from token `first` on, to staging, which transposes them
// into rows. With kIsMixed it writes 32 features, which are in each lane's rows g. Ends with a
// barrier of the warpgroup.
template <bool kIsMixed = false>
__device__ __forceinline__ void stage(MoeShared& smem, int warpgroup, int first, int count,
                                      const float (&acc)[kTokens / 2]) {
  const unsigned staging = smem_address(smem.staging[warpgroup]);
  const int thread = threadIdx.x % 128, lane_idx = thread % kWarpSize, warp_idx = thread / 32;
  constexpr int kStep = kIsMixed ? 32 : 16;  // tokens of four matrices of 8 tokens by 8 features
  // The matrices are 2 x 2, or with kIsMixed one below the other.
  const int row = kIsMixed ? lane_idx : lane_idx % 8 + lane_idx / 16 * 8;
  const int part = kIsMixed ? warp_idx : warp_idx * 2 + lane_idx / 8 % 2;
  const unsigned to = staging + staging_place<kIsMixed>(row, part);
#pragma unroll
  for (int i = 0; i < kStagingTokens / kStep; ++i) {
    if (first + i * kStep >= kTokens) break;  // past the end of the last part
    const float* v = acc + first / 2 + kStep / 2 * i;
    if (first + i * kStep >= count) continue;
    const auto pair = [&](int j) { return pack2<scalar_t>(v[j], v[j + 1]); };
    const unsigned at = to + i * kStep * kStagingRow<kIsMixed>;
    if constexpr (kIsMixed)
      stmatrix_x4_transposed(at, pair(0), pair(4), pair(8), pair(12));
    else
      stmatrix_x4_transposed(at, pair(0), pair(2), pair(4), pair(6));
  }
  named_barrier_sync<128>(1 + warpgroup);
}

// Returns eight features of a row of staging, from feature 8 * part on.
template <bool kIsMixed = false>
__device__ __forceinline__ Vec<scalar_t, 8> staged(const MoeShared& smem, int warpgroup, int row,
                                                   int part) {
  const unsigned char* from = smem.staging[warpgroup] + staging_place<kIsMixed>(row, part);
  return load_vec<scalar_t, 8>(reinterpret_cast<const scalar_t*>(from));
}

// Writes 64 features of the tile's tokens, or with kIsMixed 32.
template <bool kIsMixed>
__device__ __forceinline__ void store(const MoeEpilogue& e, MoeShared& smem,
                                      const MoeTileRecord& record, int warpgroup, int column,
                                      const float (&acc)[kTokens / 2]) {
  const int count = record.tile.count, thread = threadIdx.x % 128;
#pragma unroll
  for (int first = 0; first < kTokens; first += kStagingTokens) {
    if (first >= count) break;
    stage<kIsMixed>(smem, warpgroup, first, count, acc);
    constexpr int kParts = kStagingRow<kIsMixed> / 16;
    const int part = thread % kParts;
    if (column + part * 8 < e.columns) {
      for (int i = thread / kParts; i < min(count - first, kStagingTokens); i += 128 / kParts) {
        const int to_row = e.scatters ? record.rows[first + i] : record.tile.first + first + i;
        scalar_t* out = e.out + static_cast<int64_t>(to_row) * e.columns;
        store_vec(out + column + part * 8, staged<kIsMixed>(smem, warpgroup, i, part));
      }
    }
    named_barrier_sync<128>(1 + warpgroup);  // SAFETY: the next results overwrite staging.
  }
}

// Writes 64 features of the tile's tokens as the codes that quantize_rows.cu makes of the rounded
// results. The other warpgroup has the other 64 features of each scale.
__device__ __forceinline__ void quantize(const MoeEpilogue& e, MoeShared& smem,
                                         MoeTileRecord& record, int warpgroup,
                                         const float (&acc)[kTokens / 2]) {
  constexpr int kRows = kStagingTokens / 16;  // rows of staging per thread
  const int count = record.tile.count, thread = threadIdx.x % 128, part = thread % 8;
  float* own = record.peaks(warpgroup);
  const float* others = record.peaks(1 - warpgroup);
  unsigned char* codes =
      reinterpret_cast<unsigned char*>(e.out) + record.tile.row + warpgroup * kMmaM + part * 8;
#pragma unroll
  for (int first = 0; first < kTokens; first += kStagingTokens) {
    if (first >= count) break;
    stage(smem, warpgroup, first, count, acc);
    Vec<scalar_t, 8> x[kRows];
    float peaks[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = staged(smem, warpgroup, thread / 8 + i * 16, part);
      peaks[i] = lanes_max_or_nan<8>(peak_of(x[i], 0.0f));
      const int token = first + thread / 8 + i * 16;
      if (part == 0 && token < count) own[token] = peaks[i];
    }
    // SAFETY: all peaks are written, and the next results may overwrite staging.
    named_barrier_sync<kConsumerThreads>(1 + kWarpgroups);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int token = first + thread / 8 + i * 16;
      if (token >= count) break;
      const float peak = max_or_nan(peaks[i], others[token]);
      const int64_t row = record.tile.first + token;
      store_codes<E4m3>(codes + row * e.columns, x[i], code_factor<E4m3>(peak));
      if (part == 0 && warpgroup == 0)
        e.out_scales[row * (e.columns / 128) + record.tile.row / 128] = code_scale<E4m3>(peak);
    }
  }
}

// Calls f(j) for the sums of the tile's tokens. acc[m][j] belongs to this thread's first row if j %
// 4 < 2, else to the row eight below.
template <typename F>
__device__ __forceinline__ void for_each_sum(int count, F f) {
#pragma unroll
  for (int i = 0; i < kTokens / 8; ++i) {
    if (i * 8 >= count) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) f(4 * i + j);
  }
}

__device__ __forceinline__ void add_bias(const MoeEpilogue& e, const MoeTile& tile, int warpgroup,
                                         MoeSums& acc) {
  const int thread = threadIdx.x % 128, lane_idx = thread % kWarpSize;
  const int tile_rows = e.is_mixed() ? 8 : 16;  // rows of a warp's row tile, or of its gate
  const int row =
      tile.row + warpgroup * e.warpgroup_columns() + thread / kWarpSize * tile_rows + lane_idx / 4;
  float bias[kMmaTiles][2];
#pragma unroll
  for (int m = 0; m < kMmaTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bias[m][half] = e.bias_of(tile.expert, row + m * (e.is_gated() ? e.columns : kMmaM) +
                                                 half * (e.is_mixed() ? e.columns : 8));
#pragma unroll
  for (int m = 0; m < kMmaTiles; ++m)
    for_each_sum(tile.count, [&](int j) { acc[m][j] += bias[m][j / 2 % 2]; });
}

// Calls f(gate, up) for the tile's pairs of sums and replaces those of gate by the results.
template <typename F>
__device__ __forceinline__ void combine_pairs(int count, MoeSums& acc, F f) {
  for_each_sum(count, [&](int j) {
    if (!kMixesRows)
      acc[0][j] = f(acc[0][j], acc[kMmaTiles - 1][j]);
    else if (j % 4 < 2)
      acc[0][j] = f(acc[0][j], acc[0][j + 2]);
  });
}

// Applies bias, activation and pair weight in place; with an activation, results are in acc[0].
__device__ __forceinline__ void finish(const MoeEpilogue& e, const MoeTileRecord& record,
                                       int warpgroup, MoeSums& acc) {
  const int count = record.tile.count;
  if (e.bias != nullptr) add_bias(e, record.tile, warpgroup, acc);
  // A loop each: a test for every sum would take longer than the activation.
  if (e.gate.activation == kSwiglu)
    combine_pairs(count, acc, [](float gate, float up) { return silu(gate) * up; });
  else if (e.gate.activation == kGeglu)
    combine_pairs(count, acc, [](float gate, float up) { return gelu_tanh(gate) * up; });
  else if (e.is_gated())
    combine_pairs(count, acc, [&](float gate, float up) { return e.gate.clamped(gate, up); });
  if (!e.scatters) return;
#pragma unroll
  for (int i = 0; i < kTokens / 8; ++i) {
    if (i * 8 >= count) break;
    const auto w = load_vec<float, 2>(&record.weights[i * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
    for (int m = 0; m < kMmaTiles; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[m][4 * i + j] *= w.v[j % 2];
  }
}
