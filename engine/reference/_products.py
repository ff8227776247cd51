"""GEMM of 8-bit operands: the formula shared by gemm_fp8 and gemm_int8."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from engine.reference.gemm import epilogue
from engine.reference.quantize_rows import quantize_rows
from engine.reference.rmsnorm import rmsnorm

__all__ = ["GROUP", "multiply_8bit", "values_of_codes"]

Array = np.ndarray[Any, Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128  # rows and columns per weight scale block; columns per group of x


def multiply_8bit(
    dtype: str,
    x: Array,
    weight: Array,
    weight_scales: Array,
    *,
    x_scales: Array | None,
    norm_weight: Array | None,
    eps: float,
    weight_offset: float,
    bias: Array | None,
    residual: Array | None,
    activation: str | None,
    out_dtype: Any,
) -> Array:
    """Quantize x unless `x_scales` are given, multiply the codes, apply scales and epilogue."""
    has_blocks = weight_scales.ndim == 2
    group = GROUP if has_blocks or dtype == "int8" else 0
    result_dtype = x.dtype if out_dtype is None else out_dtype
    if x_scales is None:
        if norm_weight is not None:
            x = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
        x, x_scales = quantize_rows(x, dtype=dtype, group=group)
    a = _values(x)
    b = _values(weight)
    y = np.zeros((len(a), len(b)), np.float32)
    if group == 0:
        y += (a @ b.T).astype(np.float32, copy=False) * x_scales * weight_scales
    else:
        for i in range(-(-a.shape[1] // GROUP)):
            columns = slice(i * GROUP, (i + 1) * GROUP)
            part = (a[:, columns] @ b[:, columns].T).astype(np.float32, copy=False)
            part *= x_scales[:, i : i + 1]
            y += part * np.repeat(weight_scales[:, i], GROUP)[: len(b)] if has_blocks else part
        y *= 1 if has_blocks else weight_scales
    return epilogue(y, bias, residual, activation).astype(result_dtype, copy=False)


def values_of_codes(codes: Array, scales: Array) -> Array:
    """Return rows of e4m3 codes with one scale per GROUP columns as float32."""
    of_columns = np.repeat(scales, GROUP, axis=1)[:, : codes.shape[1]]
    return np.asarray(_values(codes) * of_columns, np.float32)


def _values(codes: Array) -> Array:
    """Return the values of codes, in a dtype that makes BLAS sums of products exact.

    int8: float32 holds the sum of 1024 products. e4m3 (bits as uint8): products are multiples of
    2^-18 below 2^18, so float64 holds the sum of 2^17. The order of summation changes no result.
    """
    if codes.dtype == np.int8:
        return codes.astype(np.float32)
    table = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float64)
    values: Array = table[codes]
    return values
