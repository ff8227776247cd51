"""Dense and 8-bit GEMM, y = activation(x Wᵀ + b) + r: configurations and launches."""

from engine.kernels.gemm.gemm import Config, choose_config, gemm, interleave_gate_up, specs

__all__ = ["Config", "choose_config", "gemm", "interleave_gate_up", "specs"]
