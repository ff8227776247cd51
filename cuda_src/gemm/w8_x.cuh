// The rows of x in the shared memory of a skinny product of codes: quantized here where x has no
// scales yet, after an RMSNorm where there is one.
#pragma once

#include "gemm/skinny_block.cuh"
#include "gemm/skinny_loads.cuh"
#include "gemm/w8_problem.cuh"

constexpr int kW8Tokens = 8;
constexpr int kW8MaxWarps = 8;

// Rows of x as values that the product multiplies, [token][k], and their scales.
template <typename Product, bool kBlocks>
struct W8Rows {
  using Codes = typename Product::Codes;
  using V = Vec<scalar_t, kVec>;
  static constexpr int kPieces = 8;  // 16-byte vectors of a single row that a thread holds
  static constexpr int kGroupLanes = kScaleBlock / kVec;

  const W8Params& p;
  int thread, threads, warp_idx, num_warps;
  int pitch, vectors;  // bytes of a row in shared memory; vectors of eight values in a row
  int num_scales;      // of a row
  unsigned char* x;
  float *scales, *smem;  // `smem`: a few floats for each warp and token
  V held[kPieces], norm[kPieces];

  // Bytes from a row to the next: no bank conflicts between the rows that a warp reads at once.
  __device__ __forceinline__ static int pitch_of(int k) {
    return (k * Product::kXBytes + 511) / 512 * 512 + (Product::kXBytes == 2 ? 16 : 64);
  }

  template <typename Block>
  __device__ __forceinline__ W8Rows(const W8Params& p, const Block& b, float* scales, float* smem)
      : p(p),
        thread(b.thread),
        threads(b.threads),
        warp_idx(b.warp_idx),
        num_warps(b.num_warps),
        pitch(pitch_of(p.k)),
        vectors(p.k / kVec),
        num_scales(kBlocks ? scale_blocks(p.k) : 1),
        x(b.x),
        scales(scales),
        smem(smem) {}

  __device__ __forceinline__ bool is_single() const {
    return p.x_scales == nullptr && p.m == 1 && vectors <= threads * kPieces;
  }
  __device__ __forceinline__ const scalar_t* row(int token) const {
    return static_cast<const scalar_t*>(p.x) + token * p.x_stride;
  }

  // What does not depend on the preceding kernel.
  __device__ __forceinline__ void begin() {
    const int count = (pitch / 256 * 256 - p.k * Product::kXBytes) / 16;  // zeros after the end
    for (int i = thread; i < p.m * count; i += threads)
      store_vec(reinterpret_cast<uint32_t*>(x + i / count * pitch + p.k * Product::kXBytes +
                                            i % count * 16),
                Vec<uint32_t, 4>{});
  }
  __device__ __forceinline__ void load_norm() {
    if (p.norm_weight == nullptr) return;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = thread + j * threads;
      norm[j] = V{};
      if (i < vectors) norm[j] = load_vec<scalar_t, kVec>(p.norm_weight + i * kVec);
    }
  }

  // The values in shared memory. Ends with a barrier of the block.
  __device__ __forceinline__ void prepare() {
    if (p.x_scales != nullptr)
      copy_codes();
    else if (is_single())
      quantize_single();
    else
      quantize_rows();
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void put(int token, int i, const V& v, float factor) const {
    uint32_t codes[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      codes[j] = Codes::pack(to_float(v.v[4 * j]) * factor, to_float(v.v[4 * j + 1]) * factor,
                             to_float(v.v[4 * j + 2]) * factor, to_float(v.v[4 * j + 3]) * factor);
    put_codes(token, i, codes[0], codes[1]);
  }
  // Eight codes, the vector's number i of the row.
  __device__ __forceinline__ void put_codes(int token, int i, uint32_t a, uint32_t b) const {
    unsigned char* to = x + token * pitch + i * 8 * Product::kXBytes;
    if constexpr (Product::kXBytes == 2) {
      Vec<uint32_t, 4> halves;
      halves_of_e4m3(a, halves.v[0], halves.v[1]);
      halves_of_e4m3(b, halves.v[2], halves.v[3]);
      store_vec(reinterpret_cast<uint32_t*>(to), halves);
    } else {
      store_vec(reinterpret_cast<uint32_t*>(to), Vec<uint32_t, 2>{a, b});
    }
  }

  __device__ __forceinline__ void copy_codes() const {
    const unsigned char* codes = static_cast<const unsigned char*>(p.x);
    for (int token = 0; token < p.m; ++token)
#pragma unroll 4
      for (int i = thread; i < vectors / 2; i += threads) {
        const uint4 v = *reinterpret_cast<const uint4*>(codes + token * p.x_stride + i * 16);
        put_codes(token, 2 * i, v.x, v.y);
        put_codes(token, 2 * i + 1, v.z, v.w);
      }
    for (int i = thread; i < p.m * num_scales; i += threads) scales[i] = p.x_scales[i];
  }

  // The reduction of one float per warp.
  template <typename Reduce>
  __device__ __forceinline__ float over_warps(float value, float* at, const Reduce& reduce) const {
    if (thread % kWarpSize == 0) at[warp_idx] = value;
    __syncthreads();
    float all = at[0];
    for (int i = 1; i < num_warps; ++i) all = reduce(all, at[i]);
    return all;
  }

  __device__ __forceinline__ static V normalised(V v, const V& w, float scale, float offset) {
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.v[j] = from_float<scalar_t>(to_float(v.v[j]) * scale * (to_float(w.v[j]) + offset));
    return v;
  }
  __device__ __forceinline__ static float squares(const V& v, float sum) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += to_float(v.v[j]) * to_float(v.v[j]);
    return sum;
  }

  // One row, read once.
  __device__ __forceinline__ void quantize_single() {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = thread + j * threads;
      held[j] = V{};
      if (i < vectors) held[j] = load_from_l2(row(0) + i * kVec);
    }
    if (p.norm_weight != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) sum = squares(held[j], sum);
      sum = over_warps(warp_sum(sum), smem, [](float a, float b) { return a + b; });
      const float scale = 1.0f / sqrtf(sum / p.k + p.eps);
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        held[j] = normalised(held[j], norm[j], scale, p.weight_offset);
    }
    float factor = 0.0f;
    if constexpr (!kBlocks) {
      float peak = 0.0f;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) peak = peak_of(held[j], peak);
      peak = over_warps(lanes_max_or_nan<kWarpSize>(peak), smem + kW8MaxWarps, max_or_nan);
      factor = code_factor<Codes>(peak);
      if (thread == 0) scales[0] = code_scale<Codes>(peak);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int i = thread + j * threads;
      if constexpr (kBlocks) {
        const float peak = lanes_max_or_nan<kGroupLanes>(peak_of(held[j], 0.0f));
        factor = code_factor<Codes>(peak);
        if (i < vectors && i % kGroupLanes == 0) scales[i / kGroupLanes] = code_scale<Codes>(peak);
      }
      if (i < vectors) put(0, i, held[j], factor);
    }
  }

  __device__ __forceinline__ V load_normalised(int token, int i, float scale) const {
    V v = load_vec<scalar_t, kVec>(row(token) + i * kVec);
    if (p.norm_weight != nullptr)
      v = normalised(v, load_vec<scalar_t, kVec>(p.norm_weight + i * kVec), scale, p.weight_offset);
    return v;
  }

  // Several rows: a warp per row finds scales, then all threads write values.
  __device__ __forceinline__ void quantize_rows() const {
    float* norm_scales = smem;
    float* factors = smem + kW8Tokens;
    const int lane_idx = thread % kWarpSize;
#pragma unroll 1
    for (int token = warp_idx; token < p.m; token += num_warps) {
      float scale = 1.0f;
      if (p.norm_weight != nullptr) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = lane_idx; i < vectors; i += kWarpSize)
          sum = squares(load_vec<scalar_t, kVec>(row(token) + i * kVec), sum);
        scale = 1.0f / sqrtf(warp_sum(sum) / p.k + p.eps);
      }
      if (lane_idx == 0) norm_scales[token] = scale;
      if constexpr (kBlocks) continue;
      float peak = 0.0f;
#pragma unroll 8
      for (int i = lane_idx; i < vectors; i += kWarpSize)
        peak = peak_of(load_normalised(token, i, scale), peak);
      peak = lanes_max_or_nan<kWarpSize>(peak);
      if (lane_idx == 0) {
        factors[token] = code_factor<Codes>(peak);
        scales[token] = code_scale<Codes>(peak);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int token = 0; token < p.m; ++token)
#pragma unroll 4
      for (int first = 0; first < vectors; first += threads) {
        const int i = first + thread;
        V v = {};
        if (i < vectors) v = load_normalised(token, i, norm_scales[token]);
        float factor;
        if constexpr (kBlocks) {
          const float peak = lanes_max_or_nan<kGroupLanes>(peak_of(v, 0.0f));
          factor = code_factor<Codes>(peak);
          if (i < vectors && i % kGroupLanes == 0)
            scales[token * num_scales + i / kGroupLanes] = code_scale<Codes>(peak);
        } else {
          factor = factors[token];
        }
        if (i < vectors) put(token, i, v, factor);
      }
  }
};
