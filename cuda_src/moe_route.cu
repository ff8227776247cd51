// Chooses each token's experts, and sorts the (token, expert) pairs by expert.
//
//   scores  = softmax(logits), or sigmoid(logits)
//   experts = the top_k largest of scores + correction within the best groups; the best
//             first, ties by lower index
//   weights = scores[experts] / their sum (if requested) * scale
//             sparsemixer: 1 / (sum of e^(logit - l) over the experts that are left after those
//             before, and whose logits differ from l, the expert's own, by at most
//             2 jitter max(|logit|, l)) * scale
//   order   = pair indices t * top_k + j, sorted by expert, then by token
//   offsets = index in order of each expert's first pair
//   load   += number of pairs per expert (if requested)
// Every token's last expert may be a shared one, with the weight sigmoid(its logit).
//
// Arguments: MoeRouteParams, below.
//
// Numerics: float; the chosen scores are summed in rank order. NaN ranks last, so the chosen
// experts are valid and distinct for any logits.
// Parallelisation: a warp chooses one token's experts, with the scores in registers. Few tokens:
// one block does everything. Many tokens: moe_route_choose_* also counts the pairs of each chunk of
// tokens, and each block of moe_route_place_* places one chunk's pairs after those of the preceding
// chunks. A token chooses an expert at most once, so a pair's rank within its expert is the number
// of earlier tokens in the expert's bit mask of tokens: no result depends on the order of atomics.
// Mirror: engine/reference/moe_route.py
#include "common/moe_place.cuh"
#include "common/moe_route.cuh"
#include "common/pdl.cuh"

constexpr int kFewThreads = 512;  // maximum, one warp per token: more would run out of registers
constexpr int kThreads = kPlaceThreads;
constexpr int kWarps = kThreads / kWarpSize;

// Few tokens: the whole routing in one block.
template <int kPer, bool kMixes = false>
__device__ __forceinline__ void route_in_one_block(const MoeRouteParams& p) {
  __shared__ RouteShared<kPer> shared;
  pdl_trigger();
  for (int e = threadIdx.x; e < kPer * kWarpSize; e += blockDim.x) shared.masks.clear(e);
  __syncthreads();
  pdl_wait();
  route_few<kPer, kMixes>(p, shared);
}

// Many tokens, first kernel: chooses the experts of a chunk of tokens and counts each expert's
// pairs.
template <int kPer, bool kMixes = false>
__device__ __forceinline__ void route_choose(const MoeRouteParams& p) {
  __shared__ int smem_counts[kPer * kWarpSize];
  const int lane_idx = threadIdx.x % kWarpSize;
  pdl_trigger();
  for (int e = threadIdx.x; e < kPer * kWarpSize; e += kThreads) smem_counts[e] = 0;
  __syncthreads();
  pdl_wait();
  const int begin = blockIdx.x * p.chunk_tokens, end = min(p.num_tokens, begin + p.chunk_tokens);
#pragma unroll 1
  for (int token = begin + threadIdx.x / kWarpSize; token < end; token += kWarps) {
    const int expert = kMixes ? choose_close(p, token) : choose<kPer>(p, token);
    if (lane_idx < p.top_k) atomicAdd(&smem_counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads)
    p.counts[blockIdx.x * p.num_experts + e] = smem_counts[e];
}

// Entry points for up to 32 * per experts.
#define ENGINE_MOE_ROUTE(per, experts)                                       \
  extern "C" __global__ void __launch_bounds__(kFewThreads, 1)               \
      moe_route_few_##experts(const __grid_constant__ MoeRouteParams p) {    \
    route_in_one_block<per>(p);                                              \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                  \
      moe_route_choose_##experts(const __grid_constant__ MoeRouteParams p) { \
    route_choose<per>(p);                                                    \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                  \
      moe_route_place_##experts(const __grid_constant__ MoeRouteParams p) {  \
    route_place<per>(p);                                                     \
  }

ENGINE_MOE_ROUTE(1, 32)
ENGINE_MOE_ROUTE(2, 64)
ENGINE_MOE_ROUTE(4, 128)
ENGINE_MOE_ROUTE(8, 256)
ENGINE_MOE_ROUTE(16, 512)
ENGINE_MOE_ROUTE(24, 768)

// Sparsemixer, for up to 32 experts; moe_route_place_32 places the pairs.
extern "C" __global__ void __launch_bounds__(kFewThreads, 1)
    moe_route_few_mixer(const __grid_constant__ MoeRouteParams p) {
  route_in_one_block<1, true>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_route_choose_mixer(const __grid_constant__ MoeRouteParams p) {
  route_choose<1, true>(p);
}
