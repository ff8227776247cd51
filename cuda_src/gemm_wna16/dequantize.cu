// Dequantizes a weight to an (N, K) matrix of scalar_t.
//
//   out[n, k] = scale (q - zero), or scale q + minimum
//
// Arguments: DequantizeParams, or the parameters of dequantize_bytes, both below.
//
// Numerics: float, rounded once; products and sums are not contracted.
// Parallelisation: a warp decodes one tile of 16 rows by 64 columns of a packed weight, and writes
// it through shared memory in whole lines. One-byte formats stored row by row take one thread per
// 16 codes (dequantize_bytes).
// Mirror: engine/reference/dequantize.py
#include <cuda_fp8.h>

#include "common/reduce.cuh"  // kWarpSize
#include "common/weight_decode.cuh"

constexpr int kWarps = 4;  // warps per block
constexpr int kPitch = kTileColumns + 16 / sizeof(scalar_t);

struct DequantizeParams {
  const unsigned char* data;    // planes of the weight; see PackedWeight
  const unsigned char* high;    // or null
  const unsigned char* scales;  //
  const unsigned char* supers;  // or null
  const int* permutation;       // (K,) destination of each column; null: unpermuted
  scalar_t* out;                // (N, K) contiguous
  int n, k;
  int groups, num_supers;  // entries per row of scales and of supers
  int is_vector;           // each row of out consists of aligned 16-byte words
};

__device__ __forceinline__ float code_value(const TileWords& w, int s, int j, int e) {
  if constexpr (kBits == 8) {
    return static_cast<float>(
        static_cast<signed char>(w.data[2 * s + j / 2] >> (8 * (j % 2 + 2 * e))));
  } else {
    uint32_t code = w.data[s] >> (4 * (j + 4 * e)) & 15;
    if constexpr (kIsE2m1) {
      const uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
      const float value = exponent == 0 ? 0.5f * mantissa
                                        : __uint_as_float((exponent + 126) << 23 | mantissa << 22);
      return code & 8 ? -value : value;
    }
    if constexpr (kBits == 5) code |= (w.high[0] >> (j + 4 * s + 16 * e) & 1) << 4;
    if constexpr (kBits == 6) code |= (w.high[s / 2] >> (2 * (j + 4 * (s % 2) + 8 * e)) & 3) << 4;
    return static_cast<float>(code) - static_cast<float>(kZero);
  }
}

__device__ __forceinline__ float scaled_value(float value, float scale, float offset) {
  if constexpr (kHasZeroPoint) value -= offset;
  value = __fmul_rn(value, scale);
  return kHasMinimum ? __fadd_rn(value, offset) : value;
}

extern "C" __global__ void __launch_bounds__(kWarps* kWarpSize)
    dequantize_packed(const __grid_constant__ DequantizeParams p) {
  __shared__ __align__(16) scalar_t smem[kWarps][kTileRows * kPitch];
  const int lane_idx = threadIdx.x % kWarpSize, warp_idx = threadIdx.x / kWarpSize;
  const int g = lane_idx / 4, t = lane_idx % 4;
  const int k_tiles = (p.k + kTileColumns - 1) / kTileColumns;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp_idx;
  const int64_t tile = index / k_tiles;
  const int column0 = static_cast<int>(index % k_tiles) * kTileColumns;
  if (tile * kTileRows >= p.n) return;  // SAFETY: whole warps exit, and there is no block barrier
  TileWords words;
  words.load(p.data + index * kDataBytes, p.high + index * kHighBytes, lane_idx);
  const PackedWeight weight{p.data, p.high, p.scales, p.supers};
  scalar_t* staging = smem[warp_idx];
  float scale[2], offset[2];
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s * 16 % kGroup == 0) {
      const int group = (column0 + s * 16) / kGroup;
      const GroupScales own = load_group(weight, tile, group, p.groups, p.num_supers, g);
      scale[0] = own.scale[0], scale[1] = own.scale[1];
      offset[0] = own.offset[0], offset[1] = own.offset[1];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float y = scaled_value(code_value(words, s, j, e), scale[j % 2], offset[j % 2]);
        staging[(g + 8 * (j % 2)) * kPitch + s * 16 + 8 * (j / 2) + 2 * t + e] =
            from_float<scalar_t>(y);
      }
  }
  __syncwarp();
  constexpr int kChunks = kTileColumns / kVec;  // 16-byte chunks per row
#pragma unroll 4
  for (int i = lane_idx; i < kTileRows * kChunks; i += kWarpSize) {
    const int64_t row = tile * kTileRows + i / kChunks;
    const int column = column0 + i % kChunks * kVec;
    const scalar_t* from = staging + i / kChunks * kPitch + i % kChunks * kVec;
    if (row >= p.n || column >= p.k) continue;
    if (p.permutation == nullptr && p.is_vector) {
      store_vec(p.out + row * p.k + column, load_vec<scalar_t, kVec>(from));
      continue;
    }
    for (int j = 0; j < kVec && column + j < p.k; ++j) {
      const int to = p.permutation == nullptr ? column + j : p.permutation[column + j];
      if (to >= 0 && to < p.k) p.out[row * p.k + to] = from[j];
    }
  }
}

__device__ __forceinline__ float byte_value(unsigned char code, bool is_e4m3) {
  if (!is_e4m3) return static_cast<float>(static_cast<signed char>(code));
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// data (N, K) e4m3 or int8; scales (ceil(N / block_rows), ceil(K / block_columns)) float. A thread
// converts up to 16 codes in each of its rows: every gridDim.y-th, from blockIdx.y on.
extern "C" __global__ void __launch_bounds__(256)
    dequantize_bytes(const unsigned char* data, const float* scales, scalar_t* out, int n, int k,
                     int block_rows, int block_columns, int is_e4m3, int is_vector) {
  constexpr int kCodes = 16;
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kCodes;
  if (column >= k) return;
  const int scale_columns = (k + block_columns - 1) / block_columns;
  for (int row = blockIdx.y; row < n; row += gridDim.y) {
    const unsigned char* from = data + static_cast<int64_t>(row) * k + column;
    scalar_t* to = out + static_cast<int64_t>(row) * k + column;
    const float* row_scales = scales + static_cast<int64_t>(row / block_rows) * scale_columns;
    Vec<unsigned char, kCodes> codes = {};
    if (is_vector) codes = load_vec<unsigned char, kCodes>(from);
    const int count = min(kCodes, k - column);
    Vec<scalar_t, kVec> y;
#pragma unroll
    for (int j = 0; j < kCodes; ++j) {
      if (!is_vector && j < count) codes.v[j] = from[j];
      const int place = min(column + j, k - 1) / block_columns;
      const float value = byte_value(codes.v[j], is_e4m3 != 0) * row_scales[place];
      y.v[j % kVec] = from_float<scalar_t>(value);
      if (!is_vector && j < count) to[j] = y.v[j % kVec];
      if (is_vector && j % kVec == kVec - 1) store_vec(to + j - j % kVec, y);
    }
  }
}
