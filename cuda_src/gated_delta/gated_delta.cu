// Gated delta rule, one token after the other: decoding, verification of drafts, short sequences.
//
//   S = S e^g;  u = beta (v - S k);  S = S + u k^T;  out = scale S q      S is (dv, dk) per head
//
// Because the decay and the update are known before S is changed, both products read the old
// state: with d = e^g, S k becomes S (d k), and S q of the new state S (d q) + (k . q) u. So a
// state is read once and written once, and its rows are independent of each other.
// Arguments: GatedDeltaParams, in gated_delta_problem.cuh.
//
// Numerics: float; a state is rounded when it is written, out once. Sums have one order and FMAs
// are explicit, so that every kernel of this file computes the same bits.
// Parallelisation: kLanes lanes hold kRows rows of a state in registers, 8 columns each. Their
// partial sums are added by a transposing reduction, which leaves each row's sum in one lane (or a
// few): it computes u and out of that row. With one token per sequence, kIsSingle, the state stays
// packed, so more rows fit; a block then may hold a whole head and apply the gated norm that
// follows (gated_norm.cu).
// SAFETY: the state is read before pdl_wait; see `pdl` in engine/kernels/gated_delta.
// Mirror: engine/reference/gated_delta.py
#include "common/activation.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"
#include "gated_delta/gated_delta_problem.cuh"

constexpr int kThreads = 128;
constexpr int kLanes = LANES;                        // per row: dk / 8, rounded up to 8, 16 or 32
constexpr int kMaxNormThreads = 256;                 // for a block that computes a whole head
constexpr int kColumns = 8;                          // columns of a row per lane
constexpr int kChunk = kVecBytes / sizeof(state_t);  // columns in one access
constexpr int kChunks = kColumns / kChunk;
static_assert(kLanes == 8 || kLanes == 16 || kLanes == 32, "a group of lanes is part of a warp");

__device__ __forceinline__ int lane_of_row() { return threadIdx.x % kLanes; }

// Column i of this lane: chunk c of a row belongs to lane c % kLanes.
__device__ __forceinline__ int column(int i) {
  return (i / kChunk * kLanes + lane_of_row()) * kChunk + i % kChunk;
}

__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}

// Adds x[r] over the lanes of a row group; the lane of row_of_lane() == r gets the sum of x[r].
// Each step halves the rows that a lane still sums, so it takes kRows - 1 shuffles and the rest.
template <int kRows>
__device__ __forceinline__ float transposed_sum(float (&x)[kRows]) {
  int offset = kLanes / 2;
#pragma unroll
  for (int n = kRows / 2; n > 0; n /= 2, offset /= 2) {
    const bool is_upper = (lane_of_row() & offset) != 0;
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

// The lane's columns of a row of q, k, a or dt_bias; zeros beyond dk.
template <bool kIsVector, typename T>
__device__ __forceinline__ void load_columns(float (&x)[kColumns], const T* row, int key_dim) {
  constexpr int kPart = 4;
#pragma unroll
  for (int part = 0; part < kColumns; part += kPart) {
    const int first = column(part);
    if constexpr (kIsVector) {
      Vec<T, kPart> values = {};
      if (first < key_dim) values = load_vec<T, kPart>(row + first);
#pragma unroll
      for (int i = 0; i < kPart; ++i) x[part + i] = to_float(values.v[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPart; ++i)
        x[part + i] = first + i < key_dim ? to_float(row[first + i]) : 0.0f;
    }
  }
}

// The lane's columns of a row of a state, as they are in memory.
struct PackedRow {
  uint4 chunk[kChunks];

  __device__ __forceinline__ float get(int i) const {
    const uint4& words = chunk[i / kChunk];
    const int at = i % kChunk * static_cast<int>(sizeof(state_t)) / 4;
    const uint32_t word = at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
    if constexpr (sizeof(state_t) == 4) return __uint_as_float(word);
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  }
};

// Rounds a row's columns.
__device__ __forceinline__ PackedRow pack_row(const float (&x)[kColumns]) {
  PackedRow packed;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    Vec<state_t, kChunk> values;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values.v[i] = from_float<state_t>(x[c * kChunk + i]);
    packed.chunk[c] = reinterpret_cast<const uint4&>(values);
  }
  return packed;
}

// The lane's columns of kRows rows from `first` on, of which `count` exist; zeros beyond. With
// kIsVector all of them exist, or none.
template <int kRows, bool kIsVector>
struct RowAccess {
  int count, key_dim;

  // Calls f(row, chunk of the row, its offset in elements) for the lane's chunks that exist.
  template <typename F>
  __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int first = column(c * kChunk);
      if (kIsVector && (count <= 0 || first >= key_dim)) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (kIsVector || r < count) f(r, c, r * key_dim + first);
    }
  }

  __device__ __forceinline__ void load(PackedRow (&rows)[kRows], const state_t* from) const {
#pragma unroll
    for (PackedRow& row : rows) row = {};
    if (from == nullptr) return;
    for_each([&](int r, int c, int at) {
      if constexpr (kIsVector) {
        rows[r].chunk[c] = __ldcs(reinterpret_cast<const uint4*>(from + at));
      } else {
        Vec<state_t, kChunk> values;
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
          values.v[i] = has_column(c, i) ? from[at + i] : from_float<state_t>(0.0f);
        rows[r].chunk[c] = reinterpret_cast<const uint4&>(values);
      }
    });
  }

  __device__ __forceinline__ void store(state_t* to, const PackedRow (&rows)[kRows]) const {
    if (to == nullptr) return;
    for_each([&](int r, int c, int at) {
      const uint4& words = rows[r].chunk[c];
      if constexpr (kIsVector) {
        __stcs(reinterpret_cast<uint4*>(to + at), words);
      } else {
        const auto values = reinterpret_cast<const Vec<state_t, kChunk>&>(words);
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
          if (has_column(c, i)) to[at + i] = values.v[i];
      }
    });
  }

 private:
  __device__ __forceinline__ bool has_column(int c, int i) const {
    return column(c * kChunk) + i < key_dim;
  }
};

// One token's operands of a head: the lane's columns of q and k, as they are, and the gates.
template <bool kIsVector>
struct Token {
  float q[kColumns], k[kColumns], a[kHasChannelGate ? kColumns : 1];
  float b, v;

  // Starts the loads. `value_row` is the row of v that the lane needs, or -1.
  __device__ __forceinline__ void load(const GatedDeltaParams& p, int64_t t, int head,
                                       int value_row) {
    const int key_head = head / (p.num_heads / p.num_key_heads);
    load_columns<kIsVector>(q, p.q + t * p.q_stride_t + key_head * p.q_stride_h, p.key_dim);
    load_columns<kIsVector>(k, p.k + t * p.k_stride_t + key_head * p.k_stride_h, p.key_dim);
    const scalar_t* const gate = p.a + t * p.a_stride_t + head * p.a_stride_h;
    if constexpr (kHasChannelGate) {
      load_columns<kIsVector>(a, gate, p.key_dim);
    } else {
      a[0] = to_float(*gate);
    }
    b = to_float(p.b[t * p.b_stride_t + head]);
    v = 0.0f;
    if (value_row >= 0) v = to_float(p.v[t * p.v_stride_t + head * p.v_stride_h + value_row]);
  }
};

// The gates' parameters of a head.
template <bool kIsVector>
struct GateParams {
  float a_log, dt_bias[kHasChannelGate ? kColumns : 1];

  __device__ __forceinline__ void load(const GatedDeltaParams& p, int head) {
    a_log = p.a_log[head];
    if constexpr (kHasChannelGate) {
      load_columns<kIsVector>(dt_bias, p.dt_bias + static_cast<int64_t>(head) * p.key_dim,
                              p.key_dim);
    } else {
      dt_bias[0] = p.dt_bias[head];
    }
  }
};

// kRows rows of a state, in registers: packed if they are read only once more, else float.
template <int kRows, bool kIsPacked>
struct StateRows {
  PackedRow rows[kRows];
  __device__ __forceinline__ void set(const PackedRow (&packed)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = packed[r];
  }
  __device__ __forceinline__ float get(int r, int i) const { return rows[r].get(i); }
  __device__ __forceinline__ void replace(int r, const float (&x)[kColumns]) {
    rows[r] = pack_row(x);
  }
  __device__ __forceinline__ void pack(PackedRow (&packed)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) packed[r] = rows[r];
  }

  // Hides that the rows are unchanged: the compiler would keep their float values in registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (PackedRow& row : rows)
#pragma unroll
      for (uint4& words : row.chunk)
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  }
};
template <int kRows>
struct StateRows<kRows, false> {
  float rows[kRows][kColumns];
  __device__ __forceinline__ void set(const PackedRow (&packed)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kColumns; ++i) rows[r][i] = packed[r].get(i);
  }
  __device__ __forceinline__ float get(int r, int i) const { return rows[r][i]; }
  __device__ __forceinline__ void replace(int r, const float (&x)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) rows[r][i] = x[i];
  }
  __device__ __forceinline__ void pack(PackedRow (&packed)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) packed[r] = pack_row(rows[r]);
  }
  __device__ __forceinline__ void forget() {}
};

// A group of lanes' share of one head of one sequence: kRows rows of the state from first_row on.
template <int kRows, bool kIsSingle, bool kIsVector>
class Recurrence {
 public:
  static constexpr int kRowLanes = kLanes / kRows;  // lanes that hold a row's sum
  static_assert(kRows <= kLanes, "transposed_sum leaves at least one lane per row");

  __device__ __forceinline__ Recurrence(const GatedDeltaParams& p, int head, int first_row)
      : p_(p), head_(head), first_row_(first_row) {}

  // The row whose u and output this lane computes, or -1.
  __device__ __forceinline__ int own_row() const {
    const int row = first_row_ + lane_of_row() / kRowLanes;
    return row < p_.value_dim ? row : -1;
  }

  // Whether this lane is the one that stores its row's output.
  __device__ __forceinline__ bool stores_row() const {
    return own_row() >= 0 && lane_of_row() % kRowLanes == 0;
  }

  // Loads the state of `slot`, or zeros.
  __device__ __forceinline__ void load(int slot) {
    PackedRow rows[kRows];
    access().load(rows, first_row(slot));
    state_.set(rows);
    gate_params_.load(p_, head_);
  }

  // Advances the state by one token and returns the output of the lane's own row. The reciprocals
  // of the norms of q and k are factors of the sums, so that these do not wait for them.
  __device__ __forceinline__ float step(const Token<kIsVector>& token) {
    float q_squares = 0.0f, k_squares = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      q_squares = fmaf(token.q[i], token.q[i], q_squares);
      k_squares = fmaf(token.k[i], token.k[i], k_squares);
      kq = fmaf(token.k[i], token.q[i], kq);
      k_[i] = token.k[i];
    }
    const float q_factor = p_.scale * rsqrtf(lanes_sum(q_squares) + p_.eps);
    const float k_factor = rsqrtf(lanes_sum(k_squares) + p_.eps);
    kq = q_factor * k_factor * lanes_sum(kq);
#pragma unroll
    for (int i = 0; i < kGates; ++i)
      decay_[i] = expf(log_decay(p_, token.a[i], gate_params_.a_log, gate_params_.dt_bias[i]));

    float sk[kRows] = {}, sq[kRows] = {};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float k = token.k[i] * channel_decay(i), q = token.q[i] * channel_decay(i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sk[r] = fmaf(state_.get(r, i), k, sk[r]);
        sq[r] = fmaf(state_.get(r, i), q, sq[r]);
      }
    }
    state_.forget();
    const float head_decay = kHasChannelGate ? 1.0f : decay_[0];
    const float beta = update_strength(token.b, p_.beta_scale);
    const float read = __fmul_rn(head_decay * k_factor, transposed_sum<kRows>(sk));
    const float u = beta * (token.v - read);
    scaled_u_ = u * k_factor;
    return fmaf(kq, u, __fmul_rn(head_decay * q_factor, transposed_sum<kRows>(sq)));
  }

  // Completes the step: computes the new rows and writes them to two slots; -1 skips one.
  __device__ __forceinline__ void update(int target, int snapshot) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float u = __shfl_sync(kFullMask, scaled_u_, r * kRowLanes, kLanes);
      float row[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        row[i] = fmaf(u, k_[i], __fmul_rn(state_.get(r, i), decay_[kHasChannelGate ? i : 0]));
      state_.replace(r, row);
    }
    PackedRow rows[kRows];
    state_.pack(rows);
    access().store(first_row(target), rows);
    access().store(first_row(snapshot), rows);
  }

 private:
  static constexpr int kGates = kHasChannelGate ? kColumns : 1;

  __device__ __forceinline__ RowAccess<kRows, kIsVector> access() const {
    return {p_.value_dim - first_row_, p_.key_dim};
  }

  // The first row in a slot, or null without one.
  __device__ __forceinline__ state_t* first_row(int slot) const {
    const int64_t row = static_cast<int64_t>(head_) * p_.value_dim + first_row_;
    return slot < 0 ? nullptr : p_.states + slot * p_.slot_stride + row * p_.key_dim;
  }

  // Decay of column i, where it is not a factor of the whole product.
  __device__ __forceinline__ float channel_decay(int i) const {
    return kHasChannelGate ? decay_[kHasChannelGate ? i : 0] : 1.0f;
  }

  const GatedDeltaParams& p_;
  const int head_, first_row_;
  GateParams<kIsVector> gate_params_;
  StateRows<kRows, kIsSingle> state_;
  float k_[kColumns], decay_[kGates];
  float scaled_u_;  // u / |k| of the lane's own row
};

// The gated norm of a head, whose rows a whole block computes.
struct HeadNorm {
  float z = 0.0f, weight = 0.0f;  // of the lane's own row

  __device__ __forceinline__ void load(const GatedDeltaParams& p, int64_t t, int head, int row) {
    if (row < 0) return;
    z = to_float(p.z[t * p.z_stride_t + head * p.z_stride_h + row]);
    weight = to_float(p.norm_weight[row]);
  }

  // Returns the normalised output of the lane's own row. As two ops would, it rounds `out` first.
  __device__ __forceinline__ float apply(const GatedDeltaParams& p, float out, bool stores_row) {
    __shared__ float smem_sums[kMaxNormThreads / kWarpSize];
    out = round_to_scalar(out);
    const float sum = warp_sum(stores_row ? out * out : 0.0f);
    if (threadIdx.x % kWarpSize == 0) smem_sums[threadIdx.x / kWarpSize] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < static_cast<int>(blockDim.x) / kWarpSize; ++i) total += smem_sums[i];
    const float scale = 1.0f / sqrtf(total / p.value_dim + p.norm_eps);
    const float gate = p.norm_is_silu != 0 ? silu(z) : __fdividef(1.0f, 1.0f + expf(-z));
    return out * scale * weight * gate;
  }
};

template <int kRows, bool kIsSingle, bool kIsVector, bool kHasNorm>
__device__ __forceinline__ void gated_delta_steps(const GatedDeltaParams& p) {
  const int b = blockIdx.x, head = blockIdx.y;
  const int group = (blockIdx.z * blockDim.x + threadIdx.x) / kLanes;
  const Sequence sequence = load_sequence(p, b);
  const int num_tokens = sequence.num_tokens();
  pdl_trigger();
  if (num_tokens == 0 || num_tokens > p.max_steps) {
    // SAFETY: a grid whose blocks all return at once must not end before the kernels before it.
    pdl_wait();
    return;
  }

  Recurrence<kRows, kIsSingle, kIsVector> recurrence(p, head, group * kRows);
  recurrence.load(sequence.first_slot);
  int target = target_slot(p, b, 1, num_tokens);  // ahead of the step, like its token
  pdl_wait();

  const int row = recurrence.own_row();
  Token<kIsVector> next;
  next.load(p, sequence.begin, head, row);
#pragma unroll 1
  for (int count = 1; count <= num_tokens; ++count) {
    const int64_t t = sequence.begin + count - 1;
    const Token<kIsVector> token = next;
    HeadNorm norm;
    if (!kIsSingle && count < num_tokens) next.load(p, t + 1, head, row);
    if (kHasNorm) norm.load(p, t, head, row);
    float out = recurrence.step(token);
    recurrence.update(target, snapshot_slot(p, b, count));
    if (!kIsSingle && count < num_tokens) target = target_slot(p, b, count + 1, num_tokens);
    if (kHasNorm) out = norm.apply(p, out, recurrence.stores_row());
    if (recurrence.stores_row())
      p.out[(t * p.num_heads + head) * p.value_dim + row] = from_float<scalar_t>(out);
  }
}

// Rows per lane with many heads: those of float states take twice the registers.
constexpr bool kIsHalf = sizeof(state_t) == 2;
constexpr int kManyRows = kIsHalf ? 8 : 4;
// Blocks per multiprocessor: enough loads in flight, without spills. Code for other chips than
// Hopper takes more registers.
constexpr bool kTakesMore = !(kArch == 900);
constexpr int kMinBlocks = kHasChannelGate ? 2 : !kIsHalf ? 3 : kTakesMore ? 4 : 5;
constexpr int kMinNormBlocks = kHasChannelGate || !kIsHalf || kTakesMore ? 1 : 2;

#define ENGINE_GATED_DELTA(name, threads, min_blocks, rows, is_single, is_vector, has_norm) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks)                         \
      name(const __grid_constant__ GatedDeltaParams p) {                                    \
    gated_delta_steps<rows, is_single, is_vector, has_norm>(p);                             \
  }

ENGINE_GATED_DELTA(gated_delta_single_many, kThreads, kMinBlocks, kManyRows, true, true, false)
ENGINE_GATED_DELTA(gated_delta_single_few, kThreads, kMinBlocks, 4, true, true, false)
ENGINE_GATED_DELTA(gated_delta_steps_4, kThreads, kMinBlocks, 4, false, true, false)
ENGINE_GATED_DELTA(gated_delta_steps_scalar, kThreads, kMinBlocks, 4, false, false, false)
// A head per block: value_dim / 8 groups of lanes.
ENGINE_GATED_DELTA(gated_delta_single_norm, kMaxNormThreads, kMinNormBlocks, 8, true, true, true)
