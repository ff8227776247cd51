"""The ops on NumPy arrays: faster implementations of some cases, and the mirrors for all others.

A public op whose arguments are NumPy arrays calls the function of its name here, which has the
mirror's signature and the mirror's result up to float32 rounding: the mirrors are the specification
that tests compare these with.
"""

from engine.kernels._cpu.attention import attention_decode
from engine.kernels._cpu.norms import rmsnorm
from engine.kernels._cpu.products import (
    gemm,
    gemm_wna16,
    rmsnorm_gemm,
    rmsnorm_gemm_wna16,
)

__all__ = [
    "attention_decode",
    "gemm",
    "gemm_wna16",
    "rmsnorm",
    "rmsnorm_gemm",
    "rmsnorm_gemm_wna16",
]
