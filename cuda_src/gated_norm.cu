// RMSNorm of each head with an output gate.
//
//   y = h / sqrt(mean(h^2) + eps) * weight * gate       h = x, gate = activation(z)
//
// With gate_first: h = x * activation(z), gate = 1. activation is silu or the sigmoid. Arguments:
// GatedNormParams, below.
//
// Numerics: float; rounded once.
// Parallelisation: a warp per head of up to 256 features, which stay in registers; a block per
// longer head, or per head that is not aligned, which reads it twice. The choice depends on D
// alone. A thread writes only what it alone reads, so the op may run in place.
// Mirror: engine/reference/gated_norm.py
#include "common/activation.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

struct GatedNormParams {
  const scalar_t *x, *z;   // (T, H, D), last axis contiguous
  const scalar_t* weight;  // (D,), or (H, D) with weight_stride_h = D
  scalar_t* out;           // (T, H, D) contiguous; may be x or z
  int64_t x_stride_t, x_stride_h, z_stride_t, z_stride_h, weight_stride_h;  // elements
  int64_t num_rows;                                                         // T * H
  int num_heads;                                                            // H
  int head_dim;                                                             // D
  float eps;
  int is_silu;     // else the sigmoid
  int gate_first;  // gate before the norm
};

struct Head {
  const scalar_t *x, *z, *weight;
  scalar_t* out;

  __device__ __forceinline__ Head(const GatedNormParams& p, int64_t row) {
    const int64_t t = row / p.num_heads;
    const int h = static_cast<int>(row - t * p.num_heads);
    x = p.x + t * p.x_stride_t + h * p.x_stride_h;
    z = p.z + t * p.z_stride_t + h * p.z_stride_h;
    weight = p.weight + h * p.weight_stride_h;
    out = p.out + row * p.head_dim;
  }
};

// h and the gate after the norm, of kWidth features from `i` on.
template <int kWidth>
struct Features {
  float h[kWidth], gate[kWidth];

  __device__ __forceinline__ void load(const GatedNormParams& p, const Head& head, int i) {
    const auto x = load_vec<scalar_t, kWidth>(head.x + i);
    const auto z = load_vec<scalar_t, kWidth>(head.z + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = to_float(z.v[j]);
      gate[j] = p.is_silu != 0 ? silu(value) : __fdividef(1.0f, 1.0f + expf(-value));
      h[j] = to_float(x.v[j]);
      if (p.gate_first != 0) {
        h[j] *= gate[j];
        gate[j] = 1.0f;
      }
    }
  }

  __device__ __forceinline__ float sum_of_squares() const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += h[j] * h[j];
    return sum;
  }

  __device__ __forceinline__ void store(const Head& head, int i, float scale) const {
    const auto weight = load_vec<scalar_t, kWidth>(head.weight + i);
    Vec<scalar_t, kWidth> y;
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      y.v[j] = from_float<scalar_t>(h[j] * scale * to_float(weight.v[j]) * gate[j]);
    store_vec(head.out + i, y);
  }
};

__device__ __forceinline__ float norm_scale(const GatedNormParams& p, float sum) {
  return 1.0f / sqrtf(sum / p.head_dim + p.eps);
}

// A warp per head: kVectors vectors of kWidth features per lane.
template <int kWidth, int kVectors>
__device__ __forceinline__ void short_heads(const GatedNormParams& p) {
  pdl_trigger();
  pdl_wait();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= p.num_rows) return;  // SAFETY: a warp exits as a whole.
  const Head head(p, row);
  const int first = threadIdx.x % kWarpSize * kWidth;
  Features<kWidth> features[kVectors];
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int i = first + n * kWarpSize * kWidth;
    if (i >= p.head_dim) continue;
    features[n].load(p, head, i);
    sum += features[n].sum_of_squares();
  }
  const float scale = norm_scale(p, warp_sum(sum));
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int i = first + n * kWarpSize * kWidth;
    if (i < p.head_dim) features[n].store(head, i, scale);
  }
}

// A block per head of any length.
template <int kWidth>
__device__ __forceinline__ void long_heads(const GatedNormParams& p) {
  __shared__ float smem_sums[kWarps];
  pdl_trigger();
  pdl_wait();
  const Head head(p, blockIdx.x);
  Features<kWidth> features;
  float sum = 0.0f;
  for (int i = threadIdx.x * kWidth; i < p.head_dim; i += kThreads * kWidth) {
    features.load(p, head, i);
    sum += features.sum_of_squares();
  }
  const float scale = norm_scale(p, block_sum<kWarps>(sum, smem_sums));
  for (int i = threadIdx.x * kWidth; i < p.head_dim; i += kThreads * kWidth) {
    features.load(p, head, i);
    features.store(head, i, scale);
  }
}

#define ENGINE_GATED_NORM(name, function)                \
  extern "C" __global__ void __launch_bounds__(kThreads) \
      name(const __grid_constant__ GatedNormParams p) {  \
    function(p);                                         \
  }

ENGINE_GATED_NORM(gated_norm_short_1, (short_heads<4, 1>))
ENGINE_GATED_NORM(gated_norm_short_2, (short_heads<4, 2>))
ENGINE_GATED_NORM(gated_norm_long_vector, long_heads<kVec>)
ENGINE_GATED_NORM(gated_norm_long_scalar, long_heads<1>)
