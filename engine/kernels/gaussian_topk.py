"""Sparsity by the mean and deviation of a row: `cuda_src/gaussian_topk.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import element_strides, is_aligned, vector_width
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["gaussian_topk", "specs"]

_THREADS = 256  # kThreads in CUDA
_PARAMS = "x:ptr out:ptr n:i32 x_stride:i64 out_stride:i64 factor:f32"
_KERNELS = {width: Kernel(f"gaussian_topk_{width}", _PARAMS) for width in ("vector", "scalar")}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("gaussian_topk.cu", dtype),)


def gaussian_topk(x: Any, factor: float, *, out: Any = None) -> Any:
    """Subtract a cutoff from every row, and replace negative results by 0.

    If a row's features are normally distributed, the share of them above the cutoff depends on
    `factor` alone: this is a top-k without a sort.

    Parameters
    ----------
    x : (T, F) array of float32, float16 or bfloat16
        Rows may be strided.
    factor : float
        Distance of the cutoff from the mean, in standard deviations.
    out : (T, F) array of x's dtype, optional
        Array for the result; may be `x`, or have strided rows.

    Returns
    -------
    out : (T, F) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    out = max(x - (mean + factor · std), 0) with the population's std, in float32, rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> gaussian_topk(np.array([[1.0, 1.0, 3.0, 3.0]], np.float32), 0.5)
    array([[0. , 0. , 0.5, 0.5]], dtype=float32)
    """
    call = Contract("gaussian_topk")
    x = call.array("x", x, "T F", FLOATS, layout="rows")
    call.number("factor", factor)
    if call.on_cpu:
        return call.finish(out, reference.gaussian_topk(x, factor), layout="rows")
    out = call.output("out", out, x.shape, x.dtype, layout="rows")
    fits = call["F"] % vector_width(x) == 0 and is_aligned(x, out)
    _KERNELS["vector" if fits else "scalar"].launch(
        specs(dtype_name(x.dtype))[0],
        (call["T"],),
        (_THREADS,),
        pdl=True,
        x=x,
        out=out,
        n=call["F"],
        x_stride=element_strides(x)[0],
        out_stride=element_strides(out)[0],
        factor=factor,
    )
    return out
