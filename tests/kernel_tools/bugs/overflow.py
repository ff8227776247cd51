"""A 32-bit index overflows at 2**31 elements."""

from engine import kernels

WORDS = ("an index of 32 bits overflows",)
NEEDS_GPU = True
OPTIONS = {"huge": True, "dtype": "float16"}

op = kernels.define(
    "overflow",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void overflow(const scalar_t* x, scalar_t* out, int64_t N) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
