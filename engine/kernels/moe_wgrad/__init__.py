"""Gradient of a grouped GEMM with respect to its matrices: configurations and launches."""

from engine.kernels.moe_wgrad.moe_wgrad import moe_wgrad, specs

__all__ = ["moe_wgrad", "specs"]
