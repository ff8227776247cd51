"""The NumPy mirrors: one file per op, each the specification of the kernel of the same name."""

from engine.reference.attention_decode import attention_decode
from engine.reference.attention_prefill import attention_prefill
from engine.reference.gemm import gemm
from engine.reference.rmsnorm import rmsnorm
from engine.reference.rmsnorm_gemm import rmsnorm_gemm
from engine.reference.rope import rope

__all__ = ["attention_decode", "attention_prefill", "gemm", "rmsnorm", "rmsnorm_gemm", "rope"]
