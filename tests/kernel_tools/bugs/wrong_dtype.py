"""The pointer's type is not that of a float16 array."""

from engine import kernels

WORDS = ("`const float* x` must be a pointer to scalar_t: the array is float16",)
NEEDS_GPU = False

op = kernels.define(
    "wrong_dtype",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void wrong_dtype(const float* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * x[i]);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
