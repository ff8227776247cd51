"""Products with a packed quantized weight and 16-bit rows: configurations and launches."""

from engine.kernels.gemm_wna16.gemm_wna16 import gemm_wna16, specs

__all__ = ["gemm_wna16", "specs"]
