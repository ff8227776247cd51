// The experts' second GEMM and the sum over each token's experts, for few tokens.
//
//   out[t] = sum over j of (weight[e] x[i] + bias[e]) pair_weights[t, j]
//            + shared[t] sigmoid(shared_gate[t]) + residual[t]
//
// with e = experts[t, j], and i the index of pair t top_k + j in `order`. Each module is compiled
// for one weight format.
// Arguments: MoeFewParams in moe_gemm/moe_few_problem.cuh.
//
// Numerics: see moe_gemm_few_tokens.cu, but expert outputs are not rounded. The parts' sums of a
// token are added in order, then shared, then residual, and rounded once. The boundaries of the
// parts, and so a token's sum, depend on the experts of all tokens.
// Parallelisation: a block computes blockDim.z row tiles (16 rows each) of every expert's matrix,
// and thus the matching columns of out. The stages of all token tiles form one sequence; warp (y,
// z) multiplies the y-th part of the sequence for row tile z: often several experts, or a fraction
// of one. At the end of an expert's stages it multiplies the sums by the pairs' weights and adds
// them to its tokens' sums. No warp waits for another before its last stage, and the first stages
// are loaded before the first GEMM has ended.
// Mirror: engine/reference/moe_gemm_combine.py
#include "common/pdl.cuh"
#include "moe_gemm/moe_few_loader.cuh"

#if ENGINE_DTYPE != 0

// An element of out that a thread finishes.
struct MoeCombinedOutput {
  int z, row, token;  // row within row tile z
  int64_t at;         // index into out, shared and residual

  // Moves to element `index` of the block; returns false if it does not exist.
  template <int kTokens>
  __device__ __forceinline__ bool set(const MoeFewParams& p, int index) {
    row = index % kWeightRows, z = index / kWeightRows;
    token = kTokens == 1 ? 0 : z / blockDim.z;
    z -= token * blockDim.z;
    const int column = (blockIdx.x * blockDim.z + z) * kWeightRows + row;
    at = static_cast<int64_t>(token) * p.num_rows + column;
    return token < p.num_tokens && z < blockDim.z && column < p.num_rows;
  }
  // Loads the terms added to the sum over experts.
  __device__ __forceinline__ float2 load_others(const MoeFewParams& p) const {
    float2 others{0.0f, 0.0f};
    if (p.shared != nullptr) {
      others.x = to_float(p.shared[at]);
      if (p.shared_gate != nullptr)
        others.x *= 1.0f / (1.0f + expf(-to_float(p.shared_gate[token])));
    }
    if (p.residual != nullptr) others.y = to_float(p.residual[at]);
    return others;
  }
};

// A warp's sums: over all experts, [token][row], and of one token tile.
template <int kTokens>
struct MoeTokenSums {
  using Shape = typename MoeFewProduct<kTokens>::Shape;
  static constexpr int kPitch = Shape::kPitch;
  static constexpr int kFloats = kTokens * kPitch + Shape::kSumFloats;  // floats per warp
  float* of_tokens;
  float* of_tile;

  __device__ __forceinline__ explicit MoeTokenSums(float* own)
      : of_tokens(own), of_tile(own + kTokens * kPitch) {}

  __device__ __forceinline__ void clear(int lane_idx) {
    for (int i = lane_idx; i < kTokens * kPitch; i += kWarpSize) of_tokens[i] = 0.0f;
  }
  // Adds a token tile's sums; 16 of the lanes also add the bias of row `lane_idx`.
  __device__ __forceinline__ void add(MoeFewProduct<kTokens>& product, const MoeFewTile& t,
                                      const MoeFewRouting& routing, int top_k, float bias,
                                      int lane_idx) {
    product.store(of_tile, lane_idx);
    __syncwarp();
    if (lane_idx < kWeightRows) {
      for (int i = 0; i < t.count; ++i) {
        const int pair = routing.rows[t.first + i];
        if (pair < 0) continue;
        float& sum = of_tokens[(kTokens == 1 ? 0 : pair / top_k) * kPitch + lane_idx];
        sum = fmaf(routing.weights[t.first + i], of_tile[i * kPitch + lane_idx] + bias, sum);
      }
    }
    __syncwarp();  // SAFETY: the next tile's sums overwrite these.
  }
};

// SAFETY: see moe_few_tokens.
template <int kTokens>
__device__ __forceinline__ void moe_few_combine(const MoeFewParams& p) {
  using Sums = MoeTokenSums<kTokens>;
  using Product = MoeFewProduct<kTokens>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ MoeFewRouting routing;
  const MoeFewBlock b(p, MoeFewWeight::num_stages(p));
  const int stage_bytes = stage_bytes_of<kTokens>(p);
  const unsigned char* ring = smem + b.warp_idx * (p.num_stages * stage_bytes);
  float* const all_sums = reinterpret_cast<float*>(smem + b.num_warps * p.num_stages * stage_bytes);
  MoeWholeX<kStageColumns, Product> whole_x(p, b, all_sums + b.num_warps * Sums::kFloats);
  if (p.is_early == 0) {
    pdl_wait();
    pdl_trigger();
    if constexpr (kTokens == 1) whole_x.load();
  }
  routing.find(p, b.thread, b.threads);
  __syncthreads();
  MoeFewLoader<MoeSumWalk, (kTokens > 1)> loader(p, b, routing, ring, stage_bytes);
  fill_rings<kTokens>(p, loader, whole_x);
  MoeCombinedOutput o;
  float2 others{0.0f, 0.0f};
  if (o.set<kTokens>(p, b.thread)) others = o.load_others(p);

  Sums sums(all_sums + b.warp_idx * Sums::kFloats);
  sums.clear(b.lane_idx);
#pragma unroll 1
  for (MoeSumWalk walk(b, routing); !walk.is_done(); walk.next()) {
    const MoeRun run = walk.run;
    const MoeFewTile t = routing.tiles[run.tile];
    // SAFETY: clamped to the last row, which has a bias.
    const int row =
        min(b.first_row(run.work_tile, threadIdx.z) + b.lane_idx % kWeightRows, p.num_rows - 1);
    float bias = 0.0f;
    if (p.bias != nullptr && run.begin == 0)
      bias = to_float(p.bias[static_cast<int64_t>(t.expert) * p.num_rows + row]);
    Product product;
    product.clear();
    multiply_stages<kTokens>(p, product, loader, ring, whole_x, t,
                             whole_x.first_segment(t.first) + run.begin, run.end - run.begin,
                             b.lane_idx);
    sums.add(product, t, routing, p.top_k, bias, b.lane_idx);
  }
  __syncthreads();
  const int count = blockDim.z * kWeightRows * p.num_tokens;
#pragma unroll 1
  for (int index = b.thread; index < count; index += b.threads) {
    if (!o.set<kTokens>(p, index)) continue;
    if (index != b.thread) others = o.load_others(p);
    const int first = o.z * blockDim.y * Sums::kFloats + o.token * Sums::kPitch + o.row;
    float sum = 0.0f;
#pragma unroll 4
    for (int part = 0; part < blockDim.y; ++part) sum += all_sums[first + part * Sums::kFloats];
    p.out[o.at] = from_float<scalar_t>(sum + others.x + others.y);
  }
}

#define ENGINE_MOE_FEW_COMBINE(tokens)                                        \
  extern "C" __global__ void __launch_bounds__(512, 1)                        \
      moe_gemm_combine_few_##tokens(const __grid_constant__ MoeFewParams p) { \
    moe_few_combine<tokens>(p);                                               \
  }

ENGINE_MOE_FEW_COMBINE(1)
ENGINE_MOE_FEW_COMBINE(8)

#endif
