// attention_decode for Hopper: K and V streamed by TMA, equal work for every block, one launch.
//
// Same contract and shapes as attention_decode.cu, for 16-bit values, D = HEAD_DIM and up to kRows
// rows (token, head of the group) a key/value head. More scratch memory, see plan.cuh:
//
//   k_map, v_map  the pages as (D / 64, P K block_size, 64): halves of rows, or whole ones
//   tree_masks    (B, Q) uint64               bit j of token i: it sees token j <= i; or null
//   partial_o     (slots, K, rows, D) float   a part's sum of P V, where a sequence is cut
//   partial_stats (slots, K, rows, 2) float   what it is relative to (log2), sum of P
//   counters      int, zero between launches: how many parts of a sequence and head are done
//
// Compiled with FRESH it takes the newest token (Q = 1) as the projection left it, and does first
// what qk_norm_rope_store.cu does, to the same bits; see new_token.cuh. In addition then:
//
//   fresh_k, fresh_v  (B, K, D) scalar_t      rows of the projection, as q
//   positions, slot_mapping  (B,)             int32 rows of cos_sin; int64 places in the pages
//   cos_sin           (P, D) float            cosines, then sines
//   q_weight, k_weight  (D,) scalar_t         of the norms; null: no norm
//   k, v                                      get the newest key and value
//
// Numerics: as attention_decode, but that P is relative to its own tile's maximum: see exponentiate in
// consumer.cuh. Parts are combined in the order of the keys by whoever comes last, so a result
// does not depend on who that is.
// Parallelisation: one or two blocks an SM; a warp copies, kKeyWarps compute. For the scores they
// divide a tile's keys, for P V the columns of V: what they exchange is a row's maximum and P, with
// one barrier a tile; scores run one tile ahead. For few sequences a cluster of blocks divides one
// sequence and head, and its blocks send each other the parts. With FRESH and two blocks an SM,
// outside of clusters, three more warps make the newest tokens' rows of the sequences that come next.
// Overlap: lengths and tables may be read before the kernel in front has ended, the rest may not.
// With FRESH only the rows wait: the tiles are on their way by then. The newest key and value are
// written into their tile in shared memory when it has landed, whatever the copy found in the pages.
// Memory: a tile is 8 units of kUnitKeys tokens of one head, 1 to 4 KB each, in one piece of its
// page, one copy each for K and V. TMA swizzles them, for ldmatrix without conflicts of banks;
// see tile_offset in ring.cuh. NOTE: the unit's place must be a multiple of 128 bytes, and the
// map without L2 promotion to 256 bytes: the one cost 5 % of the bandwidth, the other 7 %.
// Contract: lengths, tables and pages must not change while a launch runs. Every warp plans by the
// lengths as it finds them; if these differ, warps may wait for each other for ever. Whatever they
// are, if they stay so, a launch ends: lengths are cut to the table, ids to the pages, and no block
// waits for another but in a cluster, whose blocks run together. Counters that are not zero at the
// start spoil a result but stop nobody; a launch that was aborted takes them along with its context.
// Mirror: engine/reference/attention_decode.py
#include "attention_decode/combine.cuh"

// The copying warp: lanes 0 to 7 fetch the units of K, lanes 8 to 15 those of V, all of them Q.
struct Producer {
  Ring ring;
  QueryRing queries;
  const TensorMap* map;   // this lane's: of K or of V
  const scalar_t* pages;  // likewise
  const int* block_tables;
  int64_t table_stride;
  int token_parts;
  int block_shift, num_blocks, num_kv_heads, kv_head;

  __device__ __forceinline__ int lane() const { return threadIdx.x % kWarpSize; }

  // This lane's of 32 entries of a block table from `first` on. Only those of keys in [begin, end).
  __device__ __forceinline__ int page_id(const int* table, int first, int begin, int end) const {
    const int64_t key = static_cast<int64_t>(first + lane()) << block_shift;
    const bool valid = key < end && key + (1 << block_shift) > begin;
    // SAFETY: an id outside the cache is clamped, so a damaged table cannot make us read elsewhere.
    return valid ? min(static_cast<unsigned>(table[first + lane()]),
                       static_cast<unsigned>(num_blocks - 1))
                 : 0;
  }

  // The rows of Q of a segment.
  __device__ __forceinline__ void fetch_queries(const Queries& from, const RowRule& rows) {
    queries.wait_empty();
    if (lane() == 0) mbarrier_arrive_expect_tx(queries.full(), rows.count * kRowBytes);
    __syncwarp();
    for (int row = lane(); row < rows.count; row += kWarpSize)
      bulk_load(queries.q() + row * kQueryPitch,
                from.q + row / rows.group * from.token_stride + row % rows.group * from.head_stride,
                kRowBytes, queries.full());
    queries.advance();
  }

  __device__ __forceinline__ void run(const RowRule& rows, const Queries& from,
                                      const Segment& segment) {
    const int begin = rows.first_key(0), end = segment.num_keys;
    const int* table = block_tables + segment.b / token_parts * table_stride;
    int first = segment.first_key >> block_shift;
    int ids = page_id(table, first, begin, end);
    int next_ids = page_id(table, first + kWarpSize, begin, end);
    if constexpr (!kFresh) {
      pdl_wait();  // it may write queries, and the newest keys
      if constexpr (kCluster == 1) fetch_queries(from, rows);
    }
#pragma unroll 1
    for (int i = 0; i < segment.num_tiles; ++i) {
      const int key = segment.first_key + i * kTileKeys;
      if (((key + kTileKeys - 1) >> block_shift) - first >= kWarpSize) {
        first += kWarpSize;
        ids = next_ids;
        next_ids = page_id(table, first + kWarpSize, begin, end);
      }
      const int unit_key = key + lane() % 8 * kUnitKeys;
      const int page = __shfl_sync(kFullMask, ids, ((unit_key >> block_shift) - first) % kWarpSize);
      fetch(page, unit_key, begin, end);
    }
  }

  // One tile: the units with any of the keys [begin, end), whole. What else lies in them is masked.
  __device__ __forceinline__ void fetch(int page, int unit_key, int begin, int end) {
    const bool valid = unit_key < end && unit_key + kUnitKeys > begin && lane() < 16;
    const unsigned bytes = __popc(__ballot_sync(kFullMask, valid)) / 2 * kUnitBytes;
    const int row =
        ((page * num_kv_heads + kv_head) << block_shift) + (unit_key & ((1 << block_shift) - 1));
    const unsigned unit = lane() % 8 * kUnitPitch;
    ring.wait_empty_k();
    if (lane() == 0) mbarrier_arrive_expect_tx(ring.full_k(), bytes);
    if (valid && lane() < 8) copy(ring.k() + unit, row, ring.full_k());
    ring.wait_empty_v();
    if (lane() == 0) mbarrier_arrive_expect_tx(ring.full_v(), bytes);
    if (valid && lane() >= 8) copy(ring.v() + unit, row, ring.full_v());
    ring.advance();
  }

  // One unit; `row` is a row of the pages.
  __device__ __forceinline__ void copy(unsigned to, int row, unsigned barrier) const {
    if constexpr (kSwizzled)
      tma_load_3d(to, map, 0, row, 0, barrier);
    else
      bulk_load(to, pages + static_cast<int64_t>(row) * kHeadDim, kUnitBytes, barrier);
  }
};

// Brings the first entries of a block table to L2 while the length, that says how many count, is
// read.
__device__ __forceinline__ void prefetch_table(const int* table, int64_t num_entries) {
  constexpr int kLine = 32;  // entries
  if (threadIdx.x * kLine < num_entries)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(table + threadIdx.x * kLine));
}

extern "C" __global__ void ENGINE_CLUSTER __launch_bounds__(kThreads, kBlocksPerSm)
    attention_decode_sm90(const __grid_constant__ TensorMap k_map,
                          const __grid_constant__ TensorMap v_map, const scalar_t* q, scalar_t* k,
                          scalar_t* v, const int* block_tables, const int* context_lens,
                          const uint64_t* tree_masks, scalar_t* out, float* lse, float* partial_o,
                          float* partial_stats, int* counters, int64_t q_stride_b,
                          int64_t q_stride_t, int64_t q_stride_h, int64_t table_stride,
                          int64_t out_stride_b, int64_t out_stride_t, int64_t out_stride_h,
                          int64_t max_keys, int batch, int num_queries, int num_heads,
                          int num_kv_heads, int block_shift, int num_blocks, int window,
                          int num_splits, int token_parts, float score_inner,
                          float score_factor ENGINE_FRESH_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int group = num_heads / num_kv_heads;
  // Without clusters a constant: divisions by it cost nothing then.
  const int num_token_parts = kCluster > 1 ? token_parts : 1;
  const DecodeProblem problem{context_lens, max_keys, batch,      num_kv_heads,   num_queries,
                              group,        window,   num_splits, num_token_parts};
  pdl_trigger();
  if (threadIdx.x == 0) {
    QueryRing(smem_address(smem)).init();
    Ring(smem_address(smem)).init();
    if constexpr (kSends) Inbox{smem}.init(num_queries * group);
  }
  if constexpr (kSends) cluster_arrive_relaxed();  // others may send; the fence is part of init
#if CLUSTER > 1
  prefetch_table(block_tables + Cursor::sequence(problem) / num_token_parts * table_stride,
                 max_keys >> block_shift);
#endif
  Cursor cursor(problem);
  __syncthreads();

  const int kv_head =
      kCluster > 1 ? blockIdx.x / kCluster % num_kv_heads : blockIdx.x % num_kv_heads;
  const int head = kv_head * group;
  const auto queries = [&](int b) {
    const int sequence = b / num_token_parts, token = b % num_token_parts * num_queries;
    return Queries{q + sequence * q_stride_b + token * q_stride_t + head * q_stride_h, q_stride_t,
                   q_stride_h, kHeadDim, true};
  };
  Segment segment;
  const PageLayout layout{block_shift, num_blocks, num_kv_heads};
  Progress& progress = progress_of(smem);
  if (threadIdx.x / kWarpSize >= kKeyWarps) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kOtherRegisters>();
    if (threadIdx.x / kWarpSize == kKeyWarps) {
      const bool is_k = threadIdx.x % kWarpSize < 8;
      Producer producer{Ring(smem_address(smem)),
                        QueryRing(smem_address(smem)),
                        is_k ? &k_map : &v_map,
                        is_k ? k : v,
                        block_tables,
                        table_stride,
                        num_token_parts,
                        block_shift,
                        num_blocks,
                        num_kv_heads,
                        kv_head};
      if constexpr (kSwizzled) tma_prefetch_map(producer.map);
      while (cursor.next(problem, segment)) {
        producer.run(problem.rows(segment.num_keys), queries(segment.b), segment);
      }
    }
    if constexpr (kMakesAhead) {
      if (threadIdx.x / kWarpSize > kKeyWarps) {
        const FreshRows rows = ENGINE_FRESH_ROWS;
        progress.cursor = cursor;
        Maker{rows, layout, smem, kv_head, group}.run(problem, progress, block_tables,
                                                      table_stride);
      }
    }
    if constexpr (kCluster > 1) {  // all threads of a cluster must come by
      if constexpr (kSends) {
        cluster_wait();
      } else {
        cluster_sync();
        cluster_sync();
      }
    }
    return;
  }
  if constexpr (kMovesRegisters) warpgroup_reg_alloc<kKeyRegisters>();
  // It may write the queries, and read what the output overwrites.
  if constexpr (!kFresh || kMakesAhead) pdl_wait();
  Consumer consumer(smem, ScoreRule{score_inner, score_factor});
#if CLUSTER > 1 && !FRESH
  consumer.stage_queries(queries(Cursor::sequence(problem)), num_queries * group, group);
#endif
  progress.cursor = cursor;
  const auto output_of = [&](int b) {
    const int64_t lse_begin = static_cast<int64_t>(b) * num_queries * num_heads + head;
    const int sequence = b / num_token_parts, token = b % num_token_parts * num_queries;
    return Output{out + sequence * out_stride_b + token * out_stride_t + head * out_stride_h,
                  out_stride_t,
                  out_stride_h,
                  lse == nullptr ? nullptr : lse + lse_begin,
                  num_heads,
                  group,
                  kHeadDim,
                  true};
  };
  if constexpr (kCluster == 1)
    for_each_empty(problem, [&](int b) {
      if constexpr (kFresh && !kMakesAhead) {
        const FreshRows rows = ENGINE_FRESH_ROWS;
        if (rows.slot_mapping[b] >= 0)
          consumer.make_fresh(rows, layout, Segment{b, 0, 0, 1}, nullptr, kv_head, group);
        else
          pdl_wait();  // it may read what the output overwrites
      }
      write_empty(output_of(b), num_queries * group);
    });
  while (progress.next(problem)) {
    segment = progress.segment;
    RowRule rows = problem.rows(segment.num_keys);
    if (tree_masks != nullptr) {
      rows.tree = tree_masks + static_cast<int64_t>(segment.b) * num_queries;
      rows.earlier = segment.b % num_token_parts * num_queries;
    }
    if constexpr (kFresh && !kMakesAhead)
      consumer.make_fresh(ENGINE_FRESH_ROWS, layout, segment,
                          block_tables + segment.b * table_stride, kv_head, group);
    consumer.run(rows, segment.num_keys, segment.first_key, segment.num_tiles);
    segment = progress.segment;
    const Output output = output_of(segment.b);
    if constexpr (kSends) {
      cluster_wait();  // SAFETY: before a block has begun, nobody may write its shared memory.
      consumer.store(rows, Inbox{smem});
      Inbox{smem}.wait();  // SAFETY: whoever leaves has all that is sent to it.
      combine_inbox(smem, rows.count, output);
    } else if constexpr (kCluster > 1) {
      consumer.store(rows, cluster_partial(smem));
      cluster_sync();
      combine_cluster(smem, rows.count, output);
      cluster_sync();  // SAFETY: a block's shared memory is gone when it leaves.
    } else if (segment.parts.count == 1) {
      consumer.store(rows, output);
    } else {
      const Partials partials{partial_o, partial_stats, rows.count, num_kv_heads, kv_head};
      consumer.store(rows, partials.at(segment.parts.slot(segment.parts.part)));
      if (consumer.is_last(counters + segment.parts.counter * num_kv_heads + kv_head,
                           segment.parts.count)) {
        if (segment.parts.count <= 4)
          combine<kCombineLoads / 4, 4>(partials, segment.parts, output);
        else
          combine<1, kCombineLoads>(partials, segment.parts, output);
      }
    }
  }
}
