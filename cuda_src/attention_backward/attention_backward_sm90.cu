// The gradients of attention on Hopper: the work of attention_backward.cu, by wgmma, TMA and warps
// with roles, in three launches; five products instead of seven.
//
//   q_map, dout_map  of q, dout (Tq, H, D): boxes of 64 columns, one head, QUERIES tokens
//   k_map, v_map     of k, v (Tk, K, D): boxes of 64 columns, one head, 128 tokens
//   statistics  (slots, H, 2, QUERIES) float: log2-sum-exp2 (+inf where there is no query or it sees
//               no key), then delta; a slot is a tile of queries (common/backward_sm90.cuh)
//   dq_sum      (slots, H, 2, 64 * 64) float: dQ as threads hold it: half w is warpgroup w's
//   order       (slots, H, 2) int: how many blocks have added to dq_sum; null: in any order
//   counter     int, 0: where blocks take keys from; 0 again at the end
//   others: see attention_backward.cu
//
// Numerics: as in attention_backward.cu, but dQ is a sum of float sums of 128 keys each: in a fixed
// order with `order`, else in any.
// Parallelisation: _before computes the statistics and clears dq_sum, a block a tile of queries and
// head; then a block takes 128 keys of one key/value head and walks over the queries that see them
// (common/backward_sm90.cuh); _after rounds dq_sum.
// Mirror: engine/reference/attention_backward.py
#include "attention_backward/consumer_sm90.cuh"

using Core = BackwardConsumer<HEAD_DIM, QUERIES>;
static_assert(Core::kSharedBytes == SHARED_BYTES,
              "kernels/attention_backward/sm90.py computes another size");

// Row i (0: lane / 4, 1: that + 8) of 64 columns of sums: the four threads that hold two columns of
// each eight trade for whole ones.
__device__ __forceinline__ void store_row(scalar_t* row, bool exists, int columns, int lane,
                                          const float* sum, int i, float factor) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    unsigned x[4], y[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      x[w] =
          pack_pair(sum[16 * j + 4 * w + 2 * i] * factor, sum[16 * j + 4 * w + 2 * i + 1] * factor);
    // Neighbours: pairs of words of eights 0, 2 (even threads) or 1, 3 (odd ones).
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      const unsigned other = __shfl_xor_sync(~0u, odd ? x[w] : x[w + 1], 1);
      y[w] = odd ? other : x[w];
      y[w + 1] = odd ? x[w + 1] : other;
    }
    // Across: all four words of eight `lane % 4`.
    const unsigned low = __shfl_xor_sync(~0u, upper ? y[0] : y[2], 2);
    const unsigned high = __shfl_xor_sync(~0u, upper ? y[1] : y[3], 2);
    const uint4 eight =
        upper ? make_uint4(low, high, y[2], y[3]) : make_uint4(y[0], y[1], low, high);
    const int column = 32 * j + 8 * (lane % 4);
    if (exists && column < columns) *reinterpret_cast<uint4*>(row + column) = eight;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_sm90_before(const scalar_t* dout, const scalar_t* out, const float* lse,
                                   const int* cu_seqlens_q, float* statistics, float* dq_sum,
                                   int* order, int64_t dout_stride_t, int64_t dout_stride_h,
                                   int64_t out_stride_t, int64_t out_stride_h, int total_q,
                                   int num_heads, int head_dim) {
  constexpr int kLanes = HEAD_DIM / 8;  // of 16 bytes, a row
  const int m = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const Sequence sequence(cu_seqlens_q, cu_seqlens_q, b, total_q, total_q, 0, 0);
  if (m * QUERIES >= sequence.num_q) return;
  const int64_t place =
      static_cast<int64_t>(first_slot<QUERIES>(sequence, b) + m) * num_heads + head;
  float4* const sums = reinterpret_cast<float4*>(dq_sum + place * 2 * Core::kHalfFloats);
#pragma unroll
  for (int i = 0; i < 2 * Core::kHalfFloats / 4 / 256; ++i)
    sums[i * 256 + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (order != nullptr && threadIdx.x < 2) order[2 * place + threadIdx.x] = 0;

  float* const to = statistics + place * 2 * QUERIES;
  const int column = threadIdx.x % kLanes * 8;
#pragma unroll
  for (int row = threadIdx.x / kLanes; row < QUERIES; row += 256 / kLanes) {
    const bool exists = m * QUERIES + row < sequence.num_q;
    const int64_t token = sequence.q_begin + m * QUERIES + row;
    float sum = 0.0f;
    if (exists && column < head_dim) {
      const auto x =
          load_vec<scalar_t, 8>(dout + token * dout_stride_t + head * dout_stride_h + column);
      const auto y =
          load_vec<scalar_t, 8>(out + token * out_stride_t + head * out_stride_h + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += to_float(x.v[i]) * to_float(y.v[i]);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (column == 0) {
      to[row] = exists ? log2_sum(lse[token * num_heads + head]) : kInf;
      to[QUERIES + row] = sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(Core::kThreads, 1)
    attention_backward_sm90(const __grid_constant__ TensorMap q_map,
                            const __grid_constant__ TensorMap k_map,
                            const __grid_constant__ TensorMap v_map,
                            const __grid_constant__ TensorMap dout_map, const int* cu_seqlens_q,
                            const int* cu_seqlens_k, const float* statistics, float* dq_sum,
                            int* order, int* counter, scalar_t* dk, scalar_t* dv, int total_q,
                            int total_k, int num_heads, int group, int head_dim, int causal,
                            int key_blocks, int descending, float score_factor, float scale) {
  extern __shared__ __align__(128) unsigned char smem[];
  const Core core(smem);
  __shared__ __align__(16) KeyWork work;  // not in registers: neither role has any to spare
  const BackwardProblem problem{cu_seqlens_q, cu_seqlens_k, statistics, dq_sum, order,
                                total_q,      total_k,      num_heads,  group,  causal};
  if (threadIdx.x == 0) {
    core.init_barriers();
    const int taken = atomicAdd(counter, 1);
    if (taken == gridDim.x - 1) *counter = 0;
    const int num_kv_heads = num_heads / group, pair = taken / key_blocks;
    const int b = pair / num_kv_heads, i = taken - pair * key_blocks;
    const Sequence sequence(cu_seqlens_q, cu_seqlens_k, b, total_q, total_k, causal, 0);
    work = find_work<QUERIES, Core::kKeys>(problem, sequence, b, pair - b * num_kv_heads,
                                           descending ? key_blocks - 1 - i : i, !descending);
  }
  __syncthreads();
  if (work.num_keys <= 0) return;

  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<Core::kProducerRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 0)
      core.produce(&q_map, &k_map, &v_map, &dout_map, problem, work);
    else if (warp < 3)
      core.add_dq(problem, work, warp - 1, !descending);
  } else {
    warpgroup_reg_alloc<Core::kConsumerRegisters>();
    float dk_sum[HEAD_DIM / 2], dv_sum[HEAD_DIM / 2];
    core.consume(work.tiles * group, causal != 0, score_factor, dk_sum, dv_sum);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = (threadIdx.x - 128) / 32 * 16 + lane / 4 + 8 * i;
      const int64_t row =
          static_cast<int64_t>(work.first_row + key) * (num_heads / group) + work.kv_head;
#pragma unroll
      for (int chunk = 0; chunk < Core::kChunks; ++chunk) {
        const int columns = head_dim - 64 * chunk;
        const bool exists = key < work.num_keys;
        const int64_t to = row * head_dim + 64 * chunk;
        store_row(dk + to, exists, columns, lane, dk_sum + 32 * chunk, i, scale);
        store_row(dv + to, exists, columns, lane, dv_sum + 32 * chunk, i, 1.0f);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_sm90_after(const float* dq_sum, const int* cu_seqlens_q, scalar_t* dq,
                                  int total_q, int num_heads, int head_dim, float scale) {
  const int m = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const Sequence sequence(cu_seqlens_q, cu_seqlens_q, b, total_q, total_q, 0, 0);
  if (m * QUERIES >= sequence.num_q) return;
  const int64_t place =
      static_cast<int64_t>(first_slot<QUERIES>(sequence, b) + m) * num_heads + head;
  const int half = threadIdx.x / 128, lane = threadIdx.x % 32;
  const float4* const from =
      reinterpret_cast<const float4*>(dq_sum + (2 * place + half) * Core::kHalfFloats) +
      threadIdx.x % 128;
  float sum[32];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 x = from[j * 128];
    sum[4 * j] = x.x;
    sum[4 * j + 1] = x.y;
    sum[4 * j + 2] = x.z;
    sum[4 * j + 3] = x.w;
  }
  const int column = QUERIES == 128 ? 0 : 64 * half;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = m * QUERIES + (QUERIES == 128 ? 64 * half : 0) + threadIdx.x / 32 % 4 * 16 +
                      lane / 4 + 8 * i;
    const int64_t row = (sequence.q_begin + query) * num_heads + head;
    store_row(dq + row * head_dim + column, query < sequence.num_q, head_dim - column, lane, sum, i,
              scale);
  }
}
