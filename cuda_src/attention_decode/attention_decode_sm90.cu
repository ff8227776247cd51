// attention_decode for Hopper: K and V loaded by TMA, equal work for all CTAs, a single launch.
//
// Same contract as attention_decode.cu, for 16-bit values, D = HEAD_DIM and up to kRows rows
// (token, head of the group) per key/value head. Compiled with NEW_TOKEN, it reads the newest token
// (Q = 1) from the raw output of the projection, and fuses qk_norm_rope_store.cu with bit-identical
// results. Parameters: AttentionDecodeSm90Params in attention_decode_config_sm90.cuh.
//
// Numerics: scores, softmax and sums are in float. P is relative to its own tile's maximum
// (exponentiate in attention_decode_consumer_sm90.cuh) and rounded to scalar_t before P V. Partials
// are weighted by 2^(base - largest base) and summed in key order, whichever CTA combines them.
// With PAGE_CODES the pages hold one-byte codes: attention_decode_codes_sm90.cuh.
// Parallelisation: one or two CTAs per SM, each with a producer warp, kConsumerWarps consumer warps
// and, with NEW_TOKEN and two CTAs per SM, three new-token warps that compute new tokens' rows one
// work tile ahead. decode_scheduler.cuh assigns keys to CTAs. For few sequences the
// CTAs of a cluster split one sequence and head, and exchange partials through distributed shared
// memory.
// Programmatic dependent launch: only lengths, tables and scales may be read before the preceding
// kernel has ended. With NEW_TOKEN only the new token's rows wait for it, while key tiles,
// positions, slots, angles and norm weights are already in flight; the new key and value are
// patched into their tiles in shared memory.
// Memory: a tile is 8 boxes of kBoxKeys tokens of one head. A box is 1 to 4 KB, contiguous in a
// page, and loaded by one copy each for K and V. TMA swizzles it to avoid bank conflicts
// (tile_offset). NOTE: for full bandwidth, boxes must start at multiples of 128 bytes in shared
// memory, and the tensor map must not promote L2 fetches to 256 bytes.
// Contract: lengths, tables and pages must not change during a launch. Every warp runs the
// scheduler on the lengths it reads, and warps that read different lengths may deadlock. With
// constant lengths a launch always ends: lengths are clamped to the table and ids to the pages, and
// a CTA waits for other CTAs only within a cluster, whose CTAs are co-scheduled. Counters that are
// not zero at launch corrupt a result but block nothing; an aborted launch ends the context.
// Mirror: engine/reference/attention_decode.py
#include "attention_decode/attention_decode_cluster_sm90.cuh"
#include "attention_decode/attention_decode_consumer_sm90.cuh"
#include "attention_decode/attention_decode_producer_sm90.cuh"

// Prefetches the first entries of a block table to L2, while the length that bounds the valid
// entries is still being loaded.
__device__ __forceinline__ void prefetch_table(const int* table, int64_t num_entries) {
  constexpr int kLine = 32;  // entries per cache line
  if (threadIdx.x * kLine < num_entries)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(table + threadIdx.x * kLine));
}

// Processes sequences without keys: stores their new tokens and writes zeros as results.
__device__ __forceinline__ void process_empty(const Cta& cta, Consumer& consumer) {
  EmptySequences empty;
  for (int b; (b = empty.next(cta.problem)) >= 0;) {
    if constexpr (kNewToken && !kHasNewTokenWarps)
      if (cta.p.slot_mapping[b] >= 0) consumer.compute_new_token(cta, b, true, -1);
    pdl_wait();  // the preceding kernel may read what the output overwrites
    write_empty(cta.output(b), cta.num_queries * cta.p.group);
  }
}

// Writes a work tile's rows or its partial. The last CTA of a sequence combines the partials.
__device__ __forceinline__ void store(const Cta& cta, Consumer& consumer, const RowRule& rows,
                                      const WorkTile& work) {
  const Output output = cta.output(work.b);
  if constexpr (kPushesPartials) {
    cluster_wait();  // SAFETY: do not write to the shared memory of a CTA that has not started.
    consumer.store(rows, PushedPartials{cta.smem});
    PushedPartials{cta.smem}.wait();  // SAFETY: a CTA must not exit before all data have arrived.
    combine_pushed(cta.smem, rows.count, output);
  } else if constexpr (kCluster > 1) {
    consumer.store(rows, cluster_partial(cta.smem));
    cluster_sync();
    combine_pulled(cta.smem, rows.count, output);
    cluster_sync();  // SAFETY: a CTA must not exit while others still read its shared memory.
  } else if (work.split.count == 1) {
    consumer.store(rows, output);
  } else {
    const AttentionDecodeSm90Params& p = cta.p;
    const Partials partials{p.partial_o, p.partial_stats, rows.count, p.num_kv_heads,
                            cta.kv_head()};
    const SplitOf& split = work.split;
    consumer.store(rows, partials.at(split.partial(split.index)));
    if (consumer.is_last(p.counters + split.counter * p.num_kv_heads + cta.kv_head(), split.count))
      combine(partials, split, cta, work.b);
  }
}

template <typename Scheduler>
__device__ __forceinline__ void consume(const Cta& cta, const Scheduler& scheduler) {
  // The preceding kernel may write the queries, and read what the output overwrites. With NEW_TOKEN
  // it has ended once the new token's rows are there.
  if constexpr (!kNewToken) pdl_wait();
  Consumer consumer(cta.smem, ScoreRule{cta.p.score_inner, cta.p.score_factor});
  if constexpr (kHasCodes) consumer.scale_keys(cta.p.k_scale[cta.kv_head()]);
  if constexpr (Scheduler::kIsCluster && !kNewToken)
    consumer.stage_queries(cta.queries(Scheduler::sequence()), cta.num_queries * cta.p.group,
                           cta.p.group);
  WarpSchedule& schedule = warp_schedule(cta.smem);
  schedule.scheduler = scheduler;
  if constexpr (!Scheduler::kIsCluster) process_empty(cta, consumer);
  while (schedule.next(cta.problem)) {
    WorkTile work = schedule.work;
    const RowRule rows = cta.rows(work);
    if constexpr (kNewToken && !kHasNewTokenWarps)
      consumer.compute_new_token(cta, work.b, has_last_key(work), new_key_of(cta, work));
    consumer.run(rows, work.num_keys, work.first_key, work.num_tiles);
    work = schedule.work;  // reloaded, as run() needs the registers
    store(cta, consumer, rows, work);
  }
}

// All warps after the consumers: the producer warp, then the new-token warps.
template <typename Scheduler>
__device__ __forceinline__ void produce(const Cta& cta, Scheduler& scheduler) {
  const int warp_idx = threadIdx.x / kWarpSize;
  if (warp_idx == kConsumerWarps) {
    Producer producer(cta);
    WorkTile work;
    while (scheduler.next(cta.problem, work)) producer.run(work);
  }
  if constexpr (kHasNewTokenWarps) {
    if (warp_idx > kConsumerWarps) {
      WarpSchedule& schedule = warp_schedule(cta.smem);
      schedule.scheduler = scheduler;
      NewTokenProducer{cta}.run(schedule);
    }
  }
  // All threads of a cluster must take part in its barriers.
  if constexpr (kPushesPartials) {
    cluster_wait();
  } else if constexpr (Scheduler::kIsCluster) {
    cluster_sync();
    cluster_sync();
  }
}

template <typename Scheduler>
__device__ __forceinline__ void attention_decode(const AttentionDecodeSm90Params& p,
                                                 unsigned char* smem) {
  const Cta cta(p, smem);
  pdl_trigger();
  if (threadIdx.x == 0) {
    QueryRing(smem_address(smem)).init();
    Ring(smem_address(smem)).init();
    if constexpr (kPushesPartials) PushedPartials{smem}.init(cta.num_queries * p.group);
  }
  if constexpr (kPushesPartials) cluster_arrive_relaxed();  // lets others send; init() has fenced
  if constexpr (Scheduler::kIsCluster) {
    const int b = Scheduler::sequence();
    // With many rows there are no registers to keep the address until the producer needs it.
    prefetch_table(cta.table(kRowTiles > 1 ? recomputed(b) : b), p.max_keys >> p.block_shift);
  }
  Scheduler scheduler(cta.problem);
  __syncthreads();

  if (threadIdx.x / kWarpSize >= kConsumerWarps) {
    if constexpr (kMovesRegisters) warpgroup_reg_dealloc<kProducerRegisters>();
    produce(cta, scheduler);
  } else {
    if constexpr (kMovesRegisters) warpgroup_reg_alloc<kConsumerRegisters>();
    consume(cta, scheduler);
  }
}

// A macro, since even __cluster_dims__(1, 1, 1) makes a cluster launch and a template cannot omit
// the attribute.
#if CLUSTER > 1
#define ENGINE_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define ENGINE_CLUSTER
#endif

extern "C" __global__ void ENGINE_CLUSTER __launch_bounds__(kThreads, kCtasPerSm)
    attention_decode_sm90(const __grid_constant__ AttentionDecodeSm90Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  attention_decode<Scheduler>(p, smem);
}
