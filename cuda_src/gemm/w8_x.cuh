// The rows of x in shared memory, for skinny GEMMs of codes. A single row without scales is
// quantized here, after an RMSNorm if the op has one.
#pragma once

#include "common/packed.cuh"
#include "gemm/skinny_block.cuh"
#include "gemm/skinny_loads.cuh"
#include "gemm/w8_problem.cuh"

constexpr int kW8Tokens = 8;
constexpr int kW8MaxWarps = 8;

// Rows of x as codes, [token][k], and their scales.
template <typename Product, bool kBlocks>
struct W8Rows {
  using Codes = typename Product::Codes;
  using V = Vec<scalar_t, kVec>;
  static constexpr bool kGroups = kBlocks || Product::kGroups;
  // 16-byte vectors that a thread holds: of a single row, and of the norm's weight, which it can
  // load before the preceding kernel has ended.
  static constexpr int kPieces = 8, kEarlyPieces = 4;
  static constexpr int kGroupLanes = kScaleBlock / kVec;

  const W8Params& p;
  int thread, threads, warp_idx, num_warps;
  int pitch, vectors;  // bytes per row in shared memory; vectors of eight values per row
  int num_scales;      // scales per row
  unsigned char* x;
  float *scales, *smem;  // `smem`: two floats per warp
  Packed<kVec> norm[kEarlyPieces];

  // Bytes between rows, padded so that rows that a warp reads together have no bank conflicts.
  __device__ __forceinline__ static int pitch_of(int k) { return (k + 511) / 512 * 512 + 64; }

  template <typename Block>
  __device__ __forceinline__ W8Rows(const W8Params& p, const Block& b, float* scales, float* smem)
      : p(p),
        thread(b.thread),
        threads(b.threads),
        warp_idx(b.warp_idx),
        num_warps(b.num_warps),
        pitch(pitch_of(p.k)),
        vectors(p.k / kVec),
        num_scales(kGroups ? scale_blocks(p.k) : 1),
        x(b.x),
        scales(scales),
        smem(smem) {}

  // Runs the steps that do not depend on the preceding kernel.
  __device__ __forceinline__ void begin() const {
    const int count = (pitch / 256 * 256 - p.k) / 16;  // zero vectors after the row's end
    for (int i = thread; i < p.m * count; i += threads)
      store_vec(reinterpret_cast<uint32_t*>(x + i / count * pitch + p.k + i % count * 16),
                Vec<uint32_t, 4>{});
  }
  // Loads the norm's weight, or prefetches it to L2, while the preceding kernel may still run.
  __device__ __forceinline__ void load_norm() {
    if (p.norm_weight == nullptr) return;
    load_pieces(p.norm_weight, norm);
    const int first = kEarlyPieces * threads * kVec;
    for (int i = first + thread * 64; i < p.k; i += threads * 64)  // one thread per 128-byte line
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm_weight + i));
  }

  // Writes the values to shared memory. Ends with a block barrier.
  __device__ __forceinline__ void prepare() const {
    if (p.x_scales != nullptr)
      copy_codes();
    else
      quantize_row();
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void copy_codes() const {
    const unsigned char* codes = static_cast<const unsigned char*>(p.x);
    for (int i = thread * 16; i < p.k; i += threads * 16) {
      uint4 v[kW8Tokens];  // all loads are in flight together
#pragma unroll
      for (int token = 0; token < kW8Tokens; ++token)
        if (token < p.m) v[token] = *reinterpret_cast<const uint4*>(codes + token * p.x_stride + i);
#pragma unroll
      for (int token = 0; token < kW8Tokens; ++token)
        if (token < p.m) *reinterpret_cast<uint4*>(x + token * pitch + i) = v[token];
    }
    for (int i = thread; i < p.m * num_scales; i += threads) scales[i] = p.x_scales[i];
  }

  // Reduces one float per warp across the block.
  template <typename Reduce>
  __device__ __forceinline__ float over_warps(float value, float* at, const Reduce& reduce) const {
    if (thread % kWarpSize == 0) at[warp_idx] = value;
    __syncthreads();
    float all = at[0];
#pragma unroll
    for (int i = 1; i < kW8MaxWarps; ++i)
      if (i < num_warps) all = reduce(all, at[i]);
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

  // Quantizes row 0, which is read once and stays in registers.
  __device__ __forceinline__ void quantize_row() const {
    const scalar_t* row = static_cast<const scalar_t*>(p.x);
    Packed<kVec> resident[kPieces];
    load_pieces(row, resident);
    if (p.norm_weight != nullptr) normalise(resident);
    float factor = 0.0f;
    if constexpr (!kGroups) {
      float peak = 0.0f;
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        if (j * threads < vectors) peak = peak_of(unpack<kVec>(resident[j]), peak);
      peak = over_warps(lanes_max_or_nan<kWarpSize>(peak), smem + kW8MaxWarps, max_or_nan);
      factor = code_factor<Codes>(peak);
      if (thread == 0) scales[0] = code_scale<Codes>(peak);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (j * threads >= vectors) break;
      const int i = thread + j * threads;
      const V v = unpack<kVec>(resident[j]);
      if constexpr (kGroups) {
        const float peak = lanes_max_or_nan<kGroupLanes>(peak_of(v, 0.0f));
        factor = code_factor<Codes>(peak);
        if (i < vectors && i % kGroupLanes == 0) scales[i / kGroupLanes] = code_scale<Codes>(peak);
      }
      if (i < vectors) store_codes<Codes>(x + i * kVec, v, factor);
    }
  }

  __device__ __forceinline__ Packed<kVec> load_piece(const scalar_t* from, int j) const {
    const int i = thread + j * threads;
    V v = {};
    if (i < vectors) v = load_from_l2(from + i * kVec);
    return pack<kVec>(v);
  }
  template <int kCount>
  __device__ __forceinline__ void load_pieces(const scalar_t* from,
                                              Packed<kVec> (&to)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) to[j] = load_piece(from, j);
  }

  __device__ __forceinline__ void normalise(Packed<kVec> (&resident)[kPieces]) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      if (j * threads < vectors) sum = squares(unpack<kVec>(resident[j]), sum);
    sum = over_warps(warp_sum(sum), smem, [](float a, float b) { return a + b; });
    const float scale = 1.0f / sqrtf(sum / p.k + p.eps);
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      if (j * threads < vectors) {
        const Packed<kVec> w = j < kEarlyPieces ? norm[j] : load_piece(p.norm_weight, j);
        resident[j] = pack<kVec>(
            normalised(unpack<kVec>(resident[j]), unpack<kVec>(w), scale, p.weight_offset));
      }
  }
};
