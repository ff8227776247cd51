// Attention of one new token a sequence on the CPU, on float32 pages.
//
//   out[b, h] = softmax(scale * q[b, h] K^T) V, over the keys that sequence b sees
//
// | Argument         | Shape                  | Type  |                                          |
// |------------------|------------------------|-------|------------------------------------------|
// | out              | (B, H, D)              | float |                                          |
// | scratch          | (B, H, D)              | float | a buffer                                 |
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
// Numerics: float32. Keys come in blocks of kKeys from the first that a sequence sees; a block with
// a larger score scales what was summed before. A result depends on nothing but its head and
// sequence, so the bits do not depend on the number of threads.
//
// Parallelisation: a part is some heads of a sequence that share a key/value head (helpers.h).
//
// The mirror is engine/reference/attention_decode.py.

#include <float.h>
#include <math.h>

#include "helpers.h"
#include "vectors.h"

enum { kKeys = 256 };  // keys of a block
enum { kHeads = 8 };   // heads that read a block at a time

typedef uint32_t Bits __attribute__((vector_size(sizeof(Vector))));

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
  const Bits power = ((Bits)shifted << 23) + (127u << 23);
  const Bits is_low = (Bits)(x < splat(-87.0f));
  return (Vector)((Bits)(y * (Vector)power) & ~is_low);
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

// The largest of some scores and `largest`; NaN is not.
static float largest_of(const float* scores, int64_t count, float largest) {
  Vector largest_of_lanes = splat(largest);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector x = load(scores + i);
    const Bits is_larger = (Bits)(x > largest_of_lanes);
    largest_of_lanes = (Vector)(((Bits)x & is_larger) | ((Bits)largest_of_lanes & ~is_larger));
  }
  for (int lane = 0; lane < kLanes; lane++) largest = fmaxf(largest, largest_of_lanes[lane]);
  for (; i < count; i++) largest = fmaxf(largest, scores[i]);
  return largest;
}

// Replace scores by the exponentials of their differences to `largest`; return their sum.
static float exponentials(float* scores, int64_t count, float largest) {
  Vector sums = {0};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
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

// Return how many of the keys [i, end) lie in the block of key i, and write where key/value head h
// of key i begins in the pages.
static int64_t count_in_block(const Keys* keys, const Pages* pages, int64_t h, int64_t i,
                              int64_t end, int64_t* begin) {
  const int64_t size = pages->block_size;
  const int64_t in_block = i % size;
  *begin = keys->table[i / size] * pages->page + h * pages->head + in_block * pages->token;
  return end - i < size - in_block ? end - i : size - in_block;
}

// Write attention of scaled queries (count <= kHeads, D) to key/value head h to `out` (count, D).
static void attend(const float* queries, int64_t count, int64_t D, const Pages* pages, int64_t h,
                   const Keys* keys, float* out) {
  float scores[kHeads][kKeys];
  float largest[kHeads];
  float sums[kHeads] = {0};
  // If every score is -inf, so are the differences to the lowest float, and the sum is 0.
  for (int64_t g = 0; g < count; g++) largest[g] = -FLT_MAX;
  memset(out, 0, sizeof(float) * (size_t)(count * D));
  for (int64_t first = keys->first; first < keys->end; first += kKeys) {
    const int64_t end = keys->end - first < kKeys ? keys->end : first + kKeys;
    int64_t begin;
    int64_t step;
    for (int64_t i = first; i < end; i += step) {
      step = count_in_block(keys, pages, h, i, end, &begin);
      for (int64_t j = 0; j < step; j++) {
        const float* key = pages->k + begin + j * pages->token;
        for (int64_t g = 0; g < count; g++) scores[g][i - first + j] = dot(queries + g * D, key, D);
      }
    }
    for (int64_t g = 0; g < count; g++) {
      const float before = largest[g];
      largest[g] = largest_of(scores[g], end - first, before);
      if (largest[g] > before && first > keys->first) {
        const float factor = expf(before - largest[g]);
        sums[g] *= factor;
        for (int64_t d = 0; d < D; d++) out[g * D + d] *= factor;
      }
      sums[g] += exponentials(scores[g], end - first, largest[g]);
      for (int64_t i = first; i < end; i += step) {
        step = count_in_block(keys, pages, h, i, end, &begin);
        add_rows(out + g * D, scores[g] + i - first, pages->v + begin, pages->token, step, D);
      }
    }
  }
  for (int64_t g = 0; g < count; g++) {
    for (int64_t d = 0; d < D; d++) out[g * D + d] /= fmaxf(sums[g], FLT_MIN);
  }
}

// A call; see attention_decode.
typedef struct {
  float* out;
  float* scratch;
  const float* q;
  int64_t q_batch;
  int64_t q_head;
  const float* q_weight;
  const int32_t* positions;  // or NULL: q is ready
  const float* cos_sin;
  NewToken new_token;
  Pages pages;
  const int32_t* block_tables;
  int64_t table_step;
  const int32_t* context_lens;
  int64_t num_heads;
  int64_t group;       // heads of a key/value head
  int64_t part_heads;  // heads of a part
  float scale;
  int64_t window;
  int64_t chunk;
} Task;

static void attend_part(const void* given, int64_t index) {
  const Task* task = given;
  const int64_t D = task->new_token.head_dim;
  const int64_t group = task->group;
  const int64_t parts = (group + task->part_heads - 1) / task->part_heads;  // of a key/value head
  const int64_t num_kv_heads = task->num_heads / group;
  const int64_t b = index / (num_kv_heads * parts);
  const int64_t kv_head = index / parts % num_kv_heads;
  const int64_t before = index % parts * task->part_heads;
  const int64_t left = group - before;
  const int64_t count = left < task->part_heads ? left : task->part_heads;
  const int64_t head = kv_head * group + before;
  NewToken token = task->new_token;
  if (task->positions != NULL)
    token.cos_sin = task->cos_sin + task->positions[b] * token.rotary_dim;
  float* queries = task->scratch + (b * task->num_heads + head) * D;
  for (int64_t g = 0; g < count; g++) {
    const float* from = task->q + b * task->q_batch + (head + g) * task->q_head;
    float* query = queries + g * D;
    if (task->positions != NULL) {
      norm_and_rotate(&token, from, task->q_weight, query);
    } else {
      memcpy(query, from, sizeof(float) * (size_t)D);
    }
    for (int64_t d = 0; d < D; d++) query[d] *= task->scale;
  }
  const int64_t length = task->context_lens[b];
  const int64_t reach = task->chunk    ? (length - 1) % task->chunk + 1
                        : task->window ? task->window
                                       : length;
  const Keys keys = {task->block_tables + b * task->table_step, length > reach ? length - reach : 0,
                     length};
  attend(queries, count, D, &task->pages, kv_head, &keys,
         task->out + (b * task->num_heads + head) * D);
}

// `num_threads` > 1 shares the work with helpers; one caller at a time may.
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
                             int64_t chunk, int64_t num_threads) {
  const int64_t group = num_heads / num_kv_heads;
  // With few pairs of sequence and key/value head, threads share the heads of a pair.
  const bool are_few = num_threads > 1 && num_sequences * num_kv_heads < 4 * num_threads;
  const int64_t part_heads = are_few ? 1 : group < kHeads ? group : kHeads;
  Task task = {.out = out,
               .scratch = scratch,
               .q = q,
               .q_batch = q_batch,
               .q_head = q_head,
               .q_weight = q_weight,
               .positions = k == NULL ? NULL : positions,
               .cos_sin = cos_sin,
               .new_token = {NULL, rotary_dim, head_dim, eps, weight_offset},
               .pages = {k_pages, v_pages, page, head, token, block_size},
               .block_tables = block_tables,
               .table_step = table_step,
               .context_lens = context_lens,
               .num_heads = num_heads,
               .group = group,
               .part_heads = part_heads,
               .scale = scale,
               .window = window,
               .chunk = chunk};
  for (int64_t b = 0; k != NULL && b < num_sequences; b++) {
    const int64_t slot = slot_mapping[b];
    NewToken new_token = task.new_token;
    new_token.cos_sin = cos_sin + positions[b] * rotary_dim;
    for (int64_t h = 0; slot >= 0 && h < num_kv_heads; h++) {
      const int64_t to = slot / block_size * page + h * head + slot % block_size * token;
      norm_and_rotate(&new_token, k + b * k_batch + h * k_head, k_weight, k_pages + to);
      memcpy(v_pages + to, v + b * v_batch + h * v_head, sizeof(float) * (size_t)head_dim);
    }
  }
  const int64_t num_parts = num_sequences * num_kv_heads * ((group + part_heads - 1) / part_heads);
  run_parts(attend_part, &task, num_parts, num_threads > 1);
}
