"""Residual add: `cuda_src/residual_add.cu`, mirror `reference/residual_add.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import launch_flat
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["residual_add", "specs"]

_KERNEL = Kernel("residual_add_kernel", "x:ptr residual:ptr out:ptr num_vectors:i64 n:i64")
_SCALED = Kernel(
    "residual_add_scaled", "x:ptr residual:ptr scale:ptr out:ptr num_vectors:i64 n:i64"
)


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("residual_add.cu", dtype),)


def residual_add(x: Any, residual: Any, *, scale: Any = None, out: Any = None) -> Any:
    """Add two arrays of one shape, and scale the sum.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16
    residual : array of x's shape and dtype
    scale : (1,) array of x's dtype, optional
        Factor on the sum; read on the device.
    out : array of x's shape and dtype, optional
        Array for the result; may be `x` or `residual`.

    Returns
    -------
    out : array of x's shape and dtype
        Computed in float32, rounded once.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract. Shapes are not broadcast.

    Examples
    --------
    >>> import numpy as np
    >>> residual_add(np.ones(2, np.float32), np.array([1.0, 2.0], np.float32))
    array([2., 3.], dtype=float32)
    """
    call = Contract("residual_add")
    x = call.array("x", x, "*", FLOATS)
    residual = call.array("residual", residual, " ".join(map(str, x.shape)), x.dtype)
    if scale is not None:
        scale = call.array("scale", scale, "1", x.dtype)
    if call.on_cpu:
        return call.finish(out, reference.residual_add(x, residual, scale=scale))
    out = call.output("out", out, x.shape, x.dtype)
    arrays = {"x": x, "residual": residual, "out": out}
    kernel, more = (_KERNEL, {}) if scale is None else (_SCALED, {"scale": scale})
    launch_flat(kernel, specs(dtype_name(x.dtype))[0], more, **arrays)
    return out
