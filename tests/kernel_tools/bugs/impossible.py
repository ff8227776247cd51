"""No sizes satisfy the conditions."""

from engine import kernels

WORDS = ("no sizes were found that satisfy", "sizes={")
NEEDS_GPU = False

op = kernels.define(
    "impossible",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void impossible(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = x[i];
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
    where="N > 10, N < 5",
)
