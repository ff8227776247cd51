// Warp roles of attention_backward_sm90: a producer warp that streams Q and dO to shared memory,
// two consumer warpgroups with 64 keys each, and two warps that add dQ to global memory.
//
// A block owns 128 keys of one key/value head. For every query tile, each consumer warpgroup
// computes
//
//   S^T = K Q^T, dP^T = V dO^T     64 keys x kQueries, in registers
//   dV += P^T dO, dK += dS^T Q     P^T and dS^T stay in registers, as A operands
//   dQ  = dS K                     dS goes through shared memory, as the sum is over the keys
//                                  of both warpgroups; each computes 64 x 64 of dQ
//
// dQ goes through shared memory and is added to a float array by bulk reductions: in any order or,
// with `order`, one block after another.
#pragma once

#include "attention_backward/attention_backward_problem.cuh"
#include "attention_backward/attention_backward_ptx_sm90.cuh"

// ---- work assignment ---------------------------------------------------------------------------

// Parameters of the launch, the same for all blocks.
struct BackwardProblem {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  const float* statistics;  // per query tile and head: log2-sum-exp2, then delta
  float* dq;                // per query tile and head: sums in accumulator order
  int* order;               // number of blocks that have added, per tile, head and half; or null
  int total_q, total_k, num_heads, group, causal;
};

// Index of a sequence's first query tile; tiles are numbered across all sequences. A tile holds
// queries of a single sequence, which costs up to one extra tile per sequence.
template <int kQueries>
__device__ __forceinline__ int first_query_tile(const Sequence& sequence, int b) {
  return static_cast<int>(sequence.q_begin) / kQueries + b;
}

// A block's keys, and the query tiles that see them.
struct KeyWork {
  int kv_head, key_block, num_key_blocks;
  int first_row;  // row of the block's first key in K and V
  int num_keys;   // number of the sequence's keys from there on
  int query_row;  // row of the sequence's first query in Q
  int num_queries;
  int last_key_of_first_query;  // relative to the block's first key
  int begin, tiles;             // first query tile that sees one of the keys; number of tiles
  int start;                    // tile visited first, relative to `begin`
  int first_tile;               // index of the sequence's first tile

  // Query tile visited in turn i.
  __device__ __forceinline__ int tile(int i) const {
    const int m = start + i;
    return begin + (m < tiles ? m : m - tiles);
  }
};

template <int kQueries, int kKeys>
__device__ __forceinline__ KeyWork find_work(const BackwardProblem& problem,
                                             const Sequence& sequence, int b, int kv_head,
                                             int key_block, bool rotates) {
  KeyWork work;
  const int first_key = key_block * kKeys, first_query = sequence.first_query(first_key);
  const int end_query = sequence.end_query(min(first_key + kKeys, sequence.num_k));
  const int end = (end_query + kQueries - 1) / kQueries;
  work.kv_head = kv_head;
  work.key_block = key_block;
  work.num_key_blocks = (sequence.num_k + kKeys - 1) / kKeys;
  work.first_row = static_cast<int>(sequence.k_begin) + first_key;
  work.num_keys = sequence.num_k - first_key;
  work.query_row = static_cast<int>(sequence.q_begin);
  work.num_queries = sequence.num_q;
  work.last_key_of_first_query = sequence.last_key_of_first_query - first_key;
  work.begin = first_query / kQueries;
  work.tiles = first_query < sequence.num_q ? end - work.begin : 0;
  work.start = 0;
  if (rotates && !problem.causal && work.num_keys > 0)
    work.start = static_cast<int>(static_cast<int64_t>(key_block) * end / work.num_key_blocks);
  work.first_tile = first_query_tile<kQueries>(sequence, b);
  return work;
}

// Number of blocks that add to dQ of query tile m before this one. Blocks add in the order in which
// they would reach the tile if all advanced at the same rate: descending from the last key block
// that sees the tile or, if blocks start on different tiles, from the last block that started at or
// before it.
template <int kQueries, int kKeys>
__device__ __forceinline__ int turn_of(const BackwardProblem& problem, const KeyWork& work, int m,
                                       bool rotates) {
  const int blocks = work.num_key_blocks;
  if (problem.causal) {
    // Later key blocks that the tile's last query also sees, one per kKeys keys.
    const int more = ((m + 1) * kQueries - 1 + work.last_key_of_first_query) / kKeys;
    return min(more, blocks - 1 - work.key_block);
  }
  if (!rotates) return blocks - 1 - work.key_block;
  const int last = (static_cast<unsigned>(m + 1) * blocks - 1) / static_cast<unsigned>(work.tiles);
  return last >= work.key_block ? last - work.key_block : last - work.key_block + blocks;
}

template <int kHeadDim, int kQueries>
struct Backward {
  static constexpr int kKeys = 128, kConsumerWarpgroups = 2, kStages = 2;
  static constexpr int kThreads = 128 * (kConsumerWarpgroups + 1);
  static constexpr int kChunks = kHeadDim / 64;  // chunks of 64 columns (128 bytes)
  static constexpr int kKeyChunk = kKeys * 128, kKeyBytes = kChunks * kKeyChunk;
  static constexpr int kQueryChunkBytes = kQueries * 128;
  static constexpr int kQueryTileBytes = kChunks * kQueryChunkBytes;
  static constexpr int kDsChunk = kKeys * 128, kDsBytes = kQueries / 64 * kDsChunk;
  static constexpr int kHalfFloats = 64 * 64, kHalfBytes = kHalfFloats * 4;  // half of a dQ tile
  static constexpr int kStatBytes = 2 * kQueries * 4;
  static constexpr int kStatStride = kStatBytes + 16;  // plus the last visible key: see `load_tile`
  static constexpr int kBarriers = 3 + 4 * kStages + 2 * kConsumerWarpgroups;
  static constexpr int kSharedBytes = 1024 + 2 * kKeyBytes + 2 * kStages * kQueryTileBytes +
                                      2 * kDsBytes + kConsumerWarpgroups * kHalfBytes +
                                      kStages * kStatStride + 8 * kBarriers;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters <= 3 * 168,
                "all that the block was launched with: else warpgroup_reg_alloc waits forever");
  static_assert(kQueries * kHeadDim == 2 * kHalfFloats, "dQ is 64 x 64 a warpgroup");

  // Shared-memory addresses of buffers and mbarriers.
  unsigned k, v, q, dout, ds, dq, stats;
  unsigned k_full, v_full, tail, q_full, q_empty, dout_full, dout_empty, dq_full, dq_empty;

  __device__ __forceinline__ explicit Backward(unsigned char* smem) {
    k = (smem_address(smem) + 1023) & ~1023u;
    v = k + kKeyBytes;
    q = v + kKeyBytes;
    dout = q + kStages * kQueryTileBytes;
    ds = dout + kStages * kQueryTileBytes;
    dq = ds + 2 * kDsBytes;
    stats = dq + kConsumerWarpgroups * kHalfBytes;
    k_full = stats + kStages * kStatStride;
    v_full = k_full + 8;
    tail = v_full + 8;
    q_full = tail + 8;
    q_empty = q_full + 8 * kStages;
    dout_full = q_empty + 8 * kStages;
    dout_empty = dout_full + 8 * kStages;
    dq_full = dout_empty + 8 * kStages;
    dq_empty = dq_full + 8 * kConsumerWarpgroups;
  }

  __device__ __forceinline__ void init_barriers() const {
    mbarrier_init(k_full, 1);
    mbarrier_init(v_full, 1);
    mbarrier_init(tail, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(q_full + 8 * i, 2);  // statistics, Q
      mbarrier_init(dout_full + 8 * i, 1);
      mbarrier_init(q_empty + 8 * i, 128 * kConsumerWarpgroups);  // all read statistics
      mbarrier_init(dout_empty + 8 * i, 4 * kConsumerWarpgroups);
    }
    for (int i = 0; i < kConsumerWarpgroups; ++i) {
      mbarrier_init(dq_full + 8 * i, 128);
      mbarrier_init(dq_empty + 8 * i, 1);
    }
    mbarrier_init_fence();
  }

  // ---- the producer warp -----------------------------------------------------------------------

  // Zeroes rows [valid, kRows) of a tile that has arrived: they belong to another sequence, and 0 *
  // NaN would reach the sums.
  template <int kRows>
  __device__ __forceinline__ void zero_rows(unsigned tile, int valid, int lane_idx) const {
    for (int chunk = 0; chunk < kChunks; ++chunk)
      for (int row = valid + lane_idx / 8; row < kRows; row += 4)
        st_shared_v4(tile + chunk * kRows * 128 + row * 128 + lane_idx % 8 * 16, 0.0f, 0.0f, 0.0f,
                     0.0f);
    fence_async_proxy();
    __syncwarp();
  }

  // Loads a tile of rows; only the first `valid` belong to this sequence.
  template <int kRows>
  __device__ __forceinline__ void load(unsigned to, const TensorMap* map, int head, int row,
                                       int valid, unsigned full, unsigned& tail_phase,
                                       int lane_idx) const {
    const bool whole = valid >= kRows;
    if (lane_idx == 0) {
      const unsigned barrier = whole ? full : tail;
      mbarrier_arrive_expect_tx(barrier, kChunks * kRows * 128);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        tma_load_3d(to + chunk * kRows * 128, map, 64 * chunk, head, row, barrier);
    }
    __syncwarp();
    if (!whole) {
      mbarrier_wait(tail, tail_phase);
      tail_phase ^= 1;
      zero_rows<kRows>(to, valid, lane_idx);
      if (lane_idx == 0) mbarrier_arrive(full);
    }
  }

  // Loads a tile of Q and its statistics, and stores after them the last key (relative to the
  // block's first) that the tile's first query sees.
  __device__ __forceinline__ void load_tile(const TensorMap* map, const float* statistics, int head,
                                            int row, int valid, int last, int stage,
                                            unsigned& tail_phase, int lane_idx) const {
    const unsigned full = q_full + 8 * stage, to = stats + stage * kStatStride;
    if (lane_idx == 0) {
      st_shared(to + kStatBytes, last);
      mbarrier_arrive_expect_tx(full, kStatBytes);
      bulk_load(to, statistics, kStatBytes, full);
    }
    load<kQueries>(q + stage * kQueryTileBytes, map, head, row, valid, full, tail_phase, lane_idx);
  }

  __device__ __forceinline__ void produce(const TensorMap* q_map, const TensorMap* k_map,
                                          const TensorMap* v_map, const TensorMap* dout_map,
                                          const BackwardProblem& problem,
                                          const KeyWork& work) const {
    if (work.tiles == 0) return;
    const int lane_idx = threadIdx.x % 32;
    unsigned tail_phase = 0;
    PipelineState<kStages> ring(1);
    int i = 0, head = work.kv_head * problem.group;
    load<kKeys>(k, k_map, work.kv_head, work.first_row, work.num_keys, k_full, tail_phase,
                lane_idx);
    for (int turn = work.tiles * problem.group; turn > 0; --turn) {
      const int query = work.tile(i) * kQueries;
      const int64_t place =
          static_cast<int64_t>(work.first_tile + work.tile(i)) * problem.num_heads + head;
      mbarrier_wait_to_overwrite(q_empty + 8 * ring.stage, ring.phase);
      load_tile(q_map, problem.statistics + place * 2 * kQueries, head, work.query_row + query,
                work.num_queries - query,
                work.last_key_of_first_query + (problem.causal ? query : 0), ring.stage, tail_phase,
                lane_idx);
      if (turn == work.tiles * problem.group)
        load<kKeys>(v, v_map, work.kv_head, work.first_row, work.num_keys, v_full, tail_phase,
                    lane_idx);
      mbarrier_wait(dout_empty + 8 * ring.stage, ring.phase);
      load<kQueries>(dout + ring.stage * kQueryTileBytes, dout_map, head, work.query_row + query,
                     work.num_queries - query, dout_full + 8 * ring.stage, tail_phase, lane_idx);
      ring.advance();
      if (++i == work.tiles) i = 0, ++head;
    }
  }

  // ---- the warps that add dQ, one per half -----------------------------------------------------

  __device__ __forceinline__ void add_dq(const BackwardProblem& problem, const KeyWork& work,
                                         int half, bool rotates) const {
    if (threadIdx.x % 32 != 0) return;
    unsigned phase = 0;
    int i = 0, head = work.kv_head * problem.group;
    for (int turn = work.tiles * problem.group; turn > 0; --turn) {
      const int m = work.tile(i);
      const int64_t place = static_cast<int64_t>(work.first_tile + m) * problem.num_heads + head;
      mbarrier_wait(dq_full + 8 * half, phase);
      phase ^= 1;
      if (problem.order != nullptr) {
        const int before = turn_of<kQueries, kKeys>(problem, work, m, rotates);
        while (load_acquire(problem.order + 2 * place + half) != before) {
        }
        fence_proxy_all();
      }
      bulk_add(problem.dq + (2 * place + half) * kHalfFloats, dq + half * kHalfBytes, kHalfBytes);
      bulk_commit();
      bulk_wait_read();
      mbarrier_arrive(dq_empty + 8 * half);
      if (problem.order != nullptr) {
        // SAFETY: the next block may add only after this one's sums have arrived.
        bulk_wait();
        fence_proxy_all();
        add_release(problem.order + 2 * place + half, 1);
      }
      if (++i == work.tiles) i = 0, ++head;
    }
    bulk_wait();
  }
};
