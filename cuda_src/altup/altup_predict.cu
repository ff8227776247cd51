// Alternating updates (arXiv:2301.13310): the prediction of all residual streams.
//
//   m = tanh(router norm(h_0) / N),  R = coefs m,  h_i = h_i + sum_j R_ij h_j
//
// where `delta` is first added to all streams but h_0.
// Arguments: AltupPredictParams, below.
//
// Numerics: float, rounded once. Parallelisation: one block per token. It reads the first stream
// twice and the others once; a thread owns the same features of all streams, so it may overwrite
// them. Four of them at a time: the registers hold those of all streams.
// Mirror: engine/reference/altup_predict.py
#include "altup/altup_modalities.cuh"

struct AltupPredictParams {
  scalar_t* streams;            // (T, S, N) updated in place
  const scalar_t* delta;        // (T, N), or null
  const scalar_t* router_norm;  // (N,)
  const scalar_t* router;       // (S, N)
  const scalar_t* coefs;        // (S * S, S)
  scalar_t* own;                // (T, N) copy of the new first stream
  int n, num_streams;
  float eps;
};

template <int kWidth>
__device__ __forceinline__ void altup_predict(const AltupPredictParams& p) {
  using V = Vec<scalar_t, kWidth>;
  const int64_t token = blockIdx.x;
  scalar_t* const streams = p.streams + token * p.num_streams * p.n;
  pdl_trigger();
  pdl_wait();
  const auto m = modalities<kWidth>(streams, p.router_norm, p.router, p.n, p.num_streams, p.eps);
  __shared__ float smem_mixing[kMaxStreams * kMaxStreams];
  const int count = p.num_streams * p.num_streams;
  if (threadIdx.x < count)
    smem_mixing[threadIdx.x] = coefficient(p.coefs, threadIdx.x, p.num_streams, m);
  __syncthreads();
  for_own_features<kWidth>(p.n, [&](int c) {
    V delta{};
    if (p.delta != nullptr) delta = load_vec<scalar_t, kWidth>(p.delta + token * p.n + c);
    float h[kMaxStreams][kWidth];
#pragma unroll
    for (int i = 0; i < kMaxStreams; ++i) {
      V values{};
      if (i < p.num_streams)
        values = load_vec<scalar_t, kWidth>(streams + static_cast<int64_t>(i) * p.n + c);
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        h[i][j] = to_float(values.v[j]) + (i > 0 ? to_float(delta.v[j]) : 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kMaxStreams; ++i) {
      if (i >= p.num_streams) continue;
      V y;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float sum = h[i][j];
#pragma unroll
        for (int k = 0; k < kMaxStreams; ++k)
          if (k < p.num_streams) sum = fmaf(smem_mixing[i * p.num_streams + k], h[k][j], sum);
        y.v[j] = from_float<scalar_t>(sum);
      }
      store_vec(streams + static_cast<int64_t>(i) * p.n + c, y);
      if (i == 0) store_vec(p.own + token * p.n + c, y);
    }
  });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    altup_predict_vector(const __grid_constant__ AltupPredictParams p) {
  altup_predict<4>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    altup_predict_scalar(const __grid_constant__ AltupPredictParams p) {
  altup_predict<1>(p);
}
