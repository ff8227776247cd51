"""GEMM of 16-bit rows with a packed quantized weight: configurations and launches."""

from engine.kernels.gemm_wna16.gemm_wna16 import gemm_wna16, specs

__all__ = ["gemm_wna16", "specs"]
