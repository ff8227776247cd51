"""The catalog of ops: NumPy arrays run the mirror, CuPy arrays the CUDA kernel."""

from engine.kernels.attention_decode import attention_decode
from engine.kernels.attention_prefill import attention_prefill
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rope import rope

__all__ = ["attention_decode", "attention_prefill", "rmsnorm", "rope"]
