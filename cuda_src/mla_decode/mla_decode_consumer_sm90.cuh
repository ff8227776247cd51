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
// One buffer for P is enough: a thread has read P of tile j before it writes P of tile j + 1. Only
// two tiles fit in shared memory, so a part of a stage is released as soon as its last product has
// ended: in the midst of a softmax for the other warpgroup's tiles.
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

  // Processes the key tiles of a work tile.
  __device__ __forceinline__ void run(const TileRows& rows, const WorkTile& work) {
    const int n = work.num_tiles;
    reset();
    if constexpr (kGroup == 0) {
      float s[kKeys / 2];
      start_scores(s, work, 0);
      wgmma_wait<0>();
      wgmma_pin(s);
      ring_.release(first_, kRopePart);
      own_tile(s, rows, work, 0);
    }
    int tile = 1 - kGroup;  // the other warpgroup's tile
#pragma unroll 1
    for (; tile + 1 < n; tile += 2) {
      float s[kKeys / 2];
      wgmma_wait<0>();  // P V of this warpgroup's previous tile, whose stage the next one may use
      wgmma_pin(o_);
      if (tile > 0) ring_.release(first_ + tile - 1, kGroup);
      start_scores(s, work, tile + 1);
      other_tile(tile);
      wgmma_wait<1>();
      wgmma_pin(s);
      ring_.release(first_ + tile + 1, kRopePart);
      own_tile(s, rows, work, tile + 1);
    }
    wgmma_wait<0>();
    if (tile > 0) ring_.release(first_ + tile - 1, kGroup);
    if (tile < n) {
      other_tile(tile);
      wgmma_wait<0>();
      ring_.release(first_ + tile, kGroup);
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
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (threadIdx.x % 4 == 0) st_shared(sums(kGroup) + row_of(i) * 4, __float_as_int(sum_[i]));
    // SAFETY: sums have barriers of their own. A warp may arrive there before the other one has
    // waited for P of the last tile: two phases of one barrier would look like none.
    hand_over(kSumsReadyAt);
    wait_for_other(kSumsReadyAt, num_stored_++);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      total[i] = sum_[i] + __int_as_float(ld_shared(sums(kGroup ^ 1) + row_of(i) * 4));
    // SAFETY: the next work tile begins once all consumers have read Q, P and the sums of this one.
    mbarrier_arrive(smem_ + kQEmptyAt);
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
  static constexpr int kGroupBarrier = 1;    // named barriers 1 and 2: a warpgroup
  static constexpr float kBaseRange = 8.0f;  // log2

  unsigned smem_;
  Ring ring_;
  float score_factor_;
  unsigned first_ = 0;         // number of the work tile's first tile
  unsigned num_received_ = 0;  // P of the other warpgroup's tiles, since the CTA's start
  unsigned num_stored_ = 0;    // work tiles, since the CTA's start
  float o_[kColumns / 2];
  float base_[2], sum_[2];  // of rows row_of(0) and row_of(1)

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarpSize % 4; }
  __device__ __forceinline__ static int row_of(int i) {
    return warp() * 16 + threadIdx.x % kWarpSize / 4 + i * 8;
  }
  __device__ __forceinline__ unsigned exchange() const {
    return smem_ + kExchangeAt + threadIdx.x % kGroupThreads * 16;
  }
  __device__ __forceinline__ unsigned sums(int group) const {
    return smem_ + kSumsAt + group * kRows * 4;
  }

  // Tell the other warpgroup's warp of the same rows that this warp has written to shared memory;
  // wait until it has, for the i-th time. `barriers`: kHandoffsAt or kSumsReadyAt.
  __device__ __forceinline__ void hand_over(int barriers) const {
    mbarrier_arrive(smem_ + barriers + (kGroup * 4 + warp()) * 8);
  }
  __device__ __forceinline__ void wait_for_other(int barriers, unsigned i) const {
    mbarrier_wait(smem_ + barriers + ((kGroup ^ 1) * 4 + warp()) * 8, i & 1);
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
    const int count = work.num_keys - (work.first_key + tile * kKeys);
    if (count < kKeys) clear_beyond(count, first_ + tile);
    add_scores<kRopePart>(s, first_ + tile);
    add_scores<kGroup>(s, first_ + tile);
    add_scores<kGroup ^ 1>(s, first_ + tile);
    wgmma_commit();
  }

  template <int kPart>
  __device__ __forceinline__ void add_scores(float (&s)[kKeys / 2], unsigned tile) const {
    ring_.wait_full(tile, kPart);
    wgmma_fence();
    const uint64_t q = opaque(wgmma_descriptor(smem_ + kPart * kHalfChunks * kChunkBytes));
    const uint64_t k = descriptor<kPart>(ring_.part(tile, kPart), 16);
#pragma unroll
    for (int chunk = 0; chunk < chunks_of(kPart); ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        wgmma<kKeys>(s, q + (chunk * kChunkBytes + i * 32) / 16, k + (chunk * 1024 + i * 32) / 16,
                     kPart != kRopePart || i > 0);
  }

  // Descriptor of a part of a tile, whose groups of 8 keys are chunks_of(kPart) * 1024 bytes apart.
  template <int kPart>
  __device__ __forceinline__ static uint64_t descriptor(unsigned address, unsigned chunk_bytes) {
    return opaque(static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
                  static_cast<uint64_t>(chunk_bytes >> 4) << 16 |
                  static_cast<uint64_t>(chunks_of(kPart) * 64) << 32 | 1ull << 62);
  }
  __device__ __forceinline__ static uint64_t opaque(uint64_t x) {
    asm volatile("" : "+l"(x));
    return x;
  }

  // Clears the latents of a tile's keys from `count` on: P is 0 there, but 0 * NaN would reach the
  // sum. The tile's owner calls it.
  __device__ __forceinline__ void clear_beyond(int count, unsigned tile) const {
    ring_.wait_full(tile, 0);
    ring_.wait_full(tile, 1);
    constexpr int kWords = kLatent / 8, kHalfWords = kWords / 2;
    for (int i = count * kWords + threadIdx.x % kGroupThreads; i < kKeys * kWords;
         i += kGroupThreads) {
      const int key = i / kWords, part = i % kWords / kHalfWords, word = i % kHalfWords;
      st_shared_v4(ring_.part(tile, part) + key / 8 * kHalfChunks * 1024 + word / 8 * 1024 +
                       key % 8 * 128 + word % 8 * 16,
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
    exponentiate(s, factor[0], 0);
    wgmma_wait_after(sum_[0], exchange());
    wgmma_wait<0>();  // P V of the other warpgroup's tile, whose stage its next load needs
    wgmma_pin(o_);
    if (tile > 0) ring_.release(first_ + tile - 1, kGroup);
    exponentiate(s, factor[1], 1);
    unsigned p[kKeys / 4];
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = pack2<scalar_t>(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      st_shared_v4(exchange() + i * kGroupThreads * 16, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                   p[4 * i + 3]);
    st_shared_v4(exchange() + kKeys / 16 * kGroupThreads * 16, base_[0], base_[1], factor[0],
                 factor[1]);
    hand_over(kHandoffsAt);
    rescale(factor);
    multiply(p, tile);
  }

  // Receives P of one of the other warpgroup's tiles, and starts P V.
  __device__ __forceinline__ void other_tile(int tile) {
    wait_for_other(kHandoffsAt, num_received_++);
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
    ring_.wait_full(first_ + tile, kGroup);
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

  // Replaces the scores of row_of(i) by 2^(score - base), and adds them to its sum. Moves its base
  // if necessary; `factor` receives what O must be multiplied by.
  __device__ __forceinline__ void exponentiate(float (&s)[kKeys / 2], float& factor, int i) {
    float top = -kInf;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
      top = fmaxf(top, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2)) * score_factor_;
    const float base = top > base_[i] + kBaseRange ? top : base_[i];
    factor = base == base_[i] ? 1.0f : exp2_approx(base_[i] - base);
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
    sum_[i] = sum_[i] * factor + sum;
  }

  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
    if (!__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) o_[i] *= factor[i / 2 % 2];
  }

  // Starts O += P V with this warpgroup's columns of V.
  __device__ __forceinline__ void multiply(const unsigned (&p)[kKeys / 4], int tile) {
    const uint64_t v = descriptor<kGroup>(ring_.part(first_ + tile, kGroup), 1024);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      wgmma_transposed<kColumns>(o_, a, v + i * 2 * kHalfChunks * 64);
    }
    wgmma_commit();
  }
};
