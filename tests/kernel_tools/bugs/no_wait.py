"""Launched with PDL, but never waits."""

from engine import kernels

WORDS = ("pdl=True needs a kernel that calls pdl_wait()",)
NEEDS_GPU = False

op = kernels.define(
    "no_wait",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void no_wait(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256, pdl=True),
)
