// Grouped GEMM: tokens times their experts' matrices.
//
//   out[i]    = activation(weight[e] x[order[i] / top_k] + bias[e])
//   out[pair] = activation(weight[e] x[i] + bias[e]) pair_weights[pair]    with pair = order[i]
//
// for i in [offsets[e], offsets[e + 1]) of every expert e: the second formula if `scatters`. With
// TRANSPOSED the weight is (E, K, R), its transposed matrices are multiplied, and there is no
// activation.
// Arguments: MoeGemmParams in moe_gemm/moe_rows.cuh.
//
// Numerics: see gemm.cu; one rounding at the end. Each element sums k in ascending order,
// regardless of the tile and the rest of the batch.
// Parallelisation: a block computes one tile of rows of one expert. The host does not know how many
// rows each expert has: it launches a block for every possible tile, and each finds its rows by a
// scan of `offsets`, or exits if none are left. blockIdx.y is the tile along the features. Few
// tokens: see moe_gemm_few_tokens.cu.
// Mirror: engine/reference/moe_gemm.py
#include "common/pdl.cuh"
#include "moe_gemm/moe_epilogue.cuh"
#include "moe_gemm/moe_rows.cuh"
#if ENGINE_DTYPE != 0
#include "common/mma_tile.cuh"
#else
#include "common/simt_tile.cuh"
#endif

constexpr bool kTransposed = TRANSPOSED != 0;

#if ENGINE_DTYPE != 0
// Dynamic shared memory: kStages * (kTileM + kTileN) * kTileRowBytes.
template <int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, bool kAligned>
__device__ __forceinline__ void moe_tile(const MoeGemmParams& p) {
  constexpr int kWarpsN = kTileN / kWarpN;
  constexpr int kThreads = kTileM / kWarpM * kWarpsN * kWarpSize;
  constexpr int kBytesA = kTileM * kTileRowBytes, kStageBytes = (kTileM + kTileN) * kTileRowBytes;
  using Core = MmaCore<kWarpM, kWarpN, 0, kTransposed ? kTileN : 0>;
  static_assert(kThreads / kWarpSize * Core::kStagingBytes <= kStages * kStageBytes, "staging");
  extern __shared__ __align__(128) unsigned char smem[];

  pdl_wait();
  pdl_trigger();  // SAFETY: not before: the next product may read the routing early.
  const MoeRows rows = find_rows<kTileM>(p);
  if (rows.first == rows.end) return;
  const MoeTileEpilogue epilogue(p, rows.expert);
  const int warp_idx = threadIdx.x / kWarpSize, col0 = blockIdx.y * kTileN;
  const int warp_row = warp_idx / kWarpsN * kWarpM, warp_col = warp_idx % kWarpsN * kWarpN;
  const MoeRowLoader<kTileM, kThreads, kAligned> x(p, rows);
  const auto weight = moe_weight_loader<kTileN, kThreads, kAligned, kTransposed>(
      p, rows.expert, col0, epilogue.gate.is_gated());
  Core core(warp_row, warp_col);
  mma_sums<kStages, kBytesA, kStageBytes>(core, x, weight, smem, 0, p.k,
                                          [](unsigned char*, int) {});
  float* staging = reinterpret_cast<float*>(smem) + warp_idx * (Core::kStagingBytes / 4);
  core.store(epilogue, staging, rows.first + warp_row, col0 + warp_col, rows.end, p.num_rows);
}
#else
// Dynamic shared memory: kStages * 2 * kPerThread * 16 * kTileRowBytes.
template <int kPerThread, int kStages, bool kAligned>
__device__ __forceinline__ void moe_tile(const MoeGemmParams& p) {
  constexpr int kTile = kPerThread * 16, kTileBytes = kTile * kTileRowBytes;
  static_assert(16 * (kTile + 8) * 4 <= kStages * 2 * kTileBytes, "staging");
  extern __shared__ __align__(128) unsigned char smem[];

  pdl_wait();
  pdl_trigger();  // SAFETY: not before: the next product may read the routing early.
  const MoeRows rows = find_rows<kTile>(p);
  if (rows.first == rows.end) return;
  const MoeTileEpilogue epilogue(p, rows.expert);
  const int col0 = blockIdx.y * kTile;
  const MoeRowLoader<kTile, kSimtThreads, kAligned> x(p, rows);
  const auto weight = moe_weight_loader<kTile, kSimtThreads, kAligned, kTransposed>(
      p, rows.expert, col0, epilogue.gate.is_gated());
  SimtCore<kPerThread, false, kTransposed> core;
  simt_sums<kStages, kTileBytes>(core, x, weight, smem, 0, p.k, [](unsigned char*, int) {});
  core.store(epilogue, reinterpret_cast<float*>(smem), TileOrigin{rows.first, col0}, rows.end,
             p.num_rows);
}
#endif

#define ENGINE_MOE_GEMM(name, threads, min_blocks, ...)             \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ MoeGemmParams p) {               \
    __VA_ARGS__(p);                                                 \
  }

// The sizes must match engine/kernels/moe_gemm/portable.py; tests/kernels/test_cuda_constants.py
// checks them.
#if ENGINE_DTYPE != 0
ENGINE_MOE_GEMM(moe_gemm_tile_32x128, 128, 3, moe_tile<32, 128, 32, 32, 6, true>)
ENGINE_MOE_GEMM(moe_gemm_tile_128x128, 128, 2, moe_tile<128, 128, 64, 64, 4, true>)
ENGINE_MOE_GEMM(moe_gemm_unaligned_64x64, 128, 3, moe_tile<64, 64, 32, 32, 3, false>)
#else
ENGINE_MOE_GEMM(moe_gemm_tile_64x64, kSimtThreads, 3, moe_tile<4, 4, true>)
ENGINE_MOE_GEMM(moe_gemm_tile_128x128, kSimtThreads, 2, moe_tile<8, 4, true>)
ENGINE_MOE_GEMM(moe_gemm_unaligned_64x64, kSimtThreads, 3, moe_tile<4, 3, false>)
#endif
