"""gemm: y = activation(x Wᵀ + b) + r. `gemm.py` is the op; rmsnorm_gemm shares the rest."""

from engine.kernels.gemm.gemm import Config, choose_config, gemm, interleave_gate_up, specs

__all__ = ["Config", "choose_config", "gemm", "interleave_gate_up", "specs"]
