// Consumer warpgroups of mla_decode_sm90: scores, softmax and P V.
//
// The warpgroups take turns: the scores and softmax of tile j belong to warpgroup j % 2, and each
// warpgroup holds half of O's columns. Both need P of every tile: its owner keeps it in registers
// and passes it to the other warpgroup through shared memory, from each thread to the thread with
// the same rows and columns. One warpgroup's softmax overlaps with the other one's products:
//
//   warpgroup 0:  S0 | P0, P0 V0 | S2, P1 V1 | P2, P2 V2 | S4, P3 V3 | ...
//   warpgroup 1:  S1, P0 V0 | P1, P1 V1 | S3, P2 V2 | P3, P3 V3 | ...
//
// One buffer for P is enough: a thread has read P of tile j before it writes P of tile j + 1.
// The base of a row moves only if its maximum exceeds it by more than kBaseRange, so O is rarely
// rescaled.
#pragma once

#include "mla_decode/mla_decode_config_sm90.cuh"

// The rows of a row tile, and the keys they see.
struct TileRows {
  RowRule rule;
  int begin;  // first row

  __device__ __forceinline__ int last_key(int row) const {
    return rule.last_key(min(begin + row, rule.count - 1));
  }
  __device__ __forceinline__ bool exists(int row) const { return begin + row < rule.count; }
};

template <int kGroup>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(unsigned smem, float score_factor)
      : smem_(smem), ring_{smem}, score_factor_(score_factor) {}

  // Barrier across the consumers.
  __device__ __forceinline__ static void barrier() {
    named_barrier_sync<kConsumerThreads>(kAllBarrier);
  }

  // Copies the rows of Q to shared memory.
  __device__ __forceinline__ void load_queries(const MlaDecodeSm90Params& p, int b,
                                               const TileRows& rows) const {
    constexpr int kWords = kWidth / 8;
    const scalar_t* q = p.q + b * p.q_stride_b;
    const scalar_t* q_rope = p.q_rope + b * p.q_rope_stride_b;
#pragma unroll 6
    for (int i = threadIdx.x; i < kRows * kWords; i += kConsumerThreads) {
      const int row = i / kWords, word = i % kWords;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (rows.exists(row)) {
        const int token = (rows.begin + row) / p.num_heads, head = (rows.begin + row) % p.num_heads;
        const int column = word * 8;
        x = *reinterpret_cast<const uint4*>(
            column < kLatent ? q + token * p.q_stride_t + head * p.q_stride_h + column
                             : q_rope + token * p.q_rope_stride_t + head * p.q_rope_stride_h +
                                   (column - kLatent));
      }
      st_shared_v4(smem_ + word / 8 * kChunkBytes + row * 128 + (word ^ row) % 8 * 16, x.x, x.y,
                   x.z, x.w);
    }
    fence_async_proxy();  // wgmma reads them
    barrier();
  }

  // Processes the key tiles of a work tile.
  __device__ __forceinline__ void run(const TileRows& rows, const WorkTile& work) {
    const int n = work.num_tiles;
    reset();
    if constexpr (kGroup == 0) {
      float s[kKeys / 2];
      start_scores(s, work, 0);
      wgmma_wait<0>();
      wgmma_pin(s);
      own_tile(s, rows, work, 0);
    }
    int tile = 1 - kGroup;  // the other warpgroup's tile
#pragma unroll 1
    for (; tile + 1 < n; tile += 2) {
      float s[kKeys / 2];
      wgmma_wait<0>();  // P V of this warpgroup's previous tile, whose stage the next one may use
      wgmma_pin(o_);
      if (tile > 0) ring_.release(first_ + tile - 1);
      start_scores(s, work, tile + 1);
      other_tile(tile);
      wgmma_wait<1>();
      wgmma_pin(s);
      own_tile(s, rows, work, tile + 1);
    }
    wgmma_wait<0>();
    if (tile > 0) ring_.release(first_ + tile - 1);
    if (tile < n) {
      other_tile(tile);
      wgmma_wait<0>();
      ring_.release(first_ + tile);
    }
    wgmma_pin(o_);
    first_ += n;
  }

  // Passes the finished rows to a writer: writer.row(row, base, sum) once a row, then
  // writer.columns(row, exists, first column, o_, which of the thread's rows, factor).
  template <typename Writer>
  __device__ __forceinline__ void store(const TileRows& rows, const Writer& writer) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(kFullMask, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(kFullMask, sum_[i], 2);
    }
    const unsigned sums = smem_ + kExchangeAt;
    barrier();  // SAFETY: the last tile's P has been read.
    st_shared_v2(sums + threadIdx.x * 8, sum_[0], sum_[1]);
    barrier();
    const float2 other = ld_shared_v2(sums + (threadIdx.x ^ kGroupThreads) * 8);
    const float total[2] = {sum_[0] + other.x, sum_[1] + other.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(i);
      if (kGroup == 0 && threadIdx.x % 4 == 0 && rows.exists(row))
        writer.row(rows.begin + row, base_[i], total[i]);
      writer.template columns<kColumns>(rows.begin + row, rows.exists(row), kGroup * kColumns, o_,
                                        i, total[i]);
    }
  }

 private:
  // Named barriers: all consumers; a warpgroup (2 and 3); two warps of the same rows (4 to 11).
  static constexpr int kAllBarrier = 1, kGroupBarrier = 2, kPairBarrier = 4;
  static constexpr float kBaseRange = 8.0f;  // log2

  unsigned smem_;
  Ring ring_;
  float score_factor_;
  unsigned first_ = 0;  // number of the work tile's first tile
  float o_[kColumns / 2];
  float base_[2], sum_[2];  // of rows row_of(0) and row_of(1)

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarpSize % 4; }
  __device__ __forceinline__ static int row_of(int i) {
    return warp() * 16 + threadIdx.x % kWarpSize / 4 + i * 8;
  }
  __device__ __forceinline__ unsigned exchange() const {
    return smem_ + kExchangeAt + threadIdx.x % kGroupThreads * 16;
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o_[i] = 0.0f;
    base_[0] = base_[1] = -kInf;
    sum_[0] = sum_[1] = 0.0f;
  }

  // Starts S = Q K^T of a tile.
  __device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], const WorkTile& work,
                                               int tile) const {
    ring_.wait_full(first_ + tile);
    clear_beyond(work.num_keys - (work.first_key + tile * kKeys), first_ + tile);
    const uint64_t q = wgmma_descriptor(smem_);
    const uint64_t k = descriptor(ring_.tile(first_ + tile), 16);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma<kKeys>(s, q + (chunk * kChunkBytes + i * 32) / 16, k + (chunk * 1024 + i * 32) / 16,
                     chunk + i > 0);
    wgmma_commit();
  }

  // Descriptor of a tile of keys, whose groups of 8 keys are kKeyGroupBytes apart.
  __device__ __forceinline__ static uint64_t descriptor(unsigned address, unsigned chunk_bytes) {
    return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
           static_cast<uint64_t>(chunk_bytes >> 4) << 16 |
           static_cast<uint64_t>(kKeyGroupBytes >> 4) << 32 | 1ull << 62;
  }

  // Clears the latents of a tile's keys from `count` on: P is 0 there, but 0 * NaN would reach the
  // sum. The tile's owner calls it.
  __device__ __forceinline__ void clear_beyond(int count, unsigned tile) const {
    if (count >= kKeys) return;
    constexpr int kWords = kLatent / 8;
    for (int i = count * kWords + threadIdx.x % kGroupThreads; i < kKeys * kWords;
         i += kGroupThreads) {
      const int key = i / kWords, word = i % kWords;
      st_shared_v4(ring_.tile(tile) + key / 8 * kKeyGroupBytes + word / 8 * 1024 + key % 8 * 128 +
                       word % 8 * 16,
                   0u, 0u, 0u, 0u);
    }
    fence_async_proxy();
    named_barrier_sync<kGroupThreads>(kGroupBarrier + kGroup);
  }

  // Turns the complete scores of one of this warpgroup's tiles into P, passes it on, starts P V.
  __device__ __forceinline__ void own_tile(float (&s)[kKeys / 2], const TileRows& rows,
                                           const WorkTile& work, int tile) {
    const int first_key = work.first_key + tile * kKeys;
    if (first_key + kKeys - 1 > rows.rule.last_key_of_first_token) mask(s, rows, first_key);
    float factor[2];
    exponentiate(s, factor);
    unsigned p[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack2<scalar_t>(s[2 * i], s[2 * i + 1]);
    wgmma_wait<0>();  // P V of the other warpgroup's tile
    wgmma_pin(o_);
    if (tile > 0) ring_.release(first_ + tile - 1);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      st_shared_v4(exchange() + i * kGroupThreads * 16, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                   p[4 * i + 3]);
    st_shared_v4(exchange() + kKeys / 16 * kGroupThreads * 16, base_[0], base_[1], factor[0],
                 factor[1]);
    named_barrier_arrive<2 * kWarpSize>(kPairBarrier + kGroup * 4 + warp());
    rescale(factor);
    multiply(p, tile);
  }

  // Receives P of one of the other warpgroup's tiles, and starts P V.
  __device__ __forceinline__ void other_tile(int tile) {
    named_barrier_sync<2 * kWarpSize>(kPairBarrier + (kGroup ^ 1) * 4 + warp());
    unsigned p[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      ld_shared_v4(exchange() + i * kGroupThreads * 16, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                   p[4 * i + 3]);
    unsigned stats[4];
    ld_shared_v4(exchange() + kKeys / 16 * kGroupThreads * 16, stats[0], stats[1], stats[2],
                 stats[3]);
    const float factor[2] = {__uint_as_float(stats[2]), __uint_as_float(stats[3])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base_[i] = __uint_as_float(stats[i]);
      sum_[i] *= factor[i];
    }
    ring_.wait_full(first_ + tile);
    wgmma_pin(o_);
    rescale(factor);
    multiply(p, tile);
  }

  __device__ __forceinline__ void mask(float (&s)[kKeys / 2], const TileRows& rows,
                                       int first_key) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int last = rows.last_key(row_of(i)) - first_key - threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c > last) s[4 * j + 2 * i + c] = -kInf;
    }
  }

  // Replaces scores by 2^(score - base), and adds them to the sums. Moves the bases if necessary;
  // `factor` receives what O must be multiplied by.
  __device__ __forceinline__ void exponentiate(float (&s)[kKeys / 2], float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = -kInf;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
        top = fmaxf(top, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2)) * score_factor_;
      const float base = top > base_[i] + kBaseRange ? top : base_[i];
      factor[i] = base == base_[i] ? 1.0f : exp2_approx(base_[i] - base);
      base_[i] = base;
      const float minus_base = -finite_or_zero(base);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[4 * j + 2 * i + c];
          x = exp2_approx(fmaf(x, score_factor_, minus_base));
          sum += x;
        }
      sum_[i] = sum_[i] * factor[i] + sum;
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    if (!__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o_[i] *= factor[i / 2 % 2];
  }

  // Starts O += P V with this warpgroup's columns of V.
  __device__ __forceinline__ void multiply(const unsigned (&p)[kKeys / 4], int tile) {
    const uint64_t v =
        descriptor(ring_.tile(first_ + tile) + kGroup * (kColumns / 64) * 1024, 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      wgmma_transposed<kColumns>(o_, a, v + i * 2 * kKeyGroupBytes / 16);
    }
    wgmma_commit();
  }
};
