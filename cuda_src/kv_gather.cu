// Reads the keys and values of every sequence out of their pages into dense rows.
//
//   k[cu_seqlens_k[b] + p] = k_pages[block_tables[b, p / block_size], :, p % block_size]
//   v[...]                 = v_pages[...]
//
//   k_pages, v_pages (P, K, block_size, D)  scalar_t   contiguous
//   block_tables     (B, NB)                int32      row stride; read only where < context_len
//   context_lens     (B,)                   int32
//   cu_seqlens_k     (B + 1,)               int32      not decreasing, from 0
//   k, v             (T, K, D)              scalar_t   contiguous
//
// A row of k and v that no sequence owns, that lies past its context_len or past the table, or
// whose block id is outside [0, P), is NaN.
// Numerics: a copy. Parallelisation: one thread per kWidth features; blockIdx.x is the row, whose
// sequence every thread finds by bisection; blockIdx.y walks the features of k, then of v.
// Mirror: engine/reference/kv_gather.py
#include "common/types.cuh"

constexpr int kThreads = 128;

// The last b in [0, num_sequences) with cu_seqlens[b] <= row: the owner of `row`, if it has one.
__device__ __forceinline__ int find_sequence(const int* cu_seqlens, int num_sequences,
                                             int64_t row) {
  int low = 0, high = num_sequences;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (cu_seqlens[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

struct Tables {
  const int* block_tables;
  const int* context_lens;
  const int* cu_seqlens_k;
  int num_sequences, num_columns, block_size;
  int64_t table_stride, num_blocks;

  // The slot of dense row `row`, or -1.
  __device__ __forceinline__ int64_t slot(int64_t row) const {
    if (num_sequences == 0) return -1;
    const int b = find_sequence(cu_seqlens_k, num_sequences, row);
    const int64_t position = row - cu_seqlens_k[b];
    if (position < 0 || row >= cu_seqlens_k[b + 1] || position >= context_lens[b]) return -1;
    const int64_t column = position / block_size;
    if (column >= num_columns) return -1;
    const int64_t block = block_tables[b * table_stride + column];
    return block < 0 || block >= num_blocks ? -1 : block * block_size + position % block_size;
  }
};

template <int kWidth>
__device__ __forceinline__ void kv_gather(const scalar_t* __restrict__ k_pages,
                                          const scalar_t* __restrict__ v_pages, Tables tables,
                                          scalar_t* __restrict__ k, scalar_t* __restrict__ v,
                                          int num_heads, int head_dim) {
  const int items_per_head = head_dim / kWidth;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int head_of_both = item / items_per_head;
  if (head_of_both >= 2 * num_heads) return;
  const bool is_k = head_of_both < num_heads;
  const int64_t head = is_k ? head_of_both : head_of_both - num_heads;
  const int feature = (item % items_per_head) * kWidth;

  const int64_t row = blockIdx.x, slot = tables.slot(row);
  Vec<scalar_t, kWidth> x;
  if (slot < 0) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x.v[j] = from_float<scalar_t>(__int_as_float(0x7fffffff));
  } else {
    const int64_t block = slot / tables.block_size, offset = slot % tables.block_size;
    const int64_t at = ((block * num_heads + head) * tables.block_size + offset) * head_dim;
    x = load_vec<scalar_t, kWidth>((is_k ? k_pages : v_pages) + at + feature);
  }
  store_vec((is_k ? k : v) + (row * num_heads + head) * head_dim + feature, x);
}

#define ENGINE_KV_GATHER(name, width)                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                               \
      name(const scalar_t* k_pages, const scalar_t* v_pages, const int* block_tables,  \
           const int* context_lens, const int* cu_seqlens_k, scalar_t* k, scalar_t* v, \
           int num_sequences, int num_columns, int block_size, int64_t table_stride,   \
           int64_t num_blocks, int num_heads, int head_dim) {                          \
    const Tables tables{block_tables, context_lens, cu_seqlens_k, num_sequences,       \
                        num_columns,  block_size,   table_stride, num_blocks};         \
    kv_gather<width>(k_pages, v_pages, tables, k, v, num_heads, head_dim);             \
  }

ENGINE_KV_GATHER(kv_gather_vector, kVec)
ENGINE_KV_GATHER(kv_gather_scalar, 1)
