// What every gemm kernel has in common: the problem, the order of tiles, how tiles reach shared
// memory, and the epilogue.
//
//   out[m, n] = activation(sum_k x[m, k] * weight[n, k] + bias[n]) + residual[m, n]
//
// With kNorm, rmsnorm is fused in front: x[m, k] is replaced by
// round(x[m, k] * row_scales[m] * (norm_weight[k] + weight_offset)).
#pragma once

#include "common/activation.cuh"
#include "common/cp_async.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

struct Norm {
  const scalar_t* weight;
  const float* row_scales;  // 1 / rms of each row; the skinny kernels work it out themselves
  float eps, weight_offset;

  __device__ __forceinline__ scalar_t apply(scalar_t x, float scale, scalar_t w) const {
    return from_float<scalar_t>(to_float(x) * scale * (to_float(w) + weight_offset));
  }
};

// With kSiluAndMul, weight and bias have their rows in turn: eight of the gate, eight of up. Columns
// 16 i + j and 16 i + 8 + j of the product (j < 8) make column 8 i + j of out, which has n / 2.

// ---- epilogue --------------------------------------------------------------------------------

enum Activation { kIdentity = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kRelu = 4, kSiluAndMul = 5 };

__device__ __forceinline__ float activate(int activation, float x) {
  switch (activation) {
    case kSilu:
      return silu(x);
    case kGelu:
      return gelu_erf(x);
    case kGeluTanh:
      return gelu_tanh(x);
    case kRelu:
      return relu(x);
    default:
      return x;
  }
}

struct Epilogue {
  const scalar_t* bias;  // (n,), or null
  const void* residual;  // as out, of its type, or null; may be out
  void* out;             // (m, n), or (m, n / 2) if gated
  int64_t residual_stride, out_stride;
  int activation;
  bool is_float;      // out and residual are float, else scalar_t
  bool is_vector;     // n, strides and addresses allow accesses of four elements
  int num_gates = 0;  // gated: rows of gate, if weight and bias have all of these first; else 0

  __device__ __forceinline__ bool is_gated() const { return activation == kSiluAndMul; }
  __device__ __forceinline__ bool is_bare() const {
    return bias == nullptr && activation == kIdentity;
  }
  // How many columns out has, and where those of the gate in the product's column n begin there.
  __device__ __forceinline__ int out_columns(int n) const { return is_gated() ? n / 2 : n; }
  __device__ __forceinline__ static int gated_column(int n) { return n / 16 * 8 + n % 8; }

  __device__ __forceinline__ float biased(int n, float sum) const {
    return activate(activation, bias != nullptr ? sum + to_float(bias[n]) : sum);
  }

  // Where the bias of the product's column n lies.
  __device__ __forceinline__ int bias_place(int n) const {
    return num_gates > 0 ? gated_column(n) + n / 8 % 2 * num_gates : n;
  }

  // `gate` is of the product's column n, `up` of the one eight further.
  __device__ __forceinline__ float gated(int n, float gate, float up) const {
    if (bias != nullptr) {
      gate += to_float(bias[bias_place(n)]);
      up += to_float(bias[bias_place(n + 8)]);
    }
    return silu(gate) * up;
  }

  // Columns n .. n + 3 of a row; n is a multiple of 4 and below num_cols.
  template <typename Out>
  __device__ __forceinline__ Vec<Out, 4> load_residual(int64_t row, int n, int num_cols) const {
    Vec<Out, 4> r = {};
    const Out* p = static_cast<const Out*>(residual) + row * residual_stride + n;
    if (is_vector) return load_vec<Out, 4>(p);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (n + j < num_cols) r.v[j] = p[j];
    return r;
  }

  template <typename Out>
  __device__ __forceinline__ void store(int64_t row, int n, int num_cols, Vec<Out, 4> y) const {
    Out* p = static_cast<Out*>(out) + row * out_stride + n;
    if (is_vector) return store_vec(p, y);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (n + j < num_cols) p[j] = y.v[j];
  }

  template <typename Out>
  __device__ __forceinline__ void store_one_as(int64_t row, int n,
                                               float sum) const {  // but for the residual, done
    if (residual != nullptr)
      sum += to_float(static_cast<const Out*>(residual)[row * residual_stride + n]);
    static_cast<Out*>(out)[row * out_stride + n] = from_float<Out>(sum);
  }

  __device__ __forceinline__ void store_done(int64_t row, int n, float y) const {
    if (is_float)
      store_one_as<float>(row, n, y);
    else
      store_one_as<scalar_t>(row, n, y);
  }

  // Column n of the product, or of a gate; sum_at(n) gives the sum of any.
  template <typename SumAt>
  __device__ __forceinline__ void store_one(int64_t row, int n, const SumAt& sum_at) const {
    if (!is_gated())
      store_done(row, n, biased(n, sum_at(n)));
    else if (n % 16 < 8)
      store_done(row, gated_column(n), gated(n, sum_at(n), sum_at(n + 8)));
  }
};

struct Problem {
  const scalar_t* x;       // (m, k), rows x_stride apart
  const scalar_t* weight;  // (n, k), contiguous
  int64_t x_stride;
  int m, n, k;
  int k_per_split;  // a multiple of the tile's k; blockIdx.y is the split
  float* partials;  // (splits, m, n) sums to be added up by gemm_reduce, or null
  Norm norm;
  Epilogue epilogue;
};

// Where this block's sums go: to `out` with the epilogue, or bare into its slice of the partials.
__device__ __forceinline__ Epilogue block_epilogue(const Problem& p) {
  if (p.partials == nullptr) return p.epilogue;
  float* slice = p.partials + static_cast<int64_t>(blockIdx.y) * p.m * p.n;
  return Epilogue{nullptr, nullptr, slice, 0, p.n, kIdentity, true, p.n % 4 == 0};
}

// 16 rows of a tile from (row0, col0) on, staged as floats with kPitch floats a row. The kThreads
// threads that share them (thread is 0 .. kThreads - 1) each take groups of four columns.
template <int kCols_, int kPitch_, int kThreads_, bool kMayGate_ = true>
struct Slice {
  static constexpr bool kMayGate = kMayGate_;  // a kernel short of registers does without
  static constexpr int kCols = kCols_, kPitch = kPitch_, kThreads = kThreads_;
  static constexpr int kGroups = 16 * kCols / 4 / kThreads;
  static constexpr int kBatch = kGroups < 4 ? kGroups : 4;  // groups loaded at once
  static_assert(kGroups * kThreads * 4 == 16 * kCols && kGroups % kBatch == 0,
                "threads do not fit");

  float* smem;
  int thread, row0, col0, m, n;

  __device__ __forceinline__ int row(int group) const {
    return (group * kThreads + thread) / (kCols / 4);
  }
  __device__ __forceinline__ int col(int group) const {
    return (group * kThreads + thread) % (kCols / 4) * 4;
  }
  __device__ __forceinline__ bool exists(int group) const {
    return row0 + row(group) < m && col0 + col(group) < n;
  }
  __device__ __forceinline__ float* at(int group) const {
    return smem + row(group) * kPitch + col(group);
  }
};

// Bias and activation, in place. Rolled: this is much code, and a small part of the time. Gated, a
// thread reads up from groups of others, which nobody writes, and turns its groups of the gate alone.
template <typename S>
__device__ __forceinline__ void activate_slice(const Epilogue& e, const S& s) {
#pragma unroll 1
  for (int i = 0; i < S::kGroups * 4; ++i) {
    const int col = s.col0 + s.col(i / 4) + i % 4;
    float* p = s.at(i / 4) + i % 4;
    if (col >= s.n) continue;
    if (!S::kMayGate || !e.is_gated())
      *p = e.biased(col, *p);
    else if (col % 16 < 8)
      *p = e.gated(col, *p, p[8]);
  }
}

template <typename Out, typename S>
__device__ __forceinline__ void store_slice_as(const Epilogue& e, const S& s) {
  const bool is_gated = S::kMayGate && e.is_gated();
  const int n = is_gated ? s.n / 2 : s.n;
  const auto col = [&](int group) {
    const int c = s.col0 + s.col(group);
    return is_gated ? Epilogue::gated_column(c) : c;
  };
  const auto exists = [&](int group) {
    return s.exists(group) && !(is_gated && s.col(group) % 16 >= 8);
  };
#pragma unroll 1
  for (int first = 0; first < S::kGroups; first += S::kBatch) {
    Vec<Out, 4> r[S::kBatch] = {};
    if (e.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < S::kBatch; ++i)
        if (exists(first + i))
          r[i] = e.load_residual<Out>(s.row0 + s.row(first + i), col(first + i), n);
    }
#pragma unroll
    for (int i = 0; i < S::kBatch; ++i) {
      const Vec<float, 4> sum = load_vec<float, 4>(s.at(first + i));
#pragma unroll
      for (int j = 0; j < 4; ++j)  // without a residual r is 0, and -0 + 0 would lose the sign
        r[i].v[j] =
            from_float<Out>(e.residual != nullptr ? sum.v[j] + to_float(r[i].v[j]) : sum.v[j]);
      if (exists(first + i)) e.store<Out>(s.row0 + s.row(first + i), col(first + i), n, r[i]);
    }
  }
}

// A thread reads and writes only its own groups of the slice: no barrier between the two steps.
template <typename S>
__device__ __forceinline__ void store_slice(const Epilogue& e, const S& s) {
  if (!e.is_bare()) activate_slice(e, s);
  if (e.is_float)
    store_slice_as<float>(e, s);
  else
    store_slice_as<scalar_t>(e, s);
}

// ---- tiles -----------------------------------------------------------------------------------

// A tile in shared memory is rows of 64 bytes: four 16-byte chunks, 32 values of 16 bits or 16
// floats along k. Chunk c of row r lies in place c ^ (r / 2) % 4, so that the chunks c of any eight
// rows that follow each other (from a multiple of 8) lie in eight different places of 128 bytes:
// neither ldmatrix nor a 16-byte load of eight lanes meets a bank twice.
constexpr int kRowBytes = 64;
constexpr int kChunksPerRow = 4;
constexpr int kTileK = kChunksPerRow * kVec;

__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
}

struct TileOrigin {
  int row, col;
};

// Blocks walk the tiles in bands of kBandRows tiles along m, down first: blocks that run at the
// same time share few rows of x and of weight, which stay in L2.
template <int kTileM, int kTileN>
__device__ __forceinline__ TileOrigin tile_origin(int m, int n) {
  constexpr int kBandRows = 8;
  const int tiles_m = (m + kTileM - 1) / kTileM, tiles_n = (n + kTileN - 1) / kTileN;
  const int band = blockIdx.x / (kBandRows * tiles_n), within = blockIdx.x % (kBandRows * tiles_n);
  const int rows = min(kBandRows, tiles_m - band * kBandRows);
  return {(band * kBandRows + within % rows) * kTileM, within / rows * kTileN};
}

// Moves kRows rows of a matrix into shared memory, a tile along k at a time. A thread always moves
// the same chunk of the rows first_row + i * kRowStep, so only the column changes from call to
// call.
template <int kRows, int kThreads, bool kAligned>
struct TileLoader {
  static constexpr int kRowStep = kThreads / kChunksPerRow;
  static constexpr int kNumRows = kRows / kRowStep;
  static_assert(kRowStep % 8 == 0 && kNumRows * kRowStep == kRows, "the swizzle must not change");

  const scalar_t* matrix;
  int64_t offset, step;     // of this thread's first row, and between its rows, in elements
  int first_row, num_rows;  // within the tile, and how many rows of the tile exist
  int column, smem_offset;

  __device__ __forceinline__ TileLoader(const scalar_t* matrix_, int64_t stride, int row0, int rows)
      : matrix(matrix_),
        first_row(threadIdx.x / kChunksPerRow),
        num_rows(rows - row0),
        column(threadIdx.x % kChunksPerRow * kVec) {
    offset = (static_cast<int64_t>(row0) + first_row) * stride + column;
    step = stride * kRowStep;
    smem_offset = swizzled(first_row, threadIdx.x % kChunksPerRow);
  }

  __device__ __forceinline__ bool has_row(int i) const {
    return first_row + i * kRowStep < num_rows;
  }

  // Columns [k, k + kTileK); those from k_end on, and rows that do not exist, become zero.
  __device__ __forceinline__ void load(unsigned char* smem, int k, int k_end) const {
#pragma unroll
    for (int i = 0; i < kNumRows; ++i) {
      unsigned char* to = smem + smem_offset + i * kRowStep * kRowBytes;
      const scalar_t* from = matrix + offset + i * step + k;
      if constexpr (kAligned) {
        const bool valid = has_row(i) && k + column < k_end;
        cp_async_16(to, valid ? from : matrix, valid);
      } else {
        Vec<scalar_t, kVec> values = {};
#pragma unroll
        for (int j = 0; j < kVec; ++j)
          if (has_row(i) && k + column + j < k_end) values.v[j] = from[j];
        store_vec(reinterpret_cast<scalar_t*>(to), values);
      }
    }
  }
};

// Applies the norm to the chunks of x's tile that this very thread has loaded, in place: after its
// own cp_async_wait, before the barrier that shows them to others.
template <typename Loader, bool kAligned, bool kEnabled>
struct TileNorm {
  const Norm norm;
  int row0;

  __device__ __forceinline__ void apply(const Loader& loader, unsigned char* smem, int k,
                                        int k_end) const {
    if constexpr (!kEnabled) return;
    using V = Vec<scalar_t, kVec>;
    const int column = k + loader.column;
    if (column >= k_end) return;  // zeros stay zeros
    V w = {};
    if constexpr (kAligned) {
      w = load_vec<scalar_t, kVec>(norm.weight + column);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        if (column + j < k_end) w.v[j] = norm.weight[column + j];
    }
#pragma unroll 2  // of 4: registers are scarce here
    for (int i = 0; i < Loader::kNumRows; ++i) {
      scalar_t* p =
          reinterpret_cast<scalar_t*>(smem + loader.smem_offset + i * Loader::kRowStep * kRowBytes);
      const int row = row0 + loader.first_row + i * Loader::kRowStep;
      // From L1 each time: no register is free to keep it.
      const float scale = loader.has_row(i) ? norm.row_scales[row] : 0.0f;
      V x = load_vec<scalar_t, kVec>(p);
#pragma unroll
      for (int j = 0; j < kVec; ++j) x.v[j] = norm.apply(x.v[j], scale, w.v[j]);
      store_vec(p, x);
    }
  }
};
