// Arguments of the fused norm, router and expert selection.
#pragma once

#include "common/moe_route.cuh"

struct RmsnormMoeRouteParams {
  const scalar_t* x;            // (T, N)
  const scalar_t* residual;     // (T, N), or null
  const scalar_t* norm_weight;  // (N,)
  const scalar_t* weight;       // (E + num_shared, N)
  const scalar_t* bias;         // (E + num_shared,), or null
  scalar_t* y;                  // (T, N); may be x
  scalar_t* residual_out;       // (T, N) h; may be residual; null without a residual
  unsigned char* codes;         // (T, N), or null
  float* scales;                // (T, ceil(N / 128))
  // Fields of MoeRouteParams; `counts` has one chunk per 16 tokens.
  const float* correction;
  const float* expert_scale;
  int* experts;
  float* weights;
  int* order;
  int* offsets;
  const int64_t* slots;
  int64_t* load;
  int* counts;
  int num_tokens, n, num_experts, top_k, num_shared, is_sigmoid, num_groups, top_groups;
  int renormalize;
  int slab;        // several tokens: columns per block
  int log_splits;  // one token: the binary logarithm of the warps that share a row of the weight
  float scale, eps, weight_offset;
};

// The parameters of the routing, but for the logits.
__device__ __forceinline__ MoeRouteParams routing_of(const RmsnormMoeRouteParams& p) {
  MoeRouteParams route{nullptr, p.correction, p.expert_scale, p.experts, p.weights,
                       p.order, p.offsets,    p.slots,        p.load};
  route.num_tokens = p.num_tokens, route.num_experts = p.num_experts, route.top_k = p.top_k;
  route.num_shared = p.num_shared, route.is_sigmoid = p.is_sigmoid;
  route.num_groups = p.num_groups, route.top_groups = p.top_groups;
  route.renormalize = p.renormalize, route.scale = p.scale;
  return route;
}
