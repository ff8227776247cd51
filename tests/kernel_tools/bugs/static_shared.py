"""More static shared memory than a block may have."""

from engine import kernels

WORDS = ("declares 400000 bytes of static shared memory, more than",)
NEEDS_GPU = False

op = kernels.define(
    "static_shared",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void static_shared(const scalar_t* x, scalar_t* out, int64_t N) {
  __shared__ float smem[100000];
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  smem[threadIdx.x] = i < N ? to_float(x[i]) : 0.0f;
  __syncthreads();
  if (i < N) out[i] = from_float<scalar_t>(smem[threadIdx.x] + smem[blockDim.x - 1 - threadIdx.x]);
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
