"""gemm_wna16 for many rows on any GPU: the weight is dequantized to scratch, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from engine import device
from engine.dtypes import dtype_name
from engine.kernels._launch import ceil_div
from engine.kernels._workspace import weight_space
from engine.kernels.dequantize import launch as launch_dequantize
from engine.kernels.gemm.gemm import gemm
from engine.kernels.gemm.operands import SWIGLU, Operands
from engine.kernels.swiglu import swiglu
from engine.weights import Weight
from engine.weights.formats import TILE_ROWS

__all__ = ["launch", "parts"]

_PART_BYTES = 64 << 20  # maximum bytes of dequantized rows at a time


def launch(operands: Operands) -> None:
    """Launch on CuPy arrays: dequantize, then multiply."""
    x = operands.x
    weight = operands.weight
    out = operands.out
    n, k = weight.shape
    pieces = list(parts(n, k * x.itemsize))
    if operands.activation == SWIGLU and len(pieces) > 1:
        packed = device.cupy().empty((x.shape[0], n), x.dtype)
        launch(replace(operands, activation=None, out=packed))
        swiglu(packed, out=out)
        return
    for first, last in pieces:
        is_whole = (first, last) == (0, n)
        part = weight if is_whole else rows_of(weight, first, last)
        space = weight_space(ceil_div((last - first) * k * x.itemsize, 4))
        numbers = space.view(x.dtype)[: (last - first) * k].reshape(last - first, k)
        launch_dequantize(part, dtype_name(x.dtype), numbers)
        columns = slice(None) if is_whole else slice(first, last)
        bias = operands.bias
        residual = operands.residual
        gemm(
            x,
            numbers,
            bias=None if bias is None else bias[columns],
            residual=None if residual is None else residual[:, columns],
            activation=operands.activation,
            out_dtype=out.dtype,
            deterministic=operands.deterministic,
            out=out[:, columns],
        )


def parts(n: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of weight rows: whole row tiles, at most _PART_BYTES unless one tile exceeds it.

    Examples
    --------
    >>> list(parts(100, 2048)), list(parts(10000, 8192))
    ([(0, 100)], [(0, 8192), (8192, 10000)])
    """
    rows = max(1, _PART_BYTES // max(1, row_bytes * TILE_ROWS)) * TILE_ROWS
    for first in range(0, n, rows):
        yield first, min(n, first + rows)


def rows_of(weight: Weight, first: int, last: int) -> Weight:
    """Return rows [first, last) of a packed weight; `first` is a multiple of TILE_ROWS."""
    tiles = slice(first // TILE_ROWS, ceil_div(last, TILE_ROWS))

    def cut(plane: Any) -> Any:
        return None if plane is None else plane[tiles]

    return replace(
        weight,
        data=cut(weight.data),
        shape=(last - first, weight.shape[1]),
        scales=cut(weight.scales),
        high=cut(weight.high),
        super_scales=cut(weight.super_scales),
    )
