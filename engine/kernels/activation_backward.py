"""Gradients of silu, gelu and relu: `cuda_src/activation_backward.cu`.

The mirror is `reference/activation_backward.py`.
"""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import dtype_name
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import launch_flat
from engine.kernels._launch import Kernel
from engine.kernels._module import ModuleSpec

__all__ = ["activation_backward", "specs"]

_KERNELS = {
    activation: Kernel(
        f"activation_backward_{entry}", "dout:ptr x:ptr dx:ptr num_vectors:i64 n:i64"
    )
    for activation, entry in {
        "silu": "silu",
        "gelu": "gelu_erf",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
    }.items()
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("activation_backward.cu", dtype),)


def activation_backward(dout: Any, x: Any, activation: str, *, out: Any = None) -> Any:
    """Return the gradient of ``sum(dout * f(x))`` with respect to x, for an activation f.

    Parameters
    ----------
    dout : array of x's shape and dtype
    x : array of float32, float16 or bfloat16 (NumPy: or float64)
    activation : {"silu", "gelu", "gelu_tanh", "relu"}
        "gelu" is the exact function, based on erf, and "gelu_tanh" its approximation.
    out : array of x's shape and dtype, optional
        Array for the result; may be `dout` or `x`.

    Returns
    -------
    dx : array of x's shape and dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract.

    Notes
    -----
    dout · f'(x), in float32, rounded once. relu's derivative is 0 at 0.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([-1.0, 0.0, 1.0], np.float32)
    >>> activation_backward(np.ones(3, np.float32), x, "silu").round(4)
    array([0.0723, 0.5   , 0.9277], dtype=float32)
    """
    call = Contract("activation_backward")
    known = ", ".join(map(repr, _KERNELS))
    call.check("activation", activation in _KERNELS, f"one of {known}", activation)
    x = call.array("x", x, "*", MIRROR_FLOATS)
    dout = call.array("dout", dout, " ".join(map(str, x.shape)), x.dtype)
    if call.on_cpu:
        return call.finish(out, reference.activation_backward(dout, x, activation))
    dx = call.output("out", out, x.shape, x.dtype)
    spec = ModuleSpec("activation_backward.cu", dtype_name(x.dtype))
    launch_flat(_KERNELS[activation], spec, dout=dout, x=x, dx=dx)
    return dx
