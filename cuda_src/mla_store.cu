// Everything between the projections and mla_decode in one launch: the norm of the latent, the
// rotation of the shared key and of the queries, and the store to the page.
//
//   kv[t] = [rmsnorm(latent) * weight | rope(k_rope)],  pages[block, offset] = kv[t]
//   q_rope[t, h] = rope(q_rope[t, h])                   slot = block * block_size + offset
//
// A rotation pairs features i and i + R / 2. A position outside the table makes the rotated
// features NaN; a token whose slot is outside the pages is not stored. Arguments: MlaStoreParams.
//
// Numerics: float; rounded once after the norm and once after the rotation.
// Parallelisation: blockIdx.x is the token. Block 0 of a token processes its key; in the others a
// thread rotates kWidth pairs of up to kItems query heads.
// Mirror: engine/reference/mla_store.py
#include "common/packed.cuh"
#include "common/pdl.cuh"
#include "common/qk_head.cuh"

constexpr int kThreads = 128;
constexpr int kMaxLatent = 512, kValues = kMaxLatent / kThreads;  // latents per thread
constexpr int kItems = 4;                                         // query vectors per thread

struct MlaStoreParams {
  scalar_t* q_rope;             // (T, H, R) rotated in place
  scalar_t* kv;                 // (T, L + R) updated in place
  const scalar_t* weight;       // (L,)
  const int* positions;         // (T,) row of cos_sin
  const float* cos_sin;         // (P, R) contiguous; each row R/2 cosines, then R/2 sines
  scalar_t* pages;              // (pages, block_size, L + R), the tokens of a page contiguous
  const int64_t* slot_mapping;  // (T,)
  int64_t q_rope_stride_t, q_rope_stride_h, kv_stride_t, page_stride;  // elements
  int64_t num_slots;                                                   // pages * block_size
  int num_positions, num_heads;                                        // P, H
  int latent, rope;                                                    // L, R
  int block_size;
  float eps;
};

// Row of the page for a token, or null if it is not stored.
__device__ __forceinline__ scalar_t* page_row(const MlaStoreParams& p, int64_t slot) {
  if (slot < 0 || slot >= p.num_slots) return nullptr;
  return p.pages + slot / p.block_size * p.page_stride + slot % p.block_size * (p.latent + p.rope);
}

// Rotates kWidth pairs from pair `pair` on; writes them to `to` and, unless null, to `copy`.
template <int kWidth>
__device__ __forceinline__ void rotate(const MlaStoreParams& p, const float* angles, int pair,
                                       scalar_t* to, scalar_t* copy) {
  const int half = p.rope / 2;
  const Vec<scalar_t, kWidth> low = load_vec<scalar_t, kWidth>(to + pair);
  const Vec<scalar_t, kWidth> high = load_vec<scalar_t, kWidth>(to + half + pair);
  float cos[kWidth], sin[kWidth];
  load_rotation(angles, p.rope, pair, cos, sin);
  Vec<scalar_t, kWidth> a, b;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float x = to_float(low.v[i]), y = to_float(high.v[i]);
    rotate_pair(x, y, cos[i], sin[i]);
    a.v[i] = from_float<scalar_t>(x), b.v[i] = from_float<scalar_t>(y);
  }
  store_vec(to + pair, a);
  store_vec(to + half + pair, b);
  if (copy == nullptr) return;
  store_vec(copy + pair, a);
  store_vec(copy + half + pair, b);
}

template <int kWidth>
__device__ __forceinline__ void process_key(const MlaStoreParams& p, int64_t token,
                                            const float* angles) {
  __shared__ float smem_sums[kThreads / kWarpSize];
  scalar_t* const row = p.kv + token * p.kv_stride_t;
  scalar_t* const page = page_row(p, p.slot_mapping[token]);
  for (int i = threadIdx.x; i < p.rope / 2 / kWidth; i += kThreads) {
    rotate<kWidth>(p, angles, i * kWidth, row + p.latent,
                   page == nullptr ? nullptr : page + p.latent);
    if (kWidth > 1) break;  // vectors: at most one per thread
  }
  float x[kValues], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int column = i * kThreads + threadIdx.x;
    x[i] = column < p.latent ? to_float(row[column]) : 0.0f;
    sum = fmaf(x[i], x[i], sum);
  }
  const float scale = norm_scale(block_sum<kThreads / kWarpSize>(sum, smem_sums), p.latent, p.eps);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int column = i * kThreads + threadIdx.x;
    if (column >= p.latent) break;
    const scalar_t y = from_float<scalar_t>(normed(x[i], scale, p.weight[column], 0.0f));
    row[column] = y;
    if (page != nullptr) page[column] = y;
  }
}

template <int kWidth>
__device__ __forceinline__ void process(const MlaStoreParams& p) {
  const int64_t token = blockIdx.x;
  const float* angles = rotation_row(p.cos_sin, p.num_positions, p.rope, p.positions[token]);
  if (blockIdx.y == 0) {
    process_key<kWidth>(p, token, angles);
    return;
  }
  const int lanes = p.rope / 2 / kWidth;  // threads per head
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int item = ((blockIdx.y - 1) * kItems + i) * kThreads + threadIdx.x;
    const int head = item / lanes;
    if (head >= p.num_heads) break;
    rotate<kWidth>(p, angles, item % lanes * kWidth,
                   p.q_rope + token * p.q_rope_stride_t + head * p.q_rope_stride_h, nullptr);
  }
}

#define ENGINE_MLA_STORE(name, width)                                \
  extern "C" __global__ void __launch_bounds__(kThreads)             \
      name(const __grid_constant__ MlaStoreParams p) {               \
    pdl_wait();                                                      \
    pdl_trigger(); /* after the wait: mla_decode's `pdl` needs it */ \
    process<width>(p);                                               \
  }

ENGINE_MLA_STORE(mla_store_vector, kVec)
ENGINE_MLA_STORE(mla_store_scalar, 1)
