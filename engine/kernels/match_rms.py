"""Scaling of rows to the root mean square of others: `cuda_src/match_rms.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._elementwise import element_strides, is_aligned, vector_width
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["match_rms", "specs"]

_THREADS = 256  # kThreads in CUDA
_PARAMS = "x:ptr target:ptr out:ptr n:i32 x_stride:i64 target_stride:i64 out_stride:i64 least:f32"
_KERNELS = {width: Kernel(f"match_rms_{width}", _PARAMS) for width in ("vector", "scalar")}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("match_rms.cu", dtype),)


def match_rms(x: Any, target: Any, *, least: float = 1e-5, out: Any = None) -> Any:
    """Scale every row to the root mean square of a row of `target`.

    Parameters
    ----------
    x : (T, N) array of float32, float16 or bfloat16
        Rows may be strided.
    target : (T, N) array of x's dtype
        Rows may be strided.
    least : float
        Lower bound of the mean square of x.
    out : (T, N) array of x's dtype, optional
        Array for the result; may be `x`, or have strided rows.

    Returns
    -------
    out : (T, N) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    out = x · rms(target) / sqrt(max(mean(x²), least)), in float32, rounded once.

    Examples
    --------
    >>> import numpy as np
    >>> match_rms(np.array([[1.0, -1.0]], np.float32), np.array([[3.0, 3.0]], np.float32))
    array([[ 3., -3.]], dtype=float32)
    """
    call = Contract("match_rms")
    x = call.array("x", x, "T N", FLOATS, layout="rows")
    target = call.array("target", target, "T N", x.dtype, layout="rows")
    call.number("least", least, low=0.0)
    if call.on_cpu:
        return call.finish(out, reference.match_rms(x, target, least=least), layout="rows")
    out = call.output("out", out, x.shape, x.dtype, layout="rows")
    fits = call["N"] % vector_width(x) == 0 and is_aligned(x, target, out)
    _KERNELS["vector" if fits else "scalar"].launch(
        specs(dtype_name(x.dtype))[0],
        (call["T"],),
        (_THREADS,),
        pdl=True,
        x=x,
        target=target,
        out=out,
        n=call["N"],
        x_stride=element_strides(x)[0],
        target_stride=element_strides(target)[0],
        out_stride=element_strides(out)[0],
        least=least,
    )
    return out
