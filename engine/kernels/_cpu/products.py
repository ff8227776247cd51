"""Products with a norm before and an epilogue after them, on float32 rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.kernels._cpu import few_rows
from engine.kernels._cpu.norms import rmsnorm
from engine.kernels._cpu.panels import multiply
from engine.reference.gemm import epilogue
from engine.weights import Weight

__all__ = ["gemm", "gemm_wna16", "rmsnorm_gemm", "rmsnorm_gemm_wna16"]

Array = np.ndarray[Any, Any]

_FLOAT32 = np.dtype(np.float32)


def gemm(
    x: Array,
    weight: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> Array:
    """See `engine.kernels.gemm`."""
    if deterministic or not few_rows.pays(x, weight):
        mirrored: Array = reference.gemm(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation=activation,
            out_dtype=out_dtype,
            deterministic=deterministic,
        )
        return mirrored
    y = _finished(few_rows.multiply_few_rows(x, weight), bias, residual, activation)
    return y.astype(x.dtype if out_dtype is None else out_dtype, copy=False)


def rmsnorm_gemm(
    x: Array,
    norm_weight: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Array | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> Array:
    """See `engine.kernels.rmsnorm_gemm`."""
    normalised = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    options: dict[str, Any] = {"activation": activation, "deterministic": deterministic}
    return gemm(normalised, weight, bias=bias, **options)


def gemm_wna16(
    x: Array,
    weight: Weight,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> Array:
    """See `engine.kernels.gemm_wna16`."""
    panels = weight.panels
    if panels is None or deterministic:
        mirrored: Array = reference.gemm_wna16(
            x,
            weight,
            bias=bias,
            residual=residual,
            activation=activation,
            out_dtype=out_dtype,
            deterministic=deterministic,
        )
        return mirrored
    wide = x.astype(_FLOAT32, copy=False)
    if weight.permutation is not None:
        wide = wide[:, weight.permutation]
    y = _finished(multiply(wide, panels), bias, residual, activation)
    return y.astype(x.dtype if out_dtype is None else out_dtype, copy=False)


def _finished(
    y: Array, bias: Array | None, residual: Array | None, activation: str | None
) -> Array:
    """Return activation(y + bias) + residual; `y` may be overwritten."""
    if activation != "swiglu":
        return epilogue(y, bias, residual, activation)
    return _swiglu(y if bias is None else y + bias)


def _swiglu(y: Array) -> Array:
    """Return silu(gate) * up for float32 rows [gate | up]; gate is overwritten."""
    half = y.shape[1] // 2
    gate = y[:, :half]
    with np.errstate(over="ignore", invalid="ignore"):  # exp may overflow; x / inf is 0
        factor = np.exp(-gate)
        factor += 1
        gate /= factor
        product: Array = gate * y[:, half:]
    return product


def rmsnorm_gemm_wna16(
    x: Array,
    norm_weight: Array,
    weight: Weight,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Array | None = None,
    activation: str | None = None,
) -> Array:
    """See `engine.kernels.rmsnorm_gemm_wna16`."""
    normalised = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    return gemm_wna16(normalised, weight, bias=bias, activation=activation)
