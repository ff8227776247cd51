// Keys of every head from latents multiplied by the up-projection: prefill attention of multi-head
// latent attention.
//
//   k[t, h] = [up[t, h, :N] | k_rope[t]]
//
// The rotated key of a token is common to its heads. Values need no copy: attention_prefill reads
// up[t, h, N:] in place. Arguments: MlaExpandParams, below.
//
// Numerics: a copy.
// Parallelisation: a thread writes kWidth values; blockIdx.x is the token.
// Mirror: engine/reference/mla_expand.py
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;

struct MlaExpandParams {
  const scalar_t* up;                                 // (T, H, N + any)
  const scalar_t* k_rope;                             // (T, R)
  scalar_t* k;                                        // (T, H, N + R) contiguous
  int64_t up_stride_t, up_stride_h, k_rope_stride_t;  // elements
  int num_heads, nope, rope;                          // H, N, R
};

template <int kWidth>
__device__ __forceinline__ void mla_expand(const MlaExpandParams& p) {
  const int64_t token = blockIdx.x;
  const int width = p.nope + p.rope, items = width / kWidth;  // vectors of a head
  for (int i = threadIdx.x; i < p.num_heads * items; i += kThreads) {
    const int head = i / items, column = i % items * kWidth;
    const scalar_t* const from = column < p.nope
                                     ? p.up + token * p.up_stride_t + head * p.up_stride_h + column
                                     : p.k_rope + token * p.k_rope_stride_t + column - p.nope;
    store_vec(p.k + (token * p.num_heads + head) * width + column,
              load_vec<scalar_t, kWidth>(from));
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
