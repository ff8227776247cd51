"""A sum of many terms with the tolerance of none."""

import numpy as np

from engine import kernels

WORDS = ("state reduction='N'",)
NEEDS_GPU = True

op = kernels.define(
    "longer_sum",
    "x: (N,) float32 -> () float32",
    reference=lambda x: x.sum(dtype=np.float64),
    source=r"""
extern "C" __global__ void longer_sum(const float* x, float* out, int N) {
  float sum = 0.0f;
  for (int i = 0; i < N; ++i) sum += x[N - 1 - i];
  *out = sum;
}
""",
    launch=lambda call: call.grid(1, 1),
)
