"""SwiGLU on packed halves: `cuda_src/swiglu.cu`, mirror `reference/swiglu.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import Contract
from engine.kernels._elementwise import GATED_PARAMS, gated
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["specs", "swiglu"]

_KERNELS = {width: Kernel(f"swiglu_{width}", GATED_PARAMS) for width in ("vector", "scalar")}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("swiglu.cu", dtype),)


def swiglu(x: Any, *, up: Any = None, out: Any = None) -> Any:
    """Multiply the upper half of each row by the SiLU of the lower half.

    Parameters
    ----------
    x : (..., 2F) array of float32, float16 or bfloat16 (NumPy: or float64)
        Rows [gate | up]; a 2-D view may have strided rows. With `up`: (..., F), gate alone.
    up : (..., F) array of x's dtype, optional
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
    out = gate / (1 + exp(-gate)) · up, in float32, rounded once [1]_.

    References
    ----------
    .. [1] Shazeer: GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> swiglu(np.array([[0.0, 100.0, 5.0, 2.0]], np.float32))
    array([[  0., 200.]], dtype=float32)
    """
    return gated(Contract("swiglu"), _KERNELS, "swiglu.cu", reference.swiglu, x, out, up)
