// The epilogue of gemm_sm90.cu: a consumer warp writes its sums to global memory.
//
// A warp holds 16 rows of sums: the four warps of a warpgroup share an m-tile. The sums pass
// through a 2 KB staging buffer per warp, 128 bytes of each row at a time, so that global memory is
// accessed in whole rows. 16-byte pieces are swizzled so that the rows of an access have no bank
// conflicts. For large products, TMA copies from two alternating buffers while the warp continues
// with the next tile.
#pragma once

#include "gemm/gemm_config_sm90.cuh"
#include "common/epilogue.cuh"

__device__ __forceinline__ unsigned pack(float low, float high) {
  const Vec<scalar_t, 2> pair = {from_float<scalar_t>(low), from_float<scalar_t>(high)};
  return *reinterpret_cast<const unsigned*>(&pair);
}

// A warp's staging memory, and the first row and column of the sums it holds.
struct Corner {
  unsigned char* staging;
  int row, col;
};

// Stages chunk kChunk of a warp's results (64 columns, fewer at the end), rounded. A thread holds
// kResults of them in accumulator order: result(i), with a compile-time i.
template <int kChunk, int kResults, typename Result>
__device__ __forceinline__ void stage_rounded(const Result& result, unsigned staging) {
  const int lane_idx = threadIdx.x % 32, row = lane_idx % 16;
#pragma unroll
  for (int pair = 0; pair < 4 && kChunk * 32 + pair * 8 < kResults; ++pair) {
    const int i = kChunk * 32 + pair * 8;
    const unsigned low = pack(result(i), result(i + 1)), high = pack(result(i + 2), result(i + 3));
    if (i + 4 == kResults) {  // only eight columns are left
      stmatrix_x2(staging + row * 128 + (2 * pair ^ (row % 8)) * 16, low, high);
    } else {
      stmatrix_x4(staging + row * 128 + ((2 * pair + lane_idx / 16) ^ (row % 8)) * 16, low, high,
                  pack(result(i + 4), result(i + 5)), pack(result(i + 6), result(i + 7)));
    }
  }
}

// Stages chunk kChunk (32 columns) as float.
template <int kChunk, int kSums>
__device__ __forceinline__ void stage_float(const float (&acc)[kSums], unsigned char* staging) {
  const int lane_idx = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4 && (kChunk * 4 + j) * 4 < kSums; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_idx / 4 + half * 8, piece = 2 * j + lane_idx % 4 / 2;
      const float* a = acc + (kChunk * 4 + j) * 4 + half * 2;
      const Vec<float, 2> pair = {a[0], a[1]};
      unsigned char* to = staging + row * 128 + (piece ^ (row % 4 * 2)) * 16 + lane_idx % 2 * 8;
      store_vec(reinterpret_cast<float*>(to), pair);
    }
}

// Like stage_rounded, for a run-time chunk: registers cannot be indexed.
template <int kChunk, int kResults, typename Result>
__device__ __forceinline__ void stage_rounded_at(int chunk, const Result& result,
                                                 unsigned staging) {
  if constexpr (kChunk * 32 < kResults) {
    if (chunk == kChunk)
      stage_rounded<kChunk, kResults>(result, staging);
    else
      stage_rounded_at<kChunk + 1, kResults>(chunk, result, staging);
  }
}
template <int kChunk, int kSums>
__device__ __forceinline__ void stage_float_at(int chunk, const float (&acc)[kSums],
                                               unsigned char* staging) {
  if constexpr (kChunk * 16 < kSums) {
    if (chunk == kChunk)
      stage_float<kChunk>(acc, staging);
    else
      stage_float_at<kChunk + 1>(chunk, acc, staging);
  }
}

template <int kSums>
__device__ __forceinline__ void add_bias(const Epilogue& e, float (&acc)[kSums], int col0, int n) {
  const int first = col0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = first + j * 8 + i;
      const float bias = col < n ? to_float(e.bias[e.bias_index(col)]) : 0.0f;
      acc[4 * j + i] += bias;
      acc[4 * j + 2 + i] += bias;
    }
}

// Stores finished 16-bit results: rounded in registers, 16 bytes per store.
template <int kResults, typename Result>
__device__ __forceinline__ void store_rounded(const Epilogue& e, const Result& result,
                                              Corner corner, int m, int n, bool is_wide) {
  constexpr int kCols = kResults * 2;
  const int lane_idx = threadIdx.x % 32;
  const unsigned staging = smem_address(corner.staging);
#pragma unroll 1
  for (int chunk = 0; chunk < (kCols + 63) / 64; ++chunk) {
    stage_rounded_at<0, kResults>(chunk, result, staging);
    __syncwarp();
    const int col = corner.col + chunk * 64 + lane_idx % 8 * 8;
    const bool exists = col < n && (kCols % 64 == 0 || chunk * 64 + lane_idx % 8 * 8 < kCols);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane_idx / 8;
      const Vec<scalar_t, 8> y = load_vec<scalar_t, 8>(reinterpret_cast<const scalar_t*>(
          corner.staging + row * 128 + ((lane_idx % 8) ^ (row % 8)) * 16));
      if (!exists || corner.row + row >= m) continue;
      scalar_t* p = static_cast<scalar_t*>(e.out) + (corner.row + row) * e.out_stride + col;
      if (is_wide) {
        store_vec(p, y);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (col + j < n) p[j] = y.v[j];
      }
    }
    __syncwarp();
  }
}

// Like store_rounded, but by TMA, which clips rows and columns that do not exist. `m_tile` is the
// index within the warpgroup. Every chunk of every tile is staged, so that the two buffers
// alternate.
template <int kResults, typename Result>
__device__ __forceinline__ void store_by_map(const TensorMap* map_out, const Result& result,
                                             Corner corner, int m_tile) {
  constexpr int kChunks = kResults / 32;
  const int lane_idx = threadIdx.x % 32;
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const unsigned staging =
        smem_address(corner.staging) + (m_tile * kChunks + chunk) % 2 * kWarpStaging;
    if (lane_idx == 0) bulk_wait_read<1>();
    __syncwarp();
    stage_rounded_at<0, kResults>(chunk, result, staging);
    fence_async_proxy();
    __syncwarp();
    if (lane_idx == 0) {
      tma_store_2d(map_out, corner.col + chunk * 64, corner.row, staging);
      bulk_commit();
    }
  }
}

// Applies bias, activation and residual in float to kRows groups of four columns; rounds once.
template <typename Out, int kRows>
__device__ __forceinline__ void finish(const Epilogue& e, Vec<float, 4> (&sums)[kRows],
                                       const Vec<Out, 4> (&residual)[kRows], int row, int row_step,
                                       int col, int m, int n) {
  if (col >= n) return;
  if (!e.is_bare()) {
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {  // not unrolled (the columns rotate): the activation is long
      const float bias = e.bias != nullptr && col + j < n ? to_float(e.bias[col + j]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float y = activate(e.activation, sums[i].v[0] + bias);
        sums[i] = {sums[i].v[1], sums[i].v[2], sums[i].v[3], y};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (row + i * row_step >= m) continue;
    Vec<Out, 4> y;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      y.v[j] = from_float<Out>(e.addend<Out>(sums[i].v[j]) + to_float(residual[i].v[j]));
    e.store<Out>(row + i * row_step, col, n, y);
  }
}

template <typename Out, int kRows>
__device__ __forceinline__ void load_residuals(const Epilogue& e, Vec<Out, 4> (&residual)[kRows],
                                               int row, int row_step, int col, int m, int n) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    residual[i] = {};
    if (e.residual != nullptr && col < n && row + i * row_step < m)
      residual[i] = e.load_residual<Out>(row + i * row_step, col, n);
  }
}

// General store: floats pass through shared memory, four columns per thread.
template <typename Out, int kSums>
__device__ __forceinline__ void store_general(const Epilogue& e, const float (&acc)[kSums],
                                              Corner corner, int m, int n) {
  constexpr int kCols = kSums * 2;
  // Rows per pass, limited by registers.
  constexpr int kRows = kConsumerWarpgroups == 3 || kSharesColumns ? 2 : 4;
  const int lane_idx = threadIdx.x % 32;
#pragma unroll 1
  for (int chunk = 0; chunk < (kCols + 31) / 32; ++chunk) {
    const int within = chunk * 32 + lane_idx % 8 * 4;
    const int col = kCols % 32 == 0 || within < kCols ? corner.col + within : n;
#pragma unroll
    for (int first = 0; first < 4; first += kRows) {
      const int r0 = first * 4 + lane_idx / 8, row = corner.row + r0;
      Vec<Out, 4> residual[kRows];
      load_residuals(e, residual, row, 4, col, m, n);  // stays in flight during staging
      if (first == 0) {
        stage_float_at<0>(chunk, acc, corner.staging);
        __syncwarp();
      }
      Vec<float, 4> sums[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        sums[i] = load_vec<float, 4>(reinterpret_cast<const float*>(
            corner.staging + (r0 + i * 4) * 128 + ((lane_idx % 8) ^ (r0 % 4 * 2)) * 16));
      if (first + kRows == 4) __syncwarp();
      finish(e, sums, residual, row, 4, col, m, n);
    }
  }
}

// Stores gated 16-bit results without residual: a thread holds gate and up of the same column.
template <int kSums>
__device__ __forceinline__ void store_gated_rounded(const Epilogue& e, float (&acc)[kSums],
                                                    Corner corner, int m, int n, bool is_wide,
                                                    const TensorMap* map_out, int m_tile) {
  const auto result = [&](int i) {
    return gated_to_round(acc[i / 4 * 8 + i % 4], acc[i / 4 * 8 + 4 + i % 4]);
  };
  const Corner to{corner.staging, corner.row, corner.col / 2};
  if constexpr (kStores && kSums % 64 == 0) {
    if (is_wide) {
      store_by_map<kSums / 2>(map_out, result, to, m_tile);
      return;
    }
  }
  store_rounded<kSums / 2>(e, result, to, m, n / 2, is_wide);
}

// Stores gated results in all other cases: floats pass through shared memory, 32 columns (16 of
// out) at a time; a lane takes four of gate and the matching four of up.
template <typename Out, int kSums>
__device__ __forceinline__ void store_gated(const Epilogue& e, const float (&acc)[kSums],
                                            Corner corner, int m, int n) {
  constexpr int kCols = kSums * 2;
  const int lane_idx = threadIdx.x % 32;
  // The lane's 16 bytes of gate; the matching 16 of up are two pieces further.
  const int piece = lane_idx % 4 / 2 * 4 + lane_idx % 2;
#pragma unroll 1
  for (int chunk = 0; chunk < (kCols + 31) / 32; ++chunk) {
    stage_float_at<0>(chunk, acc, corner.staging);
    __syncwarp();
    const int within = chunk * 32 + piece * 4, col = corner.col + within;
    const int out_col = Epilogue::gated_column(col);
#pragma unroll
    for (int r = lane_idx / 4; r < 16; r += 8) {
      const auto sums = [&](int i) {
        return load_vec<float, 4>(
            reinterpret_cast<const float*>(corner.staging + r * 128 + (i ^ (r % 4 * 2)) * 16));
      };
      const int row = corner.row + r;
      if (row >= m || col >= n || (kCols % 32 != 0 && within >= kCols)) continue;
      Vec<Out, 4> y = {};
      if (e.residual != nullptr) y = e.load_residual<Out>(row, out_col, n / 2);
      const Vec<float, 4> gate = sums(piece), up = sums(piece + 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float product = e.gated(col + j, gate.v[j], up.v[j]);
        const float addend = e.addend<Out>(product);
        y.v[j] = from_float<Out>(e.residual != nullptr ? addend + to_float(y.v[j]) : addend);
      }
      e.store<Out>(row, out_col, n / 2, y);
    }
    __syncwarp();
  }
}

template <int kSums>
__device__ __forceinline__ void store(const Epilogue& e, float (&acc)[kSums], Corner corner, int m,
                                      int n, bool is_wide, const TensorMap* map_out, int m_tile) {
  const bool is_rounded = !e.is_float && e.residual == nullptr;
  if constexpr (kMayGate && kSums % 8 == 0) {
    if (e.is_gated()) {
      if (is_rounded) {
        if (e.bias != nullptr) add_bias(e, acc, corner.col, n);
        store_gated_rounded(e, acc, corner, m, n, is_wide, map_out, m_tile);
      } else if (e.is_float) {
        store_gated<float>(e, acc, corner, m, n);
      } else {
        store_gated<scalar_t>(e, acc, corner, m, n);
      }
      return;
    }
  }
  if (is_rounded && e.activation == kIdentity) {
    if (e.bias != nullptr) add_bias(e, acc, corner.col, n);
    const auto result = [&](int i) { return acc[i]; };
    if constexpr (kStores && kSums % 32 == 0) {
      if (is_wide) {
        store_by_map<kSums>(map_out, result, corner, m_tile);
        return;
      }
    }
    store_rounded<kSums>(e, result, corner, m, n, is_wide);
    return;
  }
  if (e.is_float)
    store_general<float>(e, acc, corner, m, n);
  else
    store_general<scalar_t>(e, acc, corner, m, n);
}
