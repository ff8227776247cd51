"""Writes gigabytes away from the array."""

from engine import kernels

WORDS = ("illegal memory access", "--sanitizer memcheck")
NEEDS_GPU = True

op = kernels.define(
    "wild_pointer",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void wild_pointer(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i + (1ll << 40)] = x[i];
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
