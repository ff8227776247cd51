"""Every thread adds to one number without an atomic."""

from engine import kernels

WORDS = ("a race",)
NEEDS_GPU = True

op = kernels.define(
    "race",
    "x: (N,) float -> () float32 zeroed",
    reference=lambda x: x.sum(),
    source=r"""
extern "C" __global__ void race(const scalar_t* x, float* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) *out += to_float(x[i]);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
    reduction="N",
)
