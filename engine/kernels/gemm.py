"""Matrix product with a fused epilogue: `cuda_src/gemm.cu`, mirror `reference/gemm.py`.

How a kernel is chosen (`_gemm_config.py`) and launched (`_gemm.py`) is shared with rmsnorm_gemm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.kernels._contract import FLOAT32, FLOATS, Contract
from engine.kernels._gemm import ACTIVATIONS, Operands, launch
from engine.kernels._gemm_config import Config, choose_config
from engine.kernels._gemm_sm90 import hopper_specs
from engine.kernels._module import ModuleSpec

__all__ = ["Config", "choose_config", "gemm", "specs"]


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return (ModuleSpec("gemm.cu", dtype), *hopper_specs(dtype))


def gemm(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    batch_invariant: bool = False,
    overlap: bool = False,
    out: Any = None,
) -> Any:
    """Multiply rows by a weight matrix: activation(x Wᵀ + bias) + residual.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        The rows may lie apart (a view); the last axis must be contiguous, else it is copied.
    weight : (N, K) array of x's dtype
        As checkpoints have it: (out features, in features).
    bias : (N,) array of x's dtype, optional
    residual : (M, N) array of the result's dtype, optional
        Added last; may be `out` itself.
    activation : None, "silu", "gelu" (erf), "gelu_tanh" or "relu"
    out_dtype : dtype, optional
        x's dtype (the default) or float32.
    batch_invariant : bool
        Sum each row in an order that does not depend on M, so that a row's result has the same
        bits in any company; slower for few rows.
    overlap : bool
        Say that no kernel still running on the stream writes `weight`, as is true of a model's
        parameters: with few rows, it is then read while the kernel in front ends.
    out : (M, N) array of `out_dtype`, optional
        Where to put the result; its rows may lie apart.

    Returns
    -------
    (M, N) array of `out_dtype`

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Sums, bias, activation and residual are float32; the result is rounded once. float32 operands
    are multiplied as float32 (never TF32).

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 2.0]], np.float32)
    >>> weight = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], np.float32)
    >>> gemm(x, weight, bias=np.ones(3, np.float32), activation="relu")
    array([[2., 3., 0.]], dtype=float32)
    """
    call = Contract("gemm")
    x = call.array("x", x, "M K", FLOATS, layout="rows")
    weight = call.array("weight", weight, "N K", x.dtype)
    dtype = x.dtype if out_dtype is None else np.dtype(out_dtype)
    call.check("out_dtype", dtype in (x.dtype, FLOAT32), f"{x.dtype} or float32", out_dtype)
    call.check("activation", activation in ACTIVATIONS, f"one of {ACTIVATIONS}", activation)
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    if residual is not None:
        residual = call.array("residual", residual, "M N", dtype, layout="rows")
    if call.on_cpu:
        result = reference.gemm(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation=activation,
            out_dtype=dtype,
            batch_invariant=batch_invariant,
        )
        return call.finish(out, result)
    out = call.output("out", out, (call["M"], call["N"]), dtype, layout="rows")
    operands = Operands(x, weight, out, bias, residual, activation, batch_invariant, overlap)
    launch("gemm", operands)
    return out
