"""Grouped GEMM of a mixture of experts: configurations and launches, by kernel."""

from engine.kernels.moe_gemm.moe_gemm import moe_gemm, specs

__all__ = ["moe_gemm", "specs"]
