// Gated delta rule in chunks of 64 tokens, on tensor cores: prefill.
//
// The algorithm is described in gated_delta_chunk.cuh, the recurrence that it equals in
// gated_delta.cu. Two launches: prepare, all chunks at once, then scan, which walks the chunks of
// each sequence. Arguments: GatedDeltaParams, in gated_delta_problem.cuh.
//
// Numerics: products of 16-bit operands with float sums. W, U, X and the state that the products
// read are rounded to scalar_t; T, the decays and the state that is carried are float.
// Mirror: engine/reference/gated_delta.py
#include "common/pdl.cuh"
#include "gated_delta/gated_delta_prepare.cuh"
#include "gated_delta/gated_delta_scan.cuh"

static_assert(!kHasChannelGate, "a gate per channel does not factor into rows");
static_assert(sizeof(PrepareShared) == PREPARE_BYTES && sizeof(ScanShared<1>) == SCAN_BYTES_1 &&
                  sizeof(ScanShared<2>) == SCAN_BYTES_2,
              "the host launches with these sizes");

extern __shared__ __align__(16) unsigned char smem_bytes[];

extern "C" __global__ void __launch_bounds__(kPrepareThreads, 4)
    gated_delta_prepare(const __grid_constant__ GatedDeltaParams p) {
  prepare_chunk(p, *reinterpret_cast<PrepareShared*>(smem_bytes));
}

// Two stages if shared memory has room for them, else one.
extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    gated_delta_scan_2(const __grid_constant__ GatedDeltaParams p) {
  scan_chunks<2>(p, *reinterpret_cast<ScanShared<2>*>(smem_bytes));
}

extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    gated_delta_scan_1(const __grid_constant__ GatedDeltaParams p) {
  scan_chunks<1>(p, *reinterpret_cast<ScanShared<1>*>(smem_bytes));
}
