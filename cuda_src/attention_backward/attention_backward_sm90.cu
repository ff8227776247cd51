// Attention backward pass on Hopper: attention_backward.cu with wgmma, TMA and warp specialisation,
// in three launches (four with sinks), with five matrix products instead of seven.
//
// Arguments: AttentionBackwardSm90BeforeParams and AttentionBackwardSm90Params, below.
//
// Numerics: see attention_backward.cu. dQ differs: each block adds a float partial sum over its 128
// keys to dq_sum. The additions have a fixed order if `order` is given, otherwise an arbitrary one.
// Parallelisation: _before computes the statistics and clears dq_sum, one block per query tile and
// head. In the main kernel a CTA owns 128 keys of one key/value head and loops over the queries
// that see them (attention_backward_tiles_sm90.cuh). _after rounds dq_sum to dQ.
// Mirror: engine/reference/attention_backward.py
#include "attention_backward/attention_backward_consumer_sm90.cuh"
#include "attention_backward/attention_backward_sinks.cuh"

// Module configuration: HopperTile in kernels/attention_backward/sm90.py.
constexpr int kHeadDim = HEAD_DIM;  // head dimension, padded
constexpr int kQueries = QUERIES;   // queries per tile
constexpr bool kWindow = WINDOW != 0;
using Core = BackwardConsumer<kHeadDim, kQueries, kWindow>;
static_assert(Core::kSharedBytes == SHARED_BYTES,
              "kernels/attention_backward/sm90.py computes another size");

// A block's query tile, head and sequence. One grid axis counts all three, tiles first: the other
// axes end at 65,535, which a batch times its heads may exceed.
struct QueryTilePlace {
  int m, head, b;

  __device__ __forceinline__ QueryTilePlace(int query_tiles, int num_heads) {
    const int index = blockIdx.x, pair = index / query_tiles;
    m = index - pair * query_tiles;
    b = pair / num_heads;
    head = pair - b * num_heads;
  }
};

// Strides are in elements: _t between tokens, _h between heads.
struct AttentionBackwardSm90BeforeParams {
  const scalar_t* dout;     // (Tq, H, D)
  const scalar_t* out;      // (Tq, H, D)
  const float* lse;         // (Tq, H) log-sum-exp of the forward pass, contiguous
  const float* dlse;        // (Tq, H) gradient with respect to lse, contiguous; or null
  const int* cu_seqlens_q;  // (B + 1,) sequence b's queries: rows cu_seqlens_q[b] to [b + 1]
  float* statistics;        // output, like the next two; see AttentionBackwardSm90Params
  float* dq_sum;
  int* order;
  float* delta;  // (Tq, H) output for the gradient of the sinks; or null
  int64_t dout_stride_t, dout_stride_h, out_stride_t, out_stride_h;
  int total_q, num_heads, head_dim;
  int query_tiles;  // blocks per head and sequence
};

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_sm90_before(const __grid_constant__ AttentionBackwardSm90BeforeParams p) {
  constexpr int kLanes = kHeadDim / 8;  // lanes per row, 16 bytes each
  const auto [m, head, b] = QueryTilePlace(p.query_tiles, p.num_heads);
  const Sequence sequence(p.cu_seqlens_q, p.cu_seqlens_q, b, p.total_q, p.total_q, 0, 0);
  if (m * kQueries >= sequence.num_q) return;
  const int64_t place =
      static_cast<int64_t>(first_query_tile<kQueries>(sequence, b) + m) * p.num_heads + head;
  float4* const sums = reinterpret_cast<float4*>(p.dq_sum + place * 2 * Core::kHalfFloats);
#pragma unroll
  for (int i = 0; i < 2 * Core::kHalfFloats / 4 / 256; ++i)
    sums[i * 256 + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.order != nullptr && threadIdx.x < 2) p.order[2 * place + threadIdx.x] = 0;

  float* const to = p.statistics + place * 2 * kQueries;
  const int column = threadIdx.x % kLanes * 8;
#pragma unroll
  for (int row = threadIdx.x / kLanes; row < kQueries; row += 256 / kLanes) {
    const bool exists = m * kQueries + row < sequence.num_q;
    const int64_t token = sequence.q_begin + m * kQueries + row;
    float sum = 0.0f;
    if (exists && column < p.head_dim) {
      const auto x =
          load_vec<scalar_t, 8>(p.dout + token * p.dout_stride_t + head * p.dout_stride_h + column);
      const auto y =
          load_vec<scalar_t, 8>(p.out + token * p.out_stride_t + head * p.out_stride_h + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += to_float(x.v[i]) * to_float(y.v[i]);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (column == 0) {
      const int64_t stat = token * p.num_heads + head;
      if (exists && p.dlse != nullptr) sum -= p.dlse[stat];
      if (exists && p.delta != nullptr) p.delta[stat] = sum;
      to[row] = exists ? log2_sum(p.lse[stat]) : kInf;
      to[kQueries + row] = sum;
    }
  }
}

struct AttentionBackwardSm90Params {
  TensorMap q_map;          // q (Tq, H, D); TMA box: 64 columns x 1 head x kQueries tokens
  TensorMap k_map;          // k (Tk, K, D); TMA box: 64 columns x 1 head x 128 tokens
  TensorMap v_map;          // v, same shape and box as k
  TensorMap dout_map;       // dout, same shape and box as q
  const int* cu_seqlens_q;  // (B + 1,) sequence b's queries: rows cu_seqlens_q[b] to [b + 1]
  const int* cu_seqlens_k;  // (B + 1,) likewise for its keys
  const float* statistics;  // (tiles, H, 2, kQueries): log2-sum-exp2 (+inf if the row has no query
                            // or it sees no key), then delta; tile numbering: first_query_tile()
  float* dq_sum;  // (tiles, H, 2, 64 * 64) dQ in accumulator order; warpgroup w adds half w
  int* order;     // (tiles, H, 2) number of blocks that have added to dq_sum; null: any order
  int* counter;   // work index of the next CTA; 0 before and after the launch
  scalar_t* dk;   // (Tk, K, D)
  scalar_t* dv;   // (Tk, K, D)
  int64_t dk_stride_t, dk_stride_h, dv_stride_t, dv_stride_h;
  int total_q, total_k, num_heads;
  int group;  // H / K
  int head_dim;
  int causal;
  int window;          // read only if compiled with WINDOW
  int key_blocks;      // number of 128-key blocks in the longest sequence
  int descending;      // nonzero: CTAs take the last keys first
  float score_factor;  // scale * log2(e)
  float scale;
};

// Stores a consumer thread's rows of dK and dV.
__device__ __forceinline__ void store_keys(const AttentionBackwardSm90Params& p,
                                           const KeyWork& work, const float (&dk_sum)[kHeadDim / 2],
                                           const float (&dv_sum)[kHeadDim / 2]) {
  const int lane_idx = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int key = (threadIdx.x - 128) / 32 * 16 + lane_idx / 4 + 8 * i;
    const int64_t row = work.first_row + key;
    scalar_t* const dk = p.dk + row * p.dk_stride_t + work.kv_head * p.dk_stride_h;
    scalar_t* const dv = p.dv + row * p.dv_stride_t + work.kv_head * p.dv_stride_h;
#pragma unroll
    for (int chunk = 0; chunk < Core::kChunks; ++chunk) {
      const int columns = p.head_dim - 64 * chunk;
      const bool exists = key < work.num_keys;
      store_row<64>(dk + 64 * chunk, exists, columns, lane_idx, dk_sum + 32 * chunk, i, p.scale);
      store_row<64>(dv + 64 * chunk, exists, columns, lane_idx, dv_sum + 32 * chunk, i, 1.0f);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Core::kThreads, 1)
    attention_backward_sm90(const __grid_constant__ AttentionBackwardSm90Params p) {
  extern __shared__ __align__(128) unsigned char smem[];
  const Core core(smem);
  __shared__ __align__(16) KeyWork work;  // in shared memory: no role has registers to spare
  const BackwardProblem problem{p.cu_seqlens_q, p.cu_seqlens_k, p.statistics, p.dq_sum, p.order,
                                p.total_q,      p.total_k,      p.num_heads,  p.group,  p.causal};
  if (threadIdx.x == 0) {
    core.init_barriers();
    const int taken = atomicAdd(p.counter, 1);
    if (taken == gridDim.x - 1) *p.counter = 0;
    const int num_kv_heads = p.num_heads / p.group, pair = taken / p.key_blocks;
    const int b = pair / num_kv_heads, i = taken - pair * p.key_blocks;
    const Sequence sequence(p.cu_seqlens_q, p.cu_seqlens_k, b, p.total_q, p.total_k, p.causal,
                            kWindow ? p.window : 0);
    work = find_work<kQueries, Core::kKeys>(problem, sequence, b, pair - b * num_kv_heads,
                                            p.descending ? p.key_blocks - 1 - i : i, !p.descending);
  }
  __syncthreads();
  if (work.num_keys <= 0) return;

  if (threadIdx.x < 128) {
    warpgroup_reg_dealloc<Core::kProducerRegisters>();
    const int warp_idx = threadIdx.x / 32;
    if (warp_idx == 0)
      core.produce(&p.q_map, &p.k_map, &p.v_map, &p.dout_map, problem, work);
    else if (warp_idx < 3)
      core.add_dq(problem, work, warp_idx - 1, !p.descending);
  } else {
    warpgroup_reg_alloc<Core::kConsumerRegisters>();
    float dk_sum[kHeadDim / 2], dv_sum[kHeadDim / 2];
    core.consume(work.tiles * p.group, p.causal != 0, p.window, p.score_factor, dk_sum, dv_sum);
    store_keys(p, work, dk_sum, dv_sum);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_sm90_after(const float* dq_sum, const int* cu_seqlens_q, scalar_t* dq,
                                  int64_t dq_stride_t, int64_t dq_stride_h, int total_q,
                                  int num_heads, int head_dim, int query_tiles, float scale) {
  const auto [m, head, b] = QueryTilePlace(query_tiles, num_heads);
  const Sequence sequence(cu_seqlens_q, cu_seqlens_q, b, total_q, total_q, 0, 0);
  if (m * kQueries >= sequence.num_q) return;
  const int64_t place =
      static_cast<int64_t>(first_query_tile<kQueries>(sequence, b) + m) * num_heads + head;
  const int half = threadIdx.x / 128, lane_idx = threadIdx.x % 32;
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
  const int column = kQueries == 128 ? 0 : 64 * half;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int query = m * kQueries + (kQueries == 128 ? 64 * half : 0) + threadIdx.x / 32 % 4 * 16 +
                      lane_idx / 4 + 8 * i;
    scalar_t* const row = dq + (sequence.q_begin + query) * dq_stride_t + head * dq_stride_h;
    store_row<64>(row + column, query < sequence.num_q, head_dim - column, lane_idx, sum, i, scale);
  }
}
