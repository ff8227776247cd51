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
    batch_invariant : bool
        Give each token the same bits in any company.
    """

    __slots__ = ("batch_invariant", "bias", "weight")

    def __init__(self, weight: Any, bias: Any = None, *, batch_invariant: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.batch_invariant = batch_invariant

    def __call__(self, x: Any, *, out_dtype: Any = None) -> Any:
        """Return the product (T, out) of `x` (T, in), in `out_dtype` or x's own."""
        return kernels.gemm(
            x,
            self.weight,
            bias=self.bias,
            out_dtype=out_dtype,
            batch_invariant=self.batch_invariant,
        )
