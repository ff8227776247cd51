// Output of attention_decode_sm90: a CTA writes rows as results, or as partials to scratch memory.
// The CTA that finishes a sequence last combines its partials, always in key order, so a result
// does not depend on which CTA is last.
#pragma once

#include "attention_decode/attention_decode_cta_sm90.cuh"
#include "common/codes.cuh"

// Writes partial rows, relative to 2^base; same interface as Output.
struct PartialOutput {
  float* o;
  float* stats;

  static constexpr bool kIsResult = false;

  __device__ __forceinline__ void row(int row, float base, float sum) const {
    store_vec(stats + row * 2, Vec<float, 2>{base, sum});
  }
  __device__ __forceinline__ float factor(int, float, float) const { return 1.0f; }
  __device__ __forceinline__ float* at(int row) const { return o + row * kHeadDim; }
  __device__ __forceinline__ void pair(float* row, int column, float x, float y) const {
    store_vec(row + column, Vec<float, 2>{x, y});
  }
};

// Partials of one key/value head in scratch memory: (partials, K, rows, D) and (..., 2).
struct Partials {
  float* o;
  float* stats;
  int num_rows, num_kv_heads, kv_head;

  __device__ __forceinline__ PartialOutput at(int64_t partial) const {
    const int64_t row = (partial * num_kv_heads + kv_head) * num_rows;
    return PartialOutput{o + row * kHeadDim, stats + row * 2};
  }
};

// Loads that bypass L1, which is not coherent with other CTAs' writes.
template <int N>
__device__ __forceinline__ Vec<float, N> load_coherent(const float* p) {
  Vec<float, N> x;
  if constexpr (N == 4)
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3])
                 : "l"(p));
  else
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.v[0]), "=f"(x.v[1]) : "l"(p));
  return x;
}

// Writes kColumns of a row; the lanes of a warp have neighbouring columns of the same row.
template <int kColumns>
__device__ __forceinline__ void write_row(const Output& output, int row, int column, float base,
                                          float sum, const float (&o)[kColumns]) {
  if (column == 0) output.row(row, base, sum);
  const float factor = output.factor(row, base, sum);
  Vec<scalar_t, kColumns> result;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) result.v[c] = from_float<scalar_t>(o[c] * factor);
  if constexpr (kQuantizesOut) {
    static_assert(kColumns * kWarpSize == kHeadDim, "a warp has the whole row");
    const float peak = lanes_max_or_nan<kWarpSize>(peak_of(result, 0.0f));
    const int64_t index = output.scale_index(row);
    if (column == 0) output.scales[index] = code_scale<E4m3>(peak);
    store_codes<E4m3>(output.codes + index * kHeadDim + column, result, code_factor<E4m3>(peak));
  } else {
    store_vec(output.at(row) + column, result);
  }
}

// Writes the rows of a sequence without keys. The consumer warps call it.
__device__ __forceinline__ void write_empty(const Output& output, int num_rows) {
  constexpr int kWords = kHeadDim / 4;
  constexpr float kZeros[4] = {};
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * kWords; i += kConsumerThreads)
    write_row<4>(output, i / kWords, i % kWords * 4, -kInf, 0.0f, kZeros);
}

// Combines partials in the consumer warps of the last CTA. A warp processes kBatchRows rows at a
// time and kBatch partials of each, with all their loads in flight together. `b` is an index of the
// schedule's sequences.
template <int kBatchRows, int kBatch>
__device__ __forceinline__ void combine(const Partials& partials, const SplitOf& split,
                                        const Cta& cta, int b) {
  constexpr int kColumns = kHeadDim / kWarpSize, kLoads = kBatchRows * kBatch;
  static_assert(kLoads <= kWarpSize, "a lane holds one partial's statistics");
  const int lane_idx = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int row = threadIdx.x / kWarpSize * kBatchRows; row < partials.num_rows;
       row += kConsumerWarps * kBatchRows) {
    const auto clamped = [&](int r) { return min(row + r, partials.num_rows - 1); };
    float base = -kInf, sum = 0.0f;  // base and sum of row lane / kBatch
    float o[kBatchRows][kColumns] = {};
#pragma unroll 1
    for (int first = 0; first < split.count; first += kBatch) {
      Vec<float, kColumns> partial[kLoads];
      Vec<float, 2> stats{-kInf, 0.0f};
      if (lane_idx < kLoads && first + lane_idx % kBatch < split.count)
        stats = load_coherent<2>(partials.at(split.partial(first + lane_idx % kBatch)).stats +
                                 clamped(lane_idx / kBatch) * 2);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        partial[i] = load_coherent<kColumns>(
            partials.at(split.partial(min(first + i % kBatch, split.count - 1)))
                .at(clamped(i / kBatch)) +
            lane_idx * kColumns);
      float top = fmaxf(base, stats.v[0]);
#pragma unroll
      for (int offset = kBatch / 2; offset > 0; offset /= 2)
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
      const float weight = exp2_approx(stats.v[0] - finite_or_zero(top));
      const float rescale = exp2_approx(base - finite_or_zero(top));
      base = top;
      sum = sum * rescale + stats.v[1] * weight;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float w = __shfl_sync(kFullMask, weight, i);
        const float s = i % kBatch == 0 ? __shfl_sync(kFullMask, rescale, i) : 1.0f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float& x = o[i / kBatch][c];
          x = (i % kBatch == 0 ? x * s : x) + partial[i].v[c] * w;
        }
      }
    }
#pragma unroll
    for (int offset = kBatch / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    const Output output = cta.output(recomputed(b));  // the loop needs the registers
#pragma unroll
    for (int r = 0; r < kBatchRows; ++r) {
      const float row_base = __shfl_sync(kFullMask, base, r * kBatch);
      const float row_sum = __shfl_sync(kFullMask, sum, r * kBatch);
      if (row + r < partials.num_rows)
        write_row<kColumns>(output, row + r, lane_idx * kColumns, row_base, row_sum, o[r]);
    }
  }
}

constexpr int kCombineLoads = kRowTiles == 4 ? 4 : 16;  // partial rows in flight
// Rows that a warp combines at a time, with up to four partials each: one if there are few rows, so
// that all warps have work.
constexpr int kCombineRows = kRowTiles == 1 ? 1 : kCombineLoads / 4;

__device__ __forceinline__ void combine(const Partials& partials, const SplitOf& split,
                                        const Cta& cta, int b) {
  if (split.count <= 4)
    combine<kCombineRows, 4>(partials, split, cta, b);
  else
    combine<1, kCombineLoads>(partials, split, cta, b);
}
