// Sums each token's weighted expert outputs.
//
//   out[t] = sum over j of y[t, j] + shared[t] * sigmoid(shared_gate[t]) + residual[t]
//   y[t, j] = weights[t, j] * identity[t] if experts[t, j] >= first_identity, else pairs[t, j]
//
//   pairs              (T, top_k, N) scalar_t  contiguous
//   experts            (T, top_k) int          read, as are the next two, by the kernels
//   weights            (T, top_k) float        moe_combine_identity_*
//   identity           (T, N) scalar_t         contiguous, or null: it counts as 0
//   shared, residual   (T, N) scalar_t         contiguous, or null; residual may be out
//   shared_gate        (T,) scalar_t           or null: shared is added ungated
//   out                (T, N) scalar_t         contiguous
//
// Numerics: float, added in the order above, rounded once.
// Parallelisation: one thread per kWidth features of a token; blockIdx.x walks a row, blockIdx.y
// the rows. The loads of eight experts, the shared expert and the residual are in flight before the
// first is used. A thread writes only what it has read.
// Mirror: engine/reference/moe_combine.py
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kBatch = 8;  // experts loaded together

// Loads kWidth features of one row; zeros if `p` is null.
template <int kWidth>
__device__ __forceinline__ Packed<kWidth> load_or_zero(const scalar_t* p, int64_t at) {
  return p != nullptr ? load_packed<kWidth>(p + at) : Packed<kWidth>{};
}

template <int kWidth>
__device__ __forceinline__ void add(float (&sum)[kWidth], const Packed<kWidth>& x, float scale) {
  const Vec<scalar_t, kWidth> own = unpack<kWidth>(x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] += to_float(own.v[i]) * scale;
}

template <int kWidth, bool kHasIdentity>
__device__ __forceinline__ void combine(const scalar_t* pairs, const int* experts,
                                        const float* weights, const scalar_t* identity,
                                        const scalar_t* shared, const scalar_t* shared_gate,
                                        const scalar_t* residual, scalar_t* out, int64_t num_tokens,
                                        int top_k, int num_features, int first_identity) {
  pdl_trigger();
  pdl_wait();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (column >= num_features) return;
#pragma unroll 1
  for (int64_t row = blockIdx.y; row < num_tokens; row += gridDim.y) {
    const int64_t at = row * num_features + column;
    const Packed<kWidth> own_shared = load_or_zero<kWidth>(shared, at);
    const Packed<kWidth> own_residual = load_or_zero<kWidth>(residual, at);
    const Packed<kWidth> own_identity = load_or_zero<kWidth>(kHasIdentity ? identity : nullptr, at);
    const float gate = shared_gate != nullptr ? to_float(shared_gate[row]) : 0.0f;
    const scalar_t* from = pairs + row * top_k * num_features + column;
    float sum[kWidth] = {};
#pragma unroll 1
    for (int first = 0; first < top_k; first += kBatch) {
      Packed<kWidth> x[kBatch];
      float scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        x[i] = Packed<kWidth>{};
        scale[i] = 1.0f;
        if (first + i >= top_k) continue;
        const int64_t pair = row * top_k + first + i;
        if (kHasIdentity && experts[pair] >= first_identity) {
          x[i] = own_identity;
          scale[i] = weights[pair];
        } else {
          x[i] = load_packed<kWidth>(from + static_cast<int64_t>(first + i) * num_features);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add<kWidth>(sum, x[i], scale[i]);  // unused: zeros
    }
    const float gated = shared_gate != nullptr ? 1.0f / (1.0f + expf(-gate)) : 1.0f;
    if (shared != nullptr) add<kWidth>(sum, own_shared, gated);
    if (residual != nullptr) add<kWidth>(sum, own_residual, 1.0f);
    Vec<scalar_t, kWidth> y;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y.v[i] = from_float<scalar_t>(sum[i]);
    store_vec(out + at, y);
  }
}

#define ENGINE_MOE_COMBINE(name, width, has_identity)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) name(                                     \
      const scalar_t* pairs, const int* experts, const float* weights, const scalar_t* identity,   \
      const scalar_t* shared, const scalar_t* shared_gate, const scalar_t* residual,               \
      scalar_t* out, int64_t num_tokens, int top_k, int num_features, int first_identity) {        \
    combine<width, has_identity>(pairs, experts, weights, identity, shared, shared_gate, residual, \
                                 out, num_tokens, top_k, num_features, first_identity);            \
  }

ENGINE_MOE_COMBINE(moe_combine_vector, kVec, false)
ENGINE_MOE_COMBINE(moe_combine_scalar, 1, false)
ENGINE_MOE_COMBINE(moe_combine_identity_vector, kVec, true)
ENGINE_MOE_COMBINE(moe_combine_identity_scalar, 1, true)
