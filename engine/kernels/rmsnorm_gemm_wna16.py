"""RMSNorm fused into the GEMM that follows: `cuda_src/gemm_wna16/rmsnorm_gemm_wna16.cu`.

The mirror is `reference/rmsnorm_gemm_wna16.py`. For many rows, rmsnorm and gemm_wna16 are separate.
"""

from __future__ import annotations

from typing import Any

from engine.kernels import _cpu
from engine.kernels._contract import FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels._packed import SAMPLE, check_weight
from engine.kernels.gemm.operands import Norm, Operands, check_columns
from engine.kernels.gemm_wna16 import few_rows, sm90
from engine.kernels.gemm_wna16.gemm_wna16 import ACTIVATIONS, HALVES, launch
from engine.kernels.gemm_wna16.gemm_wna16 import specs as product_specs
from engine.kernels.permute_columns import permute_columns
from engine.kernels.rmsnorm import rmsnorm
from engine.kernels.rmsnorm import specs as rmsnorm_specs
from engine.weights import Weight

__all__ = ["rmsnorm_gemm_wna16", "specs"]


def specs(
    dtype: str, *, formats: tuple[str, ...] = (), patterns: bool = False, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for weights of `formats`.

    `patterns` instead selects a sample of formats that covers every decoder.
    """
    if dtype == "float32":
        return ()
    return (
        *few_rows.specs("rmsnorm_gemm_wna16", dtype, SAMPLE if patterns else formats),
        *product_specs(dtype, formats=formats, patterns=patterns),
        *rmsnorm_specs(dtype),
    )


def rmsnorm_gemm_wna16(
    x: Any,
    norm_weight: Any,
    weight: Weight,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Any = None,
    activation: str | None = None,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Normalise rows by their root mean square and multiply them by a quantized weight matrix.

    Parameters
    ----------
    x : (M, K) array of float16 or bfloat16; on NumPy also float32
        The rows may be strided (a view). An array whose last axis is not contiguous is copied.
    norm_weight : (K,) array of x's dtype
    weight : Weight
        A matrix (N, K) in a packed format.
    eps : float
        Added to the mean square.
    weight_offset : float
        Added to `norm_weight` (Gemma stores w - 1).
    bias : (N,) array of x's dtype, optional
    activation : str, optional
        See `gemm_wna16`.
    pdl : bool
        See `gemm_wna16`. Also promises that no running kernel writes `norm_weight`.
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
    Equals `gemm_wna16` of ``rmsnorm(x, norm_weight)`` up to the order of summation: the normalised
    row is rounded to x's dtype before the GEMM.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.weights import FORMATS
    >>> from engine.weights.quantize import quantize
    >>> weight = quantize(np.ones((1, 64), np.float32), FORMATS["mxfp4"])
    >>> x = np.full((1, 64), 3, np.float32)
    >>> rmsnorm_gemm_wna16(x, np.ones(64, np.float32), weight, eps=0.0)
    array([[64.]], dtype=float32)
    """
    call = Contract("rmsnorm_gemm_wna16")
    x = call.array("x", x, "M K", FLOATS, layout="rows")
    on_cpu = call.on_cpu
    if not on_cpu and x.dtype not in HALVES:
        call.check("x", False, "float16 or bfloat16 on CUDA", str(x.dtype))
    norm_weight = call.array("norm_weight", norm_weight, "K", x.dtype)
    weight = check_weight(call, weight)
    call.check("x", call["K"] > 0, "of at least one feature", x.shape)
    call.number("eps", eps, low=0.0)
    call.number("weight_offset", weight_offset)
    columns = check_columns(call, activation, ACTIVATIONS)
    if bias is not None:
        bias = call.array("bias", bias, "N", x.dtype)
    numbers = {"eps": eps, "weight_offset": weight_offset}
    if on_cpu:
        result = _cpu.rmsnorm_gemm_wna16(
            x, norm_weight, weight, bias=bias, activation=activation, **numbers
        )
        return call.finish(out, result, layout="rows")
    out = call.output("out", out, (call["M"], columns), x.dtype, layout="rows")
    operands = Operands(x, weight, out, bias, activation=activation, pdl=pdl)
    norm = Norm(norm_weight, eps, weight_offset)
    # Permuted columns would require a permuted norm weight too.
    fuses = weight.permutation is None and (
        call["M"] <= sm90.max_few_rows(weight.format) or sm90.choose(operands) is None
    )
    config = few_rows.choose(operands, norm) if fuses else None
    if config is not None:
        few_rows.launch(operands, config, norm)
        return out
    x = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    if weight.permutation is not None:
        x = permute_columns(x, weight.permutation)
    launch(Operands(x, weight, out, bias, activation=activation, pdl=pdl))
    return out
