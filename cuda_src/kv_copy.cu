// Copies whole blocks within the KV cache, in one launch for all slabs (a layer's K or V).
//
//   pages[s, dst] = pages[s, src]   for each pair (src, dst) and each slab s
//
//   pages        (S, P, block_elements) page_t   contiguous
//   block_pairs  (n, 2)                 int32      a pair with an id outside [0, P) is skipped
//
// No dst may be another pair's src or dst: blocks are copied in no particular order.
// Numerics: a copy. Parallelisation: blockIdx.x is the pair, blockIdx.y walks the slabs, the
// threads walk the block, kWidth elements each.
// Mirror: engine/reference/kv_copy.py
#include "common/page_codes.cuh"

constexpr int kThreads = 256;

template <int kWidth>
__device__ __forceinline__ void kv_copy(page_t* pages, const int* block_pairs, int64_t num_slabs,
                                        int64_t num_blocks, int64_t block_elements) {
  const int64_t src = block_pairs[2 * static_cast<int64_t>(blockIdx.x)];
  const int64_t dst = block_pairs[2 * static_cast<int64_t>(blockIdx.x) + 1];
  if (src < 0 || src >= num_blocks || dst < 0 || dst >= num_blocks || src == dst) return;
  for (int64_t slab = blockIdx.y; slab < num_slabs; slab += gridDim.y) {
    // SAFETY: src and dst are different blocks, so the two never alias.
    const page_t* __restrict__ from = pages + (slab * num_blocks + src) * block_elements;
    page_t* __restrict__ to = pages + (slab * num_blocks + dst) * block_elements;
#pragma unroll 4
    for (int64_t i = threadIdx.x * kWidth; i < block_elements; i += kThreads * kWidth)
      store_vec(to + i, load_vec<page_t, kWidth>(from + i));
  }
}

#define ENGINE_KV_COPY(name, width)                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads)                                 \
      name(page_t* pages, const int* block_pairs, int64_t num_slabs, int64_t num_blocks, \
           int64_t block_elements) {                                                     \
    kv_copy<width>(pages, block_pairs, num_slabs, num_blocks, block_elements);           \
  }

ENGINE_KV_COPY(kv_copy_vector, kPageVec)
ENGINE_KV_COPY(kv_copy_scalar, 1)
