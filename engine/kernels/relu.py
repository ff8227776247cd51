"""ReLU: `cuda_src/relu.cu`, mirror `reference/relu.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import UNARY_PARAMS, unary
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["relu", "specs"]

_KERNELS = {
    False: Kernel("relu_kernel", UNARY_PARAMS),
    True: Kernel("relu_squared_kernel", UNARY_PARAMS),
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("relu.cu", dtype),)


def relu(x: Any, *, squared: bool = False, out: Any = None) -> Any:
    """Replace negative elements by zero, and square the others if asked; NaN stays NaN.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    squared : bool
        Square the result before it is rounded [1]_.
    out : array of x's shape and dtype, optional
        Array for the result; may be `x`.

    Returns
    -------
    out : array of x's shape and dtype

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
    """
    mirror = partial(reference.relu, squared=squared)
    return unary(Contract("relu"), _KERNELS[bool(squared)], "relu.cu", mirror, x, out)
