"""Indices are drawn that the reference cannot use."""

from engine import kernels

WORDS = ("IndexError", "inputs={")
NEEDS_GPU = False

op = kernels.define(
    "bad_indices",
    "x: (V,) float32, ids: (T,) uint32 -> (T,) float32",
    reference=lambda x, ids: x[ids],
    source=r"""
extern "C" __global__ void bad_indices(const float* x, const uint32_t* ids, float* out, int64_t T) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < T) out[i] = x[ids[i]];
}
""",
    launch=lambda call: call.grid1d(call["T"], 256),
)
