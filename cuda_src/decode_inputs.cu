// What a decode step reads of its requests' slots: last ids, block tables, and where to write.
//
//   tables[rows[b], new_starts[b] + i] = new_blocks[cu_new_blocks[b] + i]       first of all
//   ids_out[b]    = token_ids[b], or last_ids[rows[b]] where that is negative
//   slots_out[b]  = tables[rows[b], positions[b] / block_size] * block_size + positions[b] % block_size
//   tables_out[b] = tables[rows[b]]       as far as positions[b] reaches
//
//   rows          (B,)    int32   the slot of a row of the batch; negative: padding
//   token_ids     (B,)    int32   what the host knows; negative: the id sampled last in the slot
//   positions     (B,)    int32
//   last_ids      (S,)    int32
//   tables        (S, W)  int32   block ids of every slot, updated in place
//   new_starts    (B,)    int32   cu_new_blocks (B+1,) int32   new_blocks (C,) int32
//   ids_out       (B,)    int32   padding: kPaddingId, which embedding.cu makes zeros of
//   slots_out     (B,)    int64   padding: -1, so that nothing is written
//   tables_out    (B, W)  int32   padding, and entries past the position: left alone
//
// Numerics: integers. Parallelisation: one block a row of the batch. Rows have distinct slots, so a
// block reads no table that another one writes.
// Mirror: engine/reference/decode_inputs.py
#include "common/padding.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_inputs(const int* __restrict__ rows, const int* __restrict__ token_ids,
                  const int* __restrict__ positions, const int* __restrict__ last_ids, int* tables,
                  const int* __restrict__ new_starts, const int* __restrict__ cu_new_blocks,
                  const int* __restrict__ new_blocks, int* ids_out, int64_t* slots_out,
                  int* tables_out, int num_slots, int width, int num_new, int block_size) {
  const int64_t b = blockIdx.x;
  const int64_t slot = rows[b];
  if (slot < 0 || slot >= num_slots) {
    if (threadIdx.x == 0) {
      ids_out[b] = kPaddingId;
      slots_out[b] = -1;
    }
    return;
  }
  int* table = tables + slot * width;
  const int start = new_starts[b], first = cu_new_blocks[b], last = cu_new_blocks[b + 1];
  for (int i = threadIdx.x; i < last - first; i += kThreads) {
    const bool is_inside = start >= 0 && start + i < width && first >= 0 && first + i < num_new;
    if (is_inside) table[start + i] = new_blocks[first + i];
  }
  // SAFETY: what some threads wrote above, others read below.
  __syncthreads();
  const int position = positions[b];
  const int index = position / block_size;
  const bool is_valid = position >= 0 && index < width;
  const int count = is_valid ? index + 1 : 0;
  for (int i = threadIdx.x; i < count; i += kThreads) tables_out[b * width + i] = table[i];
  if (threadIdx.x == 0) {
    const int known = token_ids[b];
    ids_out[b] = known >= 0 ? known : last_ids[slot];
    slots_out[b] =
        is_valid ? static_cast<int64_t>(table[index]) * block_size + position % block_size : -1;
  }
}
