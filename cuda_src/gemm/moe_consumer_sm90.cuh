// The consumers of moe_gemm_sm90.cu: wgmma on the stages of the ring, then the epilogue.
//
// The weight is wgmma's A and the tokens are its B: D is (features, tokens), and few tokens take
// little time. A warpgroup has two accumulators, of the same features' gate and up or of two times
// 64 features.
#pragma once

#include "gemm/moe_activation.cuh"
#include "common/pipeline_state.cuh"
#include "gemm/moe_scheduler_sm90.cuh"

struct MoeEpilogue {
  const scalar_t* bias;  // (E, R), or null
  scalar_t* out;
  bool scatters;          // else rows of out are sorted
  int num_rows, columns;  // of the weight, of out
  MoeGate gate;

  __device__ __forceinline__ bool is_gated() const { return gate.is_gated(); }

  __device__ __forceinline__ float bias_of(int expert, int row) const {
    if (bias == nullptr || row >= num_rows) return 0.0f;
    return to_float(bias[static_cast<int64_t>(expert) * num_rows + row]);
  }
};

using MoeSums = float[kMmaTiles][kTokens / 2];

// Lets the producer fill a stage again.
__device__ __forceinline__ void release(MoeShared& smem, int stage) {
  if (threadIdx.x % 128 == 0) mbarrier_arrive(smem_address(&smem.empty[stage]));
}

// The sums of the first kN tokens; k in ascending steps of 16, whatever kN is.
template <int kN>
__device__ __forceinline__ void multiply(MoeShared& smem, int warpgroup, int num_slabs,
                                         bool is_gathered, PipelineState<kStages>& state,
                                         MoeSums& acc) {
  const unsigned w = smem_address(smem.w[0]) + warpgroup * kMmaTiles * kMmaBytes;
  const unsigned x = smem_address(smem.x[0]);
  state.stage = __shfl_sync(~0u, state.stage, 0);  // tells ptxas that it is warp-uniform
  int last = 0;
#pragma unroll 1
  for (int slab = 0; slab < num_slabs; slab += kDepth) {
    mbarrier_wait(smem_address(&smem.full[state.stage]), state.phase);
    if (is_gathered) fence_async_proxy();  // SAFETY: cp.async wrote x, wgmma reads it.
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d > 0 && slab + d >= num_slabs) break;
      const uint64_t a = wgmma_descriptor(w + state.stage * kStageW + d * kSlabW);
      const uint64_t b = wgmma_descriptor(x + state.stage * kStageX + d * kSlabX);
#pragma unroll
      for (int step = 0; step < kSlabK / 16; ++step)
#pragma unroll
        for (int j = 0; j < kMmaTiles; ++j)
          wgmma<kN>(reinterpret_cast<float (&)[kN / 2]>(acc[j]),
                    a + j * (kMmaBytes / 16) + step * 2, b + step * 2,
                    slab > 0 || d > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the stage before this one has been read
    if (slab > 0) release(smem, last);
    last = state.stage;
    state.advance();
  }
  wgmma_wait<0>();
  release(smem, last);
#pragma unroll
  for (int j = 0; j < kMmaTiles; ++j) wgmma_pin(acc[j]);
}

// With the smallest instruction that has room for `count` tokens.
template <int kN = 16>
__device__ __forceinline__ void multiply_few(int count, MoeShared& smem, int warpgroup,
                                             int num_slabs, bool is_gathered,
                                             PipelineState<kStages>& state, MoeSums& acc) {
  if constexpr (kN < kTokens) {
    if (count > kN)
      return multiply_few<kN + 16>(count, smem, warpgroup, num_slabs, is_gathered, state, acc);
  }
  multiply<kN>(smem, warpgroup, num_slabs, is_gathered, state, acc);
}

// Writes 64 features of the tile's tokens: through shared memory, where they become rows.
__device__ __forceinline__ void store(const MoeEpilogue& e, MoeShared& smem,
                                      const MoeTileRecord& record, int warpgroup, int column,
                                      const float (&acc)[kTokens / 2]) {
  const int count = record.tile.count;
  const unsigned staging = smem_address(smem.staging[warpgroup]);
  const int thread = threadIdx.x % 128, lane_idx = thread % kWarpSize, warp_idx = thread / 32;
  const int barrier = 1 + warpgroup;
  const int row = lane_idx % 8 + lane_idx / 16 * 8;  // matrices: 8 tokens by 8 features, twice two
  const int chunk = (warp_idx * 2 + lane_idx / 8 % 2) ^ (row & 7);
  const unsigned to = staging + row * kSlabRowBytes + (chunk << 4);
#pragma unroll
  for (int first = 0; first < kTokens; first += kStagingTokens) {
    if (first >= count) break;
#pragma unroll
    for (int i = 0; i < kStagingTokens / 16; ++i) {
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

// Calls f(j) for the sums of the tile's tokens. acc[m][j] is in this thread's first row where
// j % 4 < 2, else eight rows below.
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

// Bias, activation and weight, in place; with an activation the results are in acc[0].
__device__ __forceinline__ void finish(const MoeEpilogue& e, const MoeTileRecord& record,
                                       int warpgroup, MoeSums& acc) {
  const int count = record.tile.count;
  if (e.bias != nullptr) add_bias(e, record.tile, warpgroup, acc);
  // Two loops: a test for every sum would take longer than the activation.
  if (e.gate.activation == kSwiglu)
    for_each_sum(count, [&](int j) { acc[0][j] = silu(acc[0][j]) * acc[1][j]; });
  else if (e.is_gated())
    for_each_sum(count, [&](int j) { acc[0][j] = e.gate.clamped(acc[0][j], acc[1][j]); });
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

__device__ __forceinline__ void consume(const MoeEpilogue& e, MoeShared& smem, int num_tiles,
                                        int num_slabs) {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  PipelineState<kStages> state(0);
  PipelineState<kRecords> next(0);
#pragma unroll 1
  for (int index = blockIdx.x; index < num_tiles; index += gridDim.x) {
    mbarrier_wait(smem_address(&smem.record_full[next.stage]), next.phase);
    const MoeTileRecord& record = smem.records[next.stage];
    MoeSums acc = {};  // as multiply does not write all of it
    multiply_few(record.tile.count, smem, warpgroup, num_slabs, !e.scatters, state, acc);
    finish(e, record, warpgroup, acc);
    const int column = record.tile.row + warpgroup * (e.is_gated() ? 1 : kMmaTiles) * kMmaM;
    store(e, smem, record, warpgroup, column, acc[0]);
    if (!e.is_gated()) store(e, smem, record, warpgroup, column + kMmaM, acc[1]);
    named_barrier_sync<128>(1 + warpgroup);  // all have read the record
    if (threadIdx.x % 128 == 0) mbarrier_arrive(smem_address(&smem.record_empty[next.stage]));
    next.advance();
  }
}
