"""SiLU: `cuda_src/silu.cu`, mirror `reference/silu.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import UNARY_PARAMS, unary
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["silu", "specs"]

_KERNEL = Kernel("silu_kernel", UNARY_PARAMS)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("silu.cu", dtype),)


def silu(x: Any, *, out: Any = None) -> Any:
    """Multiply every element by its sigmoid.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    out : array of x's shape and dtype, optional
        Array for the result; may be `x`.

    Returns
    -------
    out : array of x's shape and dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    x / (1 + exp(-x)), in float32, rounded once [1]_.

    References
    ----------
    .. [1] Elfwing, Uchibe, Doya: Sigmoid-Weighted Linear Units, arXiv:1702.03118.

    Examples
    --------
    >>> import numpy as np
    >>> silu(np.array([-1.0, 0.0, 1.0], np.float32)).round(4)
    array([-0.2689,  0.    ,  0.7311], dtype=float32)
    """
    return unary(Contract("silu"), _KERNEL, "silu.cu", reference.silu, x, out)
