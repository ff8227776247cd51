"""moe_gemm: the products of a mixture of experts. `moe_gemm.py` is the op."""

from engine.kernels.moe_gemm.moe_gemm import moe_gemm, specs

__all__ = ["moe_gemm", "specs"]
