// Gathers the inputs of a decode step from its requests' rows: last token ids, block tables and KV
// cache slots.
//
//   tables[rows[b], new_starts[b] + i] = new_blocks[cu_new_blocks[b] + i]       (first)
//   ids_out[b, i]   = token_ids[b, i] if it is >= 0, else last_ids[rows[b]]
//   slots_out[b, i] = tables[rows[b], p / block_size] * block_size + p % block_size
//                     with p = positions[b, i]
//   tables_out[b]   = tables[rows[b]], up to the block of b's last position
//
// Arguments: DecodeInputsParams, below. B sequences of Q tokens each; S request rows with tables of
// W blocks.
//
// Numerics: integers. Parallelisation: one block per sequence. Sequences have distinct rows, so no
// block reads a table that another one writes.
// Mirror: engine/reference/decode_inputs.py
#include "common/padding.cuh"
#include "common/types.cuh"

struct DecodeInputsParams {
  const int* rows;           // (B,) row of each sequence; outside [0, S): padding
  const int* token_ids;      // (B, Q) ids known to the host; negative: use last_ids of the row
  const int* positions;      // (B, Q)
  const int* last_ids;       // (S,)
  int* tables;               // (S, W) block ids, updated in place
  const int* new_starts;     // (B,) table index of the first new block
  const int* cu_new_blocks;  // (B + 1,) prefix sums of each sequence's number of new blocks
  const int* new_blocks;     // (num_new,)
  int* ids_out;              // (B, Q); kPaddingId for padding (its embedding is zeros)
  int64_t* slots_out;        // (B, Q); -1 (not written) for padding or a position past the table
  int* tables_out;           // (B, W); padding rows and entries past the positions stay unwritten
  int num_rows;              // S
  int width;                 // W
  int num_new;
  int block_size;
  int query_len;  // Q
};

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_inputs(const __grid_constant__ DecodeInputsParams p) {
  const int64_t b = blockIdx.x;
  const int64_t row = p.rows[b], first_token = b * p.query_len;
  if (row < 0 || row >= p.num_rows) {
    for (int i = threadIdx.x; i < p.query_len; i += kThreads) {
      p.ids_out[first_token + i] = kPaddingId;
      p.slots_out[first_token + i] = -1;
    }
    return;
  }
  int* table = p.tables + row * p.width;
  const int start = p.new_starts[b], first = p.cu_new_blocks[b];
  const int last = max(0, min(p.cu_new_blocks[b + 1], p.num_new));
  // No operand is negative, so no difference overflows, whatever the arrays hold.
  const int num_own = start < 0 || first < 0 ? 0 : min(last - first, p.width - start);
  for (int i = threadIdx.x; i < num_own; i += kThreads) table[start + i] = p.new_blocks[first + i];
  // SAFETY: the reads below see what other threads wrote above.
  __syncthreads();
  int count = 0;  // number of blocks up to the last position
  for (int i = 0; i < p.query_len; ++i) {
    const int position = p.positions[first_token + i], index = position / p.block_size;
    const bool is_valid = position >= 0 && index < p.width;
    if (is_valid) count = max(count, index + 1);
    if (threadIdx.x == i % kThreads) {
      const int known = p.token_ids[first_token + i];
      p.ids_out[first_token + i] = known >= 0 ? known : p.last_ids[row];
      p.slots_out[first_token + i] =
          is_valid ? static_cast<int64_t>(table[index]) * p.block_size + position % p.block_size
                   : -1;
    }
  }
  for (int i = threadIdx.x; i < count; i += kThreads) p.tables_out[b * p.width + i] = table[i];
}
