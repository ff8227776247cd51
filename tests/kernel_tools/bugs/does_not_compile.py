"""Calls a function that does not exist."""

from engine import kernels

WORDS = (
    'does_not_compile.cu:4: error: identifier "twice" is undefined',
    "out[i] = twice(x[i]);",
    "^",
)
NEEDS_GPU = False

op = kernels.define(
    "does_not_compile",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void does_not_compile(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = twice(x[i]);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
