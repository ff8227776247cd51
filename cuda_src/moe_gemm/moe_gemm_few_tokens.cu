// moe_gemm for few tokens: the matrix of each expert with tokens is read once.
//
// Every warp has its own ring in shared memory, filled by cp.async: a stage is 16 weight rows,
// their scales, and the same columns of the tile's rows of x. Warps wait for each other only at the
// end of a work tile, when the next one's stages are already in flight. Arguments and work
// division: MoeFewParams in moe_few_problem.cuh. Each module is compiled for one weight format.
//
// Numerics: codes are multiplied unscaled, and each group's sum by its scale; the order of
// summation is fixed, but depends on the number of tokens.
#include "common/pdl.cuh"
#include "moe_gemm/moe_few_loader.cuh"

#if ENGINE_DTYPE != 0

// An element of out that a thread finishes: row tile z of a work tile, or z and z + 1 if gated.
struct MoeFewOutput {
  int z, token, row, column;  // row within the row tile; column of out

  // Moves to element `index` of the work tile; returns false if it does not exist.
  __device__ __forceinline__ bool set(const MoeFewBlock& b, const MoeFewTile& t, int work_tile,
                                      int index) {
    row = index % kWeightRows;
    z = index / kWeightRows % b.out_tiles();
    token = index / kWeightRows / b.out_tiles();
    column = (work_tile * b.out_tiles() + z) * kWeightRows + row;
    return token < t.count && column < b.columns;
  }
  __device__ __forceinline__ float2 load_bias(const MoeFewParams& p, const MoeFewBlock& b,
                                              const MoeFewTile& t) const {
    float2 bias{0.0f, 0.0f};
    if (p.bias == nullptr) return bias;
    const scalar_t* from = p.bias + static_cast<int64_t>(t.expert) * p.num_rows + column;
    bias.x = to_float(from[0]);
    if (b.num_gates > 0) bias.y = to_float(from[b.num_gates]);
    return bias;
  }
};

// Adds the parts' sums in order and writes the work tile's elements. `early` holds the biases of
// this thread's first element.
template <typename Shape>
__device__ __forceinline__ void finish_work_tile(const MoeFewParams& p, const MoeFewBlock& b,
                                                 const MoeFewRouting& routing, const MoeFewTile& t,
                                                 int work_tile, const float* sums, float2 early) {
  const int count = b.out_tiles() * kWeightRows * t.count;
  const int parts = blockDim.y;
  const MoeGate gate{p.activation, p.alpha, p.limit};
#pragma unroll 1
  for (int index = b.thread; index < count; index += b.threads) {
    MoeFewOutput o;
    if (!o.set(b, t, work_tile, index)) continue;
    const float2 bias = index == b.thread ? early : o.load_bias(p, b, t);
    const int z = b.num_gates > 0 ? 2 * o.z : o.z;
    const float* from = sums + z * parts * Shape::kSumFloats + o.token * Shape::kPitch + o.row;
    float sum = 0.0f, up = 0.0f;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) sum += from[part * Shape::kSumFloats];
    float y = sum + bias.x;
    if (b.num_gates > 0) {
      from += parts * Shape::kSumFloats;
#pragma unroll 4
      for (int part = 0; part < parts; ++part) up += from[part * Shape::kSumFloats];
      y = gate(y, up + bias.y);
    }
    const int place = t.first + o.token;
    const int row = p.pair_weights == nullptr ? place : routing.rows[place];
    if (row < 0) continue;
    p.out[static_cast<int64_t>(row) * b.columns + o.column] =
        from_float<scalar_t>(y * routing.weights[place]);
  }
}

// SAFETY: with is_early the preceding kernel may still run; it must not write the weight, the bias
// or the routing.
template <int kTokens>
__device__ __forceinline__ void moe_few_tokens(const MoeFewParams& p) {
  using Product = MoeFewProduct<kTokens>;
  using Shape = typename Product::Shape;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ MoeFewRouting routing;
  const MoeFewBlock b(p, MoeFewWeight::num_stages(p));
  if (p.is_early == 0) {
    pdl_wait();
    pdl_trigger();  // SAFETY: not before: the next product may read the routing early.
  }
  routing.find(p, b.thread, b.threads);
  __syncthreads();
  const int stage_bytes = kStageBytes + p.max_rows * kXPitch;
  unsigned char* ring = smem + b.warp_idx * (p.num_stages * stage_bytes);
  float* const first_sums =
      reinterpret_cast<float*>(smem + b.num_warps * p.num_stages * stage_bytes);
  MoeFewLoader<MoeWorkTileWalk> loader(p, b, routing, ring, stage_bytes);
  loader.fill();

  float* sums = first_sums;
  const unsigned char* stage_at = ring;
  const unsigned char* const ring_end = ring + p.num_stages * stage_bytes;
#pragma unroll 1
  for (MoeWorkTileWalk walk(b, routing); !walk.is_done(); walk.next()) {
    const int work_tile = walk.run.work_tile;
    const MoeFewTile t = routing.tiles[walk.run.tile];
    MoeFewOutput first;
    const float2 bias = first.set(b, t, work_tile, b.thread) ? first.load_bias(p, b, t) : float2{};
    Product product;
    product.clear();
#pragma unroll 1
    for (int stage = b.stage_begin; stage < b.stage_end; ++stage) {
      wait_for_oldest(p.num_stages);
      __syncwarp();  // SAFETY: the lanes see each other's copies.
      product.multiply(stage_at, t.count, b.lane_idx);
      __syncwarp();  // SAFETY: all lanes have read the stage before it is refilled.
      loader.template load<true, true>();
      cp_async_commit();
      stage_at += stage_bytes;
      if (stage_at == ring_end) stage_at = ring;
    }
    product.store(sums + b.warp_idx * Shape::kSumFloats, b.lane_idx);
    // SAFETY: a warp overwrites one of the two buffers only after the next work tile's barrier, and
    // so after all reads of it.
    __syncthreads();
    finish_work_tile<Shape>(p, b, routing, t, work_tile, sums, bias);
    sums = sums == first_sums ? first_sums + b.num_warps * Shape::kSumFloats : first_sums;
  }
}

#define ENGINE_MOE_FEW_TOKENS(tokens)                                 \
  extern "C" __global__ void __launch_bounds__(512, 1)                \
      moe_gemm_few_##tokens(const __grid_constant__ MoeFewParams p) { \
    moe_few_tokens<tokens>(p);                                        \
  }

ENGINE_MOE_FEW_TOKENS(1)
ENGINE_MOE_FEW_TOKENS(8)

#endif
