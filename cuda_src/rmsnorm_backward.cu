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
// Parallelisation: persistent blocks of one or several groups of threads. The rows are dealt to the
// groups in turn; a group keeps its share of dweight in registers. rmsnorm_backward_sum adds the
// shares of all blocks in a fixed order, so the bits are the same on every run. Each thread copies
// its own part of the next rows to a ring in shared memory with cp.async: that needs no barrier,
// and leaves registers for the sums. Rows beyond 16 KiB, and rows not aligned to 16 bytes, are read
// twice, and their share of dweight is kept in global memory (L2).
// Mirror: engine/reference/rmsnorm_backward.py
#include "common/cp_async.cuh"
#include "common/pdl.cuh"
#include "common/rmsnorm_row.cuh"

constexpr int kSums = kIsCentred ? 2 : 1;  // dweight; LayerNorm: and dbias

struct RmsnormBackwardParams {
  const scalar_t* dy;      // (A, B, N); row (a, b) starts at a * dy_stride_a + b * dy_stride_b
  const scalar_t* h;       // (A, B, N) input of the norm; strides like dy's
  const scalar_t* dh;      // (A, B, N) another gradient of h, added to dx; or null
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

  __device__ __forceinline__ RowPointers(const RmsnormBackwardParams& p, int64_t row) {
    int64_t a = row, b = 0;
    if (p.num_b != 1) {  // avoids the slow division
      a = row / p.num_b;
      b = row % p.num_b;
    }
    dy = p.dy + a * p.dy_stride_a + b * p.dy_stride_b;
    h = p.h + a * p.h_stride_a + b * p.h_stride_b;
    dh = p.dh == nullptr ? nullptr : p.dh + a * p.dh_stride_a + b * p.dh_stride_b;
    dx = p.dx + a * p.dx_stride_a + b * p.dx_stride_b;
  }
};

// Sums pairs over the kThreads consecutive threads of a row: 16 or more, the block's group `group`.
template <int kThreads>
struct RowSum {
  static constexpr int kLanes = kThreads < kWarpSize ? kThreads : kWarpSize;
  static constexpr int kWarps = kThreads / kLanes;
  float2* smem;  // 2 * kWarps
  int group;
  int turn = 0;

  __device__ __forceinline__ float2 operator()(float2 x) {
    // SAFETY: the other half of a warp may have fewer rows, so it does not take part.
    const unsigned half = 0xffffu << (threadIdx.x % kWarpSize & kLanes);
    const unsigned mask = kLanes == kWarpSize ? kFullMask : half;
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      x.x += __shfl_xor_sync(mask, x.x, offset);
      x.y += __shfl_xor_sync(mask, x.y, offset);
    }
    if constexpr (kWarps == 1) return x;
    float2* own = smem + turn * kWarps;
    turn ^= 1;
    if (threadIdx.x % kWarpSize == 0) own[threadIdx.x / kWarpSize % kWarps] = x;
    // SAFETY: one barrier per sum is enough, because two buffers take turns: a thread that writes
    // to this one again has passed the next sum's barrier, hence all threads have read it. Barrier
    // 0 is the block's.
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
    float2 total = {};
#pragma unroll 4
    for (int i = 0; i < kWarps; ++i) total = {total.x + own[i].x, total.y + own[i].y};
    return total;
  }
};

// Statistics of a row; mean and shift are 0 unless kIsCentred.
struct RowMoments {
  float mean, scale;   // mean of h; 1 / sqrt(mean of squares + eps)
  float shift, slope;  // mean of g; mean of g * normed, times scale
};

// `each(f)` calls f(h, g) for each of the thread's elements of the row.
template <int kThreads, typename Each>
__device__ __forceinline__ RowMoments row_moments(float inverse_n, float eps, const Each& each,
                                                  RowSum<kThreads>& row_sum) {
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
    const float centred = kIsCentred ? h - row.mean : h;
    sum.x += centred * centred;
    sum.y += centred * g;
  });
  sum = row_sum(sum);
  row.scale = rsqrtf(sum.x * inverse_n + eps);
  row.slope = sum.y * inverse_n * row.scale * row.scale;
  return row;
}

// Returns dx of one element, without dh, and adds to its column's sums.
__device__ __forceinline__ float element_gradient(const RowMoments& row, float dy, float h,
                                                  float factor, float& dweight, float& dbias) {
  float centred = h, g = dy * factor;
  if constexpr (kIsCentred) {
    centred -= row.mean;
    g -= row.shift;
    dbias += dy;
  }
  dweight += dy * (centred * row.scale);
  return (g - centred * row.slope) * row.scale;
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

// Rows of up to 16 * kRowThreads * kVectors bytes; a block takes kThreads / kRowThreads at once.
// SAFETY: a ring's slot is read and refilled by one thread alone.
template <int kThreads, int kRowThreads, int kVectors, int kStages>
__device__ __forceinline__ void rmsnorm_backward_ring(const RmsnormBackwardParams& p) {
  constexpr int kRowsAtOnce = kThreads / kRowThreads;
  constexpr int kStep = kRowThreads * kVec;
  extern __shared__ int4 smem_ring[];  // [stage][dy, h and dh, if any][vector][thread]
  __shared__ float2 smem_sums[kRowsAtOnce][2 * RowSum<kRowThreads>::kWarps];
  const int group = threadIdx.x / kRowThreads;
  const bool has_dh = p.dh != nullptr;
  const int begin = (threadIdx.x % kRowThreads) * kVec;
  constexpr int kArraySlots = kVectors * kThreads;
  const int stage_slots = (has_dh ? 3 : 2) * kArraySlots;
  int4* own_slots = smem_ring + threadIdx.x;
  const auto load_row = [&](int64_t row, int stage) {
    if (row < p.num_rows) {
      const RowPointers at(p, row);
      const uint32_t slot = smem_address(own_slots + stage * stage_slots);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int i = begin + k * kStep;
        if (i >= p.n) break;
        cp_async_16(slot + 16 * k * kThreads, at.dy + i);
        cp_async_16(slot + 16 * (kArraySlots + k * kThreads), at.h + i);
        if (has_dh) cp_async_16(slot + 16 * (2 * kArraySlots + k * kThreads), at.dh + i);
      }
    }
    cp_async_commit();  // an empty group, too, keeps the count of groups
  };

  pdl_trigger();
  pdl_wait();
  const int64_t row_step = static_cast<int64_t>(gridDim.x) * kRowsAtOnce;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsAtOnce + group;
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) load_row(row + stage * row_step, stage);
  float factor[kVectors][kVec] = {};  // weight + weight_offset
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int i = begin + k * kStep;
    if (i >= p.n) break;
    const Vec<scalar_t, kVec> weight = load_vec<scalar_t, kVec>(p.weight + i);
#pragma unroll
    for (int j = 0; j < kVec; ++j) factor[k][j] = to_float(weight.v[j]) + p.weight_offset;
  }
  float sums[kVectors][kSums][kVec] = {};
  RowSum<kRowThreads> row_sum{smem_sums[group], group};
  const float inverse_n = 1.0f / p.n;
  int stage = 0;
  for (; row < p.num_rows; row += row_step) {
    cp_async_wait<kStages - 1>();
    const int4* slots = own_slots + stage * stage_slots;
    const auto loaded = [&](int array, int k) {
      const int4* slot = slots + array * kArraySlots + k * kThreads;
      return unpack<kVec>(load_packed<kVec>(reinterpret_cast<const scalar_t*>(slot)));
    };
    const auto each = [&](const auto& use) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (begin + k * kStep >= p.n) break;
        const Vec<scalar_t, kVec> dy = loaded(0, k), h = loaded(1, k);
#pragma unroll
        for (int j = 0; j < kVec; ++j) use(to_float(h.v[j]), to_float(dy.v[j]) * factor[k][j]);
      }
      asm volatile("" ::: "memory");  // the next pass reads shared memory again, to save registers
    };
    const RowMoments moments = row_moments(inverse_n, p.eps, each, row_sum);
    scalar_t* dx = RowPointers(p, row).dx;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = begin + k * kStep;
      if (i >= p.n) break;
      const Vec<scalar_t, kVec> dy = loaded(0, k), h = loaded(1, k);
      float gradient[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        gradient[j] = element_gradient(moments, to_float(dy.v[j]), to_float(h.v[j]), factor[k][j],
                                       sums[k][0][j], sums[k][kSums - 1][j]);
      }
      if (has_dh) {
        const Vec<scalar_t, kVec> dh = loaded(2, k);
#pragma unroll
        for (int j = 0; j < kVec; ++j) gradient[j] += to_float(dh.v[j]);
      }
      Vec<scalar_t, kVec> rounded;
#pragma unroll
      for (int j = 0; j < kVec; ++j) rounded.v[j] = from_float<scalar_t>(gradient[j]);
      store_packed(dx + i, pack<kVec>(rounded));
    }
    load_row(row + kStages * row_step, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  const int num_columns = kSums * p.n;
  float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * num_columns;
  float* own = partial;
  if constexpr (kRowsAtOnce > 1) {
    __syncthreads();  // SAFETY: other warps may still read the ring, which is reused.
    own = reinterpret_cast<float*>(smem_ring) + group * num_columns;
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
template <int kThreads, int kWidth>
__device__ __forceinline__ void rmsnorm_backward_long(const RmsnormBackwardParams& p) {
  using V = Vec<scalar_t, kWidth>;
  constexpr int kStep = kThreads * kWidth;
  __shared__ float2 smem_sums[2 * RowSum<kThreads>::kWarps];
  pdl_trigger();
  pdl_wait();
  float* partial = p.partials + static_cast<int64_t>(blockIdx.x) * kSums * p.n;
  RowSum<kThreads> row_sum{smem_sums, 0};
  const float inverse_n = 1.0f / p.n;
  for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const RowPointers at(p, row);
    const auto factor_of = [&](scalar_t w) { return to_float(w) + p.weight_offset; };
    const auto each = [&](const auto& use) {
      for (int i = threadIdx.x * kWidth; i < p.n; i += kStep) {
        const V dy = load_vec<scalar_t, kWidth>(at.dy + i);
        const V h = load_vec<scalar_t, kWidth>(at.h + i);
        const V weight = load_vec<scalar_t, kWidth>(p.weight + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          use(to_float(h.v[j]), to_float(dy.v[j]) * factor_of(weight.v[j]));
        }
      }
    };
    const RowMoments moments = row_moments(inverse_n, p.eps, each, row_sum);
    for (int i = threadIdx.x * kWidth; i < p.n; i += kStep) {
      const V dy = load_vec<scalar_t, kWidth>(at.dy + i);
      const V h = load_vec<scalar_t, kWidth>(at.h + i);
      const V weight = load_vec<scalar_t, kWidth>(p.weight + i);
      V dh = {}, dx;
      if (at.dh != nullptr) dh = load_vec<scalar_t, kWidth>(at.dh + i);
      float sums[kSums][kWidth] = {};
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float gradient =
            element_gradient(moments, to_float(dy.v[j]), to_float(h.v[j]), factor_of(weight.v[j]),
                             sums[0][j], sums[kSums - 1][j]);
        dx.v[j] = from_float<scalar_t>(gradient + to_float(dh.v[j]));
      }
      store_vec(at.dx + i, dx);
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

ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_256, 512, 2, (rmsnorm_backward_ring<512, 16, 1, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_512, 512, 2, (rmsnorm_backward_ring<512, 32, 1, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_1024, 256, 2, (rmsnorm_backward_ring<256, 32, 2, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_2048, 256, 2, (rmsnorm_backward_ring<256, 64, 2, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_4096, 256, 2, (rmsnorm_backward_ring<256, 128, 2, 3>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_8192, 512, 1, (rmsnorm_backward_ring<512, 256, 2, 2>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_ring_16384, 512, 1,
                        (rmsnorm_backward_ring<512, 512, 2, 2>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_long_vector, 256, 3, (rmsnorm_backward_long<256, kVec>))
ENGINE_RMSNORM_BACKWARD(rmsnorm_backward_long_scalar, 256, 3, (rmsnorm_backward_long<256, 1>))

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
