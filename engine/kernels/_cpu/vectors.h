// Vectors of floats, as wide as the machine's registers.

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { kLanes = 16 };
typedef __m512 Vector;
static inline float sum_of_lanes(Vector x) { return _mm512_reduce_add_ps(x); }
#elif defined(__AVX2__)
#include <immintrin.h>
enum { kLanes = 8 };
typedef __m256 Vector;
static inline float sum_of_lanes(Vector x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#elif defined(__ARM_NEON)
#include <arm_neon.h>
enum { kLanes = 4 };
typedef float32x4_t Vector;
static inline float sum_of_lanes(Vector x) { return vaddvq_f32(x); }
#else
#error "the CPU has neither AVX2 nor NEON"
#endif

static inline Vector load(const float* from) {
  Vector vector;
  memcpy(&vector, from, sizeof vector);
  return vector;
}

static inline void store(float* to, Vector vector) { memcpy(to, &vector, sizeof vector); }

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
