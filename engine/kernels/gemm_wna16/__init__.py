"""gemm_wna16: y = activation(x Wᵀ + b) + r, where W is quantized and x is not."""

from engine.kernels.gemm_wna16.gemm_wna16 import gemm_wna16, specs

__all__ = ["gemm_wna16", "specs"]
