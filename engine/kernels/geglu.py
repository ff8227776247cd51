"""GeGLU on packed halves: `cuda_src/geglu.cu`, mirror `reference/geglu.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import GATED_PARAMS, gated
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["geglu", "specs"]

_KERNELS = {
    approximate: {
        width: Kernel(f"geglu_{entry}_{width}", GATED_PARAMS) for width in ("vector", "scalar")
    }
    for approximate, entry in {"tanh": "tanh", "none": "erf"}.items()
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("geglu.cu", dtype),)


def geglu(x: Any, *, up: Any = None, approximate: str = "tanh", out: Any = None) -> Any:
    """Multiply the upper half of each row by the GELU of the lower half.

    Parameters
    ----------
    x : (..., 2F) array of float32, float16 or bfloat16 (NumPy: or float64)
        Rows [gate | up]; a 2-D view may have strided rows. With `up`: (..., F), gate alone.
    up : (..., F) array of x's dtype, optional
    approximate : {"tanh", "none"}
        "none" is the exact GELU, based on erf.
    out : (..., F) array of x's dtype, optional
        Array for the result; may be the gate (half) of `x`, but must not overlap it otherwise.

    Returns
    -------
    out : (..., F) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    out = gelu(gate) · up, in float32, rounded once [1]_.

    References
    ----------
    .. [1] Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> geglu(np.array([[0.0, 100.0, 5.0, 2.0]], np.float32))
    array([[  0., 200.]], dtype=float32)
    """
    call = Contract("geglu")
    call.check("approximate", approximate in _KERNELS, "'tanh' or 'none'", approximate)
    mirror = partial(reference.geglu, approximate=approximate)
    return gated(call, _KERNELS[approximate], "geglu.cu", mirror, x, out, up)
