"""Reads shared memory that no thread has written."""

from engine import kernels

WORDS = ("shared memory that it has not written",)
NEEDS_GPU = True

op = kernels.define(
    "stale_shared",
    "x: (N,) float -> () float32",
    reference=lambda x: x.max(),
    source=r"""
extern "C" __global__ void stale_shared(const scalar_t* x, float* out, int N) {
  __shared__ float smem[256];
  if (threadIdx.x < N) smem[threadIdx.x] = to_float(x[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) {
    float most = smem[0];
    for (int i = 1; i < 256; ++i) most = smem[i] > most ? smem[i] : most;
    *out = most;
  }
}
""",
    launch=lambda call: call.grid(1, 256),
    where="N > 0, N <= 256",
)
