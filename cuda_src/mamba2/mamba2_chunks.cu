// Mamba-2's selective state space in chunks of 64 tokens, on tensor cores: prefill.
//
// The algorithm is described in mamba2_chunk.cuh, the recurrence that it equals in mamba2.cu.
// Arguments: Mamba2Params, in mamba2_problem.cuh.
//
// Numerics: products of 16-bit operands with float sums. M, X scaled for the update, and the state
// that C reads are rounded to scalar_t; the decays and the state that is carried are float.
// Parallelisation: one block per sequence, kHeads heads of a group and kRows rows of their states;
// it walks the sequence's chunks. The order of sums depends on none of these.
// Mirror: engine/reference/mamba2.py
#include "common/pdl.cuh"
#include "mamba2/mamba2_consumer.cuh"
#include "mamba2/mamba2_producer.cuh"

extern __shared__ __align__(16) unsigned char smem_bytes[];

// Whether the host may launch the kernel: 227 KB are the most that an architecture has for a block,
// and two tiles spill registers with 2 stages.
constexpr bool is_launched(int stages, int shared_bytes) {
  return shared_bytes <= 227 * 1024 && (kTiles == 1 || stages == 3);
}

template <int kStages>
__device__ __forceinline__ void mamba2_chunks(const Mamba2Params& p) {
  pdl_trigger();
  pdl_wait();
  const int b = blockIdx.x;
  const Sequence sequence = load_sequence(p, b);
  const int num_tokens = sequence.num_tokens();
  if (num_tokens <= p.max_steps) return;
  const ChunkBlock block{p, sequence, SequenceChunks(p, sequence, b),
                         static_cast<int>(blockIdx.y) * kHeads,
                         static_cast<int>(blockIdx.z) * kRows};
  const int num_chunks = block.chunks.count();
  const int warp_idx = uniform_warp_idx();
  auto& smem = *reinterpret_cast<ChunkShared<kStages>*>(smem_bytes);

  if (warp_idx < kProducerWarps) {
    ChunkProducer<kStages> producer(block, smem, warp_idx);
    producer.produce(0);
#pragma unroll 1
    for (int index = 0; index < num_chunks; ++index) {
      if (index > 0) named_barrier_sync<kThreads>(read_barrier(index - 1));
      producer.copy(index + kStages - 1);
      if (index + 1 < num_chunks) producer.produce(index + 1);
    }
    return;
  }
  const int target = target_slot(p, b, num_tokens, num_tokens);
  const int snapshot_end = p.snapshot_slots != nullptr ? p.snapshot_offsets[b] : -1;
  const int snapshot = snapshot_slot(p, b, snapshot_end);
  ChunkConsumer consumer(block, warp_idx - kProducerWarps);
  consumer.load(sequence.first_slot);
#pragma unroll 1
  for (int index = 0; index < num_chunks; ++index) {
    const Chunk tokens = block.chunks.chunk(index);
    named_barrier_sync<kThreads>(ready_barrier(index));
    consumer.consume(smem.stages[index % kStages], smem.mix[index % 2][consumer.head()],
                     smem.factors[index % 3][consumer.head()], tokens);
    if (index + 1 < num_chunks) named_barrier_arrive<kThreads>(read_barrier(index));
    if (tokens.end == num_tokens) consumer.store(target);
    if (tokens.end == snapshot_end) consumer.store(snapshot);
  }
}

#define ENGINE_MAMBA2_CHUNKS(stages)                                                    \
  static_assert(sizeof(ChunkShared<stages>) == SHARED_BYTES_##stages,                   \
                "the host launches with this size");                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                             \
      mamba2_chunks_##stages(const __grid_constant__ Mamba2Params p) {                  \
    if constexpr (is_launched(stages, SHARED_BYTES_##stages)) mamba2_chunks<stages>(p); \
  }

ENGINE_MAMBA2_CHUNKS(2)
ENGINE_MAMBA2_CHUNKS(3)
