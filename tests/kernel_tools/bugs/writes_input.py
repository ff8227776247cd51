"""Overwrites an argument."""

from engine import kernels

WORDS = ("wrote to its argument x", "not inout")
NEEDS_GPU = True

op = kernels.define(
    "writes_input",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void writes_input(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) {
    out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
    const_cast<scalar_t*>(x)[i] = out[i];
  }
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
