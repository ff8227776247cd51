"""The launch function returns nothing for small sizes."""

from engine import kernels

WORDS = ("launch: must return what call.grid1d or call.grid returns", "got None")
NEEDS_GPU = False

op = kernels.define(
    "wrong_launch",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void wrong_launch(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256) if call["N"] > 100 else None,
)
