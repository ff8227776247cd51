"""Writes three elements behind the end."""

from engine import kernels

WORDS = ("after the end of out",)
NEEDS_GPU = True

op = kernels.define(
    "write_beyond",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void write_beyond(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
  if (i < 3) out[N + i] = from_float<scalar_t>(1.0f);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
