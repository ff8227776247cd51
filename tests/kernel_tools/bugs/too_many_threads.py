"""A block of 2048 threads."""

from engine import kernels

WORDS = ("a block must have 1 to 1024 threads", "2048")
NEEDS_GPU = False

op = kernels.define(
    "too_many_threads",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void too_many_threads(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 2048),
)
