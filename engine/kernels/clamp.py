"""Clamp: `cuda_src/clamp.cu`, mirror `reference/clamp.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import launch_flat
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["clamp", "specs"]

_KERNEL = Kernel("clamp_kernel", "x:ptr out:ptr num_vectors:i64 n:i64 low:f32 high:f32")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("clamp.cu", dtype),)


def clamp(x: Any, low: float, high: float, *, out: Any = None) -> Any:
    """Limit every element to [low, high]; NaN stays NaN.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    low, high : float
        Bounds, low <= high; they are rounded to float32, and in the result to x's dtype.
    out : array of x's shape and dtype, optional
        Array for the result; may be `x`.

    Returns
    -------
    out : array of x's shape and dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Examples
    --------
    >>> import numpy as np
    >>> clamp(np.array([-3.0, 0.5, 7.0], np.float32), -1.0, 1.0)
    array([-1. ,  0.5,  1. ], dtype=float32)
    """
    call = Contract("clamp")
    x = call.array("x", x, "*", MIRROR_FLOATS)
    low = call.number("low", low)
    high = call.number("high", high, low=low)
    if call.on_cpu:
        return call.finish(out, reference.clamp(x, low, high))
    out = call.output("out", out, x.shape, x.dtype)
    launch_flat(_KERNEL, specs(dtype_name(x.dtype))[0], {"low": low, "high": high}, x=x, out=out)
    return out
