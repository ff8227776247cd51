"""ReLU: `cuda_src/relu.cu`, mirror `reference/relu.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import GATED_PARAMS, UNARY_PARAMS, unary
from engine.kernels._elementwise import gated as launch_gated
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["relu", "specs"]

_KERNELS = {
    False: Kernel("relu_kernel", UNARY_PARAMS),
    True: Kernel("relu_squared_kernel", UNARY_PARAMS),
}
_GATED = {
    squared: {
        width: Kernel(f"{name}_gated_{width}", GATED_PARAMS) for width in ("vector", "scalar")
    }
    for squared, name in {False: "relu", True: "relu_squared"}.items()
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("relu.cu", dtype),)


def relu(x: Any, *, squared: bool = False, gated: bool = False, out: Any = None) -> Any:
    """Replace negative elements by zero, and square the others if asked; NaN stays NaN.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    squared : bool
        Square the result before it is rounded [1]_.
    gated : bool
        `x` (..., 2F) has rows [gate | up]: return the activation of gate, times up. A 2-D view may
        have strided rows.
    out : array of x's shape, or (..., F), and x's dtype, optional
        Array for the result; may be `x`, or its gate.

    Returns
    -------
    out : array of x's shape, or (..., F), and x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    References
    ----------
    .. [1] So et al.: Primer: Searching for Efficient Transformers, arXiv:2109.08668.

    Examples
    --------
    >>> import numpy as np
    >>> relu(np.array([-1.0, 0.5], np.float32))
    array([0. , 0.5], dtype=float32)
    >>> relu(np.array([-1.0, 0.5], np.float32), squared=True)
    array([0.  , 0.25], dtype=float32)
    >>> relu(np.array([[2.0, -1.0, 0.5, 3.0]], np.float32), squared=True, gated=True)
    array([[2., 0.]], dtype=float32)
    """
    mirror = partial(reference.relu, squared=squared, gated=gated)
    if gated:
        return launch_gated(Contract("relu"), _GATED[bool(squared)], "relu.cu", mirror, x, out)
    return unary(Contract("relu"), _KERNELS[bool(squared)], "relu.cu", mirror, x, out)
