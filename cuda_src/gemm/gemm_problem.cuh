// The problem solved by every gemm kernel, and its parameters.
//
//   out[m, n] = activation(sum_k x[m, k] * weight[n, k] + bias[n]) + residual[m, n]
//
// With kNorm, rmsnorm is fused: x[m, k] is replaced by
// round(x[m, k] * row_scales[m] * (norm_weight[k] + weight_offset)).
#pragma once

#include "common/types.cuh"
#include "common/epilogue.cuh"

// Parameters of the tiled kernels and of skinny_direct.cuh.
struct GemmParams {
  const scalar_t* x;  // (M, K), rows x_stride elements apart
  int64_t x_stride;
  const scalar_t* weight;       // (N, K) contiguous
  const scalar_t* norm_weight;  // (K,); null: no norm
  const float* row_scales;      // (M,) 1 / rms per row, for tiled kernels with a norm
  float eps, weight_offset;     // norm parameters
  const scalar_t* bias;         // (N,), or null
  const void* residual;         // shape and dtype of out, rows residual_stride apart; may be out
  int64_t residual_stride;      // elements
  void* out;                    // (M, N), or (M, N / 2) gated; scalar_t, or float if is_float
  int64_t out_stride;           // elements
  float* partials;              // (splits, M, N) partial sums over k; null: k is not split
  int m, n, k;
  int k_per_split;  // a multiple of the tile's k; blockIdx.y is the split index
  int activation;   // an Activation
  int is_float;
  int is_vector;  // rows of out and residual can be accessed four elements at a time
};

// Parameters of the skinny kernels that keep weights in a ring (skinny_ring.cuh) or in registers
// (gemv.cuh, resident_rows.cuh).
struct SkinnyParams {
  const scalar_t* x;  // (M, K), rows x_stride elements apart
  int64_t x_stride;
  const scalar_t* weight;       // (N, K) contiguous
  const scalar_t* norm_weight;  // (K,); null: no norm
  float eps, weight_offset;     // norm parameters
  const scalar_t* bias;         // (N,), or null
  const void* residual;         // shape and dtype of out, rows residual_stride apart; may be out
  int64_t residual_stride;      // elements
  void* out;                    // (M, N), or (M, N / 2) gated; scalar_t, or float if is_float
  int64_t out_stride;           // elements
  int m, n, k;
  int k_per_split;  // values of k per warp, a multiple of kStepK
  int num_tiles;    // tiles of blockDim.z * 16 rows of the weight
  int num_stages;   // stages per warp's ring: SkinnyShape's, or fewer if k has fewer steps
  int num_gates;    // number of gate rows if they all precede the up rows; else 0
  int activation;   // an Activation
  int is_float;
  int is_vector;  // rows of out and residual can be accessed four elements at a time
  int uses_pdl;   // the preceding kernel may still run; it writes neither weights nor bias
  int warms_up;   // gemv: one pass over stale data before the preceding kernel has ended
};

struct Norm {
  const scalar_t* weight;
  const float* row_scales;  // null in the skinny kernels: they compute the scales
  float eps, weight_offset;

  __device__ __forceinline__ scalar_t apply(scalar_t x, float scale, scalar_t w) const {
    return from_float<scalar_t>(to_float(x) * scale * (to_float(w) + weight_offset));
  }
};

// Parameters common to all kernels.
struct Problem {
  const scalar_t* x;
  const scalar_t* weight;
  int64_t x_stride;
  int m, n, k, k_per_split;
  float* partials;
  Norm norm;
  Epilogue epilogue;
};

template <typename Params>
__device__ __forceinline__ Epilogue epilogue_of(const Params& p) {
  return Epilogue{p.bias,       p.residual,   p.out,           p.residual_stride,
                  p.out_stride, p.activation, p.is_float != 0, p.is_vector != 0};
}

__device__ __forceinline__ Problem make_problem(const GemmParams& p) {
  const Epilogue epilogue = epilogue_of(p);
  return Problem{
      p.x,           p.weight,   p.x_stride,
      p.m,           p.n,        p.k,
      p.k_per_split, p.partials, Norm{p.norm_weight, p.row_scales, p.eps, p.weight_offset},
      epilogue};
}

__device__ __forceinline__ Problem make_problem(const SkinnyParams& p) {
  const Epilogue epilogue = epilogue_of(p);
  return Problem{p.x,           p.weight, p.x_stride,
                 p.m,           p.n,      p.k,
                 p.k_per_split, nullptr,  Norm{p.norm_weight, nullptr, p.eps, p.weight_offset},
                 epilogue};
}
