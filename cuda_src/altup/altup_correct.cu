// Alternating updates (arXiv:2301.13310): a layer's result corrects all residual streams.
//
//   m = tanh(router norm(x) / N),  c = coefs m,  p_i = p_i + (x - p_0) (1 + c_i)
//
// Arguments: AltupCorrectParams, below.
//
// Numerics: float, rounded once. Parallelisation: one block per token. A thread owns the same
// features of all streams, so it may overwrite them.
// Mirror: engine/reference/altup_correct.py
#include "altup/altup_modalities.cuh"

struct AltupCorrectParams {
  scalar_t* streams;            // (T, S, N) predictions, updated in place
  const scalar_t* x;            // (T, N)
  const scalar_t* scale;        // (N,), or null
  const scalar_t* router_norm;  // (N,)
  const scalar_t* router;       // (S, N)
  const scalar_t* coefs;        // (S, S)
  scalar_t* own;                // (T, N) copy of the new first stream, times scale
  int n, num_streams;
  float eps;
};

template <int kWidth>
__device__ __forceinline__ void altup_correct(const AltupCorrectParams& p) {
  using V = Vec<scalar_t, kWidth>;
  const int64_t token = blockIdx.x;
  scalar_t* const streams = p.streams + token * p.num_streams * p.n;
  const scalar_t* const x = p.x + token * p.n;
  pdl_trigger();
  pdl_wait();
  const auto m = modalities<kWidth>(x, p.router_norm, p.router, p.n, p.num_streams, p.eps);
  float factors[kMaxStreams];
#pragma unroll
  for (int i = 0; i < kMaxStreams; ++i)
    factors[i] = i < p.num_streams ? 1.0f + coefficient(p.coefs, i, p.num_streams, m) : 0.0f;
  for_own_features<kWidth>(p.n, [&](int c) {
    const V result = load_vec<scalar_t, kWidth>(x + c);
    const V predicted = load_vec<scalar_t, kWidth>(streams + c);
    float innovation[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j)
      innovation[j] = to_float(result.v[j]) - to_float(predicted.v[j]);
#pragma unroll
    for (int i = 0; i < kMaxStreams; ++i) {
      if (i >= p.num_streams) break;
      scalar_t* const stream = streams + static_cast<int64_t>(i) * p.n + c;
      V y = load_vec<scalar_t, kWidth>(stream);
      V own;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float corrected = fmaf(innovation[j], factors[i], to_float(y.v[j]));
        const float scale = p.scale != nullptr ? to_float(p.scale[c + j]) : 1.0f;
        y.v[j] = from_float<scalar_t>(corrected);
        own.v[j] = from_float<scalar_t>(corrected * scale);
      }
      store_vec(stream, y);
      if (i == 0) store_vec(p.own + token * p.n + c, own);
    }
  });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    altup_correct_vector(const __grid_constant__ AltupCorrectParams p) {
  altup_correct<kVec>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    altup_correct_scalar(const __grid_constant__ AltupCorrectParams p) {
  altup_correct<1>(p);
}
