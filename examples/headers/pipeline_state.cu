// out = the sum of each column of x. A producer warp copies rows into a ring of stages, four
// consumer warps add them up.
#include "common/mbarrier.cuh"
#include "common/pipeline_state.cuh"

constexpr int kStages = 4, kConsumers = 128;
constexpr int kColumns = kConsumers * kVec;  // columns of x per block

extern "C" __global__ void column_sum(const scalar_t* x, float* out, int T, int N) {
  __shared__ __align__(16) scalar_t ring[kStages][kColumns];
  __shared__ uint64_t barriers[2][kStages];
  const auto full = [&](int stage) { return smem_address(&barriers[0][stage]); };
  const auto empty = [&](int stage) { return smem_address(&barriers[1][stage]); };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full(stage), 1);
      mbarrier_init(empty(stage), kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int column = blockIdx.x * kColumns;
  if (threadIdx.x == kConsumers) {
    PipelineState<kStages> state(1);  // all stages are empty
    for (int t = 0; t < T; ++t, state.advance()) {
      mbarrier_wait_to_overwrite(empty(state.stage), state.phase);
      mbarrier_arrive_expect_tx(full(state.stage), sizeof(ring[0]));
      const scalar_t* from = x + static_cast<int64_t>(t) * N + column;
      bulk_load(smem_address(ring[state.stage]), from, sizeof(ring[0]), full(state.stage));
    }
  } else if (threadIdx.x < kConsumers) {
    PipelineState<kStages> state(0);
    float sums[kVec] = {};
    for (int t = 0; t < T; ++t, state.advance()) {
      mbarrier_wait(full(state.stage), state.phase);
      const auto values = load_vec<scalar_t, kVec>(ring[state.stage] + threadIdx.x * kVec);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += to_float(values.v[j]);
      mbarrier_arrive(empty(state.stage));
    }
    for (int j = 0; j < kVec; ++j) out[column + threadIdx.x * kVec + j] = sums[j];
  }
}
