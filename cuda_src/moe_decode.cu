// A layer of experts for one token, with its norm and residual, in one kernel.
//
//   y   = rmsnorm(x)
//   experts and weights of router y + router_bias, as in moe_route.cu
//   h_j = activation(gate_up[e_j] y + bias)        for each of the token's experts e_j
//   out = x + sum over j of weight_j (down[e_j] h_j + bias)
//
// Arguments: MoeDecodeParams, below.
//
// Numerics: y and h are rounded to scalar_t, all else is float, and out is rounded once.
// Parallelisation: persistent, a block on each multiprocessor, and two barriers of the grid: after
// the logits, and after h. Every block has y in shared memory and chooses the experts itself. Work
// is divided among all warps of the grid by rows of the weights, so that whatever the number of
// experts, all have as much to read. A warp streams its rows through shared memory of its own, and
// copies its first rows of down before the second barrier: memory is busy while blocks wait.
// SAFETY: blocks wait for each other, so all must be resident: there are no more of them than
// multiprocessors, and the next kernel's start only when all of these have.
// Mirror: engine/reference/moe_decode.py
#include "common/cp_async.cuh"
#include "common/moe_activation.cuh"
#include "common/moe_choose.cuh"
#include "common/pdl.cuh"

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;
// A step of a warp's stream: as many values of a row of gate and of the same row of up.
constexpr int kStep = 1024, kSteps = 3;

struct MoeDecodeParams {
  const scalar_t* x;             // (N,), N a multiple of kVec, at most kThreads * kVec
  const scalar_t* norm_weight;   // (N,)
  const scalar_t* router;        // (E, N)
  const scalar_t* router_bias;   // (E,), or null
  const float* correction;       // (E,), or null
  const scalar_t* gate_up;       // (E, 2 I, N), I a multiple of kVec
  const scalar_t* gate_up_bias;  // (E, 2 I), or null
  const scalar_t* down;          // (E, N, I)
  const scalar_t* down_bias;     // (E, N), or null
  const int64_t* slots;          // (1,), or null: a token with a negative slot is not in `load`
  int64_t* load;                 // (E,), to which the pairs are added; or null
  scalar_t* out;                 // (N,), may be x
  float* logits;                 // (E,) scratch
  scalar_t* hidden;              // (top_k, I) scratch, aligned to 16 bytes
  int* arrived;                  // three counters, 0 before and after
  int num_features, width, num_experts, top_k;
  int is_sigmoid, num_groups, top_groups, renormalize;
  float scale, eps, weight_offset;
  int activation;  // a MoeActivation
  float alpha, limit;
  int warp_values;  // that a warp's shared memory has room for: kSteps steps, a row of down
  int is_early;     // the preceding kernel does not write the weights
};

// Shared memory that all launches have; then y, h and each warp's rows.
struct MoeDecodeShared {
  float sums[kWarps];
  int experts[kMaxTopK];
  float weights[kMaxTopK];
};

// Waits until all blocks have arrived; what they wrote before can be read after.
__device__ __forceinline__ void grid_barrier(int* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1);
    int seen;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    } while (seen < static_cast<int>(gridDim.x));
  }
  __syncthreads();
}

__device__ __forceinline__ void add_product(float& sum, const Vec<scalar_t, kVec>& w,
                                            const Vec<scalar_t, kVec>& y) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum += to_float(w.v[i]) * to_float(y.v[i]);
}

// A warp's view of the layer. Warps of a block have neighbouring rows. A lane reads only what it
// has copied to its warp's shared memory itself.
struct MoeDecode {
  const MoeDecodeParams& p;
  MoeDecodeShared& smem;
  scalar_t *y, *hidden, *own;  // in shared memory; `own` is this warp's
  int warp_idx, lane_idx, first, step;

  __device__ __forceinline__ MoeDecode(const MoeDecodeParams& p, MoeDecodeShared& smem,
                                       unsigned char* rest)
      : p(p),
        smem(smem),
        y(reinterpret_cast<scalar_t*>(rest)),
        hidden(y + p.num_features),
        warp_idx(threadIdx.x / kWarpSize),
        lane_idx(threadIdx.x % kWarpSize),
        first(blockIdx.x * kWarps + warp_idx),
        step(gridDim.x * kWarps) {
    own = hidden + p.top_k * p.width + warp_idx * p.warp_values;
  }

  // Asks for what does not depend on other kernels: the row of the router of this block's first
  // warp, and a vector of the norm's weight for each thread.
  __device__ __forceinline__ Vec<scalar_t, kVec> load_early() const {
    constexpr int kLine = 128 / sizeof(scalar_t);
    const int expert = warp_idx * gridDim.x + blockIdx.x;
    if (expert < p.num_experts)
      for (int i = lane_idx * kLine; i < p.num_features; i += kWarpSize * kLine)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(
            p.router + static_cast<int64_t>(expert) * p.num_features + i));
    Vec<scalar_t, kVec> weight = {};
    const int begin = threadIdx.x * kVec;
    if (begin < p.num_features) weight = load_vec<scalar_t, kVec>(p.norm_weight + begin);
    return weight;
  }

  // y, by the whole block, a vector for each thread.
  __device__ __forceinline__ void normalise(const Vec<scalar_t, kVec>& weight) const {
    const int begin = threadIdx.x * kVec;
    Vec<scalar_t, kVec> v = {};
    if (begin < p.num_features) v = load_vec<scalar_t, kVec>(p.x + begin);
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kVec; ++j) squares += to_float(v.v[j]) * to_float(v.v[j]);
    const float mean = block_sum<kWarps>(squares, smem.sums) / p.num_features;
    const float scale = 1.0f / sqrtf(mean + p.eps);
#pragma unroll
    for (int j = 0; j < kVec; ++j)
      v.v[j] = from_float<scalar_t>(to_float(v.v[j]) * scale *
                                    (to_float(weight.v[j]) + p.weight_offset));
    if (begin < p.num_features) store_vec(y + begin, v);
    __syncthreads();
  }

  // The logits of one expert for each warp that has one: at most one for each block, if it can be.
  __device__ __forceinline__ void route() const {
    for (int e = warp_idx * gridDim.x + blockIdx.x; e < p.num_experts; e += step) {
      const scalar_t* row = p.router + static_cast<int64_t>(e) * p.num_features;
      float sum = 0.0f;
#pragma unroll 8
      for (int i = lane_idx * kVec; i < p.num_features; i += kWarpSize * kVec)
        add_product(sum, load_vec<scalar_t, kVec>(row + i), load_vec<scalar_t, kVec>(y + i));
      sum = warp_sum(sum);
      if (lane_idx == 0)
        p.logits[e] = p.router_bias != nullptr ? sum + to_float(p.router_bias[e]) : sum;
    }
  }

  // The experts, in every block.
  template <int kPer>
  __device__ __forceinline__ void choose_experts() const {
    if (warp_idx == 0) {
      const MoeRule rule{p.logits,     p.correction,      p.num_experts,
                         p.top_k,      p.is_sigmoid != 0, p.renormalize != 0,
                         p.num_groups, p.top_groups,      p.scale};
      const MoeChoice choice = choose<kPer>(rule, 0);
      if (lane_idx < p.top_k) {
        smem.experts[lane_idx] = choice.expert;
        smem.weights[lane_idx] = choice.weight;
        const bool counts = p.slots == nullptr || p.slots[0] >= 0;
        if (blockIdx.x == 0 && p.load != nullptr && counts)
          atomicAdd(reinterpret_cast<unsigned long long*>(p.load + choice.expert), 1ull);
      }
    }
    __syncthreads();
  }

  // The row of gate of a unit, which is a feature of one expert's h; up's is p.width rows below.
  __device__ __forceinline__ int64_t gate_row(int unit) const {
    const int rank = unit / p.width;
    return static_cast<int64_t>(smem.experts[rank]) * 2 * p.width + (unit - rank * p.width);
  }

  // Starts to copy a step of gate and of up; what follows the last unit is an empty group.
  __device__ __forceinline__ void copy_step(int slot, int unit, int begin) const {
    if (unit < p.top_k * p.width) {
      const scalar_t* gate = p.gate_up + gate_row(unit) * p.num_features + begin;
      const scalar_t* up = gate + static_cast<int64_t>(p.width) * p.num_features;
      scalar_t* to = own + slot * 2 * kStep;
#pragma unroll
      for (int i = lane_idx * kVec; i < kStep; i += kWarpSize * kVec)
        if (begin + i < p.num_features) {
          cp_async_16(to + i, gate + i);
          cp_async_16(to + kStep + i, up + i);
        }
    }
    cp_async_commit();
  }

  // h: a warp computes features, each from a row of gate and a row of up.
  __device__ __forceinline__ void up() const {
    const int all = p.top_k * p.width;
    int next = first, next_begin = 0, slot = 0;  // of the copies, which are kSteps - 1 ahead
    const auto copy_next = [&](int to) {
      copy_step(to, next, next_begin);
      next_begin += kStep;
      if (next_begin >= p.num_features) next_begin = 0, next += step;
    };
#pragma unroll
    for (int i = 0; i < kSteps - 1; ++i) copy_next(i);
#pragma unroll 1
    for (int unit = first; unit < all; unit += step) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll 1
      for (int begin = 0; begin < p.num_features; begin += kStep) {
        copy_next(slot == 0 ? kSteps - 1 : slot - 1);  // whose values have been used
        cp_async_wait<kSteps - 1>();
        const scalar_t* from = own + slot * 2 * kStep;
#pragma unroll
        for (int i = lane_idx * kVec; i < kStep; i += kWarpSize * kVec) {
          if (begin + i >= p.num_features) break;
          const auto v = load_vec<scalar_t, kVec>(y + begin + i);
          add_product(gate, load_vec<scalar_t, kVec>(from + i), v);
          add_product(up, load_vec<scalar_t, kVec>(from + kStep + i), v);
        }
        slot = slot == kSteps - 1 ? 0 : slot + 1;
      }
      gate = warp_sum(gate);
      up = warp_sum(up);
      if (lane_idx == 0) {
        if (p.gate_up_bias != nullptr) {
          const int64_t row = gate_row(unit);
          gate += to_float(p.gate_up_bias[row]);
          up += to_float(p.gate_up_bias[row + p.width]);
        }
        const MoeGate activation{p.activation, p.alpha, p.limit};
        p.hidden[unit] = from_float<scalar_t>(activation(gate, up));
      }
    }
  }

  __device__ __forceinline__ int held_rows() const { return p.warp_values / p.width; }

  // Starts to copy rows of down, of the experts from rank `begin` on for which there is room.
  __device__ __forceinline__ void hold(int feature, int begin) const {
    const int end = min(p.top_k, begin + held_rows());
    for (int rank = begin; rank < end; ++rank) {
      const int64_t row = static_cast<int64_t>(smem.experts[rank]) * p.num_features + feature;
      scalar_t* to = own + (rank - begin) * p.width;
      for (int i = lane_idx * kVec; i < p.width; i += kWarpSize * kVec)
        cp_async_16(to + i, p.down + row * p.width + i);
    }
    cp_async_commit();
  }

  // h, by the whole block.
  __device__ __forceinline__ void load_hidden() const {
    for (int i = threadIdx.x * kVec; i < p.top_k * p.width; i += kThreads * kVec)
      cp_async_16(hidden + i, p.hidden + i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  // out, of which a warp computes features; the first one's first rows are on their way.
  __device__ __forceinline__ void down() const {
    load_hidden();
#pragma unroll 1
    for (int feature = first; feature < p.num_features; feature += step) {
      float sum = 0.0f;
      for (int begin = 0; begin < p.top_k; begin += held_rows()) {
        if (feature > first || begin > 0) hold(feature, begin);
        cp_async_wait<0>();
        const int end = min(p.top_k, begin + held_rows());
        for (int rank = begin; rank < end; ++rank) {
          float one = 0.0f;
          for (int i = lane_idx * kVec; i < p.width; i += kWarpSize * kVec)
            add_product(one, load_vec<scalar_t, kVec>(own + (rank - begin) * p.width + i),
                        load_vec<scalar_t, kVec>(hidden + rank * p.width + i));
          if (p.down_bias != nullptr && lane_idx == 0)
            one += to_float(
                p.down_bias[static_cast<int64_t>(smem.experts[rank]) * p.num_features + feature]);
          sum += smem.weights[rank] * one;
        }
      }
      sum = warp_sum(sum);
      if (lane_idx == 0) p.out[feature] = from_float<scalar_t>(to_float(p.x[feature]) + sum);
    }
  }
};

template <int kPer>
__device__ __forceinline__ void moe_decode(const MoeDecodeParams& p) {
  extern __shared__ __align__(16) unsigned char smem_raw[];
  __shared__ MoeDecodeShared smem;
  const MoeDecode layer(p, smem, smem_raw);
  pdl_trigger();
  if (p.is_early == 0) pdl_wait();
  const Vec<scalar_t, kVec> norm_weight = layer.load_early();
  if (p.is_early != 0) pdl_wait();
  layer.normalise(norm_weight);
  layer.route();
  grid_barrier(p.arrived);
  layer.template choose_experts<kPer>();
  layer.up();
  if (layer.first < p.num_features) layer.hold(layer.first, 0);
  grid_barrier(p.arrived + 1);
  layer.down();
  // All blocks have left the first barrier, and when all are here the second.
  if (threadIdx.x == 0 && atomicAdd(p.arrived + 2, 1) == static_cast<int>(gridDim.x) - 1)
    p.arrived[0] = p.arrived[1] = p.arrived[2] = 0;
}

// The entry points for up to 32 * per experts.
#define ENGINE_MOE_DECODE(per, experts)                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)             \
      moe_decode_##experts(const __grid_constant__ MoeDecodeParams p) { \
    moe_decode<per>(p);                                                 \
  }

ENGINE_MOE_DECODE(1, 32)
ENGINE_MOE_DECODE(2, 64)
ENGINE_MOE_DECODE(4, 128)
ENGINE_MOE_DECODE(8, 256)
ENGINE_MOE_DECODE(16, 512)
