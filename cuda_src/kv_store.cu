// Writes the new keys and values of a step into their pages.
//
//   k_pages[block, :, offset] = k[t],  v_pages likewise,  slot = block * block_size + offset
//
// A token whose slot is outside [0, P * block_size) is not stored. Arguments: KvStoreParams, below.
//
// Numerics: a copy; quantized pages store codes of value / scale (common/page_codes.cuh).
// Parallelisation: one thread per kWidth features; blockIdx.x is the token, blockIdx.y walks the
// features of its k, then of its v.
// Mirror: engine/reference/kv_store.py
#include "common/page_codes.cuh"

constexpr int kThreads = 128;

struct KvStoreParams {
  const scalar_t *k, *v;        // (T, K, D); the last axis is contiguous
  page_t *k_pages, *v_pages;    // (P, K, block_size, D), equal strides
  const int64_t* slot_mapping;  // (T,)
  int64_t num_slots;            // P * block_size
  int num_heads;                // K
  int head_dim;                 // D
  int block_size;
  int64_t page_stride, head_stride, token_stride;          // elements
  int64_t k_stride_t, k_stride_h, v_stride_t, v_stride_h;  // elements
  const float *k_scale, *v_scale;  // (K,) scales of quantized pages; else null
};

template <int kWidth>
__device__ __forceinline__ void kv_store(const KvStoreParams& p) {
  const int64_t token = blockIdx.x, slot = p.slot_mapping[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const int items_per_head = p.head_dim / kWidth;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int head_of_both = item / items_per_head;
  if (head_of_both >= 2 * p.num_heads) return;
  const bool is_k = head_of_both < p.num_heads;
  const int64_t head = is_k ? head_of_both : head_of_both - p.num_heads;
  const int feature = (item % items_per_head) * kWidth;

  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  const int64_t to =
      block * p.page_stride + head * p.head_stride + offset * p.token_stride + feature;
  const scalar_t* from = is_k ? p.k + token * p.k_stride_t + head * p.k_stride_h
                              : p.v + token * p.v_stride_t + head * p.v_stride_h;
  page_t* const pages = is_k ? p.k_pages : p.v_pages;
  const Vec<scalar_t, kWidth> x = load_vec<scalar_t, kWidth>(from + feature);
  if constexpr (kHasCodes) {
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = to_float(x.v[i]);
    store_vec(pages + to, to_page<kWidth>(values, (is_k ? p.k_scale : p.v_scale)[head]));
  } else {
    store_vec(pages + to, x);
  }
}

#define ENGINE_KV_STORE(name, width)                     \
  extern "C" __global__ void __launch_bounds__(kThreads) \
      name(const __grid_constant__ KvStoreParams p) {    \
    kv_store<width>(p);                                  \
  }

ENGINE_KV_STORE(kv_store_vector, kVec)
ENGINE_KV_STORE(kv_store_scalar, 1)
