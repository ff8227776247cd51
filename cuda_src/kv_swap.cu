// Copies whole blocks from one set of pages to another: all slabs (layer, K or V) in one launch.
//
//   target[s, dst] = source[s, src]   for each pair (src, dst) and each slab s
//
//   source       (S, P, block_elements) page_t   any slab and block strides; blocks contiguous
//   target       (S, Q, block_elements) page_t   likewise; does not overlap source
//   block_pairs  (n, 2)                 int32      a pair with src outside [0, P) or dst outside
//                                                  [0, Q) is skipped
//
// No dst may occur twice: blocks are copied in no particular order. If the slab and block axes of
// one side are exchanged, scattered blocks are packed into one contiguous buffer, which a single
// DMA copy can move to or from the host.
// Numerics: a copy. Parallelisation: blockIdx.x is the pair, blockIdx.y walks the slabs, the
// threads walk the block, kWidth elements each.
// Mirror: engine/reference/kv_swap.py
#include "common/page_codes.cuh"

constexpr int kThreads = 256;

// Strides are in elements.
struct Side {
  int64_t num_blocks, slab_stride, block_stride;

  __device__ __forceinline__ bool has(int64_t block) const {
    return block >= 0 && block < num_blocks;
  }
  __device__ __forceinline__ int64_t offset(int64_t slab, int64_t block) const {
    return slab * slab_stride + block * block_stride;
  }
};

template <int kWidth>
__device__ __forceinline__ void kv_swap(const page_t* __restrict__ source,
                                        page_t* __restrict__ target, const int* block_pairs,
                                        const Side from, const Side to, int64_t num_slabs,
                                        int64_t block_elements) {
  const int64_t src = block_pairs[2 * static_cast<int64_t>(blockIdx.x)];
  const int64_t dst = block_pairs[2 * static_cast<int64_t>(blockIdx.x) + 1];
  if (!from.has(src) || !to.has(dst)) return;
  for (int64_t slab = blockIdx.y; slab < num_slabs; slab += gridDim.y) {
    const page_t* read = source + from.offset(slab, src);
    page_t* write = target + to.offset(slab, dst);
#pragma unroll 4
    for (int64_t i = threadIdx.x * kWidth; i < block_elements; i += kThreads * kWidth)
      store_vec(write + i, load_vec<page_t, kWidth>(read + i));
  }
}

#define ENGINE_KV_SWAP(name, width)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads)                                           \
      name(const page_t* source, page_t* target, const int* block_pairs, int64_t source_blocks,    \
           int64_t source_slab_stride, int64_t source_block_stride, int64_t target_blocks,         \
           int64_t target_slab_stride, int64_t target_block_stride, int64_t num_slabs,             \
           int64_t block_elements) {                                                               \
    kv_swap<width>(                                                                                \
        source, target, block_pairs, Side{source_blocks, source_slab_stride, source_block_stride}, \
        Side{target_blocks, target_slab_stride, target_block_stride}, num_slabs, block_elements);  \
  }

ENGINE_KV_SWAP(kv_swap_vector, kPageVec)
ENGINE_KV_SWAP(kv_swap_scalar, 1)
