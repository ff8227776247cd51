// Gradient of the routing weights with respect to the logits; the chosen experts are fixed.
//
//   s        = softmax(logits), or sigmoid(logits)
//   weights  = scale s[experts] / total,   total = the sum of s[experts] (if renormalized, else 1)
//   ds[i]    = scale (dweights[j] - sum over j of dweights[j] s[experts[j]] / total) / total
//              for i = experts[j] (the sum if renormalized), else 0
//   dlogits  = s (ds - sum of ds s), or s (1 - s) ds
//
// Arguments: MoeRouteBackwardParams, below.
//
// Numerics: float. Sums are over the warp, in a fixed order.
// Parallelisation: a warp per token, with the scores of 32 kPer experts in registers.
// Mirror: engine/reference/moe_route_backward.py
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr float kLeastTotal = 1e-20f;  // smallest divisor, as in moe_route

struct MoeRouteBackwardParams {
  const float* dweights;  // (T, top_k)
  const float* logits;    // (T, E)
  const int* experts;     // (T, top_k) distinct experts of each token
  float* dlogits;         // (T, E)
  int num_tokens, num_experts, top_k;
  int is_sigmoid, renormalize;
  float scale;
};

// Scores of the lane's experts, i * 32 + lane; 0 for experts that do not exist.
template <int kPer>
__device__ __forceinline__ void scores_of(const MoeRouteBackwardParams& p, const float* logits,
                                          float (&s)[kPer]) {
  const int lane_idx = threadIdx.x % kWarpSize;
  float largest = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool exists = i * kWarpSize + lane_idx < p.num_experts;
    s[i] = exists ? logits[i * kWarpSize + lane_idx] : -INFINITY;
    largest = fmaxf(largest, s[i]);
  }
  largest = warp_max(largest);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool exists = i * kWarpSize + lane_idx < p.num_experts;
    s[i] = !exists ? 0.0f : p.is_sigmoid ? __frcp_rn(1.0f + expf(-s[i])) : expf(s[i] - largest);
    sum += s[i];
  }
  if (p.is_sigmoid) return;
  const float factor = 1.0f / warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kPer; ++i) s[i] *= factor;
}

template <int kPer>
__device__ __forceinline__ void route_backward(const MoeRouteBackwardParams& p) {
  pdl_trigger();
  pdl_wait();
  const int lane_idx = threadIdx.x % kWarpSize;
  const int token = blockIdx.x * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  const int64_t first = static_cast<int64_t>(token) * p.num_experts;
  float s[kPer], ds[kPer] = {};
  scores_of(p, p.logits + first, s);

  // Lane j < top_k holds the token's expert j; ds first receives its gradient, and 1 where chosen.
  const bool is_pair = lane_idx < p.top_k;
  const int64_t pair = static_cast<int64_t>(token) * p.top_k + lane_idx;
  const int expert = is_pair ? p.experts[pair] : -1;
  const float own = is_pair ? p.dweights[pair] * p.scale : 0.0f;
  bool is_chosen[kPer] = {};
#pragma unroll 1
  for (int j = 0; j < p.top_k; ++j) {
    const int of = __shfl_sync(kFullMask, expert, j);
    const float gradient = __shfl_sync(kFullMask, own, j);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (of == i * kWarpSize + lane_idx) ds[i] = gradient, is_chosen[i] = true;
  }
  if (p.renormalize) {
    float total = 0.0f, through = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      total += is_chosen[i] ? s[i] : 0.0f;
      through += is_chosen[i] ? ds[i] * s[i] : 0.0f;  // another expert's score may be NaN
    }
    total = warp_sum(total);
    through = warp_sum(through);
    const float least = total < kLeastTotal ? kLeastTotal : total;  // NaN stays NaN
    through = total > kLeastTotal ? through / least : 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (is_chosen[i]) ds[i] = (ds[i] - through) / least;
  }
  float mean = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) mean += ds[i] * s[i];
  mean = p.is_sigmoid ? 0.0f : warp_sum(mean);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kWarpSize + lane_idx;
    const float factor = p.is_sigmoid ? s[i] * (1.0f - s[i]) : s[i];
    if (at < p.num_experts) p.dlogits[first + at] = factor * (ds[i] - mean);
  }
}

// Entry points for up to 32 * per experts.
#define ENGINE_MOE_ROUTE_BACKWARD(per, experts)                                        \
  extern "C" __global__ void __launch_bounds__(kThreads)                               \
      moe_route_backward_##experts(const __grid_constant__ MoeRouteBackwardParams p) { \
    route_backward<per>(p);                                                            \
  }

ENGINE_MOE_ROUTE_BACKWARD(1, 32)
ENGINE_MOE_ROUTE_BACKWARD(2, 64)
ENGINE_MOE_ROUTE_BACKWARD(4, 128)
ENGINE_MOE_ROUTE_BACKWARD(8, 256)
ENGINE_MOE_ROUTE_BACKWARD(16, 512)
