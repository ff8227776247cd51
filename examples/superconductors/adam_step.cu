// A step of Adam: the gradient's norm, then every weight with its moments and its mean over steps.
#include "common/reduce.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kParts = 128;  // blocks that sum squares

extern "C" __global__ void __launch_bounds__(kThreads)
    sum_squares(const float* gradient, float* parts, int P) {
  __shared__ float smem[kThreads / kWarpSize];
  float sum = 0.0f;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < P; i += kParts * kThreads)
    sum += gradient[i] * gradient[i];
  sum = block_sum<kThreads / kWarpSize>(sum, smem);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    adam_step(float* weights, float* first, float* second, float* mean, const float* gradient,
              const float* parts, const float* schedule, int P, float decay, float clip,
              float beta_1, float beta_2) {
  __shared__ float smem[kThreads / kWarpSize];
  const float squares =
      block_sum<kThreads / kWarpSize>(threadIdx.x < kParts ? parts[threadIdx.x] : 0.0f, smem);
  const float scale = fminf(1.0f, clip / (sqrtf(squares) + 1e-12f));
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= P) return;
  const float rate = schedule[0], correction = schedule[1], mean_share = schedule[2];
  const float g = gradient[i] * scale;
  const float m = first[i] += (1.0f - beta_1) * (g - first[i]);
  const float v = second[i] += (1.0f - beta_2) * (g * g - second[i]);
  const float w = weights[i] * (1.0f - rate * decay) - rate * correction * m / (sqrtf(v) + 1e-8f);
  weights[i] = w;
  mean[i] += mean_share * (w - mean[i]);
}
