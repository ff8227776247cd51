"""Gradient of `geglu`: `cuda_src/geglu_backward.cu`, mirror `reference/geglu_backward.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import gated_backward, gated_backward_kernels
from engine.kernels._module import ModuleSpec

__all__ = ["geglu_backward", "specs"]

_FILE = "geglu_backward.cu"
_KERNELS = {
    approximate: gated_backward_kernels(f"geglu_backward_{entry}")
    for approximate, entry in {"tanh": "tanh", "none": "erf"}.items()
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec(_FILE, dtype),)


def geglu_backward(dout: Any, x: Any, *, approximate: str = "tanh", out: Any = None) -> Any:
    """Return the gradient of ``sum(dout * geglu(x))`` with respect to x.

    Parameters
    ----------
    dout : (..., F) array of x's dtype
    x : (..., 2F) array of float32, float16 or bfloat16 (NumPy: or float64)
        Rows [gate | up]; 2-D views may have strided rows.
    approximate : {"tanh", "none"}
        As in `geglu`; "none" is the exact GELU, based on erf.
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
    dx = [dout · up · gelu'(gate) | dout · gelu(gate)], in float32, rounded once [1]_. The exact
    gelu'(x) is P(X < x) + x p(x) for a standard normal X of density p.

    References
    ----------
    .. [1] Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[0.0, 100.0, 5.0, 2.0]], np.float32)
    >>> geglu_backward(np.ones((1, 2), np.float32), x)
    array([[  2.5,   2. ,   0. , 100. ]], dtype=float32)
    """
    call = Contract("geglu_backward")
    call.check("approximate", approximate in _KERNELS, "'tanh' or 'none'", approximate)
    mirror = partial(reference.geglu_backward, approximate=approximate)
    return gated_backward(call, _KERNELS[approximate], _FILE, mirror, dout, x, out)
