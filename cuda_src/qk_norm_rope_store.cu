// What lies between the qkv projection and attention, in one launch: the norm of every head of q
// and k, their rotation, and the write of k and v into their pages.
//
//   q                (T, H, D)              scalar_t  in place: norm, then rotation
//   k, v             (T, K, D)              scalar_t  only read
//   positions        (T,)                   int32     row of cos_sin; outside [0, P): NaN
//   cos_sin          (P, R)                 float     row = R/2 cosines, then R/2 sines; contiguous
//   k_pages, v_pages (P, K, block_size, D)  scalar_t  contiguous; get the rotated k, and v
//   slot_mapping     (T,)                   int64     outside the pages: k, v written nowhere
//   q_weight, k_weight (D,)                 scalar_t  of the norms; null: no norm
//
// q, k and v have token and head strides; their last axis is contiguous. The formulas are those of
// rmsnorm.cu, rope.cu and kv_store.cu.
//
// Numerics: float; rounded after the norm and after the rotation, where the three ops round.
// Parallelisation: in the vector kernels a thread has two 16-byte vectors of a head, those that the
// rotation pairs up, so D / 2 / kVec neighbours hold a head and sum its squares by shuffles. It
// works on the same place of up to kHeads heads at once, for which it needs one piece of the table.
// blockIdx.x is the token, blockIdx.y walks its heads (q's, k's, v's). In the scalar kernels a warp
// has a head. Only who read an element writes it, after all of its head were read.
// Mirror: engine/reference/qk_norm_rope_store.py
#include "common/cluster.cuh"
#include "common/qk_head.cuh"

constexpr int kThreads = 128;
constexpr int kHeads = 3;
#if __CUDA_ARCH__ == 900
constexpr int kMinBlocks = 6;  // large inputs take 4 to 8 % longer with five
#else
constexpr int kMinBlocks = 4;
#endif

struct Job {
  scalar_t* q;
  const scalar_t *k, *v;
  const int* positions;
  const float* cos_sin;
  scalar_t *k_pages, *v_pages;
  const int64_t* slot_mapping;
  const scalar_t *q_weight, *k_weight;
  int64_t q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, num_slots;
  int num_positions, num_q_heads, num_kv_heads, head_dim, rotary_dim, block_size, heads_per_block;
  float eps, weight_offset;

  __device__ __forceinline__ int num_heads() const { return num_q_heads + 2 * num_kv_heads; }

  // Row of head 0 in the pages for the k and v of `slot`; -1: nowhere.
  __device__ __forceinline__ int64_t page_row(int64_t slot) const {
    if (slot < 0 || slot >= num_slots) return -1;
    // A division of 64 bits takes longer than the rest of a small launch.
    const int64_t block = num_slots <= 0x7fffffff
                              ? static_cast<uint32_t>(slot) / static_cast<uint32_t>(block_size)
                              : slot / block_size;
    return block * (num_kv_heads - 1) * block_size + slot;
  }

  // The row of the table at `position`; null if there is none.
  __device__ __forceinline__ const float* angles(int position) const {
    const bool is_known = position >= 0 && position < num_positions;
    return is_known ? cos_sin + static_cast<int64_t>(position) * rotary_dim : nullptr;
  }
};

// One head of a token.
struct Head {
  const scalar_t *in, *weight;  // weight is null where there is no norm
  scalar_t* out;                // null: nothing is to be written
  bool is_rotated;

  __device__ __forceinline__ Head(const Job& job, int64_t token, int head, int64_t page_row) {
    if (head < job.num_q_heads) {
      out = job.q + token * job.q_stride_t + head * job.q_stride_h;
      in = out;
      weight = job.q_weight;
      is_rotated = true;
      return;
    }
    head -= job.num_q_heads;
    is_rotated = head < job.num_kv_heads;
    weight = is_rotated ? job.k_weight : nullptr;
    scalar_t* pages = is_rotated ? job.k_pages : job.v_pages;
    if (is_rotated) {
      in = job.k + token * job.k_stride_t + head * job.k_stride_h;
    } else {
      head -= job.num_kv_heads;
      in = job.v + token * job.v_stride_t + head * job.v_stride_h;
    }
    const int64_t row = page_row + static_cast<int64_t>(head) * job.block_size;
    out = page_row >= 0 ? pages + row * job.head_dim : nullptr;
  }
};

template <bool kInterleaved>
__device__ __forceinline__ void process_vectors(const Job& job) {
  const int64_t token = blockIdx.x;
  const int lanes = job.head_dim / (2 * kVec);  // threads of a head
  const int lane = threadIdx.x % lanes, place = threadIdx.x / lanes;
  const int heads_at_once = kThreads / lanes;
  const int half = job.rotary_dim / 2, pair = lane * kVec;
  const bool has_angles = pair < half;
  // The pairs come first, then, if the rotation leaves some out, the other features by two vectors.
  const bool is_split = !kInterleaved && has_angles;
  const int lo_at = is_split ? pair : 2 * pair;
  const int hi_at = is_split ? pair + half : 2 * pair + kVec;
  const bool has_norm = job.q_weight != nullptr || job.k_weight != nullptr;
  const int64_t slot = job.slot_mapping[token];  // asked for at once, used late
  const int position = job.positions[token];

  const int first = static_cast<int>(blockIdx.y) * job.heads_per_block;
  const int end = min(first + job.heads_per_block, job.num_heads());
  float cos[kVec], sin[kVec];
  const scalar_t* weight = nullptr;  // whose values w_lo and w_hi are
  Packed<kVec> w_lo, w_hi;
  const auto load_weight = [&](const scalar_t* from) {
    if (from == nullptr || from == weight) return;
    weight = from;
    w_lo = load_packed<kVec>(weight + lo_at);
    w_hi = load_packed<kVec>(weight + hi_at);
  };
  bool has_loaded_angles = false;
  for (int base = first; base < end; base += kHeads * heads_at_once) {
    Packed<kVec> lo[kHeads], hi[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = base + i * heads_at_once + place;
      lo[i] = hi[i] = Packed<kVec>{};
      if (place >= heads_at_once || head >= end) continue;
      const scalar_t* in = Head(job, token, head, -1).in;
      lo[i] = load_packed<kVec>(in + lo_at);
      hi[i] = load_packed<kVec>(in + hi_at);
    }
    if (!has_loaded_angles) {  // after the heads were asked for
      has_loaded_angles = true;
      if (place < heads_at_once && base + place < end)
        load_weight(Head(job, token, base + place, -1).weight);
      const float* row = has_angles ? job.angles(position) : nullptr;
      if (row != nullptr) {
        load_angles(row + pair, cos);
        load_angles(row + half + pair, sin);
      } else {
#pragma unroll
        for (int j = 0; j < kVec; ++j) cos[j] = sin[j] = not_a_number();
      }
    }
    const int64_t page_row = job.page_row(slot);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (base + i * heads_at_once >= end) break;  // the same for the whole block
      float x[2 * kVec];
      to_floats(lo[i], x);
      to_floats(hi[i], x + kVec);
      float scale = 0.0f;
      if (has_norm) {
        scale = norm_scale(head_sum_of_squares(x, lanes), job.head_dim, job.eps);
      }
      const int index = base + i * heads_at_once + place;
      if (place >= heads_at_once || index >= end) continue;
      const Head head(job, token, index, page_row);
      if (head.out == nullptr) continue;
      if (head.weight != nullptr) {
        load_weight(head.weight);
        const Vec<scalar_t, kVec> lo_weight = unpack<kVec>(w_lo), hi_weight = unpack<kVec>(w_hi);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          x[j] = normed(x[j], scale, lo_weight.v[j], job.weight_offset);
          x[kVec + j] = normed(x[kVec + j], scale, hi_weight.v[j], job.weight_offset);
        }
      }
      if (head.is_rotated && has_angles) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const int ia = kInterleaved ? 2 * j : j, ib = kInterleaved ? 2 * j + 1 : kVec + j;
          rotate_pair(x[ia], x[ib], cos[j], sin[j]);
        }
      }
      store_vec(head.out + lo_at, rounded(x));
      store_vec(head.out + hi_at, rounded(x + kVec));
    }
  }
}

template <bool kInterleaved>
__device__ __forceinline__ void process_scalars(const Job& job) {
  const int64_t token = blockIdx.x;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int index = static_cast<int>(blockIdx.y) * job.heads_per_block + warp;
  if (index >= job.num_heads()) return;
  const Head head(job, token, index, job.page_row(job.slot_mapping[token]));
  if (head.out == nullptr) return;
  float scale = 0.0f;
  if (head.weight != nullptr) {
    float sum = 0.0f;
    for (int i = lane; i < job.head_dim; i += kWarpSize) {
      sum += to_float(head.in[i]) * to_float(head.in[i]);
    }
    scale = norm_scale(warp_sum(sum), job.head_dim, job.eps);
  }
  const auto feature = [&](int i) {
    const float x = to_float(head.in[i]);
    return head.weight != nullptr ? normed(x, scale, head.weight[i], job.weight_offset) : x;
  };
  const int half = job.rotary_dim / 2;
  const float* row = job.angles(job.positions[token]);
  for (int pair = lane; pair < half; pair += kWarpSize) {
    const int at = kInterleaved ? 2 * pair : pair, to = kInterleaved ? at + 1 : pair + half;
    float a = feature(at), b = feature(to);
    if (head.is_rotated) {
      const float cos = row != nullptr ? row[pair] : not_a_number();
      const float sin = row != nullptr ? row[half + pair] : not_a_number();
      rotate_pair(a, b, cos, sin);
    }
    head.out[at] = from_float<scalar_t>(a);
    head.out[to] = from_float<scalar_t>(b);
  }
  for (int i = job.rotary_dim + lane; i < job.head_dim; i += kWarpSize) {
    head.out[i] = from_float<scalar_t>(feature(i));
  }
}

#define ENGINE_QK_NORM_ROPE_STORE(name, min_blocks, function)                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, min_blocks) name(                        \
      scalar_t* q, const scalar_t* k, const scalar_t* v, const int* positions,                    \
      const float* cos_sin, scalar_t* k_pages, scalar_t* v_pages, const int64_t* slot_mapping,    \
      const scalar_t* q_weight, const scalar_t* k_weight, int64_t q_stride_t, int64_t q_stride_h, \
      int64_t k_stride_t, int64_t k_stride_h, int64_t v_stride_t, int64_t v_stride_h,             \
      int64_t num_slots, int num_positions, int num_q_heads, int num_kv_heads, int head_dim,      \
      int rotary_dim, int block_size, int heads_per_block, float eps, float weight_offset) {      \
    pdl_wait();                                                                                   \
    pdl_trigger(); /* after the wait: attention relies on it, see its `pdl` */                    \
    function(Job{q,           k,                                                                  \
                 v,           positions,                                                          \
                 cos_sin,     k_pages,                                                            \
                 v_pages,     slot_mapping,                                                       \
                 q_weight,    k_weight,                                                           \
                 q_stride_t,  q_stride_h,                                                         \
                 k_stride_t,  k_stride_h,                                                         \
                 v_stride_t,  v_stride_h,                                                         \
                 num_slots,   num_positions,                                                      \
                 num_q_heads, num_kv_heads,                                                       \
                 head_dim,    rotary_dim,                                                         \
                 block_size,  heads_per_block,                                                    \
                 eps,         weight_offset});                                                    \
  }

ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_half_vector, kMinBlocks, process_vectors<false>)
ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_half_scalar, 8, process_scalars<false>)
ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_interleaved_vector, kMinBlocks, process_vectors<true>)
ENGINE_QK_NORM_ROPE_STORE(qk_norm_rope_store_interleaved_scalar, 8, process_scalars<true>)
