"""The reference returns the transpose."""

from engine import kernels

WORDS = ("reference must return out of shape (T, N) = (3, 5); got (5, 3)",)
NEEDS_GPU = False

op = kernels.define(
    "wrong_shape",
    "x: (T, N) float -> (T, N) like x",
    reference=lambda x: x.T,
    source=r"""
extern "C" __global__ void wrong_shape(const scalar_t* x, scalar_t* out, int64_t T, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < T * N) out[i] = x[i];
}
""",
    launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
)
