// moe_gemm for few tokens: the matrix of each expert with tokens is read once.
//
// Every warp has its own ring in shared memory, filled by cp.async: a stage is 16 weight rows,
// their scales and, for several tokens, the same columns of the tile's rows of x. One token's x is
// stored once per block (moe_few_x.cuh). Warps wait for each other only at the end of a work tile,
// when the next one's stages are already in flight. Arguments and work division: MoeFewParams in
// moe_few_problem.cuh. Each module is compiled for one weight format.
//
// Numerics: codes are multiplied unscaled, and each group's sum by its scale; the order of
// summation is fixed, but depends on the number of tokens. moe_few_x.cuh says when one token's x is
// rounded.
#include "common/pdl.cuh"
#include "moe_gemm/moe_few_loader.cuh"

#if ENGINE_DTYPE != 0

// An element of out that a thread finishes: row tile z of a work tile, or z and z + 1 if gated.
struct MoeFewOutput {
  int z, token, row, column;  // row within the row tile; column of out

  // Moves to element `index` of the work tile; returns false if it does not exist.
  template <int kTokens>
  __device__ __forceinline__ bool set(const MoeFewBlock& b, const MoeFewTile& t, int work_tile,
                                      int index) {
    const int tiles = b.out_tiles();
    row = index % kWeightRows, z = index / kWeightRows;
    token = kTokens == 1 ? 0 : z / tiles;
    z -= token * tiles;
    column = (work_tile * tiles + z) * kWeightRows + row;
    return token < t.count && z < tiles && column < b.columns;
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

// Adds the parts' sums in order and writes the work tile's elements. `o` and `bias` are this
// thread's first element, if it `exists`, and its biases.
template <int kTokens, typename Shape>
__device__ __forceinline__ void finish_work_tile(const MoeFewParams& p, const MoeFewBlock& b,
                                                 const MoeFewRouting& routing, const MoeFewTile& t,
                                                 int work_tile, const float* sums, MoeFewOutput o,
                                                 bool exists, float2 bias) {
  const int count = b.out_tiles() * kWeightRows * t.count;
  const int parts = blockDim.y;
  const MoeGate gate{p.activation, p.alpha, p.limit};
#pragma unroll 1
  for (int index = b.thread; index < count; index += b.threads) {
    if (index != b.thread) {
      exists = o.set<kTokens>(b, t, work_tile, index);
      if (exists) bias = o.load_bias(p, b, t);
    }
    if (!exists) continue;
    const int z = b.num_gates > 0 ? 2 * o.z : o.z;
    const float* from = sums + z * parts * Shape::kSumFloats + o.token * Shape::kPitch + o.row;
    float sum = 0.0f, up = 0.0f;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) sum += from[part * Shape::kSumFloats];
    if (b.num_gates > 0) {
      from += parts * Shape::kSumFloats;
#pragma unroll 4
      for (int part = 0; part < parts; ++part) up += from[part * Shape::kSumFloats];
    }
    const int place = t.first + o.token;
    int row = routing.rows[place];
    if (p.pair_weights == nullptr) {  // a place without a pair has a row of out, but none of x
      if (row < 0) sum = up = 0.0f;
      row = place;
    }
    if (row < 0) continue;
    float y = sum + bias.x;
    if (b.num_gates > 0) y = gate(y, up + bias.y);
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
  using Loader = MoeFewLoader<MoeWorkTileWalk, (kTokens > 1)>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ MoeFewRouting routing;
  const MoeFewBlock b(p, MoeFewWeight::num_stages(p));
  const int stage_bytes = stage_bytes_of<kTokens>(p);
  const unsigned char* ring = smem + b.warp_idx * (p.num_stages * stage_bytes);
  float* const first_sums =
      reinterpret_cast<float*>(smem + b.num_warps * p.num_stages * stage_bytes);
  const int buffer_floats = b.num_warps * Shape::kSumFloats;
  MoeWholeX<kStageColumns, Product> whole_x(p, b, first_sums + 2 * buffer_floats);
  if (p.is_early == 0) {
    pdl_wait();
    pdl_trigger();  // SAFETY: not before: the next product may read the routing early.
    if constexpr (kTokens == 1) whole_x.load();
  }
  routing.find(p, b.thread, b.threads);
  __syncthreads();
  Loader loader(p, b, routing, ring, stage_bytes);
  fill_rings<kTokens>(p, loader, whole_x);

  float* sums = first_sums;
#pragma unroll 1
  for (MoeWorkTileWalk walk(b, routing); !walk.is_done(); walk.next()) {
    const int work_tile = walk.run.work_tile;
    const MoeFewTile t = routing.tiles[walk.run.tile];
    MoeFewOutput first;
    const bool exists = first.set<kTokens>(b, t, work_tile, b.thread);
    const float2 bias = exists ? first.load_bias(p, b, t) : float2{};
    Product product;
    product.clear();
    multiply_stages<kTokens>(p, product, loader, ring, whole_x, t,
                             whole_x.first_segment(t.first) + b.stage_begin,
                             b.stage_end - b.stage_begin, b.lane_idx);
    product.store(sums + b.warp_idx * Shape::kSumFloats, b.lane_idx);
    // SAFETY: a warp overwrites one of the two buffers only after the next work tile's barrier, and
    // so after all reads of it.
    __syncthreads();
    finish_work_tile<kTokens, Shape>(p, b, routing, t, work_tile, sums, first, exists, bias);
    sums = sums == first_sums ? first_sums + buffer_floats : first_sums;
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
