// Gathers the paged keys and values of every sequence into dense rows.
//
//   k[cu_seqlens_k[b] + p] = k_pages[block_tables[b, p / block_size], :, p % block_size]
//   v[...]                 = v_pages[...]
//
// A row of k and v is NaN if no sequence owns it, if it lies past its context_len or the table, or
// if its block id is outside [0, P). Arguments: KvGatherParams, below.
//
// Numerics: a copy. Parallelisation: one thread per kWidth features; blockIdx.x is the row, and
// each thread finds the row's sequence by binary search; blockIdx.y walks the features of k, then
// of v.
// Mirror: engine/reference/kv_gather.py
#include "common/types.cuh"

constexpr int kThreads = 128;

struct KvGatherParams {
  const scalar_t *k_pages, *v_pages;  // (P, K, block_size, D) contiguous
  const int* block_tables;            // (B, NB); only entries that context_lens covers are read
  const int* context_lens;            // (B,)
  const int* cu_seqlens_k;            // (B + 1,) non-decreasing, starts at 0
  scalar_t *k, *v;                    // (T, K, D) contiguous
  int num_sequences;                  // B
  int num_columns;                    // NB
  int block_size;
  int64_t table_stride;  // elements from one row of block_tables to the next
  int64_t num_blocks;    // P
  int num_heads;         // K
  int head_dim;          // D
};

// Returns the last b in [0, num_sequences) with cu_seqlens[b] <= row, the only sequence that can
// own `row`.
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

// Returns the page slot of dense row `row`, or -1.
__device__ __forceinline__ int64_t slot_of(const KvGatherParams& p, int64_t row) {
  if (p.num_sequences == 0) return -1;
  const int b = find_sequence(p.cu_seqlens_k, p.num_sequences, row);
  const int64_t position = row - p.cu_seqlens_k[b];
  if (position < 0 || row >= p.cu_seqlens_k[b + 1] || position >= p.context_lens[b]) return -1;
  const int64_t column = position / p.block_size;
  if (column >= p.num_columns) return -1;
  const int64_t block = p.block_tables[b * p.table_stride + column];
  return block < 0 || block >= p.num_blocks ? -1 : block * p.block_size + position % p.block_size;
}

template <int kWidth>
__device__ __forceinline__ void kv_gather(const KvGatherParams& p) {
  const int num_heads = p.num_heads, items_per_head = p.head_dim / kWidth;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int head_of_both = item / items_per_head;
  if (head_of_both >= 2 * num_heads) return;
  const bool is_k = head_of_both < num_heads;
  const int64_t head = is_k ? head_of_both : head_of_both - num_heads;
  const int feature = (item % items_per_head) * kWidth;

  const int64_t row = blockIdx.x, slot = slot_of(p, row);
  Vec<scalar_t, kWidth> x;
  if (slot < 0) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x.v[j] = from_float<scalar_t>(quiet_nan());
  } else {
    const int64_t block = slot / p.block_size, offset = slot % p.block_size;
    const int64_t at = ((block * num_heads + head) * p.block_size + offset) * p.head_dim;
    x = load_vec<scalar_t, kWidth>((is_k ? p.k_pages : p.v_pages) + at + feature);
  }
  store_vec((is_k ? p.k : p.v) + (row * num_heads + head) * p.head_dim + feature, x);
}

#define ENGINE_KV_GATHER(name, width)                    \
  extern "C" __global__ void __launch_bounds__(kThreads) \
      name(const __grid_constant__ KvGatherParams p) {   \
    kv_gather<width>(p);                                 \
  }

ENGINE_KV_GATHER(kv_gather_vector, kVec)
ENGINE_KV_GATHER(kv_gather_scalar, 1)
