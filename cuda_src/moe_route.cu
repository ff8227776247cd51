// Chooses each token's experts, and sorts the (token, expert) pairs by expert.
//
//   scores  = softmax(logits), or sigmoid(logits)
//   experts = the top_k largest of scores + correction within the best groups; the best
//             first, ties by lower index
//   weights = scores[experts] / their sum (if requested) * scale
//   order   = pair indices t * top_k + j, sorted by expert, then by token
//   offsets = index in order of each expert's first pair
//   load   += number of pairs per expert (if requested)
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
#include "common/moe_route.cuh"
#include "common/pdl.cuh"

constexpr int kFewThreads = 512;  // maximum, one warp per token: more would run out of registers
constexpr int kThreads = 512;     // block size of the many-token kernels
constexpr int kWarps = kThreads / kWarpSize;

// Few tokens: the whole routing in one block.
template <int kPer>
__device__ __forceinline__ void route_in_one_block(const MoeRouteParams& p) {
  __shared__ RouteShared<kPer> shared;
  pdl_trigger();
  for (int e = threadIdx.x; e < kPer * kWarpSize; e += blockDim.x) shared.masks.clear(e);
  __syncthreads();
  pdl_wait();
  route_few<kPer>(p, shared);
}

// Many tokens, first kernel: chooses the experts of a chunk of tokens and counts each expert's
// pairs.
template <int kPer>
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
    const int expert = choose<kPer>(p, token);
    if (lane_idx < p.top_k) atomicAdd(&smem_counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads)
    p.counts[blockIdx.x * p.num_experts + e] = smem_counts[e];
}

// Fills `begins` with the index in `order` of each expert's first pair from this block's chunk.
template <int kPer>
__device__ __forceinline__ void find_begins(const MoeRouteParams& p, int* begins) {
  constexpr int kExperts = kPer * kWarpSize, kParts = kThreads / kExperts;
  __shared__ int smem_total[kThreads], smem_before[kThreads];
  const int expert = threadIdx.x % kExperts;
  const int chunk = blockIdx.x, num_chunks = gridDim.x;
  int total = 0, before = 0;
  if (expert < p.num_experts) {
#pragma unroll 4
    for (int c = threadIdx.x / kExperts; c < num_chunks; c += kParts) {
      const int count = p.counts[c * p.num_experts + expert];
      total += count;
      before += c < chunk ? count : 0;
    }
  }
  smem_total[threadIdx.x] = total, smem_before[threadIdx.x] = before;
  __syncthreads();
  if (threadIdx.x < kExperts) {  // SAFETY: each thread reads and writes only its own entry.
    for (int i = expert + kExperts; i < kThreads; i += kExperts)
      total += smem_total[i], before += smem_before[i];
    smem_total[expert] = total, smem_before[expert] = before;
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    int own[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) own[i] = smem_total[threadIdx.x * kPer + i];
    sums_before<kPer>(own);
    if (chunk == 0) store_offsets<kPer>(p, own);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      begins[threadIdx.x * kPer + i] = own[i] + smem_before[threadIdx.x * kPer + i];
  }
}

// Many tokens, second kernel: places a chunk's pairs in `order`, kMaskTokens tokens at a time.
template <int kPer>
__device__ __forceinline__ void route_place(const MoeRouteParams& p) {
  constexpr int kExperts = kPer * kWarpSize;
  __shared__ __align__(16) TokenMasks<kPer> smem_masks;
  __shared__ int smem_begins[kExperts];
  pdl_trigger();
  for (int e = threadIdx.x; e < kExperts; e += kThreads) smem_masks.clear(e);
  pdl_wait();
  find_begins<kPer>(p, smem_begins);
  __syncthreads();
  const int begin = blockIdx.x * p.chunk_tokens, end = min(p.num_tokens, begin + p.chunk_tokens);
#pragma unroll 1
  for (int first = begin; first < end; first += kMaskTokens) {
    const int first_pair = first * p.top_k;
    const int num_pairs = min(end - first, kMaskTokens) * p.top_k;
    for (int i = threadIdx.x; i < num_pairs; i += kThreads)
      smem_masks.add(p.experts[first_pair + i], i / p.top_k);
    __syncthreads();
    for (int i = threadIdx.x; i < num_pairs; i += kThreads) {
      const int expert = p.experts[first_pair + i];
      p.order[smem_begins[expert] + smem_masks.rank(expert, i / p.top_k)] = first_pair + i;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kExperts; e += kThreads) {
      smem_begins[e] += smem_masks.count(e);
      smem_masks.clear(e);
    }
    __syncthreads();
  }
}

// Entry points for up to 32 * per experts.
#define ENGINE_MOE_ROUTE(per, experts)                                       \
  extern "C" __global__ void __launch_bounds__(kFewThreads)                  \
      moe_route_few_##experts(const __grid_constant__ MoeRouteParams p) {    \
    route_in_one_block<per>(p);                                              \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                     \
      moe_route_choose_##experts(const __grid_constant__ MoeRouteParams p) { \
    route_choose<per>(p);                                                    \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                     \
      moe_route_place_##experts(const __grid_constant__ MoeRouteParams p) {  \
    route_place<per>(p);                                                     \
  }

ENGINE_MOE_ROUTE(1, 32)
ENGINE_MOE_ROUTE(2, 64)
ENGINE_MOE_ROUTE(4, 128)
ENGINE_MOE_ROUTE(8, 256)
ENGINE_MOE_ROUTE(16, 512)
