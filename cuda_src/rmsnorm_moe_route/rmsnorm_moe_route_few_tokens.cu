// RMSNorm with the residual addition before it, router and expert selection of a mixture of
// experts, fused for a few tokens; on request y is also quantized to e4m3.
//
//   h       = x + residual                                                 (rounded to scalar_t)
//   y       = h / sqrt(mean(h^2) + eps) * (norm_weight + weight_offset)    (rounded to scalar_t)
//   logits  = weight y + bias                                              (float)
//   routing = as in moe_route.cu, from these logits
//   codes and scales of y: see quantize_rows.cu, with one scale per 128 columns
//
// Arguments: see rmsnorm_moe_route_problem.cuh.
//
// Numerics: see rmsnorm.cu and moe_route.cu. h has the bits of the separate ops, and so have codes
// and scales of the same y. Logits are float sums over a warp's share of a block's columns, by the
// tensor cores, then over the shares, then over the cluster's blocks in their order.
// Parallelisation: a cluster takes 16 tokens, and each of its blocks a slab of columns. It
// normalises them, a warp per token, and multiplies them by its columns of the weight, which it
// loads while the preceding kernel still runs. The blocks exchange the sums of squares, and send
// the partial logits of each token to the block that chooses its experts. A single cluster's first
// block sorts the pairs; otherwise it counts its tile's, and moe_route_place_* sorts them.
// Mirror: engine/reference/rmsnorm_moe_route.py
#include "common/cluster.cuh"
#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/rmsnorm_row.cuh"
#include "rmsnorm_moe_route/rmsnorm_moe_route_problem.cuh"

constexpr int kTokens = 16;  // tokens per cluster: rows of an mma
constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;
constexpr int kMaxBlocks = 16;  // maximum blocks per cluster
constexpr int kGroup = 128;     // columns per scale; slabs are multiples of it
constexpr int kStep = 32;       // columns multiplied at a time: four lanes' 16 bytes
constexpr int kPart = 32;       // experts that a warp multiplies
constexpr int kTiles = kPart / 8;
constexpr int kRowPad = 32;   // elements after a row in shared memory, against bank conflicts
constexpr int kLogitPad = 8;  // floats after a row of logits, likewise
static_assert(kWarps == kTokens, "a warp normalises one token");

// A warp's token and the columns of it that its block normalises, in global and in shared memory.
struct OwnRow {
  int64_t at;       // index of the first column in (T, N)
  scalar_t* row;    // shared memory
  int num_columns;  // columns, or 0 past the last token
};

// Calls use(i) for each vector of this lane's columns, i being its first one.
template <typename Use>
__device__ __forceinline__ void for_own_vectors(const OwnRow& own, const Use& use) {
#pragma unroll 2
  for (int i = threadIdx.x % kWarpSize * kVec; i < own.num_columns; i += kWarpSize * kVec) use(i);
}

// Adds the residual and leaves h in shared memory; returns this lane's sum of squares.
__device__ __forceinline__ float add_residual(const RmsnormMoeRouteParams& p, const OwnRow& own) {
  float squares = 0.0f;
  for_own_vectors(own, [&](int i) {
    auto h = unpack<kVec>(load_packed<kVec>(p.x + own.at + i));
    if (p.residual != nullptr) {
      const auto other = unpack<kVec>(load_packed<kVec>(p.residual + own.at + i));
#pragma unroll
      for (int j = 0; j < kVec; ++j) h.v[j] = scaled_sum(h.v[j], 1.0f, other.v[j]);
      store_packed(p.residual_out + own.at + i, pack<kVec>(h));
    }
    store_vec(own.row + i, h);
#pragma unroll
    for (int j = 0; j < kVec; ++j) squares += squared(to_float(h.v[j]));
  });
  return squares;
}

// Writes a row of y from shared memory, and its codes and scales.
__device__ __forceinline__ void store_row(const RmsnormMoeRouteParams& p, const OwnRow& own,
                                          int token, int first_column) {
  if (own.num_columns == 0) return;
  const int step = kWarpSize * kVec, lane_first = threadIdx.x % kWarpSize * kVec;
  const int64_t num_groups = (p.n + kGroup - 1) / kGroup;
#pragma unroll 1
  for (int first = 0; first < own.num_columns; first += step) {
    const int i = first + lane_first;
    const bool exists = i < own.num_columns;
    Vec<scalar_t, kVec> y = {};
    if (exists) y = load_vec<scalar_t, kVec>(own.row + i);
    if (exists) store_packed(p.y + own.at + i, pack<kVec>(y));
    if (p.codes == nullptr) continue;
    const float peak = lanes_max_or_nan<kGroup / kVec>(peak_of(y, 0.0f));
    if (!exists) continue;
    store_codes<E4m3>(p.codes + own.at + i, y, code_factor<E4m3>(peak));
    if (i % kGroup == 0)
      p.scales[token * num_groups + (first_column + i) / kGroup] = code_scale<E4m3>(peak);
  }
}

// Multiplies the tile's y by kPart rows of the weight: every kSplits-th step of the columns, from
// step `split` on. Lane 4 g + t takes columns 8 t to 8 t + 7 of a step, of tokens g and g + 8
// and of expert g of each tile; to an mma, the order of columns is free.
template <int kSplits>
__device__ __forceinline__ void multiply(float (&sum)[kTiles][4], const scalar_t* y,
                                         const scalar_t* rows, int row_stride, int num_columns,
                                         int split) {
  const int lane_idx = threadIdx.x % kWarpSize;
  const int at = lane_idx / 4 * row_stride + lane_idx % 4 * kVec;
#pragma unroll 2
  for (int k = split * kStep; k < num_columns; k += kSplits * kStep) {
    const auto low = load_packed<kVec>(y + at + k).v;
    const auto high = load_packed<kVec>(y + at + 8 * row_stride + k).v;
    const uint32_t a[2][4] = {{low.v[0], high.v[0], low.v[1], high.v[1]},
                              {low.v[2], high.v[2], low.v[3], high.v[3]}};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto w = load_packed<kVec>(rows + at + tile * 8 * row_stride + k).v;
      mma_m16n8k16<scalar_t>(sum[tile], a[0], {w.v[0], w.v[1]});
      mma_m16n8k16<scalar_t>(sum[tile], a[1], {w.v[2], w.v[3]});
    }
  }
}

template <int kStride>
__device__ __forceinline__ void store_sums(float* partial, const float (&sum)[kTiles][4]) {
  const int lane_idx = threadIdx.x % kWarpSize;
  float* to = partial + lane_idx / 4 * kStride + lane_idx % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    store_vec(to + tile * 8, Vec<float, 2>{sum[tile][0], sum[tile][1]});
    store_vec(to + tile * 8 + 8 * kStride, Vec<float, 2>{sum[tile][2], sum[tile][3]});
  }
}

// Adds kCount rows of floats `stride` apart to four columns.
template <int kCount>
__device__ __forceinline__ void add_rows(Vec<float, 4>& sum, const float* from, int stride) {
  Vec<float, 4> part[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) part[i] = load_vec<float, 4>(from + i * stride);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.v[j] += part[i].v[j];
}

// Shared memory of a block beside the arrays of dynamic size.
template <int kPer>
struct Shared {
  RouteShared<kPer> route;
  TransactionBarrier norm_weight, weight;       // arrays loaded from global memory
  TransactionBarrier squares, logits, experts;  // values sent by the cluster's blocks
  alignas(16) float sums[kMaxBlocks][kTokens];  // squares of each block's columns
};

// Dynamic shared memory: the block's columns of the weight (later partial logits), of y and of the
// norm's weight, and the logits of the block's tokens from each block.
template <int kPer>
__device__ __forceinline__ void rmsnorm_moe_route_few(const RmsnormMoeRouteParams& p) {
  if constexpr (!kHasClusters) return;  // without clusters the separate ops are launched instead
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ Shared<kPer> shared;
  const int size = cluster_size(), rank = cluster_rank();
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  constexpr int kColumns = kPer * kPart, kSplits = kWarps / kPer;
  constexpr int kStride = kColumns + kLogitPad;  // floats from a row of logits to the next
  const int num_rows = p.num_experts + p.num_shared, row_stride = p.slab + kRowPad;
  const int first_column = rank * p.slab;
  const int num_columns = max(0, min(p.slab, p.n - first_column));
  scalar_t* y = reinterpret_cast<scalar_t*>(smem);
  scalar_t* norm_weight = y + kTokens * row_stride;
  float* logits = reinterpret_cast<float*>(norm_weight + row_stride);
  scalar_t* rows = reinterpret_cast<scalar_t*>(logits + kTokens * kStride);
  float* partial = reinterpret_cast<float*>(rows);

  const int first_token = cluster_index() * kTokens;
  const int num_tokens = min(kTokens, p.num_tokens - first_token);
  if (threadIdx.x == 0) {
    shared.norm_weight.init(), shared.weight.init();
    shared.squares.init(), shared.logits.init(), shared.experts.init();
    shared.norm_weight.arrive_expect_tx(num_columns * sizeof(scalar_t));
    shared.weight.arrive_expect_tx(num_rows * num_columns * sizeof(scalar_t));
    shared.squares.arrive_expect_tx(size * kTokens * sizeof(float));
    shared.logits.arrive_expect_tx(kTokens * kColumns * sizeof(float));
    shared.experts.arrive_expect_tx(rank == 0 ? num_tokens * kMaxTopK * sizeof(int) : 0);
  }
  __syncthreads();
  cluster_arrive_relaxed();  // the block is running and can receive
  // SAFETY: the preceding kernel must not write norm_weight or weight.
  if (num_columns > 0) {
    const uint32_t bytes = num_columns * sizeof(scalar_t);
    if (threadIdx.x == 0)
      shared.norm_weight.bulk_load(norm_weight, p.norm_weight + first_column, bytes);
    for (int e = threadIdx.x; e < num_rows; e += kThreads)
      shared.weight.bulk_load(rows + e * row_stride,
                              p.weight + static_cast<int64_t>(e) * p.n + first_column, bytes);
  }
  for (int e = threadIdx.x; e < kPer * kWarpSize; e += kThreads) shared.route.masks.clear(e);
  pdl_wait();
  pdl_trigger();

  // Normalise: the warp's token, in this block's columns.
  const int token = first_token + warp_idx;
  const OwnRow own{static_cast<int64_t>(token) * p.n + first_column, y + warp_idx * row_stride,
                   warp_idx < num_tokens ? num_columns : 0};
  const float squares = warp_sum(add_residual(p, own));
  cluster_wait();
  if (lane_idx < size)
    st_async(smem_address(&shared.sums[rank][warp_idx]), smem_address(&shared.squares.state),
             lane_idx, squares);
  shared.norm_weight.wait();
  mbarrier_wait_cluster(smem_address(&shared.squares.state), 0);
  float total = 0.0f;
#pragma unroll 8
  for (int r = 0; r < size; ++r) total += shared.sums[r][warp_idx];
  const float factor = 1.0f / sqrtf(total / p.n + p.eps);
  for_own_vectors(own, [&](int i) {
    auto v = load_vec<scalar_t, kVec>(own.row + i);
    const auto w = load_vec<scalar_t, kVec>(norm_weight + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.v[j] = normalised(v.v[j], 0.0f, factor, to_float(w.v[j]) + p.weight_offset, {});
    store_vec(own.row + i, v);
  });
  shared.weight.wait();
  __syncthreads();

  // Multiply: a part of the experts by a share of the columns.
  const int part = warp_idx % kPer, split = warp_idx / kPer;
  float sum[kTiles][4] = {};
  multiply<kSplits>(sum, y, rows + part * kPart * row_stride, row_stride, num_columns, split);
  __syncthreads();  // SAFETY: `partial` overwrites the weight.
  store_sums<kStride>(partial + split * kTokens * kStride + part * kPart, sum);
  __syncthreads();

  // Send the warp's token to the block that chooses its experts.
  const int share = kTokens / size;
  float* slot = logits + (rank * share + warp_idx % share) * kStride;
#pragma unroll
  for (int e = lane_idx * 4; e < kColumns; e += kWarpSize * 4) {
    Vec<float, 4> v = {};
    add_rows<kSplits>(v, partial + warp_idx * kStride + e, kTokens * kStride);
    st_async(smem_address(slot + e), smem_address(&shared.logits.state), warp_idx / share, v.v[0],
             v.v[1], v.v[2], v.v[3]);
  }
  // Choose: the first warps, a token each. They receive logits even if the token does not exist.
  const int row = rank * share + warp_idx;
  if (warp_idx < share) {
    mbarrier_wait_cluster(smem_address(&shared.logits.state), 0);
    if (row < num_tokens) {
      float* received = logits + warp_idx * kStride;
      for (int e = lane_idx * 4; e < num_rows; e += kWarpSize * 4) {
        Vec<float, 4> v = {};
        for (int r = 0; r < size; r += 8)  // a cluster has 8 or 16 blocks
          add_rows<8>(v, received + r * share * kStride + e, share * kStride);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (p.bias != nullptr && e + j < num_rows) v.v[j] += to_float(p.bias[e + j]);
        store_vec(received + e, v);
      }
      __syncwarp();
      MoeRouteParams route = routing_of(p);
      const int chosen = first_token + row;
      // choose() reads logits_of(chosen): here, the received row.
      route.logits = received - static_cast<int64_t>(chosen) * num_rows;
      const float expert = __int_as_float(choose<kPer>(route, chosen));
      const float a = __shfl_sync(kFullMask, expert, lane_idx * 4);
      const float b = __shfl_sync(kFullMask, expert, lane_idx * 4 + 1);
      const float c = __shfl_sync(kFullMask, expert, lane_idx * 4 + 2);
      const float d = __shfl_sync(kFullMask, expert, lane_idx * 4 + 3);
      if (lane_idx * 4 < kMaxTopK)
        st_async(smem_address(&shared.route.experts[row][lane_idx * 4]),
                 smem_address(&shared.experts.state), 0, a, b, c, d);
    }
  }
  store_row(p, own, token, first_column);
  if (rank != 0) return;

  // Sort, or count for the sort.
  mbarrier_wait_cluster(smem_address(&shared.experts.state), 0);
  if (warp_idx < num_tokens && lane_idx < p.top_k)
    shared.route.masks.add(shared.route.experts[warp_idx][lane_idx], warp_idx);
  __syncthreads();
  if (p.counts == nullptr) {
    sort_few(routing_of(p), shared.route);
    return;
  }
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads)
    p.counts[cluster_index() * p.num_experts + e] = shared.route.masks.count(e);
}

// Entry points for up to 32 * per experts, with a shared one.
#define ENGINE_RMSNORM_MOE_ROUTE_FEW(per, experts)                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, (per) <= 4 ? 2 : 1)             \
      rmsnorm_moe_route_few_##experts(const __grid_constant__ RmsnormMoeRouteParams p) { \
    rmsnorm_moe_route_few<per>(p);                                                       \
  }

ENGINE_RMSNORM_MOE_ROUTE_FEW(1, 32)
ENGINE_RMSNORM_MOE_ROUTE_FEW(2, 64)
ENGINE_RMSNORM_MOE_ROUTE_FEW(4, 128)
ENGINE_RMSNORM_MOE_ROUTE_FEW(8, 256)
ENGINE_RMSNORM_MOE_ROUTE_FEW(16, 512)
