// Products of rows by a matrix in panels on the CPU, compiled by the machine's C compiler.
//
//   y[t, n] = sum over groups q of  scales[q, n] * (sum over k in q of x[t, k] * codes[k, n])
//                                 + offsets[q, n] * (sum over k in q of x[t, k])
//
// | Argument | Shape        | Type  |                                                        |
// |----------|--------------|-------|--------------------------------------------------------|
// | x        | (T, K)       | float | rows, K = G * g                                        |
// | codes    | (P, G, g, 64)| int8  | P = ceil(N / 64) panels of 64 output features; with 4  |
// |          |              |       | bits (P, G, g / 2, 64), see engine/weights/panels.py   |
// | scales   | (P, G, 64)   | float |                                                        |
// | offsets  | (P, G, 64)   | float | or NULL                                                |
// | y        | (T, N)       | float |                                                        |
//
// Numerics: float32, the input features of a group in order, then the groups in order. What a
// panel computes depends on nothing else, so the bits do not depend on the number of threads.
//
// Parallelisation: a panel is computed by one thread. Threads take chunks of panels until none is
// left (helpers.h).
//
// The mirror is engine/reference/gemm_wna16.py.

#include "helpers.h"
#include "vectors.h"

enum { kWidth = 64 };    // output features of a panel
enum { kAhead = 4096 };  // distance at which codes are prefetched, bytes

// The codes of as many columns as a vector has lanes, as integers. A tile has up to kMaxTile rows,
// and its sums take kAccumulators vector registers: the others hold codes and a number of x.
#if defined(__AVX512F__)
enum { kMaxTile = 6, kAccumulators = 24 };
typedef __m512i Codes;
static inline Codes load_codes(const int8_t* from) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
}
static inline Vector widen(Codes codes) { return _mm512_cvtepi32_ps(codes); }
// The number of a code, looked up by its 4 bits.
static inline Vector widen_low_half(Codes codes) {
  const Vector numbers = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  return _mm512_permutexvar_ps(codes, numbers);
}
static inline Vector widen_high_half(Codes codes) {
  return widen_low_half(_mm512_srli_epi32(codes, 4));
}
#elif defined(__AVX2__)
enum { kMaxTile = 5, kAccumulators = 12 };
typedef __m256i Codes;
static inline Codes load_codes(const int8_t* from) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
static inline Vector widen(Codes codes) { return _mm256_cvtepi32_ps(codes); }
static inline Vector widen_low_half(Codes codes) {
  return widen(_mm256_srai_epi32(_mm256_slli_epi32(codes, 28), 28));
}
static inline Vector widen_high_half(Codes codes) { return widen(_mm256_srai_epi32(codes, 4)); }
#elif defined(__ARM_NEON)
enum { kMaxTile = 6, kAccumulators = 24 };
typedef int32x4_t Codes;
static inline Codes load_codes(const int8_t* from) {
  int32_t four;
  memcpy(&four, from, sizeof four);
  return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}
static inline Vector widen(Codes codes) { return vcvtq_f32_s32(codes); }
static inline Vector widen_low_half(Codes codes) {
  return widen(vshrq_n_s32(vshlq_n_s32(codes, 28), 28));
}
static inline Vector widen_high_half(Codes codes) { return widen(vshrq_n_s32(codes, 4)); }
#endif

enum { kVectors = kWidth / kLanes };  // vectors of a panel's row

// A product; see panels_multiply.
typedef struct {
  const float* x;
  const float* group_sums;  // (T, G), the sums of x over each group; read with offsets only
  const int8_t* codes;
  const float* scales;
  const float* offsets;
  float* y;
  int64_t num_rows;     // T
  int64_t num_outputs;  // N
  int64_t num_groups;   // G
  int64_t group;        // g
  int64_t bits;         // of a code, 8 or 4
  int64_t num_panels;   // P
  int64_t chunk;        // panels that a thread takes at a time
} Task;

// The vectors of a panel's row that a tile of T rows computes at a time: as many as there are
// registers for.
#define FITS(T, vectors) ((T) * (vectors) <= kAccumulators)
#define STRIP(T) \
  (FITS(T, kVectors) ? kVectors : FITS(T, kVectors / 2) ? kVectors / 2 : kVectors / 4)

// y (T, 64) = the product of T rows, at most kMaxTile, by panel p. T and bits are constants where
// this is inlined, so that the sums stay in registers.
static inline __attribute__((always_inline)) void multiply_tile(const Task* task, int64_t p,
                                                                int64_t row, const int T,
                                                                const int bits,
                                                                float (*y)[kWidth]) {
  const int64_t G = task->num_groups;
  const int64_t g = task->group;
  const float* x = task->x + row * G * g;
  const int strip = STRIP(T);
  const int64_t num_codes = bits == 4 ? g / 2 : g;  // of a group and a column
  memset(y, 0, (size_t)T * sizeof *y);
  for (int64_t q = 0; q < G; q++) {
    const int8_t* codes = task->codes + (p * G + q) * num_codes * kWidth;
    const float* scales = task->scales + (p * G + q) * kWidth;
    for (int v = 0; v < kVectors; v += strip) {
      Vector sums[kMaxTile][kVectors];
      memset(sums, 0, sizeof sums);
      for (int64_t k = 0; k < num_codes; k++) {
        const float* features = x + q * g + k;
        __builtin_prefetch(codes + k * kWidth + kAhead);
        for (int i = 0; i < strip; i++) {
          const Codes loaded = load_codes(codes + k * kWidth + (v + i) * kLanes);
          const Vector first = bits == 4 ? widen_low_half(loaded) : widen(loaded);
          for (int t = 0; t < T; t++) sums[t][i] += features[t * G * g] * first;
          if (bits == 4) {
            const Vector second = widen_high_half(loaded);
            for (int t = 0; t < T; t++) sums[t][i] += features[t * G * g + g / 2] * second;
          }
        }
      }
      for (int i = 0; i < strip; i++) {
        const int column = (v + i) * kLanes;
        for (int t = 0; t < T; t++) {
          Vector sum = load(y[t] + column) + sums[t][i] * load(scales + column);
          if (task->offsets != NULL) {
            const float* offsets = task->offsets + (p * G + q) * kWidth;
            sum += task->group_sums[(row + t) * G + q] * load(offsets + column);
          }
          store(y[t] + column, sum);
        }
      }
    }
  }
}

static inline __attribute__((always_inline)) void multiply_rows(const Task* task, int64_t p,
                                                                int64_t row, int T, const int bits,
                                                                float (*y)[kWidth]) {
  switch (T) {
    case 1:
      multiply_tile(task, p, row, 1, bits, y);
      break;
    case 2:
      multiply_tile(task, p, row, 2, bits, y);
      break;
    case 3:
      multiply_tile(task, p, row, 3, bits, y);
      break;
    case 4:
      multiply_tile(task, p, row, 4, bits, y);
      break;
    case 5:
      multiply_tile(task, p, row, 5, bits, y);
      break;
    default:
      multiply_tile(task, p, row, kMaxTile, bits, y);
  }
}

static void multiply_panel(const Task* task, int64_t p) {
  const int64_t N = task->num_outputs;
  const int64_t left = N - p * kWidth;
  const size_t size = sizeof(float) * (size_t)(left < kWidth ? left : kWidth);
  for (int64_t row = 0; row < task->num_rows; row += kMaxTile) {
    float y[kMaxTile][kWidth];
    const int64_t rest = task->num_rows - row;
    const int T = rest < kMaxTile ? (int)rest : kMaxTile;
    if (task->bits == 4) {
      multiply_rows(task, p, row, T, 4, y);
    } else {
      multiply_rows(task, p, row, T, 8, y);
    }
    for (int t = 0; t < T; t++) memcpy(task->y + (row + t) * N + p * kWidth, y[t], size);
  }
}

static void multiply_chunk(const void* given, int64_t chunk) {
  const Task* task = given;
  const int64_t first = chunk * task->chunk;
  const int64_t left = task->num_panels - first;
  const int64_t count = left < task->chunk ? left : task->chunk;
  for (int64_t p = first; p < first + count; p++) multiply_panel(task, p);
}

static float sum_of(const float* x, int64_t count) {
  Vector sums = {0};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) sums += load(x + k);
  float sum = sum_of_lanes(sums);
  for (; k < count; k++) sum += x[k];
  return sum;
}

// Write x W^T to y. `num_threads` > 1 shares the work with helpers; one caller at a time may.
// `group_sums` is a buffer for T * G floats.
EXPORT void panels_multiply(const float* x, const int8_t* codes, const float* scales,
                            const float* offsets, float* y, float* group_sums, int64_t num_rows,
                            int64_t num_outputs, int64_t num_groups, int64_t group, int64_t bits,
                            int64_t num_threads) {
  const int64_t num_panels = (num_outputs + kWidth - 1) / kWidth;
  // A quarter of a thread's share: few chunks to take, and many enough to even out.
  const int64_t quarter = num_panels / (4 * num_threads);
  if (offsets != NULL) {
    for (int64_t q = 0; q < num_rows * num_groups; q++)
      group_sums[q] = sum_of(x + q * group, group);
  }
  const Task task = {.x = x,
                     .group_sums = group_sums,
                     .codes = codes,
                     .scales = scales,
                     .offsets = offsets,
                     .y = y,
                     .num_rows = num_rows,
                     .num_outputs = num_outputs,
                     .num_groups = num_groups,
                     .group = group,
                     .bits = bits,
                     .num_panels = num_panels,
                     .chunk = quarter > 0 ? quarter : 1};
  const int64_t num_chunks = (num_panels + task.chunk - 1) / task.chunk;
  run_parts(multiply_chunk, &task, num_chunks, num_threads > 1);
}
