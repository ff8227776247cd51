// Philox4x32-10 (Salmon et al., SC 2011) and Gumbel noise. Mirror: engine/reference/_philox.py
#pragma once

#include "sample/exact_math.cuh"
#include "common/types.cuh"

struct Words {
  uint32_t v[4];
};

// Returns the four random words of counter (group, position, 0) under the key `seed`.
__device__ __forceinline__ Words philox(uint64_t seed, uint64_t position, uint32_t group) {
  uint32_t c0 = group, c1 = static_cast<uint32_t>(position);
  uint32_t c2 = static_cast<uint32_t>(position >> 32), c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xd2511f53u;
    const uint64_t p1 = static_cast<uint64_t>(c2) * 0xcd9e8d57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// -log2(-log2(u)) with u = (word + 1/2) / 2^32. Near u = 1 it uses 1 - u, which loses no digits.
__device__ __forceinline__ float gumbel(uint32_t word) {
  float minus_log;
  if (word >= 0xb504f334u) {  // u >= sqrt(1/2)
    minus_log = -log2_one_plus(-__fadd_rn(__uint2float_rn(~word), 0.5f) * 0x1p-32f);
  } else {
    minus_log = __fsub_rn(32.0f, exact_log2(__fadd_rn(__uint2float_rn(word), 0.5f)));
  }
  return -exact_log2(minus_log);
}

// A cheap upper bound on gumbel(word): with z leading zeros of ~word, 1 - u >= 2^(-1 - z), and
// -log2(u) >= (1 - u) / ln 2.
__device__ __forceinline__ float gumbel_bound(uint32_t word) {
  return __int2float_rn(__clz(~word)) + 0.5f;
}
constexpr float kGumbelLowest = -6.0f;   // below gumbel(0) = -5.04
constexpr float kGumbelHighest = 32.5f;  // upper limit of gumbel_bound
