"""Three times instead of twice."""

from engine import kernels

WORDS = ("the kernel has", "the reference", "the result is 1.5 times the reference everywhere")
NEEDS_GPU = True

op = kernels.define(
    "wrong_formula",
    "x: (N,) float -> (N,) like x",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void wrong_formula(const scalar_t* x, scalar_t* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < N) out[i] = from_float<scalar_t>(3.0f * to_float(x[i]));
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
)
