// A stage of e4m3 codes for both the weight (one scale per 128 x 128 block) and x (one scale per
// 128 columns of a row): wgmma multiplies the codes directly.
#pragma once

#include "common/cp_async.cuh"

constexpr int kBlockSize = 128;
static_assert(kSlabK == kBlockSize, "the sums over a slab have one scale");
static_assert(kBlockSize % kMmaM == 0, "the rows of an m-tile have one scale");
constexpr int kMmaBytes = kMmaM * kSlabRowBytes;  // bytes per m-tile of a slab
constexpr int kSlabW = kPartsW * kMmaBytes;
constexpr int kStageW = kDepth * kSlabW;
// Scales of a slab: one per m-tile, then one per row of x. They are stored outside the stage.
constexpr int kFirstRowScale = 4, kSlabScales = kFirstRowScale + kTokens;
constexpr int kStageScales = kDepth * kSlabScales;
static_assert(kPartsW <= kFirstRowScale, "room for scales");

struct MoeWeights {
  const TensorMap* map;  // data (E, R, K), box: 64 rows x 128 columns
  const float* scales;   // (E, blocks of rows, blocks of columns)
  int num_gates;         // gate rows per expert, a multiple of kMmaM; 0: no gate
  int row_blocks, column_blocks;

  template <typename Params>
  __device__ __forceinline__ MoeWeights(const Params& p, int num_gates)
      : map(&p.map_data),
        scales(p.scales),
        num_gates(num_gates),
        row_blocks((p.num_rows + kBlockSize - 1) / kBlockSize),
        column_blocks((p.k + kBlockSize - 1) / kBlockSize) {}

  // Number of bytes that `load` announces. It includes elements outside the matrix, written as
  // zeros.
  __device__ __forceinline__ int bytes(int depth) const { return depth * kSlabW; }

  __device__ __forceinline__ int row_of(int row, int part) const {
    return row + (num_gates > 0 ? part / 2 * kMmaM + part % 2 * num_gates : part * kMmaM);
  }

  // Called by one warp.
  __device__ __forceinline__ void load(unsigned char* stage, int slab, int depth, int expert,
                                       int row, unsigned full) const {
    if (!elect_one()) return;
    for (int d = 0; d < depth; ++d)
#pragma unroll
      for (int part = 0; part < kPartsW; ++part)
        tma_load_3d(smem_address(stage) + d * kSlabW + part * kMmaBytes, map, (slab + d) * kSlabK,
                    row_of(row, part), expert, full);
  }

  // Called by all producer threads.
  __device__ __forceinline__ void load_scales(unsigned char*, float* stage, int slab, int expert,
                                              int row) const {
    const int thread = threadIdx.x % kProducerThreads, d = thread / kPartsW;
    if (d >= kDepth || slab + d >= column_blocks) return;
    const int from = min(row_of(row, thread % kPartsW) / kBlockSize, row_blocks - 1);
    const int64_t block = static_cast<int64_t>(expert) * row_blocks + from;
    cp_async_4(smem_address(stage + d * kSlabScales + thread % kPartsW),
               scales + block * column_blocks + slab + d);
  }
};

// Scales of the rows of x: each producer thread loads those of one row.
struct MoeRowScales {
  const float* scales;  // (rows, groups)
  int groups;
  const float* row;  // null: no such row

  template <typename Params>
  __device__ __forceinline__ explicit MoeRowScales(const Params& p)
      : scales(p.x_scales), groups((p.k + kBlockSize - 1) / kBlockSize), row(nullptr) {}

  __device__ __forceinline__ void begin(int index) {
    row = index < 0 ? nullptr : scales + static_cast<int64_t>(index) * groups;
  }
  __device__ __forceinline__ void load(float* stage, int slab) const {
    if (row == nullptr) return;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      if (slab + d < groups)
        cp_async_4(
            smem_address(stage + d * kSlabScales + kFirstRowScale + threadIdx.x % kProducerThreads),
            row + slab + d);
  }
};
