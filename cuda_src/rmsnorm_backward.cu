// Gradients of RMSNorm and of the residual add before it.
//
//   normed = h * scale,  scale = 1 / sqrt(mean(h^2) + eps),  g = dy * (weight + weight_offset)
//   dx = scale * (g - normed * mean(g * normed)) + dh
//   dweight = sum over rows of dy * normed
//
// With CENTRED=1 it is LayerNorm's: h and g are reduced by their means, and dbias = sum of dy.
//
// Arguments: RmsnormBackwardParams, below.
//
// Numerics: float; dx, dweight and dbias are rounded once. scale is recomputed from h, which must
// be read anyway.
// Parallelisation: persistent blocks. Each takes every gridDim.x-th row (or several at once if one
// warp is enough for a row) and keeps its share of dweight in registers. rmsnorm_backward_sum adds
// the shares of all blocks in a fixed order, so the bits are the same on every run. Each thread
// copies its own part of the next rows to a ring in shared memory with cp.async: no barrier is
// needed for that, and registers are left for the sums. Rows beyond 16 KiB, and rows not aligned to
// 16 bytes, are read twice, and their share of dweight is kept in global memory (L2).
// Mirror: engine/reference/rmsnorm_backward.py
#include "common/cp_async.cuh"
#include "common/pdl.cuh"
#include "common/rmsnorm_row.cuh"

constexpr int kSums = kIsCentred ? 2 : 1;  // dweight; LayerNorm: and dbias

struct RmsnormBackwardParams {
  const scalar_t* dy;      // (A, B, N); row (a, b) starts at a * dy_stride_a + b * dy_stride_b
  const scalar_t* h;       // (A, B, N) what was normalised; strides like dy's
  const scalar_t* dh;      // (A, B, N) gradient that reaches h otherwise, or null
  const scalar_t* weight;  // (N,)
  scalar_t* dx;            // (A, B, N); may be dy, h or dh
  float* partials;         // (gridDim.x, kSums, N) each block's share of dweight and dbias
  int64_t num_rows;        // A * B
  int n, num_b;
  int64_t dy_stride_a, dy_stride_b, h_stride_a, h_stride_b;  // elements
  int64_t dh_stride_a, dh_stride_b, dx_stride_a, dx_stride_b;
  float eps, weight_offset;
};

struct RowPointers {
  const scalar_t *dy, *h, *dh;  // dh may be null
  scalar_t* dx;

  __device__ __forceinline__ RowPointers(const RmsnormBackwardParams& p, int64_t row)
      : dy(p.dy + Rows{p.dy_stride_a, p.dy_stride_b, p.num_b}.offset(row)),
        h(p.h + Rows{p.h_stride_a, p.h_stride_b, p.num_b}.offset(row)),
        dh(p.dh),
        dx(p.dx + Rows{p.dx_stride_a, p.dx_stride_b, p.num_b}.offset(row)) {
    if (dh != nullptr) dh += Rows{p.dh_stride_a, p.dh_stride_b, p.num_b}.offset(row);
  }
};

// Sums pairs over the threads of a row.
template <int kWarps>
struct RowSum {
  float2* smem;  // 2 * kWarps
  int turn = 0;

  __device__ __forceinline__ float2 operator()(float2 x) {
    x = {warp_sum(x.x), warp_sum(x.y)};
    if constexpr (kWarps == 1) return x;
    float2* own = smem + turn * kWarps;
    turn ^= 1;
    if (threadIdx.x % kWarpSize == 0) own[threadIdx.x / kWarpSize] = x;
    // SAFETY: one barrier per sum is enough, because two buffers take turns: whoever writes to this
    // one again has passed the next sum's barrier, hence all threads have read it.
    __syncthreads();
    float2 total = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total = {total.x + own[i].x, total.y + own[i].y};
    return total;
  }
};

// What a row's gradient needs of the whole row; mean and shift are 0 unless kIsCentred.
struct RowMoments {
  float mean, scale;   // of h
  float shift, slope;  // mean of g; mean of g * normed
};

// `each(f)` calls f(h, g) for each of the thread's elements of the row.
template <int kWarps, typename Each>
__device__ __forceinline__ RowMoments row_moments(const RmsnormBackwardParams& p, float inverse_n,
                                                  const Each& each, RowSum<kWarps>& row_sum) {
  RowMoments row = {};
  float2 sum = {};
  if constexpr (kIsCentred) {
    each([&](float h, float g) { sum = {sum.x + h, sum.y + g}; });
    sum = row_sum(sum);
    row.mean = sum.x * inverse_n;
    row.shift = sum.y * inverse_n;
    sum = {};
  }
  each([&](float h, float g) {
    const float centred = h - row.mean;
    sum.x += centred * centred;
    sum.y += centred * g;
  });
  sum = row_sum(sum);
  row.scale = 1.0f / sqrtf(sum.x * inverse_n + p.eps);
  row.slope = sum.y * inverse_n * row.scale;
  return row;
}

// Returns dx, and adds to the columns' sums.
template <int kWidth>
__device__ __forceinline__ Vec<scalar_t, kWidth> row_gradient(
    const RowMoments& row, const Vec<scalar_t, kWidth>& dy, const Vec<scalar_t, kWidth>& h,
    const Vec<scalar_t, kWidth>& dh, const Vec<scalar_t, kWidth>& weight, float weight_offset,
    float (&sums)[kSums][kWidth]) {
  Vec<scalar_t, kWidth> dx;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float upstream = to_float(dy.v[j]);
    const float g = upstream * (to_float(weight.v[j]) + weight_offset);
    const float normed = (to_float(h.v[j]) - row.mean) * row.scale;
    const float along = (g - row.shift - normed * row.slope) * row.scale;
    dx.v[j] = from_float<scalar_t>(along + to_float(dh.v[j]));
    sums[0][j] += upstream * normed;
    if (kIsCentred) sums[kSums - 1][j] += upstream;
  }
  return dx;
}

// Stores kWidth floats, or adds them to what is there.
template <int kWidth>
__device__ __forceinline__ void put_floats(float* p, const float (&x)[kWidth], bool adds) {
  constexpr int kStep = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int i = 0; i < kWidth; i += kStep) {
    Vec<float, kStep> part = {};
    if (adds) part = load_vec<float, kStep>(p + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) part.v[j] += x[i + j];
    store_vec(p + i, part);
  }
}

// Rows of up to kWarpsPerRow * kVectors * 512 bytes; a block takes as many at once as it has warps
// for. SAFETY: a ring's slot is read and refilled by one thread alone.
template <int kThreads, int kWarpsPerRow, int kVectors, int kStages>
__device__ __forceinline__ void rmsnorm_backward_ring(const RmsnormBackwardParams& p) {
  constexpr int kRowThreads = kWarpsPerRow * kWarpSize;
  constexpr int kRowsAtOnce = kThreads / kRowThreads;
  constexpr int kStep = kRowThreads * kVec;
  extern __shared__ int4 smem_ring[];  // [stage][dy, h and dh, if any][vector][thread]
  __shared__ float2 smem_sums[2 * kWarpsPerRow];
  const bool has_dh = p.dh != nullptr;
  const int num_arrays = has_dh ? 3 : 2;
  const int begin = (threadIdx.x % kRowThreads) * kVec;
  const auto slot = [&](int stage, int array, int k) {
    return smem_ring + ((stage * num_arrays + array) * kVectors + k) * kThreads + threadIdx.x;
  };
  const auto load_row = [&](int64_t row, int stage) {
    if (row < p.num_rows) {
      const RowPointers at(p, row);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int i = begin + k * kStep;
        if (i >= p.n) break;
        cp_async_16(slot(stage, 0, k), at.dy + i);
        cp_async_16(slot(stage, 1, k), at.h + i);
        if (has_dh) cp_async_16(slot(stage, 2, k), at.dh + i);
      }
    }
    cp_async_commit();  // an empty group, too, keeps the count of groups
  };
  const auto loaded = [&](int stage, int array, int k) {
    return unpack<kVec>(load_packed<kVec>(reinterpret_cast<scalar_t*>(slot(stage, array, k))));
  };

  pdl_trigger();
  pdl_wait();
  const int64_t row_step = static_cast<int64_t>(gridDim.x) * kRowsAtOnce;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsAtOnce + threadIdx.x / kRowThreads;
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) load_row(row + stage * row_step, stage);
  Words weight[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    weight[k] = Words{};
    if (i < p.n) weight[k] = load_packed<kVec>(p.weight + i);
  }
  float sums[kVectors][kSums][kVec] = {};
  RowSum<kWarpsPerRow> row_sum{smem_sums};
  const float inverse_n = 1.0f / p.n;
  int stage = 0;
  for (; row < p.num_rows; row += row_step) {
    cp_async_wait<kStages - 1>();
    const auto each = [&](const auto& use) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (begin + k * kStep >= p.n) break;
        hide_value(weight[k]);
        const Vec<scalar_t, kVec> dy = loaded(stage, 0, k), h = loaded(stage, 1, k);
        const Vec<scalar_t, kVec> w = unpack<kVec>(weight[k]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          use(to_float(h.v[j]), to_float(dy.v[j]) * (to_float(w.v[j]) + p.weight_offset));
        }
      }
      asm volatile("" ::: "memory");  // the next pass reads shared memory again, to save registers
    };
    const RowMoments moments = row_moments(p, inverse_n, each, row_sum);
    const RowPointers at(p, row);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = begin + k * kStep;
      if (i >= p.n) break;
      hide_value(weight[k]);
      Vec<scalar_t, kVec> dh = {};
      if (has_dh) dh = loaded(stage, 2, k);
      store_vec(at.dx + i, row_gradient<kVec>(moments, loaded(stage, 0, k), loaded(stage, 1, k), dh,
                                              unpack<kVec>(weight[k]), p.weight_offset, sums[k]));
    }
    load_row(row + kStages * row_step, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  const int num_columns = kSums * p.n;
  float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * num_columns;
  float* own = partial;
  if constexpr (kRowsAtOnce > 1) {
    __syncthreads();  // SAFETY: other warps may still read the ring, which is reused.
    own = reinterpret_cast<float*>(smem_ring) + (threadIdx.x / kRowThreads) * num_columns;
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    if (i >= p.n) break;
#pragma unroll
    for (int s = 0; s < kSums; ++s) put_floats<kVec>(own + s * p.n + i, sums[k][s], false);
  }
  if constexpr (kRowsAtOnce > 1) {
    __syncthreads();
    const float* parts = reinterpret_cast<const float*>(smem_ring);
    for (int i = threadIdx.x; i < num_columns; i += kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) total += parts[r * num_columns + i];
      partial[i] = total;
    }
  }
}

// Rows of any length, read twice; the block's sums are in global memory. SAFETY: an element of dx
// or of the sums is written only by the thread that has read it.
template <int kWarps, int kWidth>
__device__ __forceinline__ void rmsnorm_backward_long(const RmsnormBackwardParams& p) {
  using V = Vec<scalar_t, kWidth>;
  constexpr int kStep = kWarps * kWarpSize * kWidth;
  __shared__ float2 smem_sums[2 * kWarps];
  pdl_trigger();
  pdl_wait();
  float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * kSums * p.n;
  RowSum<kWarps> row_sum{smem_sums};
  const float inverse_n = 1.0f / p.n;
  for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const RowPointers at(p, row);
    const auto each = [&](const auto& use) {
      for (int i = threadIdx.x * kWidth; i < p.n; i += kStep) {
        const V dy = load_vec<scalar_t, kWidth>(at.dy + i),
                h = load_vec<scalar_t, kWidth>(at.h + i);
        const V w = load_vec<scalar_t, kWidth>(p.weight + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          use(to_float(h.v[j]), to_float(dy.v[j]) * (to_float(w.v[j]) + p.weight_offset));
        }
      }
    };
    const RowMoments moments = row_moments(p, inverse_n, each, row_sum);
    for (int i = threadIdx.x * kWidth; i < p.n; i += kStep) {
      const V dy = load_vec<scalar_t, kWidth>(at.dy + i), h = load_vec<scalar_t, kWidth>(at.h + i);
      const V w = load_vec<scalar_t, kWidth>(p.weight + i);
      V dh = {};
      if (at.dh != nullptr) dh = load_vec<scalar_t, kWidth>(at.dh + i);
      float sums[kSums][kWidth] = {};
      store_vec(at.dx + i, row_gradient<kWidth>(moments, dy, h, dh, w, p.weight_offset, sums));
      const bool adds = row != blockIdx.x;
#pragma unroll
      for (int s = 0; s < kSums; ++s) put_floats<kWidth>(partial + s * p.n + i, sums[s], adds);
    }
  }
}

#define ENGINE_RMSNORM_BACKWARD(name, threads, blocks, body)    \
  extern "C" __global__ void __launch_bounds__(threads, blocks) \
      name(const __grid_constant__ RmsnormBackwardParams p) {   \
    body(p);                                                    \
  }

ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_512, 128, 8, (rmsnorm_backward_ring<128, 1, 1, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_1024, 128, 6, (rmsnorm_backward_ring<128, 1, 2, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_2048, 128, 4, (rmsnorm_backward_ring<128, 1, 4, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_4096, 128, 4, (rmsnorm_backward_ring<128, 4, 2, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_8192, 256, 3, (rmsnorm_backward_ring<256, 8, 2, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_16384, 256, 2, (rmsnorm_backward_ring<256, 8, 4, 2>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_long_vector, 256, 4, (rmsnorm_backward_long<8, kVec>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_long_scalar, 256, 4, (rmsnorm_backward_long<8, 1>))

constexpr int kSumThreads = 1024;

// dweight and dbias: the columns' sums over num_partials rows (kSums, N). Each of a block's 32
// warps adds every 32nd row of the same 32 columns.
extern "C" __global__ void __launch_bounds__(kSumThreads)
    rmsnorm_backward_sum(const float* partials, scalar_t* dweight, scalar_t* dbias,
                         int num_partials, int n) {
  constexpr int kWarps = kSumThreads / kWarpSize;
  __shared__ float smem_parts[kWarps][kWarpSize];
  pdl_trigger();
  pdl_wait();
  const int warp_idx = threadIdx.x / kWarpSize, lane_idx = threadIdx.x % kWarpSize;
  const int column = blockIdx.x * kWarpSize + lane_idx, num_columns = kSums * n;
  float sum = 0.0f;
  if (column < num_columns) {
#pragma unroll 8
    for (int i = warp_idx; i < num_partials; i += kWarps) {
      sum += partials[static_cast<int64_t>(i) * num_columns + column];
    }
  }
  smem_parts[warp_idx][lane_idx] = sum;
  __syncthreads();
  if (warp_idx > 0 || column >= num_columns) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += smem_parts[i][lane_idx];
  scalar_t* to = column < n ? dweight + column : dbias + (column - n);
  *to = from_float<scalar_t>(sum);
}
