"""xIELU: `cuda_src/xielu.cu`, mirror `reference/xielu.py`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import launch_flat
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["specs", "xielu"]

_KERNEL = Kernel("xielu_kernel", "x:ptr coefficients:ptr out:ptr num_vectors:i64 n:i64")


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("xielu.cu", dtype),)


def xielu(x: Any, coefficients: Any, *, out: Any = None) -> Any:
    """Apply xIELU, the integral of a linear and an exponential piece, to every element.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    coefficients : (4,) array of float32 (float64 for float64)
        a_p, a_n, b and eps, on x's device. eps is a small negative number.
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
    a_p x² + b x for x > 0, else a_n (exp(min(x, eps)) - 1 - x) + b x, in float32, rounded
    once [1]_.

    References
    ----------
    .. [1] Huang, Schlag: Deriving Activation Functions Using Integration, arXiv:2411.13010.

    Examples
    --------
    >>> import numpy as np
    >>> coefficients = np.array([0.8, 0.8, 0.5, -1e-6], np.float32)
    >>> xielu(np.array([-1.0, 0.0, 1.0], np.float32), coefficients).round(3)
    array([-0.206, -0.   ,  1.3  ], dtype=float32)
    """
    call = Contract("xielu")
    x = call.array("x", x, "*", MIRROR_FLOATS)
    coefficients = call.array("coefficients", coefficients, "4", accumulation_dtype(x.dtype))
    if call.on_cpu:
        return call.finish(out, reference.xielu(x, coefficients))
    out = call.output("out", out, x.shape, x.dtype)
    launch_flat(
        _KERNEL, specs(dtype_name(x.dtype))[0], {"coefficients": coefficients}, x=x, out=out
    )
    return out
