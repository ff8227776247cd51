// Publishes the sampled ids of a decode step for the next step (last_ids) and the host (out).
//
//   last_ids[rows[b]] = token_ids[b, Q - 1]
//   out[0, b, i] = token_ids[b, i],  out[1, b, i] = status[b, i]
//
//   token_ids, status (B, Q)    int32   outputs of `sample`
//   rows              (B,)      int32   request rows; outside [0, S): padding, last_ids unchanged
//   last_ids          (S,)      int32
//   out               (2, B, Q) int32
//
// Numerics: integers. Parallelisation: one thread per token.
// Mirror: engine/reference/decode_outputs.py
#include "common/types.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_outputs(const int* __restrict__ token_ids, const int* __restrict__ status,
                   const int* __restrict__ rows, int* last_ids, int* out, int num_tokens,
                   int query_len, int num_rows) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_tokens) return;
  const int id = token_ids[i];
  if (i % query_len == query_len - 1) {
    const int row = rows[i / query_len];
    if (row >= 0 && row < num_rows) last_ids[row] = id;
  }
  out[i] = id;
  out[num_tokens + i] = status[i];
}
