// The epilogue of moe_gemm_sm90.cu's consumers.
//
// The weight is wgmma's A and the tokens are its B, so D is (features, tokens) and few tokens take
// little time. A warpgroup has two accumulators: gate and up of the same 64 features, or 128
// features. With one m-tile it has one accumulator and no gate.
#pragma once

#include "moe_gemm/moe_activation.cuh"
#include "common/pipeline_state.cuh"
#include "moe_gemm/moe_scheduler_sm90.cuh"

struct MoeEpilogue {
  const scalar_t* bias;  // (E, R), or null
  scalar_t* out;
  bool scatters;          // false: rows of out are sorted by expert
  int num_rows, columns;  // rows of the weight, columns of out
  MoeGate gate;

  __device__ __forceinline__ bool is_gated() const { return gate.is_gated(); }

  __device__ __forceinline__ float bias_of(int expert, int row) const {
    if (bias == nullptr || row >= num_rows) return 0.0f;
    return to_float(bias[static_cast<int64_t>(expert) * num_rows + row]);
  }
};

using MoeSums = float[kMmaTiles][kTokens / 2];

// Writes 64 features of the tile's tokens through shared memory, which transposes them into rows.
__device__ __forceinline__ void store(const MoeEpilogue& e, MoeShared& smem,
                                      const MoeTileRecord& record, int warpgroup, int column,
                                      const float (&acc)[kTokens / 2]) {
  const int count = record.tile.count;
  const unsigned staging = smem_address(smem.staging[warpgroup]);
  const int thread = threadIdx.x % 128, lane_idx = thread % kWarpSize, warp_idx = thread / 32;
  const int barrier = 1 + warpgroup;
  const int row = lane_idx % 8 + lane_idx / 16 * 8;  // matrices: 8 tokens by 8 features, 2 x 2
  const int chunk = (warp_idx * 2 + lane_idx / 8 % 2) ^ (row & 7);
  const unsigned to = staging + row * kSlabRowBytes + (chunk << 4);
#pragma unroll
  for (int first = 0; first < kTokens; first += kStagingTokens) {
    if (first >= count) break;
#pragma unroll
    for (int i = 0; i < kStagingTokens / 16; ++i) {
      if (first + i * 16 >= kTokens) break;  // past the end of the last part
      const float* v = acc + first / 2 + 8 * i;
      if (first + i * 16 < count)
        stmatrix_x4_transposed(to + i * 16 * kSlabRowBytes, pack2<scalar_t>(v[0], v[1]),
                               pack2<scalar_t>(v[2], v[3]), pack2<scalar_t>(v[4], v[5]),
                               pack2<scalar_t>(v[6], v[7]));
    }
    named_barrier_sync<128>(barrier);
    const int part = thread % 8;
    if (column + part * 8 < e.columns) {
      for (int i = thread / 8; i < min(count - first, kStagingTokens); i += 16) {
        const unsigned char* from =
            smem.staging[warpgroup] + i * kSlabRowBytes + ((part ^ (i & 7)) << 4);
        const int to_row = e.scatters ? record.rows[first + i] : record.tile.first + first + i;
        scalar_t* out = e.out + static_cast<int64_t>(to_row) * e.columns;
        store_vec(out + column + part * 8,
                  load_vec<scalar_t, 8>(reinterpret_cast<const scalar_t*>(from)));
      }
    }
    named_barrier_sync<128>(barrier);  // SAFETY: the next results overwrite staging.
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
  const int row = tile.row + thread / kWarpSize * 16 + lane_idx / 4 +
                  warpgroup * (e.is_gated() ? 1 : kMmaTiles) * kMmaM;
  float bias[kMmaTiles][2];
#pragma unroll
  for (int m = 0; m < kMmaTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      bias[m][half] =
          e.bias_of(tile.expert, row + m * (e.is_gated() ? e.columns : kMmaM) + 8 * half);
#pragma unroll
  for (int m = 0; m < kMmaTiles; ++m)
    for_each_sum(tile.count, [&](int j) { acc[m][j] += bias[m][j / 2 % 2]; });
}

// Applies bias, activation and pair weight in place; with an activation, results are in acc[0].
__device__ __forceinline__ void finish(const MoeEpilogue& e, const MoeTileRecord& record,
                                       int warpgroup, MoeSums& acc) {
  const int count = record.tile.count;
  if (e.bias != nullptr) add_bias(e, record.tile, warpgroup, acc);
  // A loop each: a test for every sum would take longer than the activation.
  if (e.gate.activation == kSwiglu)
    for_each_sum(count, [&](int j) { acc[0][j] = silu(acc[0][j]) * acc[kMmaTiles - 1][j]; });
  else if (e.gate.activation == kGeglu)
    for_each_sum(count, [&](int j) { acc[0][j] = gelu_tanh(acc[0][j]) * acc[kMmaTiles - 1][j]; });
  else if (e.is_gated())
    for_each_sum(count,
                 [&](int j) { acc[0][j] = e.gate.clamped(acc[0][j], acc[kMmaTiles - 1][j]); });
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
