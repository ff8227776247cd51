// What a decode step leaves behind: the sampled ids, for the next step and for the host.
//
//   last_ids[rows[b]] = token_ids[b]
//   out[0, b] = token_ids[b],  out[1, b] = status[b]
//
//   token_ids, status (B,)   int32   of `sample`
//   rows              (B,)   int32   slots; outside [0, S): padding, last_ids stays as it is
//   last_ids          (S,)   int32
//   out               (2, B) int32
//
// Numerics: integers. Parallelisation: one thread a row. Mirror: engine/reference/decode_outputs.py
#include "common/types.cuh"

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_outputs(const int* __restrict__ token_ids, const int* __restrict__ status,
                   const int* __restrict__ rows, int* last_ids, int* out, int num_rows,
                   int num_slots) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= num_rows) return;
  const int id = token_ids[b], slot = rows[b];
  if (slot >= 0 && slot < num_slots) last_ids[slot] = id;
  out[b] = id;
  out[num_rows + b] = status[b];
}
