"""Kernels of a user, for the tests of overrides: the catalog's formulas, and others."""

from __future__ import annotations

import numpy as np

from engine import kernels, reference

_SWIGLU = r"""
extern "C" __global__ void my_swiglu(const scalar_t* x, scalar_t* out, int64_t T, int F) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= T * F) return;
  const scalar_t* row = x + i / F * 2 * F;
  const float gate = to_float(row[i % F]);
  out[i] = from_float<scalar_t>(gate / (1.0f + __expf(-gate)) * to_float(row[F + i % F]));
}
"""

_RMSNORM = r"""
extern "C" __global__ void my_rmsnorm(const scalar_t* x, const scalar_t* weight, scalar_t* out,
                                      float eps, int N) {
  x += static_cast<int64_t>(blockIdx.x) * N;
  out += static_cast<int64_t>(blockIdx.x) * N;
  float sum = 0.0f;  // one warp a row
  for (int i = threadIdx.x; i < N; i += 32) sum += to_float(x[i]) * to_float(x[i]);
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  const float scale = rsqrtf(sum / N + eps);
  for (int i = threadIdx.x; i < N; i += 32) {
    out[i] = from_float<scalar_t>(to_float(x[i]) * scale * to_float(weight[i]));
  }
}
"""

my_swiglu = kernels.define(
    name="my_swiglu",
    signature="x: (T, 2*F) float -> (T, F) like x",
    reference=lambda x: reference.swiglu(x),
    source=_SWIGLU,
    launch=lambda call: call.grid1d(call["T"] * call["F"], 256),
)

my_rmsnorm = kernels.define(
    name="my_rmsnorm",
    signature="x: (T, N) float, weight: (N) float, eps: float32 = 1e-6 -> (T, N) like x",
    reference=lambda x, weight, eps: reference.rmsnorm(x, weight, eps=float(eps)),
    source=_RMSNORM,
    launch=lambda call: call.grid(call["T"], 32),
)


def plain_swiglu(x):
    """The formula, on NumPy or CuPy arrays."""
    half = x.shape[1] // 2
    gate, up = x[:, :half].astype(np.float32), x[:, half:].astype(np.float32)
    return (gate / (1 + np.exp(-gate)) * up).astype(x.dtype)


def relu_glu(x):
    """Another activation: relu(gate) * up."""
    half = x.shape[1] // 2
    return np.maximum(x[:, :half], 0) * x[:, half:]


def synchronising_swiglu(x):
    """The formula, by way of the host: no CUDA graph can hold it."""
    float(x[0, 0])
    return plain_swiglu(x)


def sum_and_norm(x, peers, residual, weight, **options):
    """The catalog's op."""
    return kernels.all_reduce_rmsnorm(x, peers, residual, weight, **options)


def greedy(logits):
    """A sampler: the most probable token, whatever the request asks for."""
    return logits.argmax(axis=1)


def even_ids(token_ids, logits):
    """A logits processor: no odd token."""
    logits[1::2] = -np.inf


def repeat_last(token_ids, num_tokens):
    """A proposer: the last token again."""
    return token_ids[-1:] * num_tokens


PATTERN = kernels.Periodic(period=16, width=4)
