"""moe_gemm on any GPU from sm_80 on, `cuda_src/gemm/moe_gemm.cu`."""

from __future__ import annotations

from engine.kernels._module import ModuleSpec
from engine.kernels.moe_gemm.operands import MoeOperands

__all__ = ["launch", "specs"]


def specs(dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `dtype`."""
    return (ModuleSpec("gemm/moe_gemm.cu", dtype),)


def launch(operands: MoeOperands) -> None:
    """Launch on CuPy arrays."""
    raise NotImplementedError
