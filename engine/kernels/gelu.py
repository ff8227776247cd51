"""GELU: `cuda_src/gelu.cu`, mirror `reference/gelu.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import UNARY_PARAMS, unary
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["gelu", "specs"]

_KERNELS = {
    "none": Kernel("gelu_erf_kernel", UNARY_PARAMS),
    "tanh": Kernel("gelu_tanh_kernel", UNARY_PARAMS),
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("gelu.cu", dtype),)


def gelu(x: Any, *, approximate: str = "none", out: Any = None) -> Any:
    """Apply the Gaussian error linear unit to every element.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    approximate : {"none", "tanh"}
        "none" is the exact function, based on erf.
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
    x (1 + erf(x / √2)) / 2, or x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, in float32, rounded
    once [1]_.

    References
    ----------
    .. [1] Hendrycks, Gimpel: Gaussian Error Linear Units, arXiv:1606.08415.

    Examples
    --------
    >>> import numpy as np
    >>> gelu(np.array([-1.0, 0.0, 1.0], np.float32)).round(4)
    array([-0.1587,  0.    ,  0.8413], dtype=float32)
    """
    call = Contract("gelu")
    call.check("approximate", approximate in _KERNELS, "'none' or 'tanh'", approximate)
    mirror = partial(reference.gelu, approximate=approximate)
    return unary(call, _KERNELS[approximate], "gelu.cu", mirror, x, out)
