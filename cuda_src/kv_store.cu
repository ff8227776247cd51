// Writes the new keys and values of a step into their pages.
//
//   k_pages[block, :, offset] = k[t],  v_pages likewise,  slot = block * block_size + offset
//
//   k, v             (T, K, D)              scalar_t   token and head strides; last axis contiguous
//   k_pages, v_pages (P, K, block_size, D)  scalar_t   contiguous
//   slot_mapping     (T,)                   int64      outside [0, P * block_size): nothing written
//
// Numerics: a copy. Parallelisation: one thread per kWidth features; blockIdx.x is the token,
// blockIdx.y walks the features of its k, then of its v.
// Mirror: engine/reference/kv_store.py
#include "common/types.cuh"

constexpr int kThreads = 128;

template <int kWidth>
__device__ __forceinline__ void kv_store(const scalar_t* __restrict__ k,
                                         const scalar_t* __restrict__ v, scalar_t* k_pages,
                                         scalar_t* v_pages, const int64_t* slot_mapping,
                                         int64_t num_slots, int num_heads, int head_dim,
                                         int block_size, int64_t k_stride_t, int64_t k_stride_h,
                                         int64_t v_stride_t, int64_t v_stride_h) {
  const int64_t token = blockIdx.x, slot = slot_mapping[token];
  if (slot < 0 || slot >= num_slots) return;
  const int items_per_head = head_dim / kWidth;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int head_of_both = item / items_per_head;
  if (head_of_both >= 2 * num_heads) return;
  const bool is_k = head_of_both < num_heads;
  const int64_t head = is_k ? head_of_both : head_of_both - num_heads;
  const int feature = (item % items_per_head) * kWidth;

  const int64_t block = slot / block_size, offset = slot % block_size;
  const int64_t to = ((block * num_heads + head) * block_size + offset) * head_dim + feature;
  const scalar_t* from = is_k ? k + token * k_stride_t + head * k_stride_h
                              : v + token * v_stride_t + head * v_stride_h;
  store_vec((is_k ? k_pages : v_pages) + to, load_vec<scalar_t, kWidth>(from + feature));
}

#define ENGINE_KV_STORE(name, width)                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) name(                                     \
      const scalar_t* k, const scalar_t* v, scalar_t* k_pages, scalar_t* v_pages,                  \
      const int64_t* slot_mapping, int64_t num_slots, int num_heads, int head_dim, int block_size, \
      int64_t k_stride_t, int64_t k_stride_h, int64_t v_stride_t, int64_t v_stride_h) {            \
    kv_store<width>(k, v, k_pages, v_pages, slot_mapping, num_slots, num_heads, head_dim,          \
                    block_size, k_stride_t, k_stride_h, v_stride_t, v_stride_h);                   \
  }

ENGINE_KV_STORE(kv_store_vector, kVec)
ENGINE_KV_STORE(kv_store_scalar, 1)
