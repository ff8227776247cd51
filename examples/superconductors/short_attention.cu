// Attention within short sequences: what it costs is moving the rows. A block loads a few whole
// sequences to shared memory; a thread is a query and head, and its neighbours in the warp read the
// same keys at the same time.
#include "common/cp_async.cuh"
#include "common/types.cuh"

constexpr int kLength = LENGTH, kHeads = HEADS, kDim = HEAD_DIM;
constexpr int kThreads = 256;
constexpr int kQueries = kHeads * kLength;  // queries of a sequence, over all heads
constexpr int kSequences = kQueries < kThreads ? kThreads / kQueries : 1;
constexpr int kRowVectors = 3 * kHeads * kDim / 8;
constexpr int kPitch = kRowVectors + 1;  // lanes that read one vector of eight rows touch all banks
constexpr int kVectors = kDim / 8;

__device__ __forceinline__ void widen(float (&x)[8], const uint4& v) {
  const auto& values = reinterpret_cast<const Vec<scalar_t, 8>&>(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_float(values.v[i]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    short_attention(const scalar_t* qkv, scalar_t* out, int64_t S, float scale) {
  extern __shared__ uint4 rows[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSequences;
  const int count = static_cast<int>(min(static_cast<int64_t>(kSequences), S - first));
  const uint4* const source = reinterpret_cast<const uint4*>(qkv) + first * kLength * kRowVectors;
  for (int i = threadIdx.x; i < count * kLength * kRowVectors; i += kThreads)
    cp_async_16(rows + i / kRowVectors * kPitch + i % kRowVectors, source + i);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();

  for (int i = threadIdx.x; i < count * kQueries; i += kThreads) {
    const int sequence = i / kQueries, head = i % kQueries / kLength, token = i % kLength;
    const uint4* const tokens = rows + sequence * kLength * kPitch + head * kVectors;
    float q[kDim], scores[kLength], highest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      widen(reinterpret_cast<float (&)[8]>(q[8 * j]), tokens[token * kPitch + j]);
#pragma unroll
    for (int key = 0; key < kLength; ++key) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float k[8];
        widen(k, tokens[key * kPitch + kHeads * kVectors + j]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += q[8 * j + e] * k[e];
      }
      scores[key] = sum * scale;
      highest = fmaxf(highest, scores[key]);
    }
    float total = 0.0f;
#pragma unroll
    for (int key = 0; key < kLength; ++key) {
      scores[key] = exp2f(scores[key] - highest);
      total += scores[key];
    }
    float mixed[kDim] = {};
#pragma unroll
    for (int key = 0; key < kLength; ++key) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float v[8];
        widen(v, tokens[key * kPitch + 2 * kHeads * kVectors + j]);
#pragma unroll
        for (int e = 0; e < 8; ++e) mixed[8 * j + e] += scores[key] * v[e];
      }
    }
    const float share = 1.0f / total;
    scalar_t* const to = out + (((first + sequence) * kLength + token) * kHeads + head) * kDim;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float* const m = mixed + 8 * j;
      const uint4 v = {
          pack2<scalar_t>(m[0] * share, m[1] * share), pack2<scalar_t>(m[2] * share, m[3] * share),
          pack2<scalar_t>(m[4] * share, m[5] * share), pack2<scalar_t>(m[6] * share, m[7] * share)};
      reinterpret_cast<uint4*>(to)[j] = v;
    }
  }
}
