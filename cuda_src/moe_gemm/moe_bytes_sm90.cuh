// A stage of one-byte weights (e4m3 or signed integers), row by row as TMA writes them: how it is
// loaded, and how a lane decodes it to wgmma's A operand.
#pragma once

#include <cuda_fp8.h>

#include "common/cp_async.cuh"

constexpr int kStageK = kDepth * kSlabK;
// Rows and columns per scale; 0: all columns.
constexpr int kBlockRows = BLOCK_ROWS, kBlockColumns = BLOCK_COLUMNS;
static_assert(kStageK == kSlabRowBytes, "a stage's rows are as wide as the swizzle");
static_assert(kBlockColumns % kStageK == 0, "a stage lies in one block of columns");
constexpr int kMmaBytes = kMmaM * kSlabRowBytes;  // bytes per m-tile
constexpr int kRowsW = kPartsW * kMmaM;
constexpr int kScalePlane = kPartsW * kMmaBytes,
              kStageW = kScalePlane + (kRowsW * 4 + 1023) / 1024 * 1024;

struct MoeWeights {
  const TensorMap* map;     // data (E, R, K), box: 64 rows x 128 columns
  const float* scales;      // (E, blocks of rows, blocks of columns)
  int num_rows, num_gates;  // rows per expert; num_gates 0: no gate
  int row_blocks, column_blocks;

  template <typename Params>
  __device__ __forceinline__ MoeWeights(const Params& p, int num_gates)
      : map(&p.map_data),
        scales(p.scales),
        num_rows(p.num_rows),
        num_gates(num_gates),
        row_blocks((p.num_rows + kBlockRows - 1) / kBlockRows),
        column_blocks(kBlockColumns > 0 ? (p.k + kBlockColumns - 1) / kBlockColumns : 1) {}

  // Number of bytes that `load` announces. It includes elements outside the matrix, written as
  // zeros.
  __device__ __forceinline__ int bytes(int) const { return kPartsW * kMmaBytes; }

  __device__ __forceinline__ int row_of(int row, int part) const {
    return row + (num_gates > 0 ? part / 2 * kMmaM + part % 2 * num_gates : part * kMmaM);
  }

  // Called by one warp.
  __device__ __forceinline__ void load(unsigned char* stage, int slab, int, int expert, int row,
                                       unsigned full) const {
    if (!elect_one()) return;
#pragma unroll
    for (int part = 0; part < kPartsW; ++part)
      tma_load_3d(smem_address(stage) + part * kMmaBytes, map, slab * kSlabK, row_of(row, part),
                  expert, full);
  }

  // Called by all producer threads, one per row.
  __device__ __forceinline__ void load_scales(unsigned char* stage, float*, int slab, int expert,
                                              int row) const {
    const int column = kBlockColumns > 0 ? slab * kSlabK / max(kBlockColumns, 1) : 0;
#pragma unroll 1  // registers are scarce here
    for (int i = threadIdx.x % kProducerThreads; i < kRowsW; i += kProducerThreads) {
      const int from = min(row_of(row, i / kMmaM) + i % kMmaM, num_rows - 1) / kBlockRows;
      const int64_t block = static_cast<int64_t>(expert) * row_blocks + from;
      cp_async_4(smem_address(stage) + kScalePlane + i * 4,
                 scales + block * column_blocks + column);
    }
  }
};

// Converts two codes to floats.
__device__ __forceinline__ float2 code_values(unsigned short codes) {
  if constexpr (IS_E4M3) {
    const __half2 pair = static_cast<__half2>(
        static_cast<__half2_raw>(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
    return __half22float2(pair);
  } else {  // places q + 128 in the mantissa of 2^23
    const uint32_t biased = codes ^ 0x8080u;
    constexpr float kBias = 8388608.0f + 128.0f;
    return float2{__uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440)) - kBias,
                  __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7441)) - kBias};
  }
}

// Decodes a lane's fragments of a slab.
struct MoeDecoder {
  static constexpr float kDivisor = 1.0f;  // fragments hold weights / kDivisor
  const unsigned char* stage;
  int first_row, g, t;  // this lane's row g in the warpgroup's first m-tile
  float scales[kMmaTiles][2];

  __device__ __forceinline__ MoeDecoder(int warpgroup, bool /*is_gated*/)
      : first_row(warpgroup * kMmaTiles * kMmaM + threadIdx.x / kWarpSize % 4 * 16 +
                  threadIdx.x % kWarpSize / 4),
        g(threadIdx.x % kWarpSize / 4),
        t(threadIdx.x % 4) {}

  __device__ __forceinline__ void begin_stage(const unsigned char* smem) {
    stage = smem;
    const float* from = reinterpret_cast<const float*>(stage + kScalePlane) + first_row;
#pragma unroll
    for (int j = 0; j < kMmaTiles; ++j)
      scales[j][0] = from[j * kMmaM], scales[j][1] = from[j * kMmaM + 8];
  }
  __device__ __forceinline__ void begin_slab(int) {}

  // Decodes the fragments of products kFirst to kFirst + kCount - 1 of slab d, ordered by step,
  // then by m-tile. A step is one chunk of the swizzle: 16 bytes of a row.
  template <int kFirst, int kCount>
  __device__ __forceinline__ void decode(int d, uint32_t (&a)[kCount][4]) const {
#pragma unroll
    for (int product = kFirst; product < kFirst + kCount; ++product) {
      const int step = product / kMmaTiles, tile = product % kMmaTiles;
      const unsigned char* row =
          stage + (first_row + tile * kMmaM) * kSlabRowBytes + (((d * 4 + step) ^ g) << 4) + 2 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = code_values(
            *reinterpret_cast<const unsigned short*>(row + i % 2 * 8 * kSlabRowBytes + i / 2 * 8));
        a[product - kFirst][i] =
            pack2<scalar_t>(v.x * scales[tile][i % 2], v.y * scales[tile][i % 2]);
      }
    }
  }
};
