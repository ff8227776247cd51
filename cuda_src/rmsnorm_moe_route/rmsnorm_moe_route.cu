// RMSNorm, router and expert routing of a mixture of experts, fused for one token.
//
//   y       = x / sqrt(mean(x^2) + eps) * (norm_weight + weight_offset)    (rounded to scalar_t)
//   logits  = weight y + bias                                              (float)
//   routing = as in moe_route.cu, from these logits
//
// Arguments: see rmsnorm_moe_route_problem.cuh; no residual, codes or counts.
//
// Numerics: see rmsnorm.cu and moe_route.cu. A logit is summed in float: in each lane, across the
// lanes of a warp, then across the warps that share its row.
// Parallelisation: one cluster. Each block computes the whole norm and the logits of some experts;
// the warps share the experts' rows, or a row's columns. It starts loading its rows while the
// preceding kernel still runs. The sums go to the shared memory of the first block, a warp of which
// chooses the experts.
// Mirror: engine/reference/rmsnorm_moe_route.py
#include "common/cluster.cuh"
#include "common/pdl.cuh"
#include "common/rmsnorm_row.cuh"
#include "rmsnorm_moe_route/rmsnorm_moe_route_problem.cuh"

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;

// Returns this lane's share of the product of a row and y: every `stride`-th vector.
__device__ __forceinline__ float row_share(const scalar_t* row, const scalar_t* y, int n, int first,
                                           int stride) {
  float sums[4] = {};
#pragma unroll 4
  for (int i = first; i < n; i += stride) {
    const auto a = load_vec<scalar_t, kVec>(row + i);
    const auto b = load_vec<scalar_t, kVec>(y + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      sums[j % 4] = fmaf(to_float(a.v[j]), to_float(b.v[j]), sums[j % 4]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Dynamic shared memory: the block's rows of weight, y, and each share's sums of all logits.
template <int kPer>
__device__ __forceinline__ void rmsnorm_moe_route(const RmsnormMoeRouteParams& p) {
  if constexpr (!kHasClusters) return;  // without clusters the separate ops are launched instead
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ TransactionBarrier weight, sums;
  __shared__ float smem_sums[kWarps];
  const int size = cluster_size(), rank = cluster_rank();
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int num_rows = p.num_experts + p.num_shared, splits = 1 << p.log_splits;
  const int own = (num_rows + size - 1) / size;
  const int first = min(num_rows, rank * own);
  const int count = min(num_rows, first + own) - first;
  const scalar_t* rows = reinterpret_cast<const scalar_t*>(smem);
  scalar_t* y = reinterpret_cast<scalar_t*>(smem) + static_cast<int64_t>(own) * p.n;
  float* logits = reinterpret_cast<float*>(y + p.n);  // (splits, num_rows)

  pdl_trigger();
  if (threadIdx.x == 0) {
    weight.init(), sums.init();
    weight.arrive_expect_tx(count * p.n * sizeof(scalar_t));
    sums.arrive_expect_tx(splits * num_rows * sizeof(float));
    // SAFETY: the preceding kernel must not write weight or bias.
    for (int i = 0; i < count; ++i)
      weight.bulk_load(smem + static_cast<int64_t>(i) * p.n * sizeof(scalar_t),
                       p.weight + static_cast<int64_t>(first + i) * p.n, p.n * sizeof(scalar_t));
  }
  __syncwarp();
  cluster_arrive_relaxed();  // the block's barrier can receive sums
  const int tasks = count * splits, share = warp_idx % splits;
  const auto bias_of = [&](int task) {
    const bool has_bias = p.bias != nullptr && share == 0 && task < tasks;
    return has_bias ? to_float(p.bias[first + (task >> p.log_splits)]) : 0.0f;
  };
  float bias = bias_of(warp_idx);
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
  weight.wait();
  cluster_wait();
#pragma unroll 1
  for (int task = warp_idx; task < tasks; task += kWarps) {
    const int e = task >> p.log_splits;
    const float sum =
        warp_sum(row_share(rows + static_cast<int64_t>(e) * p.n, y, p.n,
                           (share * kWarpSize + lane_idx) * kVec, splits * kWarpSize * kVec));
    if (lane_idx == 0)
      st_async(smem_address(logits + share * num_rows + first + e), smem_address(&sums.state), 0,
               sum + bias);
    bias = bias_of(task + kWarps);
  }
  if (rank != 0 || warp_idx != 0) return;

  mbarrier_wait_cluster(smem_address(&sums.state), 0);
  for (int e = lane_idx; e < num_rows; e += kWarpSize) {
    float sum = logits[e];
    for (int i = 1; i < splits; ++i) sum += logits[i * num_rows + e];
    logits[e] = sum;
  }
  __syncwarp();
  MoeRouteParams route = routing_of(p);
  route.logits = logits;
  sort_one<kPer>(route, choose<kPer>(route, 0));
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
