// Few rows of x (decoding): the weight's codes are read once, through skinny_ring.cuh's rings.
//
// The ring treats two neighbouring codes as one 16-bit value. A stage then holds 256 values of k,
// and each half of it, 128 codes of a row, lies in one scale block. Every block prepares x itself
// (w8_x.cuh), which saves a launch. A warp sums its part of k; the parts' sums are added in order.
#pragma once

#include "gemm/skinny_epilogue.cuh"
#include "gemm/skinny_weights.cuh"
#include "gemm/w8_x.cuh"

// The scales of a stage's two blocks of k, for a warp's first eight rows and for the others.
struct W8StageScales {
  float of[2][2];

  // Loads those of values [k, k + 256) of rows from `low` and `high` on; zeros beyond the weight.
  __device__ __forceinline__ void load(const W8Params& p, int low, int high, int k) {
    const int blocks = scale_blocks(p.k);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block = k / kScaleBlock + half;
      const auto at = [&](int row) {
        const bool exists = row < p.n && block < blocks;
        const int64_t first = static_cast<int64_t>(row / kScaleBlock) * blocks;
        return exists ? p.weight_scales[first + block] : 0.0f;
      };
      of[0][half] = at(low), of[1][half] = at(high);
    }
  }
};

// Multiplies a warp's 16 weight rows by up to eight tokens.
template <typename Product, bool kBlocks, typename Shape>
struct W8Warp {
  static constexpr bool kGroups = kBlocks || Product::kGroups;
  static constexpr int kSets = kGroups ? 2 : 4;  // independent accumulators
  using sum_t = typename Product::sum_t;

  const W8Params& p;
  int g, t, lanes_tokens;  // tokens from this lane's first one on
  const unsigned char* x;  // this lane's first values
  const float* scales;     // scales of x
  int groups;              // groups per row of x
  sum_t acc[kSets][4];
  float scaled[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kSets; ++s)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[s][e] = 0;
  }

  __device__ __forceinline__ uint4 load_x(int offset) const {
    uint4 v = {};
    if (lanes_tokens > 0) v = *reinterpret_cast<const uint4*>(x + offset);
    return v;
  }

  // Multiplies 64 values of k, starting at value `k` of x's row; low and high are weight rows g and
  // g + 8.
  __device__ __forceinline__ void multiply(const uint4& low, const uint4& high, int k) {
    const uint32_t a[4] = {low.x, low.y, low.z, low.w}, b[4] = {high.x, high.y, high.z, high.w};
    const uint4 v = load_x(k);
    const uint32_t tokens[4] = {v.x, v.y, v.z, v.w};
    if constexpr (Product::kIsFp8) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t frag_a[4], frag_b[2];
        halves_of_e4m3(a[word], frag_a[0], frag_a[2]);
        halves_of_e4m3(b[word], frag_a[1], frag_a[3]);
        halves_of_e4m3(tokens[word], frag_b[0], frag_b[1]);
        mma_m16n8k16<__half>(acc[word % kSets], frag_a, frag_b);
      }
    } else {
      const uint32_t a0[4] = {a[0], b[0], a[1], b[1]}, a1[4] = {a[2], b[2], a[3], b[3]};
      const uint32_t b0[2] = {tokens[0], tokens[1]}, b1[2] = {tokens[2], tokens[3]};
      Product::mma(acc[0], a0, b0);
      Product::mma(acc[1], a1, b1);
    }
  }

  // Multiplies a stage of the ring that starts at value `k`.
  __device__ __forceinline__ void multiply_stage(const unsigned char* stage, int k,
                                                 const W8StageScales& weight_scales) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned char* from =
            stage + half * (Shape::kStageBytes / 2) + g * 128 + (((j ^ (g & 1)) * 4 + t) << 4);
        multiply(*reinterpret_cast<const uint4*>(from),
                 *reinterpret_cast<const uint4*>(from + 1024), k + half * 128 + j * 64);
      }
      if constexpr (kGroups) {
        const int group = k / kScaleBlock + half;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = 2 * t + e % 2;
          float scale = token < p.m && group < groups ? scales[token * groups + group] : 0.0f;
          if constexpr (kBlocks) scale *= weight_scales.of[e / 2][half];
          scaled[e] += static_cast<float>(acc[0][e] + acc[1][e]) * scale;
        }
        clear();
      }
    }
  }

  // Stores a lane's sums in its warp's array.
  __device__ __forceinline__ void store(float* sums) const {
    float sum[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kGroups) {
        sum[e] = scaled[e];
      } else {
        sum[e] = acc[0][e];
#pragma unroll
        for (int s = 1; s < kSets; ++s) sum[e] += acc[s][e];
      }
    }
    float* to = sums + t * 2 * Shape::kPitch + g;
    if (2 * t < p.m) to[0] = sum[0], to[8] = sum[2];
    if (2 * t + 1 < p.m) to[Shape::kPitch] = sum[1], to[Shape::kPitch + 8] = sum[3];
  }
};

// The four columns of out, if any, that a thread finishes in a tile, and their operands.
template <typename Product, bool kBlocks, typename Shape>
struct W8Columns {
  static constexpr bool kGroups = kBlocks || Product::kGroups;
  bool exists;
  int token, row, column;
  OutputOperands o;
  Vec<float, 4> gate_scales, up_scales;

  __device__ __forceinline__ W8Columns(const Problem& p, const SkinnyBlock<Shape>& b,
                                       const float* weight_scales, int row0) {
    OutputPlace<Shape> place(p, b);
    exists = place.is_inside(p, row0);
    token = place.token, row = place.row, column = place.column;
    o = {};
    gate_scales = up_scales = Vec<float, 4>{};
    if (!exists) return;
    skinny_load_bias(p, b, place, o);
    if constexpr (kBlocks) return;
    const bool is_gated = p.epilogue.is_gated();
    const int first = is_gated && b.num_gates == 0 ? row0 + row : column;
    const int up = b.num_gates > 0 ? first + b.num_gates : first + 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (is_gated || first + j < p.n) gate_scales.v[j] = weight_scales[first + j];
      if (is_gated) up_scales.v[j] = weight_scales[up + j];
    }
  }

  __device__ __forceinline__ void load_residual(const Problem& p, const SkinnyBlock<Shape>& b,
                                                int row0) {
    OutputPlace<Shape> place(p, b);
    if (place.is_inside(p, row0)) skinny_load_residual(p, place, o);
  }

  // Returns the sums of four weight rows over the block's parts, multiplied by their scales.
  __device__ __forceinline__ static Vec<float, 4> scaled_sums(const float* from, int sum_floats,
                                                              float x_scale,
                                                              const Vec<float, 4>& scales) {
    Vec<float, 4> y = {};
#pragma unroll 4
    for (int part = 0; part < static_cast<int>(blockDim.y); ++part) {
      const Vec<float, 4> v = load_vec<float, 4>(from + part * sum_floats);
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] += v.v[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (!kGroups) y.v[j] *= x_scale;
      if constexpr (!kBlocks) y.v[j] *= scales.v[j];
    }
    return y;
  }

  __device__ __forceinline__ void finish(const Problem& p, const float* sums,
                                         const float* x_scales) const {
    if (!exists) return;
    const Epilogue& e = p.epilogue;
    const float* from = sums + token * Shape::kPitch + row;
    const float x_scale = kGroups ? 1.0f : x_scales[token];
    const int step = p.m * Shape::kPitch;
    Vec<float, 4> y = scaled_sums(from, step, x_scale, gate_scales);
    if (e.is_gated()) {
      const Vec<float, 4> up = scaled_sums(from + 8, step, x_scale, up_scales);
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = silu(y.v[j] + o.bias.v[j]) * (up.v[j] + o.up_bias.v[j]);
    } else if (!e.is_bare()) {
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] = activate(e.activation, y.v[j] + o.bias.v[j]);
    }
    if (e.residual != nullptr) {  // adding 0 would turn -0 into 0
#pragma unroll
      for (int j = 0; j < 4; ++j) y.v[j] += o.residual.v[j];
    }
    const int n = e.out_columns(p.n);
    if (e.is_float)
      skinny_store<float>(e, token, column, n, y);
    else
      skinny_store<scalar_t>(e, token, column, n, y);
  }
};

// The problem as the ring sees it: in pairs of codes.
__device__ __forceinline__ Problem w8_pairs(const W8Params& p) {
  const Epilogue epilogue{p.bias,       p.residual,   p.out,           p.residual_stride,
                          p.out_stride, p.activation, p.is_float != 0, p.is_vector != 0};
  return Problem{nullptr,
                 reinterpret_cast<const scalar_t*>(p.weight),
                 0,
                 p.m,
                 p.n,
                 p.k / 2,
                 p.k_per_split,
                 nullptr,
                 Norm{},
                 epilogue};
}

// SAFETY: with uses_pdl the preceding kernel may still run; it must not write the weight, its
// scales, the norm's weight or the bias.
template <typename Product, bool kBlocks, int kStages>
__device__ __forceinline__ void w8_skinny(const W8Params& params) {
  using Shape = SkinnyShape<1, kStages, 2>;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ float smem_scales[kW8Tokens];
  __shared__ float smem_reduce[2 * kW8MaxWarps];
  pdl_trigger();
  const Problem p = w8_pairs(params);
  SkinnyParams ring{};
  ring.num_tiles = params.num_tiles, ring.num_stages = params.num_stages;
  ring.num_gates = params.num_gates;
  SkinnyBlock<Shape> b(p, ring, smem);
  b.sums = reinterpret_cast<float*>(b.x + params.m * W8Rows<Product, kBlocks>::pitch_of(params.k));
  const int sum_floats = params.m * Shape::kPitch;  // floats per warp
  using Warp = W8Warp<Product, kBlocks, Shape>;
  float* x_scales =
      Warp::kGroups ? b.sums + Shape::kBuffers * b.num_warps * sum_floats : smem_scales;
  WeightLoader<Shape> loader(p, b);
  // A stage's scales are loaded one stage ahead.
  W8StageScales next_scales{};
  const auto load_scales = [&](int tile, int k) {
    if (!kBlocks || tile >= b.num_tiles) return;
    const int row0 = b.row0(tile), low = b.num_gates > 0 ? row0 / 2 : row0;
    next_scales.load(params, low, b.num_gates > 0 ? low + b.num_gates : low + 8, 2 * k);
  };
  const auto start = [&] {
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) loader.load();
    load_scales(b.tile, b.k_begin);
  };
  // While the preceding kernel may still run, only weights and their scales can be loaded.
  // Otherwise x is loaded first: if queued behind the weights it would wait for all of them.
  if (params.uses_pdl != 0) start();
  {
    W8Rows<Product, kBlocks> rows(params, b, x_scales, smem_reduce);
    rows.begin();
    if (params.uses_pdl != 0) rows.load_norm();
    pdl_wait();
    if (params.uses_pdl == 0) rows.load_norm();
    rows.prepare();
  }
  if (params.uses_pdl == 0) start();

  const int g = b.lane_idx / 4, t = b.lane_idx % 4;
  Warp warp{params, g, t, params.m - g};
  warp.x = b.x + g * W8Rows<Product, kBlocks>::pitch_of(params.k) + t * 16;
  warp.scales = x_scales, warp.groups = scale_blocks(params.k);
  int stage = 0, buffer = 0;
#pragma unroll 1
  for (int tile = b.tile; tile < b.num_tiles; tile += b.tile_step) {
    const int row0 = b.row0(tile);
    W8Columns<Product, kBlocks, Shape> columns(p, b, params.weight_scales, row0);
    columns.load_residual(p, b, row0);
    warp.clear();
#pragma unroll
    for (int e = 0; e < 4; ++e) warp.scaled[e] = 0.0f;
#pragma unroll 1
    for (int k = b.k_begin; k < b.k_end; k += kStepK) {
      const W8StageScales scales = next_scales;
      const bool is_last = k + kStepK >= b.k_end;
      load_scales(is_last ? tile + b.tile_step : tile, is_last ? b.k_begin : k + kStepK);
      cp_async_wait<kStages - 2>();
      __syncwarp();   // SAFETY: lanes see each other's copies and have read the previous stage,
      loader.load();  // which is refilled here
      warp.multiply_stage(b.ring + stage * Shape::kStageBytes, 2 * k, scales);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    float* sums = b.sums + (buffer * b.num_warps + b.warp_idx) * sum_floats;
    warp.store(sums);
    skinny_sync(b);
    columns.finish(p, sums - threadIdx.y * sum_floats, x_scales);
    buffer ^= 1;  // SAFETY: see skinny_ring
  }
}

// `blocks`: blocks per multiprocessor for which registers are limited. With 2, a block and its
// first stages fit beside a block of the kernel before it.
#define ENGINE_W8_SKINNY(name, blocks, ...)                 \
  extern "C" __global__ void __launch_bounds__(256, blocks) \
      name(const __grid_constant__ W8Params p) {            \
    __VA_ARGS__(p);                                         \
  }
