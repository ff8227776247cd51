// Sampling: processes each row of logits, filters its candidates and draws one, without sorting.
//
// Formulas and order of the steps: see the notes of engine/kernels/sample.py, which uses the same
// argument names. Arguments: SampleScanParams in scan.cuh, SampleChooseParams in choose_params.cuh.
//
// Numerics: everything that affects the choice of the token is float32 with one rounding per
// operation, or integer arithmetic, so it equals the mirror bit for bit (exact_math.cuh). Other
// functions are used only for the log-probabilities and for bounds with a proven margin.
// Parallelisation: sample_scan, one warp per tile of 1024 logits and no barriers, makes the only
// full read of the logits: it keeps the largest logit of every segment (segments.cuh).
// sample_scan_process does the same for rows that may need processing: each block first processes
// its four tiles in shared memory (process.cuh). sample_choose, one block of 512 threads per row,
// finds from the keys which segments can contain a candidate, lists them, cuts and draws
// (candidates.cuh). If a list cannot hold the candidates, the block walks the row together with
// other blocks (shared_walk.cuh) or alone (row_cut.cuh); if nothing is cut, several blocks share
// the row's draw.
//
// Terms:
//   key     a float's bits, mapped so that they compare like the float (ordered_key)
//   order   key and id in one number: descending order sorts by logit, then by ascending id
//   tile, segment   1024 and 128 neighbouring logits of a row
//   mass    2^x in integer steps of 2^-40, x = (logit - largest) / (temperature ln 2)
//   share   top_p in steps of 2^-24: the fraction of the total mass to keep
//   cut     the last candidate kept by top_k, top_p and min_p
//   list    the row's largest logits, sorted, in shared memory
//   walk    a pass over a whole row, in chunks that several blocks may take
//   job, role   the parameters of a row's draw; a block's task for a row
// Mirror: engine/reference/sample.py
#include "sample/choose.cuh"
#include "sample/process.cuh"

extern "C" __global__ void __launch_bounds__(kScanThreads, 8)
    sample_scan(const __grid_constant__ SampleScanParams p) {
  const ScanPlace at(p.num_tiles);
  if (at.tile >= p.num_tiles) return;
  const TileValues x = load_tile(Row(p.logits + at.b * p.stride, p.vocab), at.tile);
  scan_tile(p, at.b, at.tile, x, false);
}

extern "C" __global__ void __launch_bounds__(kScanThreads, 4)
    sample_scan_process(const __grid_constant__ SampleScanParams p) {
  __shared__ alignas(16) float changed[kScanChunk];
  __shared__ int counts[kScanChunk];
  const ScanPlace at(p.num_tiles);
  const RowChanges changes(p, at.b);
  const bool has_work =
      changes.mask || changes.has_penalty || changes.bias_begin < changes.bias_end;
  if (at.chunk == 0 && threadIdx.x == 0) p.is_processed[at.b] = has_work;
  if (!has_work) {
    if (at.tile >= p.num_tiles) return;
    const TileValues x = load_tile(Row(p.logits + at.b * p.stride, p.vocab), at.tile);
    scan_tile(p, at.b, at.tile, x, false);
    return;
  }
  const int begin = at.chunk * kScanChunk, size = min(kScanChunk, p.vocab - begin);
  change_chunk(p, changes, at.b, begin, size, changed, counts);
  float* out = p.processed + at.b * p.processed_stride + begin;
  for (int i = threadIdx.x; i < size; i += kScanThreads) out[i] = changed[i];
  if (at.tile >= p.num_tiles) return;
  // Generic pointers: the tile is read from shared memory as if the chunk were a separate row.
  const TileValues x = load_tile(Row(changed, size), threadIdx.x / kWarpSize);
  scan_tile(p, at.b, at.tile, x, true);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_choose(const __grid_constant__ SampleChooseParams p) {
  __shared__ ChooseShared smem;
  const int64_t b = blockIdx.x;
  if (threadIdx.x == 0) atomicAdd(&p.queue->num_started, 1u);
  uint32_t keys[kKeysPerThread];
  load_keys(p.keys + b * 2 * kMaxSegments, p.num_segments, keys);
  const SharedWalks walks{p, p.queue, p.walks, static_cast<int>(gridDim.x)};
  const Role role(p, b);
  if (!role.is_owner && !role.is_helper) return;
  Result result{kNoToken, -1, 1};
  int own = -1;  // index of this row's walk
  if (role.is_owner && !choose_owned(walks, role, b, keys, result, &own, smem)) return;
  if (serve_walks(walks, role, result, own, smem)) walk_alone(walks, b, result, smem);
}
