"""The catalog of ops: NumPy arrays run the mirror, CuPy arrays the CUDA kernel."""

from engine.kernels.attention_decode import attention_decode
from engine.kernels.attention_prefill import attention_prefill
from engine.kernels.gemm import gemm
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rmsnorm_gemm import rmsnorm_gemm
from engine.kernels.rope import rope

__all__ = ["attention_decode", "attention_prefill", "gemm", "rmsnorm", "rmsnorm_gemm", "rope"]
