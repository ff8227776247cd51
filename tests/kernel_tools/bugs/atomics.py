"""The order of floating-point atomics changes from run to run."""

from engine import kernels

WORDS = ("atomics in floating point",)
NEEDS_GPU = True

op = kernels.define(
    "atomics",
    "x: (N,) float -> () float32 zeroed",
    reference=lambda x: x.sum(),
    source=r"""
extern "C" __global__ void atomics(const scalar_t* x, float* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) atomicAdd(out, to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
    reduction="N",
    tolerance=(1e-2, 1e-2),
)
