"""The last, incomplete block is not launched."""

from engine import kernels

WORDS = ("was never written", "N is not a multiple of")
NEEDS_GPU = True

op = kernels.define(
    "tail",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void tail(const scalar_t* x, scalar_t* out) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  out[i] = from_float<scalar_t>(2.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid(call["N"] // 256, 256),
)
