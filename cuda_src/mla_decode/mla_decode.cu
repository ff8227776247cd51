// Multi-head latent attention, absorbed: the newest tokens against pages of latents.
//
//   out = softmax(scale (Q C^T + Qr Kr^T) + mask) C     for every sequence b and query head h
//
// All heads share the keys [C | Kr] of a sequence, L latents and R rotated values a token, and the
// values are the latents C. Query i of Q sees keys 0 to len - Q + i.
//
// Arguments: MlaDecodeParams, below.
// Macros: LATENT and ROPE, L and R padded; ENGINE_DTYPE 0 is float32.
//
// Numerics: scores, softmax and sums are in float; P is relative to the row's running maximum, and
// rounded to scalar_t before P C. Partials are weighted by 2^(base - largest base) and summed in
// key order.
// Parallelisation: a CTA processes one split of a sequence's keys for kRows rows (token, head),
// kKeys keys at a time. For the scores its warps divide the keys and the columns, whose partial
// sums meet in shared memory; for the softmax, the rows; for P C, the columns of C. Lengths are
// read only on the device, so a captured graph stays valid while sequences grow.
// Mirror: engine/reference/mla_decode.py
#include "common/mma.cuh"
#include "common/sequence_length.cuh"
#include "mla_decode/mla_decode_combine.cuh"

constexpr bool kIsFloat = sizeof(scalar_t) == 4;
constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kKeys = 32, kRows = kIsFloat ? 8 : 16;
constexpr int kStages = kIsFloat ? 1 : 2;
constexpr int kParts = kIsFloat ? 1 : 2;                // partial sums per score
constexpr int kProbPitch = kKeys + (kIsFloat ? 0 : 8);  // padding against bank conflicts
using Layout = TileLayout<kWidth>;

// Parameters. Strides are in elements.
struct MlaDecodeParams {
  const scalar_t* q;        // (B, Q, H, L) queries multiplied by the keys' up-projection
  const scalar_t* q_rope;   // (B, Q, H, R) rotated queries
  const scalar_t* pages;    // (P, block_size, L + R)
  const int* block_tables;  // (B, NB) token j is in page block_tables[b, j / block_size]
  const int* context_lens;  // (B,) number of keys per sequence, including the Q new ones
  scalar_t* out;            // (B, Q, H, L)
  float* lse;               // (B, Q, H) contiguous, or null
  float* partial_o;         // (B * num_splits, rows, kLatent) sums of P C; unused if one split
  float* partial_stats;     // (B * num_splits, rows, 2) base (log2), sum of P
  int4* splits;  // (B,) SplitList, written here, read by mla_decode_combine; null if one split
  int64_t q_stride_b, q_stride_t, q_stride_h;
  int64_t q_rope_stride_b, q_rope_stride_t, q_rope_stride_h;
  int64_t out_stride_b, out_stride_t, out_stride_h;
  int64_t table_stride;
  int64_t max_keys;                   // NB * block_size
  int batch, num_queries, num_heads;  // B, Q, H
  int block_shift, num_blocks;        // log2(block_size), P
  int64_t page_stride;
  int latent, rope;    // L, R
  int is_vector;       // all rows consist of whole, aligned 16-byte words
  int num_splits;      // splits per sequence, at least 1
  float score_factor;  // scale * log2(e)
};

struct Shared {
  scalar_t q[kRows * Layout::kPitch];
  scalar_t keys[kStages][kKeys * Layout::kPitch];
  float scores[kParts][kRows][kKeys];
  scalar_t probs[kRows * kProbPitch];
  float factor[kRows];            // of O, in the current tile
  float base[kRows], sum[kRows];  // of the finished rows
};
static_assert(sizeof(Shared) == SHARED_BYTES, "portable.py computes another size");

// Starts copying one 16-byte word of a row [first part | second part], padded to [kLatent | kRope].
template <bool kIsVector>
__device__ __forceinline__ void load_pair_word(scalar_t* to, const scalar_t* latent,
                                               const scalar_t* rope, int word,
                                               const MlaDecodeParams& p, bool valid) {
  constexpr int kLatentWords = kLatent / kVec;
  if (word < kLatentWords)
    load_word<kIsVector>(to, latent, word, p.latent, valid);
  else
    load_word<kIsVector>(to, rope, word - kLatentWords, p.rope, valid);
}

template <bool kIsVector>
__device__ __forceinline__ void load_query_rows(scalar_t* smem, const MlaDecodeParams& p, int b,
                                                int row_begin) {
  for (int i = threadIdx.x; i < kRows * Layout::kWords; i += kThreads) {
    const int row = row_begin + i / Layout::kWords, word = i % Layout::kWords;
    const bool valid = row < p.num_queries * p.num_heads;
    const int token = valid ? row / p.num_heads : 0, head = valid ? row % p.num_heads : 0;
    load_pair_word<kIsVector>(
        smem + Layout::offset(i / Layout::kWords, word),
        p.q + b * p.q_stride_b + token * p.q_stride_t + head * p.q_stride_h,
        p.q_rope + b * p.q_rope_stride_b + token * p.q_rope_stride_t + head * p.q_rope_stride_h,
        word, p, valid);
  }
}

// Keys from `end` on are not read but filled with zeros: they may hold NaN.
template <bool kIsVector>
__device__ __forceinline__ void load_keys(scalar_t* smem, const MlaDecodeParams& p,
                                          const int* table, int first_key, int end) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kKeys * Layout::kWords; i += kThreads) {
    const int key = first_key + i / Layout::kWords, word = i % Layout::kWords;
    const bool valid = key < end;
    const scalar_t* row = p.pages;
    if (valid)
      row += clamped_page(table[key >> p.block_shift], p.num_blocks) * p.page_stride +
             static_cast<int64_t>(key & ((1 << p.block_shift) - 1)) * (p.latent + p.rope);
    load_pair_word<kIsVector>(smem + Layout::offset(i / Layout::kWords, word), row, row + p.latent,
                              word, p, valid);
  }
}

// ---- products, on tensor cores or in float -----------------------------------------------------

#if ENGINE_DTYPE == 0
constexpr int kColumns = kLatent / kThreads;  // columns of O per thread
using Accumulators = float[kRows][kColumns];

__device__ __forceinline__ void score(Shared& smem, const scalar_t* keys) {
  const int key = threadIdx.x % kKeys, row = threadIdx.x / kKeys;
  float sum = 0.0f;
#pragma unroll 4
  for (int word = 0; word < Layout::kWords; ++word) {
    const Vec<float, 4> x = load_vec<float, 4>(smem.q + Layout::offset(row, word));
    const Vec<float, 4> y = load_vec<float, 4>(keys + Layout::offset(key, word));
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(x.v[i], y.v[i], sum);
  }
  smem.scores[0][row][key] = sum;
}

__device__ __forceinline__ void multiply(Accumulators& o, const Shared& smem,
                                         const scalar_t* keys) {
#pragma unroll
  for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[row][c] *= smem.factor[row];
#pragma unroll 4
  for (int key = 0; key < kKeys; ++key)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float value = keys[key * Layout::kPitch + c * kThreads + threadIdx.x];
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        o[row][c] = fmaf(smem.probs[row * kProbPitch + key], value, o[row][c]);
    }
}

// Passes each of the thread's values to `use(row, column, value)`.
template <typename Use>
__device__ __forceinline__ void for_each(const Accumulators& o, const Use& use) {
#pragma unroll
  for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int c = 0; c < kColumns; ++c) use(row, c * kThreads + threadIdx.x, o[row][c]);
}
#else
constexpr int kColumns = kLatent / kWarps;  // columns of O per warp
using Accumulators = float[kColumns / 8][4];

// Warp w sums half w % 2 of the columns for 8 keys.
__device__ __forceinline__ void score(Shared& smem, const scalar_t* keys) {
  constexpr int kSteps = kWidth / kParts / 32;  // of 32 columns
  static_assert(kWidth % (kParts * 32) == 0 && kWarps == kParts * kKeys / 8, "see above");
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int part = warp % kParts, first_key = warp / kParts * 8;
  float acc[4] = {};
#pragma unroll 3
  for (int step = 0; step < kSteps; ++step) {
    const int word = (part * kSteps + step) * 4;
    uint32_t a[2][4], b[4];
    ldmatrix_x4(b, keys + Layout::offset(first_key + lane % 8, word + lane / 8));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ldmatrix_x4(a[i], smem.q + Layout::offset(lane % 16, word + 2 * i + lane / 16));
      const uint32_t half[2] = {b[2 * i], b[2 * i + 1]};
      mma_m16n8k16<scalar_t>(acc, a[i], half);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    smem.scores[part][lane / 4 + i / 2 * 8][first_key + lane % 4 * 2 + i % 2] = acc[i];
}

__device__ __forceinline__ void multiply(Accumulators& o, const Shared& smem,
                                         const scalar_t* keys) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const float factor[2] = {smem.factor[lane / 4], smem.factor[lane / 4 + 8]};
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[j][i] *= factor[i / 2];
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t a[4];
    ldmatrix_x4(a, smem.probs + lane % 16 * kProbPitch + step * 16 + lane / 16 * 8);
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      uint32_t b[4];
      const int word = (warp * kColumns + j * 16) / 8 + lane / 16;
      ldmatrix_x4_trans(b, keys + Layout::offset(step * 16 + lane % 16, word));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t half[2] = {b[2 * i], b[2 * i + 1]};
        mma_m16n8k16<scalar_t>(o[2 * j + i], a, half);
      }
    }
  }
}

template <typename Use>
__device__ __forceinline__ void for_each(const Accumulators& o, const Use& use) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      use(lane / 4 + i / 2 * 8, warp * kColumns + j * 8 + lane % 4 * 2 + i % 2, o[j][i]);
}
#endif

// ---- softmax -----------------------------------------------------------------------------------

// A warp's rows warp + i * kWarps; a lane per key.
struct Softmax {
  static constexpr int kWarpRows = kRows / kWarps;
  float base[kWarpRows], sum[kWarpRows];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) base[i] = -kInf, sum[i] = 0.0f;
  }
  __device__ __forceinline__ static int row(int i) { return threadIdx.x / kWarpSize + i * kWarps; }

  // Turns the scores of a tile into P and the factor of O.
  __device__ __forceinline__ void update(Shared& smem, const RowRule& rule, int row_begin,
                                         int first_key, int end, float score_factor) {
    static_assert(kKeys == kWarpSize, "a lane per key");
    const int lane = threadIdx.x % kWarpSize, key = first_key + lane;
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      float x = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) x += smem.scores[part][row(i)][lane];
      const int last = rule.last_key(min(row_begin + row(i), rule.count - 1));
      x = key < end && key <= last ? x * score_factor : -kInf;
      const float top = fmaxf(base[i], warp_max(x));
      const float factor = exp2_approx(base[i] - finite_or_zero(top));
      const float prob = exp2_approx(x - finite_or_zero(top));
      sum[i] = sum[i] * factor + warp_sum(prob);
      base[i] = top;
      smem.probs[row(i) * kProbPitch + lane] = from_float<scalar_t>(prob);
      if (lane == 0) smem.factor[row(i)] = factor;
    }
  }
  __device__ __forceinline__ void finish(Shared& smem) const {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i)
      if (threadIdx.x % kWarpSize == 0) smem.base[row(i)] = base[i], smem.sum[row(i)] = sum[i];
  }
};

// ---- kernel ------------------------------------------------------------------------------------

template <bool kIsVector>
__device__ __forceinline__ void process(const MlaDecodeParams& p, Shared& smem, Accumulators& o,
                                        const RowRule& rule, int b, int row_begin, int begin,
                                        int end) {
  const int* table = p.block_tables + b * p.table_stride;
  const int num_tiles = (max(end - begin, 0) + kKeys - 1) / kKeys;
  Softmax softmax;
  load_query_rows<kIsVector>(smem.q, p, b, row_begin);
  if (num_tiles > 0) load_keys<kIsVector>(smem.keys[0], p, table, begin, end);
  cp_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int first_key = begin + tile * kKeys;
    const scalar_t* keys = smem.keys[tile % kStages];
    if (kStages > 1 && tile + 1 < num_tiles)
      load_keys<kIsVector>(smem.keys[(tile + 1) % kStages], p, table, first_key + kKeys, end);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    score(smem, keys);
    __syncthreads();
    softmax.update(smem, rule, row_begin, first_key, end, p.score_factor);
    __syncthreads();
    multiply(o, smem, keys);
    __syncthreads();
    if (kStages == 1 && tile + 1 < num_tiles)
      load_keys<kIsVector>(smem.keys[0], p, table, first_key + kKeys, end);
    if (kStages == 1) cp_async_commit();
  }
  softmax.finish(smem);
  __syncthreads();
}

__device__ __forceinline__ void write_rows(const MlaDecodeParams& p, const Shared& smem,
                                           const Accumulators& o, int b, int row_begin,
                                           int64_t partial) {
  const int num_rows = p.num_queries * p.num_heads;
  const int64_t lse_begin = static_cast<int64_t>(b) * num_rows;
  const RowOutput output{p.out + b * p.out_stride_b, p.lse == nullptr ? nullptr : p.lse + lse_begin,
                         p.out_stride_t, p.out_stride_h, p.num_heads};
  for_each(o, [&](int row, int column, float x) {
    if (row_begin + row >= num_rows || column >= p.latent) return;
    if (partial < 0)
      output.at(row_begin + row)[column] = from_float<scalar_t>(x * inverse_sum(smem.sum[row]));
    else
      p.partial_o[(partial * num_rows + row_begin + row) * kLatent + column] = x;
  });
  const int row = threadIdx.x;
  if (row >= kRows || row_begin + row >= num_rows) return;
  if (partial < 0)
    output.write_lse(row_begin + row, smem.base[row], smem.sum[row]);
  else
    store_vec(p.partial_stats + (partial * num_rows + row_begin + row) * 2,
              Vec<float, 2>{smem.base[row], smem.sum[row]});
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  Shared& smem = *reinterpret_cast<Shared*>(smem_bytes);
  const int b = blockIdx.x, row_tile = blockIdx.y, split = blockIdx.z;
  const int num_keys = sequence_length(p.context_lens, b, p.max_keys);
  const RowRule rule(p.num_queries, p.num_heads, num_keys, true, 0);
  const int tiles = (num_keys + kKeys - 1) / kKeys;
  const int chunk = max((tiles + p.num_splits - 1) / p.num_splits, 1) * kKeys;
  const int count = max((num_keys + chunk - 1) / chunk, 1);
  if (split == 0 && row_tile == 0 && threadIdx.x == 0 && p.splits != nullptr)
    p.splits[b] = SplitList{count, b * p.num_splits, b * p.num_splits, 1}.packed();
  if (split >= count) return;
  const int begin = split * chunk, end = min(begin + chunk, num_keys);
  Accumulators o = {};
  if (p.is_vector)
    process<true>(p, smem, o, rule, b, row_tile * kRows, begin, end);
  else
    process<false>(p, smem, o, rule, b, row_tile * kRows, begin, end);
  const int64_t partial = static_cast<int64_t>(b) * p.num_splits + split;
  write_rows(p, smem, o, b, row_tile * kRows, count == 1 ? -1 : partial);
}
