"""Reads an argument before pdl_wait()."""

from engine import kernels

WORDS = ("x is written late: it is read before pdl_wait()",)
NEEDS_GPU = True
ATTEMPTS = 5  # the two kernels must overlap, and other tests use the card, too

op = kernels.define(
    "early_pdl",
    "x: (N,) float32 -> (N,) float32",
    reference=lambda x: 2 * x,
    source=r"""
#include "common/pdl.cuh"

extern "C" __global__ void early_pdl(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const float value = i < N ? *static_cast<const volatile scalar_t*>(x + i) : 0.0f;
  pdl_wait();
  if (i < N) out[i] = from_float<scalar_t>(2.0f * value);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256, pdl=True),
)
