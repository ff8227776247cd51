"""The reference overwrites its argument."""

from engine import kernels

WORDS = ("the reference modifies an argument",)
NEEDS_GPU = False

op = kernels.define(
    "greedy_reference",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: x.__imul__(2),
    source=r"""
extern "C" __global__ void greedy_reference(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
