"""Another thread's element is read without a barrier."""

from engine import kernels

WORDS = ("__syncthreads()",)
NEEDS_GPU = False

op = kernels.define(
    "missing_sync",
    "x: (256,) float -> (256,) like x",
    reference=lambda x: x[::-1],
    source=r"""
extern "C" __global__ void missing_sync(const scalar_t* x, scalar_t* out) {
  __shared__ scalar_t smem[256];
  if (threadIdx.x < 32) __nanosleep(20000);
  smem[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = smem[255 - threadIdx.x];
}
""",
    launch=lambda call: call.grid(1, 256),
)
