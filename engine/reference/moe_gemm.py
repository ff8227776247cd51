"""NumPy mirror of `engine.kernels.moe_gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference import _activation
from engine.reference._products import GROUP, values_of_codes
from engine.reference._row_by_row import multiply_row_by_row
from engine.reference.moe_route import Routing
from engine.reference.quantize_rows import quantize_rows
from engine.weights import Weight
from engine.weights.stack import take_matrices
from engine.weights.values import unpack_weight

__all__ = ["moe_gemm"]

Array = np.ndarray[Any, Any]


def moe_gemm(
    x: Array,
    weight: Array | Weight,
    routing: Routing,
    *,
    x_scales: Array | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    scatter: bool = False,
    weighted: bool = True,
    transposed: bool = False,
    deterministic: bool = False,
    quantize_x: bool = False,
    quantize_out: bool = False,
    out_dtype: Any = None,
) -> Any:
    """Multiply each expert's rows by its matrix, in float32, rounded once.

    Token rows (T, K) become rows (P, R) sorted by expert. With `scatter`, rows (P, K) sorted by
    expert become rows (P, R) in pair order, each multiplied by its pair's routing weight unless
    `weighted` is False. With `transposed` the matrices are (K, R). If the offsets are a slice for
    some of the experts, rows of the other experts' pairs are zero here and not written by the
    kernels. With `quantize_x`, x and the matrix have the values of their e4m3 codes. With
    `x_scales`, x are codes. With `quantize_out`, the result is quantized.
    """
    (_, top_k) = routing.experts.shape
    order = routing.order
    offsets = routing.offsets
    num_pairs = len(order)
    num_rows = weight.shape[2 if transposed else 1]
    result_dtype = x.dtype if out_dtype is None else np.dtype(out_dtype)
    has_codes = quantize_x or x_scales is not None
    matrix_dtype = np.dtype(np.float32) if has_codes else x.dtype
    real = accumulation_dtype(result_dtype).type
    if quantize_x:
        x, x_scales = quantize_rows(x, dtype="fp8", group=GROUP)
    if x_scales is not None:
        x = values_of_codes(x, x_scales)
    y = np.zeros((num_pairs, num_rows // 2 if activation else num_rows), real)
    for expert in np.flatnonzero(np.diff(offsets)):
        here = slice(int(offsets[expert]), int(offsets[expert + 1]))
        rows = x[here] if scatter else x[order[here] // top_k]
        matrix = _matrix(weight, int(expert), matrix_dtype)
        matrix = matrix if transposed else matrix.T
        z = _multiply(rows.astype(real, copy=False), matrix, row_by_row=deterministic)
        if bias is not None:
            z += bias[expert].astype(real, copy=False)
        y[here] = _gated(z, activation, real(alpha), real(limit))
    if not scatter:
        y = y.astype(result_dtype)
        return quantize_rows(y, dtype="fp8", group=GROUP) if quantize_out else y
    result = np.empty_like(y, result_dtype)
    result[order] = y * routing.weights.reshape(-1)[order][:, None] if weighted else y
    return result


def _matrix(weight: Array | Weight, expert: int, dtype: Any) -> Array:
    """Return the expert's matrix, not rounded; a quantized matrix is first rounded to `dtype`."""
    if isinstance(weight, Weight):
        numbers = unpack_weight(take_matrices(weight, expert, expert + 1))[0]
        return np.asarray(numbers.astype(dtype).astype(np.float32))
    return np.asarray(weight[expert].astype(accumulation_dtype(dtype), copy=False))


def _multiply(x: Array, matrix: Array, *, row_by_row: bool) -> Array:
    """Multiply, optionally row by row: BLAS's order of summation depends on the row count."""
    return multiply_row_by_row(x, matrix) if row_by_row else np.asarray(x @ matrix)


def _gated(z: Array, activation: str | None, alpha: Any, limit: Any) -> Array:
    """Return act(gate) * up for z = [gate | up]; "swiglu_clamped" is gpt-oss's variant."""
    if activation is None:
        return z
    gate, up = np.split(z, 2, axis=-1)
    if activation == "swiglu":
        return np.asarray(_activation.silu(gate) * up)
    if activation == "geglu":
        return np.asarray(_activation.gelu_tanh(gate) * up)
    gate = np.minimum(gate, limit)
    up = np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # exp may overflow; gate / inf is 0
        return np.asarray((up + 1) * (gate / (1 + np.exp(-alpha * gate))))
