"""Gradient of `swiglu`: `cuda_src/swiglu_backward.cu`, mirror `reference/swiglu_backward.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import gated_backward, gated_backward_kernels
from engine.kernels._module import ModuleSpec

__all__ = ["specs", "swiglu_backward"]

_FILE = "swiglu_backward.cu"
_KERNELS = gated_backward_kernels("swiglu_backward")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec(_FILE, dtype),)


def swiglu_backward(dout: Any, x: Any, *, out: Any = None) -> Any:
    """Return the gradient of ``sum(dout * swiglu(x))`` with respect to x.

    Parameters
    ----------
    dout : (..., F) array of x's dtype
    x : (..., 2F) array of float32, float16 or bfloat16 (NumPy: or float64)
        Rows [gate | up]; 2-D views may have strided rows.
    out : (..., 2F) array of x's dtype, optional
        Array for the result; may be `x`, but must not overlap the inputs otherwise.

    Returns
    -------
    dx : (..., 2F) array of x's dtype
        Rows [gradient of gate | gradient of up].

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    With s = 1 / (1 + exp(-gate)), dx = [dout · up · s (1 + gate (1 - s)) | dout · gate · s], in
    float32, rounded once [1]_.

    References
    ----------
    .. [1] Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[0.0, 100.0, 5.0, 2.0]], np.float32)
    >>> swiglu_backward(np.ones((1, 2), np.float32), x)
    array([[  2.5,   2. ,   0. , 100. ]], dtype=float32)
    """
    call = Contract("swiglu_backward")
    return gated_backward(call, _KERNELS, _FILE, reference.swiglu_backward, dout, x, out)
