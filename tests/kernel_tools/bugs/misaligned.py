"""Loads 16 bytes from any address."""

from engine import kernels

WORDS = ("misaligned address", "alignment=16")
NEEDS_GPU = True

op = kernels.define(
    "misaligned",
    "x: (N,) float32 -> (N,) float32",
    reference=lambda x: 2 * x,
    source=r"""
extern "C" __global__ void misaligned(const float* x, float* out, int64_t N) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (4 * i < N) {
    float4 v = reinterpret_cast<const float4*>(x)[i];
    v.x *= 2.0f, v.y *= 2.0f, v.z *= 2.0f, v.w *= 2.0f;
    reinterpret_cast<float4*>(out)[i] = v;
  }
}
""",
    launch=lambda call: call.grid1d(call["N"], 256),
    where="N % 4 == 0",
)
