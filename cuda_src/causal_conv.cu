// Short causal convolution of each channel, with the inputs of earlier tokens in a state.
//
//   y[t, c] = activation(sum over j < K of weight[c, j] x[t - K + 1 + j, c] + bias[c])
//
// With gates, x is in_gate * x (rounded) and the result is out_gate * y.
//
// The K - 1 inputs before a sequence's first token are its state: zeros if it has no earlier
// tokens. The state after the last token is written back, on request also those after each token or
// after a given one. Arguments: CausalConvParams, below.
//
// Numerics: float, from the oldest input to the newest; rounded once, after the gate.
// Parallelisation: one thread per kWidth channels of tokens_per_block consecutive tokens, whose
// inputs move through a window in registers.
// SAFETY: a sequence's state may be read and written in the same slot. The thread that convolves
// the first token is the only one that accesses it: it also convolves the next K - 2 tokens, which
// need the old state, whatever block they belong to, and writes every state of the sequence.
// Mirror: engine/reference/causal_conv.py
#include "common/activation.cuh"
#include "common/pdl.cuh"
#include "common/state_slots.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;

// States: (num_slots, K - 1, C).
struct CausalConvParams : StateSlotParams<scalar_t> {
  const scalar_t* x;  // (T, C), rows x_stride elements apart
  int64_t x_stride;
  const scalar_t* weight;   // (C, K) contiguous
  const scalar_t* bias;     // (C,) or null
  const scalar_t* in_gate;  // (T, C), rows in_gate_stride elements apart, or null
  int64_t in_gate_stride;
  const scalar_t* out_gate;  // (T, C), rows out_gate_stride elements apart, or null
  int64_t out_gate_stride;
  scalar_t* out;     // (T, C) contiguous
  int num_channels;  // C
  int tokens_per_block;
  int is_silu;
};

// The sequence that token t belongs to: the last one that begins at or before it.
__device__ __forceinline__ int sequence_of(const CausalConvParams& p, int t) {
  int low = 0, high = p.num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_seqlens_q[middle] <= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <int kWidth, int kTaps>
class Convolution {
 public:
  using V = Vec<scalar_t, kWidth>;
  static constexpr int kOld = kTaps - 1;  // inputs in a state

  __device__ __forceinline__ Convolution(const CausalConvParams& p, int channel)
      : p_(p), channel_(channel) {
    V taps[kTaps];  // the kWidth * kTaps values of these channels, in memory's order
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      taps[j] =
          load_vec<scalar_t, kWidth>(p.weight + static_cast<int64_t>(channel) * kTaps + j * kWidth);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        const int at = i * kTaps + j;
        weight_[j][i] = to_float(taps[at / kWidth].v[at % kWidth]);
      }
  }

  // Brings what the block's first token needs, besides x, closer: the tables and the old state.
  __device__ __forceinline__ void prefetch(int first) const {
    if (first >= p_.num_tokens) return;
    const Sequence sequence = load_sequence(p_, sequence_of(p_, first));
    if (sequence.begin < first || sequence.first_slot < 0) return;
#pragma unroll
    for (int i = 0; i < kOld; ++i)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(state_row(sequence.first_slot, i)));
  }

  // Convolves the block's tokens [first, last).
  __device__ __forceinline__ void run(int first, int last) {
    int b = sequence_of(p_, first);
    Sequence sequence = load_sequence(p_, b);
    int t = first;
    if (sequence.begin < first) {
      t = min(max(first, sequence.begin + kOld), sequence.end);
      fill_window(sequence, t);
    }
    while (t < last) {
      while (t >= sequence.end) {
        if (++b >= p_.num_sequences) return;
        sequence = load_sequence(p_, b);
      }
      if (t == sequence.begin) {
        fill_window(sequence, t);
        write_states(sequence, b);
        last = max(last, min(sequence.begin + kOld, sequence.end));
      }
      convolve(t);
      ++t;
    }
  }

 private:
  __device__ __forceinline__ V input(int t) const {
    V x = load_vec<scalar_t, kWidth>(p_.x + t * p_.x_stride + channel_);
    if (p_.in_gate == nullptr) return x;
    const V gate = load_vec<scalar_t, kWidth>(p_.in_gate + t * p_.in_gate_stride + channel_);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      x.v[i] = from_float<scalar_t>(to_float(x.v[i]) * to_float(gate.v[i]));
    return x;
  }

  // Factors of the result of token t.
  __device__ __forceinline__ void load_out_gate(int t, float (&factor)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factor[i] = 1.0f;
    if (p_.out_gate == nullptr) return;
    const V gate = load_vec<scalar_t, kWidth>(p_.out_gate + t * p_.out_gate_stride + channel_);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factor[i] = to_float(gate.v[i]);
  }

  __device__ __forceinline__ scalar_t* state_row(int slot, int i) const {
    return p_.states + slot * p_.slot_stride + static_cast<int64_t>(i) * p_.num_channels + channel_;
  }

  // Input t of the sequence, or of its old state if t is before its first token.
  __device__ __forceinline__ V input_or_state(const Sequence& sequence, int t) const {
    if (t >= sequence.begin) return input(t);
    V zeros;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) zeros.v[i] = from_float<scalar_t>(0.0f);
    if (sequence.first_slot < 0) return zeros;
    return load_vec<scalar_t, kWidth>(state_row(sequence.first_slot, t - sequence.begin + kOld));
  }

  // Loads the kOld inputs before token t.
  __device__ __forceinline__ void fill_window(const Sequence& sequence, int t) {
#pragma unroll
    for (int j = 0; j < kOld; ++j) window_[j] = input_or_state(sequence, t - kOld + j);
  }

  // Writes the states of a sequence whose old state is in the window.
  __device__ __forceinline__ void write_states(const Sequence& sequence, int b) const {
    const int n = sequence.num_tokens();
    for (int count = n <= p_.num_targets ? 1 : n; count <= n; ++count)
      write_state(target_slot(p_, b, count, n), sequence.begin, count);
    if (p_.snapshot_slots == nullptr) return;
    const int count = p_.snapshot_offsets[b];
    if (count > 0 && count <= n) write_state(snapshot_slot(p_, b, count), sequence.begin, count);
  }

  // Writes the last kOld inputs of the first `count` tokens.
  __device__ __forceinline__ void write_state(int slot, int begin, int count) const {
    if (slot < 0) return;
    V rows[kOld];
#pragma unroll
    for (int j = 0; j < kOld; ++j)
      if (count - kOld + j >= 0) rows[j] = input(begin + count - kOld + j);
#pragma unroll
    for (int shift = 1; shift < kOld; ++shift)
      if (count == shift)
#pragma unroll
        for (int j = 0; j + shift < kOld; ++j) rows[j] = window_[j + shift];
#pragma unroll
    for (int j = 0; j < kOld; ++j) store_vec(state_row(slot, j), rows[j]);
  }

  __device__ __forceinline__ void convolve(int t) {
    const V x = input(t);
    float factor[kWidth];
    load_out_gate(t, factor);
    V y;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kOld; ++j) sum += weight_[j][i] * to_float(window_[j].v[i]);
      sum += weight_[kOld][i] * to_float(x.v[i]);
      if (p_.bias != nullptr) sum += to_float(p_.bias[channel_ + i]);
      y.v[i] = from_float<scalar_t>((p_.is_silu != 0 ? silu(sum) : sum) * factor[i]);
    }
#pragma unroll
    for (int j = 0; j + 1 < kOld; ++j) window_[j] = window_[j + 1];
    window_[kOld - 1] = x;
    store_vec(p_.out + static_cast<int64_t>(t) * p_.num_channels + channel_, y);
  }

  const CausalConvParams& p_;
  const int channel_;
  float weight_[kTaps][kWidth];
  V window_[kOld];
};

// SAFETY: the next kernel may read this batch's recurrent states before its pdl_wait (gated_delta
// does), so it may start only once the kernels before this one have ended: after pdl_wait.
template <int kWidth, int kTaps>
__device__ __forceinline__ void causal_conv(const CausalConvParams& p) {
  const int channel = (blockIdx.y * kThreads + threadIdx.x) * kWidth;
  if (channel >= p.num_channels) return;
  Convolution<kWidth, kTaps> convolution(p, channel);
  const int first = blockIdx.x * p.tokens_per_block;
  // SAFETY: the kernel before this one writes neither the tables nor states; see `pdl`.
  convolution.prefetch(first);
  pdl_wait();
  pdl_trigger();
  convolution.run(first, min(first + p.tokens_per_block, p.num_tokens));
}

// At least 4 blocks per multiprocessor: without a bound ptxas aims at 16, and spills.
#define ENGINE_CAUSAL_CONV(name, width, taps)               \
  extern "C" __global__ void __launch_bounds__(kThreads, 4) \
      name(const __grid_constant__ CausalConvParams p) {    \
    causal_conv<width, taps>(p);                            \
  }

ENGINE_CAUSAL_CONV(causal_conv_vector_2, kVec, 2)
ENGINE_CAUSAL_CONV(causal_conv_vector_3, kVec, 3)
ENGINE_CAUSAL_CONV(causal_conv_vector_4, kVec, 4)
ENGINE_CAUSAL_CONV(causal_conv_scalar_2, 1, 2)
ENGINE_CAUSAL_CONV(causal_conv_scalar_3, 1, 3)
ENGINE_CAUSAL_CONV(causal_conv_scalar_4, 1, 4)
