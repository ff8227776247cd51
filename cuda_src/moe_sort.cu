// Sorts the (token, expert) pairs of given experts by expert.
//
//   experts = ids, as int; an id outside [0, E) becomes the nearest expert
//   order   = pair indices t * top_k + j, sorted by expert, then by pair
//   offsets = index in order of each expert's first pair
//
//   ids      (P,) int or, if is_long, int64_t
//   experts  (P,) int
//   counts   (chunks, E) int   pairs of each chunk, per expert
//
// Parallelisation: one chunk per block. Then moe_route_place_* of moe_route.cu places the pairs,
// each as a token with one expert.
// Mirror: engine/reference/moe_sort.py
#include "common/moe_place.cuh"

// Converts a chunk's ids, and counts each expert's pairs.
template <int kPer>
__device__ __forceinline__ void count(const void* ids, int* experts, int* counts, int num_pairs,
                                      int num_experts, int chunk, int is_long) {
  __shared__ int smem_counts[kPer * kWarpSize];
  pdl_trigger();
  for (int e = threadIdx.x; e < kPer * kWarpSize; e += kPlaceThreads) smem_counts[e] = 0;
  __syncthreads();
  pdl_wait();
  const int begin = blockIdx.x * chunk, end = min(num_pairs, begin + chunk);
  for (int pair = begin + threadIdx.x; pair < end; pair += kPlaceThreads) {
    const int64_t id =
        is_long ? static_cast<const int64_t*>(ids)[pair] : static_cast<const int*>(ids)[pair];
    const int expert = static_cast<int>(id < 0 ? 0 : id < num_experts ? id : num_experts - 1);
    experts[pair] = expert;
    atomicAdd(&smem_counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kPlaceThreads)
    counts[blockIdx.x * num_experts + e] = smem_counts[e];
}

// Entry points for up to 32 * per experts.
#define ENGINE_MOE_SORT(per, width)                                                     \
  extern "C" __global__ void __launch_bounds__(kPlaceThreads)                           \
      moe_sort_count_##width(const void* ids, int* experts, int* counts, int num_pairs, \
                             int num_experts, int chunk, int is_long) {                 \
    count<per>(ids, experts, counts, num_pairs, num_experts, chunk, is_long);           \
  }

ENGINE_MOE_SORT(1, 32)
ENGINE_MOE_SORT(2, 64)
ENGINE_MOE_SORT(4, 128)
ENGINE_MOE_SORT(8, 256)
ENGINE_MOE_SORT(16, 512)
