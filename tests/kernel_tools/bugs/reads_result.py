"""Adds to a result that nothing has set to 0."""

from engine import kernels

WORDS = ("reads the result before it has written it",)
NEEDS_GPU = True

op = kernels.define(
    "reads_result",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void reads_result(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(to_float(out[i]) + 2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
