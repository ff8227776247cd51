"""A matrix and its bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.layers.norm import Norm

__all__ = ["Linear"]


class Linear:
    """y = x Wᵀ + b.

    Parameters
    ----------
    weight : (out, in) array
    bias : (out,) array of the same dtype, optional
    deterministic : bool
        Give each token the same bits in any company.
    """

    __slots__ = ("bias", "deterministic", "weight")

    def __init__(self, weight: Any, bias: Any = None, *, deterministic: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.deterministic = deterministic

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the array of everything that it holds."""
        yield "weight", self.weight
        if self.bias is not None:
            yield "bias", self.bias

    def __call__(
        self,
        x: Any,
        *,
        activation: str | None = None,
        out_dtype: Any = None,
        residual: Any = None,
    ) -> Any:
        """Return activation of the product (T, out) of `x` (T, in), in `out_dtype` or x's own.

        A `residual` (T, out) is added to it, overwritten and returned. With "swiglu", the matrix is
        that of gate and up, and the result (T, out / 2).
        """
        return kernels.gemm(
            x,
            self.weight,
            bias=self.bias,
            residual=residual,
            activation=activation,
            out=residual,
            out_dtype=out_dtype,
            deterministic=self.deterministic,
            pdl=True,  # parameters: nothing writes them
        )

    def of_normed(self, x: Any, norm: Norm, *, activation: str | None = None) -> Any:
        """Return activation of the product of ``norm(x)``; with few tokens, in one kernel."""
        return kernels.rmsnorm_gemm(
            x,
            norm.weight,
            self.weight,
            eps=norm.eps,
            weight_offset=norm.offset,
            bias=self.bias,
            activation=activation,
            pdl=True,
        )
