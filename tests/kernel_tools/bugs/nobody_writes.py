"""No kernel takes the second result."""

from engine import kernels

WORDS = ("no kernel has a parameter `peak`: nothing writes it",)
NEEDS_GPU = False

op = kernels.define(
    "nobody_writes",
    "x: (N,) float -> y: (N,) like x, peak: () float32",
    reference=lambda x: (2 * x, x.max(initial=0)),
    source=r"""
extern "C" __global__ void nobody_writes(const scalar_t* x, scalar_t* y, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) y[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
