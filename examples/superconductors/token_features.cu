// Features of tokens: a thread computes a token's row in shared memory, and the block stores the
// rows of all its tokens in one piece.
#include "common/types.cuh"

constexpr int kFeatures = 48;
constexpr int kTokens = 128;           // tokens per block, a thread each
constexpr int kPitch = kFeatures + 1;  // threads that write one feature touch all banks

extern "C" __global__ void __launch_bounds__(kTokens)
    token_features(const float* fractions, const float* amounts, const float* tc,
                   const float* distances, float* out, int64_t T) {
  __shared__ float rows[kTokens * kPitch];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int64_t i = first + threadIdx.x;
  if (i < T) {
    float* const row = rows + threadIdx.x * kPitch;
    const float f = fractions[i], a = amounts[i], t = tc[i], d = distances[i];
    int n = 0;
#pragma unroll
    for (int k = 0; k < 5; ++k, n += 1) sincospif(f * (1 << k), row + n, row + n + 5);
    n += 5;
#pragma unroll
    for (int k = 0; k < 7; ++k, n += 1) sincospif(8.0f * a / (1 << k), row + n, row + n + 7);
    n += 7;
    row[n++] = logf(f + 1e-3f) / 3.0f;
    row[n++] = logf(a + 1e-2f) / 2.0f;
    row[n++] = log1pf(a) / 2.0f;
    row[n++] = f;
    row[n++] = f * f;
    row[n++] = sqrtf(f);
    const float reaches[4] = {0.003f, 0.01f, 0.03f, 0.1f};
    float near[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) row[n++] = near[k] = expf(-d / reaches[k]);
    row[n++] = t / 30.0f;
    row[n++] = log1pf(t) / 2.0f;
    row[n++] = sqrtf(t) / 4.0f;
    row[n++] = t > 0.0f ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) row[n++] = t / 30.0f * near[k];
    row[n++] = logf(d + 1e-3f) / 3.0f;
    row[n++] = sqrtf(d);
    while (n < kFeatures) row[n++] = 0.0f;
  }
  __syncthreads();
  const int count = kFeatures * static_cast<int>(min(static_cast<int64_t>(kTokens), T - first));
  for (int j = threadIdx.x; j < count; j += kTokens)
    out[first * kFeatures + j] = rows[j / kFeatures * kPitch + j % kFeatures];
}
