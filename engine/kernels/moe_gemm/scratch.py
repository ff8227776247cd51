"""moe_gemm of quantized weights on any GPU: dequantizes a few matrices at a time to scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.dtypes import dtype_name
from engine.kernels._launch import ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import weight_space
from engine.kernels.dequantize import launch as dequantize
from engine.kernels.dequantize import specs as dequantize_specs
from engine.kernels.moe_gemm import portable
from engine.kernels.moe_gemm.operands import MoeOperands
from engine.weights.stack import matrices, take_matrices

__all__ = ["launch", "parts", "specs"]

_PART_BYTES = 64 << 20  # maximum bytes of dequantized matrices at a time


def specs(dtype: str, formats: tuple[str, ...]) -> tuple[ModuleSpec, ...]:
    """Return the modules that `launch` may launch for weights of `formats`."""
    return dequantize_specs(dtype, formats=formats)


def launch(operands: MoeOperands) -> None:
    """Launch on CuPy arrays: dequantize a few experts and multiply their rows, in turn."""
    weight = operands.weight
    dtype = dtype_name(operands.x.dtype)
    num_experts, rows, k = weight.shape
    matrix = rows * k
    for first, last in parts(num_experts, matrix * operands.x.itemsize):
        space = weight_space(ceil_div((last - first) * matrix * operands.x.itemsize, 4))
        numbers = space.view(operands.x.dtype)[: (last - first) * matrix]
        numbers = numbers.reshape(last - first, rows, k)
        part = take_matrices(weight, first, last)
        if weight.format.is_packed:
            whole = replace(part, shape=((last - first) * rows, k))
            dequantize(whole, dtype, numbers.reshape(whole.shape))
        else:
            for one, to in zip(matrices(part), numbers, strict=True):
                dequantize(one, dtype, to)
        routing = operands.routing._replace(offsets=operands.routing.offsets[first : last + 1])
        bias = None if operands.bias is None else operands.bias[first:last]
        portable.launch(replace(operands, weight=numbers, routing=routing, bias=bias))


def parts(num_experts: int, matrix_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of experts whose matrices take at most _PART_BYTES; at least one per range.

    Examples
    --------
    >>> list(parts(10, 16 << 20)), list(parts(2, 1 << 30))
    ([(0, 4), (4, 8), (8, 10)], [(0, 1), (1, 2)])
    """
    count = max(1, _PART_BYTES // max(1, matrix_bytes))
    for first in range(0, num_experts, count):
        yield first, min(num_experts, first + count)
