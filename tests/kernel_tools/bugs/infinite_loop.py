"""A thread waits for a flag that nobody sets."""

from engine import kernels

WORDS = ("does not end", "an infinite loop")
NEEDS_GPU = True
OPTIONS = {"timeout": 3.0, "dtype": "float32", "quick": True}

op = kernels.define(
    "infinite_loop",
    "x: (N,) float32 -> (N,) float32",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void infinite_loop(const float* x, float* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  volatile float* flag = out;
  while (*flag != 12345.0f) __nanosleep(100);
  if (i < N) out[i] = 2.0f * x[i];
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
