// mla_decode for Hopper: pages loaded by TMA, wgmma, equal work for all CTAs.
//
// Same contract as mla_decode.cu, for 16-bit values, R = 64 and L = 256 or 512. Parameters:
// MlaDecodeSm90Params in mla_decode_config_sm90.cuh.
//
// Numerics: scores, softmax and sums are in float. P is relative to a base close to the row's
// running maximum, and rounded to scalar_t before P V. Partials are weighted by 2^(base - largest
// base) and summed in key order.
// Parallelisation: one CTA per SM, with two consumer warpgroups and two producer warps. A CTA
// processes a row tile of 64 rows (token, head). common/decode_scheduler.cuh assigns keys to CTA
// groups of one CTA per row tile, so the keys are read from L2 once per row tile and from memory
// once. The values of a tile of keys are the first L of its L + R columns, in place: a tile is
// loaded once, 72 KB for L = 512. With up to 64 rows the kernel is bound by memory, with 128 by the
// tensor cores.
// mla_decode_combine then sums the partials of sequences that several CTA groups have split.
// Programmatic dependent launch: only lengths and tables may be read before the preceding kernel
// has ended.
// Contract: as attention_decode_sm90.cu.
// Mirror: engine/reference/mla_decode.py
#include "mla_decode/mla_decode_combine.cuh"
#include "mla_decode/mla_decode_consumer_sm90.cuh"
#include "mla_decode/mla_decode_producer_sm90.cuh"

// Writes result rows.
struct ResultWriter {
  RowOutput output;

  __device__ __forceinline__ void row(int row, float base, float sum) const {
    output.write_lse(row, base, sum);
  }
  template <int kCount>
  __device__ __forceinline__ void columns(int row, bool exists, int column, const float* o, int i,
                                          float sum) const {
    store_row<kCount>(output.at(row) + column, exists, kCount, threadIdx.x % kWarpSize, o, i,
                      inverse_sum(sum));
  }
};

// Writes the rows of a partial, relative to 2^base.
struct PartialWriter {
  float* o;
  float* stats;

  __device__ __forceinline__ void row(int row, float base, float sum) const {
    store_vec(stats + row * 2, Vec<float, 2>{base, sum});
  }
  template <int kCount>
  __device__ __forceinline__ void columns(int row, bool exists, int column, const float* x, int i,
                                          float) const {
    if (!exists) return;
    float* to = o + static_cast<int64_t>(row) * kLatent + column + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j)
      store_vec(to + 8 * j, Vec<float, 2>{x[4 * j + 2 * i], x[4 * j + 2 * i + 1]});
  }
};

__device__ __forceinline__ RowOutput output_of(const MlaDecodeSm90Params& p, int b) {
  const int64_t lse_begin = static_cast<int64_t>(b) * p.num_queries * p.num_heads;
  return RowOutput{p.out + b * p.out_stride_b, p.lse == nullptr ? nullptr : p.lse + lse_begin,
                   p.out_stride_t, p.out_stride_h, p.num_heads};
}

// Writes zeros as the result of a sequence without keys. The consumers call it.
__device__ __forceinline__ void write_empty(const MlaDecodeSm90Params& p, int b,
                                            const TileRows& rows) {
  const RowOutput output = output_of(p, b);
  constexpr int kWords = kLatent / 8;
  for (int i = threadIdx.x; i < kRows * kWords; i += kConsumerThreads) {
    const int row = rows.begin + i / kWords;
    if (row >= rows.rule.count) break;
    *reinterpret_cast<uint4*>(output.at(row) + i % kWords * 8) = make_uint4(0, 0, 0, 0);
    if (i % kWords == 0) output.write_lse(row, -kInf, 0.0f);
  }
  if (threadIdx.x == 0 && rows.begin == 0) p.splits[b] = SplitList{}.packed();
}

template <int kGroup>
__device__ __forceinline__ void store(const MlaDecodeSm90Params& p, Consumer<kGroup>& consumer,
                                      const TileRows& rows, const WorkTile& work) {
  const SplitOf& split = work.split;
  if (split.count == 1) {
    consumer.store(rows, ResultWriter{output_of(p, work.b)});
  } else {
    const int64_t row = split.partial(split.index) * rows.rule.count;
    consumer.store(rows, PartialWriter{p.partial_o + row * kLatent, p.partial_stats + row * 2});
  }
  if (threadIdx.x == 0 && rows.begin == 0 && split.index == 0) {
    const int first = split.partial(0), step = split.is_balanced ? 2 : 1;
    const int later = split.is_balanced ? first - 1 : first;
    p.splits[work.b] = SplitList{split.count, first, later, step}.packed();
  }
}

template <int kGroup>
__device__ __forceinline__ void consume(const MlaDecodeSm90Params& p, unsigned char* smem_bytes) {
  const DecodeProblem problem = problem_of(p);
  const unsigned smem = smem_address(smem_bytes);
  const WorkTile* const slots = reinterpret_cast<const WorkTile*>(smem_bytes + kWorkAt);
  Consumer<kGroup> consumer(smem, p.score_factor);
  pdl_wait();  // the preceding kernels may read what this one writes
  const int begin = blockIdx.x * kRows;
  EmptySequences empty;
  for (int b; (b = empty.next(problem)) >= 0;) write_empty(p, b, TileRows{problem.rows(0), begin});
  for (unsigned i = 0;; ++i) {
    mbarrier_wait(smem + kQFullAt, i & 1);
    const WorkTile& work = slots[i % 2];
    if (work.num_tiles == 0) break;
    const TileRows rows{problem.rows(work.num_keys), begin};
    consumer.run(rows, work);
    store(p, consumer, rows, work);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_decode_sm90(const __grid_constant__ MlaDecodeSm90Params p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const unsigned smem = smem_address(smem_bytes);
  pdl_trigger();
  if (threadIdx.x == 0) Ring{smem}.init();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x < kConsumerThreads + kWarpSize)
      KeyProducer(p, smem).run();
    else if (threadIdx.x < kConsumerThreads + 2 * kWarpSize)
      produce_queries(p, smem_bytes);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    if (threadIdx.x < kGroupThreads)
      consume<0>(p, smem_bytes);
    else
      consume<1>(p, smem_bytes);
  }
}
