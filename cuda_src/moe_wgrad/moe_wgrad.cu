// Gradient of a grouped GEMM with respect to its matrices: a GEMM per expert, summed over its rows.
//
//   out[e] = sum over i of dy[i]^T x[i],   i in [offsets[e], offsets[e + 1])
//
// One operand has rows sorted by expert. The other is gathered: its row is token order[i] / top_k.
// Experts without rows get zeros. Arguments: MoeWgradParams, below.
//
// Numerics: products on tensor cores (float32: on CUDA cores), float sums in ascending order of i,
// one rounding at the end.
// Parallelisation: a block computes one tile of one expert's matrix. Both operands lie in shared
// memory as they do in global memory, with rows along the sum; ldmatrix transposes them.
// Mirror: engine/reference/moe_wgrad.py
#include "common/pdl.cuh"
#include "moe_wgrad/moe_wgrad_problem.cuh"
#if ENGINE_DTYPE != 0
#include "common/mma_tile.cuh"
#else
#include "common/simt_tile.cuh"
#endif

struct MoeWgradParams {
  const scalar_t* dy;  // (P, R), or gathered (T, R); contiguous, like all arrays
  const scalar_t* x;   // (P, K), or gathered (T, K)
  const int* order;    // (P,)
  const int* offsets;  // (E + 1,)
  scalar_t* out;       // (E, R, K)
  int num_pairs, num_rows, k, top_k;
  int gathers_x;  // x is gathered; 0: dy is
  int is_vector;  // rows of out can be written four elements at a time
};

// Address of an operand's row in an expert's sum.
struct ExpertRow {
  PairRows rows;
  int first;

  __device__ __forceinline__ const scalar_t* operator()(int i) const { return rows.at(first + i); }
};

template <int kCols, int kThreads, bool kAligned>
using OperandLoader = ColumnTileLoader<kCols, kThreads, kAligned, ExpertRow>;

__device__ __forceinline__ ExpertRow rows_of_dy(const MoeWgradParams& p, int first) {
  return {{p.dy, p.gathers_x ? nullptr : p.order, p.num_rows, p.num_pairs, p.top_k}, first};
}
__device__ __forceinline__ ExpertRow rows_of_x(const MoeWgradParams& p, int first) {
  return {{p.x, p.gathers_x ? p.order : nullptr, p.k, p.num_pairs, p.top_k}, first};
}
__device__ __forceinline__ Epilogue epilogue_of(const MoeWgradParams& p, int expert) {
  scalar_t* out = p.out + static_cast<int64_t>(expert) * p.num_rows * p.k;
  return {nullptr, nullptr, out, 0, p.k, kIdentity, sizeof(scalar_t) == 4, p.is_vector != 0};
}

#if ENGINE_DTYPE != 0
// Dynamic shared memory: kStages * (kTileM + kTileN) * kTileRowBytes.
template <int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, bool kAligned>
__device__ __forceinline__ void wgrad_tile(const MoeWgradParams& p) {
  constexpr int kWarpsN = kTileN / kWarpN;
  constexpr int kThreads = kTileM / kWarpM * kWarpsN * kWarpSize;
  constexpr int kBytesA = kTileM * kTileRowBytes, kStageBytes = (kTileM + kTileN) * kTileRowBytes;
  using Core = MmaCore<kWarpM, kWarpN, kTileM, kTileN>;
  static_assert(kThreads / kWarpSize * Core::kStagingBytes <= kStages * kStageBytes, "staging");
  extern __shared__ __align__(128) unsigned char smem[];

  pdl_trigger();
  pdl_wait();
  const int expert = blockIdx.y, warp_idx = threadIdx.x / kWarpSize;
  const TileOrigin origin = tile_origin<kTileM, kTileN>(p.num_rows, p.k);
  const int warp_row = warp_idx / kWarpsN * kWarpM, warp_col = warp_idx % kWarpsN * kWarpN;
  const ExpertRows rows(p.offsets, expert, p.num_pairs);
  const OperandLoader<kTileM, kThreads, kAligned> dy(p.dy, rows_of_dy(p, rows.first), origin.row,
                                                     p.num_rows);
  const OperandLoader<kTileN, kThreads, kAligned> x(p.x, rows_of_x(p, rows.first), origin.col, p.k);
  Core core(warp_row, warp_col);
  mma_sums<kStages, kBytesA, kStageBytes>(core, dy, x, smem, 0, rows.count,
                                          [](unsigned char*, int) {});
  float* staging = reinterpret_cast<float*>(smem) + warp_idx * (Core::kStagingBytes / 4);
  core.store(epilogue_of(p, expert), staging, origin.row + warp_row, origin.col + warp_col,
             p.num_rows, p.k);
}
#else
// Dynamic shared memory: kStages * 2 * kPerThread * 16 * kTileRowBytes.
template <int kPerThread, int kStages, bool kAligned>
__device__ __forceinline__ void wgrad_tile(const MoeWgradParams& p) {
  constexpr int kTile = kPerThread * 16, kTileBytes = kTile * kTileRowBytes;
  static_assert(16 * (kTile + 8) * 4 <= kStages * 2 * kTileBytes, "staging");
  extern __shared__ __align__(128) unsigned char smem[];

  pdl_trigger();
  pdl_wait();
  const int expert = blockIdx.y;
  const TileOrigin origin = tile_origin<kTile, kTile>(p.num_rows, p.k);
  const ExpertRows rows(p.offsets, expert, p.num_pairs);
  const OperandLoader<kTile, kSimtThreads, kAligned> dy(p.dy, rows_of_dy(p, rows.first), origin.row,
                                                        p.num_rows);
  const OperandLoader<kTile, kSimtThreads, kAligned> x(p.x, rows_of_x(p, rows.first), origin.col,
                                                       p.k);
  SimtCore<kPerThread, true, true> core;
  simt_sums<kStages, kTileBytes>(core, dy, x, smem, 0, rows.count, [](unsigned char*, int) {});
  core.store(epilogue_of(p, expert), reinterpret_cast<float*>(smem), origin, p.num_rows, p.k);
}
#endif

#define ENGINE_MOE_WGRAD(name, threads, min_blocks, ...)            \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) \
      name(const __grid_constant__ MoeWgradParams p) {              \
    __VA_ARGS__(p);                                                 \
  }

// The sizes must match engine/kernels/moe_wgrad/portable.py; tests/kernels/test_cuda_constants.py
// checks them.
#if ENGINE_DTYPE != 0
ENGINE_MOE_WGRAD(moe_wgrad_tile_128x128, 128, 2, wgrad_tile<128, 128, 64, 64, 4, true>)
ENGINE_MOE_WGRAD(moe_wgrad_unaligned_64x64, 128, 3, wgrad_tile<64, 64, 32, 32, 3, false>)
#else
ENGINE_MOE_WGRAD(moe_wgrad_tile_128x128, kSimtThreads, 2, wgrad_tile<8, 4, true>)
ENGINE_MOE_WGRAD(moe_wgrad_unaligned_64x64, kSimtThreads, 3, wgrad_tile<4, 3, false>)
#endif
