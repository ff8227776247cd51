// Mamba-2's selective state space, one token after the other: decoding, short sequences.
//
//   S = S e^(-step e^a_log) + (step x) b^T;  out = S c + d x        S is (P, N) per head
//   step = clip(softplus(dt + dt_bias), dt_min, dt_max)
//
// A state is read and written once per call. Arguments: Mamba2Params, in mamba2_problem.cuh.
//
// Numerics: float; a state is rounded when it is written, out once. A row's sums have one order,
// whatever the launch.
// Parallelisation: a warp holds kRows rows of a state in registers, kColumns adjacent columns of
// each in every lane. Its rows' sums over the lanes are added by a transposing reduction, which
// leaves each row's sum in kRowLanes lanes. The next token's operands are loaded while a token is
// computed.
// Mirror: engine/reference/mamba2.py
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "mamba2/mamba2_problem.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kRows = 8;                      // of a state, per warp
constexpr int kRowLanes = kWarpSize / kRows;  // lanes that hold a row's sum

// Adds x[r] over the lanes; the lane with lane / kRowLanes == r gets the sum of x[r].
__device__ __forceinline__ float transposed_sum(float (&x)[kRows]) {
  const int lane = threadIdx.x % kWarpSize;
  int offset = kWarpSize / 2;
#pragma unroll
  for (int n = kRows / 2; n > 0; n /= 2, offset /= 2) {
    const bool is_upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float sent = is_upper ? x[i] : x[i + n];
      const float kept = is_upper ? x[i + n] : x[i];
      x[i] = kept + __shfl_xor_sync(kFullMask, sent, offset);
    }
  }
#pragma unroll
  for (; offset > 0; offset /= 2) x[0] += __shfl_xor_sync(kFullMask, x[0], offset);
  return x[0];
}

// The lane's columns of a row of `size` values, kColumns adjacent ones; zeros beyond.
template <int kColumns, bool kIsVector>
struct LaneColumns {
  __device__ __forceinline__ static int first() { return threadIdx.x % kWarpSize * kColumns; }

  template <typename T>
  __device__ __forceinline__ static void load(float (&x)[kColumns], const T* row, int size) {
    if constexpr (kIsVector) {
      constexpr int kPart = part<T>();
#pragma unroll
      for (int i = 0; i < kColumns; i += kPart) {
        Vec<T, kPart> values = {};
        if (first() < size) values = load_vec<T, kPart>(row + first() + i);
#pragma unroll
        for (int j = 0; j < kPart; ++j) x[i + j] = to_float(values.v[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        x[i] = first() + i < size ? to_float(row[first() + i]) : 0.0f;
    }
  }

  template <typename T>
  __device__ __forceinline__ static void store(T* row, const float (&x)[kColumns], int size) {
    if constexpr (kIsVector) {
      constexpr int kPart = part<T>();
      if (first() >= size) return;
#pragma unroll
      for (int i = 0; i < kColumns; i += kPart) {
        Vec<T, kPart> values;
#pragma unroll
        for (int j = 0; j < kPart; ++j) values.v[j] = from_float<T>(x[i + j]);
        store_vec(row + first() + i, values);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (first() + i < size) row[first() + i] = from_float<T>(x[i]);
    }
  }

 private:
  // Values of one access.
  template <typename T>
  __device__ __forceinline__ static constexpr int part() {
    constexpr int kMost = kVecBytes / sizeof(T);
    return kColumns < kMost ? kColumns : kMost;
  }
};

// A token's operands of a head: the lane's columns of b and c, and x of the lane's row.
template <int kColumns, bool kIsVector>
struct Token {
  float b[kColumns], c[kColumns], dt, x;

  __device__ __forceinline__ void load(const Mamba2Params& p, int64_t t, int head, int row) {
    using Columns = LaneColumns<kColumns, kIsVector>;
    const int group = head / (p.num_heads / p.num_groups);
    Columns::load(b, p.b + t * p.b_stride_t + group * p.b_stride_h, p.state_size);
    Columns::load(c, p.c + t * p.c_stride_t + group * p.c_stride_h, p.state_size);
    dt = to_float(p.dt[t * p.dt_stride_t + head]);
    x = row < p.head_dim ? to_float(p.x[t * p.x_stride_t + head * p.x_stride_h + row]) : 0.0f;
  }
};

template <int kColumns, bool kIsVector>
class StateRows {
 public:
  using Columns = LaneColumns<kColumns, kIsVector>;

  __device__ __forceinline__ StateRows(const Mamba2Params& p, int head, int first_row)
      : p_(p), num_rows_(p.head_dim - first_row) {
    offset_ = (static_cast<int64_t>(head) * p.head_dim + first_row) * p.state_size;
  }

  __device__ __forceinline__ void load(int slot) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      Columns::load(rows_[r], row(slot, r), slot >= 0 && r < num_rows_ ? p_.state_size : 0);
  }

  __device__ __forceinline__ void store(int slot) const {
    if (slot < 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < num_rows_) Columns::store(row(slot, r), rows_[r], p_.state_size);
  }

  // Adds a token to the state; returns the product with c of the lane's row. `input` is step * x
  // of that row.
  __device__ __forceinline__ float step(const Token<kColumns, kIsVector>& token, float decay,
                                        float input) {
    float sums[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float added = __shfl_sync(kFullMask, input, r * kRowLanes);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        rows_[r][i] = rows_[r][i] * decay + added * token.b[i];
        sums[r] += rows_[r][i] * token.c[i];
      }
    }
    return transposed_sum(sums);
  }

 private:
  __device__ __forceinline__ state_t* row(int slot, int r) const {
    return p_.states + slot * p_.slot_stride + offset_ + static_cast<int64_t>(r) * p_.state_size;
  }

  const Mamba2Params& p_;
  const int num_rows_;
  int64_t offset_;
  float rows_[kRows][kColumns];
};

template <int kColumns, bool kIsVector>
__device__ __forceinline__ void mamba2(const Mamba2Params& p) {
  const int b = blockIdx.x, head = blockIdx.y;
  const int first_row = (blockIdx.z * kWarps + threadIdx.x / kWarpSize) * kRows;
  const int row = first_row + threadIdx.x % kWarpSize / kRowLanes;
  const bool is_writer = row < p.head_dim && threadIdx.x % kRowLanes == 0;
  pdl_wait();
  pdl_trigger();
  const Sequence sequence = load_sequence(p, b);
  const int num_tokens = sequence.num_tokens();
  if (num_tokens == 0 || num_tokens > p.max_steps) return;

  StateRows<kColumns, kIsVector> state(p, head, first_row);
  state.load(sequence.first_slot);
  const float rate = expf(p.a_log[head]), skip = p.d[head], bias = p.dt_bias[head];
  Token<kColumns, kIsVector> next;
  next.load(p, sequence.begin, head, row);
#pragma unroll 1
  for (int count = 1; count <= num_tokens; ++count) {
    const Token<kColumns, kIsVector> token = next;
    const int64_t t = sequence.begin + count - 1;
    if (count < num_tokens) next.load(p, t + 1, head, row);
    const float step = time_step(p, token.dt, bias);
    const float y = state.step(token, expf(-step * rate), step * token.x);
    if (is_writer)
      p.out[(t * p.num_heads + head) * p.head_dim + row] = from_float<scalar_t>(y + skip * token.x);
    state.store(target_slot(p, b, count, num_tokens));
    state.store(snapshot_slot(p, b, count));
  }
}

#define ENGINE_MAMBA2(name, columns, is_vector)                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                  \
      mamba2_##name##_##columns(const __grid_constant__ Mamba2Params p) { \
    mamba2<columns, is_vector>(p);                                        \
  }

ENGINE_MAMBA2(vector, 2, true)
ENGINE_MAMBA2(vector, 4, true)
ENGINE_MAMBA2(vector, 8, true)
ENGINE_MAMBA2(scalar, 2, false)
ENGINE_MAMBA2(scalar, 4, false)
ENGINE_MAMBA2(scalar, 8, false)
