// Attention of one new token a sequence on the CPU, on float32 pages.
//
//   out[b, h] = softmax(scale * q[b, h] K^T) V, over the keys that sequence b sees
//
// | Argument         | Shape                  | Type  |                                          |
// |------------------|------------------------|-------|------------------------------------------|
// | out              | (B, H, D)              | float |                                          |
// | scratch          | (H D + H / K longest)  | float | a buffer; longest: of context_lens       |
// | q                | (B, H, D)              | float | strides q_batch, q_head; D contiguous    |
// | k, v             | (B, K, D)              | float | new tokens, or NULL; strides k_batch, ...|
// | positions        | (B)                    | int32 | with k, as the next five                 |
// | cos_sin          | (positions, R)         | float | [cos | sin]                              |
// | slot_mapping     | (B)                    | int64 | of k and v in the pages; -1: not stored  |
// | q_weight,        | (D)                    | float | of the norms of q and k, or NULL         |
// | k_weight         |                        |       |                                          |
// | k_pages, v_pages | (P, K, block_size, D)  | float | strides page, head, token; D contiguous  |
// | block_tables     | (B, NB)                | int32 | rows table_step apart                    |
// | context_lens     | (B)                    | int32 | with the new token                       |
//
// Strides are numbers of elements.
//
// Numerics: float32. A result is the sum over blocks of pages of the sums over their keys; it depends
// on nothing but its head and sequence.
//
// The mirror is engine/reference/attention_decode.py.

#include <float.h>
#include <math.h>

#include "vectors.h"

typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));

static inline Vector splat(float x) { return (Vector){0} + x; }

// e^x for x <= 0, 0 below -87; the relative error is about 1e-7. NaN stays NaN.
// Cephes' expf: x = n ln 2 + r, and e^r is a polynomial.
static inline Vector exp_of(Vector x) {
  const Vector magic = splat(12582912.0f);  // 1.5 * 2^23: x + magic is rounded to an integer
  const Vector shifted = x * 1.44269504f + magic;
  const Vector n = shifted - magic;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const Integers power = ((Integers)shifted << 23) + (127 << 23);
  const Integers is_low = (Integers)(x < splat(-87.0f));
  return (Vector)((Integers)(y * (Vector)power) & ~is_low);
}

// The sum of a[i] * b[i].
static inline float dot(const float* a, const float* b, int64_t count) {
  Vector sums[2] = {{0}, {0}};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    sums[0] += load(a + i) * load(b + i);
    sums[1] += load(a + i + kLanes) * load(b + i + kLanes);
  }
  if (i + kLanes <= count) {
    sums[0] += load(a + i) * load(b + i);
    i += kLanes;
  }
  float sum = sum_of_lanes(sums[0] + sums[1]);
  for (; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// y += the sum over `rows` of factors[row] * x[row * stride], for as many columns as `vectors`,
// a constant where this is inlined, have lanes.
static inline __attribute__((always_inline)) void add_strip(float* y, const float* factors,
                                                            const float* x, int64_t stride,
                                                            int64_t rows, const int vectors) {
  enum { kMaxVectors = 4 };
  Vector sums[kMaxVectors] = {{0}};
  for (int64_t row = 0; row < rows; row++) {
    for (int j = 0; j < vectors; j++) sums[j] += factors[row] * load(x + row * stride + j * kLanes);
  }
  for (int j = 0; j < vectors; j++) store(y + j * kLanes, load(y + j * kLanes) + sums[j]);
}

// The same for `count` columns.
static void add_rows(float* y, const float* factors, const float* x, int64_t stride, int64_t rows,
                     int64_t count) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    add_strip(y + i, factors, x + i, stride, rows, 4);
  for (; i + kLanes <= count; i += kLanes) add_strip(y + i, factors, x + i, stride, rows, 1);
  for (; i < count; i++) {
    float sum = 0;
    for (int64_t row = 0; row < rows; row++) sum += factors[row] * x[row * stride + i];
    y[i] += sum;
  }
}

// Replace scores by the exponentials of their differences to the largest; return their sum.
static float exponentials(float* scores, int64_t count) {
  // If every score is -inf, so are the differences to the lowest float, and the sum is 0.
  Vector largest_of_lanes = splat(-FLT_MAX);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector x = load(scores + i);
    const Integers is_larger = (Integers)(x > largest_of_lanes);
    largest_of_lanes =
        (Vector)(((Integers)x & is_larger) | ((Integers)largest_of_lanes & ~is_larger));
  }
  float largest = -FLT_MAX;
  for (int lane = 0; lane < kLanes; lane++) largest = fmaxf(largest, largest_of_lanes[lane]);
  for (; i < count; i++) largest = fmaxf(largest, scores[i]);
  Vector sums = {0};
  for (i = 0; i + kLanes <= count; i += kLanes) {
    const Vector y = exp_of(load(scores + i) - largest);
    store(scores + i, y);
    sums += y;
  }
  float sum = sum_of_lanes(sums);
  if (i < count) {
    float rest[kLanes] = {0};
    const size_t size = sizeof(float) * (size_t)(count - i);
    memcpy(rest, scores + i, size);
    store(rest, exp_of(load(rest) - largest));
    memcpy(scores + i, rest, size);
    for (int64_t j = 0; j < count - i; j++) sum += rest[j];
  }
  return sum;
}

// What all heads of a new token share.
typedef struct {
  const float* cos_sin;
  int64_t rotary_dim;
  int64_t head_dim;
  float eps;
  float weight_offset;
} NewToken;

// y = the head x, normalised unless `weight` is NULL, and rotated.
static void norm_and_rotate(const NewToken* token, const float* x, const float* weight, float* y) {
  const int64_t D = token->head_dim;
  const int64_t half = token->rotary_dim / 2;
  const float* cos = token->cos_sin;
  const float* sin = cos + half;
  if (weight != NULL) {
    const float inverse = 1.0f / sqrtf(dot(x, x, D) / (float)D + token->eps);
    for (int64_t i = 0; i < D; i++) y[i] = x[i] * inverse * (weight[i] + token->weight_offset);
  } else {
    memcpy(y, x, sizeof(float) * (size_t)D);
  }
  for (int64_t i = 0; i < half; i++) {
    const float first = y[i];
    const float second = y[half + i];
    y[i] = first * cos[i] - second * sin[i];
    y[half + i] = second * cos[i] + first * sin[i];
  }
}

typedef struct {
  float* k;
  float* v;
  int64_t page;
  int64_t head;
  int64_t token;
  int64_t block_size;
} Pages;

// The keys [first, end) that a sequence sees, in the blocks of its table.
typedef struct {
  const int32_t* table;
  int64_t first;
  int64_t end;
} Keys;

// Return how many keys from key i on lie in its block, and write where key/value head h of key i
// begins in the pages.
static int64_t count_in_block(const Keys* keys, const Pages* pages, int64_t h, int64_t i,
                              int64_t* begin) {
  const int64_t size = pages->block_size;
  const int64_t in_block = i % size;
  *begin = keys->table[i / size] * pages->page + h * pages->head + in_block * pages->token;
  const int64_t left = keys->end - i;
  return left < size - in_block ? left : size - in_block;
}

// Write attention of a group of scaled queries (group, D) to key/value head h to `out` (group, D).
// `scores` is a buffer of a number for each query and key.
static void attend(const float* queries, int64_t group, int64_t D, const Pages* pages, int64_t h,
                   const Keys* keys, float* scores, float* out) {
  const int64_t num_keys = keys->end - keys->first;
  int64_t begin;
  int64_t count;
  for (int64_t i = 0; i < num_keys; i += count) {
    count = count_in_block(keys, pages, h, keys->first + i, &begin);
    for (int64_t j = 0; j < count; j++) {
      const float* key = pages->k + begin + j * pages->token;
      for (int64_t g = 0; g < group; g++)
        scores[g * num_keys + i + j] = dot(queries + g * D, key, D);
    }
  }
  memset(out, 0, sizeof(float) * (size_t)(group * D));
  for (int64_t g = 0; g < group; g++) {
    float* row = scores + g * num_keys;
    float* result = out + g * D;
    const float sum = exponentials(row, num_keys);
    for (int64_t i = 0; i < num_keys; i += count) {
      count = count_in_block(keys, pages, h, keys->first + i, &begin);
      add_rows(result, row + i, pages->v + begin, pages->token, count, D);
    }
    for (int64_t d = 0; d < D; d++) result[d] /= fmaxf(sum, FLT_MIN);
  }
}

EXPORT void attention_decode(float* out, float* scratch, const float* q, int64_t q_batch,
                             int64_t q_head, const float* k, int64_t k_batch, int64_t k_head,
                             const float* v, int64_t v_batch, int64_t v_head,
                             const int32_t* positions, const float* cos_sin, int64_t rotary_dim,
                             const int64_t* slot_mapping, const float* q_weight,
                             const float* k_weight, float eps, float weight_offset, float* k_pages,
                             float* v_pages, int64_t page, int64_t head, int64_t token,
                             int64_t block_size, const int32_t* block_tables, int64_t table_step,
                             const int32_t* context_lens, int64_t num_sequences, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window,
                             int64_t chunk) {
  const int64_t D = head_dim;
  const int64_t group = num_heads / num_kv_heads;
  const Pages pages = {k_pages, v_pages, page, head, token, block_size};
  NewToken new_token = {NULL, rotary_dim, D, eps, weight_offset};
  for (int64_t b = 0; k != NULL && b < num_sequences; b++) {
    const int64_t slot = slot_mapping[b];
    new_token.cos_sin = cos_sin + positions[b] * rotary_dim;
    for (int64_t h = 0; slot >= 0 && h < num_kv_heads; h++) {
      const int64_t to = slot / block_size * page + h * head + slot % block_size * token;
      norm_and_rotate(&new_token, k + b * k_batch + h * k_head, k_weight, k_pages + to);
      memcpy(v_pages + to, v + b * v_batch + h * v_head, sizeof(float) * (size_t)D);
    }
  }
  float* queries = scratch;
  float* scores = scratch + num_heads * D;
  for (int64_t b = 0; b < num_sequences; b++) {
    const int64_t length = context_lens[b];
    const int64_t reach = chunk ? (length - 1) % chunk + 1 : window ? window : length;
    const Keys keys = {block_tables + b * table_step, length > reach ? length - reach : 0, length};
    if (k != NULL) new_token.cos_sin = cos_sin + positions[b] * rotary_dim;
    for (int64_t h = 0; h < num_heads; h++) {
      const float* from = q + b * q_batch + h * q_head;
      float* query = queries + h * D;
      if (k != NULL) {
        norm_and_rotate(&new_token, from, q_weight, query);
      } else {
        memcpy(query, from, sizeof(float) * (size_t)D);
      }
      for (int64_t i = 0; i < D; i++) query[i] *= scale;
    }
    for (int64_t h = 0; h < num_kv_heads; h++)
      attend(queries + h * group * D, group, D, &pages, h, &keys, scores,
             out + (b * num_heads + h * group) * D);
  }
}
