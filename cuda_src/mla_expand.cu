// Keys and values of every head from latents multiplied by the up-projection: prefill attention of
// multi-head latent attention.
//
//   k[t, h] = [up[t, h, :N] | k_rope[t]],  v[t, h] = [up[t, h, N:] | 0]      both N + R wide
//
// The rotated key of a token is common to its heads. Values are padded with zeros to the width of
// the keys, since attention_prefill takes keys and values of one width. Arguments:
// MlaExpandParams, below.
//
// Numerics: a copy.
// Parallelisation: a thread writes kWidth values of k or of v; blockIdx.x is the token.
// Mirror: engine/reference/mla_expand.py
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;

struct MlaExpandParams {
  const scalar_t* up;                                 // (T, H, N + V)
  const scalar_t* k_rope;                             // (T, R)
  scalar_t *k, *v;                                    // (T, H, N + R) contiguous
  int64_t up_stride_t, up_stride_h, k_rope_stride_t;  // elements
  int num_heads, nope, rope, values;                  // H, N, R, V
};

template <int kWidth>
__device__ __forceinline__ void mla_expand(const MlaExpandParams& p) {
  const int64_t token = blockIdx.x;
  const int width = p.nope + p.rope, items = width / kWidth;  // vectors of a head of k, or of v
  for (int i = threadIdx.x; i < 2 * p.num_heads * items; i += kThreads) {
    const int head = i / items / 2, column = i % items * kWidth;
    const bool is_value = i / items % 2;
    const scalar_t* const up = p.up + token * p.up_stride_t + head * p.up_stride_h;
    Vec<scalar_t, kWidth> x{};
    if (is_value) {
      if (column < p.values) x = load_vec<scalar_t, kWidth>(up + p.nope + column);
    } else if (column < p.nope) {
      x = load_vec<scalar_t, kWidth>(up + column);
    } else {
      x = load_vec<scalar_t, kWidth>(p.k_rope + token * p.k_rope_stride_t + column - p.nope);
    }
    const int64_t row = token * p.num_heads + head;
    store_vec((is_value ? p.v : p.k) + row * width + column, x);
  }
}

#define ENGINE_MLA_EXPAND(name, width)                   \
  extern "C" __global__ void __launch_bounds__(kThreads) \
      name(const __grid_constant__ MlaExpandParams p) {  \
    pdl_trigger();                                       \
    pdl_wait();                                          \
    mla_expand<width>(p);                                \
  }

ENGINE_MLA_EXPAND(mla_expand_vector, kVec)
ENGINE_MLA_EXPAND(mla_expand_scalar, 1)
