// RMSNorm, router and expert routing of a mixture of experts, fused for one token.
//
//   y       = x / sqrt(mean(x^2) + eps) * (norm_weight + weight_offset)    (rounded to scalar_t)
//   logits  = weight y + bias                                              (float)
//   routing = as in moe_route.cu, from these logits
//
// Arguments: see rmsnorm_moe_route_problem.cuh; no residual, codes or counts.
//
// Numerics: see rmsnorm.cu and moe_route.cu. A logit is summed in float, within each lane and then
// across the lanes of a warp.
// Parallelisation: one cluster. Each block computes the whole norm and the logits of some experts,
// one expert per warp; it starts loading their weights while the preceding kernel still runs. The
// logits go to the shared memory of the first block, which chooses the experts.
// Mirror: engine/reference/rmsnorm_moe_route.py
#include "common/cluster.cuh"
#include "common/pdl.cuh"
#include "common/rmsnorm_row.cuh"
#include "rmsnorm_moe_route/rmsnorm_moe_route_problem.cuh"

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;

// Dynamic shared memory: the block's rows of weight, y, and the logits.
template <int kPer>
__device__ __forceinline__ void rmsnorm_moe_route(const RmsnormMoeRouteParams& p) {
  if constexpr (!kHasClusters) return;  // without clusters the separate ops are launched instead
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ RouteShared<kPer> shared;
  __shared__ TransactionBarrier barrier;
  __shared__ float smem_sums[kWarps];
  const int size = cluster_size(), rank = cluster_rank();
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int num_rows = p.num_experts + p.num_shared;
  const int own = (num_rows + size - 1) / size;
  const int first = min(num_rows, rank * own);
  const int count = min(num_rows, first + own) - first;
  const scalar_t* rows = reinterpret_cast<const scalar_t*>(smem);
  scalar_t* y = reinterpret_cast<scalar_t*>(smem) + static_cast<int64_t>(own) * p.n;
  float* logits = reinterpret_cast<float*>(y + p.n);

  pdl_trigger();
  if (threadIdx.x == 0) {
    barrier.init();
    barrier.arrive_expect_tx(count * p.n * sizeof(scalar_t));
    // SAFETY: the preceding kernel must not write weight.
    for (int i = 0; i < count; ++i)
      barrier.bulk_load(smem + static_cast<int64_t>(i) * p.n * sizeof(scalar_t),
                        p.weight + static_cast<int64_t>(first + i) * p.n, p.n * sizeof(scalar_t));
  }
  for (int e = threadIdx.x; e < kPer * kWarpSize; e += kThreads) shared.masks.clear(e);
  if (size > 1) cluster_arrive_relaxed();  // the first block is running and can receive logits
  pdl_wait();
  {
    const Row row{p.x,     nullptr, p.norm_weight, nullptr,         p.y,
                  nullptr, p.n,     p.eps,         p.weight_offset, 1.0f};
    rmsnorm_register_row<kWarps, 2>(row, smem_sums, [&](int, int i, const Vec<scalar_t, kVec>& v) {
      store_vec(y + i, v);
      if (rank == 0) store_vec(p.y + i, v);
    });
  }
  __syncthreads();
  barrier.wait();
  if (size > 1) cluster_wait();
#pragma unroll 1
  for (int e = warp_idx; e < count; e += kWarps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane_idx * kVec; i < p.n; i += kWarpSize * kVec) {
      const auto a = load_vec<scalar_t, kVec>(rows + static_cast<int64_t>(e) * p.n + i);
      const auto b = load_vec<scalar_t, kVec>(y + i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum = fmaf(to_float(a.v[j]), to_float(b.v[j]), sum);
    }
    sum = warp_sum(sum);
    if (lane_idx == 0) {
      if (p.bias != nullptr) sum += to_float(p.bias[first + e]);
      st_shared_cluster(logits + first + e, 0, size, sum);
    }
  }
  __syncwarp();
  cluster_sync(size);
  if (rank != 0) return;
  MoeRouteParams route = routing_of(p);
  route.logits = logits;
  route_few<kPer>(route, shared);
}

// Entry points for up to 32 * per experts.
#define ENGINE_RMSNORM_MOE_ROUTE(per, experts)                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                          \
      rmsnorm_moe_route_##experts(const __grid_constant__ RmsnormMoeRouteParams p) { \
    rmsnorm_moe_route<per>(p);                                                       \
  }

ENGINE_RMSNORM_MOE_ROUTE(1, 32)
ENGINE_RMSNORM_MOE_ROUTE(2, 64)
ENGINE_RMSNORM_MOE_ROUTE(4, 128)
ENGINE_RMSNORM_MOE_ROUTE(8, 256)
ENGINE_RMSNORM_MOE_ROUTE(16, 512)
