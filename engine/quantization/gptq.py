"""GPTQ: round a matrix so that the error of its output on typical inputs is minimal.

E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh: "GPTQ: Accurate Post-Training Quantization for
Generative Pre-trained Transformers" (ICLR 2023). Columns are rounded one by one, and the
remaining columns are adjusted to compensate for the error. For inputs X, minimising
|X W' - X W'_rounded| is, for each row of W, a quadratic problem with Hessian H = X' X; the
adjustment after fixing a column is a row of the Cholesky factor of the inverse of H.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.device import array_module
from engine.errors import WeightsError
from engine.weights.formats import Format
from engine.weights.quantize import Codes, round_groups

__all__ = ["Hessian", "gptq"]

_BLOCK = 128  # columns per block; one GEMM applies a block's errors to the remaining columns
_DAMPING = 0.01  # fraction of the diagonal's mean to add to the diagonal
_DAMPINGS = 6  # damping attempts, each 10x the last


class Hessian:
    """The sum X' X over the inputs X of a linear layer.

    Attributes
    ----------
    total : (K, K) array of float32, or None before the first input
    """

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total: Any = None

    def add(self, x: Any) -> None:
        """Accumulate inputs (T, K)."""
        x = x.astype(np.float32)
        product = x.T @ x
        if self.total is None:
            self.total = product
        else:
            self.total += product


def gptq(matrix: Any, hessian: Any, form: Format, *, scale_dtype: str = "") -> Codes:
    """Round a matrix (N, K) to a format, minimising the output error for inputs with this Hessian.

    Parameters
    ----------
    matrix : (N, K) array
        NumPy or CuPy.
    hessian : (K, K) array of float32
        X' X of the inputs; columns whose inputs are all 0 are rounded to nearest.
    form : Format
        A grouped integer format.
    scale_dtype : str
        See `round_to_codes`.

    Raises
    ------
    WeightsError
        If the format is not a grouped integer format, or the matrix or the Hessian contains a NaN
        or infinity.
    """
    if not (form.is_packed and form.code == "int" and form.offset != "min"):
        raise WeightsError(f"format must be one of int4_g* and int8_g*; got {form.name!r}")
    xp = array_module(matrix)
    rest = matrix.astype(np.float32)  # a copy, since the remaining columns are adjusted
    if not bool(xp.isfinite(rest).all()) or not bool(xp.isfinite(hessian).all()):
        raise WeightsError("matrix and inputs must have finite numbers only; they have others")
    factor = _factor(hessian)
    rows, columns = rest.shape
    groups = -(-columns // form.group)
    codes = xp.empty((rows, columns), "i1" if form.bits == 8 else "u1")
    scales = xp.empty((rows, groups), np.float32)
    zeros = xp.full((rows, groups), np.float32(form.zero))
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        part = slice(first, last)
        errors = xp.empty((rows, last - first), np.float32)
        for start in range(first, last, form.group):  # a block consists of whole groups
            group = slice(start, min(start + form.group, last))
            made = round_groups(rest[:, None, group], form, scale_dtype)
            index = start // form.group
            scales[:, index] = made.scales[:, 0]
            if made.offsets is not None:
                zeros[:, index] = made.offsets[:, 0]
            grid = scales[:, index], zeros[:, index], form.code_range
            for k in range(group.start, group.stop):
                codes[:, k], error = _round_column(rest[:, k], *grid)
                errors[:, k - first] = error = error / factor[k, k]
                if k + 1 < last:
                    rest[:, k + 1 : last] -= error[:, None] * factor[k, k + 1 : last]
        rest[:, last:] -= errors @ factor[part, last:]
    return Codes(codes, scales, zeros if form.offset else None)


def _round_column(
    numbers: Any, scales: Any, zeros: Any, code_range: tuple[int, int]
) -> tuple[Any, Any]:
    """Return a column's nearest codes, as float32, and its rounding errors."""
    xp = array_module(numbers)
    codes = xp.rint(numbers / xp.where(scales == 0, np.float32(1), scales) + zeros)
    codes = xp.clip(codes, *code_range)
    return codes, numbers - (codes - zeros) * scales


def _factor(hessian: Any) -> Any:
    """Return the upper U (K, K) float32 with U' U = inverse of the damped Hessian.

    U is the inverse of R, the upper factor in H = R R', so H itself is never inverted.
    """
    xp = array_module(hessian)
    exact = hessian.astype(np.float64)
    diagonal = xp.diagonal(exact).copy()
    is_dead = diagonal <= 0
    mean = float(diagonal.mean()) or 1.0
    every = xp.arange(len(diagonal))
    for step in range(_DAMPINGS):
        exact[every, every] = xp.where(is_dead, mean, diagonal) + _DAMPING * 10**step * mean
        try:
            factor = xp.linalg.inv(xp.linalg.cholesky(exact[::-1, ::-1])[::-1, ::-1])
        except np.linalg.LinAlgError:
            continue
        if bool(xp.isfinite(factor).all()):  # CuPy returns NaN instead of raising
            return xp.triu(factor).astype(np.float32)
    raise WeightsError("the Hessian of the inputs must be positive definite; it is not")
