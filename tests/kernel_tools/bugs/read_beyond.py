"""Reads one element behind the end."""

import numpy as np

from engine import kernels

WORDS = ("reads outside x",)
NEEDS_GPU = True

op = kernels.define(
    "read_beyond",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: x + np.append(x, np.float32(0))[1:],
    source=r"""
extern "C" __global__ void read_beyond(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(to_float(x[i]) + to_float(x[i + 1]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
