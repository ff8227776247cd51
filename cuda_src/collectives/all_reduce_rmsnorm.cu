// All-reduce of rows over the ranks of a group, fused with the subsequent residual add and RMSNorm.
//
//   s = x_0 + x_1 + ...        (see all_reduce.cu)
//   h = x_scale * s + residual, y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset)
//                              (see rmsnorm.cu)
//
//   x, residual, out, residual_out  (M, N) scalar_t   contiguous, rows of whole 16-byte vectors;
//                                   out may alias x, residual_out may alias residual
//   weight  (N,) scalar_t
//   group   PeerGroup of this rank (peer_memory.cuh)
//   num_sent  with kSent: first rows of x that the preceding product has sent
//             (gemm/gemm_sender_sm90.cuh)
//
// All ranks must launch it with the same M and N.
//
// Numerics: s is rounded to scalar_t, and the sum of squares follows rmsnorm.cu's order, so the
// result is bit-identical to that of the two separate ops.
// Parallelisation: a block processes one or more rows and waits only for the same rows of other
// ranks. It loads residual and weight while those rows are in flight.
// Mirror: engine/reference/all_reduce_rmsnorm.py
#include "common/peer_memory.cuh"
#include "common/rmsnorm_row.cuh"

constexpr int kOp = 2;  // op id, named in engine/kernels/_peer_memory.py

// With kSent a block sends another of its unsent rows before it finishes a row; first come the rows
// sent last, which may still be in L2.
template <int kWarps, int kVectors, bool kSent>
__device__ __forceinline__ void all_reduce_rmsnorm(const Row& rows, PeerGroup* group,
                                                   int64_t num_rows, int num_sent) {
  pdl_trigger();
  constexpr int kStep = kWarps * kWarpSize * kVec;
  __shared__ float smem_sums[kWarps];
  PeerCall call(group, kOp);
  pdl_wait();
  call.begin();
  const int begin = threadIdx.x * kVec;
  const int length = rows.n / kVec;  // vectors per row
  const int total = static_cast<int>(num_rows) * length;
  bool is_first = true;
  int unsent = kSent ? first_unsent(blockIdx.x, gridDim.x, num_sent) : 0;
  for (int turn = blockIdx.x; turn < num_rows; turn += gridDim.x) {
    const int i = kSent && turn < num_sent ? num_sent - 1 - turn : turn;
    if (kSent && unsent < num_rows) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int c = begin + k * kStep;
        if (c >= rows.n) continue;
        const Words x = load_packed<kVec>(rows.x + static_cast<int64_t>(unsent) * rows.n + c);
        call.push_to_all(0, total, unsent * length + c / kVec, sendable(x));
      }
      unsent += gridDim.x;
    }
    const Row row{rows.x + static_cast<int64_t>(i) * rows.n,
                  rows.residual + static_cast<int64_t>(i) * rows.n,
                  rows.weight,
                  nullptr,
                  rows.out + static_cast<int64_t>(i) * rows.n,
                  rows.residual_out + static_cast<int64_t>(i) * rows.n,
                  rows.n,
                  rows.eps,
                  rows.weight_offset,
                  rows.x_scale};
    Words h[kVectors], r[kVectors], w[kVectors];
    int at[kVectors];  // vector index within the data that each rank sends, or -1
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = begin + k * kStep;
      h[k] = Words{};
      at[k] = c < row.n ? i * length + c / kVec : -1;
      if (c < row.n) h[k] = sendable(load_packed<kVec>(row.x + c));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!kSent && at[k] >= 0) call.push_to_all(0, total, at[k], h[k]);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int c = begin + k * kStep;
      r[k] = Words{};
      if (c < row.n) r[k] = load_packed<kVec>(row.residual + c);
    }
    load_row_weight<kWarps, kVectors>(row, w);
    if (is_first) {
      call.advance(static_cast<uint32_t>((call.size - 1) * total));
      call.empty_previous();
      is_first = false;
    }
#pragma unroll
    for (int k = 0; k < kVectors; k += 2) {  // two at a time: registers are scarce
      const int pair_at[2] = {at[k], at[k + 1]};
      Words pair[2] = {h[k], h[k + 1]};
      sum_over_ranks<2>(call, total, pair_at, pair);
      h[k] = pair[0];
      h[k + 1] = pair[1];
    }
    const auto store = [&](int, int c, const Vec<scalar_t, kVec>& y) { store_vec(row.out + c, y); };
    finish_register_row<kWarps, kVectors>(row, h, r, w, [] {}, smem_sums, store);
  }
}

// Name suffixes are the longest row in KiB; the shapes match rmsnorm.cu. `blocks` is the minimum
// number of blocks per SM, which caps the registers.
#define ENGINE_ALL_REDUCE_RMSNORM(name, warps, vectors, blocks, is_sent)                       \
  extern "C" __global__ void __launch_bounds__((warps) * 32, blocks)                           \
      name(const scalar_t* x, const scalar_t* residual, const scalar_t* weight, scalar_t* out, \
           scalar_t* residual_out, PeerGroup* group, int64_t num_rows, int n, float eps,       \
           float weight_offset, float x_scale, int num_sent) {                                 \
    all_reduce_rmsnorm<warps, vectors, is_sent>(                                               \
        Row{x, residual, weight, nullptr, out, residual_out, n, eps, weight_offset, x_scale},  \
        group, num_rows, num_sent);                                                            \
  }

ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_1, 1, 2, 8, false)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_2, 2, 2, 8, false)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_4, 4, 2, 6, false)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_8, 8, 2, 3, false)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_16, 8, 4, 2, false)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_32, 16, 4, 1, false)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_4_sent, 4, 2, 6, true)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_8_sent, 8, 2, 3, true)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_16_sent, 8, 4, 2, true)
ENGINE_ALL_REDUCE_RMSNORM(all_reduce_rmsnorm_32_sent, 16, 4, 1, true)
