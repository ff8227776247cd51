"""A thread waits for a flag that nobody sets."""

from engine import kernels

WORDS = ("does not end", "an infinite loop")
NEEDS_GPU = True
OPTIONS = {"timeout": 3.0, "dtype": "float32", "quick": True}

op = kernels.define(
    "infinite_loop",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void infinite_loop(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  volatile scalar_t* flag = out;
  while (to_float(const_cast<const scalar_t&>(*const_cast<scalar_t*>(flag))) != 12345.0f) {
    __nanosleep(100);
  }
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
