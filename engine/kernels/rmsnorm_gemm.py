"""RMSNorm fused into the GEMM that follows: `cuda_src/gemm/rmsnorm_gemm.cu`.

The mirror is `reference/rmsnorm_gemm.py`. As for gemm, `gemm/config.py` chooses the kernel and
`gemm/launch.py` launches it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels.gemm.launch import fuses_norm, launch
from engine.kernels.gemm.operands import Norm, Operands, check_columns
from engine.kernels.gemm.sm90 import stream_specs
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.swiglu import specs as swiglu_specs

__all__ = ["rmsnorm_gemm", "specs"]


def specs(dtype: str, *, deterministic: bool = False, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules the op may launch for `dtype`; the gemm module sums the splits."""
    own = ModuleSpec("gemm/rmsnorm_gemm.cu", dtype), ModuleSpec("gemm/gemm.cu", dtype)
    streams = stream_specs("rmsnorm_gemm", dtype) if deterministic else ()
    return (*own, *streams, *swiglu_specs(dtype))


def rmsnorm_gemm(
    x: Any,
    norm_weight: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Normalise rows by their root mean square and multiply them by a weight matrix.

    Parameters
    ----------
    x : (M, K) array of float32, float16 or bfloat16
        The rows may be strided (a view). An array whose last axis is not contiguous is copied.
    norm_weight : (K,) array of x's dtype
    weight : (N, K) array of x's dtype
    eps : float
        Added to the mean square.
    weight_offset : float
        Added to `norm_weight` (Gemma stores w - 1).
    bias : (N,) array of x's dtype, optional
    activation : str, optional
        See `gemm`.
    deterministic : bool
        Return the bits of `gemm` of `rmsnorm`, with `deterministic`, whatever the number of rows.
        One launch for a single row on Hopper, otherwise two.
    pdl : bool
        See `gemm`. Also promises that no running kernel writes `norm_weight`.
    out : array of x's dtype, optional
        Array for the result; its rows may be strided.

    Returns
    -------
    (M, N) or (M, N / 2) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    Equals `gemm` of ``rmsnorm(x, norm_weight)`` up to the order of summation: the normalised row
    is rounded to x's dtype before the GEMM.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[3.0, 4.0]], np.float32)
    >>> weight = np.array([[1.0, 1.0]], np.float32)
    >>> rmsnorm_gemm(x, np.ones(2, np.float32), weight, eps=0.0).round(3)
    array([[1.98]], dtype=float32)
    """
    call = Contract("rmsnorm_gemm")
    x = call.array("x", x, "M K", FLOATS, layout="rows")
    norm_weight = call.array("norm_weight", norm_weight, "K", x.dtype)
    weight = call.array("weight", weight, "N K", x.dtype)
    call.check("x", call["K"] > 0, "of at least one feature", x.shape)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    columns = check_columns(call, activation)
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    if call.on_cpu:
        result = _cpu.rmsnorm_gemm(
            x,
            norm_weight,
            weight,
            eps=eps,
            weight_offset=weight_offset,
            bias=bias,
            activation=activation,
            deterministic=deterministic,
        )
        return call.finish(out, result, layout="rows")
    out = call.output("out", out, (call["M"], columns), x.dtype, layout="rows")
    operands = Operands(x, weight, out, bias, None, activation, deterministic, pdl)
    norm = Norm(norm_weight, eps, weight_offset)
    if deterministic and not fuses_norm(operands, norm):
        x = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
        launch("gemm", replace(operands, x=x))
    else:
        launch("rmsnorm_gemm", operands, norm)
    return out
