"""moe_gemm on Hopper, `cuda_src/gemm/moe_gemm_sm90.cu`."""

from __future__ import annotations

from engine.kernels._module import ModuleSpec
from engine.kernels.moe_gemm.operands import MoeOperands

__all__ = ["is_possible", "launch", "specs"]


def specs(dtype: str) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for `dtype`."""
    return ()


def is_possible(operands: MoeOperands) -> bool:
    """Tell whether the current device runs the kernel for these operands, and may."""
    return False


def launch(operands: MoeOperands) -> None:
    """Launch on CuPy arrays."""
    raise NotImplementedError
