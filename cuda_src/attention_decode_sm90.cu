// attention_decode for Hopper: K and V streamed by bulk copies, equal work for every block, one
// launch.
//
// Same contract and shapes as attention_decode.cu, for 16-bit values, D = HEAD_DIM and up to kRows
// rows (token, head of the group) a key/value head. More scratch memory, see decode_plan.cuh:
//
//   partial_o     (slots, K, rows, D) float   a part's sum of P V, where a sequence is cut
//   partial_stats (slots, K, rows, 2) float   its maximum (log2), sum of P
//   counters      int, zero between launches: how many parts of a sequence and head are done
//
// Numerics: as attention_decode. Parts are combined in the order of the keys by whoever comes last,
// so a result does not depend on who that is.
// Parallelisation: one block an SM; one warp copies, kKeyWarps warps compute. For the scores they
// divide a tile's keys, for P V the columns of V: what they exchange is a row's maximum and P, with
// one barrier a tile; scores run one tile ahead. For few sequences a cluster of blocks divides one
// sequence and head, and puts the parts together through its shared memory.
// Overlap: lengths and tables may be read before the kernel in front has ended, the rest may not.
// Memory: a tile is 8 runs of kUnitKeys tokens, each contiguous in its page, one bulk copy each for
// K and V. Runs lie 16 bytes more than a multiple of 128 apart, and ldmatrix takes its 8 rows from
// the 8 runs: no bank conflicts without a swizzle. So token r of run u has index 8 r + u in a tile.
// Mirror: engine/reference/attention_decode.py
#include "common/decode_combine.cuh"

// The copying warp: lanes 0 to 7 fetch the runs of K, lanes 8 to 15 those of V.
struct Producer {
  Ring ring;
  const scalar_t* k;  // of this block's head
  const scalar_t* v;
  const int* block_tables;
  int64_t table_stride, page_stride;
  int block_shift, num_blocks;

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

  __device__ __forceinline__ void run(const DecodeProblem& problem, const Segment& segment) {
    const int begin = problem.rows(segment.num_keys).first_key(0), end = segment.num_keys;
    const int* table = block_tables + segment.b * table_stride;
    int first = segment.first_key >> block_shift;
    int ids = page_id(table, first, begin, end);
    int next_ids = page_id(table, first + kWarpSize, begin, end);
    wait_for_last_kernel();  // it may write the newest keys
#pragma unroll 1
    for (int i = 0; i < segment.num_tiles; ++i) {
      const int key = segment.first_key + i * kTileKeys;
      if (((key + kTileKeys - 1) >> block_shift) - first >= kWarpSize) {
        first += kWarpSize;
        ids = next_ids;
        next_ids = page_id(table, first + kWarpSize, begin, end);
      }
      const int unit_key = key + lane() % 8 * kUnitKeys;
      const int64_t page =
          __shfl_sync(kFullMask, ids, ((unit_key >> block_shift) - first) % kWarpSize);
      fetch(page * page_stride, unit_key, max(key, begin), min(key + kTileKeys, end));
    }
  }

  // One tile; its keys [begin, end) exist.
  __device__ __forceinline__ void fetch(int64_t offset, int unit_key, int begin, int end) {
    const int low = max(unit_key, begin), high = min(unit_key + kUnitKeys, end);
    const int tokens = max(high - low, 0), first_token = low - unit_key;
    const unsigned bytes = max(end - begin, 0) * kRowBytes;
    const bool is_v = lane() >= 8;
    const scalar_t* from = (is_v ? v : k) + offset +
                           ((unit_key + first_token) & ((1 << block_shift) - 1)) * kHeadDim;
    ring.wait_empty_k();
    if (lane() == 0) mbarrier_arrive_expect(ring.full_k(), bytes);
    const unsigned run = (is_v ? ring.v() : ring.k()) + lane() % 8 * kUnitPitch;
    const unsigned to = run + first_token * kRowBytes;
    if (!is_v && tokens > 0) bulk_load(to, from, tokens * kRowBytes, ring.full_k());
    ring.wait_empty_v();
    if (bytes < kTileKeys * kRowBytes)
      clear(run, tokens > 0 ? first_token : kUnitKeys,
            tokens > 0 ? first_token + tokens : kUnitKeys);
    if (lane() == 0) mbarrier_arrive_expect(ring.full_v(), bytes);
    if (is_v && lane() < 16 && tokens > 0)
      bulk_load(to, from, tokens * kRowBytes, ring.full_v());
    ring.advance();
  }

  // Zeros the tokens of V outside [low, high): P is 0 there, and 0 * NaN would reach the sum.
  __device__ __forceinline__ void clear(unsigned run, int low, int high) const {
    if (lane() >= 8 && lane() < 16) {
      for (int i = 0; i < kUnitKeys * kRowBytes; i += 16)
        if (i < low * kRowBytes || i >= high * kRowBytes)
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(run + i), "r"(0)
                       : "memory");
      fence_async_proxy();  // SAFETY: a later bulk copy overwrites these words.
    }
    __syncwarp();
  }
};

// Brings the first entries of a block table to L2 while the length, that says how many count, is
// read.
__device__ __forceinline__ void prefetch_table(const int* table, int64_t num_entries) {
  constexpr int kLine = 32;  // entries
  if (threadIdx.x * kLine < num_entries)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(table + threadIdx.x * kLine));
}

extern "C" __global__ void ENGINE_CLUSTER __launch_bounds__(kThreads, 1)
    attention_decode_sm90(const scalar_t* q, const scalar_t* k, const scalar_t* v,
                          const int* block_tables, const int* context_lens, scalar_t* out,
                          float* lse, float* partial_o, float* partial_stats, int* counters,
                          int64_t q_stride_b, int64_t q_stride_t, int64_t q_stride_h,
                          int64_t page_stride, int64_t table_stride, int64_t out_stride_b,
                          int64_t out_stride_t, int64_t out_stride_h, int64_t max_keys, int batch,
                          int num_queries, int num_heads, int num_kv_heads, int block_shift,
                          int num_blocks, int window, int num_splits, float score_inner,
                          float score_factor) {
  extern __shared__ __align__(128) unsigned char smem[];
  const int group = num_heads / num_kv_heads;
  const DecodeProblem problem{context_lens, max_keys, batch,  num_kv_heads,
                              num_queries,  group,    window, num_splits};
  const Ring ring(smem_address(smem));
  let_next_kernel_start();
  if (threadIdx.x == 0) ring.init();
#if CLUSTER > 1
  prefetch_table(block_tables + Cursor::sequence(problem) * table_stride, max_keys >> block_shift);
#endif
  Cursor cursor(problem);
  __syncthreads();

  const int kv_head = kCluster > 1 ? blockIdx.x / kCluster % num_kv_heads
                                   : blockIdx.x % num_kv_heads;
  const int head = kv_head * group;
  Segment segment;
  if (threadIdx.x / kWarpSize == kKeyWarps) {
    const int64_t head_begin = (static_cast<int64_t>(kv_head) << block_shift) * kHeadDim;
    Producer producer{ring,         k + head_begin, v + head_begin, block_tables,
                      table_stride, page_stride,    block_shift,    num_blocks};
    while (cursor.next(problem, segment)) producer.run(problem, segment);
    if constexpr (kCluster > 1) {  // all threads of a cluster must come by
      cluster_sync();
      cluster_sync();
    }
    return;
  }
  wait_for_last_kernel();  // it may write the queries
  Consumer consumer(smem, ring, ScoreRule{score_inner, score_factor});
  Progress& progress = reinterpret_cast<Progress*>(smem + kProgressAt)[threadIdx.x / kWarpSize];
  progress.cursor = cursor;
  while (progress.next(problem)) {
    segment = progress.segment;
    const RowRule rows = problem.rows(segment.num_keys);
    consumer.run(Queries{q + segment.b * q_stride_b + head * q_stride_h, q_stride_t, q_stride_h,
                         kHeadDim, true},
                 rows, segment.first_key, segment.num_tiles);
    segment = progress.segment;
    const int64_t lse_begin = static_cast<int64_t>(segment.b) * num_queries * num_heads + head;
    const Output output{out + segment.b * out_stride_b + head * out_stride_h,
                        out_stride_t,
                        out_stride_h,
                        lse == nullptr ? nullptr : lse + lse_begin,
                        num_heads,
                        group,
                        kHeadDim,
                        true};
    if constexpr (kCluster > 1) {
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
