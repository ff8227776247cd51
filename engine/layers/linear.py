"""A matrix and its bias: the product is chosen by the format of the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine import kernels
from engine.errors import WeightsError
from engine.layers.arrays import arrays_of
from engine.layers.norm import Norm
from engine.quantization import Weight

__all__ = ["PRODUCTS", "Linear", "Product"]


@dataclass(frozen=True)
class Product:
    """The ops that multiply by weights of one format.

    Attributes
    ----------
    plain : callable
        ``plain(x, weight, bias=, residual=, activation=, out=, out_dtype=, deterministic=)``: what
        `kernels.gemm` is for a dense weight.
    of_normed : callable
        ``of_normed(x, norm, weight, bias=, activation=)``: the product of ``norm(x)``.
    """

    plain: Callable[..., Any]
    of_normed: Callable[..., Any]


def _dense(x: Any, weight: Weight, **options: Any) -> Any:
    # pdl: the weight and the bias are parameters, which no kernel writes.
    return kernels.gemm(x, weight.data, pdl=True, **options)


def _dense_of_normed(x: Any, norm: Norm, weight: Weight, **options: Any) -> Any:
    return kernels.rmsnorm_gemm(
        x, norm.weight, weight.data, eps=norm.eps, weight_offset=norm.offset, pdl=True, **options
    )


_DENSE = Product(_dense, _dense_of_normed)

PRODUCTS: dict[str, Product] = {"float32": _DENSE, "float16": _DENSE, "bfloat16": _DENSE}
"""Format of a weight, by name -> how it is multiplied."""


class Linear:
    """y = x Wᵀ + b.

    Parameters
    ----------
    weight : Weight
        (out, in).
    bias : Weight, optional
        (out,), dense, of x's dtype.
    deterministic : bool
        Give each token the same bits in any company.

    Raises
    ------
    WeightsError
        If there is no product for the weight's format.
    """

    __slots__ = ("_product", "bias", "deterministic", "weight")

    def __init__(
        self, weight: Weight, bias: Weight | None = None, *, deterministic: bool = False
    ) -> None:
        if weight.format.name not in PRODUCTS:
            raise WeightsError(
                f"weight: format must be one of {', '.join(PRODUCTS)}; got {weight.format.name!r}"
            )
        self.weight = weight
        self.bias = None if bias is None else bias.data
        self.deterministic = deterministic
        self._product = PRODUCTS[weight.format.name]

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the array of everything that it holds."""
        yield from arrays_of({"weight": self.weight})
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
        return self._product.plain(
            x,
            self.weight,
            bias=self.bias,
            residual=residual,
            activation=activation,
            out=residual,
            out_dtype=out_dtype,
            deterministic=self.deterministic,
        )

    def of_normed(self, x: Any, norm: Norm, *, activation: str | None = None) -> Any:
        """Return activation of the product of ``norm(x)``; with few tokens, in one kernel."""
        return self._product.of_normed(x, norm, self.weight, bias=self.bias, activation=activation)
