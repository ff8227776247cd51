// Attention patterns: the keys that a query sees depend only on its position, and are the same for
// all sequences and heads. A key tile that no query of a query tile sees is not loaded; partly
// visible tiles are masked, with bits computed in registers.
//
// There are two kinds. Blocks: one bit per block of positions and block of keys. Periodic: the
// query at position i sees key j if (i - j + offset) mod period < width.
#pragma once

#include "common/types.cuh"

struct Pattern {
  const unsigned* blocks;  // (num_q, words), bit j of a row: key block j is seen; null: periodic
  int words;
  int num_q, num_k;      // number of blocks; later positions see nothing, later keys are hidden
  int block_q, block_k;  // positions and keys per block; periodic: period and width
  int offset;            // periodic: 0 to period - 1

  __device__ __forceinline__ bool block(int q, int k) const {
    return blocks[static_cast<int64_t>(q) * words + k / 32] >> k % 32 & 1;
  }
  __device__ __forceinline__ int in_period(int x) const {
    const int rest = x % block_q;
    return rest < 0 ? rest + block_q : rest;
  }

  __device__ __forceinline__ bool sees(int position, int key) const {
    if (blocks == nullptr) return in_period(position - key + offset) < block_k;
    const int q = position / block_q, k = key / block_k;
    return position >= 0 && q < num_q && k < num_k && block(q, k);
  }

  // For queries at positions [first, last] and keys [begin, end): returns 0 if no query sees any
  // key, 3 if all queries see all keys, otherwise (or if unknown) 1.
  __device__ __forceinline__ int sees_tile(int first, int last, int begin, int end) const {
    if (blocks == nullptr) {
      const int span = last - first + end - 1 - begin;
      const int64_t high = static_cast<int64_t>(in_period(first - end + 1 + offset)) + span;
      const bool any = high - span < block_k || high >= block_q;
      return high < block_k || block_k == block_q ? 3 : any;
    }
    const int q_end = last / block_q + 1, k_begin = begin / block_k,
              k_end = (end - 1) / block_k + 1;
    bool all = first >= 0 && q_end <= num_q && k_end <= num_k, any = false;
    for (int q = max(first, 0) / block_q; q < min(q_end, num_q) && last >= 0; ++q)
      for (int word = k_begin / 32; word * 32 < min(k_end, num_k); ++word) {
        const unsigned wanted = bits_from(k_begin - 32 * word) & ~bits_from(k_end - 32 * word);
        const unsigned found = blocks[static_cast<int64_t>(q) * words + word] & wanted;
        any |= found != 0;
        all &= found == wanted;
      }
    return all ? 3 : any;
  }

  // Returns whether a query sees at most one contiguous range of any tile of `keys` keys that is
  // aligned to `keys`.
  __device__ __forceinline__ bool has_pieces(int keys) const {
    return blocks == nullptr ? block_q - block_k >= keys : block_k % keys == 0;
  }
  // Returns that range: it consists of `width` keys, and its last key is `key` + the returned
  // value.
  __device__ __forceinline__ int piece(int position, int key, int& width) const {
    width = block_k;
    if (blocks == nullptr) return in_period(position - key + offset);
    const int q = position / block_q, k = key / block_k;
    if (position < 0 || q >= num_q || k >= num_k || !block(q, k)) width = 0;
    return block_k - 1;
  }

  // Returns a bit mask of the thread's keys that a query sees: bit 2 j + e is key + 8 j + e, for j
  // < kKeys / 8 and e = 0, 1.
  template <int kKeys>
  __device__ __forceinline__ unsigned sees_of_thread(int position, int key) const {
    unsigned seen = 0;
    if (blocks == nullptr) {
      int end = in_period(position - key + offset) + 1;  // end of visible range [end - width, end)
#pragma unroll 1
      for (; end - block_k < kKeys; end += block_q) {
        seen |= range<kKeys>(end - block_k, end);
        if (end > kKeys) break;  // SAFETY: end + block_q might overflow
      }
      return seen;
    }
    const int q = position / block_q;
    if (position < 0 || q >= num_q) return 0;
#pragma unroll 1
    for (int k = key / block_k; k < num_k && k * block_k - key < kKeys; ++k)
      if (block(q, k)) seen |= range<kKeys>(k * block_k - key, (k + 1) * block_k - key);
    return seen;
  }

 private:
  static __device__ __forceinline__ unsigned bits_from(int first) {
    return first <= 0 ? ~0u : first >= 32 ? 0u : ~0u << first;
  }
  // Bit mask of the thread's keys in [begin, end), relative to its first key.
  template <int kKeys>
  static __device__ __forceinline__ unsigned range(int begin, int end) {
    return bits_from(count<kKeys>(begin)) & ~bits_from(count<kKeys>(end));
  }
  // Number of the thread's keys before `end`, which is also relative to its first key.
  template <int kKeys>
  static __device__ __forceinline__ int count(int end) {
    end = min(max(end, 0), kKeys);
    return end / 8 * 2 + min(end % 8, 2);
  }
};

// Builds the pattern from a kernel's parameters. All kernels have these fields (PARAMS in
// kernels/_attention_pattern.py); those compiled without patterns never read them.
template <typename Params>
__device__ __forceinline__ Pattern make_pattern(const Params& p) {
  return {p.pattern_blocks, p.pattern_words, p.pattern_num_q, p.pattern_num_k,
          p.pattern_q,      p.pattern_k,     p.pattern_offset};
}

// Iterates, from last to first, over the tiles of kKeys keys that some query of a query tile sees;
// without a pattern, over all of [begin, end). Each warp has its own iterator; all lanes must call
// next() together.
template <int kKeys, bool kPattern>
struct TileWalk {
  int n;          // current tile; less than `begin`: none is left
  bool is_whole;  // the pattern hides none of the tile's keys

  __device__ __forceinline__ TileWalk(const Pattern& pattern, int first_position, int last_position,
                                      int begin, int end)
      : n(end),
        is_whole(true),
        pattern(pattern),
        first(first_position),
        last(last_position),
        begin(begin),
        end(end),
        chunk((end + 31) & ~31),
        seen(0),
        whole(0) {
    next();
  }

  __device__ __forceinline__ void next() {
    if constexpr (!kPattern) {
      --n;
    } else {
      while (seen == 0) {
        if (chunk <= begin) {
          n = begin - 1;
          return;
        }
        chunk -= 32;
        const int tile = chunk + static_cast<int>(threadIdx.x % 32);
        const int kind = tile >= begin && tile < end
                             ? pattern.sees_tile(first, last, tile * kKeys, (tile + 1) * kKeys)
                             : 0;
        seen = __ballot_sync(~0u, kind != 0);
        whole = __ballot_sync(~0u, kind == 3);
      }
      const int bit = 31 - __clz(seen);
      seen ^= 1u << bit;
      n = chunk + bit;
      is_whole = whole >> bit & 1;
    }
  }

 private:
  const Pattern& pattern;
  const int first, last, begin, end;
  int chunk;             // tile that bit 0 of the masks represents
  unsigned seen, whole;  // remaining tiles with any, and with only, visible keys
};
