"""A matrix and its bias."""

from __future__ import annotations

from typing import Any

from engine import kernels

__all__ = ["Linear"]


class Linear:
    """y = x Wᵀ + b.

    Parameters
    ----------
    weight : (out, in) array
    bias : (out,) array of the same dtype, optional
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Any, bias: Any = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Any, *, out_dtype: Any = None) -> Any:
        """Return the product (T, out) of `x` (T, in), in `out_dtype` or x's own."""
        return kernels.gemm(x, self.weight, bias=self.bias, out_dtype=out_dtype)
